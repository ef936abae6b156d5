"""Hone recognises the kind of a row by its columns, and converts rows that are written in other ways.

Alpaca: instruction, input, output. ShareGPT: conversations of from and value. HH-RLHF: chosen and rejected
transcripts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns. Pairs of whole dialogues get a prompt (pairs.py).
Everything else goes through as it is.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from hone.data.rows.pairs import SIDES, Row, with_prompt
from hone.errors import HoneError


class WrongColumns(HoneError):
    """A row that lacks a column; hint: the setting that would mend it, for a reader who can give settings."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class RowKind(StrEnum):
    """What a row is for. Hone recognises it by the row's columns."""

    TEXT = "text"  # pre-training
    COMPLETION = "prompt, completion"  # SFT
    MESSAGES = "messages"  # SFT on every assistant turn
    PREFERENCE = "prompt, chosen, rejected"  # reward models, DPO and its kin
    LABELLED = "prompt, completion, label"  # KTO, pointwise reward models
    SCORED = "prompt, completion, score"  # pointwise reward models; to others a score is a column like any
    STEPS = "prompt, steps, step_labels"  # process reward models
    TASK = "prompt"  # reinforcement learning; `answer` and other columns go to the reward


def row_kind(row: Row, *, expected: Collection[RowKind] = ()) -> RowKind:
    """The most specific kind whose telling column is there; SCORED only where it is expected."""
    telling = (
        (RowKind.PREFERENCE, row.keys() & {"chosen", "rejected"}),
        (RowKind.STEPS, row.keys() & {"steps", "step_labels", "completions"}),
        (RowKind.SCORED, RowKind.SCORED in expected and row.keys() >= {"completion", "score"}),
        (RowKind.LABELLED, row.keys() >= {"completion", "label"}),
        (RowKind.COMPLETION, "completion" in row),
        (RowKind.MESSAGES, "messages" in row),
        (RowKind.TASK, "prompt" in row),
        (RowKind.TEXT, "text" in row),
    )
    for kind, found in telling:
        if found:
            return kind
    raise WrongColumns(
        f"columns {names_of(row)} are no shape Hone knows: rename them to one of: {'; '.join(RowKind)} "
        "(Alpaca and ShareGPT are read too)",
        hint=f", as with read.columns.prompt={next(iter(row), 'NAME')}",
    )


def has_kind(row: Row, kinds: Collection[RowKind]) -> bool:
    """Whether the row has one of the kinds; none: any will do."""
    try:
        return not kinds or row_kind(row, expected=kinds) in kinds
    except HoneError:
        return False


def names_of(row: Row) -> str:
    """The columns in words."""
    return ", ".join(map(str, row)) or "(none)"


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with its columns renamed: `columns` maps Hone's names to its own. A column of Hone's name is dropped.

    >>> rename_columns({"question": "1+1", "answer": "2", "n": 3}, {"prompt": "question", "completion": "answer"})
    {'n': 3, 'prompt': '1+1', 'completion': '2'}
    """
    for name, theirs in columns.items():
        if theirs not in row:
            raise WrongColumns(f"read.columns.{name} is {theirs}, which is no column: use one of {names_of(row)}")
    taken = {*columns, *columns.values()}
    rest = {name: value for name, value in row.items() if name not in taken}
    return {**rest, **{name: row[theirs] for name, theirs in columns.items()}}


# --- other ways of writing a row ---

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def to_hone_columns(row: Row, *, chat: bool) -> tuple[Row, str]:
    """The row in Hone's columns, and the name of the way it was written in ("" for Hone's own).

    chat: an instruction becomes a user message, and not a text that ends with a line break.
    """
    if "conversations" in row and "messages" not in row:
        return _sharegpt(row), "ShareGPT"
    if "instruction" in row and row.keys() & {"output", "chosen", "rejected"} and "prompt" not in row:
        return _alpaca(row, chat=chat), "Alpaca"
    named = {name: _turns(row[name], name) for name in SIDES if _is_sharegpt(row.get(name))}
    made, written = with_prompt({**row, **named} if named else row, chat=chat)
    return made, "ShareGPT" if named else written


def _is_sharegpt(turns: Any) -> bool:
    first = turns[0] if isinstance(turns, list | tuple) and turns else None
    return isinstance(first, Mapping) and "from" in first and "role" not in first


def as_prompt(question: str, *, chat: bool) -> Any:
    """A question as a prompt: a user message, or a text whose line break ends its last token."""
    return [{"role": "user", "content": question}] if chat else question.rstrip("\n") + "\n"


def as_completion(text: str, *, chat: bool) -> Any:
    """The completion in the form of its prompt."""
    return [{"role": "assistant", "content": text}] if chat else text


def _sharegpt(row: Row) -> Row:
    messages = _turns(row["conversations"], "conversations")
    if isinstance(row.get("system"), str) and row["system"]:
        messages = [{"role": "system", "content": row["system"]}, *messages]
    rest = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    if not row.keys() & {"chosen", "rejected"}:
        return {**rest, "messages": messages}
    sides = {n: _turns([row[n]] if isinstance(row[n], Mapping) else row[n], n) for n in ("chosen", "rejected")}
    return {**rest, "prompt": messages, **sides}


def _turns(turns: Any, column: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list | tuple):
        raise HoneError(f'column "{column}" is {type(turns).__name__}, expected a list of turns')
    return [_turn(turn, n) for n, turn in enumerate(turns, start=1)]


def _turn(turn: Any, n: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise HoneError(f"turn {n} is {type(turn).__name__}, expected from and value")
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str) or role not in ROLES:
        raise HoneError(f"turn {n} is from {role!r:.40}: expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise HoneError(f'turn {n} has no text as its "value": fill it or remove the row')
    return {"role": ROLES[role], "content": content}


def _alpaca(row: Row, *, chat: bool) -> Row:
    """instruction, a blank line and the input, where there is one, are the prompt."""
    for name in ("instruction", "input", "output", "chosen", "rejected"):
        if name in row and not (isinstance(row[name], str) or (name == "input" and row[name] is None)):
            raise HoneError(f'column "{name}" is {type(row[name]).__name__}, expected text: fill it or remove the row')
    if row.get("history"):
        raise HoneError('column "history" is not read: write the turns of the chat as "messages"')
    if not row["instruction"].strip():
        raise HoneError('column "instruction" is empty: fill it or remove the row')
    question = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
    if isinstance(row.get("system"), str) and row["system"]:
        system = [{"role": "system", "content": row["system"]}] if chat else f"{row['system']}\n\n"
    else:
        system = [] if chat else ""
    sides = {"output": "completion", "chosen": "chosen", "rejected": "rejected"}
    if row.keys() & {"chosen", "rejected"}:
        sides.pop("output")
    written = {
        there: as_completion(row[here], chat=chat and bool(row[here])) for here, there in sides.items() if here in row
    }
    taken = {"instruction", "input", "output", "history", "system", *written}
    rest = {name: value for name, value in row.items() if name not in taken}
    return {**rest, "prompt": system + as_prompt(question, chat=chat), **written}
