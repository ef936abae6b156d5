"""One row of a dataset, in the ecosystem's column names, to its record; a bad one is refused by the column's name."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hone.data.rows.code_asserts import check_row
from hone.data.rows.columns import Row, RowKind, WrongColumns, names_of
from hone.data.rows.pairs import split_chats
from hone.data.text.chat import ChatRows, encode_completion, encode_steps, encode_turns
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Group, Message, Rollout, Task

OWN = {"id", "tools", "margin", *(name for kind in RowKind for name in kind.split(", "))}  # never another's column
LARGEST = sys.float_info.max


def _column(row: Row, name: str) -> Any:
    """The value of a column that must be there and filled."""
    if name not in row:
        text = f'column "{name}" is missing (found: {names_of(row)}): add it or rename one'
        raise WrongColumns(text, hint=_mapping(row, name))
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


def messages_rows(row: Row, tokenizer: Tokenizer, *, turns: ChatRows = "joined") -> Group:
    """SFT: every assistant turn trained; split, in as many rows as a template needs that rewrites earlier turns."""
    messages = _turns(row, "messages")
    if isinstance(messages, str):
        raise _wrong("messages", messages, "a list of messages")
    encoded = encode_turns(tokenizer, messages, tools=row.get("tools"), turns=turns)
    return [Rollout(tokens=tokens, mask=mask) for tokens, mask in encoded]


def preference_row(row: Row, tokenizer: Tokenizer) -> Group:
    """[chosen, rejected], with the margin on both."""
    for name in ("chosen", "rejected"):
        _turns(row, name)
    row = split_chats(row)
    margin = _number("margin", row["margin"]) if row.get("margin") is not None else 0.0
    if row.get("chosen") == row.get("rejected"):
        raise HoneError('columns "chosen" and "rejected" are the same: remove the row')
    return [replace(completion_row(row, tokenizer, name=n), margin=margin) for n in ("chosen", "rejected")]


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


def closed_steps(row: Row, steps: Sequence[str]) -> list[str]:
    """Each step with the separator at its end."""
    end = _separator(row)
    return [step if end and step.endswith(end) else step + end for step in steps]


def step_end(row: Row) -> str:
    """What ends the row's steps: the separator or, of steps as written, the column "step_end"; empty: not known."""
    return _separator(row) or str(row.get("step_end") or "")


def _separator(row: Row) -> str:
    """The row's own, where it has one."""
    return "\n" if row.get("separator") is None else str(row["separator"])


def steps_row(row: Row, tokenizer: Tokenizer) -> Rollout:
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
    closed = closed_steps(row, steps)
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
    check_row(row)
    extra = {k: v for k, v in row.items() if k not in ("prompt", "answer", "id")}
    name = id if row.get("id") is None else str(row["id"])
    return Task(prompt=prompt, answer=None if answer is None else str(answer), extra=extra, id=name)


def _one(convert: Callable[[Row, Tokenizer], Rollout]) -> Callable[[Row, Tokenizer], Group]:
    return lambda row, tokenizer: [convert(row, tokenizer)]


CONVERTERS: dict[RowKind, Callable[[Row, Tokenizer], Group]] = {  # those without settings
    RowKind.TEXT: _one(text_row),
    RowKind.COMPLETION: _one(completion_row),
    RowKind.PREFERENCE: preference_row,
    RowKind.LABELLED: _one(labelled_row),
    RowKind.STEPS: _one(steps_row),
}


def converter(kind: RowKind, *, turns: ChatRows = "joined", shares: bool = False) -> Callable[[Row, Tokenizer], Group]:
    """How a row of this kind becomes a group; turns: of chats; shares: scores are from 0 to 1."""
    if kind is RowKind.MESSAGES:
        return partial(messages_rows, turns=turns)
    if kind is RowKind.SCORED:
        return _one(partial(scored_row, share=shares))
    return CONVERTERS[kind]
