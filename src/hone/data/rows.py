"""Dataset rows, in the ecosystem's column names, to records; a bad row is refused by file, number and column."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hone.data.chat import Turns, encode_completion, encode_steps, encode_turns, render_prompt
from hone.data.parse import shown
from hone.data.shapes import Row, Shape, names_of, shape_of
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Group, Message, Rollout, Stop, Task

Overlong = Literal["error", "drop", "truncate"]
OWN = {"id", "tools", "margin", *(name for shape in Shape for name in shape.split(", "))}  # never another's column
LARGEST = sys.float_info.max
LISTED = 3  # bad rows that are shown when they are skipped


@dataclass(kw_only=True)
class Tally:
    """What became of the rows, for the first line of a run."""

    rows: int = 0  # that are trained on
    truncated: int = 0
    dropped: int = 0  # longer than the limit
    skipped: int = 0  # bad
    reasons: list[str] = field(default_factory=list[str])  # of the first bad ones
    written: Counter[str] = field(default_factory=Counter[str])  # rows converted, by the way they were written
    left_out: Counter[str] = field(default_factory=Counter[str])  # rows a named dataset is known to be better without

    def skip(self, reason: str) -> None:
        """Count a bad row."""
        self.skipped += 1
        self.reasons += [reason] if len(self.reasons) < LISTED else []

    def words(self, limit: int) -> str:
        """All that is worth saying: "" where every row is trained on as it was written."""
        said = [f"{n} rows converted from {how}" for how, n in self.written.items()]
        said += [f"{n} rows left out ({why})" for why, n in self.left_out.items()]
        said += [f"{self.truncated} rows cut to {limit} tokens"] if self.truncated else []
        said += [f"{self.dropped} rows of more than {limit} tokens dropped"] if self.dropped else []
        if self.skipped:
            shown = "; ".join(self.reasons)
            said.append(f"{self.skipped} bad rows skipped: {shown}{'; ...' if self.skipped > LISTED else ''}")
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Groups ready for collate, and how many rows the context length cost."""

    shape: Shape
    groups: list[Group]
    dropped: int = 0
    truncated: int = 0


def _column(row: Row, name: str) -> Any:
    """The value of a column that must be there and filled."""
    if name not in row:
        raise HoneError(
            f'column "{name}" is missing (found: {names_of(row)}): add it or rename one{_mapping(row, name)}'
        )
    value = row[name]
    if value is None:
        raise HoneError(f'column "{name}" is null: fill it or remove the row')
    if isinstance(value, str | list | tuple) and not value:
        raise HoneError(f'column "{name}" is empty: fill it or remove the row')
    return value


def _mapping(row: Row, name: str) -> str:
    """The remedy that leaves the file as it is, where a column might be the missing one."""
    theirs = next((column for column in row if column not in OWN), "")
    return f", as with read.columns.{name}={theirs}" if theirs else ""


def _wrong(name: str, value: Any, expected: str) -> HoneError:
    return HoneError(f'column "{name}" is {type(value).__name__} {str(value)[:40]!r}, expected {expected}')


def _text(row: Row, name: str) -> str:
    value = _column(row, name)
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _turns(row: Row, name: str) -> str | list[Message]:
    """Text, or a list of messages (whose insides `chat` checks)."""
    value = _column(row, name)
    if not isinstance(value, str | list | tuple):
        raise _wrong(name, value, "text or a list of messages")
    return value if isinstance(value, str) else list(value)


def _number(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf) -> float:
    # not isfinite, which fails on a whole number that no float can hold
    if isinstance(value, bool | int | float) and abs(value) <= LARGEST and low <= value <= high:
        return float(value)
    raise _wrong(name, value, "a finite number" if high == math.inf else f"a number from {low:g} to {high:g}")


def text_row(row: Row, tokenizer: Tokenizer) -> Rollout:
    """Pre-training: every token trained, eos appended."""
    tokens = [*tokenizer.start_ids, *tokenizer.encode(_text(row, "text")), tokenizer.eos_id]
    return Rollout(tokens=tokens, mask=[True] * len(tokens))


