"""Checks of the first update: the loss falls, and the numbers of the recipe are those that act on the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hone.algo import terms
from hone.algo.table import Algorithm, Loss, objective
from hone.check.finding import Finding, failed, passed, skipped, warned
from hone.check.learning import CUT, apart, gradients, norm, trained
from hone.check.perturb import kept, put_back
from hone.check.probe import Probe
from hone.log.stats import Stats
from hone.train import optim, trust_region
from hone.train.cut import micro_batches
from hone.train.learner import Learner
from hone.train.step import update as take_update

FRACTIONS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5)  # of the true update: the loss must fall along one of them
FAR = 0.03  # a warm-up is there for a largest rate that is too long at first, but not for one this much too long
SMALL = 1e-7  # rates below it are near the rounding of float32 weights
EPSILON, ROUNDING = 1e-8, 1e-6  # AdamW's own, and of float32 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One true update at one rate, and the largest part of it along which the loss falls."""

    rate: float
    before: float
    after: float
    falls: float | None  # 1 for the whole step, None where no part of it helps
    taken: bool  # False where the update was skipped
    changed: bool  # whether any weight did

    @property
    def moves(self) -> bool:
        """Whether the loss changed by more than float32 rounds."""
        return not abs(self.after - self.before) <= _noise(self.before)

    @property
    def too_small(self) -> bool:
        """A step of this rate is lost in the rounding of the weights."""
        return self.rate < SMALL and not self.moves


def one_step(probe: Probe) -> Finding:
    """One true update on one batch lowers that batch's own objective, at the first rate and at the schedule's largest.

    At ratio 1 the value of a clipped or ratio loss is minus the mean advantage, often 0: it then becomes negative.
    """
    first = _try(probe)
    if not first.taken:
        seen = "the update was skipped: its gradient is not finite, or no step inside the trust region improves"
        return failed(seen, "check the rewards of the rows, or lower the trust region's damping")
    schedule, peak = probe.job.learner.schedule, _peak(probe)
    if probe.job.algo.trust_region or peak <= schedule(0):  # a trust region has a length of its own
        return _judged(first, probe, at="")
    probe.job.learner.schedule = lambda n: peak
    try:
        largest = _try(probe)
    finally:
        probe.job.learner.schedule = schedule
    if first.too_small or (first.falls == 1 and (largest.falls or 0) < FAR):
        return _judged(largest, probe, at=f" at the largest rate {largest.rate:g}")
    found = _judged(first, probe, at=f" at the first rate {first.rate:.3g}")
    return replace(found, seen=f"{found.seen}; {largest.after:.6g} at the largest rate {largest.rate:g}")


def _judged(trial: Trial, probe: Probe, *, at: str) -> Finding:
    """What the trial says of the rate, and only where no part of the step helps, of Hone."""
    seen = f"loss {trial.before:.6g} -> {trial.after:.6g} on the same batch{at} ({probe.about})"
    if trial.too_small:
        remedy = f"too small to change float32 weights: raise optim.lr ({_rate(probe):g})"
        return failed(f"{seen}: it does not move", remedy)
    if trial.falls == 1:
        return passed(seen)
    if trial.falls is not None:
        remedy = f"lower optim.lr ({_rate(probe):g}), towards {_rate(probe) * trial.falls:.1g}, or raise optim.warmup"
        return warned(f"{seen}; it falls along {trial.falls:g} of the step", remedy)
    if trial.changed and not trial.moves:
        remedy = "the gradients of these rows cancel: see signal and groups differ, or raise optim.lr"
        return warned(f"{seen}: the weights move, the loss does not", remedy)
    if probe.job.learner.masters is not None and probe.job.learner.masters.half and not trial.moves:
        seen = f"{seen}: one step is lost in the rounding of the weights, their float32 copies add steps up"
        return warned(seen, f"raise optim.lr ({_rate(probe):g}), if the loss of the run does not fall")
    seen = f"{seen}, nor along any part of it down to {FRACTIONS[-1]:g}"
    return failed(seen, "the update does not follow the loss: please report it")


