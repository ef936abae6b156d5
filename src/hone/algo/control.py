"""Numbers that an algorithm adapts between iterations. The learner's state holds them, and so does a checkpoint. Each
is written into a column of the batch before the iteration, so that the loss reads it as data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Update = Callable[[float, float], float]  # (value now, metric seen) -> next value


def keep(value: float, seen: float) -> float:
    """No change."""
    return value


def double_or_halve(beta: float, kl: float, *, target: float) -> float:
    """Twice beta when KL > 1.5 target, half when KL < target / 1.5  (PPO-penalty)"""
    if kl > 1.5 * target:
        return beta * 2
    return beta / 2 if kl < target / 1.5 else beta


def proportional(beta: float, kl: float, *, target: float, gain: float = 0.1) -> float:
    """beta (1 + gain clip(KL/target - 1, -0.2, 0.2))  (adaptive KL of RLHF)"""
    return beta * (1 + gain * max(-0.2, min(0.2, kl / target - 1)))


def exponential_mean(mean: float, seen: float, *, decay: float) -> float:
    """decay mean + (1 - decay) seen"""
    return decay * mean + (1 - decay) * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Column `column` starts at `start`; after each iteration update(value, metrics[reads]) is the next value."""

    column: str
    start: float
    reads: str = ""  # the metric it follows; "" for a constant
    update: Update = keep


def constant(column: str, value: float) -> Control:
    """A coefficient that does not change."""
    return Control(column=column, start=value)


def adaptive_kl(start: float, *, target: float, reads: str) -> Control:
    """The KL coefficient that steers the per-token KL towards `target`."""
    return Control(column="kl_coef", start=start, reads=reads, update=partial(proportional, target=target))


def penalty_kl(start: float, *, target: float) -> Control:
    """PPO-penalty's beta, by the KL from the old policy measured after the update."""
    return Control(column="kl_coef", start=start, reads="update_kl", update=partial(double_or_halve, target=target))


def running_baseline(decay: float) -> Control:
    """A running mean of earlier iterations' rewards, so it does not depend on the actions of this one."""
    return Control(column="baseline", start=0.0, reads="reward", update=partial(exponential_mean, decay=decay))
