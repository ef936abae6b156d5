"""Blocks against a naive account of them: who holds each, and what is in it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hone.engine.blocks import CHUNK, BlockPool, claim_blocks, claim_rows


def prompt_of(words: str, rest: int = 1) -> tuple[int, ...]:
    """A chunk of equal tokens a letter, and `rest` tokens of another kind."""
    return tuple(ord(letter) for letter in words for _ in range(CHUNK)) + (0,) * rest


def take(pool: BlockPool, prompt: tuple[int, ...], *limits: int, adapter: str | None = None) -> list[tuple[int, ...]]:
    """Claim, and say that the prompt is in memory."""
    claimed = claim_blocks(pool, len(prompt), limits, pool.index.find(adapter, prompt))
    if claimed:
        pool.index.add(adapter, prompt, len(prompt), claimed[0])
    return claimed


def test_blank_blocks_are_taken_in_a_fixed_order():
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.release([2, 0, 1])
    assert pool.take(4) == [1, 0, 2, 3]
    assert pool.free == 0


def test_a_group_shares_the_whole_blocks_of_its_prompt_and_nothing_else():
    pool = BlockPool(20)
    first, second, third = take(pool, prompt_of("ab", 3), 1, CHUNK, 2 * CHUNK)
    assert first[:2] == second[:2] == third[:2]
    assert [len(first), len(second), len(third)] == [3, 4, 5]  # ceil((67 + limit) / 32)
    own = [*first[2:], *second[2:], *third[2:]]
    assert len(set(own)) == len(own)
    assert pool.free == 20 - 2 - len(own)
    assert pool.refs[first[0]] == 3


def test_a_prompt_that_ends_with_a_block_shares_all_of_it_but_is_computed_again_from_the_last_chunk():
    pool = BlockPool(20)
    prompt = prompt_of("ab", 0)
    (first,) = take(pool, prompt, 5)
    chunks = pool.index.find(None, prompt)
    assert len(chunks) == 1  # the last token is always computed: its logits are needed
    (second,) = claim_blocks(pool, len(prompt), [5], chunks)
    assert second[0] == first[0]
    assert second[1] != first[1]


def test_what_fits_is_claimed_and_the_rest_is_not_touched():
    pool = BlockPool(5)
    claimed = take(pool, prompt_of("a"), 1, 1, 40, 1)  # a block for all, then 1, 1, 2, 1
    assert len(claimed) == 3
    assert pool.free == 0
    for blocks in claimed:
        pool.release(reversed(blocks))
    assert pool.free == 5
    assert take(BlockPool(2), prompt_of("ab"), 1) == []


def one_by_one(pool: BlockPool, prompt: tuple[int, ...], limits: list[int]) -> list[tuple[int, ...]]:
    """The same blocks for each sequence in turn."""
    claimed: list[tuple[int, ...]] = []
    shared = [next(reversed(chunk.blocks)) for chunk in pool.index.find(None, prompt)]
    for limit in limits:
        start = claimed[0][: len(prompt) // CHUNK] if claimed else shared
        blank = -(-(len(prompt) + limit) // CHUNK) - len(start)
        if pool.free - sum(not pool.refs[block] for block in start) < blank:
            break
        claimed.append((*pool.hold(start), *pool.take(blank)))
    return claimed


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.lists(st.integers(1, 70), min_size=1, max_size=5)), max_size=6))
def test_a_group_has_the_blocks_that_its_sequences_would_be_given_in_turn(groups: list[tuple[str, list[int]]]):
    together, apart = BlockPool(24), BlockPool(24)
    for number, (words, limits) in enumerate(groups):
        prompt = prompt_of(words, 1 + number)
        claimed = take(together, prompt, *limits)
        assert claimed == one_by_one(apart, prompt, limits)
        if claimed:
            apart.index.add(None, prompt, len(prompt), claimed[0])
        for blocks in claimed if number % 2 else ():
            together.release(reversed(blocks))
            apart.release(reversed(blocks))
    assert (together.refs, together.free) == (apart.refs, apart.free)
    assert together.take(together.free) == apart.take(apart.free)


def test_free_blocks_keep_their_content_and_the_longest_unused_is_lost_first():
    pool = BlockPool(6)
    (old,) = take(pool, prompt_of("ab"), 1)
    (new,) = take(pool, prompt_of("cd"), 1)
    pool.release(reversed(old))
    pool.release(reversed(new))
    assert pool.free == 6
    assert len(pool.index.find(None, prompt_of("ab"))) == len(pool.index.find(None, prompt_of("cd"))) == 2
    assert set(pool.take(2)) == {old[2], new[2]}  # those with nothing to find in them
    assert pool.take(1) == [old[1]]  # a sequence's end before its beginning
    assert len(pool.index.find(None, prompt_of("ab"))) == 1
    assert pool.take(1) == [old[0]]
    assert pool.index.find(None, prompt_of("ab")) == []
    assert len(pool.index.find(None, prompt_of("cd"))) == 2


def test_a_free_block_that_is_shared_again_counts_as_held():
    pool = BlockPool(3)
    (first,) = take(pool, prompt_of("a"), 1)
    pool.release(reversed(first))
    assert pool.free == 3
    (second,) = take(pool, prompt_of("a"), 1)
    assert (second, pool.free) == (first, 1)
    # a block, free but about to be shared, is no room for something else
    pool.release(reversed(second))
    assert len(claim_blocks(pool, CHUNK + 1, [1, 1, 1], pool.index.find(None, prompt_of("a")))) == 2


def test_equal_hashes_are_not_equal_tokens():
    assert hash((-1,) * CHUNK) == hash((-2,) * CHUNK)  # CPython's hash of -1 is -2
    pool = BlockPool(4)
    take(pool, (-1,) * CHUNK + (5,), 1)
    assert pool.index.find(None, (-2,) * CHUNK + (5,)) == []
    assert len(pool.index.find(None, (-1,) * CHUNK + (5,))) == 1


def test_the_same_chunk_after_another_beginning_is_another_chunk():
    pool = BlockPool(8)
    take(pool, prompt_of("ab"), 1)
    assert pool.index.find(None, prompt_of("b")) == []
    assert len(pool.index.find(None, prompt_of("ac"))) == 1
    assert pool.index.find("adapter", prompt_of("ab")) == []


def test_holding_and_releasing_too_much_is_an_error():
    pool = BlockPool(2, slab=True)
    pool.claim(1)
    with pytest.raises(ValueError, match="1 is held already"):
        pool.claim(1)
    pool.release([1])
    with pytest.raises(ValueError, match="1 is held by nobody"):
        pool.release([1])


def test_rows_that_are_blocks_copy_what_they_share():
    pool, prompt = BlockPool(4, slab=True), prompt_of("ab")
    assert claim_rows(pool, [0], []) is None
    pool.index.add(None, prompt, len(prompt), [0])
    assert claim_rows(pool, [1, 2], pool.index.find(None, prompt)) == (0, 1, 2 * CHUNK)
    pool.release([0])
    # row 0 again: what it needs is there already, and what it had beyond that is gone
    assert claim_rows(pool, [0], pool.index.find(None, prompt_of("a"))) is None
    assert [len(pool.index.in_block.get(row, [])) for row in range(3)] == [1, 0, 0]


def test_a_row_that_moves_takes_its_content_with_it():
    pool, prompt = BlockPool(4, slab=True), prompt_of("ab")
    claim_rows(pool, [3], [])
    pool.index.add(None, prompt, len(prompt), [3])
    pool.move(3, 0)
    assert (pool.refs, pool.free) == ([1, 0, 0, 0], 3)
    assert claim_rows(pool, [3], pool.index.find(None, prompt)) == (0, 3, 2 * CHUNK)


@given(st.lists(st.text("abc", max_size=4), max_size=6), st.text("abc", max_size=5), st.integers(0, 2))
def test_the_longest_beginning_in_memory_is_found(known: list[str], words: str, rest: int):
    pool = BlockPool(64)
    for each in known:
        take(pool, prompt_of(each), 1)
    prompt = prompt_of(words, rest)
    if not prompt:
        return
    room = (len(prompt) - 1) // CHUNK
    expected = max((n for n in range(room + 1) if any(k.startswith(words[:n]) for k in known)), default=0)
    assert len(pool.index.find(None, prompt)) == expected


class Account(RuleBasedStateMachine):
    """A pool and, beside it, what a naive bookkeeper writes down."""

    @initialize(size=st.integers(3, 12))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.inside: dict[int, tuple[str | None, str]] = {}  # block: adapter, and all letters up to its chunk
        self.held: list[tuple[int, ...]] = []

    @rule(
        words=st.text("ab", max_size=4),
        rest=st.integers(1, 40),
        limits=st.lists(st.integers(1, 70), min_size=1, max_size=3),
        adapter=st.sampled_from([None, "x"]),
    )
    def enter(self, words: str, rest: int, limits: list[int], adapter: str | None) -> None:
        prompt, before = prompt_of(words, rest), list(self.pool.refs)
        chunks = self.pool.index.find(adapter, prompt)
        for number, chunk in enumerate(chunks):
            for block in chunk.blocks:
                assert self.inside[block] == (adapter, (words + "\0\0")[: number + 1])
        claimed = claim_blocks(self.pool, len(prompt), limits, chunks)
        shared = {b for blocks in claimed[:1] for b in blocks[: len(chunks)]}
        for blocks in claimed:
            assert len(set(blocks)) == len(blocks)
            assert all(not before[b] for b in blocks if b not in shared), "a block in use was given away"
        for block in {b for blocks in claimed for b in blocks} - shared:
            self.inside.pop(block, None)
        if claimed:
            self.pool.index.add(adapter, prompt, len(prompt), claimed[0])
            for number in range(len(prompt) // CHUNK):
                self.inside[claimed[0][number]] = adapter, (words + "\0\0")[: number + 1]
        self.held += claimed

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(reversed(self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))))

    @invariant()
    def the_books_agree(self) -> None:
        holders = Counter(block for blocks in self.held for block in blocks)
        assert self.pool.refs == [holders[block] for block in range(len(self.pool.refs))]
        assert self.pool.free == sum(not refs for refs in self.pool.refs)
        assert sum(map(len, self.pool.index.in_block.values())) == sum(
            len(chunk.blocks) for chunk in self.pool.index.chunks.values()
        )

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(reversed(blocks))
        size = len(self.pool.refs)
        assert sorted(self.pool.take(size)) == list(range(size)), "a block was lost"


TestAccount = Account.TestCase