def _rate(probe: Probe) -> float:
    return probe.job.learner.optimizer.param_groups[0]["base_lr"]


def _peak(probe: Probe) -> float:
    """The schedule's largest factor."""
    t = probe.job.recipe.train
    return max(map(probe.job.learner.schedule, range(t.steps * t.epochs * t.minibatches)))


def _noise(loss: float) -> float:
    return ROUNDING * max(1.0, abs(loss))


def _try(probe: Probe) -> Trial:
    """Step, look, and where the loss did not fall, go back towards the start until it does."""
    parameters, loss = trained(probe), _measured(probe.job.algo)
    before = _loss(probe, loss)
    start = [p.detach().clone() for p in parameters]
    with kept(probe.job.learner, parameters):
        stats = _update(probe)
        end = [p.detach().clone() for p in parameters]
        after = _loss(probe, loss)
        falls = 1.0 if after < before else None
        for fraction in () if falls else FRACTIONS:
            if _at(probe, start, end, fraction=fraction, loss=loss) < before - _noise(before):
                falls = fraction
                break
    rate = _rate(probe) * probe.job.learner.schedule(probe.job.learner.updates)
    taken = not stats.get("skipped") and stats.get("accepted", 1.0) != 0
    changed = any(not torch.equal(a, b) for a, b in zip(start, end, strict=True))
    return Trial(rate=rate, before=before, after=after, falls=falls, taken=taken, changed=changed)


def _measured(algo: Algorithm) -> Loss:
    """The loss as a function that its gradient belongs to: of a trust region the surrogate alone, of CISPO's term the
    one with its capped ratio held at 1, for its value moves with a ratio that its gradient holds fixed."""
    loss = algo.loss[:1] if algo.trust_region else algo.loss
    fixed = [(c, terms.policy_gradient if getattr(t, "func", t) is terms.truncated else t) for c, t in loss]
    return tuple(fixed)


def _update(probe: Probe) -> dict[str, float]:
    take = trust_region.step if probe.job.algo.trust_region else take_update
    stats: Stats = take(probe.job.learner, probe.batch, probe.job.algo)
    return stats.means()


@torch.no_grad()
def _loss(probe: Probe, loss: Loss) -> float:
    learner, algo = probe.job.learner, probe.job.algo
    parts = micro_batches(probe.batch, rows=learner.micro_rows, unit=algo.unit)
    return sum(objective(learner.policy(micro, algo.wants), micro, loss).double().item() for micro in parts)


def _at(probe: Probe, start: Sequence[Tensor], end: Sequence[Tensor], *, fraction: float, loss: Loss) -> float:
    put_back(trained(probe), [a + fraction * (b - a) for a, b in zip(start, end, strict=True)])
    return _loss(probe, loss)


def settings(probe: Probe) -> Finding:
    """The optimiser holds every trained parameter once, with the recipe's rate, decay and clipping."""
    o, learner = probe.job.recipe.optim, probe.job.learner
    critic = {id(p) for p in learner.policy.critic_parameters()}
    held = [id(p) for p in optim.parameters_of(learner.optimizer)]
    remedy = "this is a bug of Hone or of code that builds the optimiser: please report it"
    if sorted(held) != sorted(id(p) for p in trained(probe)):
        return failed(f"the optimiser holds {len(held)} of {len(trained(probe))} trained parameters", remedy)
    for group in learner.optimizer.param_groups:
        of_critic = id(group["params"][0]) in critic
        rate = o.critic_lr if of_critic and o.critic_lr is not None else o.lr
        decay = o.weight_decay if group["params"][0].ndim >= 2 else 0.0
        found = (group["base_lr"], group["weight_decay"], tuple(group["betas"]))
        if found != (rate, decay, tuple(o.betas)):
            return failed(f"rate, decay and betas {found}, the recipe says {(rate, decay, tuple(o.betas))}", remedy)
    if learner.clip_norm != o.clip_norm:
        return failed(f"gradients are clipped at {learner.clip_norm:g}, the recipe says {o.clip_norm:g}", remedy)
    return _schedule(probe)


