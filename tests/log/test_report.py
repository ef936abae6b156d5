"""The report: one file, nothing loaded from elsewhere, nothing a model wrote can run, the numbers are there."""

import base64
import hashlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from each import each

from hone.report.chart import downsample, label, mark_labels, running_mean, series, svg, ticks
from hone.report.report import write_report
from hone.report.samples import completion, problems

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&amp; --> </style></pre></svg>"
VOID = {"meta", "line", "circle", "rect", "polyline", "br", "img", "link", "input"}
URLS = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction", "background", "cite", "style"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what the tests ask for."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.code: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(source)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, "tags nest"

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        self.code.get(inside, self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def made(tmp_path: Path, **parts: Any) -> tuple[str, Page]:
    given = {"title": "t", "table": [], "runs": {}, "samples": [], "notes": {}} | parts
    source = write_report(tmp_path / "report.html", **given).read_text()
    return source, Page(source)


def whole(word: str = "") -> dict[str, Any]:
    """A report in which every place that takes text holds `word`."""
    rows = [{"step": i, "loss": 1.0 / i, "reward": i / 40, f"odd{word}": 1.0, "note": word} for i in range(1, 41)]
    before = {
        "stage": f"sft{word}",
        "prompt": f"6*7?{word}",
        "completion": f"41{word}",
        "correct": False,
        "reward": 0.0,
    }
    after = before | {"stage": f"grpo{word}", "completion": f"<think>ok{word}</think><answer>42{word}", "correct": True}
    after |= {"reward": 1.0, "parts": {f"math{word}": 1.0}, "stop": f"x{word}", "answer": f"42{word}", "length": 9}
    first = {"stage": f"sft{word}", "accuracy": 0.2234, "format": 0.961, "length": 28.44, "kl": 0.0, "seconds": 63.5}
    last = {"stage": f"grpo{word}", "accuracy": 0.8029, "format": 0.998, "length": 41.26, "kl": 0.0834}
    return {
        "title": f"Demo{word}",
        "table": [first, last | {"seconds": 214.9, f"extra{word}": word}],
        "runs": {f"sft{word}": rows, f"grpo{word}": rows},
        "samples": [before, after, after | {"prompt": f"alone{word}", "step": 3}],
        "notes": {f"machine{word}": f"2 cores{word}"},
    }


def test_numbers_of_the_table_appear(tmp_path: Path) -> None:
    _, page = made(tmp_path, **whole())
    for shown in ("22.3%", "80.3%", "96.1%", "99.8%", "28.4", "41.3", "0.083", "63.5", "214.9", "4:38"):
        assert shown in page.text
    for shown in ("held-out accuracy", "format rate", "mean length", "KL from SFT", "2 cores", "2 stages, 80 steps"):
        assert shown in page.text
    assert "wrong → right" in page.text


def test_the_curves_show_the_numbers_given(tmp_path: Path) -> None:
    source, page = made(tmp_path, **whole())
    charts = [attrs for tag, attrs in page.tags if tag == "svg" and "data-points" in attrs]
    labels = [str(attrs["aria-label"]) for attrs in charts]
    assert labels.count("loss from 1 to 0.025 over 40 points") == 2
    assert labels.count("reward from 0.025 to 1 over 40 points") == 2
    hover = str(charts[0]["data-points"]).split(";")
    assert len(hover) == 40
    assert hover[3].endswith("|4|0.25")
    assert source.count('role="tab"') == source.count('role="tabpanel"') == 2


@pytest.mark.parametrize("word", ["", EVIL])
def test_nothing_is_loaded_from_elsewhere(tmp_path: Path, word: str) -> None:
    source, page = made(tmp_path, **whole(word))
    assert "http:" not in source
    assert "https:" not in source
    assert "@import" not in source
    assert "url(" not in source
    for tag, attrs in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "audio", "video"}
        assert not URLS & attrs.keys()
        assert not [name for name in attrs if name.startswith("on")]


