"""The rows of a dataset to groups or problems: one shape for all, a limit of tokens, bad ones refused or counted."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hone.data.chat import Turns, render_prompt
from hone.data.parse import shown
from hone.data.rows import converter, step_end, task_row
from hone.data.shapes import Row, Shape, shape_of
from hone.data.tokenizer import Tokenizer
from hone.errors import HoneError
from hone.types import Group, Rollout, Stop, Task

Overlong = Literal["error", "drop", "truncate"]
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
    step_ends: set[str] = field(default_factory=set[str])  # what ends the steps, of rows with steps

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
            first = "; ".join(self.reasons)
            said.append(f"{self.skipped} bad rows skipped: {first}{'; ...' if self.skipped > LISTED else ''}")
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Groups ready for collate, and how many rows the context length cost."""

    shape: Shape
    groups: list[Group]
    dropped: int = 0
    truncated: int = 0


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
        group = converter(shape, turns=self.turns, shares=self.shares)(row, self.tokenizer)
        if self.shape is None:  # a bad row decides nothing
            self.shape, self.first = self._usable(shape), where
        elif self.first and (found := shape_of(row, expected=self.expected)) is not shape:
            raise HoneError(f"it has the columns ({found}), {self.first} ({shape}): split the dataset")
        if shape is Shape.STEPS:
            self.tally.step_ends.add(step_end(row))
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
