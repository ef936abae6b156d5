"""Two processes over gloo, in seconds: one update of a method that whitens, with a critic, is that of one process."""

import pytest
import tiny
import torch
import torch.distributed as dist
from apart import by_ranks
from torch import Tensor

from hone.algo import ppo, sft
from hone.data.collate import collate
from hone.launch.measure import evaluate_rows
from hone.train.annotate import annotate
from hone.train.update import assign_credit, update, weigh

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
