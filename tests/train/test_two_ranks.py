"""Two processes over gloo, in seconds: one update of a method that whitens, with a critic, is that of one process."""

from dataclasses import replace

import pytest
import tiny
import torch
import torch.distributed as dist
from apart import by_ranks
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from hone.algo import Algorithm, ppo, ppo_penalty, sft, trpo
from hone.data.collate import collate
from hone.data.feed.source import Source
from hone.dist.spread import mesh_of
from hone.launch.measure import evaluate_rows
from hone.loop import Iteration, offline
from hone.train.annotate import annotate
from hone.train.guard import count_nonfinite_weights
from hone.train.update import assign_credit, update, weigh
from hone.types import Group, Rollout

torch.set_num_threads(1)
SHARES = (slice(0, 3), slice(3, 12))  # uneven, and cut across groups


def updated(share: slice) -> tuple[list[Tensor], float]:
    """The weights after one update on this share of the rows, and the gradient's norm: Adam hides its scale."""
    algo = ppo(entropy=0.1)
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64), lr=0.01, micro_rows=2)
    batch = annotate(collate(tiny.groups_for(algo)).rows(share), algo, learner)
    stats = update(learner, weigh(assign_credit(batch, algo), algo), algo)
    return tiny.parameters_of(learner), stats.means()["grad_norm"]


def of_rank() -> tuple[list[Tensor], float]:
    return updated(SHARES[dist.get_rank()])


def test_two_ranks_with_uneven_shares_take_the_step_of_one() -> None:
    alone, norm = updated(slice(0, 12))
    for weights, there in by_ranks(2, of_rank):
        assert there == pytest.approx(norm, rel=1e-6)
        for seen, w in zip(weights, alone, strict=True):
            torch.testing.assert_close(seen, w, rtol=0, atol=1e-12)


def held_out_loss() -> float:
    algo = sft()
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64))
    return evaluate_rows(learner, tiny.groups_for(algo), algo)["loss"]


def test_the_held_out_loss_is_the_same_on_any_number_of_ranks() -> None:
    assert by_ranks(2, held_out_loss) == pytest.approx([held_out_loss()] * 2)


# --- steps without a row that is trained on ---


def moved_by_nothing(algo: Algorithm, **settings: int) -> tuple[float, int, Iteration]:
    """The most a weight moved, the updates, and the iteration in which every reward is invalid; one came before."""
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8), lr=0.01)
    for group in learner.optimizer.param_groups:
        group["weight_decay"] = 0.1

    def reward(r: Rollout) -> float | None:
        return None if learner.version else tiny.share_of_threes(r)

    run = tiny.run_online(learner, algo, reward, **settings)
    next(run)
    before, updates, control = tiny.parameters_of(learner), learner.updates, dict(learner.control)
    found = next(run)
    assert learner.control == control
    moved = [float((x - y).abs().max()) for x, y in zip(before, tiny.parameters_of(learner), strict=True)]
    return max(moved), learner.updates - updates, found


NOTHING = [(ppo(), {"epochs": 2, "minibatches": 2}), (ppo_penalty(), {}), (trpo(), {})]


def moved_by_nothing_here() -> list[tuple[float, int, Iteration]]:
    return [moved_by_nothing(algo, **settings) for algo, settings in NOTHING]


def check_nothing_moved(found: list[tuple[float, int, Iteration]]) -> None:
    for moved, updates, iteration in found:
        assert (moved, updates) == (0.0, 0)
        assert iteration.metrics["invalid"] == 1.0
        assert not {"loss", "grad_norm", "lr", "update_kl", "accepted"} & iteration.metrics.keys()


def test_a_step_whose_rewards_are_all_invalid_moves_nothing() -> None:
    check_nothing_moved(moved_by_nothing_here())


def test_nor_does_it_on_two_ranks() -> None:
    for found in by_ranks(2, moved_by_nothing_here):
        check_nothing_moved(found)


class InOrder(Source[Group]):
    """Rows in the order in which they are given."""

    def take(self, n: int) -> list[Group]:
        self._position += n
        return list(self._rows[self._position - n : self._position])


def moved_by_rows(some: int) -> float:
    """How far an offline step moves weights that have momentum. some: whether its last two rows have tokens."""
    algo = sft()
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8), lr=0.01)
    rows = tiny.groups_for(algo, groups=1)
    empty = [[replace(r, mask=[False] * len(r.mask))] for (r,) in rows]
    run = offline(InOrder([*rows, *empty[:2], *(rows if some else empty)[2:]], seed=0), learner, algo, size=4)
    next(run)
    before = tiny.parameters_of(learner)
    iteration = next(run)
    assert ("loss" in iteration.metrics) == bool(some)
    return max(float((x - y).abs().max()) for x, y in zip(before, tiny.parameters_of(learner), strict=True))


@pytest.mark.parametrize("some", [0, 1])
def test_an_offline_step_on_nothing_moves_nothing_and_one_that_only_one_rank_has_rows_for_does(some: int) -> None:
    alone = moved_by_rows(some)
    assert (alone > 0) == bool(some)
    assert by_ranks(2, moved_by_rows, some) == pytest.approx([alone] * 2, rel=1e-4)


# --- weights that are not finite ---


def nonfinite_of_rank() -> tuple[int, int]:
    whole = torch.tensor([torch.nan, 1.0, torch.inf])
    spread = torch.tensor([torch.nan, 1.0, torch.inf, torch.inf])
    parts = distribute_tensor(spread, mesh_of(torch.device("cpu")), [Shard(0)])
    return count_nonfinite_weights([whole]), count_nonfinite_weights([whole, parts])


def test_numbers_that_are_not_finite_are_counted_once_on_any_number_of_ranks() -> None:
    assert by_ranks(2, nonfinite_of_rank) == [(2, 5)] * 2
