"""Signs that a policy serves the reward and not the task: where the reward comes from, and who disagrees with it."""

from collections.abc import Sequence

from hone.log.stats import Stats
from hone.types import Rollout

HELD_OUT = "held_out"  # among an outcome's parts: what a verifier says that has no say in the reward
RIGHT = 0.5  # from here on a completion counts as rewarded, and as right


def watch(stats: Stats, rollouts: Sequence[Rollout]) -> None:
    """Each part's share of the reward, and how often a held-out verifier disagrees.

    share/NAME: sum |added by the part| / sum |added by all|. disagreement: one says right, the other wrong.
    hacked: of those that are rewarded, the share that the held-out verifier calls wrong.
    """
    for outcome in (r.outcome for r in rollouts):
        if outcome is None or outcome.value is None:
            continue
        total = sum(map(abs, outcome.added.values()))
        for name, x in outcome.added.items():
            stats.add(f"share/{name}", abs(x), total)
        if HELD_OUT in outcome.parts:
            rewarded, right = outcome.value >= RIGHT, outcome.parts[HELD_OUT] >= RIGHT
            stats.add("disagreement", rewarded != right)
            stats.add("hacked", rewarded and not right, rewarded)
