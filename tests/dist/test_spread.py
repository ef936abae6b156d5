"""Weights in parts: a skipped update, checkpoints of any number of ranks, half precision, one-byte moments."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from apart import by_ranks
from safetensors.torch import load_file
from torch import Tensor

from hone.algo import ALGORITHMS, Algorithm
from hone.storage import files
from hone.checkpoint.state import take_snapshot, restore, write_state
from hone.storage.files import optimizer_tensors
from hone.config.recipe import Recipe
from hone.data.collate import collate
from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.formats.save import save_decoder
from hone.model.lora import add_lora
from hone.train import optim
from hone.train.annotate import annotate
from hone.train.learner import Learner
from hone.train.optim import Masters
from hone.train.update import assign_credit, update, weigh
from hone.types import Batch

torch.set_num_threads(1)
Tensors = dict[str, Tensor]


def by(ranks: int, work: Callable[..., Tensors], *args: Any) -> list[Tensors]:
    """What each of several processes found; alone it is called here."""
    if ranks == 1:
        return [work(*args)]
    return by_ranks(ranks, _found, work, args)


def _found(work: Callable[..., Tensors], args: Any) -> Tensors:
    return {name: x.detach().clone() for name, x in work(*args).items()}


def learner_of(algo: Algorithm, *, lora: bool = False, bits: int = 32, width: int = 8) -> Learner:
    """In float64, spread where there are ranks."""
    base = tiny.decoder(width=width, layers=2, dtype=torch.float64)
    if lora:
        add_lora(base, rank=2, alpha=4.0, targets=("all-linear",))
    learner = tiny.learner_for(algo, base=base, lr=0.01, micro_rows=3)
    if dist.is_initialized():
        tiny.spread_learner(learner, lr=0.01, bits=bits)
    elif bits == 8:
        policy = learner.policy
        learner.optimizer = optim.adamw(policy.actor_parameters(), policy.critic_parameters(), lr=0.01, bits=8)
    return learner


def share(batch: Batch) -> Batch:
    """The first rank has four rows, the second the others."""
    if not dist.is_initialized():
        return batch
    cuts = [0, 4, len(batch), len(batch)]
    return batch.rows(slice(cuts[dist.get_rank()], cuts[dist.get_rank() + 1]))


def taken(learner: Learner, algo: Algorithm, number: int, *, poison: bool = False) -> list[float]:
    """So many updates; poison: the last row's weight is NaN in the second one."""
    norms = list[float]()
    for i in range(number):
        batch = collate(tiny.groups_for(algo, seed=i))
        batch = weigh(assign_credit(annotate(share(batch), algo, learner), algo), algo)
        if poison and i == 1 and len(batch) > 4:
            batch.token_weight[-1] = torch.nan
        norms.append(update(learner, batch, algo).means().get("grad_norm", -1.0))
    return norms


def named(learner: Learner) -> Tensors:
    return {f"{i:03}": w for i, w in enumerate(tiny.parameters_of(learner))}


def assert_close(a: Tensors, b: Tensors, *, within: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=within)


# --- an update that is not finite ---


def skipping(poison: bool) -> Tensors:
    algo = ALGORITHMS["ppo"]()
    learner = learner_of(algo)
    taken(learner, algo, 1)
    once = named(learner)
    norms = taken(learner, algo, 3, poison=poison)
    counts = {"total": torch.tensor(learner.guard.skipped_in_all), "updates": torch.tensor(learner.updates)}
    return named(learner) | {f"once {name}": w for name, w in once.items()} | counts | {"norms": torch.tensor(norms)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(ranks: int) -> None:
    (alone,) = by(1, skipping, True)
    assert int(alone["total"]) == 1
    assert int(alone["updates"]) == 3
    for seen in by(ranks, skipping, True):
        assert_close(seen, alone)


# --- checkpoints ---


def saved(folder: str, algo: str, lora: bool) -> Tensors:
    """Two updates, a checkpoint, and where one more leads."""
    learner = learner_of(made := ALGORITHMS[algo](), lora=lora)
    taken(learner, made, 2)
    whole = take_snapshot(learner.policy, learner, recipe=Recipe(), parts={})  # pyright: ignore[reportArgumentType]

    def write(aside: Path) -> None:
        assert isinstance(whole.model, Decoder)
        save_decoder(whole.model, aside, weights=whole.weights)
        write_state(aside, whole, recipe=Recipe())

    if not dist.is_initialized() or dist.get_rank() == 0:
        files.save_folder(Path(folder), write)
        assert all(p.device.type == "cpu" for p in whole.model.parameters())
    else:
        assert all(p.is_meta for p in whole.model.parameters()), "only one rank holds the whole"
    taken(learner, made, 1)
    return named(learner)


def resumed(folder: str, algo: str, lora: bool) -> Tensors:
    learner = learner_of(made := ALGORITHMS[algo](), lora=lora)
    restore(Path(folder), learner.policy, learner, parts={})  # pyright: ignore[reportArgumentType]
    assert learner.updates == 2
    taken(learner, made, 1)
    return named(learner)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("algo", "lora"), [("ppo", False), ("dpo", True)])
