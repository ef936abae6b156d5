"""Which requests run, in which rows and blocks, and what to launch next. The plan depends on what was submitted and on
what was read, in that order, and never on the time it took: the same calls give the same plan.

Requests that wait for a row are queued by adapter, those of one prompt together."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from hone.engine.blocks import CHUNK, BlockPool, CachedChunk, Key, claim_blocks, claim_rows
from hone.engine.requests import Request
from hone.engine.runner import PromptChunk, Runner, Seat

SWITCH_AFTER = 64  # launches that a request of another adapter waits before admission stops
COMPACT_BELOW = 0.7  # close the gaps when a smaller share of the rows still writes; on a CPU 0.65 and 0.75 were fastest
# The share of the rows that is free before prompts are read. With a share r, a launch of prompts that costs c steps and
# completions of L tokens, a token costs 1 + c / (L r) + r / 2 steps: the least at r = sqrt(2 c / L); c = 1, L = 128.
# Fewer rows are enough where their prompts fill a launch: more would only need another one.
REFILL = 1 / 8
PATIENCE = 32  # launches after which one free row is enough
LOOK_AHEAD = 64  # prompts passed over because another that begins as they do is being read


@dataclass(slots=True, eq=False)
class Waiting:
    """Requests of one prompt, submitted together."""

    prompt: tuple[int, ...]
    adapter: str | None
    since: int  # the launch at which it came
    requests: dict[int, Request] = field(default_factory=dict[int, Request])


@dataclass(slots=True, eq=False)
class _Line:
    """What waits for one adapter, in order."""

    groups: dict[Waiting, None] = field(default_factory=dict[Waiting, None])
    count: int = 0  # requests in them

    @property
    def first(self) -> Waiting:
        return next(iter(self.groups))


class Queues:
    """First come, first served within an adapter; `adapter` is the one being served."""

    def __init__(self) -> None:
        self.adapter: str | None = None
        self.lines: dict[str | None, _Line] = {}  # none is empty
        self.turned = 0  # the launch at which `adapter` began

    def __len__(self) -> int:
        return sum(line.count for line in self.lines.values())

    @property
    def count(self) -> int:
        """Requests that wait for the adapter being served."""
        return self.lines[self.adapter].count if self.adapter in self.lines else 0

    def add(self, requests: Iterable[Request], now: int) -> dict[int, Waiting]:
        """Put them at the end, those of one prompt together; the group of each."""
        groups: dict[tuple[str | None, tuple[int, ...]], Waiting] = {}
        owner: dict[int, Waiting] = {}
        last: Waiting | None = None
        for request in requests:
            # mostly the group of the request before, which is quickly seen
            if last is None or request.prompt is not last.prompt or request.adapter != last.adapter:
                key = request.adapter, request.prompt
                last = groups.get(key) or groups.setdefault(key, self._begin(request, now))
            last.requests[request.id] = request
            owner[request.id] = last
        for group in groups.values():
            self.lines[group.adapter].count += len(group.requests)
        return owner

    def _begin(self, request: Request, now: int) -> Waiting:
        """A group of its own, at the end of its adapter's line."""
        group = Waiting(request.prompt, request.adapter, now)
        self.lines.setdefault(request.adapter, _Line()).groups[group] = None
        return group

    def leave(self, group: Waiting, ids: Iterable[int]) -> None:
        """These requests of the group wait no more."""
        line = self.lines[group.adapter]
        for number in ids:
            del group.requests[number]
            line.count -= 1
        if not group.requests:
            del line.groups[group]
        if not line.groups:
            del self.lines[group.adapter]

    def ahead(self, most: int) -> Iterator[Waiting]:
        """The groups of the adapter being served, from the first; they may leave meanwhile."""
        line = self.lines.get(self.adapter)
        return iter(list(islice(line.groups, most)) if line else [])

    def overdue(self, now: int) -> bool:
        """Whether another adapter has waited long enough since this one began. So each gets its turn."""
        if len(self.lines) <= (self.adapter in self.lines):
            return False
        others = (line.first.since for adapter, line in self.lines.items() if adapter != self.adapter)
        return now - max(min(others), self.turned) >= SWITCH_AFTER

    def turn(self, now: int) -> bool:
        """If this adapter is done or has had its turn, go on with the one that has waited longest. Nothing must run."""
        if self.adapter in self.lines and not self.overdue(now):
            return False
        others = [line.first for adapter, line in self.lines.items() if adapter != self.adapter]
        if not others:
            return False
        self.adapter, self.turned = min(others, key=lambda group: group.since).adapter, now
        return True


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request with a row, and with blocks for all that it may write."""

    request: Request
    row: int
    limit: int
    blocks: tuple[int, ...]
    reading: "PromptInProgress | None" = None  # its prompt, while that is being read
    gone: bool = False  # cancelled meanwhile: the row is given back with the prompt's last part
    slot: int = -1  # where the engine records what it writes


@dataclass(slots=True, eq=False)
class PromptInProgress:
    """A prompt on its way into the blocks of its first place; `done` columns are there."""

    prompt: tuple[int, ...]
    adapter: str | None
    places: list[ActiveRequest]
    done: int
    copy: tuple[int, int, int] | None = None


@dataclass(slots=True)
class Prefill:
    """One launch of prompts."""

    budget: int
    parts: list[PromptChunk] = field(default_factory=list[PromptChunk])
    begin: list[ActiveRequest] = field(default_factory=list[ActiveRequest])  # these write their first token
    read: list[PromptInProgress] = field(default_factory=list[PromptInProgress])
    coming: set[Key] = field(default_factory=set[Key])  # the first chunk that each prompt adds to the index


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
        self.left = np.zeros(self.max_rows, dtype=np.int64)  # tokens of each row that no launch has begun to write
        self.reading: list[PromptInProgress] = []
        self.owner: dict[int, Waiting | ActiveRequest] = {}  # every request in the engine
        self.launches = self.admitted = 0
        self.computed = self.saved = 0  # prompt tokens
        self.begun = 0  # requests
        self.starved = False  # the first in the queue lacks blocks

    @property
    def pool(self) -> BlockPool:
        """Who holds which block. Those of requests that ended are released here, when somebody wants to know: a
        thousand that end together need not wait for ten thousand blocks."""
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
        """Take a request out; its place, where a row has to be stopped."""
        owner = self.owner.pop(number)
        if isinstance(owner, Waiting):
            self.queues.leave(owner, [number])
            self.starved = False  # another may be first now, and need less
            return None
        if owner.reading is None:
            self._give_back(owner)
            return owner
        owner.gone = True
        if all(place.gone for place in owner.reading.places):
            self.reading.remove(owner.reading)
            self._give_back(*owner.reading.places)
        return None

    def keep(self, place: ActiveRequest, written: Sequence[int]) -> None:
        """Keep what the request read and wrote, for later prompts that begin with it, until the memory is needed."""
        if written:
            tokens = (*place.request.prompt, *written)
            self.pool.index.add(place.request.adapter, tokens, len(tokens), place.blocks)

    def release(self, *places: ActiveRequest) -> None:
        """Give back the memory of requests that wrote their last tokens."""
        for place in places:
            del self.owner[place.request.id]
        self._give_back(*places)

    def turn(self) -> bool:
        """Turn to another adapter, `queues.adapter`, if it is time; whether it did."""
        return not self.running and self.queues.turn(self.launches)

    def prefill(self) -> Prefill:
        """The prompts to read in the next launch: those begun, then as many others as there is room for."""
        launch = Prefill(self.prefill_tokens)
        for reading in list(self.reading):
            self._read(reading, self.pool.index.find(reading.adapter, reading.prompt), launch)
        if launch.budget > 0 and self._may_admit():
            self._admit(launch)
        for reading in launch.read:  # only now: one prompt of a launch cannot begin with what another reads in it
            self._learn(reading)
        return launch

    def decode(self) -> tuple[list[tuple[int, int]], int]:
        """Rows to move, and how many rows to decode then; 0: none has anything left to write."""
        live = self.left.nonzero()[0]
        if not len(live):
            return [], 0
        moves: list[tuple[int, int]] = []
        if len(live) < COMPACT_BELOW * (live[-1] + 1) and not self._refilling():
            moves = self._close_gaps(live.tolist())
            live = self.left.nonzero()[0]
        self.left -= self.left > 0
        return moves, int(live[-1]) + 1

    def _refilling(self) -> bool:
        """Whether free rows will soon be taken."""
        return bool(self.queues.count) and not self.starved and not self.queues.overdue(self.launches)

    def _may_admit(self) -> bool:
        """A few rows at a time; at once where that is all that waits, or where a row has been free for long."""
        if not self.rows or not self._refilling():
            return False
        full = math.ceil(self.prefill_tokens * self.begun / max(self.computed, 1))  # requests to a launch, so far
        few = min(self.queues.count, math.ceil(REFILL * self.max_rows), full)
        return len(self.rows) >= few or self.launches - self.admitted >= PATIENCE

    def _admit(self, launch: Prefill) -> None:
        index = self.pool.index
        for group in self.queues.ahead(self.max_rows + LOOK_AHEAD):
            chunks = index.find(group.adapter, group.prompt)
            more = launch.coming and (len(group.prompt) - 1) // CHUNK > len(chunks)
            if more and index.next_key(group.adapter, group.prompt, chunks) in launch.coming:
                continue  # it has less to read when that one is there
            tokens = len(group.prompt) - CHUNK * len(chunks)
            if tokens > launch.budget and launch.parts:
                return  # a prompt that fits into a launch is not cut; one that does not begins a launch
            places, copy = self._take(group, chunks)
            if not places:
                self.starved = True
                return
            self.queues.leave(group, [place.request.id for place in places])
            self.owner |= {place.request.id: place for place in places}
            self.admitted = self.launches
            self._read(self._begin(group, places, CHUNK * len(chunks), copy), chunks, launch)
            if not self.rows or launch.budget <= 0:
                return

    def _take(
        self, group: Waiting, chunks: list[CachedChunk]
    ) -> tuple[list[ActiveRequest], tuple[int, int, int] | None]:
        """Rows and blocks for as many of the group as there are; and the columns to copy first."""
        requests = list(islice(group.requests.values(), len(self.rows)))
        limits, copy = [self.limit(request) for request in requests], None
        if self.slab:
            rows = [heapq.heappop(self.rows) for _ in requests]
            copy = claim_rows(self.pool, rows, chunks)
            blocks = [(row,) for row in rows]
        else:
            blocks = claim_blocks(self.pool, len(group.prompt), limits, chunks, held_back=self.held_back)
            rows = [heapq.heappop(self.rows) for _ in blocks]
        taken = zip(requests, rows, limits, blocks, strict=False)  # fewer blocks than requests: the others wait on
        places = [ActiveRequest(request, row, limit, held) for request, row, limit, held in taken]
        for place in places:
            self.by_row[place.row] = place
        return places, copy

    def _begin(
        self, group: Waiting, places: list[ActiveRequest], columns: int, copy: tuple[int, int, int] | None
    ) -> PromptInProgress:
        reading = PromptInProgress(group.prompt, group.adapter, places, columns, copy)
        self.reading.append(reading)
        for place in places:
            place.reading = reading
        self.begun += len(places)
        self.computed += len(group.prompt) - columns
        self.saved += columns + (len(places) - 1) * len(group.prompt)
        return reading

    def _read(self, reading: PromptInProgress, chunks: list[CachedChunk], launch: Prefill) -> None:
        """The next part of a prompt, as much as there is room for; `chunks` of it can be found already."""
        if launch.budget <= 0:
            return
        start = reading.done
        reading.done = min(len(reading.prompt), start + launch.budget)
        launch.budget -= reading.done - start
        if (len(reading.prompt) - self.held_back) // CHUNK > len(chunks):
            launch.coming.add(self.pool.index.next_key(reading.adapter, reading.prompt, chunks))
        last = reading.done == len(reading.prompt)
        places = [place for place in reading.places if not place.gone] if last else []
        part = PromptChunk(
            prompt=reading.prompt,
            start=start,
            end=reading.done,
            blocks=reading.places[0].blocks[: math.ceil(len(reading.prompt) / self.block_size)],
            seats=tuple(map(_seat, places)),
            copy=reading.copy,
        )
        reading.copy = None
        launch.parts.append(part)
        launch.begin += places
        launch.read.append(reading)

    def _learn(self, reading: PromptInProgress) -> None:
        """A part is launched: later prompts may begin with it, and its places write when it was the last."""
        index, last = self.pool.index, reading.done == len(reading.prompt)
        columns = min(reading.done, len(reading.prompt) - self.held_back)
        index.add(reading.adapter, reading.prompt, columns, reading.places[0].blocks)
        for place in reading.places[1:] if self.slab and last else ():
            if not place.gone:  # each row that writes has its own copy
                index.add(reading.adapter, reading.prompt, columns, place.blocks)
        if not last:
            return
        self.reading.remove(reading)
        for place in reading.places:
            place.reading = None
            self.left[place.row] = place.limit - 1 + self.held_back
            if place.gone:
                self._give_back(place)

    def _give_back(self, *places: ActiveRequest) -> None:
        self.left[[place.row for place in places]] = 0
        for place in places:
            self.by_row[place.row] = None
            heapq.heappush(self.rows, place.row)
            self._returned += reversed(place.blocks)
        self.starved = False

    def _close_gaps(self, live: list[int]) -> list[tuple[int, int]]:
        """The highest rows that write go to the lowest free ones."""
        moves: list[tuple[int, int]] = []
        for a in reversed(live):
            if not self.rows or self.rows[0] > a:
                break
            b, place = heapq.heapreplace(self.rows, a), self.by_row[a]
            assert place is not None
            self.by_row[b], self.by_row[a], place.row = place, None, b
            self.left[b], self.left[a] = self.left[a], 0
            if self.slab:
                self.pool.move(a, b)
                place.blocks = (b,)
            moves.append((a, b))
        return moves


def _seat(place: ActiveRequest) -> Seat:
    request = place.request
    noise = request.id if request.noise is None else request.noise
    return Seat(row=place.row, request=noise, params=request.params, limit=place.limit, blocks=place.blocks)
