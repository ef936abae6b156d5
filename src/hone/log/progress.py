"""Live progress: one aligned line a step on a terminal or in a log file."""

import io
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

BARS = (20, 14, 10, 6, 0)  # widths of the bar: the widest that fits
RECENT = 20  # steps whose mean time predicts the time left
STYLES = {"title": "1", "done": "36", "dim": "2", "value": "1", "bad": "1;31"}
Cell = tuple[str, str]  # text, style


@dataclass(frozen=True, slots=True)
class Column:
    """A metric's place in the line."""

    label: str
    name: str
    show: Callable[[float], str]
    width: int
    unit: str = ""
    from_zero: bool = True  # False: not shown before it is above 0

    def shows(self, value: float) -> bool:
        return self.from_zero or value > 0


def compact(x: float) -> str:
    """840, 8.4k, 84k, 1.2M: the size of a number in at most five characters."""
    for unit in ("", "k", "M", "G"):
        if abs(x) < 999.5:
            return f"{x:.1f}{unit}" if unit and abs(x) < 9.95 else f"{x:.0f}{unit}"
        x /= 1000
    return f"{x:.0f}T"


def duration(seconds: float) -> str:
    """0:42, 12:05, 1:02:03, 2d 03h; -:-- of NaN"""
    if math.isnan(seconds):
        return "-:--"
    s = max(0, round(seconds))
    if s >= 86400:
        return f"{s // 86400}d {s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}"
    return f"{s // 60}:{s % 60:02d}"


def share(x: float) -> str:
    """4%, and <1% for what would be rounded away.

    >>> share(0.04), share(0.001), share(0.0)
    ('4%', '<1%', '0%')
    """
    return "<1%" if 0 < x < 0.005 else f"{x:.0%}"


HEADS = (
    Column("reward", "reward", "{:z.2f}".format, 5),
    Column("loss", "loss", "{:z.3f}".format, 6),
)
COLUMNS = (
    Column("invalid", "invalid", share, 3, from_zero=False),
    Column("kl", "ref_kl", "{:z.3f}".format, 5),
    Column("len", "length", "{:z.1f}".format, 5),
    Column("", "tokens_per_second", compact, 4, " tok/s"),
)


def say(text: str) -> None:
    """Print a line that is not a result, on stderr."""
    print(text, file=sys.stderr, flush=True)


class NullStream(io.StringIO):
    """A stream that nobody reads."""

    def write(self, s: str, /) -> int:
        return len(s)


class Progress:
    """Prints `grpo  12/40 ━━━━━━────── reward 0.53  kl 0.012  len 31.2  8.4k tok/s  0:42 left` after each step."""

    def __init__(
        self,
        total: int,
        *,
        title: str,
        stream: TextIO | None = None,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.title, self.done = total, title, start
        self._start = start
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._last = clock, clock()
        self._times: deque[float] = deque(maxlen=RECENT)
        self._seen: set[str] = set()
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = self._live and not os.environ.get("NO_COLOR")
        self._marks = _marks(self._stream)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Counts one step and shows it."""
        now = self._clock()
        if self.done > self._start:  # the first step compiles and warms up, so it says nothing about the others
            self._times.append(now - self._last)
        self._last = now
        self.done += 1
        self.note(self._paint(self._fit(self._cells(metrics))))

    def note(self, text: str) -> None:
        """Prints a line, such as a warning."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def left(self) -> float:
        """Seconds to go: the mean of recent steps for each not yet done; NaN before there is one."""
        ahead = max(0, self.total - self.done)
        return sum(self._times) / len(self._times) * ahead if self._times else math.nan if ahead else 0.0

    def _cells(self, metrics: Mapping[str, float]) -> dict[str, list[Cell]]:
        """The parts of the line by name, in order."""
        count = f"{self.done:>{len(str(self.total))}}/{self.total}"
        cells: dict[str, list[Cell]] = {
            "title": [(f"{self.title}  ", "title"), (count, "")],
            "bar": self._bar(BARS[0]),
        }
        for column in self._columns(metrics):
            cells[column.label or column.unit] = _metric(column, metrics)
        cells["left"] = [(f"{duration(self.left())} left", "dim")]
        return cells

    def _columns(self, metrics: Mapping[str, float]) -> list[Column]:
        """The columns reported so far. A column keeps its place when a step lacks it."""
        self._seen |= {c.label for c in HEADS + COLUMNS if c.name in metrics and c.shows(metrics[c.name])}
        head = [c for c in HEADS if c.label in self._seen][:1]
        return head + [c for c in COLUMNS if c.label in self._seen]

    def _fit(self, cells: dict[str, list[Cell]]) -> dict[str, list[Cell]]:
        """Shortens the bar, then leaves out the least important parts, so that no line wraps."""
        if not self._live:
            return cells
        room = shutil.get_terminal_size().columns - 1
        for width in BARS[1:]:
            if _width(cells) > room:
                cells["bar"] = self._bar(width)
        for name in ("bar", " tok/s", "len", "kl", "left", "invalid"):
            if _width(cells) > room:
                cells.pop(name, None)
        return cells

    def _bar(self, width: int) -> list[Cell]:
        full, empty = self._marks
        filled = min(width, width * self.done // max(1, self.total))
        return [(full * filled, "done"), (empty * (width - filled), "dim")]

    def _paint(self, cells: dict[str, list[Cell]]) -> str:
        joined: list[str] = []
        for name, parts in cells.items():
            gap = {"title": "", "bar": " "}.get(name, "  ")
            joined.append(gap + "".join(self._style(text, style) for text, style in parts))
        return "".join(joined)

    def _style(self, text: str, style: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colour and style and text else text


def _metric(column: Column, metrics: Mapping[str, float]) -> list[Cell]:
    value = metrics.get(column.name)
    shown = "-" if value is None else column.show(value) if math.isfinite(value) else str(value)
    style = "bad" if value is not None and not math.isfinite(value) else "value"
    label = f"{column.label} " if column.label else ""
    return [(label, "dim"), (shown.rjust(column.width), style), (column.unit, "dim")]


def _width(cells: dict[str, list[Cell]]) -> int:
    return sum(2 + sum(len(text) for text, _ in parts) for parts in cells.values()) - 2


def _marks(stream: TextIO) -> tuple[str, str]:
    """The bar's two characters, in ASCII where the stream's encoding has no others."""
    try:
        "━─".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#", "-"
    return "━", "─"