def test_the_policy_lets_only_our_own_script_and_style_run(tmp_path: Path) -> None:
    _, page = made(tmp_path, **whole(EVIL))
    policy = next(str(a["content"]) for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        assert sum(tag == kind for tag, _ in page.tags) == 1
        digest = base64.b64encode(hashlib.sha256("".join(page.code[kind]).encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_hostile_text_changes_no_tag(tmp_path: Path) -> None:
    _, tame = made(tmp_path, **whole("x"))
    _, hostile = made(tmp_path, **whole(EVIL))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in tame.tags]
    assert hostile.text.count("<script>alert(1)</script>") > 20, "it is shown as text everywhere"


def test_hostile_text_is_shown_as_it_was_written(tmp_path: Path) -> None:
    sample = {"stage": "grpo", "prompt": EVIL, "completion": f"<think>{EVIL}</think>", "reward": 1.0}
    _, page = made(tmp_path, samples=[sample])
    assert EVIL in page.words
    assert page.words.count(EVIL) == 2


def test_control_characters_and_lone_surrogates_do_not_break_the_file(tmp_path: Path) -> None:
    _, page = made(tmp_path, samples=[{"stage": "s", "prompt": "a\x00b\x1b[2J", "completion": "\ud800\x08c"}])
    assert "a␀b␛[2J" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.text)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{}],
        [{"step": 1}],
        [{"step": 1, "loss": 0.5}],
        [{"loss": math.nan}, {"loss": math.inf}, {"loss": None}],
        [{"step": i, "loss": 1.0 if i % 2 else math.nan} for i in range(9)],
        [{"step": i, "loss": 3.0} for i in range(9)],
        [{"step": i, "loss": x} for i, x in enumerate((1e308, -1e308, 0.0, 1e-320, 5e-324, 10**400))],
        [{"step": i, "loss": 1e9 + i * 1e-9} for i in range(9)],
        [{"step": math.nan, "loss": 1.0}, {"step": "x", "loss": 2.0}],
        [{"step": 5, "loss": 1.0}, {"step": 5, "loss": 2.0}],
        [{"step": i, "loss": "text", "list": [1]} for i in range(3)],
        [{"step": i, "loss": math.sin(i)} for i in range(20_000)],
    ],
)
def test_odd_series_make_a_page_without_nan_in_its_drawing(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    source, page = made(tmp_path, runs={"a": rows})
    for tag, attrs in page.tags:
        if tag in {"polyline", "line", "circle", "svg", "text"}:
            assert not re.search(r"nan|inf\b", " ".join(str(v) for v in attrs.values()), re.IGNORECASE), tag
    assert len(source) < 120_000


def test_points_that_are_not_finite_are_counted_and_marked(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": math.nan if i in (3, 4) else 1.0 * i} for i in range(1, 9)]
    source, page = made(tmp_path, runs={"a": rows})
    assert "2 not finite" in page.text
    assert source.count('class="lost"') == 2
    assert source.count("<polyline") == 2, "the curve is broken there"


def test_missing_numbers_in_the_table_are_dashes(tmp_path: Path) -> None:
    table = [{"stage": "a", "accuracy": math.nan, "kl": None}, {"stage": "b", "accuracy": 0.5}]
    _, page = made(tmp_path, table=table)
    assert page.text.count("—") == 3
    assert "nan" not in page.text.lower()


def test_an_empty_report_is_a_page(tmp_path: Path) -> None:
    _, page = made(tmp_path)
    assert "0 steps" in page.text


def test_the_file_replaces_an_older_one_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.html"
    for title in ("first", "second"):
        write_report(path, title=title, table=[], runs={})
    assert "second" in path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


@each(
    ("raw", "kinds"),
    [
        ("plain", []),
        ("<think>a</think>\n<answer>b</answer>", ["think", "answer"]),
        ("<think>a<answer>b", ["think", "answer"]),
        ("<think>a <think>b</think>", ["think", "think"]),
        ("</think></answer>", []),
        ("<THINK>a</THINK>", []),
    ],
)
def test_parts_of_a_completion_are_marked_and_no_letter_is_lost(raw: str, kinds: list[str]) -> None:
    page = Page(completion(raw))
    assert [attrs["class"] for tag, attrs in page.tags if tag == "span"] == kinds
    assert "".join(page.words) == raw


def test_a_problem_answered_by_several_stages_is_compared_in_their_order(tmp_path: Path) -> None:
    samples = [
        {"stage": "grpo", "problem": "7", "prompt": "p", "completion": "later"},
        {"stage": "sft", "problem": "7", "prompt": "p", "completion": "sooner"},
        {"stage": "sft", "problem": "8", "prompt": "p", "completion": "alone"},
    ]
    together, alone = problems(samples)
    assert [[s["completion"] for s in group] for group in together] == [["later", "sooner"]]
    assert [s["completion"] for s in alone] == ["alone"]
    _, page = made(tmp_path, runs={"sft": [], "grpo": []}, samples=samples)
    assert page.text.index("sooner") < page.text.index("later") < page.text.index("alone")


def test_ticks_are_round_and_hold_the_data() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0.12, 0.87) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3.0, 7.0) == [-5.0, -2.5, 0.0, 2.5, 5.0, 7.5]
    for low, high in ((5.0, 5.0), (0.0, 0.0), (1e16, 1e16 + 2), (1e-300, 2e-300), (-1e99, 1e99)):
        marks = ticks(low, high)
        assert marks[0] <= low <= high <= marks[-1]
        assert 2 <= len(marks) <= 8
        assert marks == sorted(set(marks))


