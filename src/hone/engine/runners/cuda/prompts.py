"""Prompts laid end to end for the kernels: which token stands where, and which tokens attend together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.runner import PromptChunk
from hone.engine.runners.cuda.attention_launch import QUERIES

Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)


@dataclass(frozen=True, slots=True)
class PagedChunk:
    """Tokens start to end of a prompt, and the blocks they go to."""

    prompt: tuple[int, ...]
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """One forward pass: int32 arrays, padded to the size of a captured graph."""

    whole: NDArray[np.int32]  # the three below, one after the other, so that one copy takes them to the device
    tokens: NDArray[np.int32]  # [3, T]  token, position, owner; owner -1: padding
    tiles: NDArray[np.int32]  # [tiles, 4]  owner, first token, its position, tokens
    table: NDArray[np.int32]  # [prompts, blocks]

    @staticmethod
    def blank(size: int, prompts: int, width: int) -> "Laid":
        whole = np.zeros(length(size, prompts, width), dtype=np.int32)
        return Laid(whole, *cut(whole, size, prompts, width))


def length(size: int, prompts: int, width: int) -> int:
    """The length of the whole."""
    return 3 * size + 4 * tiles_for(size, prompts) + prompts * width


def cut(whole: Numbers, size: int, prompts: int, width: int) -> tuple[Numbers, Numbers, Numbers]:
    """Tokens, tiles and table, as views; whole may be longer."""
    first, second, third = 3 * size, length(size, prompts, 0), length(size, prompts, width)
    tokens, tiles, table = whole[:first], whole[first:second], whole[second:third]
    return tokens.reshape(3, size), tiles.reshape(-1, 4), table.reshape(prompts, width)


def passes(parts: Sequence[PromptChunk], room: int) -> Iterator[list[PagedChunk]]:
    """The parts without what is held back (each prompt's last token), at most `room` tokens a pass."""
    pieces, left = list[PagedChunk](), room
    for part in parts:
        start, last = part.start, min(part.end, len(part.prompt) - 1)
        while start < last:
            end = min(last, start + left)
            pieces.append(PagedChunk(part.prompt, start, end, part.blocks))
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


def lay(pieces: Sequence[PagedChunk], *, size: int, prompts: int, width: int) -> Laid:
    """The pieces in `size` tokens and `prompts` lines of a table `width` blocks wide."""
    laid, numbers = Laid.blank(size, prompts, width), np.arange(len(pieces))
    start = np.array([piece.start for piece in pieces], dtype=np.int64)
    count = np.array([piece.end for piece in pieces], dtype=np.int64) - start
    at, total = np.cumsum(count) - count, int(count.sum())
    read = chain.from_iterable(piece.prompt[piece.start : piece.end] for piece in pieces)
    laid.tokens[0, :total] = np.fromiter(read, np.int32, total)
    laid.tokens[1, :total] = np.arange(total) - np.repeat(at - start, count)
    laid.tokens[2, :total] = np.repeat(numbers, count)
    laid.tokens[2, total:] = -1
    cut = -(-count // QUERIES)
    owner = np.repeat(numbers, cut)
    first = QUERIES * (np.arange(len(owner)) - np.repeat(np.cumsum(cut) - cut, cut))
    tiles = (owner, at[owner] + first, start[owner] + first, np.minimum(QUERIES, count[owner] - first))
    laid.tiles[: len(owner)] = np.stack(tiles, axis=1)
    write_lines(laid.table, [piece.blocks for piece in pieces])
    return laid


def write_lines(table: NDArray[np.int32], lines: Sequence[Sequence[int]]) -> None:
    """Each at the beginning of its line of the table, whose rest stays."""
    count = np.array([len(line) for line in lines], dtype=np.int64)
    there = np.arange(table.shape[1]) < count[:, None]
    table[: len(lines)][there] = np.fromiter(chain.from_iterable(lines), np.int32, int(count.sum()))
