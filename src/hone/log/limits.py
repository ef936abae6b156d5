"""The limits beyond which a metric warns or stops the run. No torch here."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSpec:
    """When to warn and when to stop; None switches a limit off. KL and entropy are nats per token."""

    patience_warn: int = 3  # consecutive steps beyond a limit before it is said
    patience_stop: int = 10  # consecutive steps beyond a limit before the run is stopped
    nonfinite_warn: float | None = 0.0  # warn when more losses and gradient norms of a step are not finite
    nonfinite_stop: float | None = 0.0  # stop when more are so for patience_warn steps
    entropy_warn: float | None = 0.05  # warn when the policy's entropy is below this
    entropy_stop: float | None = 1e-4  # stop when the policy's entropy is below this
    clip_fraction_warn: float | None = 0.3  # warn when more than this share of the tokens is clipped
    clip_fraction_stop: float | None = 0.8  # stop when more than this share of the tokens is clipped
    ess_warn: float | None = 0.5  # warn when the effective sample size is less than this share of the samples
    ess_stop: float | None = 0.1  # stop when the effective sample size is less than this share of the samples
    # warn when the critic explains less than this of the returns' variance
    explained_variance_warn: float | None = -0.1
    explained_variance_stop: float | None = None  # stop when the critic explains less than this of it
    gen_kl_warn: float | None = 0.02  # warn when the KL between sampler and learner is above this
    gen_kl_stop: float | None = 0.5  # stop when the KL between sampler and learner is above this
    repetition_warn: float | None = 0.3  # warn when more than this share of n-grams repeats one of the same completion
    repetition_stop: float | None = 0.8  # stop when more than this share of n-grams repeats one of the same completion
    ref_kl_warn: float | None = 1.0  # warn when the KL between policy and reference is above this
    ref_kl_stop: float | None = 10.0  # stop when the KL between policy and reference is above this
    truncated_warn: float | None = 0.5  # warn when more than this share of completions meets the length limit
    truncated_stop: float | None = 0.98  # stop when more than this share of completions meets the length limit
    varied_warn: float | None = 0.001  # warn when the share of groups whose rewards differ is below this
    # stop when the share of groups whose rewards differ is below this; a run that has learned all there is may end so
    varied_stop: float | None = None
    invalid_warn: float | None = 0.05  # warn when more than this share of the rewards is invalid
    invalid_stop: float | None = 0.5  # stop when more than this share of the rewards is invalid

    def get(self, name: str, severity: Severity) -> float | None:
        """The limit of a metric."""
        return getattr(self, f"{name}_{severity}")

    def patience(self, name: str, severity: Severity) -> int:
        """Consecutive steps before an alert. NaN is never noise: it warns at once, and stops a few steps later."""
        if name == "nonfinite":
            return 1 if severity == "warn" else self.patience_warn
        return getattr(self, f"patience_{severity}")
