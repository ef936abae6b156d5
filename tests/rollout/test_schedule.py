"""The scheduler alone: what it launches, against a naive account of rows, blocks and prompts read."""

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from each import each
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hone.engine.blocks import CHUNK
from hone.engine.params import SampleParams
from hone.engine.requests import Request
from hone.engine.schedule import PATIENCE, SWITCH_AFTER, ActiveRequest, Prefill, Scheduler, Waiting


def scheduler(rows: int = 8, *, blocks: int = 0, capacity: int = 256, budget: int = 1000) -> Scheduler:
    """blocks: of 32 columns; 0: a row is its block."""
    shape = {"num_blocks": blocks or rows, "block_size": CHUNK if blocks else capacity, "capacity": capacity}
    runner: Any = SimpleNamespace(max_rows=rows, lag=0, held_back=0, prefill_tokens=budget, **shape)
    return Scheduler(runner)


def request(number: int, prompt: int | tuple[int, ...] = 10, tokens: int = 5, adapter: str | None = None) -> Request:
    """A prompt given by its length has tokens that no other has."""
    told = tuple(1000 * number + i for i in range(prompt)) if isinstance(prompt, int) else prompt
    return Request(
        id=number, prompt=told, params=SampleParams(max_tokens=tokens, stop_ids=frozenset()), adapter=adapter
    )


def launch(s: Scheduler) -> tuple[Prefill, int]:
    """As the engine does, without a model."""
    s.turn()
    prefill = s.prefill()
    s.launches += bool(prefill.parts)
    _, rows = s.decode()
    s.launches += bool(rows)
    return prefill, rows


def spans(prefill: Prefill) -> list[tuple[int, int, int]]:
    return [(part.start, part.end, len(part.seats)) for part in prefill.parts]


def place_of(s: Scheduler, number: int) -> ActiveRequest:
    found = s.owner[number]
    assert isinstance(found, ActiveRequest)
    return found


def test_a_group_is_read_once_and_takes_the_lowest_rows():
    s, prompt = scheduler(), (1, 2, 3)
    s.add([request(7, 10), *[request(i, prompt) for i in range(3)]])
    prefill, rows = launch(s)
    assert spans(prefill) == [(0, 10, 1), (0, 3, 3)]
    assert [[seat.row for seat in part.seats] for part in prefill.parts] == [[0], [1, 2, 3]]
    assert rows == 4
    assert (s.computed, s.saved) == (13, 6)


def test_what_has_no_row_waits_and_enters_when_one_is_free():
    s = scheduler(2)
    s.add([request(i) for i in range(4)])
    assert [p.request.id for p in launch(s)[0].begin] == [0, 1]
    assert launch(s)[0].parts == []
    s.release(place_of(s, 1))
    prefill, _ = launch(s)
    assert [(p.request.id, p.row) for p in prefill.begin] == [(2, 1)]
    assert len(s.queues) == 1


def test_part_of_a_group_enters_and_the_rest_follows():
    s = scheduler(3)
    prompt = tuple(range(2 * CHUNK + 5))
    s.add([request(i, prompt) for i in range(5)])
    assert [len(part.seats) for part in launch(s)[0].parts] == [3]
    s.release(place_of(s, 1))
    s.release(place_of(s, 2))
    (part,) = launch(s)[0].parts
    assert (part.start, part.end, len(part.seats)) == (2 * CHUNK, 2 * CHUNK + 5, 2)  # the chunks are in memory
    assert part.copy == (2, 1, 2 * CHUNK) or part.copy is None
    assert s.computed == 2 * CHUNK + 5 + 5


def test_prompts_are_read_within_the_budget_and_only_longer_ones_are_cut():
    s = scheduler(budget=50)
    s.add([request(0, 30), request(1, 30), request(2, 120), request(3, 10)])
    seen = [spans(launch(s)[0]) for _ in range(6)]
    assert seen == [[(0, 30, 1)], [(0, 30, 1)], [(0, 50, 0)], [(50, 100, 0)], [(100, 120, 1), (0, 10, 1)], []]


def test_rows_write_on_while_a_long_prompt_is_read():
    s = scheduler(budget=20)
    s.add([request(0, 5, tokens=50)])
    launch(s)
    s.add([request(1, 100)])
    assert [launch(s)[1] for _ in range(4)] == [1, 1, 1, 1]
    assert launch(s)[1] == 2


