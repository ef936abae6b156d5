"""Checks of the first update: the loss falls, and the optimiser uses the numbers of the recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median

import torch
from torch import Tensor, nn

from hone.algo import terms
from hone.algo.table import Algorithm, Loss, objective
from hone.check.learning import CUT, Gradient, gradient_of, norm, trained
from hone.check.perturb import put_back, restore_after, rms
from hone.check.probe import Probe
from hone.check.report import Finding, fail_finding, pass_finding, skip_finding, warn_finding
from hone.log.stats import Stats
from hone.train import optim, trust_region
from hone.train.learner import Learner, micro_batches
from hone.train.update import update as take_update

FRACTIONS = (0.3, 0.1, 0.03)  # of the true update: if the rate is a little too high, the loss falls at one of them
WARMUP_FRACTION = 0.03  # a warm-up allows a largest rate that is too high at first, but not one this much too high
WARN_FRACTION = 0.1  # a rate at most ten times too high is worth a warning, a higher one ends the run
SMALL = 1e-7  # steps of lower rates are near the rounding of float32 weights
EPSILON, ROUNDING = 1e-8, 1e-6  # AdamW's epsilon, and the rounding of float32 weights
MAX_STEP = 0.5  # of a typical weight: an update that moves every weight by more destroys what the model knows
MAX_DECAY = 0.1  # of each weight: more decay is no longer a regulariser
COMPARED = 2**16  # how many numbers of a tensor are compared with AdamW's formula
# learning rates that are usual when all weights of a large model are trained; adapters take ten times as much
RATES = {
    "pretrain": (1e-4, 1e-3), "sft": (2e-6, 2e-4), "expert_iteration": (2e-6, 5e-5), "distil": (2e-6, 1e-4),
    "reward_model": (2e-6, 5e-5), "pointwise_reward_model": (2e-6, 5e-5), "process_reward_model": (2e-6, 5e-5),
    "dpo": (1e-7, 1e-5), "online": (2e-7, 1e-5),
}  # fmt: skip
HIGHEST = 1e-2  # whatever is trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One true update at one rate, and the largest fraction of it at which the loss falls."""

    rate: float
    before: float
    after: float
    falls: float | None  # 1 for the whole step; None if the loss falls at none of FRACTIONS
    helpful: float | None  # if `falls` is small: a value of optim.lr at which the loss does fall
    taken: bool = True  # False where the update was skipped
    changed: bool = True  # whether any weight did

    @property
    def moves(self) -> bool:
        """Whether the loss changed by more than float32 rounds."""
        return not abs(self.after - self.before) <= _noise(self.before)

    @property
    def too_small(self) -> bool:
        """Whether a step of this rate is lost in the rounding of the weights."""
        return self.rate < SMALL and not self.moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Force:
    """How far the first step was from AdamW's formula."""

    worst: float  # distance from the formula, in units of the rate
    moved: float  # the largest change of a weight
    clipped: float  # the norm of the gradient that the optimiser was given
    apart: float  # distance of that gradient from the batch's own, clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstUpdate:
    """The run's first update, which is made once and undone. The checks of this module read it."""

    first: Trial
    largest: Trial | None  # the same step at the schedule's largest rate, if that differs
    force: Force


def one_step(probe: Probe) -> Finding:
    """One true update on one batch lowers that batch's own objective, at the first rate and at the schedule's largest.

    At ratio 1 the value of a clipped or ratio loss is minus the mean advantage, often 0: it then becomes negative.
    """
    update = first_update(probe)
    first, largest = update.first, update.largest
    if not first.taken:
        seen = "the update was skipped: its gradient is not finite, or no step inside the trust region improves"
        return fail_finding(seen, "check the rewards of the rows, or lower the trust region's damping")
    if (finding := _step_too_large(probe, update)) is not None:
        return finding
    if largest is None:
        return _verdict_on_rate(first, probe, at="")
    if first.too_small or (first.falls == 1 and (largest.falls or 0) < WARMUP_FRACTION):
        return _verdict_on_rate(largest, probe, at=f" at the largest rate {largest.rate:g}")
    finding = _verdict_on_rate(first, probe, at=f" at the first rate {first.rate:.3g}")
    return replace(finding, seen=f"{finding.seen}; {largest.after:.6g} at the largest rate {largest.rate:g}")


