"""An update that is not finite, whatever made it so: nothing moves, every rank knows, its rows are kept."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hone.algo import Algorithm, grpo, ppo, reinforce_baseline
from hone.data.collate import collate
from hone.errors import HoneError
from hone.train import optim
from hone.train.annotate import annotate
from hone.train.guard import Guard, load_rows, mark_nonfinite_loss
from hone.train.learner import Learner
from hone.train.optim import Masters
from hone.train.update import adapt_controls, assign_credit, explain_skip, update, weigh
from hone.types import Batch, Forward

torch.set_num_threads(1)
ALGO = grpo(beta=0.1)


def world(algo: Algorithm = ALGO, *, share: slice = slice(None)) -> tuple[Learner, Batch]:
    """A learner that has taken a step, so that there are moments to spoil, and a batch for the next."""
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64), lr=0.01, micro_rows=5)
    learner.schedule = optim.learning_rate_factor("linear", warmup=2, steps=9)
    learner.start_controls(algo)
    batch = annotate(collate(tiny.groups_for(algo), dtype=torch.float64).rows(share), algo, learner)
    batch = weigh(assign_credit(batch, algo), algo)
    update(learner, batch, algo)
    return learner, batch


def everything(learner: Learner) -> list[Tensor]:
    """All that an update moves."""
    moments = [torch.as_tensor(x).clone() for s in learner.optimizer.state.values() for x in s.values()]
    rates = [torch.tensor(g["lr"]) for g in learner.optimizer.param_groups]
    return [*tiny.parameters_of(learner), *moments, *rates, torch.tensor(learner.updates)]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


def put(batch: Batch, column: str, value: float) -> Batch:
    """The value at one trained token, or on its row."""
    x, at = getattr(batch, column).clone(), batch.mask.nonzero()[-1]
    x[tuple(at[: x.ndim])] = value
    return replace(batch, **{column: x})


def a_parameter(learner: Learner) -> nn.Parameter:
    return learner.policy.decoder.model.layers[0].mlp.up_proj.weight  # pyright: ignore


def weight(learner: Learner, batch: Batch, value: float) -> Batch:
    with torch.no_grad():
        a_parameter(learner)[2, 1] = value
    return batch


def gradient(learner: Learner, batch: Batch, value: float) -> Batch:
    a_parameter(learner).register_hook(lambda g: g.index_fill(0, torch.tensor([3]), value))
    return batch


def reward(learner: Learner, batch: Batch, value: float) -> Batch:
    return weigh(assign_credit(put(batch, "reward", value), ALGO), ALGO)


def column(name: str) -> Callable[[Learner, Batch, float], Batch]:
    return lambda learner, batch, value: put(batch, name, value)


WAYS = {
    "weight": (weight, "weight decoder.model.layers.0.mlp.up_proj.weight"),
    "reward": (reward, "reward"),
    "old_logp": (column("old_logp"), "old_logp"),
    "ref_logp": (column("ref_logp"), "ref_logp"),
    "adv": (column("adv"), "adv"),
    "gradient": (gradient, "gradient of decoder.model.layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_moves_and_the_first_culprit_is_named(way: str, value: float, tmp_path: Path) -> None:
    learner, batch = world()
    learner.guard.folder = tmp_path / "bad"
    poison, culprit = WAYS[way]
    batch = poison(learner, batch, value)
    before = everything(learner)
    stats = update(learner, batch, ALGO).means()
    if way == "old_logp" and value > 0:  # a ratio of exp(-inf) = 0 is a number, with a gradient of 0
        assert stats["skipped"] == 0.0
        return
    assert stats == {"skipped": 1.0}
    assert same_bits(before, everything(learner))
    assert all(p.grad is None for p in optim.parameters_of(learner.optimizer))
    kept, about = load_rows(tmp_path / "bad/step-000001.safetensors")
    assert {n: x.numpy().tobytes() for n, x in kept.columns().items()} == {
        n: x.numpy().tobytes() for n, x in batch.columns().items()
    }
    first = about["found"][0]
    assert first["name"] == culprit
    assert first["value"] == str(value)
    assert learner.guard.events == learner.guard.drain()
    assert learner.guard.events == []


class LossOnly:
    """A term whose value is not finite and whose gradient is."""

    def __call__(self, fwd: Forward, batch: Batch) -> Tensor:
        return fwd.logp + torch.inf * batch.adv.detach().abs().ceil()


def test_a_loss_alone_that_is_not_finite_skips_too() -> None:
    learner, batch = world()
    before = everything(learner)
    spoiled = replace(ALGO, loss=((1.0, LossOnly()),))
    assert update(learner, batch, spoiled).means() == {"skipped": 1.0}
    assert same_bits(before, everything(learner))
    assert [f.name for f in explain_skip(learner, batch, spoiled)] == ["loss.0", "loss"]


def test_an_update_after_a_skip_is_the_one_without_it() -> None:
    (learner, batch), (other, same) = world(), world()
    update(learner, put(batch, "adv", torch.nan), ALGO)
    stats, expected = update(learner, batch, ALGO).means(), update(other, same, ALGO).means()
    assert stats == expected
    assert same_bits(everything(learner), everything(other))


def test_marking_a_finite_loss_changes_no_gradient() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    p.grad = torch.tensor([3.0, 1e-30])
    mark_nonfinite_loss([nn.Parameter(torch.zeros(1)), p], [torch.tensor(5.0), torch.tensor(-1e30)])
    assert p.grad.tolist() == [3.0, float(torch.tensor(1e-30))]
    mark_nonfinite_loss([p], [torch.tensor(1.0), torch.tensor(-torch.inf)])
    assert p.grad[0].isnan()
    mark_nonfinite_loss([p], [])  # a rank without rows


def test_adaptive_numbers_stay_where_an_update_was_skipped() -> None:
    learner, _ = world()
    for algo in (grpo(kl_target=0.01), reinforce_baseline()):
        learner.control = {}
        learner.start_controls(algo)
        start = dict(learner.control)
        metrics = {"ref_kl": 1.0, "reward": torch.inf}
        adapt_controls(learner, algo, metrics | {"skipped": 0.25})
        assert learner.control == start
        adapt_controls(learner, algo, metrics | {"skipped": 0.0})
        assert learner.control != start


def test_half_precision_keeps_its_copies_too() -> None:
    learner = tiny.learner_for(ALGO, base=tiny.decoder(width=8, dtype=torch.bfloat16))
    learner.masters = Masters(learner.policy.actor_parameters())
    copies = learner.masters.of(learner.policy.actor_parameters())
    learner.optimizer = optim.adamw(copies, lr=0.01)
    learner.optimizer.register_step_post_hook(learner.masters.publish)
    learner.start_controls(ALGO)
    batch = weigh(assign_credit(annotate(collate(tiny.groups_for(ALGO)), ALGO, learner), ALGO), ALGO)
    update(learner, batch, ALGO)
    before = [x.float() for x in everything(learner)], [p.detach().clone() for p in learner.policy.actor_parameters()]
    assert update(learner, put(batch, "adv", torch.nan), ALGO).means() == {"skipped": 1.0}
    assert same_bits(before[0], [x.float() for x in everything(learner)])
    assert all(torch.equal(a, b) for a, b in zip(before[1], learner.policy.actor_parameters(), strict=True))


def test_a_step_reward_that_is_nan_where_no_step_ends_is_not_blamed() -> None:
    learner, batch = world()
    steps = replace(batch, step_reward=torch.where(batch.mask, torch.nan, 1.0))
    assert explain_skip(learner, steps, ALGO) == []
    assert [f.name for f in explain_skip(learner, put(steps, "step_reward", torch.inf), ALGO)] == ["step_reward"]


def test_positions_are_those_of_the_kept_rows() -> None:
    learner, batch = world()
    row, token = batch.mask.nonzero()[-1].tolist()
    found = {f.name: f for f in explain_skip(learner, put(batch, "old_logp", torch.nan), ALGO)}
    assert found["old_logp"].at == found["ratio"].at == found["loss.0"].at == [row, token]
    assert 0 <= found["old_logp"].micro <= 2


# --- counting ---


def caught(guard: Guard, times: int, *, step: int = 1) -> None:
    _, batch = world()
    for _ in range(times):
        guard.record_skip(batch, step=step, about={}, found=[])


def test_a_row_of_skips_is_broken_by_an_update_and_the_total_is_not() -> None:
    guard = Guard(in_a_row=3, in_all=5)
    caught(guard, 2)
    guard.record_update()
    caught(guard, 2)
    assert guard.stop_reason == ""
    twin = Guard(in_a_row=3, in_all=5)
    twin.load(json.loads(json.dumps(guard.state())))
    caught(guard, 1)
    assert "5 updates in all were not finite (train.max_bad_total)" in guard.stop_reason
    twin.record_update()
    assert (twin.skipped_in_a_row, twin.skipped_in_all) == (0, 4)
    other = Guard(in_a_row=1)
    caught(other, 1)
    other.record_update()  # a later update of the same step
    assert "1 updates in a row" in other.stop_reason


def test_several_of_a_step_are_kept_apart(tmp_path: Path) -> None:
    guard = Guard(folder=tmp_path)
    caught(guard, 2, step=3)
    caught(guard, 1, step=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-000003-2.safetensors", "step-000003.safetensors", "step-000004.safetensors",
    ]  # fmt: skip


def test_a_file_that_is_no_batch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no")
    save_file({"x": torch.zeros(2)}, tmp_path / "tensors")
    for name in ("text", "tensors", "absent"):
        with pytest.raises(HoneError, match="no batch that a run left"):
            load_rows(tmp_path / name)


# --- two ranks ---

SHARES = (slice(0, 3), slice(3, 12))  # uneven, and cut across groups


def _spoil(case: str, rank: int, learner: Learner, batch: Batch) -> tuple[Batch, Algorithm]:
    """Rank 1's alone."""
    algo = ppo()
    if rank == 0:
        return batch, algo
    if case == "loss":
        return batch, replace(algo, loss=(*algo.loss, (1.0, LossOnly())))
    if case == "gradient":
        return gradient(learner, batch, torch.inf), algo
    return put(batch, "adv", torch.nan), algo


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    result = dict[str, Tensor]()
    for case in ("loss", "gradient", "adv"):
        learner, batch = world(ppo(), share=SHARES[rank])
        learner.guard.folder = Path(folder) / case
        before = everything(learner)
        stats = update(learner, *_spoil(case, rank, learner, batch)).means()
        result[f"{case} skipped"] = torch.tensor(stats == {"skipped": 1.0})
        result[f"{case} still"] = torch.tensor(same_bits(before, everything(learner)))
        result[f"{case} counted"] = torch.tensor(learner.guard.skipped_in_all == learner.guard.skipped_in_a_row == 1)
    dist.destroy_process_group()
    save_file(result, f"{folder}/{rank}.safetensors")


def test_all_ranks_skip_together_whichever_is_to_blame() -> None:
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(_work, args=(folder,), nprocs=2, start_method="fork")  # pyright: ignore
        for rank in range(2):
            found = load_file(f"{folder}/{rank}.safetensors")
            assert {name for name, x in found.items() if not x} == set()
        for case in ("loss", "gradient", "adv"):
            kept = [load_rows(Path(folder) / case / f"step-000001-rank-{rank}.safetensors") for rank in range(2)]
            assert [len(batch) for batch, _ in kept] == [3, 9]
            assert [bool(about["found"]) for _, about in kept] == [False, True]
