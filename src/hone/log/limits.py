"""When a run is going wrong: the limits past which a statistic warns, or stops the run. No torch here."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from hone.errors import HoneError

Severity = Literal["warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to warn and when to stop; None switches a limit off. KL and entropy are nats per token."""

    patience_warn: int = 3  # consecutive steps beyond the limit before it is said
    patience_stop: int = 10
    nonfinite_warn: float | None = 0.0  # how many losses and gradient norms of a step may be NaN or infinite
    nonfinite_stop: float | None = 0.0
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
    varied_warn: float | None = 0.001  # the share of groups whose rewards differ
    varied_stop: float | None = None  # a run that has learned all there is may end like this
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
        """The limit of a metric."""
        return getattr(self, f"{name}_{severity}")

    def patience(self, name: str, severity: Severity) -> int:
        """NaN is never noise: it is said at once, and a few may pass before the stop."""
        if name == "nonfinite":
            return 1 if severity == "warn" else self.patience_warn
        return getattr(self, f"patience_{severity}")