def test_a_prompt_waits_for_another_that_begins_the_same():
    s = scheduler(6)
    start = tuple(range(3 * CHUNK))
    s.add([request(0, (*start, 7)), request(1, (*start, 8)), request(2, 4), request(3, (*start, 9, 9))])
    assert spans(launch(s)[0]) == [(0, 3 * CHUNK + 1, 1), (0, 4, 1)]
    prefill, _ = launch(s)
    assert spans(prefill) == [(3 * CHUNK, 3 * CHUNK + 1, 1), (3 * CHUNK, 3 * CHUNK + 2, 1)]
    assert [part.copy for part in prefill.parts] == [(0, 2, 3 * CHUNK), (0, 3, 3 * CHUNK)]


def test_where_a_chunk_is_a_block_it_is_shared_and_not_copied():
    s = scheduler(6, blocks=40)
    start = tuple(range(3 * CHUNK))
    s.add([request(0, (*start, 7)), request(1, (*start, 8))])
    (first,) = launch(s)[0].parts
    (second,) = launch(s)[0].parts
    assert second.copy is None
    assert second.start == 3 * CHUNK
    assert first.blocks[:3] == second.blocks[:3]
    assert first.blocks[3] != second.blocks[3]


def test_without_blocks_a_request_waits_and_none_overtakes_it():
    s = scheduler(8, blocks=4)
    s.add([request(0, 60, tokens=30)])  # 3 blocks
    s.add([request(1, 60, tokens=30), request(2, 5, tokens=5)])
    assert [p.request.id for p in launch(s)[0].begin] == [0]
    assert launch(s)[0].parts == []
    s.release(place_of(s, 0))
    assert [p.request.id for p in launch(s)[0].begin] == [1, 2]


def test_free_rows_are_filled_some_at_a_time_but_nobody_waits_for_long():
    s = scheduler(64)
    s.add([request(i, tokens=100) for i in range(100)])
    launch(s)
    s.release(place_of(s, 5))
    assert launch(s)[0].parts == []  # 1 of 64 is free: an eighth at a time
    for number in range(7, 21, 2):
        s.release(place_of(s, number))
    assert sorted(p.row for p in launch(s)[0].begin) == [5, *range(7, 21, 2)]
    s.release(place_of(s, 20))
    waited = 0
    while not launch(s)[0].parts:
        waited += 1
    assert waited <= PATIENCE


def test_fewer_free_rows_are_filled_where_their_prompts_fill_a_launch():
    s = scheduler(64, budget=300)
    s.add([request(i, 100, tokens=100) for i in range(100)])
    while s.rows:
        launch(s)
    for number in (5, 9):
        s.release(place_of(s, number))
    assert launch(s)[0].parts == []
    s.release(place_of(s, 7))  # three prompts of 100 tokens
    assert sorted(p.row for p in launch(s)[0].begin) == [5, 7, 9]


def test_the_last_ones_that_wait_enter_at_once():
    s = scheduler(64)
    s.add([request(i, tokens=100) for i in range(65)])
    launch(s)
    s.release(place_of(s, 5))
    assert len(launch(s)[0].begin) == 1


def test_gaps_are_closed_when_few_rows_write_and_none_waits():
    s = scheduler(8)
    s.add([request(i, tokens=9) for i in range(8)])
    launch(s)
    for number in (0, 1, 3):
        s.release(place_of(s, number))
    moves, rows = s.decode()
    assert (moves, rows) == ([(7, 0), (6, 1), (5, 3)], 5)
    assert [place.request.id for place in s.by_row if place] == [7, 6, 2, 5, 4]
    assert s.pool.refs == [1, 1, 1, 1, 1, 0, 0, 0]
    assert s.decode() == ([], 5)


def test_gaps_stay_while_others_wait_for_them():
    s = scheduler(64)
    s.add([request(i, tokens=9) for i in range(64)])
    launch(s)
    for number in range(30):
        s.release(place_of(s, number))
    s.add([request(i, 100) for i in range(100, 140)])
    assert s.decode() == ([], 64)


def test_rows_that_have_written_all_they_may_are_not_decoded():
    s = scheduler(4)
    s.add([request(0, tokens=1), request(1, tokens=3), request(2, tokens=2)])
    assert [launch(s)[1] for _ in range(3)] == [3, 2, 0]  # nothing was read yet, and nothing has to be


