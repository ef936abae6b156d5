"""Collate by hand: the one shift, the padding, and what must not get through."""

import math
import random
import time
from array import array
from dataclasses import replace

import pytest
import torch
from each import each

from hone.data.collate import collate, mismatched_pairs
from hone.errors import HoneError
from hone.types import ABSENT, Outcome, Rollout, Stop

torch.set_num_threads(1)
NAN = math.nan
F, T = False, True


def test_everything_by_hand():
    long = Rollout(
        tokens=[5, 6, 7, 8],
        mask=[F, F, T, T],
        gen_logp=[0.0, 0.0, -0.5, -0.25],
        step_reward=[0.0, 0.0, 0.0, 2.0],
        stop=Stop.LENGTH,
        limit=2,
        outcome=Outcome(value=1.5),
        margin=0.5,
    )
    short = Rollout(
        tokens=[5, 9], mask=[F, T], gen_logp=[0.0, -1.0], step_reward=[0.0, 3.0], limit=4, outcome=Outcome(value=-1.0)
    )
    batch = collate([[long, short], [short]], pad_id=99)
    assert batch.inputs.tolist() == [[5, 6, 7, 8], [5, 9, 99, 99], [5, 9, 99, 99]]
    assert batch.targets.tolist() == [[6, 7, 8, 99], [9, 99, 99, 99], [9, 99, 99, 99]]
    assert batch.mask.tolist() == [[F, T, T, F], [T, F, F, F], [T, F, F, F]]
    assert batch.real.tolist() == [[T, T, T, T], [T, T, F, F], [T, T, F, F]]
    assert batch.gen_logp.tolist() == [[0, -0.5, -0.25, 0], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    assert batch.step_reward.tolist() == [[0, 0, 2, 0], [3, 0, 0, 0], [3, 0, 0, 0]]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.reward.tolist() == [1.5, -1.0, -1.0]
    assert batch.valid.tolist() == [T, T, T]
    assert batch.truncated.tolist() == [T, F, F]
    assert batch.limit.tolist() == [2, 4, 4]
    assert batch.margin.tolist() == [0.5, 0, 0]
    assert batch.label is ABSENT
    assert batch.old_logp is ABSENT


def test_only_the_length_limit_truncates_a_row():
    ended = {Stop.TOKEN: F, Stop.STRING: F, Stop.LENGTH: T}
    assert ended.keys() == set(Stop)
    rows = [Rollout(tokens=[5, 6], mask=[F, T], stop=stop) for stop in ended]
    assert collate([rows]).truncated.tolist() == list(ended.values())


def test_types_are_those_the_record_promises():
    row = Rollout(tokens=[1, 2], mask=[F, T], gen_logp=[0.0, -0.1], outcome=Outcome(value=1), label=1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        batch = collate([[row]], dtype=dtype)
        assert {batch.inputs.dtype, batch.targets.dtype, batch.group.dtype, batch.limit.dtype} == {torch.int64}
        assert {x.dtype for x in (batch.mask, batch.real, batch.valid, batch.truncated)} == {torch.bool}
        floats = (batch.reward, batch.gen_logp, batch.label, batch.margin)
        assert {x.dtype for x in floats} == {dtype}
    assert collate([[row]], dtype=torch.float64).gen_logp[0, 0].item() == -0.1


def test_the_trained_targets_are_exactly_the_trained_tokens():
    draw = random.Random(0)
    rows = []
    for _ in range(50):
        n = draw.randint(1, 30)
        logp = [draw.random() for _ in range(n)]
        rows.append(Rollout(tokens=draw.choices(range(1, 99), k=n), mask=draw.choices([F, T], k=n), gen_logp=logp))
    batch = collate([rows[:20], rows[20:]], dtype=torch.float64)
    for b, row in enumerate(rows):
        kept = [(t, p) for t, m, p in list(zip(row.tokens, row.mask, row.gen_logp, strict=True))[1:] if m]
        m = batch.mask[b]
        assert list(zip(batch.targets[b][m].tolist(), batch.gen_logp[b][m].tolist(), strict=True)) == kept
        assert batch.inputs[b][batch.real[b]].tolist() == list(row.tokens)
        last = len(row.tokens) - 1
        assert not batch.mask[b, last:].any()


def test_an_invalid_row_has_no_reward_and_nothing_to_train_on():
    good = Rollout(tokens=[1, 2], mask=[F, T], outcome=Outcome(value=0.0))
    bad = Rollout(tokens=[1, 2], mask=[F, T], outcome=Outcome(value=None, reason="crash"))
    batch = collate([[good, bad]])
    assert batch.valid.tolist() == [T, F]
    assert batch.reward.tolist() == [0.0, 0.0]
    assert batch.mask.tolist() == [[T, F], [F, F]]


def test_unscored_rows_have_no_reward_column():
    batch = collate([[Rollout(tokens=[1, 2], mask=[F, T])]])
    absent = (batch.reward, batch.valid, batch.label, batch.gen_logp, batch.step_reward)
    assert all(x is ABSENT for x in absent)


def test_step_labels_stay_on_their_token_and_make_the_mask():
    one = Rollout(tokens=[5, 6, 7, 8], mask=[F, T, T, T], step_label=[NAN, NAN, 1.0, 0.0])
    two = Rollout(tokens=[5, 6], mask=[F, T], step_label=[0.25, NAN])
    batch = collate([[one], [two]])
    assert batch.mask.tolist() == [[F, F, T, T], [T, F, F, F]]
    assert batch.label.tolist() == [[0, 0, 1, 0], [0.25, 0, 0, 0]]
    lost = Rollout(tokens=[5, 6], mask=[F, T], step_label=[NAN, 1.0], outcome=Outcome(value=None))
    assert not collate([[lost]]).mask.any()


def test_kto_labels_are_one_a_row():
    rows = [Rollout(tokens=[1, 2], mask=[F, T], label=x) for x in (1.0, 0.0)]
    assert collate([[r] for r in rows]).label.tolist() == [1.0, 0.0]


ROW = {"tokens": [1, 2], "mask": [F, T]}


@pytest.mark.parametrize(
    "extra",
    [
        {"outcome": Outcome(value=1.0)},
        {"gen_logp": [0.0, -1.0]},
        {"step_reward": [0.0, 1.0]},
        {"label": 0.0},
        {"step_label": [NAN, 1.0]},
    ],
)
def test_a_column_on_some_rows_only_is_refused(extra):
    with pytest.raises(ValueError, match="is on 1 of 2 rows"):
        collate([[Rollout(**ROW), Rollout(**ROW, **extra)]])


def test_other_mistakes_of_the_caller_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        collate([[Rollout(tokens=[], mask=[])]])
    for value in (NAN, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            collate([[Rollout(**ROW, outcome=Outcome(value=value))]])
    with pytest.raises(ValueError, match="both"):
        collate([[Rollout(**ROW, label=1.0, step_label=[NAN, 1.0])]])


def test_empty_lists_count_as_absent_and_empty_groups_keep_their_number():
    batch = collate([[Rollout(**ROW, gen_logp=[])], [], [Rollout(**ROW)]])
    assert batch.gen_logp is ABSENT
    assert batch.group.tolist() == [0, 2]


@pytest.mark.parametrize("groups", [[], [[]]])
def test_a_rank_without_rows_gets_every_column_with_none_in_it(groups):
    batch = collate(groups)
    assert len(batch) == 0
    full = collate(
        [[Rollout(**ROW, gen_logp=[0.0, -1.0], step_reward=[NAN, 1.0], label=1.0, outcome=Outcome(value=1.0))]]
    )
    assert batch.columns().keys() == full.columns().keys()
    assert {n: x.dtype for n, x in batch.columns().items()} == {n: x.dtype for n, x in full.columns().items()}


def test_a_row_of_one_token_has_nothing_to_predict():
    batch = collate([[Rollout(tokens=[3], mask=[T])]])
    assert batch.inputs.tolist() == [[3]]
    assert batch.mask.tolist() == [[F]]


def test_collate_changes_no_rollout_and_shares_no_memory():
    row = Rollout(tokens=torch.tensor([1, 2]).numpy(), mask=[F, T])  # type: ignore[arg-type]
    batch = collate([[row]])
    batch.inputs[0, 0] = 77
    batch.mask[0, 0] = False
    assert list(row.tokens) == [1, 2]
    assert batch.targets.tolist() == [[2, 0]]


def test_a_step_of_512_rows_takes_milliseconds():
    rows = [Rollout(tokens=[7] * 80, mask=[T] * 80, gen_logp=[-0.5] * 80, outcome=Outcome(value=1.0))] * 512
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        collate([rows])
        best = min(best, time.process_time() - start)
    assert best < 0.05


def test_mismatched_pairs_each_prompt_with_the_next_completion():
    a = Rollout(tokens=[1, 2, 10, 11], mask=[F, F, T, T], label=1.0, gen_logp=[0.0] * 4)
    b = Rollout(tokens=[3, 20, 21, 22], mask=[F, T, F, T], label=0.0, gen_logp=[0.0] * 4)
    c = Rollout(tokens=[4, 5, 6, 30], mask=[F, F, F, T], label=0.0, gen_logp=[0.0] * 4)
    pairs = mismatched_pairs([a, b, c])
    assert [list(p.tokens) for p in pairs] == [[1, 2, 20, 21, 22], [3, 30], [4, 5, 6, 10, 11]]
    assert [list(p.mask) for p in pairs] == [[F, F, T, F, T], [F, T], [F, F, F, T, T]]
    assert [len(p.tokens) for p in mismatched_pairs([a, b, c], max_tokens=4)] == [4, 2, 4]


def test_one_row_cannot_be_mismatched():
    row = Rollout(**ROW)
    with pytest.raises(HoneError, match="at least 2 rows"):
        mismatched_pairs([row])
    with pytest.raises(ValueError, match="row 1 has no trained token"):
        mismatched_pairs([row, Rollout(tokens=[1], mask=[F])])


@each("mask", [[0, 0, 0], [1, 1, 1], [0, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 1]], ids=lambda m: "".join(map(str, m)))
@each("kind", [list, tuple])
def test_what_the_policy_wrote(mask: list[int], kind: type):
    rollout = Rollout(tokens=array("q", [7, 8, 9]), mask=kind(map(bool, mask)))
    assert rollout.written() == [token for token, on in zip([7, 8, 9], mask, strict=True) if on]
    assert list(rollout.completion()) == rollout.written()


def test_a_copy_with_other_fields_is_that_of_replace():
    row = Rollout(
        tokens=[1, 2], mask=(F, T), gen_logp=[0.0, -1.0], raw_logp=[0.0, -2.0], stop=Stop.LENGTH, limit=3, margin=0.5,
        step_reward=[NAN, 1.0], step_label=[NAN, 0.0], label=1.0, version=7, text="before",
    )  # fmt: skip
    changes = {"text": "after", "outcome": Outcome(value=1.0), "task": None, "label": None, "stop": Stop.TOKEN}
    assert row.copy_with(**changes) == replace(row, **changes)
    assert row.copy_with() == row
    assert row.text == "before"
    for name, value in (("tokens", [1]), ("mask", (T,)), ("txt", "a")):
        with pytest.raises(TypeError, match=name):
            row.copy_with(**{name: value})


@each("kinds", ["qqq", "iii", "qiq", "qlq", "q-q", "---"])
def test_rows_are_the_same_table_in_arrays_of_any_kind_and_in_lists(kinds: str):
    tokens, logps = [[5, 6, 7], [5, 9], [8, 2, 3]], [[0.0, -0.5, -0.25], [0.0, -1.0], [0.0, -2.0, -0.125]]
    held = [x if kind == "-" else array(kind, x) for kind, x in zip(kinds, tokens, strict=True)]
    logp = [x if kind == "-" else array("f" if kind == "i" else "d", x) for kind, x in zip(kinds, logps, strict=True)]
    rows = [Rollout(tokens=t, mask=[F] + [T] * (len(t) - 1), gen_logp=p) for t, p in zip(held, logp, strict=True)]
    batch = collate([rows], pad_id=1)
    assert batch.inputs.tolist() == [[5, 6, 7], [5, 9, 1], [8, 2, 3]]
    assert batch.gen_logp.tolist() == [[-0.5, -0.25, 0.0], [-1.0, 0.0, 0.0], [-2.0, -0.125, 0.0]]
    assert (batch.inputs.dtype, batch.gen_logp.dtype) == (torch.int64, torch.float32)
    batch.inputs[0, 0] = 4  # the table is its own: the row is as it was
    assert held[0][0] == 5