def test_a_checkpoint_is_the_same_whatever_number_of_ranks_wrote_it(
    algo: str, lora: bool, before: int, after: int, tmp_path: Path
) -> None:
    went_on = by(before, saved, str(tmp_path / "there"), algo, lora)
    alone = by(1, saved, str(tmp_path / "alone"), algo, lora)[0]
    for name in sorted(os.listdir(tmp_path / "alone")):
        if name.endswith(".safetensors"):
            here, there = load_file(tmp_path / "alone" / name), load_file(tmp_path / "there" / name)
            assert_close(there, here)
    for seen in (*went_on, *by(after, resumed, str(tmp_path / "there"), algo, lora)):
        assert_close(seen, alone)


# --- types of numbers ---


def packed() -> Tensors:
    """Three updates with moments of a byte, of matrices large enough to be packed, and the moments."""
    learner = learner_of(algo := ALGORITHMS["sft"](), bits=8, width=48)
    taken(learner, algo, 3)
    if learner.shards is None:
        moments = optimizer_tensors(learner.optimizer)
    else:
        moments = learner.shards.whole_moments(learner.optimizer)
    return named(learner) | {f"moment {name}": x for name, x in moments.items()}


def test_moments_of_a_byte_are_packed_alike_by_parts() -> None:
    (alone,) = by(1, packed)
    assert any(x.dtype is torch.int8 for x in alone.values())
    first, second = by(2, packed)
    assert_close(first, alone, within=1e-6)  # float32 moments of float64 gradients
    weights = [name for name in alone if not name.startswith("moment")]
    assert_close({n: second[n] for n in weights}, {n: alone[n] for n in weights}, within=1e-6)


def halved(lora: bool) -> Tensors:
    """An update in bfloat16 of float32 weights, which one process keeps as copies."""
    algo, base = ALGORITHMS["sft"](), tiny.decoder(layers=2)
    if lora:
        add_lora(base, rank=2, alpha=4.0, targets=("all-linear",))
    learner = tiny.learner_for(algo, base=base, lr=0.01, micro_rows=1)
    policy: Any = learner.policy
    if dist.is_initialized():
        tiny.spread_learner(learner, lr=0.01, half=torch.bfloat16)
    else:
        policy.to(torch.bfloat16)
        learner.masters = Masters(policy.actor_parameters())
        learner.optimizer = optim.adamw(learner.masters.of(policy.actor_parameters()), lr=0.01)
        learner.optimizer.register_step_post_hook(learner.masters.publish)
    norms = taken(learner, algo, 1)
    assert all(p.dtype is torch.float32 for p in optim.parameters_of(learner.optimizer))
    batch = collate(tiny.groups_for(algo))
    logp = policy(batch, frozenset({"logp"})).logp
    assert policy.decoder.lm_head.weight.dtype is torch.bfloat16
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    assert all(p.dtype is torch.bfloat16 for p in frozen)
    assert len(frozen) > 0 or not lora
    return {"norm": torch.tensor(norms), "logp": logp}


@pytest.mark.parametrize("lora", [False, True])
def test_half_precision_computes_as_float32_copies_do(lora: bool) -> None:
    (alone,) = by(1, halved, lora)
    for seen in by(2, halved, lora):
        # each row's gradient is the same in bfloat16, so that only sums in float32 can agree like this
        torch.testing.assert_close(seen["norm"], alone["norm"], rtol=1e-5, atol=0)
        torch.testing.assert_close(seen["logp"], alone["logp"], rtol=0, atol=0.1)


def resident() -> Tensors:
    """How many numbers this rank holds between updates, of all that are trained."""
    learner = learner_of(algo := ALGORITHMS["sft"]())
    taken(learner, algo, 1)
    held = sum(p.numel() for p in optim.parameters_of(learner.optimizer))
    moments = sum(x.numel() for state in learner.optimizer.state.values() for x in state.values() if x.ndim)
    here = sum(x.to_local().numel() for x in learner.policy.parameters()) if learner.shards else held  # pyright: ignore
    return {"held": torch.tensor([held, moments, here])}


def test_each_rank_holds_its_part_of_weights_and_moments() -> None:
    whole = by(1, resident)[0]["held"]
    parts = [seen["held"] for seen in by(2, resident)]
    assert torch.equal(parts[0] + parts[1], whole)
    assert all(2 * part[0] < 1.1 * whole[0] for part in parts)


def summed(lean: bool) -> Tensors:
    """How often each parameter got a sum over ranks in an update of two micro-batches."""
    algo = ALGORITHMS["sft"]()
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, layers=2), micro_rows=4)
    tiny.spread_learner(learner, lr=0.01, lean=lean)
    counted = dict.fromkeys(learner.trained(), 0)

    def count(name: str, _: Tensor) -> None:
        counted[name] += 1

    for name, p in learner.trained().items():
        p.register_post_accumulate_grad_hook(partial(count, name))
    taken(learner, algo, 1)
    return {"counted": torch.tensor(list(counted.values()))}


@pytest.mark.parametrize(("lean", "times"), [(False, 1), (True, 2)])
def test_gradients_are_summed_once_an_update_or_after_every_micro_batch(lean: bool, times: int) -> None:
    for seen in by(2, summed, lean):
        assert (seen["counted"] == times).all()


def refused() -> Tensors:
    from hone.dist.spread import mesh_of, shard
    from hone.model.formats.foreign import Foreign

    strange = object.__new__(Foreign)
    with pytest.raises(HoneError, match=r"train\.shard=none"):
        shard(strange, mesh_of(torch.device("cpu")))
    return {"done": torch.ones(1)}


def test_a_model_of_transformers_is_not_spread() -> None:
    assert all(seen["done"] == 1 for seen in by(2, refused))
