"""Where Hone and TRL compute the same: one case a method and setting, on two levels.

"logp" hands both the same log-probs (or scores) and compares loss and gradient with respect to them in float64.
"model" goes from tokens to the gradient of every parameter; TRL's fused head has log-probs in float32, whatever the
model is in, so that is the precision to expect there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hone.algo import (
    Algorithm,
    assign_credit,
    cispo,
    dapo,
    dpo,
    dr_grpo,
    grpo,
    gspo,
    kto,
    orpo,
    ppo,
    reward_model,
    rloo,
    simpo,
    terms,
    weight,
)
from hone.types import Batch
from tests.parity import house, preference, rows
from tests.parity.house import Result

TOLERANCE = {"logp": 1e-12, "model": 2e-5}
Side = Callable[["Case", str], Result]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method with Hone's settings and TRL's for the same thing."""

    name: str
    algo: Algorithm
    trl: Mapping[str, Any] = field(default_factory=dict)  # attributes of the trainer; `args__x` of its arguments
    sides: tuple[Side, Side]  # ours and the peer's
    loss: bool = True  # whether the losses are compared, or the gradients alone
    tolerance: Mapping[str, float] = field(default_factory=lambda: TOLERANCE)
    temperature: float = 1.0


# --- groups ---


def group_batch(algo: Algorithm, *, temperature: float = 1.0, on_policy: bool = False) -> Batch:
    """Annotated and credited: off policy, with a reference, and with values where there is a critic."""
    batch = rows.grouped()
    now = house.logp(batch, temperature=temperature)
    start = {c.column: c.start for c in algo.control}
    batch = replace(
        batch,
        old_logp=now if on_policy else house.old_logp(batch, temperature=temperature),
        ref_logp=house.logp(batch, seed=1, temperature=temperature),
        kl_coef=torch.full((len(batch),), start.get("kl_coef", 0.0), dtype=rows.FULL),
    )
    if "old_value" in algo.needs:
        batch = replace(batch, old_value=rows.near(now, spread=1.0, seed=5))
    return assign_credit(batch, algo)


def _ours(case: Case, level: str, *, on_policy: bool = False) -> Result:
    batch = group_batch(case.algo, temperature=case.temperature, on_policy=on_policy)
    if level == "model":
        return house.step(house.policy(temperature=case.temperature), batch, case.algo)
    return house.on_logp(house.logp(batch, temperature=case.temperature), batch, case.algo)


def _grpo(case: Case, level: str) -> Result:
    from tests.parity import peer

    batch = group_batch(case.algo, temperature=case.temperature)
    table = peer.completions(
        rows.draw(share=rows.GROUP),
        batch,
        old_per_token_logps=batch.old_logp,
        ref_per_token_logps=batch.ref_logp,
        advantages=batch.adv,
    )
    trainer = peer.grpo(case.temperature)
    if level == "model":
        return peer.accumulate(trainer, [table], **case.trl)
    return peer.group_on_logp(trainer, house.logp(batch, temperature=case.temperature), batch, table, **case.trl)


def _rloo(case: Case, level: str, *, on_policy: bool) -> Result:
    from tests.parity import peer

    batch = group_batch(case.algo, on_policy=on_policy)
    table = peer.completions(
        rows.draw(share=rows.GROUP),
        batch,
        old_logps=batch.old_logp.where(batch.mask, 0.0).sum(-1),
        advantages=batch.adv.gather(1, batch.mask.int().argmax(-1, keepdim=True)).squeeze(1),
    )
    if level == "model":
        return peer.accumulate(peer.rloo(), [table], **case.trl)
    return peer.group_on_logp(peer.rloo(), house.logp(batch), batch, table, **case.trl)


def _case(name: str, algo: Algorithm, *, temperature: float = 1.0, **trl: Any) -> Case:
    return Case(name=name, algo=algo, trl=trl, sides=(_ours, _grpo), temperature=temperature)


def _clip(low: float, high: float | None = None) -> dict[str, float]:
    return {"epsilon_low": low, "epsilon_high": low if high is None else high}


def policy_part(algo: Algorithm) -> Algorithm:
    """PPO without its critic's term: TRL's trainer of that name is gone, the clipped surrogate is not."""
    return replace(algo, loss=algo.loss[:1], wants=frozenset({"logp"}))


TRAJECTORY = replace(
    rloo(),
    loss=((1.0, partial(terms.clipped, low=0.2, high=0.2, ratio=terms.trajectory_ratio)),),
    weigh=weight.row_mean,
)