def completion_row(row: Row, tokenizer: Tokenizer, *, name: str = "completion") -> Rollout:
    """SFT: the prompt untrained, the completion in column `name` and its stop token trained."""
    prompt, completion = _turns(row, "prompt"), _turns(row, name)
    tokens, mask = encode_completion(tokenizer, prompt, completion, tools=row.get("tools"))
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return Rollout(tokens=tokens, mask=mask, text=text)


def messages_rows(row: Row, tokenizer: Tokenizer, *, turns: Turns = "joined") -> Group:
    """SFT: every assistant turn trained; split, in as many rows as a template needs that rewrites earlier turns."""
    messages = _turns(row, "messages")
    if isinstance(messages, str):
        raise _wrong("messages", messages, "a list of messages")
    encoded = encode_turns(tokenizer, messages, tools=row.get("tools"), turns=turns)
    return [Rollout(tokens=tokens, mask=mask) for tokens, mask in encoded]


def preference_row(row: Row, tokenizer: Tokenizer) -> Group:
    """[chosen, rejected], with the margin on both."""
    row = _split_prompt(row)
    margin = _number("margin", row["margin"]) if row.get("margin") is not None else 0.0
    if row.get("chosen") == row.get("rejected"):
        raise HoneError('columns "chosen" and "rejected" are the same: remove the row')
    return [replace(completion_row(row, tokenizer, name=n), margin=margin) for n in ("chosen", "rejected")]


def _split_prompt(row: Row) -> Row:
    """Where chosen and rejected repeat the whole chat, their shared beginning is the prompt."""
    sides = [_turns(row, "chosen"), _turns(row, "rejected")]
    if any(isinstance(side, str) for side in sides):
        return row
    if all(isinstance(s[0], Mapping) and s[0].get("role") == "assistant" for s in sides):
        return row
    shared = 0
    while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
        shared += 1
    if not 0 < shared < min(map(len, sides)):
        raise HoneError('"chosen" and "rejected" are chats that do not share a prompt: begin both with the same')
    return {**row, "prompt": sides[0][:shared], "chosen": sides[0][shared:], "rejected": sides[1][shared:]}


def labelled_row(row: Row, tokenizer: Tokenizer) -> Rollout:
    """KTO: a completion that is desirable (true, 1) or not (false, 0)."""
    label = _number("label", _column(row, "label"), low=0, high=1)
    if label not in (0.0, 1.0):
        raise _wrong("label", label, "true or false")
    return replace(completion_row(row, tokenizer), label=label)


def scored_row(row: Row, tokenizer: Tokenizer, *, share: bool = False) -> Rollout:
    """Pointwise reward models: a completion and its score, a finite number; share: from 0 to 1."""
    low, high = (0.0, 1.0) if share else (-math.inf, math.inf)
    score = _number("score", _column(row, "score"), low=low, high=high)
    return replace(completion_row(row, tokenizer), label=score)


def closed_steps(row: Row, steps: Sequence[str], *, separator: str = "\n") -> list[str]:
    """Each step with the separator at its end: the row's own, where it has one."""
    end = separator if row.get("separator") is None else str(row["separator"])
    return [step if end and step.endswith(end) else step + end for step in steps]


def steps_row(row: Row, tokenizer: Tokenizer, *, separator: str = "\n") -> Rollout:
    """PRM: each step ends with the separator, and its label sits on that last token, NaN elsewhere.

    A column "separator" says what ends each step; empty: steps are as they were written, as `hone label-steps` does.
    """
    steps_name, labels_name = ("steps", "step_labels") if "steps" in row else ("completions", "labels")
    prompt, steps, labels = _turns(row, "prompt"), _column(row, steps_name), _column(row, labels_name)
    for name, value in ((steps_name, steps), (labels_name, labels)):
        if not isinstance(value, list | tuple):
            raise _wrong(name, value, "a list")
    if len(steps) != len(labels):
        raise HoneError(f'{len(steps)} "{steps_name}" but {len(labels)} "{labels_name}": give one label a step')
    for step in steps:
        if not isinstance(step, str) or not step:
            raise _wrong(steps_name, step, "text in every step")
    closed = closed_steps(row, steps, separator=separator)
    (tokens, mask), ends = encode_steps(tokenizer, prompt, closed, tools=row.get("tools"))
    step_label = [math.nan] * len(tokens)
    for end, label in zip(ends, labels, strict=True):
        step_label[end] = _number(labels_name, label, low=0, high=1)
    return Rollout(tokens=tokens, mask=mask, step_label=step_label, text="".join(closed))


