"""When a run is going wrong: the thresholds at which a statistic warns, or stops the run. No torch here."""

from dataclasses import dataclass

LOW = frozenset({"entropy", "ess", "explained_variance"})  # these are bad when low, all others when high


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The values past which a statistic warns and stops; None: never."""

    warn: float | None = None
    stop: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """One limit a statistic. A run stops only after `patience` bad steps in a row."""

    entropy: Limit = Limit(warn=0.02)  # nats a token
    clip_fraction: Limit = Limit(warn=0.4)
    ess: Limit = Limit(warn=0.3)  # effective sample size of the importance weights, as a fraction of the rows
    explained_variance: Limit = Limit(warn=-0.5)  # of the returns, by the critic
    gen_kl: Limit = Limit(warn=0.05, stop=1.0)  # old policy to sampler: the same weights, so about 0
    ref_kl: Limit = Limit(warn=5.0)
    repetition: Limit = Limit(warn=0.5)
    truncated: Limit = Limit(warn=0.5)
    invalid: Limit = Limit(warn=0.05)
    patience: int = 3
