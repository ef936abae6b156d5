"""Collapse seen early: the statistics that foretell it, and a monitor that says so with the remedy."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hone.errors import HoneError

Severity = Literal["warn", "stop"]


class GenKL(NamedTuple):
    """How far the sampler is from the learner that annotated its tokens."""

    kl: float  # mean over tokens
    gap: float  # the largest |old_logp - gen_logp|


def repetition(completions: Sequence[str | Sequence[Hashable]], n: int = 4) -> float:
    """1 - distinct / all n-grams, each counted within its own completion; text is cut into words."""
    repeated = total = 0
    for completion in completions:
        items = completion.split() if isinstance(completion, str) else completion
        grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all weigh the same, 1/n when one outweighs all, 0 when none weighs."""
    w = weights.detach().flatten().cpu().double()
    if not w.numel():
        return 1.0
    top = w.abs().max()
    if top == 0:
        return 0.0
    w = w / top  # the ratio has no scale, the squares must not overflow
    return float(w.sum() ** 2 / (w.numel() * (w**2).sum()))


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float:
    """1 - var(target - value) / var(target) over the mask; 0 where the targets do not vary."""
    v, t = _masked(values, mask), _masked(targets, mask)
    spread = t.var(correction=0) if t.numel() else torch.zeros(())
    return 0.0 if spread == 0 else float(1 - (t - v).var(correction=0) / spread)


def gen_kl(old_logp: Tensor, gen_logp: Tensor, mask: Tensor) -> GenKL:
    """exp(x) - 1 - x with x = old_logp - gen_logp, the k3 estimate of KL(gen || old); 0 where none is trained."""
    x = _masked(old_logp, mask) - _masked(gen_logp, mask)
    if not x.numel():
        return GenKL(0.0, 0.0)
    return GenKL(float((torch.expm1(x) - x).mean()), float(x.abs().max()))


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.detach()[mask.bool()].cpu().double()


@dataclass(frozen=True, slots=True)
class Rule:
    """What to watch: a metric, the side on which it goes wrong, what that means and what to do."""

    name: str
    side: Literal["below", "above"]
    remedy: str

    def broken(self, value: float, limit: float) -> bool:
        return value < limit if self.side == "below" else value > limit


