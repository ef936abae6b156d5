r"""A language model as judge. Its prompt, rubric and constitution are files. Its votes are averaged.

`judge:FILE.yaml` names the settings. The judge marks a completion on a scale ("Score: N" in its answer), or names the
winner of two ("Winner: A", "B" or "tie"). Where half of the votes or more fail, the outcome is invalid.

The last line of the judge's own words that states a mark counts. Thoughts, quotations (`>`, quotation marks around the
line) and fenced blocks do not count: they may repeat the completion. An answer that is one JSON object, fenced or not,
is read as JSON. An ambiguous line gives no mark: two numbers ("7 or 8", "7-8"), another scale than the one asked for
("2/5" of 10), a mark off the scale.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hone.errors import HoneError, not_utf8
from hone.log.samples import prompt_text
from hone.reward.learned.endpoint import NoAnswer
from hone.reward.outcome import invalid
from hone.reward.verify.answers import spoken_text
from hone.storage.textfile import read_text
from hone.types import Outcome, Task

MAX_LINE = 400  # characters
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})")
_MARK = r"(?:#{1,6}[ \t]*|[-*+\u2022][ \t]+|\d{1,2}[.)][ \t]+|\|[ \t]*)?"  # of a heading, a list, a table
_LABEL = r"[*_`\"'\[(]*(?:(?:my|the)\s+)?(?:(?:final|overall|total)\s+)?(?:{})[*_`\"'\])]*"
_IS = r"\s*(?:\bis\b\s*[:=]?|[:=|\uff1a])?\s*"
_DASHES = "-\u2212\u2012\u2013\u2014\u2015\uff0d"
_WRAP = r"[\s*_`$\[({|\"'~]*(?:\\boxed\s*\{)?"
_NUMBER = r"[-+\u2212\u2012-\u2015\uff0d]?\s?(?:[0-9]{1,6}(?:[.,][0-9]{1,6})?|\.[0-9]{1,6})"
# "Score (1-10): 7" and "Score out of 10: 7"
_SCALE = r"(?:\s*(?P<scale>\([^()\n]{0,30}\)|/\s?[0-9]{1,6}|out\s+of\s+[0-9]{1,6})[*_]{0,3}(?=\s{0,3}[:=]))?"
_SCORE = re.compile(
    rf"{_MARK}{_LABEL.format('score|rating|mark')}{_SCALE}(?P<says>{_IS}){_WRAP}(?P<mark>{_NUMBER})(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_OF = re.compile(
    rf"[\s*_`\]\)}}]*\(?(?:(?:points?|stars?|marks?)\s+)?"
    rf"(?:/|\b(?:out\s+)?of\b(?:\s+a)?(?:\s+(?:possible|maximum|total))?(?:\s+of\b)?|\bfrom\b"
    rf"|\bon\s+(?:a|the)\s+scale\s+(?:of|from)\s+(?P<low>{_NUMBER})\s*(?:to|[-\u2013])\s*)[\s*_`]*(?P<high>{_NUMBER})",
    re.IGNORECASE,
)
_AMBIGUOUS = re.compile(  # after the mark: a range, a fraction, a second number in digits or in words
    r"[0-9\u00bc-\u00be\u2150-\u215e]|\bto\b\s*\w+\s*$|^[\s*_]*(?:and\s+(?:a\s+)?(?:half|quarter)|point\s"
    r"|,?\s*(?:or|to|and|maybe|perhaps|-|\u2013)\s+(?:maybe\s+|perhaps\s+)?(?:zero|one|two|three|four|five|six|seven|eight|nine|ten)\b)",
    re.IGNORECASE,
)
_TAGS = re.compile(r"<(score|rating|mark|winner)>([^<>]*)</\1>", re.IGNORECASE)
_BRACKETS = re.compile(
    r"^[*_]{0,3}\[\[(?P<inside>[^\[\]\n]{1,20})\]\][*_]{0,3}\.?"
)  # alone on its line, as MT-bench asks
_WINNER = re.compile(
    rf"{_MARK}{_LABEL.format('winner')}{_IS}{_WRAP}(?:(?:answer|response|assistant)\s+)?(?P<who>a|b|tie)\b(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_LABEL_ALONE = re.compile(rf"{_MARK}{_LABEL.format('score|rating|mark|winner')}\s*[:\uff1a]?[*_]*", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`")
_INVISIBLE = re.compile("[\ufeff\u200b-\u200d\u2060\u00ad]")  # characters that show nothing
_QUOTES = ("\u201c\u201d", '""', "''", "\u00ab\u00bb", "\u2018\u2019")


def mark(answer: str, *, low: float, high: float) -> float | None:
    r"""The mark that an answer gives, on the scale from low to high; None where it gives none.

    >>> mark("> Score: 10\nScore: 2 out of 10", low=1, high=10), mark("Score: \u22123", low=-5, high=5)
    (2.0, -3.0)
    """
    text = spoken_text(answer).strip()
    found = _from_json(text, "score", "rating", "mark")
    lines = [_SCORE.fullmatch(line) for line in _own_lines(text)] if found is None else []
    last = next((line for line in reversed(lines) if line is not None), None)
    if last is not None:
        found = _mark_of_line(last, low=low, high=high)
    elif isinstance(found, str):
        line = _SCORE.fullmatch(f"score: {found.strip()}")
        found = _mark_of_line(line, low=low, high=high) if line else None
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if low <= found <= high else None


def _mark_of_line(line: re.Match[str], *, low: float, high: float) -> float | None:
    """The number of a line. None for an ambiguous line, another scale, or a dash that may be a minus sign."""
    text, rest = line["mark"], line["rest"]
    if text[0] in _DASHES and not line["says"].strip():  # "Score - 3": three, or minus three?
        if low < 0:
            return None
        text = text[1:]
    named = re.findall(_NUMBER, line["scale"] or "")
    if named and abs(_parse_number(named[-1]) or 0.0) != abs(high):
        return None
    scale = _OF.match(rest)
    if scale is not None:
        if _parse_number(scale["high"]) != high or (scale["low"] and _parse_number(scale["low"]) != low):
            return None
        rest = rest[scale.end() :]
    if re.match(r"\s*%", rest):
        return _parse_number(text) if high == 100 else None
    return None if _AMBIGUOUS.search(rest) or rest[:1].isalpha() else _parse_number(text)


def _parse_number(text: str) -> float | None:
    """The number in a text. None where a comma stands before three digits: it may separate thousands."""
    plain = re.sub(r"[\u2212\u2012-\u2015\uff0d]", "-", text).replace(" ", "")
    whole, comma, part = plain.partition(",")
    if comma and len(part) == 3:
        return None
    return float(f"{whole}.{part}" if comma else plain)


def winner(answer: str) -> str | None:
    """The winner that an answer names, "a", "b" or "tie"; None where it names none."""
    text = spoken_text(answer).strip()
    found = _from_json(text, "winner")
    lines = [f"winner: {found}"] if isinstance(found, str) else [] if found is not None else _own_lines(text)
    matches = [match for line in lines if (match := _WINNER.fullmatch(line))]
    if not matches or re.search(r"\b(?:or|tie|[AB])\b|^\W*and\b", matches[-1]["rest"].partition(".")[0]):
        return None
    return matches[-1]["who"].lower()


def _from_json(text: str, *names: str) -> Any:
    """The value of the first of these names in an answer that is one JSON object; None for any other answer."""
    fenced = re.fullmatch(r"(?:```|~~~)(?:json)?\s*\n(.*?)\n?\s*(?:```|~~~)", text, re.DOTALL | re.IGNORECASE)
    inside = fenced[1] if fenced else text
    if not inside.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(inside)
    except (ValueError, RecursionError):
        return None
    known = {str(key).lower().replace("final_", "").replace("overall_", ""): value for key, value in found.items()}
    return next((known[name] for name in names if name in known), None)


def _own_lines(text: str) -> list[str]:
    """The lines in the judge's own words. A label alone on its line is joined with the next line."""
    own, code, fence = list[str](), list[str](), ""
    for line in _INVISIBLE.sub("", text).splitlines():
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        elif not fence and line.strip() and not line.lstrip().startswith(">") and not _is_quotation(line.strip()):
            plain = _BRACKETS.sub(r"score: \g<inside>", _TAGS.sub(r"\1: \2", line.strip()[:MAX_LINE]))
            (code if line.startswith(("    ", "\t")) or _CODE.fullmatch(plain) else own).append(plain)
    for i in range(len(own) - 1):
        if _LABEL_ALONE.fullmatch(own[i]):
            label = own[i].rstrip(" :\uff1a*_")
            own[i : i + 2] = ["", f"{label}: {own[i + 1]}"]
    return [*code, *own]  # the last line counts, so that code, which may quote, counts if nothing else does