def _step_too_large(probe: Probe, update: FirstUpdate) -> Finding | None:
    """A failure if one update moves every weight by about its own size, even if the loss of one batch falls."""
    learner, peak = probe.job.learner, _peak(probe)
    critic = {id(p) for p in learner.policy.critic_parameters()}
    for group in learner.optimizer.param_groups:
        of_critic = id(group["params"][0]) in critic
        if probe.job.algo.trust_region and not of_critic:
            continue  # the trust region sets the length of the actor's steps
        sizes = [size for p in group["params"] if p.ndim >= 2 and (size := rms(p))]
        share = group["base_lr"] * peak / (median(sizes) if sizes else float("inf"))
        own = of_critic and probe.job.recipe.optim.critic_lr is not None
        trial = update.largest or update.first
        if share > MAX_STEP and (own or trial.helpful is not None or trial.falls == 1):
            name = "optim.critic_lr" if own else "optim.lr"
            seen = f"{name}={group['base_lr']:g} moves a weight by {share:.2g} times a typical one's size in an update"
            loss = f"loss {trial.before:.6g} -> {trial.after:.6g} on the same batch"
            return fail_finding(f"{seen}; {loss}", _remedy(probe, None if own else trial.helpful, name=name))
    return None


def _verdict_on_rate(trial: Trial, probe: Probe, *, at: str) -> Finding:
    """The finding about the rate. Only if the loss falls at no rate, Hone is at fault."""
    seen = f"loss {trial.before:.6g} -> {trial.after:.6g} on the same batch{at} ({probe.about})"
    if trial.too_small:
        remedy = f"too small to change float32 weights: raise optim.lr ({_rate(probe):g})"
        return fail_finding(f"{seen}: it does not move", remedy)
    if trial.falls == 1:
        return pass_finding(seen)
    if trial.falls is not None and trial.falls >= WARN_FRACTION:
        remedy = f"lower optim.lr ({_rate(probe):g}), towards {_rate(probe) * trial.falls:.1g}, or raise optim.warmup"
        return warn_finding(f"{seen}; it falls along {trial.falls:g} of the step", remedy)
    if trial.helpful is not None:
        return fail_finding(f"{seen}; it falls at optim.lr={trial.helpful:.1g}", _remedy(probe, trial.helpful))
    if trial.changed and not trial.moves:
        remedy = "the gradients of these rows cancel: see signal and groups differ, or raise optim.lr"
        return warn_finding(f"{seen}: the weights move, the loss does not", remedy)
    if probe.job.learner.masters is not None and probe.job.learner.masters.half and not trial.moves:
        seen = f"{seen}: one step is lost in the rounding of the weights, their float32 copies add steps up"
        return warn_finding(seen, f"raise optim.lr ({_rate(probe):g}), if the loss of the run does not fall")
    seen = f"{seen}, nor at any lower rate"
    return fail_finding(seen, "the update does not follow the loss: please report it")


def _remedy(probe: Probe, helpful: float | None, *, name: str = "optim.lr") -> str:
    low, high = usual_rates(probe)
    of = "its adapters" if probe.job.recipe.lora.used else "all its weights"
    usual = f"{probe.job.recipe.algo_name} on {of} usually learns at {low:g} to {high:g}"
    return f"set {name}={helpful if helpful is not None else high:.1g}; {usual}"


def usual_rates(probe: Probe) -> tuple[float, float]:
    """The lowest and highest learning rates that are usual for the method, what it trains, and the model's size."""
    low, high = RATES.get(probe.job.recipe.algo_name, RATES["online" if probe.job.algo.online else "dpo"])
    more = (10 if probe.job.recipe.lora.used else 1) * (1 if probe.large else 30)
    return low * more, min(high * more, HIGHEST)


def _rate(probe: Probe) -> float:
    return probe.job.learner.optimizer.param_groups[0]["base_lr"]


def _peak(probe: Probe) -> float:
    """The schedule's largest factor."""
    t = probe.job.recipe.train
    return max(map(probe.job.learner.schedule, range(t.steps * t.epochs * t.minibatches)))


def _noise(loss: float) -> float:
    return ROUNDING * max(1.0, abs(loss))


def first_update(probe: Probe) -> FirstUpdate:
    """The first update of the run, computed once."""
    return probe.cached("first update", lambda: _first_update(probe))