RULES = (
    Rule("nonfinite", "above", "the update is not a number; lower optim.lr or clip the gradient norm"),
    Rule("entropy", "below", "the policy is collapsing; raise the entropy bonus or lower optim.lr"),
    Rule("clip_fraction", "above", "updates leave the trust region; lower optim.lr or do fewer epochs a batch"),
    Rule("ess", "below", "a few samples outweigh the rest; lower the lag or the number of epochs"),
    Rule("explained_variance", "below", "the critic is worse than a constant; raise its rate or warm it up"),
    Rule("gen_kl", "above", "sampler and learner disagree; match their precision and temperature"),
    Rule("repetition", "above", "completions repeat themselves; raise the KL coefficient or reward less length"),
    Rule("ref_kl", "above", "the policy runs from its reference; raise the KL coefficient or lower optim.lr"),
    Rule("truncated", "above", "completions hit the length limit; raise the limit or penalise overlong ones"),
    Rule("invalid", "above", "the verifier gives no reward; read the reasons in the samples and mend it"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to warn and when to stop; None switches a limit off. KL and entropy are nats per token."""

    patience_warn: int = 3  # consecutive steps beyond the limit before it is said
    patience_stop: int = 10
    nonfinite_warn: float | None = None
    nonfinite_stop: float | None = 0.0  # how many losses and gradient norms may be NaN or infinite; no patience
    entropy_warn: float | None = 0.05
    entropy_stop: float | None = 1e-4
    clip_fraction_warn: float | None = 0.3
    clip_fraction_stop: float | None = 0.8
    ess_warn: float | None = 0.5
    ess_stop: float | None = 0.1
    explained_variance_warn: float | None = -0.1
    explained_variance_stop: float | None = None
    gen_kl_warn: float | None = 0.02
    gen_kl_stop: float | None = 0.5
    repetition_warn: float | None = 0.3
    repetition_stop: float | None = 0.8
    ref_kl_warn: float | None = 1.0
    ref_kl_stop: float | None = 10.0
    truncated_warn: float | None = 0.5
    truncated_stop: float | None = 0.98
    invalid_warn: float | None = 0.05
    invalid_stop: float | None = 0.5

    def __post_init__(self) -> None:
        for name in ("patience_warn", "patience_stop"):
            if getattr(self, name) < 1:
                raise HoneError(f"{name} is {getattr(self, name)}: set it to 1 or more steps")
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and math.isnan(value):
                raise HoneError(f"limit {f.name} is NaN: set a number, or None to switch it off")

    def get(self, name: str, severity: Severity) -> float | None:
        return getattr(self, f"{name}_{severity}")

    def patience(self, name: str, severity: Severity) -> int:
        """NaN is never noise, so it is said at once."""
        return 1 if name == "nonfinite" else getattr(self, f"patience_{severity}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning_:
    """A limit passed for long enough; "stop" asks the loop to end the run."""

    step: int
    name: str
    value: float
    threshold: float
    severity: Severity
    message: str


class Monitor:
    """Compares each step's metrics with the limits; says a thing once, and again only after it recovered."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._count: dict[str, int] = {}  # "entropy_warn" -> consecutive steps beyond the limit
        self._said: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Warning_]:
        """What went wrong this step, at most one a metric; one that is absent keeps its count."""
        watched = dict(metrics) | _nonfinite(metrics)
        found = [self._judge(step, rule, watched[rule.name]) for rule in RULES if rule.name in watched]
        return [warning for warning in found if warning]

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on as if never interrupted, as JSON."""
        return {"count": dict(self._count), "said": sorted(self._said)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._count = {name: int(n) for name, n in state["count"].items()}
        self._said = set(state["said"])

    def _judge(self, step: int, rule: Rule, value: float) -> Warning_ | None:
        """Both severities are counted; only the graver one is said."""
        warn, stop = self._passed(rule, value, "warn"), self._passed(rule, value, "stop")
        severity: Severity = "stop" if stop else "warn"
        limit = self.limits.get(rule.name, severity)
        if not (warn or stop) or limit is None:
            return None
        steps = self._count[f"{rule.name}_{severity}"]
        message = _message(rule, value, limit=limit, steps=steps)
        return Warning_(step=step, name=rule.name, value=value, threshold=limit, severity=severity, message=message)

    def _passed(self, rule: Rule, value: float, severity: Severity) -> bool:
        """True on the step at which the limit has been passed for as long as patience allows."""
        key, limit = f"{rule.name}_{severity}", self.limits.get(rule.name, severity)
        # NaN compares false with every limit; a statistic that is NaN is worth a warning, but no stop.
        lost = severity == "warn" and math.isnan(value)
        if limit is None or not (lost or rule.broken(value, limit)):
            self._count.pop(key, None)
            self._said.discard(key)
            return False
        self._count[key] = self._count.get(key, 0) + 1
        due = self._count[key] >= self.limits.patience(rule.name, severity) and key not in self._said
        if due:
            self._said.add(key)
        return due


def _nonfinite(metrics: Mapping[str, float]) -> dict[str, float]:
    """How many of the losses and gradient norms are NaN or infinite, where there are any."""
    watched = [x for name, x in metrics.items() if name.endswith("loss") or name.startswith("grad")]
    return {"nonfinite": float(sum(not math.isfinite(x) for x in watched))} if watched else {}


def _message(rule: Rule, value: float, *, limit: float, steps: int) -> str:
    if rule.name == "nonfinite":
        return f"loss or gradient norm is NaN or infinite: {rule.remedy}"
    found = f"is {value}" if math.isnan(value) else f"{value:.3g} {rule.side} {limit:g}"
    span = f" for {steps} steps" if steps > 1 else ""
    return f"{rule.name} {found}{span}: {rule.remedy}"