def task_row(row: Row, *, id: str = "") -> Task:
    """A problem; columns other than prompt, answer and id go to `extra`."""
    prompt = _turns(row, "prompt")
    answer = _column(row, "answer") if "answer" in row else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise _wrong("answer", answer, "text or a number")
    if isinstance(answer, float):
        _number("answer", answer)
    extra = {k: v for k, v in row.items() if k not in ("prompt", "answer", "id")}
    name = id if row.get("id") is None else str(row["id"])
    return Task(prompt=prompt, answer=None if answer is None else str(answer), extra=extra, id=name)


def _one(convert: Callable[[Row, Tokenizer], Rollout]) -> Callable[[Row, Tokenizer], Group]:
    return lambda row, tokenizer: [convert(row, tokenizer)]


CONVERTERS: dict[Shape, Callable[[Row, Tokenizer], Group]] = {
    Shape.TEXT: _one(text_row),
    Shape.COMPLETION: _one(completion_row),
    Shape.MESSAGES: messages_rows,
    Shape.PREFERENCE: preference_row,
    Shape.LABELLED: _one(labelled_row),
    Shape.SCORED: _one(scored_row),
    Shape.STEPS: _one(steps_row),
}


@dataclass(kw_only=True)
class Grouper:
    """Rows to groups, one at a time. All have one shape: the given one, or that of the first row which can be used.

    expected: the shapes that `reader`, an algorithm, can use; none: any.
    max_tokens 0 is no limit. A row over it is refused, dropped, or cut at its end and marked as unfinished.
    """

    tokenizer: Tokenizer
    shape: Shape | None = None
    max_tokens: int = 0
    overlong: Overlong = "error"
    skip_bad: bool = False
    turns: Turns = "joined"
    shares: bool = False  # scores are from 0 to 1
    expected: tuple[Shape, ...] = ()
    reader: str = "training"
    tally: Tally = field(default_factory=Tally)
    first: str = ""  # where the shape was seen

    def __call__(self, row: Row, where: str) -> Group | None:
        """The group, or None where the row is skipped or dropped; else HoneError that shows the row."""
        try:
            group = self._convert(row, where)
        except HoneError as error:
            return _refused(error, row, where, skip=self.skip_bad, tally=self.tally)
        longest = max(len(r.tokens) for r in group)
        if self.max_tokens and longest > self.max_tokens:
            if self.overlong == "error":
                raise HoneError(_too_long(where, longest, self.max_tokens))
            group = cut(group, self.max_tokens) if self.overlong == "truncate" else []
            self.tally.truncated += bool(group)
            self.tally.dropped += not group
        self.tally.rows += bool(group)
        return group or None

    def _convert(self, row: Row, where: str) -> Group:
        shape = self.shape or shape_of(row, expected=self.expected)
        if shape is Shape.TASK:
            raise HoneError(
                "the data has prompts but nothing to train on: add completions, or train with a reward, "
                "or say which column has them, as in read.columns.completion=answer"
            )
        convert = CONVERTERS[shape]
        if shape is Shape.MESSAGES:
            convert = partial(messages_rows, turns=self.turns)
        if shape is Shape.SCORED:
            convert = _one(partial(scored_row, share=self.shares))
        group = convert(row, self.tokenizer)
        if self.shape is None:  # a bad row decides nothing
            self.shape, self.first = self._usable(shape), where
        elif self.first and (found := shape_of(row, expected=self.expected)) is not shape:
            raise HoneError(f"it has the columns ({found}), {self.first} ({shape}): split the dataset")
        return group

    def _usable(self, shape: Shape) -> Shape:
        if self.expected and shape not in self.expected:
            wanted = " or ".join(f"({s})" for s in self.expected)
            raise HoneError(f"it has the columns ({shape}), {self.reader} reads {wanted}: rename them")
        return shape


