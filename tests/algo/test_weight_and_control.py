"""Weights and adaptive numbers by hand."""

import math
from dataclasses import replace

import pytest
import torch
from algo_cases import ragged, row_of

from hone.algo import control, weight
from hone.algo.weight import Totals
from hone.errors import HoneError
from hone.types import Batch

torch.set_num_threads(1)

MASK = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])


def three_rows() -> Batch:
    """Lengths 3, 1 and 0: the last row is invalid."""
    return Batch(
        inputs=MASK.long(), targets=MASK.long(), mask=MASK, real=MASK, group=torch.zeros(3).long(),
        limit=torch.tensor([4, 8, 8]),
    )  # fmt: skip


N = Totals(rows=2, tokens=4)


def test_token_mean() -> None:
    assert weight.token_mean(three_rows(), N).tolist() == [[0.25, 0.25, 0.25, 0], [0.25, 0, 0, 0], [0] * 4]


def test_row_mean() -> None:
    # 1/2 a row, spread over its tokens; the row without tokens has none
    w = weight.row_mean(three_rows(), N)
    assert w[0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert w[1:].tolist() == [[0.5, 0, 0, 0], [0] * 4]


def test_row_sum() -> None:
    assert weight.row_sum(three_rows(), N).tolist() == [[0.5, 0.5, 0.5, 0], [0.5, 0, 0, 0], [0] * 4]


def test_fixed_length() -> None:
    # 1 / (2 rows * 5 tokens), or each row's own limit of 4 and 8
    assert weight.fixed_length(three_rows(), N, max_tokens=5)[0].tolist() == [0.1, 0.1, 0.1, 0]
    assert weight.fixed_length(three_rows(), N)[:, 0].tolist() == [1 / 8, 1 / 16, 0]


@pytest.mark.parametrize("how", [*weight.AVERAGES.values(), weight.row_sum])
def test_nothing_to_train_on_weighs_nothing(how: weight.Weigh) -> None:
    batch = replace(three_rows(), mask=torch.zeros_like(MASK))
    weighed = weight.weigh(batch, how, Totals(rows=0, tokens=0))
    assert not weighed.token_weight.any()
    assert not weighed.row_weight.any()


def test_a_rows_weight_counts_rows_with_something_to_train_on() -> None:
    assert weight.weigh(three_rows(), weight.token_mean, N).row_weight.tolist() == [0.5, 0.5, 0.0]


def test_the_total_weight_is_one_whatever_the_average() -> None:
    batch = ragged()
    n = Totals(rows=8, tokens=int(batch.mask.sum()))
    for how in (weight.token_mean, weight.row_mean):
        assert how(batch, n).sum().item() == pytest.approx(1.0)


def test_mismatch_weights() -> None:
    # old - gen = log of 4, 1.5, .3, and rubbish that is not trained
    batch = row_of([1, 1, 1, 0], old_logp=[math.log(4), math.log(1.5), math.log(0.3), 1e4], gen_logp=[0.0] * 4)
    assert weight.mismatch(batch, how="truncate", cap=2.0)[0].tolist() == pytest.approx([2.0, 1.5, 0.3, 1.0])
    assert weight.mismatch(batch, how="mask", cap=2.0)[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert weight.mismatch(batch, how="mask", cap=4.1)[0].tolist() == [1.0, 1.0, 1.0, 1.0]
    with pytest.raises(HoneError, match="truncate or mask"):
        weight.mismatch(batch, how="clip", cap=2.0)


# --- control ---


@pytest.mark.parametrize(("kl", "beta"), [(0.031, 2.0), (0.03, 1.0), (0.02, 1.0), (0.0134, 1.0), (0.013, 0.5)])
def test_double_or_halve(kl: float, beta: float) -> None:
    # target .02: doubled above .03, halved below .01333
    assert control.double_or_halve(1.0, kl, target=0.02) == beta


@pytest.mark.parametrize(("kl", "beta"), [(0.1, 1.0), (0.11, 1.01), (0.5, 1.02), (0.0, 0.98), (0.09, 0.99)])
def test_proportional(kl: float, beta: float) -> None:
    # target .1, gain .1, relative error clipped at .2
    assert control.proportional(1.0, kl, target=0.1) == pytest.approx(beta)


def test_the_running_baseline_is_an_exponential_mean() -> None:
    c = control.running_baseline(0.9)
    assert (c.column, c.start, c.reads) == ("baseline", 0.0, "reward")
    # .9 * 2 + .1 * 5
    assert c.update(2.0, 5.0) == pytest.approx(2.3)


def test_a_constant_stays() -> None:
    c = control.constant("kl_coef", 0.04)
    assert (c.start, c.reads, c.update(0.04, 9.0)) == (0.04, "", 0.04)
