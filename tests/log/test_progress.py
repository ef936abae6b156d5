"""Progress: one aligned line a step, escape codes only where a terminal reads them."""

import io
import math
import re

import pytest

from hone.log.progress import Progress, compact, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


FULL = {"reward": 0.531, "ref_kl": 0.0123, "length": 31.21, "tokens_per_second": 8412.0, "loss": 3.0}


def test_a_line_reads_as_the_example() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(40, title="grpo", stream=stream, start=10, clock=clock)
    for seconds in (90.0, 1.5):
        clock.now += seconds
        progress.step(FULL)
    # 28 steps to go at 1.5 s each; what the first one took says nothing of the others
    first, second = stream.getvalue().splitlines(keepends=True)
    assert first.endswith("8.4k tok/s  -:-- left\n")
    assert second == ("grpo  12/40 ━━━━━━──────────────  reward  0.53  kl 0.012  len  31.2  8.4k tok/s  0:42 left\n")


def test_without_a_reward_the_loss_is_shown_and_unknown_columns_take_no_room() -> None:
    stream = io.StringIO()
    Progress(4, title="sft", stream=stream, clock=Clock()).step({"loss": 2.5, "lr": 0.1})
    assert stream.getvalue() == "sft  1/4 ━━━━━───────────────  loss  2.500  -:-- left\n"


def test_columns_stay_aligned_when_metrics_go_missing_or_wild() -> None:
    stream = io.StringIO()
    progress = Progress(100, title="grpo", stream=stream, clock=Clock())
    progress.step(FULL)
    progress.step({})
    progress.step(FULL | {"reward": float("nan"), "ref_kl": float("inf"), "tokens_per_second": 12.0})
    progress.step(FULL | {"reward": -0.001})
    rows = stream.getvalue().splitlines()
    assert {tuple(row.index(word) for word in ("reward", "kl", "len", "tok/s", "left")) for row in rows} == {
        tuple(rows[0].index(word) for word in ("reward", "kl", "len", "tok/s", "left"))
    }
    assert "reward     -" in rows[1]
    assert "reward   nan" in rows[2]
    assert "kl   inf" in rows[2]
    assert "reward  0.00" in rows[3], "no negative zero"


def test_invalid_rewards_are_shown_once_there_are_any() -> None:
    stream = io.StringIO()
    progress = Progress(100, title="grpo", stream=stream, clock=Clock())
    for invalid in (0.0, 0.04, 0.001, 0.0, 1.0):
        progress.step(FULL | {"invalid": invalid})
    rows = stream.getvalue().splitlines()
    assert "invalid" not in rows[0]
    assert [row.split("invalid")[1][:5] for row in rows[1:]] == ["  4% ", " <1% ", "  0% ", " 100%"]


def test_time_left_follows_recent_steps() -> None:
    clock = Clock()
    progress = Progress(1000, title="x", stream=io.StringIO(), clock=clock)
    clock.now += 500.0
    progress.step({})
    assert math.isnan(progress.left())
    clock.now += 4.0
    progress.step({})
    assert progress.left() == 4.0 * 998
    for _ in range(20):
        clock.now += 2.0
        progress.step({})
    assert progress.left() == pytest.approx(2.0 * (1000 - 22))


def test_no_escape_codes_off_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(3, title="x", stream=stream)
    for _ in range(3):
        progress.step(FULL)
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert re.findall(r"(\d)/3", stream.getvalue()) == ["1", "2", "3"]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colour_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    stream = Terminal()
    Progress(2, title="x", stream=stream).step(FULL)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("columns", [120, 79, 60, 40, 30])
def test_a_line_never_wraps(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Progress(40, title="grpo", stream=stream).step(FULL)
    assert len(stream.getvalue().rstrip("\n")) < columns
    assert "reward  0.53" in stream.getvalue()


def test_an_ascii_stream_gets_an_ascii_bar() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Progress(2, title="x", stream=stream).step({"loss": 1.0})
    assert b"##########----------" in raw.getvalue()


def test_more_steps_than_planned_and_none_planned() -> None:
    stream = io.StringIO()
    for total in (0, 1):
        progress = Progress(total, title="x", stream=stream, start=1)
        progress.step({})
        assert progress.left() == 0.0
    assert "━" * 20 in stream.getvalue()
    assert "━" * 21 not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (41.6, "0:42"), (725, "12:05"), (3723, "1:02:03"), (183_600, "2d 03h"), (-1, "0:00")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("x", "shown"),
    [(0.4, "0"), (840, "840"), (999.6, "1.0k"), (8412, "8.4k"), (84_120, "84k"), (999_900, "1.0M"), (1.2e6, "1.2M")],
)
def test_compact_numbers(x: float, shown: str) -> None:
    assert compact(x) == shown
