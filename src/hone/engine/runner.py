"""What the engine asks of a model: to read prompts, and then to write one token a row.

The engine decides about rows and blocks. A runner fills them and decides nothing, so the same plan gives the same
tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import SampleParams

Switch = Callable[[str | None], AbstractContextManager[None]]  # turns an adapter on inside; None: the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A request that begins to write in `row` once its prompt is in its blocks."""

    row: int
    random_id: int  # it draws the random numbers of (params.seed, random_id)
    params: SampleParams
    limit: int  # the most tokens it writes
    blocks: tuple[int, ...]  # for the prompt and `limit` tokens, in order; those of the prompt may be shared


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The prompt tokens from `start` to `end`, to be computed now. Those before are in the blocks already.

    seats: the requests that begin to write after this part; () if more of the prompt follows. The block at the end of
    a prompt, half filled, is not shared: the runner copies its columns into each seat's own block.
    """

    prompt: tuple[int, ...]
    start: int
    end: int
    blocks: tuple[int, ...]
    seats: tuple[Seat, ...] = ()
    copy: tuple[int, int, int] | None = None  # (from, to, columns): first copy these columns from block to block


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """What one launch wrote: an entry for each of the n rows that wrote a token."""

    row: NDArray[np.int64]  # [n]
    token: NDArray[np.int64]  # [n]
    logp: NDArray[np.float64]  # [n]  under the distribution that the token was drawn from
    raw: NDArray[np.float64]  # [n]  under softmax(logits): no temperature, no truncation, no penalty
    ended: NDArray[np.bool_]  # [n]  whether the row wrote a stop token or reached its limit
    top_token: NDArray[np.int64] | None = None  # [n, k]  the most probable under softmax(logits), best first
    top_logp: NDArray[np.float64] | None = None  # [n, k]
    # the tokens that each row could have drawn; empty for a row that did not ask, None if no row did
    support: list[NDArray[np.int32]] | None = None


class Ticket(Protocol):
    """A launch that may still be running."""

    def read(self) -> LaunchResult:
        """Wait for its result."""
        ...


class Runner(Protocol):
    """A model with KV memory: `num_blocks` blocks of `block_size` columns, and `max_rows` rows that decode together.

    If block_size == capacity, a row's memory is one block, and the engine gives row r block r.
    What a row computes before it has a seat, or after it has ended, is never read.
    """

    max_rows: int
    num_blocks: int
    block_size: int
    capacity: int  # the most columns of one sequence: no more than the model's context
    prefill_tokens: int  # prompt tokens in one launch, at most
    prefill_launches: int  # launches of prompts before the next decode, at most
    most_stops: int | None  # stop tokens that a request may have; None: any number
    held_back: int  # 1: the first decode reads the prompt's last token and writes the first one; 0: prefill does both
    keeps_written: bool  # whether a prompt may share what a row wrote: not if that would change promised bits
    records_support: bool  # whether it reports which tokens top-k, top-p and min-p leave to draw from
    lag: int  # launches that the engine keeps in flight before it reads the oldest; 0: it reads at once

    def use(self, adapter: str | None) -> None:
        """From now on compute with this adapter; None: the weights as they are. HoneError where there is none."""
        ...

    def prefill(self, parts: Sequence[PromptChunk]) -> Ticket:
        """Compute the parts, and draw the first token of each seat, unless the prompt's last token is held back."""
        ...

    def decode(self, rows: int) -> Ticket:
        """One more token for each row in [0, rows) that is seated and has not ended."""
        ...

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Row `a` goes on as row `b`, which was free, for each (a, b). If a row is its block, the block moves too."""
        ...

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more: they were cancelled, or ended by a stop string."""
        ...