def test_the_labels_of_an_axis_say_their_marks_and_no_two_are_alike() -> None:
    assert mark_labels(ticks(1.8e-4, 2.2e-4)) == ["0.00018", "0.00019", "0.00020", "0.00021", "0.00022"]
    assert mark_labels(ticks(1e-7, 3.3e-7)) == ["1e-07", "2e-07", "3e-07", "4e-07"]
    ranges = ((0.99991, 0.99999), (1e6, 1e6 + 10), (1e6, 9e6), (1e-80, 3e-80), (-1e-5, 1e-5), (0.0, 0.0), (1e-7, 1e-7))
    for low, high in ranges:
        marks = ticks(low, high)
        labels = [float(text.replace(",", "")) for text in mark_labels(marks)]
        assert labels == pytest.approx(marks, rel=1e-12, abs=1e-3 * (marks[1] - marks[0]))
        assert len(set(labels)) == len(marks)


def test_thinning_keeps_the_ends_and_the_peaks() -> None:
    run = [(float(i), math.sin(i)) for i in range(10_000)]
    run[4321] = (4321.0, 50.0)
    run[777] = (777.0, -50.0)
    thin = downsample(run)
    assert len(thin) <= 250
    assert thin[0] == run[0]
    assert thin[-1] == run[-1]
    assert (4321.0, 50.0) in thin
    assert (777.0, -50.0) in thin
    assert thin == sorted(thin)


def test_the_running_mean_does_not_lag() -> None:
    # reach 5 of 100 points: on a straight line the mean of i-5 .. i+5 is i; at the ends of 0 .. 5 it is 2.5
    line = running_mean([(float(i), float(i)) for i in range(100)])
    assert line[50] == (50.0, 50.0)
    assert line[0] == (0.0, 2.5)
    assert line[99] == (99.0, 96.5)


def test_a_step_without_the_metric_does_not_break_its_curve() -> None:
    data = series([{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": 3.0}, {"step": 4, "a": None}], "a")
    assert data.runs == (((1.0, 1.0), (3.0, 3.0)),)
    assert data.not_finite == (4.0,)
    assert "no finite values" in svg(series([{"a": None}], "a"), name="a")


@pytest.mark.parametrize(
    ("x", "shown"), [(0.0, "0"), (0.53124, "0.5312"), (12_345.6, "12,346"), (1.5e6, "1.5e+06"), (-0.0, "0")]
)
def test_labels(x: float, shown: str) -> None:
    assert label(x) == shown


def test_the_headline_is_the_best_stage_and_what_came_before_it(tmp_path: Path) -> None:
    table = [
        {"stage": "SFT", "accuracy": 0.2, "kl": 0.0},
        {"stage": "GRPO", "accuracy": 0.7, "kl": 0.08},
        {"stage": "DPO", "accuracy": 0.4, "kl": 0.1},
    ]
    page = write_report(
        tmp_path / "r.html", title="t", table=table, runs={"GRPO": [{"step": 1, "loss": 1.0}]}
    ).read_text()
    assert "<b>70.0%</b><span>after GRPO, from 20.0% after SFT</span>" in page
    assert "<b>0.080</b>" in page


def test_the_headline_compares_with_the_stage_that_the_best_one_began_from(tmp_path: Path) -> None:
    table = [
        {"stage": "SFT", "accuracy": 0.2},
        {"stage": "GRPO", "start": "SFT", "accuracy": 0.7},
        {"stage": "PPO", "start": "SFT", "accuracy": 0.8},
    ]
    page = write_report(tmp_path / "r.html", title="t", table=table, runs={}).read_text()
    assert "<b>80.0%</b><span>after PPO, from 20.0% after SFT</span>" in page
    assert ">start<" not in page
