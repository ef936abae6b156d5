"""What the engine asks of a model: prompts in, then one token a row at a time. The engine hands out rows and blocks,
the runner fills them; it decides nothing, so that the same plan gives the same tokens."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hone.engine.params import SampleParams

Switch = Callable[[str | None], AbstractContextManager[None]]  # inside, an adapter is on; None: the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A request that begins to write in `row` once its prompt is in its blocks."""

    row: int
    request: int  # its random numbers are those of (params.seed, request)
    params: SampleParams
    limit: int  # the most tokens it writes
    blocks: tuple[int, ...]  # for the prompt and `limit` tokens, in order; blocks may be shared inside the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """The prompt tokens from `start` to `end`, computed now; the ones before are in the blocks already.

    seats: who reads on from here; () while more of the prompt follows. Where a seat's block differs from the prompt's
    within the prompt (the last one, half filled), the runner copies its columns.
    """

    prompt: tuple[int, ...]
    start: int
    end: int
    blocks: tuple[int, ...]
    seats: tuple[Seat, ...] = ()
    copy: tuple[int, int, int] | None = None  # (from, to, columns): before anything else, columns of another's block


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """What one launch wrote: n entries, one a row that wrote a token."""

    row: NDArray[np.int64]  # [n]
    token: NDArray[np.int64]  # [n]
    logp: NDArray[np.float64]  # [n]  under the distribution it was drawn from
    raw: NDArray[np.float64]  # [n]  under softmax(logits): no temperature, no truncation, no penalty
    ended: NDArray[np.bool_]  # [n]  the row wrote a stop token or reached its limit, and writes no more
    top_token: NDArray[np.int64] | None = None  # [n, k]  the most probable under softmax(logits), best first
    top_logp: NDArray[np.float64] | None = None  # [n, k]
    # by entry, the tokens that could have been drawn; empty for a row that did not ask, None where none did
    support: list[NDArray[np.int32]] | None = None


class Ticket(Protocol):
    """The result of a launch, perhaps still being computed."""

    def read(self) -> LaunchResult:
        """Wait for it."""
        ...


class Runner(Protocol):
    """A model with KV memory: `num_blocks` blocks of `block_size` columns, and `max_rows` rows that decode together.

    Where block_size == capacity a row's memory is its one block, and the engine gives row r block r.
    A row that is not seated, or has ended, computes rubbish that reaches nobody.
    """

    max_rows: int
    num_blocks: int
    block_size: int
    capacity: int  # the most columns of one sequence: no more than the model's context
    prefill_tokens: int  # prompt tokens that one launch reads well
    prefill_launches: int  # such launches one after the other, before rows that write go on
    most_stops: int | None  # stop tokens that a request may have; None: any number
    held_back: int  # 1: a prompt's last token is read by the first decode, which then writes the first token; else 0
    keeps_written: bool  # a prompt may go on from what a row wrote; not where that changes bits the mode promises
    records_support: bool  # it can tell which tokens top-k, top-p and min-p leave to draw from
    lag: int  # launches the engine keeps in flight before it reads the oldest; 0: read at once

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
        """Row `a` goes on as row `b`, free so far, for each (a, b); where a row is its block, the block moves too."""
        ...

    def stop(self, rows: Sequence[int]) -> None:
        """These rows write no more, whatever they were doing: cancelled, or ended by a stop string."""
        ...