GROUPS = (
    _case("grpo, beta 0", grpo(beta=0.0), loss_type="grpo", beta=0.0, **_clip(0.2)),
    _case("grpo, k3", grpo(beta=0.04), loss_type="grpo", beta=0.04, args__use_bias_correction_kl=False, **_clip(0.2)),
    _case("grpo, k3*ratio", grpo(beta=0.04, kl="loss:k3*ratio"), loss_type="grpo", beta=0.04, **_clip(0.2)),
    _case("grpo, temperature 0.7", grpo(beta=0.0), temperature=0.7, loss_type="grpo", beta=0.0, **_clip(0.2)),
    _case("dr_grpo, beta 0", dr_grpo(), loss_type="dr_grpo", beta=0.0, **_clip(0.2)),
    _case(
        "dr_grpo, k3",
        dr_grpo(beta=0.1),
        loss_type="dr_grpo",
        beta=0.1,
        args__use_bias_correction_kl=False,
        **_clip(0.2),
    ),
    _case("dapo", dapo(), loss_type="dapo", beta=0.0, **_clip(0.2, 0.28)),
    _case("bnpo, one cut", dapo(low=0.1, high=0.4), loss_type="bnpo", beta=0.0, **_clip(0.1, 0.4)),
    _case("gspo", gspo(), loss_type="grpo", beta=0.0, importance_sampling_level="sequence", **_clip(3e-4, 4e-4)),
    _case(
        "gspo, wider clip",
        gspo(low=0.05, high=0.1),
        loss_type="grpo",
        beta=0.0,
        importance_sampling_level="sequence",
        **_clip(0.05, 0.1),
    ),
    _case("cispo", cispo(), loss_type="cispo", beta=0.0, **_clip(0.2, 5.0)),
    _case("cispo, cap 1.1", cispo(max_ratio=1.1), loss_type="cispo", beta=0.0, **_clip(0.2, 1.1)),
    _case("ppo, policy term", policy_part(ppo()), loss_type="dapo", beta=0.0, **_clip(0.2)),
    _case("ppo, dual clip", policy_part(ppo(dual=1.25)), loss_type="dapo", beta=0.0, args__delta=1.25, **_clip(0.2)),
    Case(
        name="rloo, on policy",
        algo=rloo(),
        loss=False,
        sides=(partial(_ours, on_policy=True), partial(_rloo, on_policy=True)),
    ),
    Case(name="rloo, TRL's ratio", algo=TRAJECTORY, trl=_clip(0.2), sides=(_ours, partial(_rloo, on_policy=False))),
)


# --- pairs, labels, scores ---

SINGLE = {"logp": 1e-6, "model": 2e-5}  # TRL casts what the odds are made of to float32

PREFERENCES = (
    Case(name="dpo", algo=dpo(beta=0.3), trl={"beta": 0.3}, sides=(preference.ours, preference.dpo)),
    Case(
        name="dpo, smoothing 0.1",
        algo=dpo(beta=0.3, smoothing=0.1),
        sides=(preference.ours, preference.smoothed),
        trl={"beta": 0.3, "label_smoothing": 0.1, "loss_types": ["aot_unpaired"]},
    ),
    Case(
        name="simpo",
        algo=simpo(beta=2.0, gamma=1.0),
        trl={"beta": 2.0, "simpo_gamma": 1.0},
        sides=(preference.ours, preference.simpo),
    ),
    Case(
        name="orpo, odds",
        algo=replace(orpo(odds=0.7), loss=orpo(odds=0.7).loss[1:]),
        trl={"beta": 0.7},
        sides=(preference.ours, preference.odds),
        tolerance=SINGLE,
    ),
    Case(
        name="kto",
        algo=kto(beta=0.3),
        trl={"beta": 0.3},
        sides=(preference.kto_ours, preference.kto),
    ),
    Case(
        name="kto, weights",
        algo=kto(beta=0.3, good=1.5, bad=0.5),
        trl={"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
        sides=(preference.kto_ours, preference.kto),
    ),
    Case(name="reward model, margin", algo=reward_model(), sides=(preference.scores_ours, preference.scores)),
    Case(
        name="reward model, margin and centre",
        algo=reward_model(centre=0.1),
        trl={"args__center_rewards_coefficient": 0.1},
        sides=(preference.scores_ours, preference.scores),
    ),
)

CASES = {case.name: case for case in (*GROUPS, *PREFERENCES)}
LEVELS = ("logp", "model")


def agreement(case: Case, level: str) -> tuple[float, float]:
    """The relative difference of loss and gradient; 0 for a loss that is not compared."""
    ours, peers = (side(case, level) for side in case.sides)
    loss, gradient = house.distance(ours, peers)
    return (loss if case.loss else 0.0), gradient


def losses(case: Case, level: str) -> tuple[float, float]:
    """Ours and the peer's."""
    ours, peers = (side(case, level) for side in case.sides)
    return ours.loss, peers.loss