def _first_update(probe: Probe) -> FirstUpdate:
    learner, parameters, loss = probe.job.learner, trained(probe), _comparable_loss(probe.job.algo)
    gradient, before = gradient_of(probe), _loss(probe, loss)
    rate, top = (_rate(probe) * factor for factor in (learner.schedule(learner.updates), _peak(probe)))
    warms_up = top > rate and not probe.job.algo.trust_region  # a trust region sets the length
    half = learner.masters is not None and learner.masters.half
    with restore_after(learner, parameters) as start:
        stats = _update(probe)
        force = _distance_from_formula(learner, dict(zip(map(id, parameters), start, strict=True)), gradient)
        changed = any(not torch.equal(p, a) for p, a in zip(parameters, start, strict=True))
        loss_at = partial(_loss_at_rate, probe, loss, start, _WeightsAfter(parameters), rate)
        first = _try_rate(probe, loss_at, rate, before, after=_loss(probe, loss))
        largest = _try_rate(probe, loss_at, top, before, after=loss_at(top)) if warms_up and not half else None
    taken = not stats.get("skipped") and stats.get("accepted", 1.0) != 0
    first = replace(first, taken=taken, changed=changed)
    if warms_up and half:  # after rounding to few bits the step is not proportional to the rate
        largest = _step_at_rate(probe, loss, top, before)
    return FirstUpdate(first=first, largest=largest, force=force)


class _WeightsAfter:
    """The weights after the update, copied when they are first asked for."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @cached_property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters]


def _loss_at_rate(
    probe: Probe, loss: Loss, start: Sequence[Tensor], end: _WeightsAfter, rate: float, other: float
) -> float:
    """The loss after a first step at another rate. AdamW's first step, with its decay, is proportional to the rate."""
    pairs = zip(start, end.weights, strict=True)
    put_back(trained(probe), (torch.lerp(a, b, other / rate) for a, b in pairs))
    return _loss(probe, loss)


def _step_at_rate(probe: Probe, loss: Loss, rate: float, before: float) -> Trial:
    """A separate update at the schedule's largest rate."""
    learner = probe.job.learner
    schedule, peak = learner.schedule, _peak(probe)
    learner.schedule = lambda n: peak
    try:
        with restore_after(learner, trained(probe)):
            _update(probe)
            after = _loss(probe, loss)
    finally:
        learner.schedule = schedule
    return Trial(rate=rate, before=before, after=after, falls=1.0 if after < before else WARN_FRACTION, helpful=None)


def _try_rate(probe: Probe, loss_at: Callable[[float], float], rate: float, before: float, *, after: float) -> Trial:
    """If the loss did not fall, try smaller steps until it does."""
    better = before - _noise(before)
    falls = 1.0 if after < before else next((f for f in FRACTIONS if loss_at(f * rate) < better), None)
    helpful = None
    if rate >= SMALL and ((falls or 0) < WARN_FRACTION or rate > usual_rates(probe)[1]):
        # rates of optim.lr, which the schedule never exceeds
        highest = min(usual_rates(probe)[1], rate * (falls or FRACTIONS[-1]))
        lower = (highest / 10**n for n in range(8))
        helpful = next((x for x in lower if x > SMALL / 100 and loss_at(x) < better), None)
    return Trial(rate=rate, before=before, after=after, falls=falls, helpful=helpful)


def _comparable_loss(algo: Algorithm) -> Loss:
    """A loss whose value falls along the gradient that an update takes.

    For a trust region this is the surrogate alone. CISPO's value moves with a ratio that its gradient holds fixed, so
    the plain policy gradient takes its place.
    """
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


