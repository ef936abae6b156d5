"""Tasks of the package reasoning-gym: `data=gym:NAME` makes them, and `reward=gym` marks each as the package does."""

from functools import cache
from typing import Any

from hone.errors import HoneError
from hone.reward.verify.format import answer_tag, said
from hone.types import Outcome, Task

MAX_ANSWER = 100_000  # characters


@cache
def _marker(name: str) -> Any:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise HoneError('tasks of reasoning-gym need the package: pip install "hone[gym]"') from error
    return reasoning_gym.get_score_answer_fn(name)


def gym_reward(completion: str, task: Task) -> Outcome:
    """The package's own mark, from 0 to 1, of the answer tag, or without one of all that is said."""
    name, entry = task.extra.get("gym"), task.extra.get("metadata")
    if not isinstance(name, str) or entry is None:
        return Outcome(value=None, reason="the task is not of reasoning-gym: it has no columns gym and metadata")
    text = said(completion)
    tagged = answer_tag(text)
    answer = (text if tagged is None else tagged).strip()[:MAX_ANSWER]
    whole = {"question": task.extra.get("question", ""), "answer": task.answer, "metadata": entry}
    return Outcome(value=float(_marker(name)(answer, whole)))
