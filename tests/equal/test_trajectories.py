"""One trajectory, many ways: three steps of every algorithm, cut and laid out differently, give the same weights."""

import itertools

import pytest
import tiny
import torch
from torch import Tensor

from hone.algo import ALGORITHMS
from hone.data.source import Source
from hone.loop import offline, online

torch.set_num_threads(1)
ALL = sorted(ALGORITHMS)
STEPS = 3
QUICK = {"trpo": {"cg_steps": 3}, "expert_iteration": {"threshold": 0.2}}


def weights_after(name: str, *, micro_rows: int = 64, layout: str = "padded", seed: int = 0) -> list[Tensor]:
    """Float64, through the loops; the online ones sample for themselves."""
    algo = ALGORITHMS[name](**QUICK.get(name, {}))
    base = tiny.decoder(seed, width=8, dtype=torch.float64)
    learner = tiny.learner_for(algo, base=base, lr=0.01, micro_rows=micro_rows, layout=layout, seed=seed)
    if algo.online:
        several = 1 if algo.on_policy or algo.trust_region else 2
        run = online(
            Source(tiny.TASKS, seed=seed), tiny.Roller(base, group=4, seed=seed), tiny.scorer(tiny.share_of_threes),
            learner, algo, prompts=4, epochs=several, minibatches=several, seed=seed,
        )  # fmt: skip
    else:
        run = offline(Source(tiny.groups_for(algo, seed=seed), seed=seed), learner, algo, size=5)
    for _ in itertools.islice(run, STEPS):
        pass
    return tiny.parameters_of(learner)


@pytest.mark.parametrize("name", ALL)
def test_micro_batches_and_layout_change_no_weight(name: str) -> None:
    whole = weights_after(name)
    start = tiny.parameters_of(tiny.learner_for(ALGORITHMS[name](), base=tiny.decoder(width=8, dtype=torch.float64)))
    assert not all(torch.equal(a, b) for a, b in zip(whole, start, strict=True)), "it was trained"
    for micro_rows, layout in ((1, "padded"), (3, "packed"), (64, "packed")):
        other = weights_after(name, micro_rows=micro_rows, layout=layout)
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ALL)
def test_the_same_run_twice_is_the_same_to_the_bit(name: str) -> None:
    first, second, other = weights_after(name), weights_after(name), weights_after(name, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
