"""What fits is searched for with the same pass on both sides, and the search ends where memory does."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from each import each
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.learning import fits
from hone.errors import HoneError
from hone.train.optim import parameters_of
from tests.bench.tiny_subject import subject

ROWS, LENGTH = 3, 20
KIND = fits.Kind(name="most rows", unit="rows", sizes=lambda n: (n, LENGTH), most=64, near=8, near_again=16)


def gradients(side: fits.Side) -> list[Tensor]:
    side.step(ROWS, LENGTH)
    found = [p.grad for p in parameters_of(side.optimizer) if p.grad is not None]
    assert len(found) == len(parameters_of(side.optimizer))
    return found


def norms(found: Sequence[Tensor]) -> Tensor:
    """Of all weights, in an order of their own: the sides name them differently."""
    return torch.stack([g.double().norm() for g in found]).sort().values


def kept(side: fits.Side) -> list[Tensor]:
    """What a pass keeps for its gradient."""
    seen = list[Tensor]()

    def pack(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        side.step(ROWS, LENGTH)
    return seen


# --- the two sides ---


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
def test_both_sides_have_the_same_gradient(recompute: bool):
    whole = subject(torch.float32)
    mine, peer = gradients(fits.hone(whole)), gradients(fits.trl(whole, recompute=recompute))
    torch.testing.assert_close(norms(mine), norms(peer), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_both_sides_compute_in_bfloat16_and_hold_the_rest_in_float32(lora: bool):
    half = subject(torch.bfloat16, lora=lora)
    for side in (fits.hone(half), fits.trl(half, recompute=False)):
        found = gradients(side)
        assert all(g.isfinite().all() for g in found)
        assert norms(found).max() > 0
        state = [side.optimizer.state[p] for p in parameters_of(side.optimizer)]
        moments = [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]
        assert {x.dtype for x in (*parameters_of(side.optimizer), *found, *moments)} == {torch.float32}
        assert any(x.dtype == torch.bfloat16 for x in kept(side))


def test_each_pass_begins_without_gradients():
    for side in (fits.hone(subject(torch.float32)), fits.trl(subject(torch.float32), recompute=True)):
        torch.testing.assert_close(norms(gradients(side)), norms(gradients(side)))


def test_gradient_checkpointing_is_on_where_it_is_asked_for():
    half = subject(torch.bfloat16)
    again, whole = (sum(x.nbytes for x in kept(fits.trl(half, recompute=on))) for on in (True, False))
    assert again < whole / 2


# --- the search ---


@each(
    ("limit", "largest", "tried"),
    [
        (64, 64, [8, 16, 32, 64]),
        (63, 48, [8, 16, 32, 64, 48]),
        (40, 32, [8, 16, 32, 64, 48]),
        (7, 6, [8, 4, 6]),
        (1, 1, [8, 4, 2, 1]),
        (0, 0, [8, 4, 2, 1]),
    ],
)
def test_sizes_are_doubled_or_halved_and_then_half_as_many_more(limit: int, largest: int, tried: list[int]):
    seen = list[int]()

    def fits_in(size: int) -> bool:
        seen.append(size)
        return size <= limit

    assert fits.largest(fits_in, near=8, most=64) == largest
    assert seen == tried


def limited(rows: int) -> fits.Side:
    """A side whose memory runs out with more rows than these."""
    side = fits.hone(subject(torch.float32))

    def step(count: int, length: int) -> None:
        if count > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        side.step(count, length)

    return fits.Side(step=step, optimizer=side.optimizer)


def test_the_search_ends_where_memory_does():
    found = fits.searched(lambda: limited(12), [KIND], [KIND.near])
    assert [f.size for f in found] == [12]


def test_rows_at_once_are_halved_until_memory_is_enough():
    def attempt(rows: int, most: int) -> int:
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rows

    assert fits.halved(partial(attempt, most=70), 256) == 64
    with pytest.raises(HoneError, match="one row at once"):
        fits.halved(partial(attempt, most=0), 4)


def test_an_error_that_is_not_of_memory_is_told():
    def broken() -> None:
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="multiplied"):
        fits.ends(broken)


def test_rows_name_what_is_beside_ours():
    small = fits.Kind(name="most rows", unit="rows", sizes=lambda n: (n, LENGTH), most=2, near=1, near_again=2)
    rows = list(fits.measured(subject(torch.float32), [small], where="here"))
    with_it, without = "with gradient checkpointing, its default", "without gradient checkpointing"
    assert [r["name"] for r in rows] == [
        f"here tiny: most rows in memory, beside TRL {how}" for how in (with_it, without)
    ]
    assert all((r["ours"], r["peer"], r["goal"], r["unit"]) == (2, 2, None, "rows") for r in rows)