def test_adapters_run_one_at_a_time_and_each_gets_its_turn():
    s = scheduler(2)
    s.add([request(i, tokens=2, adapter="a") for i in range(400)])
    s.add([request(i, tokens=2, adapter="b") for i in range(400, 800)])
    served: list[str | None] = []
    while s.owner:
        prefill, _ = launch(s)
        running = {place.request.adapter for place in s.by_row if place}
        assert len(running) <= 1
        served += [place.request.adapter for place in prefill.begin]
        for place in [p for p in s.by_row if p and not s.tokens_left[p.row]]:
            s.release(place)
    turns = [i for i in range(1, len(served)) if served[i] != served[i - 1]]
    assert len(served) == 800
    assert served[0] == "a"
    assert 10 < turns[0] < 2 * SWITCH_AFTER
    assert all(b - a >= 10 for a, b in itertools.pairwise(turns))  # no flutter


def test_another_adapter_enters_as_soon_as_nothing_runs():
    s = scheduler(2)
    s.add([request(0, tokens=2, adapter="a"), request(1, tokens=2, adapter="b")])
    for _ in range(3):  # a row is free, and not for another adapter
        launch(s)
        assert (s.queues.adapter, s.running) == ("a", 1)
    s.release(place_of(s, 0))
    assert len(launch(s)[0].begin) == 1
    assert s.queues.adapter == "b"


def test_the_content_of_one_adapter_is_not_that_of_another():
    s, prompt = scheduler(4, blocks=20), tuple(range(70))
    for number, adapter, start in ((0, "a", 0), (1, "b", 0), (2, "a", 64), (3, "b", 64)):
        s.add([request(number, prompt, adapter=adapter)])
        assert spans(launch(s)[0]) == [(start, 70, 1)]
        s.release(place_of(s, number))


@pytest.mark.parametrize("blocks", [0, 64])
def test_cancelling_the_first_of_a_group_half_read_leaves_the_others_their_prompt(blocks: int):
    s = scheduler(4, blocks=blocks, budget=40)
    prompt = tuple(range(70))
    s.add([request(0, prompt), request(1, prompt)])
    (first,) = launch(s)[0].parts
    assert s.cancel(0) is None
    s.add([request(2, 9)])
    second, third = s.prefill().parts
    assert second.blocks == first.blocks
    assert [seat.row for seat in second.seats] == [1]
    assert [seat.row for seat in third.seats] == [2]  # row 0 was still in use in this launch
    assert s.rows[0] == 0
    for number in (1, 2):
        s.release(place_of(s, number))
    assert (len(s.rows), s.pool.free) == (4, blocks or 4)


def test_cancelling_all_of_a_group_half_read_gives_everything_back():
    s = scheduler(4, blocks=64, budget=40)
    s.add([request(0, tuple(range(70))), request(1, tuple(range(70)))])
    launch(s)
    s.cancel(1)
    s.cancel(0)
    assert (len(s.rows), s.pool.free, s.pending, s.owner) == (4, 64, [], {})
    assert launch(s)[0].parts == []


def test_a_row_that_was_cancelled_before_it_got_its_copy_is_no_source_of_others():
    s, prompt = scheduler(4, budget=40), tuple(range(70))
    s.add([request(i, prompt) for i in range(3)])
    launch(s)
    s.cancel(2)
    (part,) = launch(s)[0].parts
    assert [seat.row for seat in part.seats] == [0, 1]
    assert {row for chunk in s.pool.index.find(None, prompt) for row in chunk.blocks} == {0, 1}
    s.add([request(3, prompt)])
    (part,) = launch(s)[0].parts
    assert (part.start, part.blocks) == (64, (2,))
    assert part.copy is not None
    assert part.copy[0] in (0, 1)


def test_when_the_first_that_waits_is_cancelled_the_next_may_enter():
    s = scheduler(4, blocks=8)
    s.add([request(0, 100, tokens=90), request(1, 100, tokens=60), request(2, 10)])
    assert spans(launch(s)[0]) == [(0, 100, 1)]
    assert not launch(s)[0].parts  # 6 of 8 blocks are taken, and 5 are needed next
    s.cancel(1)
    assert spans(launch(s)[0]) == [(0, 10, 1)]


