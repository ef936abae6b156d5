"""The rows of a dataset to groups or problems: one kind for all, a limit of tokens, bad ones refused or counted."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from hone.data.rows.columns import Row, RowKind, WrongColumns, row_kind
from hone.data.rows.parse import short_text
from hone.data.rows.record import OWN, converter, step_end, task_row
from hone.data.text.chat import ChatRows, render_prompt
from hone.data.text.rendering import render_ahead
from hone.data.text.tokenizer import Tokenizer
from hone.errors import HoneError, count_noun
from hone.types import Group, Rollout, Stop, Task

Overlong = Literal["error", "drop", "truncate"]
LONGER = "shorten them, or take a model with a longer context (of a fresh one: model.context)"
SKIP = "; read.skip_bad=true leaves such rows out"
LISTED = 3  # bad rows that are shown when they are skipped


@dataclass(kw_only=True)
class RowCounts:
    """What became of the rows, for the first line of a run."""

    rows: int = 0  # that are trained on
    truncated: int = 0
    dropped: int = 0  # longer than the limit
    skipped: int = 0  # bad
    reasons: list[str] = field(default_factory=list[str])  # of the first bad ones
    written: Counter[str] = field(default_factory=Counter[str])  # rows converted, by the way they were written
    used: Counter[str] = field(default_factory=Counter[str])  # pairs and chats read as something else, by what
    left_out: Counter[str] = field(default_factory=Counter[str])  # rows a named dataset is known to be better without
    step_ends: set[str] = field(default_factory=set[str])  # what ends the steps, of rows with steps

    def skip(self, reason: str) -> None:
        """Count a bad row."""
        self.skipped += 1
        self.reasons += [reason] if len(self.reasons) < LISTED else []

    def words(self, limit: int) -> str:
        """What became of the rows, in words; "" where every row is trained on as it was written."""
        said = [f"{count_noun(n, 'row')} converted from {how}" for how, n in self.written.items()]
        said += [f"{n} {what}" for what, n in self.used.items()]
        said += [f"{count_noun(n, 'row')} left out ({why})" for why, n in self.left_out.items()]
        said += [f"{count_noun(self.truncated, 'row')} cut to {count_noun(limit, 'token')}"] if self.truncated else []
        said += (
            [f"{count_noun(self.dropped, 'row')} of more than {count_noun(limit, 'token')} dropped"]
            if self.dropped
            else []
        )
        if self.skipped:
            first = "; ".join(self.reasons)
            said.append(
                f"{count_noun(self.skipped, 'bad row')} skipped: {first}{'; ...' if self.skipped > LISTED else ''}"
            )
        return ", ".join(said)


@dataclass(kw_only=True)
class Grouper:
    """Rows to groups, one at a time. All have one kind: the given one, or that of the first row which can be used.

    expected: the kinds that `reader`, an algorithm, can use; none: any.
    max_tokens 0 is no limit. A row over it is refused, dropped, or cut at its end and marked as unfinished.
    """

    tokenizer: Tokenizer
    kind: RowKind | None = None
    max_tokens: int = 0
    overlong: Overlong = "error"
    skip_bad: bool = False
    turns: ChatRows = "joined"
    shares: bool = False  # scores are from 0 to 1
    expected: tuple[RowKind, ...] = ()
    reader: str = "training"
    settings: bool = True  # whoever reads the errors can give settings
    tally: RowCounts = field(default_factory=RowCounts)
    first: str = ""  # where the kind was seen

    def ahead(self, rows: Sequence[Row]) -> None:
        """Render the chats of the next rows in one request to the worker process, instead of one request each."""
        render_ahead(partial(self._group, row) for row in rows if has_chat(row))

    def _group(self, row: Row) -> tuple[RowKind, Group]:
        kind = self.kind or row_kind(row, expected=self.expected)
        if kind is RowKind.TASK:
            theirs = next((name for name in row if name not in OWN), "") or "answer"
            raise WrongColumns(
                "the data has prompts but nothing to train on: add completions, or train with a reward",
                hint=f", or say which column has them, as in read.columns.completion={theirs}",
            )
        return kind, converter(kind, turns=self.turns, shares=self.shares)(row, self.tokenizer)

    def __call__(self, row: Row, where: str) -> Group | None:
        """The group, or None where the row is skipped or dropped; else HoneError that shows the row."""
        try:
            group = self._convert(row, where)
        except HoneError as error:
            return _refused(self, error, row, where)
        longest = max(len(r.tokens) for r in group)
        if self.max_tokens and longest > self.max_tokens:
            if self.overlong == "error":
                ways = "read.overlong=drop leaves such rows out, read.overlong=truncate cuts them"
                raise HoneError(_too_long(where, longest, self.max_tokens, remedy=ways if self.settings else ""))
            group = truncate_group(group, self.max_tokens) if self.overlong == "truncate" else []
            if self.kind is RowKind.PREFERENCE and group and group[0].tokens == group[1].tokens:
                group = []  # what tells them apart is cut off
            self.tally.truncated += bool(group)
            self.tally.dropped += not group
        self.tally.rows += bool(group)
        return group or None

    def _convert(self, row: Row, where: str) -> Group:
        kind, group = self._group(row)
        if self.kind is None:  # a bad row decides nothing
            self._check_usable(kind, row)
            self.kind, self.first = kind, where
        elif self.first and (found := row_kind(row, expected=self.expected)) is not kind:
            raise HoneError(f"it has the columns ({found}), {self.first} ({kind}): split the dataset")
        if kind is RowKind.STEPS:
            self.tally.step_ends.add(step_end(row))
        return group

    def _check_usable(self, kind: RowKind, row: Row) -> None:
        if not self.expected or kind in self.expected:
            return
        wanted = " or ".join(f"({s})" for s in self.expected)
        lacks = min(([n for n in s.split(", ") if n not in row] for s in self.expected), key=len)
        theirs = next((name for name in row if name not in OWN), "")
        raise WrongColumns(
            f"it has the columns ({kind}), {self.reader} reads {wanted}: add {' and '.join(lacks) or 'them'}",
            hint=f", or rename a column, as with read.columns.{lacks[0]}={theirs}" if lacks and theirs else "",
        )


@dataclass(kw_only=True)
class Tasker:
    """Rows to problems, one at a time, whose prompts have at most max_tokens tokens (0: no limit); never cut."""

    tokenizer: Tokenizer
    max_tokens: int = 0
    overlong: Overlong = "error"
    skip_bad: bool = False
    settings: bool = True  # whoever reads the errors can give settings
    tally: RowCounts = field(default_factory=RowCounts)

    def ahead(self, rows: Sequence[Row]) -> None:
        """Render the prompts of rows that come next, together."""
        prompts = [(row["prompt"], row.get("tools")) for row in rows if has_chat(row) and "prompt" in row]
        render_ahead(partial(render_prompt, self.tokenizer, prompt, tools=tools) for prompt, tools in prompts)

    def __call__(self, row: Row, where: str, *, id: str = "") -> Task | None:
        """The problem, or None where the row is skipped or dropped; else HoneError that shows the row."""
        try:
            task = task_row(row, id=id or where)
            length = len(render_prompt(self.tokenizer, task.prompt, tools=task.extra.get("tools")))
        except HoneError as error:
            return _refused(self, error, row, where)
        if self.max_tokens and length > self.max_tokens:
            if self.overlong != "drop":
                way = "read.overlong=drop leaves such rows out" if self.settings else ""
                raise HoneError(_too_long(f"{where}: the prompt", length, self.max_tokens, remedy=way))
            self.tally.dropped += 1
            return None
        self.tally.rows += 1
        return task


def _refused(reader: Grouper | Tasker, error: HoneError, row: Row, where: str) -> None:
    # rows before had the columns: then other names for them are no remedy
    hint = error.hint if isinstance(error, WrongColumns) and not reader.tally.rows else SKIP
    way = hint if reader.settings else ""
    if not reader.skip_bad:
        raise HoneError(f"{where}: {error}{way} (the row: {short_text(row)})") from error
    reader.tally.skip(f"{where}: {error}{way.removesuffix(SKIP)}")


def has_chat(row: Row) -> bool:
    """Whether a column holds messages."""
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in row.values())


def _too_long(where: str, length: int, limit: int, *, remedy: str) -> str:
    remedy = remedy or "shorten it, or leave it out of the data"
    return f"{where} has {count_noun(length, 'token')}, the limit is {limit}: {remedy}"


def truncate_group(group: Group, limit: int) -> Group:
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
