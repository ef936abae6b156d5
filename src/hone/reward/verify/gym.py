"""Tasks of the package reasoning-gym: `data=gym:NAME` makes them, and `reward=gym` marks each as the package does."""

from functools import cache
from typing import Any

from hone.errors import HoneError
from hone.reward.outcome import invalid
from hone.reward.verify.format import answered
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
    """The package's own mark, from 0 to 1, of the answer tag, or without one of all that is said.

    0 for an answer at which the package raises, if it can read the gold one: `prime_factorization` does so at words.
    """
    name, entry = task.extra.get("gym"), task.extra.get("metadata")
    if not isinstance(name, str) or entry is None:
        return invalid("the task is not of reasoning-gym: it has no columns gym and metadata")
    answer = answered(completion)[:MAX_ANSWER]
    whole = {"question": task.extra.get("question", ""), "answer": task.answer, "metadata": entry}
    mark = _marker(name)
    try:
        return Outcome(value=float(mark(answer, whole)))
    except Exception:
        if task.answer is None or mark(task.answer, whole) != 1:
            raise
        return Outcome(value=0.0)
