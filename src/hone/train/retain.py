"""Which checkpoints stay beside the newest: milestones, and the best by a metric."""

import math
from collections.abc import Collection, Mapping

BEST = "best"  # a file that names the folder, as `latest` does


def best(scores: Mapping[int, float], *, lowest: bool = False) -> int | None:
    """The step with the best score, the first of equals; None where no score is a number.

    >>> best({2: 0.5, 4: 0.7, 6: 0.7, 8: math.nan}), best({2: 0.5, 4: 0.7}, lowest=True), best({})
    (4, 2, None)
    """
    finite = {step: score for step, score in scores.items() if math.isfinite(score)}
    if not finite:
        return None
    top = min(finite.values()) if lowest else max(finite.values())
    return min(step for step, score in finite.items() if score == top)


def milestones(steps: Collection[int], every: int) -> set[int]:
    """The steps that are multiples of `every`; 0: none.

    >>> sorted(milestones(range(1, 10), 4)), milestones([4], 0)
    ([4, 8], set())
    """
    return {step for step in steps if every and step % every == 0}
