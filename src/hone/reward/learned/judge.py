"""A language model as judge: its prompt, rubric and constitution are files, its votes are counted, failures invalid.

`judge:FILE.yaml` names the settings. The judge marks a completion on a scale ("Score: N" in its answer), or compares it
with a reference in both orders ("Winner: A", "B" or "tie"). `verdict` says which line of an answer counts.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hone.config.textfile import read_text
from hone.errors import HoneError, not_utf8
from hone.log.samples import prompt_text
from hone.reward.learned.endpoint import Failed
from hone.reward.learned.verdict import mark, winner
from hone.reward.outcome import invalid
from hone.types import Outcome, Task

Ask = Callable[..., str]  # (messages, *, temperature, max_tokens, seed) -> text, or Failed
MAX_TEXT = 50_000  # characters of a completion that are shown to the judge
PROMPTS = {
    "score": """You mark an answer.
{constitution}{rubric}
The question:
{prompt}

The answer to mark:
{completion}

{reference}Think it through, then end with one line: Score: N, where N is a number from {low} to {high}.""",
    "pair": """You compare two answers.
{constitution}{rubric}
The question:
{prompt}

Answer A:
{first}

Answer B:
{second}

Think it through, then end with one line: Winner: A, Winner: B or Winner: tie.""",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a judge's file may say; paths are relative to the file."""

    model: str = ""  # what the endpoint calls it; without an endpoint, a model's folder
    endpoint: str = ""  # http://HOST:PORT/v1
    key: str = ""  # the environment variable that holds the endpoint's key
    kind: Literal["score", "pair"] = "score"  # pair: against the column `against`
    prompt: str = ""  # a file with {prompt}, {completion} or {first} and {second}; none: Hone's own
    rubric: str = ""
    constitution: str = ""
    against: str = "answer"
    low: float = 1.0
    high: float = 10.0
    votes: int = 1  # answers that are asked for (of a pair, in each order) and averaged
    both_orders: bool = True
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 8  # requests at a time
    retries: int = 3
    timeout: float = 60.0  # seconds a request
    budget: int = 10_000  # requests in all
    seed: int = 0


def check(settings: Settings, where: str | Path) -> None:
    """HoneError where a setting makes no sense; where: the file that it is of."""
    least = {"votes": 1, "max_tokens": 1, "concurrency": 1, "retries": 0, "budget": 1}
    wrong = {name: f"{low} or more" for name, low in least.items() if getattr(settings, name) < low}
    wrong |= {} if settings.model else {"model": "the judge's name"}
    wrong |= {} if settings.timeout > 0 else {"timeout": "seconds, more than 0"}
    wrong |= {} if settings.low < settings.high else {"high": f"a mark above low, {settings.low:g}"}
    for name, right in wrong.items():
        raise HoneError(f"{where}: {name} is {getattr(settings, name)!r}: set it to {right}")


class Judge:
    """An async reward: the mean vote of the judge, or invalid where half of the votes or more failed."""

    def __init__(self, settings: Settings, ask: Ask, *, folder: Path) -> None:
        self.settings, self._ask = settings, ask
        self._template = _file(folder, settings.prompt) or PROMPTS[settings.kind]
        self._texts = {"rubric": _file(folder, settings.rubric), "constitution": _file(folder, settings.constitution)}
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="hone-judge")
        needed = ("first", "second") if settings.kind == "pair" else ("completion",)
        if lacking := [name for name in needed if "{" + name + "}" not in self._template]:
            raise HoneError(
                f"the judge's prompt {settings.prompt} has no {{{lacking[0]}}}: show the judge what to mark"
            )

    async def __call__(self, completion: str, task: Task) -> Outcome:
        """Asks for every vote at once."""
        reference = _reference(task, self.settings.against)
        if self.settings.kind == "pair" and reference is None:
            return invalid(f"the task has no {self.settings.against} to compare with")
        questions = self._questions(completion[:MAX_TEXT], task, reference or "")
        loop, s = asyncio.get_running_loop(), self.settings
        waiting = [loop.run_in_executor(self._pool, self._vote, text, s.seed + n) for n, text in enumerate(questions)]
        return self._counted(await asyncio.gather(*waiting))

    def _questions(self, completion: str, task: Task, reference: str) -> list[str]:
        s = self.settings
        about: dict[str, Any] = {name: text and f"{text}\n" for name, text in self._texts.items()}
        about |= {"prompt": prompt_text(task), "low": f"{s.low:g}", "high": f"{s.high:g}", "answer": reference}
        about["reference"] = f"The reference answer:\n{reference}\n\n" if reference else ""
        if s.kind == "score":
            return [_filled(self._template, {**about, "completion": completion})] * s.votes
        one = _filled(self._template, {**about, "first": completion, "second": reference})
        other = _filled(self._template, {**about, "first": reference, "second": completion})
        return [one] * s.votes + ([other] * s.votes if s.both_orders else [])

    def _vote(self, question: str, seed: int) -> str | Failed:
        s = self.settings
        try:
            return self._ask(
                [{"role": "user", "content": question}], temperature=s.temperature, max_tokens=s.max_tokens, seed=seed
            )
        except Failed as error:
            return error

    def _counted(self, answers: Sequence[str | Failed]) -> Outcome:
        s, values, why = self.settings, list[float](), ""
        for n, answer in enumerate(answers):
            value = None if isinstance(answer, Failed) else self._value(answer, turned=n >= s.votes)
            if value is not None:
                values.append(value)
            else:
                why = str(answer) if isinstance(answer, Failed) else f"no verdict in {answer[-100:]!r}"
        if 2 * len(values) <= len(answers):
            return invalid(f"{len(answers) - len(values)} of {len(answers)} votes of the judge failed: {why}")
        return Outcome(value=sum(values) / len(values))

    def _value(self, answer: str, *, turned: bool) -> float | None:
        """From 0 to 1; None where the answer has no verdict, or a mark off the scale."""
        s = self.settings
        if s.kind == "pair":
            won = {"a": 1.0, "b": 0.0, "tie": 0.5}.get(winner(answer) or "")
            return won if won is None or not turned else 1.0 - won
        given = mark(answer, low=s.low, high=s.high)
        return None if given is None else (given - s.low) / (s.high - s.low)


def _file(folder: Path, name: str) -> str:
    try:
        return read_text(folder / name) if name else ""
    except UnicodeDecodeError as error:
        raise not_utf8(folder / name, error) from error
    except (OSError, ValueError) as error:
        raise HoneError(f"the judge's file {folder / name} cannot be read ({error}): check the path") from error


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Each {name} once: braces in what is filled in stay as they are."""
    return re.sub(r"\{(\w{1,20})\}", lambda found: str(values.get(found[1], found[0])), template)


def _reference(task: Task, column: str) -> str | None:
    found = task.answer if column == "answer" else task.extra.get(column)
    return None if found is None else str(found)[:MAX_TEXT]
