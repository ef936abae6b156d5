"""Curves as inline SVG: a small chart for each metric, with axes, ticks and the data that the page's script shows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

from hone.report.page import text

WIDTH, HEIGHT = 320.0, 168.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0
LETTER = 6.6  # the width of a digit at the axis's size, in the widest of the page's fonts
PLAIN = 7  # characters up to which a tick's label needs no power of ten
MOST_POINTS = 240  # drawn in one curve; peaks are kept
SMOOTH_FROM = 24  # points from which a running mean is drawn as well
HUGE = 1e100  # larger numbers are not drawn
TINY = 1e-90

Point = tuple[float, float]
TITLES = {  # of metrics, in the order of their charts; others follow by name
    "loss": "loss",
    "reward": "reward",
    "accuracy": "accuracy",
    "ref_kl": "KL to the reference",
    "entropy": "entropy",
    "length": "length",
    "format": "format rate",
    "grad_norm": "gradient norm",
    "clip_fraction": "clipped share",
    "gen_kl": "KL sampler to learner",
    "ess": "effective sample size",
    "explained_variance": "explained variance",
    "repetition": "repetition",
    "disagreement": "held-out verifier disagrees",
    "hacked": "rewarded but held-out verifier refuses",
    "truncated": "truncated share",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
}


@dataclass(frozen=True, slots=True)
class Series:
    """A metric over steps: stretches of finite values, and the steps whose value was not finite."""

    runs: tuple[tuple[Point, ...], ...]
    not_finite: tuple[float, ...]

    @property
    def points(self) -> list[Point]:
        return [point for run in self.runs for point in run]


def number(value: Any) -> float | None:
    """The value as a float that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -HUGE < value < HUGE else None


