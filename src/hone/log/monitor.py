"""A monitor of the metrics that show a collapse early. It warns, and names the remedy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from hone.errors import HoneError
from hone.log.limits import LimitSpec, Severity

LOW = frozenset({"entropy", "ess", "explained_variance", "varied"})  # these go wrong when low, all others when high


REMEDIES = {
    "nonfinite": "the update is not a number; lower optim.lr or optim.clip_norm",
    "entropy": "the policy hardly varies any more; if its reward is not good yet, lower optim.lr, or raise "
    "algo.entropy where the algorithm has it",
    "clip_fraction": "updates leave the trust region; lower optim.lr or train.epochs",
    "ess": "a few samples outweigh the rest; lower train.epochs or the lag of the sampler",
    "explained_variance": "the critic is worse than a constant; raise optim.critic_lr or its warm-up",
    "gen_kl": "sampler and learner disagree; match their precision and temperature, set train.mismatch=truncate, "
    "or with train.lag=1 lower optim.lr",
    "repetition": "completions repeat themselves; raise the KL coefficient or lower optim.lr",
    "ref_kl": "the policy runs from its reference; raise the KL coefficient or lower optim.lr",
    "truncated": "completions are cut off before they end, and mostly score 0; raise sample.max_tokens, at first to "
    "twice what it is, or penalise overlong ones",
    "varied": "rewards do not differ within any group, so nothing is learned; see what the reward gives in "
    "samples.jsonl and with `hone check`, or use problems of middling difficulty or a larger sample.group",
    "invalid": "the verifier gives no reward; read the reasons in the samples and mend it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A metric that was beyond its limit for long enough; "stop" asks the loop to end the run."""

    severity: Severity
    message: str


class Monitor:
    """Compares each step's metrics with the limits. It repeats an alert only after the metric has recovered."""

    def __init__(self, limits: LimitSpec | None = None) -> None:
        self.limits = limits or LimitSpec()
        self._count: dict[str, int] = {}  # "entropy.warn" -> consecutive steps beyond the limit
        self._said: set[str] = set()

    def check(self, metrics: Mapping[str, float]) -> list[Alert]:
        """The alerts of this step, at most one a metric. A metric that is absent keeps its count."""
        watched = {name: metrics[name] for name in REMEDIES if name in metrics} | _nonfinite(metrics)
        alerts = [self._judge(name, value) for name, value in watched.items()]
        return [alert for alert in alerts if alert]

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on as if never interrupted, as JSON."""
        return {"count": dict(self._count), "said": sorted(self._said)}

    def load(self, state: Mapping[str, Any]) -> None:
        count, said = (state.get(name) if isinstance(state, Mapping) else None for name in ("count", "said"))
        numbers = list(count.values()) if isinstance(count, Mapping) else [None]
        names = said if isinstance(said, list) else [None]
        if not all(type(n) is int and n >= 0 for n in numbers) or not all(isinstance(name, str) for name in names):
            raise HoneError("cannot resume: what the monitor remembers is damaged: resume from another checkpoint")
        self._count, self._said = dict(cast(Mapping[str, int], count)), set(cast(list[str], said))

    def _judge(self, name: str, value: float) -> Alert | None:
        """Count both severities; the alert is of the graver one."""
        mild, grave = self.limits.get(name, "warn"), self.limits.get(name, "stop")
        # NaN is beyond no limit, as it compares false. It is worth a warning, but no stop.
        is_nan = mild is not None and math.isnan(value)
        warn = self._due(name, "warn", broken=is_nan or _broken(name, value, mild))
        stop = self._due(name, "stop", broken=_broken(name, value, grave))
        severity: Severity = "stop" if stop else "warn"
        threshold = grave if stop else mild
        if not (warn or stop) or threshold is None:
            return None
        message = _message(name, value, threshold=threshold, steps=self._count[f"{name}.{severity}"])
        return Alert(severity=severity, message=message)

    def _due(self, name: str, severity: Severity, *, broken: bool) -> bool:
        """True on the step at which patience ends: the metric was beyond the limit for that long."""
        key = f"{name}.{severity}"
        if not broken:
            self._count.pop(key, None)
            self._said.discard(key)
            return False
        self._count[key] = self._count.get(key, 0) + 1
        due = self._count[key] >= self.limits.patience(name, severity) and key not in self._said
        if due:
            self._said.add(key)
        return due


def _broken(name: str, value: float, threshold: float | None) -> bool:
    if threshold is None:
        return False
    return value < threshold if name in LOW else value > threshold


def _nonfinite(metrics: Mapping[str, float]) -> dict[str, float]:
    """How many of the losses and gradient norms are NaN or infinite, where there are any."""
    watched = [x for name, x in metrics.items() if name.endswith("loss") or name.startswith("grad")]
    return {"nonfinite": float(sum(not math.isfinite(x) for x in watched))} if watched else {}


def _message(name: str, value: float, *, threshold: float, steps: int) -> str:
    """entropy 0.02 below 0.05 for 3 steps: the policy hardly varies any more; ..."""
    if name == "nonfinite":
        return f"loss or gradient norm is NaN or infinite: {REMEDIES[name]}"
    side = "below" if name in LOW else "above"
    state = f"is {value}" if math.isnan(value) else f"{value:.3g} {side} {threshold:g}"
    span = f" for {steps} steps" if steps > 1 else ""
    return f"{name} {state}{span}: {REMEDIES[name]}"
