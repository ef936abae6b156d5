"""What the rollouts of a step show: rewards, lengths, how they ended, repetition, and signs of reward hacking.

Reward hacking is a policy that serves the reward and not the task. Its signs are where the reward comes from, and a
held-out verifier that disagrees with it.
"""

from array import array
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hone.log.stats import Stats
from hone.types import Group, Rollout, Stop

HELD_OUT = "held_out"  # a part of the outcome: the score of a verifier that is not in the reward
RIGHT = 0.5  # from here on a completion counts as rewarded, and as right
MANY = 16  # from so many completions on arrays are faster
LARGEST = 2**24  # the largest table of ids
NEVER = np.uint64(2**64 - 1)  # no n-gram's number


def rollout_statistics(
    rounds: Sequence[Sequence[Group]], kept: Sequence[Sequence[Group]], *, ranks: int = 1, version: int | None = None
) -> Stats:
    """Rewards, lengths and how rollouts ended, by round of sampling. An invalid reward is counted, never averaged.

    ranks: that sample as many tokens. version: of the learner's weights, where rollouts may be older.
    """
    groups = [g for groups in rounds for g in groups]
    rollouts = [r for g in groups for r in g]
    lengths = [sum(r.mask) for r in rollouts]
    values = _valid_rewards(rollouts)
    stats = Stats()
    stats.add_all(
        reward=(sum(values), len(values)),
        invalid=(len(rollouts) - len(values), len(rollouts)),
        length=(sum(lengths), len(rollouts)),
        truncated=(sum(r.stop is Stop.LENGTH for r in rollouts), len(rollouts)),
        varied=varied(groups),
        kept=(sum(map(len, kept)), len(groups)),
        tokens=(sum(lengths), 1 / ranks),  # of all ranks
        repetition=count_repeated([r.completion() for r in rollouts]),
    )
    if version is not None:
        stats.add("lag", sum(version - r.version for r in rollouts), len(rollouts))
    for name, x in ((name, x) for r in rollouts if r.outcome for name, x in r.outcome.parts.items()):
        stats.add(f"reward/{name}", x)
    add_hacking_signs(stats, rollouts)
    return stats


def varied(groups: list[Group]) -> tuple[int, int]:
    """(groups whose valid rewards differ, groups of more than one); a rank's single rollouts count as one group."""
    compared = groups if any(len(g) > 1 for g in groups) else [[r for g in groups for r in g]]
    compared = [g for g in compared if len(g) > 1]
    return sum(len(set(_valid_rewards(g))) > 1 for g in compared), len(compared)


def _valid_rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [r.outcome.value for r in rollouts if r.outcome is not None and r.outcome.value is not None]


def add_hacking_signs(stats: Stats, rollouts: Sequence[Rollout]) -> None:
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


# --- repetition ---


def repetition(completions: Sequence[Sequence[Hashable]], n: int = 4) -> float:
    """1 - distinct / all n-grams, each counted within its own completion."""
    again, total = count_repeated(completions, n)
    return again / total if total else 0.0


def count_repeated(completions: Sequence[Sequence[Hashable]], n: int = 4) -> tuple[int, int]:
    """(n-grams that the completion had before, all n-grams)"""
    arrays = [items for items in completions if isinstance(items, array)]
    if len(arrays) == len(completions) >= MANY:
        lengths = np.array([len(items) for items in arrays])
        kinds, numbers = _numbered(np.concatenate(arrays))
        if 0 < kinds**n < 2**64:
            return _repeated_numbers(numbers, lengths, kinds, n)
    again = total = 0
    for items in completions:
        number = max(0, len(items) - n + 1)
        again += number - len(set(zip(*(items[i:] for i in range(n)), strict=False)))
        total += number
    return again, total


def _numbered(ids: NDArray[np.int64]) -> tuple[int, NDArray[np.uint64]]:
    """How many different ids there are, and the ids renumbered from 0; (0, ids) where a table would be too large."""
    if not len(ids) or ids.min() < 0 or ids.max() >= LARGEST:
        return 0, ids.astype(np.uint64)
    seen = np.zeros(int(ids.max()) + 1, dtype=np.bool_)
    seen[ids] = True
    return int(seen.sum()), (seen.cumsum() - 1).astype(np.uint64)[ids]


def _repeated_numbers(x: NDArray[np.uint64], lengths: NDArray[np.int64], kinds: int, n: int) -> tuple[int, int]:
    """`count_repeated` of concatenated rows of numbers below `kinds`: sorts each row's n-grams, each as one number."""
    code = x.copy()
    for i in range(1, min(n, len(x))):
        code[: len(x) - i] = code[: len(x) - i] * np.uint64(kinds) + x[i:]
    counts = np.maximum(lengths - n + 1, 0)
    ends = lengths.cumsum()
    inside = np.arange(len(x)) < np.repeat(ends - lengths + counts, lengths)
    table = np.full((len(lengths), max(int(counts.max()), 1)), NEVER)
    table[np.arange(table.shape[1]) < counts[:, None]] = code[inside]
    table.sort(axis=1)
    equal = int((table[:, 1:] == table[:, :-1]).sum())
    filler = np.maximum(table.shape[1] - counts - 1, 0).sum()  # equal neighbours that are padding
    return equal - int(filler), int(counts.sum())
