"""Every setting of every algorithm does something, and a wrong one is refused with the remedy."""

import inspect
import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import algo_cases
import pytest
import torch
from algo_cases import ALL, rollout
from each import each

from hone import algo as algorithms
from hone.algo import ALGORITHMS, Algorithm, assign_credit
from hone.algo.select import reward_of
from hone.algo.settings import RANGES, Range
from hone.errors import HoneError
from hone.types import Stop

torch.set_num_threads(1)

# a value that differs from the default, and the settings under which it matters
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "average": ("row", {}),
    "backtracks": (3, {}),
    "bad": (2.0, {}),
    "beta": (0.5, {}),
    "bootstrap": (True, {}),
    "centre": (0.3, {}),
    "cg_steps": (3, {}),
    "clip": (0.01, {}),
    "damping": (0.5, {}),
    "decay": (0.5, {}),
    "delta": (0.5, {}),
    "dual": (1.01, {}),
    "entropy": (0.3, {}),
    "exact": (True, {}),
    "gamma": (0.7, {}),
    "good": (2.0, {}),
    "grpo.average": ("token", {}),
    "high": (1e-6, {}),
    "keep": (1, {}),
    "kl": ("loss:k2*ratio", {"beta": 0.1}),
    "kl_target": (0.3, {"beta": 0.1}),
    "lam": (0.3, {}),
    "limit": (3, {}),
    "loss": ("bce", {}),
    "low": (1e-6, {}),
    "margin": (9, {}),
    "max_ratio": (0.5, {}),
    "max_tokens": (3, {}),
    "odds": (0.7, {}),
    "overlong": ("filter", {}),
    "process": (True, {}),
    "ratio": ("row", {}),
    "smoothing": (0.2, {}),
    "threshold": (0.5, {}),
    "top_k": (3, {}),
    "value": (0.9, {}),
    "value_clip": (None, {}),
}
SETTINGS = [(name, setting) for name in ALL for setting in inspect.signature(ALGORITHMS[name]).parameters]

GROUPS = [
    [rollout([1] * 9, 1.0), rollout([1] * 9, 1.0), rollout([2], 1.0), rollout([3] * 10, 0.5, stop=Stop.LENGTH)],
    [rollout([4], 0.5), rollout([5, 5], 0.5), rollout([6], None)],
]


def portrait(algo: Algorithm) -> list[Any]:
    """All that an algorithm does, as plain numbers."""
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(batch)
    loss, grads = algo_cases.loss_and_gradient(fwd, batch, algo)
    lean = algo_cases.lean(batch, algo)
    return [
        [(r.tokens, reward_of(r)) for g in algo.select(GROUPS) for r in g],
        {n: x.tolist() for n, x in assign_credit(lean, algo).columns().items() if n in ("adv", "returns")},
        batch.token_weight.tolist(),
        (loss.item(), {n: g.tolist() for n, g in grads.items()}),
        [(c.column, c.start, c.reads, *(c.update(0.2, x) for x in (0.5, 0.1, 1e-3))) for c in algo.control],
        [(n, term(fwd, batch).tolist()) for n, term in algo.watch],
        (algo.trust_region, algo.teacher, sorted(algo.needs), sorted(algo.wants)),
    ]


@each(("name", "setting"), SETTINGS)
def test_every_setting_does_something(name: str, setting: str) -> None:
    value, context = OTHER.get(f"{name}.{setting}") or OTHER[setting]
    known = inspect.signature(ALGORITHMS[name]).parameters
    context = {k: v for k, v in context.items() if k in known and k != setting}
    plain, changed = ALGORITHMS[name](**context), ALGORITHMS[name](**context, **{setting: value})
    assert repr(portrait(plain)) != repr(portrait(changed))


def numeric(name: str) -> list[str]:
    hints = get_type_hints(ALGORITHMS[name])
    return [s for n, s in SETTINGS if n == name and {float, int} & {hints[s], *get_args(hints[s])}]


NUMERIC = [(name, setting) for name in ALL for setting in numeric(name)]


@each(("name", "setting"), NUMERIC)
def test_every_number_has_a_range_and_what_is_no_number_is_refused(name: str, setting: str) -> None:
    assert setting in RANGES, f"give {setting} a range in algo/settings"
    for wrong in (math.nan, math.inf, -math.inf, "0.1", True):
        with pytest.raises(HoneError, match=f"{name}: {setting} is .*it must be"):
            ALGORITHMS[name](**{setting: wrong})
    if RANGES[setting] != Range():
        with pytest.raises(HoneError, match=f"{name}: {setting} is .*it must be"):
            ALGORITHMS[name](**{setting: -1})


@each(
    "build",
    [
        lambda: algorithms.ppo(clip=0.0),
        lambda: algorithms.ppo(dual=1.0),
        lambda: algorithms.ppo(lam=1.01),
        lambda: algorithms.ppo(gamma=1.01),
        lambda: algorithms.ppo(kl_target=0.1),
        lambda: algorithms.ppo(beta=0.1, kl_target=0.0),
        lambda: algorithms.ppo(kl="loss:k1"),
        lambda: algorithms.ppo(kl="reward:k2"),
        lambda: algorithms.ppo(kl="reward:k3"),
        lambda: algorithms.ppo(kl="reward:exact"),
        lambda: algorithms.ppo(kl="k1"),
        lambda: algorithms.ppo(kl="loss:k4"),
        lambda: algorithms.ppo(kl="reward:k1*ratio"),
        lambda: algorithms.ppo(kl="loss:exact*ratio"),
        lambda: algorithms.ppo(kl="loss:k2*rho"),
        lambda: algorithms.grpo(ratio="sequence"),
        lambda: algorithms.ppo_penalty(beta=0.0),
        lambda: algorithms.klq(beta=0.0),
        lambda: algorithms.trpo(cg_steps=0),
        lambda: algorithms.trpo(cg_steps=2.5),  # pyright: ignore[reportArgumentType]
        lambda: algorithms.grpo(process=True, kl="reward:k1"),
        lambda: algorithms.grpo(lam=0.5, kl="reward:k1"),
        lambda: algorithms.dapo(overlong="drop"),
        lambda: algorithms.dapo(limit=10, margin=11),
        lambda: algorithms.sft(average="sum"),
        lambda: algorithms.pointwise_reward_model(loss="mse"),
        lambda: algorithms.dpo(beta=0.0),
        lambda: algorithms.dpo(smoothing=0.5),
        lambda: algorithms.ipo(beta=0.0),
        lambda: algorithms.reinforce_baseline(decay=1.0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_line(build: Callable[[], Algorithm]) -> None:
    with pytest.raises(HoneError) as error:
        build()
    assert "\n" not in str(error.value)
    assert ":" in str(error.value), "it names the remedy"


def test_the_edges_of_the_ranges_are_allowed() -> None:
    algorithms.ppo(lam=0.0, gamma=1.0, value=0.0, value_clip=None, dual=None, kl_target=None)
    algorithms.simpo(gamma=3.0)
    algorithms.grpo(beta=0, clip=2, lam=None)


def test_a_misspelt_setting_is_an_error() -> None:
    with pytest.raises(TypeError, match="clpi"):
        algorithms.ppo(clpi=0.1)  # pyright: ignore[reportCallIssue]


def test_beta_zero_needs_no_reference() -> None:
    for name in ALL:
        if name not in ("ppo_penalty", "klq") and "kl" in inspect.signature(ALGORITHMS[name]).parameters:
            assert not ALGORITHMS[name](beta=0.0).needs & {"ref_logp", "ref_kl", "kl_coef"}
