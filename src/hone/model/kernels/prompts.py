"""Prompts laid end to end for the kernels: which token stands where, and which tokens attend together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hone.model.kernels.attend import QUERIES
from hone.rollout.runner import Part


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start to end of a prompt, and the blocks they go to."""

    prompt: tuple[int, ...]
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """One forward pass: int32 arrays, padded to the size of a captured graph."""

    tokens: NDArray[np.int32]  # [3, T]  token, position, owner; owner -1: padding
    tiles: NDArray[np.int32]  # [tiles, 4]  owner, first token, its position, tokens
    table: NDArray[np.int32]  # [prompts, blocks]


def passes(parts: Sequence[Part], room: int) -> Iterator[list[Piece]]:
    """The parts without what is held back (each prompt's last token), at most `room` tokens a pass."""
    pieces, left = list[Piece](), room
    for part in parts:
        start, last = part.start, min(part.end, len(part.prompt) - 1)
        while start < last:
            end = min(last, start + left)
            pieces.append(Piece(part.prompt, start, end, part.blocks))
            left -= end - start
            start = end
            if not left:
                yield pieces
                pieces, left = [], room
    if pieces:
        yield pieces


def tiles_for(tokens: int, prompts: int) -> int:
    """Enough tiles for so many tokens of so many prompts."""
    return tokens // QUERIES + prompts


def lay(pieces: Sequence[Piece], *, size: int, prompts: int, width: int) -> Laid:
    """The pieces in `size` tokens and `prompts` lines of a table `width` blocks wide."""
    tokens = np.zeros((3, size), dtype=np.int32)
    tokens[2] = -1
    table = np.zeros((prompts, width), dtype=np.int32)
    tiles = np.zeros((tiles_for(size, prompts), 4), dtype=np.int32)
    at = tile = 0
    for owner, piece in enumerate(pieces):
        count = piece.end - piece.start
        tokens[0, at : at + count] = piece.prompt[piece.start : piece.end]
        tokens[1, at : at + count] = np.arange(piece.start, piece.end)
        tokens[2, at : at + count] = owner
        table[owner, : len(piece.blocks)] = piece.blocks
        for first in range(0, count, QUERIES):
            tiles[tile] = (owner, at + first, piece.start + first, min(QUERIES, count - first))
            tile += 1
        at += count
    return Laid(tokens, tiles, table)