@dataclass(kw_only=True)
class Tasker:
    """Rows to problems, one at a time, whose prompts have at most max_tokens tokens (0: no limit); never cut."""

    tokenizer: Tokenizer
    max_tokens: int = 0
    overlong: Overlong = "error"
    skip_bad: bool = False
    tally: Tally = field(default_factory=Tally)

    def __call__(self, row: Row, where: str, *, id: str = "") -> Task | None:
        """The problem, or None where the row is skipped or dropped; else HoneError that shows the row."""
        try:
            task = task_row(row, id=id or where)
            length = len(render_prompt(self.tokenizer, task.prompt, tools=task.extra.get("tools")))
        except HoneError as error:
            return _refused(error, row, where, skip=self.skip_bad, tally=self.tally)
        if self.max_tokens and length > self.max_tokens:
            if self.overlong != "drop":
                raise HoneError(_too_long(f"{where}: the prompt", length, self.max_tokens))
            self.tally.dropped += 1
            return None
        self.tally.rows += 1
        return task


def _refused(error: HoneError, row: Row, where: str, *, skip: bool, tally: Tally) -> None:
    if not skip:
        raise HoneError(f"{where}: {error} (the row: {shown(row)})") from error
    tally.skip(f"{where}: {error}")


def to_groups(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    name: str = "dataset",
    shape: Shape | None = None,
    max_tokens: int = 0,
    overlong: Overlong = "error",
) -> Converted:
    """Every row to a group; all rows have one shape, told by the first unless given; max_tokens 0 is no limit."""
    convert = Grouper(tokenizer=tokenizer, shape=shape, max_tokens=max_tokens, overlong=overlong)
    made = [convert(row, f"{name} row {n}") for n, row in enumerate(_some(rows, name), start=1)]
    groups = [group for group in made if group]
    if not groups or convert.shape is None:
        raise HoneError(f"{name}: all {len(rows)} rows exceed {max_tokens} tokens: shorten them or raise the context")
    tally = convert.tally
    return Converted(shape=convert.shape, groups=groups, dropped=tally.dropped, truncated=tally.truncated)


def to_tasks(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    name: str = "dataset",
    max_tokens: int = 0,
    overlong: Literal["error", "drop"] = "error",
) -> list[Task]:
    """Every row to a problem whose prompt has at most max_tokens tokens (0: no limit); a prompt is never cut."""
    convert = Tasker(tokenizer=tokenizer, max_tokens=max_tokens, overlong=overlong)
    made = [convert(row, f"{name} row {n}", id=str(n)) for n, row in enumerate(_some(rows, name), start=1)]
    tasks = [task for task in made if task is not None]
    if not tasks:
        raise HoneError(f"{name}: all {len(rows)} prompts exceed {max_tokens} tokens: shorten them")
    return tasks


def _some(rows: Sequence[Row], name: str) -> Sequence[Row]:
    if not rows:
        raise HoneError(f"{name} has no rows: give it at least one")
    return rows


def _too_long(where: str, length: int, limit: int) -> str:
    return f"{where} has {length} tokens, the limit is {limit}: shorten it or raise the context"


def cut(group: Group, limit: int) -> Group:
    """The group cut to `limit` tokens a row, or nothing where that leaves a row without a trained token."""
    kept = list[Rollout]()
    for r in group:
        short = replace(
            r,
            tokens=r.tokens[:limit],
            mask=r.mask[:limit],
            step_label=r.step_label[:limit],
            stop=r.stop if len(r.tokens) <= limit else Stop.LENGTH,
        )
        labelled = any(not math.isnan(x) for x in short.step_label)
        if not any(short.mask) or (short.step_label and not labelled):
            return []
        kept.append(short)
    return kept
