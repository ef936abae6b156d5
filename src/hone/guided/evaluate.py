"""hone eval: what a model's completions of problems are worth."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hone.algo.select import reward_of
from hone.guided.desk import Desk, Sampling
from hone.log.progress import say
from hone.measure import summarise
from hone.reward.outcome import commonest
from hone.reward.score import score
from hone.types import Group


def evaluate(
    model: str | Path,
    data: str | Sequence[Any],
    *,
    reward: Any = "math",
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int = 64,
    seed: int = 0,
    limit: int = 0,
) -> dict[str, float]:
    """Score a model, by folder or name, on problems: mean reward with its standard error, pass@k, format, length.

    limit: the first so many problems only (0: all). How far it is, and the first completion, go to stderr.
    """
    how = Sampling(samples=samples, temperature=temperature, max_tokens=max_tokens, seed=seed)
    desk = Desk(model, data, how, limit=limit)
    if desk.tokenizer.chat_template is not None and any(isinstance(task.prompt, str) for task in desk.tasks):
        say("prompts are plain text, the model has a chat template: write messages if it was trained on chats")
    judge, groups = desk.reward(reward), list[Group]()
    for first, tasks in desk.parts():
        groups += score(desk.completions(tasks, first), judge)
        if not first:
            shown = groups[0][0]
            value, why = reward_of(shown), shown.outcome.reason if shown.outcome else ""
            mark = f"invalid: {why}" if value is None else f"reward {value}"
            say(f"the first completion ({mark}): {shown.text[:300]!r}")
        say(f"{len(groups)} of {len(desk.tasks)} problems")
    found = summarise(groups)
    warn_of_invalid(groups, say)
    return found


def warn_of_invalid(groups: Sequence[Group], say: Callable[[str], None]) -> None:
    """How many rewards are no numbers, and most often why."""
    outcomes = [r.outcome for g in groups for r in g if r.outcome]
    reason, times, bad = commonest(outcomes)
    if bad:
        say(f"{bad} of {len(outcomes)} rewards are invalid, most often ({times} times): {reason}")
