"""The algorithms and their parts, in pure torch: without models, files or processes.

An algorithm is a value. The function of its published name makes it: `algo = grpo(beta=0.0)`. A step of training is
`batch = assign_credit(batch, algo)`, `batch = weigh(batch, algo)`, `objective(forward, batch, algo).backward()`.
A `Batch` holds the samples, a `Forward` the policy's numbers for them; examples/minimal_grpo.py is a whole loop.
The parts: select (which rollouts), credit (rewards to advantages), terms and prefer (losses), weight (averages),
control (coefficients that adapt). table puts them together; online and offline make the algorithms; settings has
the range of each setting, explain the formulas and papers. May import: types, errors.
"""

from collections.abc import Callable

from hone.algo.offline import (
    dpo,
    ipo,
    kto,
    orpo,
    pointwise_reward_model,
    pretrain,
    process_reward_model,
    reward_model,
    sft,
    simpo,
)
from hone.algo.online import (
    a2c,
    cispo,
    dapo,
    distil,
    dr_grpo,
    expert_iteration,
    grpo,
    gspo,
    klq,
    online_dpo,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    trpo,
)
from hone.algo.table import Algorithm, Teacher, TrustRegion, assign_credit, objective
from hone.algo.weight import Totals, totals, weigh
from hone.types import Batch, Forward

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    f.__name__: f
    for f in (
        pretrain, sft, reward_model, pointwise_reward_model, process_reward_model,
        reinforce, reinforce_baseline, rloo, reinforce_pp, reinforce_pp_baseline,
        a2c, trpo, ppo, ppo_penalty, klq,
        grpo, dr_grpo, dapo, gspo, cispo,
        online_dpo, expert_iteration, distil,
        dpo, ipo, kto, orpo, simpo,
    )
}  # fmt: skip

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Batch",
    "Forward",
    "Teacher",
    "Totals",
    "TrustRegion",
    "a2c",
    "assign_credit",
    "cispo",
    "dapo",
    "distil",
    "dpo",
    "dr_grpo",
    "expert_iteration",
    "grpo",
    "gspo",
    "ipo",
    "klq",
    "kto",
    "objective",
    "online_dpo",
    "orpo",
    "pointwise_reward_model",
    "ppo",
    "ppo_penalty",
    "pretrain",
    "process_reward_model",
    "reinforce",
    "reinforce_baseline",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reward_model",
    "rloo",
    "sft",
    "simpo",
    "totals",
    "trpo",
    "weigh",
]