def _is_quotation(line: str) -> bool:
    return len(line) > 1 and f"{line[0]}{line[-1]}" in _QUOTES


Ask = Callable[..., str]  # (messages, *, temperature, max_tokens, seed) -> text, or NoAnswer
MAX_TEXT = 50_000  # characters of a completion that the judge sees
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
class JudgeSettings:
    """The settings of a judge's file. Paths are relative to the file."""

    model: str = ""  # the model's name at the endpoint; without an endpoint, a model's folder
    endpoint: str = ""  # http://HOST:PORT/v1
    key: str = ""  # the environment variable that holds the endpoint's key
    kind: Literal["score", "pair"] = "score"  # pair: against the column `against`
    prompt: str = ""  # a file with {prompt}, {completion} or {first} and {second}; none: Hone's own
    rubric: str = ""
    constitution: str = ""
    against: str = "answer"
    low: float = 1.0
    high: float = 10.0
    votes: int = 1  # the number of answers that are averaged (of a pair, in each order)
    both_orders: bool = True
    temperature: float = 0.0
    max_tokens: int = 512
    concurrency: int = 8  # requests at a time
    retries: int = 3
    timeout: float = 60.0  # seconds a request
    budget: int = 10_000  # requests in all
    seed: int = 0


def check_settings(settings: JudgeSettings, where: str | Path) -> None:
    """HoneError for a setting that makes no sense. where: the file of the settings, for the message."""
    least = {"votes": 1, "max_tokens": 1, "concurrency": 1, "retries": 0, "budget": 1}
    wrong = {name: f"{low} or more" for name, low in least.items() if getattr(settings, name) < low}
    wrong |= {} if settings.model else {"model": "the judge's name"}
    wrong |= {} if settings.timeout > 0 else {"timeout": "seconds, more than 0"}
    wrong |= {} if settings.low < settings.high else {"high": f"a mark above low, {settings.low:g}"}
    for name, right in wrong.items():
        raise HoneError(f"{where}: {name} is {getattr(settings, name)!r}: set it to {right}")


