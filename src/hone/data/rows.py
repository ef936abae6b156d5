"""Dataset rows, in the ecosystem's column names, to records; a bad row is refused by file, number and column."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from hone.data.chat import encode_completion, encode_messages, encode_steps, render_prompt
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Group, Message, Rollout, Stop, Task

Row = Mapping[str, Any]
Overlong = Literal["error", "drop", "truncate"]


class Shape(StrEnum):
    """What a row is for, told by its columns."""

    TEXT = "text"  # pre-training
    COMPLETION = "prompt, completion"  # SFT
    MESSAGES = "messages"  # SFT on every assistant turn
    PREFERENCE = "prompt, chosen, rejected"  # reward models, DPO and its kin
    LABELLED = "prompt, completion, label"  # KTO
    STEPS = "prompt, steps, step_labels"  # process reward models
    TASK = "prompt"  # reinforcement learning; `answer` and other columns go to the reward


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Groups ready for collate, and how many rows the context length cost."""

    shape: Shape
    groups: list[Group]
    dropped: int = 0
    truncated: int = 0


def shape_of(row: Row) -> Shape:
    """The most specific shape whose telling column is there."""
    telling = (
        (Shape.PREFERENCE, row.keys() & {"chosen", "rejected"}),
        (Shape.STEPS, row.keys() & {"steps", "step_labels", "completions"}),
        (Shape.LABELLED, row.keys() >= {"completion", "label"}),
        (Shape.COMPLETION, "completion" in row),
        (Shape.MESSAGES, "messages" in row),
        (Shape.TASK, "prompt" in row),
        (Shape.TEXT, "text" in row),
    )
    for shape, found in telling:
        if found:
            return shape
    known = "; ".join(Shape)
    raise HoneError(f"columns {_names(row)} are no shape Hone knows: rename them to one of: {known}")


def _names(row: Row) -> str:
    return ", ".join(map(str, row)) or "(none)"


def _column(row: Row, name: str) -> Any:
    """The value of a column that must be there and filled."""
    if name not in row:
        raise HoneError(f'column "{name}" is missing (found: {_names(row)}): add it or rename one')
    value = row[name]
    if value is None:
        raise HoneError(f'column "{name}" is null: fill it or remove the row')
    if isinstance(value, str | list | tuple) and not value:
        raise HoneError(f'column "{name}" is empty: fill it or remove the row')
    return value


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
    if isinstance(value, bool | int | float) and math.isfinite(value) and low <= value <= high:
        return float(value)
    raise _wrong(name, value, "a finite number" if high == math.inf else f"a number from {low:g} to {high:g}")


def text_row(row: Row, tokenizer: Tokenizer) -> Rollout:
    """Pre-training: every token trained, eos appended."""
    tokens = [*tokenizer.start_ids, *tokenizer.encode(_text(row, "text")), tokenizer.eos_id]
    return Rollout(tokens=tokens, mask=[True] * len(tokens))


def completion_row(row: Row, tokenizer: Tokenizer, *, name: str = "completion") -> Rollout:
    """SFT: the prompt untrained, the completion in column `name` and its stop token trained."""
    prompt, completion = _turns(row, "prompt"), _turns(row, name)
    tokens, mask = encode_completion(tokenizer, prompt, completion)
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return Rollout(tokens=tokens, mask=mask, text=text)


def messages_row(row: Row, tokenizer: Tokenizer) -> Rollout:
    """SFT: every assistant turn trained."""
    messages = _turns(row, "messages")
    if isinstance(messages, str):
        raise _wrong("messages", messages, "a list of messages")
    tokens, mask = encode_messages(tokenizer, messages)
    return Rollout(tokens=tokens, mask=mask)


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


def steps_row(row: Row, tokenizer: Tokenizer, *, separator: str = "\n") -> Rollout:
    """PRM: each step ends with the separator, and its label sits on that last token, NaN elsewhere."""
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
    closed = [step if separator and step.endswith(separator) else step + separator for step in steps]
    (tokens, mask), ends = encode_steps(tokenizer, prompt, closed)
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
    Shape.MESSAGES: _one(messages_row),
    Shape.PREFERENCE: preference_row,
    Shape.LABELLED: _one(labelled_row),
    Shape.STEPS: _one(steps_row),
}


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
    first = _at(name, 1, shape_of, _first(rows, name)) if shape is None else shape
    if first is Shape.TASK:
        raise HoneError(f"{name} has prompts but nothing to train on: add completions, or train with a reward")
    groups, dropped, truncated = list[Group](), 0, 0
    for n, row in enumerate(rows, start=1):
        group = _at(name, n, CONVERTERS[first], row, tokenizer)
        if shape is None and shape_of(row) is not first:
            raise HoneError(f"{name} row {n} has the columns ({shape_of(row)}), row 1 ({first}): split the dataset")
        longest = max(len(r.tokens) for r in group)
        if max_tokens and longest > max_tokens:
            if overlong == "error":
                raise HoneError(_too_long(f"{name} row {n}", longest, max_tokens))
            group = _cut(group, max_tokens) if overlong == "truncate" else []
            truncated, dropped = truncated + bool(group), dropped + (not group)
        groups += [group] if group else []
    if not groups:
        raise HoneError(f"{name}: all {len(rows)} rows exceed {max_tokens} tokens: shorten them or raise the context")
    return Converted(shape=first, groups=groups, dropped=dropped, truncated=truncated)


def to_tasks(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    name: str = "dataset",
    max_tokens: int = 0,
    overlong: Literal["error", "drop"] = "error",
) -> list[Task]:
    """Every row to a problem whose prompt has at most max_tokens tokens (0: no limit); a prompt is never cut."""
    _first(rows, name)
    tasks = list[Task]()
    for n, row in enumerate(rows, start=1):
        task = _at(name, n, task_row, row, id=str(n))
        length = len(_at(name, n, render_prompt, tokenizer, task.prompt))
        if not max_tokens or length <= max_tokens:
            tasks.append(task)
        elif overlong != "drop":
            raise HoneError(_too_long(f"{name} row {n}: the prompt", length, max_tokens))
    if not tasks:
        raise HoneError(f"{name}: all {len(rows)} prompts exceed {max_tokens} tokens: shorten them")
    return tasks


def _first(rows: Sequence[Row], name: str) -> Row:
    if not rows:
        raise HoneError(f"{name} has no rows: give it at least one")
    return rows[0]


def _at(name: str, n: int, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function on row n, naming file and row in its error."""
    try:
        return function(*args, **named)
    except HoneError as error:
        raise HoneError(f"{name} row {n}: {error}") from error


def _too_long(where: str, length: int, limit: int) -> str:
    return f"{where} has {length} tokens, the limit is {limit}: shorten it or raise the context"


def _cut(group: Group, limit: int) -> Group:
    """The group cut to `limit` tokens a row, or nothing where that leaves a row without a trained token."""
    cut = list[Rollout]()
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
        cut.append(short)
    return cut