def settings(probe: Probe) -> Finding:
    """The optimiser holds every trained parameter once, with the recipe's rate, decay and clipping."""
    o, learner = probe.job.recipe.optim, probe.job.learner
    critic = {id(p) for p in learner.policy.critic_parameters()}
    held = [id(p) for p in optim.parameters_of(learner.optimizer)]
    remedy = "this is a bug of Hone or of code that builds the optimiser: please report it"
    if sorted(held) != sorted(id(p) for p in trained(probe)):
        return fail_finding(f"the optimiser holds {len(held)} of {len(trained(probe))} trained parameters", remedy)
    for group in learner.optimizer.param_groups:
        of_critic = id(group["params"][0]) in critic
        rate = o.critic_lr if of_critic and o.critic_lr is not None else o.lr
        decay = o.weight_decay if group["params"][0].ndim >= 2 else 0.0
        actual = (group["base_lr"], group["weight_decay"], tuple(group["betas"]))
        if actual != (rate, decay, tuple(o.betas)):
            return fail_finding(
                f"rate, decay and betas {actual}, the recipe says {(rate, decay, tuple(o.betas))}", remedy
            )
    if (share := o.lr * o.weight_decay) >= MAX_DECAY:
        seen = f"optim.lr x optim.weight_decay takes {share:.0%} of every weight away in an update"
        return fail_finding(seen, "set optim.weight_decay to 0.1 or less")
    if learner.clip_norm != o.clip_norm:
        return fail_finding(f"gradients are clipped at {learner.clip_norm:g}, the recipe says {o.clip_norm:g}", remedy)
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
        return fail_finding(seen, "the schedule must stay between 0 and 1, and above 0 somewhere")
    if o.warmup >= steps:
        return warn_finding(
            f"{seen}; the warm-up of {o.warmup} updates outlasts the {steps} of the run", "lower optim.warmup"
        )
    return pass_finding(seen)


def in_force(probe: Probe) -> Finding:
    """The first step is p (1 - lr decay) - lr g / (|g| + eps), where g is the batch's gradient, clipped."""
    learner, force = probe.job.learner, first_update(probe).force
    size, limit = force.clipped, learner.clip_norm
    seen = (
        f"largest change {force.moved:.3g}, within {force.worst:.1e} of what rate and decay give; "
        f"clipped norm {size:.3g}"
    )
    remedy = "learning rate, weight decay or clipping of the recipe do not act: please report it"
    rate = _rate(probe) * learner.schedule(learner.updates)
    if rate < SMALL and not force.moved:
        return skip_finding(f"the first rate, {rate:.3g}, changes no weight: see one step")
    if not force.moved or not force.worst <= 0.01:
        return fail_finding(seen, remedy)
    if size > limit * (1 + 1e-4):
        return fail_finding(f"{seen} exceeds optim.clip_norm={limit:g}", remedy)
    if not probe.job.algo.trust_region and not force.apart <= CUT * max(size, 1e-30):
        return fail_finding(f"{seen}; the optimiser was given another gradient than the batch's, clipped", remedy)
    return pass_finding(seen)


def _distance_from_formula(learner: Learner, start: Mapping[int, Tensor], gradient: Gradient) -> Force:
    """Compare the first step with AdamW's formula on the batch's own gradient."""
    true = dict(zip(map(id, optim.parameters_of(learner.optimizer)), gradient.tensors, strict=True))
    factor = min(1.0, learner.clip_norm / max(norm(gradient.tensors), 1e-30))
    worst = moved = clipped = off = 0.0
    for group in learner.optimizer.param_groups:
        for p in group["params"]:
            moment, expected = _moment(learner.optimizer, p), true[id(p)]
            if moment is None or expected is None:
                off += norm([moment, expected]) ** 2  # a tensor that one side lacks counts whole
                continue
            every = -(-p.numel() // COMPARED)
            old, now, given, g = (_every_nth(x, every) for x in (start[id(p)], p, moment, expected))
            given = given / (1 - group["betas"][0])
            clipped += (norm([moment]) / (1 - group["betas"][0])) ** 2
            off += every * norm([given - factor * g]) ** 2
            error, change = _errors(
                old, now, given, rate=group["base_lr"] * learner.schedule(0), decay=group["weight_decay"]
            )
            worst, moved = max(worst, error), max(moved, change)
    return Force(worst=worst, moved=moved, clipped=clipped**0.5, apart=off**0.5)


def _moment(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> Tensor | None:
    """(1 - beta) g after AdamW's first step, where g is the gradient that it was given."""
    state = optimizer.state.get(p)
    return state["exp_avg"] if state else None


def _every_nth(x: Tensor, every: int) -> Tensor:
    """Every n-th number of a tensor."""
    return x.detach().reshape(-1)[::every].double()


def _errors(old: Tensor, now: Tensor, given: Tensor, *, rate: float, decay: float) -> tuple[float, float]:
    """(largest distance from AdamW's formula in units of the rate, largest change)"""
    expected = old * (1 - rate * decay) - rate * given / (given.abs() + EPSILON)
    error = (now - expected).abs() - ROUNDING * old.abs()
    return float(error.max()) / rate, float((now - old).abs().max())
