"""The scheduler decides which requests run, in which rows and blocks, and what to launch next.

Its plan depends only on what was submitted and read, in that order. It never looks at a clock: the same calls give the
same plan. Requests that wait for a row are queued by adapter. Those of one prompt wait together.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from hone.engine.blocks import CHUNK, BlockPool, CachedChunk, Key, claim_blocks, claim_rows
from hone.engine.requests import Request
from hone.engine.runner import PromptChunk, Runner, Seat

SWITCH_AFTER = 64  # launches that a request of another adapter waits before this adapter admits no more
COMPACT_BELOW = 0.7  # close the gaps when a smaller share of rows still writes; on a CPU 0.65 and 0.75 were fastest
# Prompts are read once this share of the rows is free. Let a launch of prompts cost c steps, and a completion have L
# tokens. With a share r, a token then costs 1 + c / (L r) + r / 2 steps. The minimum is at r = sqrt(2 c / L), which is
# 1 / 8 for c = 1 and L = 128. Fewer free rows are enough if their prompts fill a launch.
REFILL = 1 / 8
PATIENCE = 32  # launches after which one free row is enough
LOOK_AHEAD = 64  # prompts that may be skipped because another one with the same beginning is being read


@dataclass(slots=True, eq=False)
class Waiting:
    """Requests of one prompt, submitted together."""

    prompt: tuple[int, ...]
    adapter: str | None
    since: int  # the launch at which they were submitted
    requests: dict[int, Request] = field(default_factory=dict[int, Request])


@dataclass(slots=True, eq=False)
class _AdapterQueue:
    """The groups that wait for one adapter, in order."""

    groups: dict[Waiting, None] = field(default_factory=dict[Waiting, None])
    count: int = 0  # requests in them

    @property
    def first(self) -> Waiting:
        return next(iter(self.groups))


class Queues:
    """First come, first served within an adapter. `adapter` is the one being served."""

    def __init__(self) -> None:
        self.adapter: str | None = None
        self.by_adapter: dict[str | None, _AdapterQueue] = {}  # no queue is empty
        self.served_since = 0  # the launch at which `adapter` began

    def __len__(self) -> int:
        return sum(line.count for line in self.by_adapter.values())

    @property
    def count(self) -> int:
        """Requests that wait for the adapter being served."""
        return self.by_adapter[self.adapter].count if self.adapter in self.by_adapter else 0

    def add(self, requests: Iterable[Request], now: int) -> dict[int, Waiting]:
        """Put them at the end, those of one prompt together. Returns the group of each."""
        groups: dict[tuple[str | None, tuple[int, ...]], Waiting] = {}
        owner: dict[int, Waiting] = {}
        last: Waiting | None = None
        for request in requests:
            # most requests belong to the same group as the one before: that is checked first, because it is quick
            if last is None or request.prompt is not last.prompt or request.adapter != last.adapter:
                key = request.adapter, request.prompt
                last = groups.get(key) or groups.setdefault(key, self._begin(request, now))
            last.requests[request.id] = request
            owner[request.id] = last
        for group in groups.values():
            self.by_adapter[group.adapter].count += len(group.requests)
        return owner

    def _begin(self, request: Request, now: int) -> Waiting:
        """A new group at the end of its adapter's queue."""
        group = Waiting(request.prompt, request.adapter, now)
        self.by_adapter.setdefault(request.adapter, _AdapterQueue()).groups[group] = None
        return group

    def leave(self, group: Waiting, ids: Iterable[int]) -> None:
        """These requests of the group wait no more."""
        line = self.by_adapter[group.adapter]
        for number in ids:
            del group.requests[number]
            line.count -= 1
        if not group.requests:
            del line.groups[group]
        if not line.groups:
            del self.by_adapter[group.adapter]

    def ahead(self, most: int) -> Iterator[Waiting]:
        """The first groups of the adapter being served. Groups may leave during the iteration."""
        line = self.by_adapter.get(self.adapter)
        return iter(list(islice(line.groups, most)) if line else [])

    def overdue(self, now: int) -> bool:
        """Whether another adapter has waited long enough since this one began."""
        if len(self.by_adapter) <= (self.adapter in self.by_adapter):
            return False
        others = (line.first.since for adapter, line in self.by_adapter.items() if adapter != self.adapter)
        return now - max(min(others), self.served_since) >= SWITCH_AFTER

    def turn(self, now: int) -> bool:
        """Serve the adapter that has waited longest, if this one is done or overdue. Returns whether it changed.

        No request may have a row then.
        """
        if self.adapter in self.by_adapter and not self.overdue(now):
            return False
        others = [line.first for adapter, line in self.by_adapter.items() if adapter != self.adapter]
        if not others:
            return False
        self.adapter, self.served_since = min(others, key=lambda group: group.since).adapter, now
        return True


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request with a row, and with blocks for all that it may write."""

    request: Request
    row: int
    limit: int
    blocks: tuple[int, ...]
    pending: "PendingPrompt | None" = None  # its prompt, while that is being read
    cancelled: bool = False  # while its prompt was being read: the row is freed after the prompt's last part
    line: int = -1  # of the engine's Record


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """A prompt that is being read into the blocks of its first request. `done` columns are in memory already."""

    prompt: tuple[int, ...]
    adapter: str | None
    requests: list[ActiveRequest]
    done: int
    copy: tuple[int, int, int] | None = None


@dataclass(slots=True)
class Prefill:
    """One launch of prompts."""

    budget: int
    parts: list[PromptChunk] = field(default_factory=list[PromptChunk])
    begin: list[ActiveRequest] = field(default_factory=list[ActiveRequest])  # these write their first token
    read: list[PendingPrompt] = field(default_factory=list[PendingPrompt])
    new_keys: set[Key] = field(default_factory=set[Key])  # the first chunk that each prompt adds to the index


class Scheduler:
    """Rows, blocks and queues. The engine asks for `prefill`, then for `decode`, and launches what they say."""

    def __init__(self, runner: Runner) -> None:
        self.block_size, self.capacity = runner.block_size, runner.capacity
        self.slab = runner.block_size == runner.capacity  # a row is its block
        self.max_rows = min(runner.max_rows, runner.num_blocks) if self.slab else runner.max_rows
        self.held_back, self.prefill_tokens = runner.held_back, runner.prefill_tokens
        self._pool, self.queues = BlockPool(runner.num_blocks, slab=self.slab), Queues()
        self._returned: list[int] = []  # blocks to release before the pool is looked at
        self.rows = list(range(self.max_rows))  # the free ones, a heap
        self.by_row: list[ActiveRequest | None] = [None] * self.max_rows
        self.tokens_left = np.zeros(self.max_rows, dtype=np.int64)  # by row, those that no launch writes yet
        self.pending: list[PendingPrompt] = []
        self.owner: dict[int, Waiting | ActiveRequest] = {}  # every request in the engine
        self.launches = self.last_admission = 0
        self.computed = self.saved = 0  # prompt tokens
        self.requests_begun = 0
        self.starved = False  # the first in the queue lacks blocks

    @property
    def pool(self) -> BlockPool:
        """Who holds which block. Blocks of requests that ended are released here, on the next look at the pool: where a
        thousand requests end together, their last outputs do not wait for ten thousand blocks."""
        if self._returned:
            self._pool.release(self._returned)
            self._returned.clear()
        return self._pool

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return self.max_rows - len(self.rows)

    def limit(self, request: Request) -> int:
        """The most tokens it may write."""
        return min(request.params.max_tokens, self.capacity - len(request.prompt))

    def blocks_for(self, request: Request) -> int:
        """For its prompt and all it may write."""
        return math.ceil((len(request.prompt) + self.limit(request)) / self.block_size)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue them."""
        self.owner |= self.queues.add(requests, self.launches)

    def cancel(self, number: int) -> ActiveRequest | None:
        """Take a request out. Returns it if it was writing, because its row must be stopped."""
        owner = self.owner.pop(number)
        if isinstance(owner, Waiting):
            self.queues.leave(owner, [number])
            self.starved = False  # the request that is first now may need fewer blocks
            return None
        if owner.pending is None:
            self._free(owner)
            return owner
        owner.cancelled = True
        if all(active.cancelled for active in owner.pending.requests):
            self.pending.remove(owner.pending)
            self._free(*owner.pending.requests)
        return None

    def keep(self, active: ActiveRequest, written: Sequence[int]) -> None:
        """Index what the request read and wrote, for later prompts that begin with it, until its blocks are reused."""
        if written:
            tokens = (*active.request.prompt, *written)
            self.pool.index.add(active.request.adapter, tokens, len(tokens), active.blocks)

    def release(self, *requests: ActiveRequest) -> None:
        """Give back the memory of requests that wrote their last tokens."""
        for active in requests:
            del self.owner[active.request.id]
        self._free(*requests)

    def turn(self) -> bool:
        """Serve another adapter, `queues.adapter`, if it is time. Returns whether it changed."""
        return not self.running and self.queues.turn(self.launches)

    def prefill(self) -> Prefill:
        """The prompts to read in the next launch: pending ones first, then as many others as there is room for."""
        launch = Prefill(self.prefill_tokens)
        for pending in list(self.pending):
            self._read(pending, self.pool.index.find(pending.adapter, pending.prompt), launch)
        if launch.budget > 0 and self._may_admit():
            self._admit(launch)
        for pending in launch.read:  # last, because a prompt cannot share what another one reads in the same launch
            self._add_to_index(pending)
        return launch

    def decode(self) -> tuple[list[tuple[int, int]], int]:
        """Rows to move first, and how many rows to decode then. 0: no row has a token left to write."""
        live = self.tokens_left.nonzero()[0]
        if not len(live):
            return [], 0
        moves: list[tuple[int, int]] = []
        if len(live) < COMPACT_BELOW * (live[-1] + 1) and not self._refilling():
            moves = self._close_gaps(live.tolist())
            live = self.tokens_left.nonzero()[0]
        self.tokens_left -= self.tokens_left > 0
        return moves, int(live[-1]) + 1

    def _refilling(self) -> bool:
        """Whether waiting requests will soon take the free rows."""
        return bool(self.queues.count) and not self.starved and not self.queues.overdue(self.launches)

    def _may_admit(self) -> bool:
        """Whether enough rows are free to read prompts: a share of them, all that is needed, or one for a long time."""
        if not self.rows or not self._refilling():
            return False
        # requests to a launch, so far
        full = math.ceil(self.prefill_tokens * self.requests_begun / max(self.computed, 1))
        few = min(self.queues.count, math.ceil(REFILL * self.max_rows), full)
        return len(self.rows) >= few or self.launches - self.last_admission >= PATIENCE

    def _admit(self, launch: Prefill) -> None:
        index = self.pool.index
        for group in self.queues.ahead(self.max_rows + LOOK_AHEAD):
            chunks = index.find(group.adapter, group.prompt)
            more = launch.new_keys and (len(group.prompt) - 1) // CHUNK > len(chunks)
            if more and index.next_key(group.adapter, group.prompt, chunks) in launch.new_keys:
                continue  # it waits for the prompt that is read now, and then has less to read itself
            tokens = len(group.prompt) - CHUNK * len(chunks)
            if tokens > launch.budget and launch.parts:
                return  # a prompt is not cut if it fits into a launch of its own
            requests, copy = self._claim(group, chunks)
            if not requests:
                self.starved = True
                return
            self.queues.leave(group, [active.request.id for active in requests])
            self.owner |= {active.request.id: active for active in requests}
            self.last_admission = self.launches
            self._read(self._begin(group, requests, CHUNK * len(chunks), copy), chunks, launch)
            if not self.rows or launch.budget <= 0:
                return

    def _claim(
        self, group: Waiting, chunks: list[CachedChunk]
    ) -> tuple[list[ActiveRequest], tuple[int, int, int] | None]:
        """Rows and blocks for as many of the group as possible, and the columns to copy before reading."""
        waiting = list(islice(group.requests.values(), len(self.rows)))
        limits, copy = [self.limit(request) for request in waiting], None
        if self.slab:
            rows = [heapq.heappop(self.rows) for _ in waiting]
            copy = claim_rows(self.pool, rows, chunks)
            blocks = [(row,) for row in rows]
        else:
            blocks = claim_blocks(self.pool, len(group.prompt), limits, chunks, held_back=self.held_back)
            rows = [heapq.heappop(self.rows) for _ in blocks]
        taken = zip(waiting, rows, limits, blocks, strict=False)  # where blocks are short, the last requests wait on
        requests = [ActiveRequest(request, row, limit, held) for request, row, limit, held in taken]
        for active in requests:
            self.by_row[active.row] = active
        return requests, copy

    def _begin(
        self, group: Waiting, requests: list[ActiveRequest], columns: int, copy: tuple[int, int, int] | None
    ) -> PendingPrompt:
        pending = PendingPrompt(group.prompt, group.adapter, requests, columns, copy)
        self.pending.append(pending)
        for active in requests:
            active.pending = pending
        self.requests_begun += len(requests)
        self.computed += len(group.prompt) - columns
        self.saved += columns + (len(requests) - 1) * len(group.prompt)
        return pending

    def _read(self, pending: PendingPrompt, chunks: list[CachedChunk], launch: Prefill) -> None:
        """Add the next part of a prompt to the launch. chunks: those of the prompt that are in memory already."""
        if launch.budget <= 0:
            return
        start = pending.done
        pending.done = min(len(pending.prompt), start + launch.budget)
        launch.budget -= pending.done - start
        if (len(pending.prompt) - self.held_back) // CHUNK > len(chunks):
            launch.new_keys.add(self.pool.index.next_key(pending.adapter, pending.prompt, chunks))
        last = pending.done == len(pending.prompt)
        requests = [active for active in pending.requests if not active.cancelled] if last else []
        part = PromptChunk(
            prompt=pending.prompt,
            start=start,
            end=pending.done,
            blocks=pending.requests[0].blocks[: math.ceil(len(pending.prompt) / self.block_size)],
            seats=tuple(map(_seat, requests)),
            copy=pending.copy,
        )
        pending.copy = None
        launch.parts.append(part)
        launch.begin += requests
        launch.read.append(pending)

    def _add_to_index(self, pending: PendingPrompt) -> None:
        """Index the part that is launched. After the prompt's last part, its requests write."""
        index, last = self.pool.index, pending.done == len(pending.prompt)
        columns = min(pending.done, len(pending.prompt) - self.held_back)
        index.add(pending.adapter, pending.prompt, columns, pending.requests[0].blocks)
        for active in pending.requests[1:] if self.slab and last else ():
            if not active.cancelled:  # each row that writes has its own copy
                index.add(pending.adapter, pending.prompt, columns, active.blocks)
        if not last:
            return
        self.pending.remove(pending)
        for active in pending.requests:
            active.pending = None
            self.tokens_left[active.row] = active.limit - 1 + self.held_back
            if active.cancelled:
                self._free(active)

    def _free(self, *requests: ActiveRequest) -> None:
        self.tokens_left[[active.row for active in requests]] = 0
        for active in requests:
            self.by_row[active.row] = None
            heapq.heappush(self.rows, active.row)
            self._returned += reversed(active.blocks)
        self.starved = False

    def _close_gaps(self, live: list[int]) -> list[tuple[int, int]]:
        """Move the highest rows that write to the lowest free ones."""
        moves: list[tuple[int, int]] = []
        for a in reversed(live):
            if not self.rows or self.rows[0] > a:
                break
            b, active = heapq.heapreplace(self.rows, a), self.by_row[a]
            assert active is not None
            self.by_row[b], self.by_row[a], active.row = active, None, b
            self.tokens_left[b], self.tokens_left[a] = self.tokens_left[a], 0
            if self.slab:
                self.pool.move(a, b)
                active.blocks = (b,)
            moves.append((a, b))
        return moves


def _seat(active: ActiveRequest) -> Seat:
    request = active.request
    random_id = request.id if request.random_id is None else request.random_id
    return Seat(row=active.row, random_id=random_id, params=request.params, limit=active.limit, blocks=active.blocks)