def _schedule(probe: Probe) -> Finding:
    o, t, learner = probe.job.recipe.optim, probe.job.recipe.train, probe.job.learner
    steps = t.steps * t.epochs * t.minibatches
    factors = [
        learner.schedule(n) for n in sorted({0, *range(0, steps, max(1, steps // 50)), min(o.warmup, steps - 1)})
    ]
    seen = (
        f"rate {o.lr:g} x {factors[0]:.3g} at first, x {max(factors):.3g} at most, x {factors[-1]:.3g} at last; "
        f"decay {o.weight_decay:g}; clipped at {o.clip_norm:g}"
    )
    if min(factors) < 0 or max(factors) <= 0 or max(factors) > 1:
        return failed(seen, "the schedule must stay between 0 and 1, and above 0 somewhere")
    if o.warmup >= steps:
        return warned(
            f"{seen}; the warm-up of {o.warmup} updates outlasts the {steps} of the run", "lower optim.warmup"
        )
    return passed(seen)


def in_force(probe: Probe) -> Finding:
    """The first step is p (1 - lr decay) - lr g / (|g| + eps), where g is the batch's gradient, clipped."""
    learner, parameters = probe.job.learner, trained(probe)
    start = {id(p): p.detach().to(torch.float64, copy=True) for p in parameters}
    true = gradients(learner, probe.batch, probe.job.algo, rows=learner.micro_rows).tensors
    with kept(learner, parameters):
        _update(probe)
        seen_by = [_moment(learner.optimizer, p) for p in optim.parameters_of(learner.optimizer)]
        worst, moved = _off(learner, start)
    size, limit = norm(seen_by), learner.clip_norm
    seen = f"largest change {moved:.3g}, within {worst:.1e} of what rate and decay give; clipped norm {size:.3g}"
    remedy = "learning rate, weight decay or clipping of the recipe do not act: please report it"
    rate = _rate(probe) * learner.schedule(learner.updates)
    if rate < SMALL and not moved:
        return skipped(f"the first rate, {rate:.3g}, changes no weight: see one step")
    if not moved or not worst <= 0.01:
        return failed(seen, remedy)
    if size > limit * (1 + 1e-4):
        return failed(f"{seen} exceeds optim.clip_norm={limit:g}", remedy)
    factor = min(1.0, limit / max(norm(true), 1e-30))
    expected = [None if g is None else factor * g for g in true]
    if not probe.job.algo.trust_region and not apart(seen_by, expected) <= CUT * max(size, 1e-30):
        return failed(f"{seen}; the optimiser was given another gradient than the batch's, clipped", remedy)
    return passed(seen)


def _moment(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor | None:
    """The gradient that AdamW's first step was given: its mean is (1 - beta) g."""
    state = optimizer.state.get(p)
    beta = next(group["betas"][0] for group in optimizer.param_groups if any(p is q for q in group["params"]))
    return state["exp_avg"] / (1 - beta) if state else None


def _off(learner: Learner, start: Mapping[int, Tensor]) -> tuple[float, float]:
    """(largest distance from AdamW's formula in units of the rate, largest change), of what the optimiser has moved."""
    worst = moved = 0.0
    for group in learner.optimizer.param_groups:
        rate = group["base_lr"] * learner.schedule(0)
        for p in group["params"]:
            moment, before, now = _moment(learner.optimizer, p), start[id(p)], p.detach().double()
            if moment is None:
                continue
            g = moment.double()
            expected = before * (1 - rate * group["weight_decay"]) - rate * g / (g.abs() + EPSILON)
            error = (now - expected).abs() - ROUNDING * before.abs()
            worst = max(worst, float(error.max()) / rate)
            moved = max(moved, float((now - before).abs().max()))
    return worst, moved
