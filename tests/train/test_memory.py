"""Memory that runs out in a micro-batch: the update is that of smaller ones, and nothing is counted twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apart
import pytest
import tiny
import torch
from each import each
from torch import Tensor

from hone.algo import Algorithm, dpo, grpo, ppo, trpo
from hone.data.collate import collate
from hone.errors import HoneError
from hone.storage.names import DIVISOR
from hone.train import trust_region
from hone.train.annotate import annotate, forward_in_slices
from hone.train.learner import Learner
from hone.train.update import assign_credit, update, weigh
from hone.types import Batch

torch.set_num_threads(1)
FAILURES: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "python": MemoryError,
}


class Narrow(torch.nn.Module):
    """A policy with room for so many rows: more than that fail, in the forward or midway in the backward pass."""

    def __init__(self, inner: Any, room: int, where: str, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.inner, self.room, self.where, self.error, self.failed = inner, room, where, error, 0

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("_modules", "inner") else getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value) if name == "old" else super().__setattr__(name, value)

    def forward(self, batch: Batch, want: frozenset[str]) -> Any:
        if len(batch) > self.room and (self.where == "forward" or not torch.is_grad_enabled()):
            self._fail()
        handles = list[Any]()
        if len(batch) > self.room:  # the first parameter whose gradient is known: others' are not yet, or are already

            def fail(grad: Tensor) -> None:
                for h in handles:
                    h.remove()
                self._fail()

            handles.append(self.inner.decoder.model.layers[0].mlp.up_proj.weight.register_hook(fail))
        return self.inner(batch, want)

    def _fail(self) -> None:
        self.failed += 1
        raise self.error()


def world(algo: Algorithm, *, micro_rows: int) -> tuple[Learner, Batch]:
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64), micro_rows=micro_rows)
    learner.start_controls(algo)
    annotator = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64))
    annotator.start_controls(algo)
    batch = annotate(collate(tiny.groups_for(algo), dtype=torch.float64), algo, annotator)
    return learner, weigh(assign_credit(batch, algo), algo)


def taken(algo: Algorithm, learner: Learner, batch: Batch) -> tuple[list[Tensor], dict[str, float]]:
    take = trust_region.step if algo.trust_region else update
    stats = take(learner, batch, algo).means()
    return tiny.parameters_of(learner), stats


@each("where", ["forward", "backward"])
@each("make", [grpo, ppo, dpo, trpo], ids=lambda f: f.__name__)
def test_the_update_is_that_of_smaller_micro_batches(make: Callable[[], Algorithm], where: str):
    algo = make()
    small, batch = world(algo, micro_rows=3)
    expected, seen = taken(algo, small, batch)
    learner, batch = world(algo, micro_rows=12)
    narrow = learner.policy = Narrow(learner.policy, 3, where, FAILURES["cuda"])  # pyright: ignore
    found, stats = taken(algo, learner, batch)
    assert narrow.failed == 2
    assert learner.guard.divisor == 4
    assert stats == seen
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert learner.updates == small.updates == 1
    assert learner.guard.events == [
        "out of memory with 12 rows at once: at most 6 from here on",
        f"out of memory with 6 rows at once: at most {2 if algo.unit == 2 else 3} from here on",
    ]
    assert taken(algo, learner, batch)[1] == taken(algo, small, batch)[1]
    assert narrow.failed == 2  # the next update fits from the start


@pytest.mark.parametrize("name", FAILURES)
def test_every_way_to_say_it_is_understood(name: str):
    algo = grpo()
    learner, batch = world(algo, micro_rows=12)
    expected, _ = taken(algo, *world(algo, micro_rows=12))
    learner.policy = Narrow(learner.policy, 5, "backward", FAILURES[name])  # pyright: ignore
    for a, b in zip(expected, taken(algo, learner, batch)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_other_errors_are_not_taken_for_it():
    algo = grpo()
    learner, batch = world(algo, micro_rows=12)
    narrow = learner.policy = Narrow(learner.policy, 3, "forward", lambda: RuntimeError("shapes differ"))  # pyright: ignore
    with pytest.raises(RuntimeError, match="shapes differ"):
        update(learner, batch, algo)
    assert narrow.failed == 1


@pytest.mark.parametrize(("make", "least"), [(grpo, 1), (dpo, 2)])
def test_what_cannot_be_cut_is_an_error_with_the_remedy_and_moves_nothing(make: Callable[[], Algorithm], least: int):
    algo = make()
    learner, batch = world(algo, micro_rows=8)
    before = tiny.parameters_of(learner)
    learner.policy = Narrow(learner.policy, 0, "backward", FAILURES["cuda"])  # pyright: ignore
    with pytest.raises(HoneError, match=rf"out of memory with {least} rows at once, .*train\.recompute=always"):
        update(learner, batch, algo)
    assert learner.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


def test_passes_without_gradients_are_cut_too():
    learner, batch = world(grpo(), micro_rows=12)
    want = frozenset({"logp"})
    whole = forward_in_slices(learner.policy, batch, want, rows=12).logp
    narrow: Any = Narrow(learner.policy, 3, "forward", FAILURES["cuda"])
    found = forward_in_slices(narrow, batch, want, rows=12).logp
    assert narrow.failed == 3
    torch.testing.assert_close(whole, found, rtol=0, atol=1e-12)
    narrow.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        forward_in_slices(narrow, batch, want, rows=12)


def test_the_cut_is_part_of_a_checkpoint():
    learner, batch = world(grpo(), micro_rows=12)
    learner.halve_micro_batches(batch, 1)
    twin, _ = world(grpo(), micro_rows=12)
    twin.guard.load(learner.guard.state())
    assert [len(m) for m in twin.cut(batch, 1)] == [6, 6]
    assert twin.rows_of(batch) == 6
    twin.guard.load({"row": 0, "total": 0})  # of a run that knew of no cut
    assert [len(m) for m in twin.cut(batch, 1)] == [12]


def test_halving_goes_on_until_something_is_smaller():
    """micro_rows may be far above what there is: half of it would change nothing."""
    learner, batch = world(grpo(), micro_rows=1000)
    learner.halve_micro_batches(batch, 1)
    assert [len(m) for m in learner.cut(batch, 1)] == [6, 6]


def crowded(folder: Path) -> tuple[str, int, list[int]]:
    """On one rank: what is said where weights are shared out, and how the learner that takes its place cuts."""
    algo = grpo()
    learner, batch = world(algo, micro_rows=12)
    tiny.spread_learner(learner, lr=0.01)
    learner.guard.folder = folder / "bad"
    learner.policy = Narrow(learner.policy, 3, "forward", FAILURES["cuda"])  # pyright: ignore
    with pytest.raises(HoneError) as error:
        update(learner, batch, algo)
    after, _ = world(algo, micro_rows=12)
    after.guard.folder = folder / "bad"
    after.guard.load_divisor()
    return str(error.value), learner.updates, [len(m) for m in after.cut(batch, 1)]


def test_ranks_that_share_weights_halve_together_when_they_are_started_again(tmp_path: Path):
    """One that has left a pass midway cannot come back into it: the others wait for it there."""
    ((said, updates, cut),) = apart.by_ranks(1, crowded, tmp_path)
    assert "out of memory with 12 rows at once: resume, which goes on with at most 6 on every rank" in said
    assert updates == 0
    assert cut == [6, 6]


def test_what_was_left_is_read_with_care(tmp_path: Path):
    learner, _ = world(grpo(), micro_rows=12)
    for content, divisor in (("4", 4), ("2", 4), ("", 4), ("x", 4), ("8", 8)):
        (tmp_path / DIVISOR).write_text(content)
        learner.guard.folder = tmp_path / "bad"
        learner.guard.load_divisor()
        assert learner.guard.divisor == divisor
