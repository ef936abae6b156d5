"""What a reward gives to right answers and to answers of other rows: the first must score 1, the others 0."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hone.reward.score import RewardScorer
from hone.types import Outcome, Rollout, Task

# The forms in which an answer is tried, the one that Hone's verifiers read first.
FORMS = (
    "<answer>{}</answer>",
    "<think>\n</think>\n<answer>{}</answer>",
    "{}",
    r"\boxed{{{}}}",
    "#### {}",
    "The answer is {}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A row on which the reward is not what it must be."""

    row: int  # counts from 1
    kind: str  # gold: refused; shuffled: accepted; invalid: no number; missing: nothing to try
    answer: str  # what was tried
    gold: str
    value: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What became of every row."""

    tasks: int
    gold: int  # right answers that score 1
    shuffled: int  # answers of other rows that score 0
    tried: int  # of those; rows whose answers are all alike have none
    misses: Sequence[Miss] = field(default_factory=list[Miss])


def written(task: Task, text: str) -> Rollout:
    """A completion that was not sampled."""
    return Rollout(tokens=[0], mask=[True], task=task, text=text)


def prove(
    reward: RewardScorer,
    tasks: Sequence[Task],
    *,
    golds: Sequence[str | None],
    bad: Mapping[int, str] | None = None,
    seed: int = 0,
) -> Proof:
    """Each right answer in the first form that scores 1, and in that form the answer of another row.

    bad: what is wrong with some of the rows, which then have no answer.
    """
    there = {i: gold for i, gold in enumerate(golds) if gold is not None and gold.strip()}
    why = {i: "the column is empty" for i in range(len(tasks)) if i not in there} | dict(bad or {})
    misses = [Miss(row=i + 1, kind="missing", answer="", gold="", reason=text) for i, text in why.items()]
    best, forms = _accepted(reward, tasks, there)
    for i, outcome in best.items():
        if outcome.value != 1:
            kind = "gold" if outcome.valid else "invalid"
            misses.append(_miss(i, kind, there[i], there[i], outcome))
    others = _others(there, seed=seed)
    asked = [i for i in others if best[i].value == 1]
    found = reward([written(tasks[i], forms[i].format(others[i])) for i in asked])
    for i, outcome in zip(asked, found, strict=True):
        if outcome.value != 0:
            misses.append(_miss(i, "shuffled" if outcome.valid else "invalid", others[i], there[i], outcome))
    return Proof(
        tasks=len(tasks),
        gold=sum(o.value == 1 for o in best.values()),
        shuffled=sum(o.value == 0 for o in found),
        tried=len(asked),
        misses=sorted(misses, key=lambda miss: miss.row),
    )


def _accepted(
    reward: RewardScorer, tasks: Sequence[Task], golds: dict[int, str]
) -> tuple[dict[int, Outcome], dict[int, str]]:
    """For each row the outcome and the form of the first that scores 1, else of the first."""
    best, forms = dict[int, Outcome](), dict[int, str]()
    for form in FORMS:
        asked = [i for i in golds if i not in best or best[i].value != 1]
        for i, outcome in zip(asked, reward([written(tasks[i], form.format(golds[i])) for i in asked]), strict=True):
            if i not in best or outcome.value == 1:
                best[i], forms[i] = outcome, form
    return best, forms


def _others(golds: dict[int, str], *, seed: int) -> dict[int, str]:
    """For each row the answer of a row that is drawn for it, and is not the same text."""
    pool, draw = sorted({gold.strip() for gold in golds.values()}), random.Random(seed)
    found = dict[int, str]()
    for i, gold in golds.items() if len(pool) > 1 else ():
        other = pool[draw.randrange(len(pool))]
        found[i] = other if other != gold.strip() else pool[pool.index(other) - 1]
    return found


def _miss(row: int, kind: str, answer: str, gold: str, outcome: Outcome) -> Miss:
    return Miss(row=row + 1, kind=kind, answer=answer, gold=gold, value=outcome.value, reason=outcome.reason)