def label(value: float) -> str:
    """A number in few characters: 0.5312, 12.4, 12,345, 1.2e+06."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value else "0"


def series(rows: Iterable[dict[str, Any]], name: str) -> Series:
    """The metric's points. A step without it is left out; null, NaN or infinity breaks the curve."""
    runs: list[list[Point]] = [[]]
    lost: list[float] = []
    for index, row in enumerate(rows, 1):
        if name not in row:
            continue
        step, value = number(row.get("step")), number(row[name])
        x = float(index) if step is None else step
        if value is None:
            lost.append(x)
            runs.append([])
        else:
            runs[-1].append((x, value))
    return Series(tuple(tuple(run) for run in runs if run), tuple(lost))


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`, about `most` of them."""
    size = max(abs(low), abs(high))
    if high - low <= max(size * 1e-9, TINY):
        pad = size * 0.1 if size > TINY else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def running_mean(run: Sequence[Point]) -> list[Point]:
    """The mean of the points around each one, as many before as after it: it does not lag. Fewer at the ends."""
    radius = max(2, len(run) // 20)
    sums = list(accumulate((y for _, y in run), initial=0.0))
    found: list[Point] = []
    for i, (x, _) in enumerate(run):
        first, last = max(0, i - radius), min(len(run), i + radius + 1)
        found.append((x, (sums[last] - sums[first]) / (last - first)))
    return found


def downsample(run: Sequence[Point]) -> list[Point]:
    """At most about MOST_POINTS points: the lowest and the highest of each stretch, so that every peak is kept."""
    if len(run) <= MOST_POINTS:
        return list(run)
    size = math.ceil(len(run) / (MOST_POINTS // 2))
    kept: list[Point] = [run[0]]
    for start in range(0, len(run), size):
        part = run[start : start + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return list(dict.fromkeys([*kept, run[-1]]))


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps steps and values to places in the drawing. left: the margin for the labels of values."""

    x: tuple[float, float]
    y: tuple[float, float]
    left: float = LEFT

    def at(self, point: Point) -> Point:
        (x0, x1), (y0, y1) = self.x, self.y
        across = (point[0] - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (point[1] - y0) / (y1 - y0)
        return self.left + across * (WIDTH - self.left - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def figure(rows: Sequence[dict[str, Any]], name: str) -> str:
    """A metric of a run's rows under its title, with its last value."""
    data = series(rows, name)
    title = TITLES.get(name, name.replace("_", " "))
    points = data.points
    last = f"<b>{label(points[-1][1])}</b>" if points else ""
    lost = f"<em>{len(data.not_finite)} not finite</em>" if data.not_finite else ""
    return (
        f'<figure class="card"><figcaption><span>{text(title)}</span>{lost}{last}</figcaption>'
        f"{svg(data, name=title)}</figure>"
    )


def svg(data: Series, *, name: str) -> str:
    """The chart of a series, or a line that says that it has no finite value."""
    points = data.points
    if not points:
        return '<p class="none">no finite values</p>'
    values = [y for _, y in points]
    marks = ticks(min(values), max(values))
    steps = [x for x, _ in points] + list(data.not_finite)
    left = max(LEFT, 8 + LETTER * _longest(mark_labels(marks)))
    scale = Scale((min(steps), max(steps)), (marks[0], marks[-1]), left)
    description = f"{name} from {label(values[0])} to {label(values[-1])} over {len(points)} points"
    drawn = [downsample(run) for run in data.runs]
    hover = ";".join(_hover(scale, point) for run in drawn for point in run)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(description)}"'
        f' data-points="{escape(hover)}">'
        f"{_axes(scale, marks)}{_curves(scale, data, drawn)}"
        f'<line class="cursor" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/><circle class="dot" r="3.5"/></svg>'
    )


def _hover(scale: Scale, point: Point) -> str:
    x, y = scale.at(point)
    return f"{x:.1f}|{y:.1f}|{label_step(point[0])}|{label(point[1])}"


def label_step(step: float) -> str:
    return f"{step:.0f}" if step == round(step) else label(step)


def _axes(scale: Scale, marks: Sequence[float]) -> str:
    parts: list[str] = []
    for mark, shown in zip(marks, mark_labels(marks), strict=True):
        y = scale.at((scale.x[0], mark))[1]
        parts.append(f'<line class="grid" x1="{scale.left:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y" x="{scale.left - 6:g}" y="{y + 3.5:.1f}">{shown}</text>')
    for step in _step_marks(*scale.x):
        x = scale.at((step, scale.y[0]))[0]
        place = "x end" if step == scale.x[1] > scale.x[0] else "x"
        parts.append(f'<text class="{place}" x="{x:.1f}" y="{HEIGHT - 7:g}">{label_step(step)}</text>')
    return "".join(parts)


def mark_labels(marks: Sequence[float]) -> list[str]:
    """All labels in one notation, with the digits that their distance needs: 0.15, or 2.5e-05 if that is shorter."""
    plain, short = _fewest_digits(marks, "f"), _fewest_digits(marks, "g")
    return plain if plain and _longest(plain) <= max(PLAIN, _longest(short)) else short


def _fewest_digits(marks: Sequence[float], form: str) -> list[str]:
    """The marks in this form of Python's, to a thousandth of their distance; empty where 16 digits do not do."""
    near = 1e-3 * (marks[1] - marks[0])
    for digits in range(17):
        labels = [f"{mark:,.{digits}{form}}" for mark in marks]
        if all(abs(float(text.replace(",", "")) - mark) <= near for text, mark in zip(labels, marks, strict=True)):
            return labels
    return []


def _longest(labels: Sequence[str]) -> int:
    return max(map(len, labels), default=0)


def _step_marks(first: float, last: float) -> list[float]:
    """The first and last step, and round ones between them whose labels do not overlap."""
    if last <= first:
        return [first]
    gap = (last - first) * 0.14
    between = [t for t in ticks(first, last, 4) if first + gap < t < last - 1.4 * gap and t == round(t)]
    return [first, *between, last]


def _curves(scale: Scale, data: Series, drawn: Sequence[Sequence[Point]]) -> str:
    parts: list[str] = []
    for run, thin in zip(data.runs, drawn, strict=True):
        smooth = len(run) >= SMOOTH_FROM
        if len(run) == 1:
            x, y = scale.at(run[0])
            parts.append(f'<circle class="one" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            continue
        parts.append(_line("raw" if smooth else "mean", scale, thin))
        if smooth:
            parts.append(_line("mean", scale, downsample(running_mean(run))))
    floor = HEIGHT - BOTTOM
    for step in data.not_finite[:MOST_POINTS]:
        x = scale.at((step, scale.y[0]))[0]
        parts.append(f'<line class="lost" x1="{x:.1f}" x2="{x:.1f}" y1="{floor - 8:g}" y2="{floor:g}"/>')
    return "".join(parts)


def _line(kind: str, scale: Scale, run: Sequence[Point]) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(scale.at, run))
    return f'<polyline class="{kind}" points="{corners}"/>'