class Judge:
    """An async reward: the mean vote of the judge, or invalid where half of the votes or more fail."""

    def __init__(self, settings: JudgeSettings, ask: Ask, *, folder: Path) -> None:
        self.settings, self._ask = settings, ask
        self._template = _file(folder, settings.prompt) or PROMPTS[settings.kind]
        self._texts = {"rubric": _file(folder, settings.rubric), "constitution": _file(folder, settings.constitution)}
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="hone-judge")
        needed = ("first", "second") if settings.kind == "pair" else ("completion",)
        if missing := [name for name in needed if "{" + name + "}" not in self._template]:
            raise HoneError(
                f"the judge's prompt {settings.prompt} has no {{{missing[0]}}}: show the judge what to mark"
            )

    async def __call__(self, completion: str, task: Task) -> Outcome:
        """Asks for all votes at the same time."""
        reference = _reference(task, self.settings.against)
        if self.settings.kind == "pair" and reference is None:
            return invalid(f"the task has no {self.settings.against} to compare with")
        questions = self._questions(completion[:MAX_TEXT], task, reference or "")
        loop, s = asyncio.get_running_loop(), self.settings
        votes = [loop.run_in_executor(self._pool, self._vote, text, s.seed + n) for n, text in enumerate(questions)]
        return self._average_votes(await asyncio.gather(*votes))

    def _questions(self, completion: str, task: Task, reference: str) -> list[str]:
        s = self.settings
        fields: dict[str, Any] = {name: text and f"{text}\n" for name, text in self._texts.items()}
        fields |= {"prompt": prompt_text(task), "low": f"{s.low:g}", "high": f"{s.high:g}", "answer": reference}
        fields["reference"] = f"The reference answer:\n{reference}\n\n" if reference else ""
        if s.kind == "score":
            return [_fill_template(self._template, {**fields, "completion": completion})] * s.votes
        first = _fill_template(self._template, {**fields, "first": completion, "second": reference})
        second = _fill_template(self._template, {**fields, "first": reference, "second": completion})
        return [first] * s.votes + ([second] * s.votes if s.both_orders else [])

    def _vote(self, question: str, seed: int) -> str | NoAnswer:
        s = self.settings
        try:
            return self._ask(
                [{"role": "user", "content": question}], temperature=s.temperature, max_tokens=s.max_tokens, seed=seed
            )
        except NoAnswer as error:
            return error

    def _average_votes(self, answers: Sequence[str | NoAnswer]) -> Outcome:
        s, values, why = self.settings, list[float](), ""
        for n, answer in enumerate(answers):
            value = None if isinstance(answer, NoAnswer) else self._score_of(answer, swapped=n >= s.votes)
            if value is not None:
                values.append(value)
            else:
                why = str(answer) if isinstance(answer, NoAnswer) else f"no verdict in {answer[-100:]!r}"
        if 2 * len(values) <= len(answers):
            return invalid(f"{len(answers) - len(values)} of {len(answers)} votes of the judge failed: {why}")
        return Outcome(value=sum(values) / len(values))

    def _score_of(self, answer: str, *, swapped: bool) -> float | None:
        """The vote from 0 to 1; None where the answer gives none. swapped: the completion is the second of the pair."""
        s = self.settings
        if s.kind == "pair":
            score = {"a": 1.0, "b": 0.0, "tie": 0.5}.get(winner(answer) or "")
            return 1.0 - score if score is not None and swapped else score
        points = mark(answer, low=s.low, high=s.high)
        return None if points is None else (points - s.low) / (s.high - s.low)


def _file(folder: Path, name: str) -> str:
    try:
        return read_text(folder / name) if name else ""
    except UnicodeDecodeError as error:
        raise not_utf8(folder / name, error) from error
    except (OSError, ValueError) as error:
        raise HoneError(f"the judge's file {folder / name} cannot be read ({error}): check the path") from error


def _fill_template(template: str, values: Mapping[str, Any]) -> str:
    """The template with each {name} replaced. Braces in the values stay as they are."""
    return re.sub(r"\{(\w{1,20})\}", lambda found: str(values.get(found[1], found[0])), template)


def _reference(task: Task, column: str) -> str | None:
    found = task.answer if column == "answer" else task.extra.get(column)
    return None if found is None else str(found)[:MAX_TEXT]
