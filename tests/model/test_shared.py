"""One list without padding, prompts once: the numbers and gradients of each row alone, from fewer tokens."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from each import each

from hone.errors import HoneError
from hone.model.layout import LAYOUTS, lay_out_shared, lines_of, rows_by_length
from hone.model.policy import Policy
from hone.model.rows import first_rows
from hone.types import Batch

PROMPT = [3, 1, 4, 1]


@pytest.fixture
def batch_of(make_batch: Callable[..., Batch]) -> Callable[..., Batch]:
    """Rows, and the group of each."""
    return lambda rows, groups, **how: replace(make_batch(rows, **how), group=torch.tensor(groups))


def test_the_list_by_hand(batch_of):
    # rows 0 and 2 are a group and begin with 5 6; row 1 begins so too, but is of another group
    batch = batch_of([[5, 6, 7], [5, 6], [5, 6, 8, 9]], [4, 2, 4])
    lines = lay_out_shared(batch.inputs, batch.real, batch.group)
    assert lines.tokens.tolist() == [[5, 6, 7, 5, 6, 8, 9]]
    assert lines.positions is not None
    assert lines.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert lines.slot.tolist() == [[0, 1, 2, 0], [3, 4, 0, 0], [0, 1, 5, 6]]
    assert lines.longest == 4


def test_the_leader_is_the_group_s_first_row():
    assert first_rows(np.array([7, 2, 7, 2, 9])).tolist() == [0, 1, 0, 1, 4]
    assert first_rows(np.zeros(0, np.int64)).tolist() == []


def test_rows_of_about_one_length_make_a_table():
    assert rows_by_length([3, 8, 0, 6, 5, 8, 1]) == [
        [1, 5, 3],
        [4],
        [0],
        [6],
    ]  # 6 of 8 is three quarters, 3 of 5 is less
    assert rows_by_length([0, 0]) == []


TABLES = {
    "answers to two questions": (
        [[*PROMPT, 5, 6], [*PROMPT, 7], [9, 2, 5], [*PROMPT, 5, 8, 8, 8], [9, 2, 6, 6]],
        [0, 0, 1, 0, 1],
    ),
    "the same row twice": ([[*PROMPT, 5], [*PROMPT, 5], [8, 8, 8, 8, 8, 8, 8]], [0, 0, 1]),
    "a row that begins another": ([[*PROMPT, 5, 6, 7], [*PROMPT, 5], [*PROMPT, 5, 6, 7, 8]], [3, 3, 3]),
    "a group with nothing in common": ([[3, 1, 2, 2], [4, 1, 2], [5, 1, 2, 2, 2]], [0, 0, 0]),
    "a long row and short ones": ([[*PROMPT, *range(5, 20)], [*PROMPT, 9], [2, 7, 1], [2, 8, 1, 1]], [0, 0, 1, 1]),
    "one row": ([[*PROMPT, 5, 6]], [0]),
}


@each("window", [0, 3])
@each("place", ["right", "left", "middle", "both"])
@each("name", TABLES)
def test_numbers_and_gradients_are_those_of_each_row_alone(name, place, window, batch_of, make_decoder, logits_of):
    rows, groups = TABLES[name]
    decoder = make_decoder(windows=(window, 0) if window else ())
    batch = batch_of(rows, groups, place=place, extra=3, garbage=7)
    logp = Policy(decoder, layout="shared")(batch, frozenset({"logp"})).logp[batch.mask]
    alone = torch.cat([logits_of(decoder, row).log_softmax(-1)[range(1, len(row) - 1), row[2:]] for row in rows])
    torch.testing.assert_close(logp, alone, rtol=0, atol=1e-12)
    weights = torch.linspace(0.5, 1.5, len(logp), dtype=torch.float64)
    params = list(decoder.parameters())
    ours, exact = (torch.autograd.grad(x @ weights, params, allow_unused=True) for x in (logp, alone))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


def test_a_prompt_is_read_once_and_padding_never(batch_of, make_decoder):
    rows, groups = TABLES["answers to two questions"]
    batch = batch_of(rows, groups, extra=5)
    lines = lines_of(batch, make_decoder(), layout="shared")
    assert lines.tokens.shape == (1, 4 + 2 + 1 + 3 + 2 + 1 + 2)  # "5" after the prompt, too, is common to two rows


def test_a_full_table_stays_as_it_is(batch_of, make_decoder):
    batch = batch_of([[1, 2, 3], [4, 5, 6]], [0, 1])
    lines = lines_of(batch, make_decoder(), layout="shared")
    assert lines.tokens.tolist() == batch.inputs.tolist()
    assert lines.mask is None


def test_rows_without_a_token_are_left_out(batch_of, make_decoder):
    batch = batch_of([[2, 2], [*PROMPT, 5, 6], [*PROMPT, 7]], [0, 0, 0])
    gone = replace(batch, real=batch.real & torch.tensor([[False], [True], [True]]))
    policy = Policy(make_decoder(), layout="shared")
    fwd, whole = policy(gone, frozenset({"logp"})), policy(batch, frozenset({"logp"}))
    torch.testing.assert_close(fwd.logp, whole.logp, rtol=0, atol=1e-12)


def test_an_unknown_layout_is_refused(batch_of, make_decoder):
    assert LAYOUTS == ("padded", "packed", "shared")
    with pytest.raises(HoneError, match="unknown layout"):
        lines_of(batch_of([[1, 2]], [0]), make_decoder(), layout="woven")