class Memory:
    """What the blocks of a scheduler would hold: of each column the adapter, the weights and the token."""

    def __init__(self, s: Scheduler) -> None:
        self.s, self.held = s, dict[tuple[int, int], tuple[object, ...]]()

    def at(self, blocks: tuple[int, ...], column: int) -> tuple[int, int]:
        return blocks[column // self.s.block_size], column % self.s.block_size

    def copy(self, source: tuple[int, ...], target: tuple[int, ...], columns: int) -> None:
        for c in range(columns):
            a, b = self.at(source, c), self.at(target, c)
            self.held[b] = self.held.get(a, ())

    def read(self, prefill: Prefill) -> None:
        """As a runner does: copies, then the prompts, then each seat has the columns of its prompt."""
        for source, target, columns in (part.copy for part in prefill.parts if part.copy is not None):
            self.copy((source,), (target,), columns)
        for part in prefill.parts:
            for c in range(part.start, part.end):
                self.held[self.at(part.blocks, c)] = (self.s.queues.adapter, part.prompt[c])
            for seat in part.seats:
                self.copy(part.blocks, seat.blocks, len(part.prompt))

    def check(self) -> None:
        """Every chunk is where the index says, of its adapter and of the weights there are now."""
        index = self.s.pool.index
        above = {root: (adapter, 0) for adapter, root in index.roots.items()}
        for chunk in sorted(index.chunks.values(), key=lambda chunk: chunk.id):  # a child is younger
            if chunk.key[0] not in above:
                continue  # what it follows is gone: nobody finds it
            adapter, first = above[chunk.key[0]]
            above[chunk.id] = adapter, first + CHUNK
            for block in chunk.blocks:
                start = first if self.s.slab else 0
                found = [self.held.get((block, start + c), ()) for c in range(CHUNK)]
                assert found == [(adapter, token) for token in chunk.key[1]]


def wander(s: Scheduler, g: random.Random) -> None:
    """Requests with beginnings in common come, end and are cancelled at any time; now and then weights change."""
    memory, number = Memory(s), 0
    for _ in range(60):
        if g.random() < 0.4:
            prompt = (*(i // CHUNK % 2 for i in range(g.choice([0, 32, 64, 96]))), *range(g.choice([1, 9, 32])))
            told, adapter = g.choice([1, 3, 20]), g.choice([None, None, "x"])
            group = [request(number + i, prompt, told, adapter) for i in range(g.choice([1, 2, 4]))]
            number += len(group)
            s.add(group)
        if s.owner and g.random() < 0.3:
            s.cancel(g.choice(list(s.owner)))
        s.turn()
        prefill = s.prefill()
        memory.read(prefill)
        moves, _ = s.decode()
        for a, b in moves if s.slab else ():
            memory.copy((a,), (b,), s.capacity)
        s.launches += 1
        memory.check()
        for place in [
            p for p in s.by_row if p and p.pending is None and (not s.tokens_left[p.row] or g.random() < 0.1)
        ]:
            s.release(place)


@each("blocks", [0, 12, 40])
@each("budget", [7, 40, 1000])
def test_every_chunk_is_where_the_index_says(blocks: int, budget: int):
    for seed in range(30):
        wander(scheduler(1 + seed % 7, blocks=blocks, capacity=160, budget=budget), random.Random(seed))


def plans(s: Scheduler, g: random.Random, *, looks: bool) -> list[object]:
    """What is launched while groups come and go, and what is free at the end; looks: at the pool after every end."""
    made, number = list[object](), 0
    for _ in range(40):
        for _ in range(g.choice([0, 1, 3])):
            prompt = (*(i // CHUNK % 2 for i in range(g.choice([0, 32, 64]))), *range(g.choice([1, 9, 32])))
            group = [request(number + i, prompt, g.choice([1, 20, 70])) for i in range(g.choice([1, 2, 4]))]
            number += len(group)
            s.add(group)
        s.turn()
        prefill, (moves, rows) = s.prefill(), s.decode()
        made.append((prefill.parts, moves, rows, s.starved, s.computed, s.saved))
        s.launches += 1
        ended = [p for p in s.by_row if p and p.pending is None and (not s.tokens_left[p.row] or g.random() < 0.3)]
        for place in ended if looks else ():
            s.release(place)
            assert s.pool.free == sum(not held for held in s.pool.refs)
        if not looks:
            s.release(*ended)
    return [*made, s.pool.refs, s.pool.free, s.pool.take(s.pool.free) if not s.slab else ()]


@pytest.mark.parametrize("blocks", [0, 12, 40])
def test_blocks_released_when_somebody_looks_are_those_released_at_once(blocks: int):
    for seed in range(40):
        one, other = (scheduler(1 + seed % 9, blocks=blocks, capacity=160) for _ in range(2))
        assert plans(one, random.Random(seed), looks=False) == plans(other, random.Random(seed), looks=True)


def test_a_group_that_ends_together_is_free_as_soon_as_anybody_asks():
    s = scheduler(8, blocks=40)
    s.add([request(i, tuple(range(70)), 60) for i in range(8)])
    launch(s)
    places = [place_of(s, i) for i in range(8)]
    assert (s.running, s.pool.free) == (8, 40 - 2 - 8 * 3)  # two whole blocks of 70 tokens are everybody's
    s.release(*places[:7])
    assert (s.running, s.pool.free, s.pool.refs[places[7].blocks[0]]) == (1, 40 - 5, 1)
    s.release(places[7])
    assert (s.running, s.pool.free, sum(s.pool.refs)) == (0, 40, 0)


class Account(RuleBasedStateMachine):
    """Random orders; beside the scheduler, what a naive bookkeeper knows: who is where, and what was read."""

    @initialize(
        rows=st.integers(1, 6), blocks=st.sampled_from([0, 12, 40]), budget=st.sampled_from([7, 40, 1000]),
    )  # fmt: skip
    def start(self, rows: int, blocks: int, budget: int) -> None:
        self.s = scheduler(rows, blocks=blocks, capacity=160, budget=budget)
        self.total, self.budget, self.number = blocks or rows, budget, 0
        self.waiting: set[int] = set()
        self.writing: dict[int, int] = {}  # request: tokens begun

    @rule(
        words=st.text("ab", max_size=4), rest=st.integers(1, 30), count=st.integers(1, 4),
        tokens=st.integers(1, 40), adapter=st.sampled_from([None, None, "x"]),
    )  # fmt: skip
    def add(self, words: str, rest: int, count: int, tokens: int, adapter: str | None) -> None:
        prompt = tuple(ord(w) for w in words for _ in range(CHUNK)) + tuple(range(rest))
        group = [request(self.number + i, prompt[:159], tokens, adapter) for i in range(count)]
        if self.s.blocks_for(group[0]) > self.total:
            return
        self.number += count
        self.s.add(group)
        self.waiting |= {r.id for r in group}

    @rule()
    def step(self) -> None:
        s = self.s
        s.turn()
        prefill = s.prefill()
        s.launches += bool(prefill.parts)
        assert sum(part.end - part.start for part in prefill.parts) <= self.budget
        for place in prefill.begin:
            assert place.request.adapter == s.queues.adapter
            assert place.request.id not in self.writing
            self.writing[place.request.id] = 1
        self.waiting = {n for n, owner in s.owner.items() if isinstance(owner, Waiting)}
        before = {p.row: p.request.id for p in s.by_row if p}
        moves, rows = s.decode()
        for a, b in moves:
            assert b not in before
            before[b] = before.pop(a)
        assert before == {p.row: p.request.id for p in s.by_row if p}
        s.launches += bool(rows)
        for place in [p for p in s.by_row[:rows] if p and p.request.id in self.writing]:
            self.writing[place.request.id] += self.writing[place.request.id] < place.limit
        for place in [p for p in s.by_row if p and p.request.id in self.writing]:
            assert s.tokens_left[place.row] == place.limit - self.writing[place.request.id]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.writing:
            number = data.draw(st.sampled_from(sorted(self.writing)))
            self.s.release(place_of(self.s, number))
            del self.writing[number]

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.s.owner:
            number = data.draw(st.sampled_from(sorted(self.s.owner)))
            place = self.s.cancel(number)
            assert (place is not None) == (number in self.writing)
            self.writing.pop(number, None)
            self.waiting.discard(number)

    @invariant()
    def the_books_agree(self) -> None:
        s = self.s
        places = [p for p in s.by_row if p]
        assert sorted(s.rows) == [row for row, p in enumerate(s.by_row) if p is None]
        assert all(p.row == row for row, p in enumerate(s.by_row) if p)
        holders = Counter(block for p in places for block in p.blocks)
        assert s.pool.refs == [holders[block] for block in range(self.total)]
        assert len({p.request.adapter for p in places}) <= 1
        assert len(s.queues) == len(self.waiting)
        if s.slab:
            assert all(p.blocks == (p.row,) for p in places)

    def teardown(self) -> None:
        """Whatever happened before, everything that is in ends, and nothing is lost."""
        s = self.s
        for _ in range(3000):
            if not s.owner:
                break
            self.step()
            for number in [n for n in self.writing if not s.tokens_left[place_of(s, n).row]]:
                s.release(place_of(s, number))
                del self.writing[number]
        assert not s.owner
        assert (s.running, s.pool.free, len(s.queues)) == (0, self.total, 0)


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
