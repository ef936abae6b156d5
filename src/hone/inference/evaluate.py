"""hone eval: the scores of a model's completions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.algo.select import reward_of
from hone.errors import HoneError, count_noun
from hone.eval.sample_metrics import READERS, majority_at
from hone.inference.defaults import Sampling
from hone.inference.model import Model
from hone.inference.problems import Problems
from hone.launch.measure import summarise
from hone.log.progress import say
from hone.reward.outcome import kinds
from hone.reward.score import score
from hone.types import Group

LISTED = 10  # kinds of invalid rewards that are listed


def evaluate(
    model: str | Path | Model,
    data: str | Path | Iterable[Any],
    *,
    reward: Any = "math",
    samples: int = 1,
    temperature: float | None = None,
    max_tokens: int = 0,
    seed: int = 0,
    limit: int = 0,
) -> dict[str, float]:
    """Score a model on problems: the mean reward with its standard error, pass@k, maj@k.

    model: a loaded model, or what `load` takes. data: a file, a dataset's name as in "gsm8k:test", or rows.
    reward: as in a recipe: a verifier's name, names with weights, or a function. samples: completions of each problem.
    temperature None and max_tokens 0: as the model's generation config has it, else what suits (inference/defaults.py).
    limit: the first so many problems only (0: all). How far it is, and the first completion, go to stderr.
    """
    if samples < 1:
        raise HoneError(f"samples is {samples}: set it to 1 or more")
    how = Sampling(samples=samples, temperature=temperature, max_tokens=max_tokens, seed=seed)
    problems = Problems(model, data, how, limit=limit)
    say(str(problems.resolved))
    if problems.tokenizer.chat_template is not None and any(isinstance(task.prompt, str) for task in problems.tasks):
        say("prompts are plain text, the model has a chat template: write messages if it was trained on chats")
    judge, groups = problems.reward(reward), list[Group]()
    for first, tasks in problems.parts():
        groups += score(problems.completions(tasks, first), judge)
        if not first:
            shown = groups[0][0]
            value, why = reward_of(shown), shown.outcome.reason if shown.outcome else ""
            mark = f"invalid: {why}" if value is None else f"reward {value}"
            say(f"the first completion ({mark}): {shown.text[:300]!r}")
        say(f"{len(groups)} of {len(problems.tasks)} problems")
    found = with_votes(summarise(groups), groups, say)
    warn_of_invalid(groups, say)
    if advice := problems.advice(found):
        say(advice)
    return found


def with_votes(found: Mapping[str, float], groups: Sequence[Group], say: Callable[[str], None]) -> dict[str, float]:
    """The metrics, with the share of problems that a majority of samples gets right placed after pass@k."""
    votes = majority_at(groups)
    if not votes and groups and len(groups[0]) > 1:
        say(f"no majority vote: the reward compares no answers, as {', '.join(READERS)} do")
    before = {name: x for name, x in found.items() if name.startswith(("reward", "pass@"))}
    return before | votes | dict(found)


def warn_of_invalid(groups: Sequence[Group], say: Callable[[str], None]) -> None:
    """Say how many rewards are invalid, and why, by kind."""
    outcomes = [r.outcome for g in groups for r in g if r.outcome]
    found = kinds(outcomes)
    if found:
        bad = sum(count for count, _ in found.values())
        reason, times = next((reason, count) for count, reason in found.values())
        say(f"{bad} of {len(outcomes)} rewards are invalid, most often ({count_noun(times, 'time')}): {reason}")
        for count, reason in list(found.values())[1:LISTED]:
            say(f"  {count_noun(count, 'time')}: {reason}")
