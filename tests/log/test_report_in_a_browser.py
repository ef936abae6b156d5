"""The report in a real browser, with no network: it renders, draws its curves, and asks for nothing from outside."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from hone.report.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=3000",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "TMPDIR": "/tmp"}  # it makes a socket there, whose path has at most 107 characters


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: `make browser` installs it")
def test_the_report_renders_offline(tmp_path: Path) -> None:
    page = write_report(
        tmp_path / "report.html",
        title="A journey",
        table=[{"stage": "SFT", "accuracy": 0.25, "format": 0.9, "length": 12.0, "kl": 0.0, "seconds": 3.0}],
        runs={"SFT": [{"step": i, "loss": 1 / (i + 1)} for i in range(20)]},
        samples=[{"stage": "SFT", "prompt": "1+1?", "completion": "<think>1+1=2</think><answer>2</answer>"}],
        notes={"cores": "2"},
    )
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [str(BROWSER), *QUIET, profile, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=patience(120),
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert "A journey" in done.stdout
    assert "<svg" in done.stdout
    assert "25" in done.stdout
    assert "&lt;think&gt;" in done.stdout or "think" in done.stdout
    shot = tmp_path / "shot.png"
    subprocess.run(
        [str(BROWSER), *QUIET, profile, f"--screenshot={shot}", "--window-size=1200,1600", page.as_uri()],
        capture_output=True,
        check=True,
    )
    assert shot.stat().st_size > 20_000  # an empty page compresses to less


MEASURE = """<script>
function box(element) { var b = element.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom]; }
document.body.dataset.found = JSON.stringify({
  answers: Array.from(document.querySelectorAll(".answers"), box),
  boxes: Array.from(document.querySelectorAll(".answers .answer-box"), box),
  tables: Array.from(document.querySelectorAll(".scroll"), box),
  charts: Array.from(document.querySelectorAll(".charts"), box),
  drawings: Array.from(document.querySelectorAll("svg"), box),
  values: Array.from(document.querySelectorAll("svg"), s => Array.from(s.querySelectorAll(".y"), box)),
  cards: Array.from(document.querySelectorAll(".fact b"), function (b) { return b.textContent; }),
  tabs: Array.from(document.querySelectorAll(".tabs"), function (t) { return t.getClientRects().length; }),
});
</script>"""


def measured(page: Path, folder: Path, *, width: int = 1200) -> dict[str, Any]:
    """Where things stand: the page's own policy lets no other script run, so a copy without it is measured."""
    source = re.sub(r"<meta http-equiv=.*\n", "", page.read_text(encoding="utf-8"))
    copy = folder / "measured.html"
    copy.write_text(source.replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    words = [str(BROWSER), *QUIET, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1600"]
    done = subprocess.run(
        [*words, "--dump-dom", copy.as_uri()], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:]
    return json.loads(html.unescape(found.group(1)))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: `make browser` installs it")
def test_answers_of_any_number_of_stages_leave_no_cell_empty(tmp_path: Path) -> None:
    for count in (2, 5, 7):
        stages = [f"stage {i}" for i in range(count)]
        samples = [{"stage": s, "prompt": "1+1?", "problem": 0, "completion": "2", "answer": "2"} for s in stages]
        table = [{"stage": stage, "accuracy": 0.5} for stage in stages]
        found = measured(write_report(tmp_path / "r.html", title="t", table=table, runs={}, samples=samples), tmp_path)
        ((_, right, _, bottom),) = found["answers"]
        last = [box for box in found["boxes"] if box[3] == max(b[3] for b in found["boxes"])]
        assert len(found["boxes"]) == count
        assert abs(max(box[1] for box in last) - right) <= 1, f"{count} stages"
        assert abs(last[0][3] - bottom) <= 1, f"{count} stages"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: `make browser` installs it")
def test_a_single_run_has_summary_cards_and_charts_stand_clear_of_tables(tmp_path: Path) -> None:
    rows = [{"step": i, "reward": i / 10, "reward/math": i / 10, "length": 20.0 + i, "seconds": 2.0} for i in range(10)]
    found = measured(write_report(tmp_path / "r.html", title="t", table=[], runs={"grpo": rows}), tmp_path)
    assert found["cards"] == ["0.9", "29.0", "0:20"]  # reward and length at the end, and the time
    assert found["tabs"] == [0]  # nothing to choose from
    for _, _, top, _ in found["charts"]:
        above = [bottom for _, _, _, bottom in found["tables"] if bottom <= top + 1]
        assert all(top - bottom >= 8 for bottom in above)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: `make browser` installs it")
def test_the_labels_of_a_chart_lie_inside_it(tmp_path: Path) -> None:
    values = {"lr": 2e-4, "ess": 0.99991, "tokens": 1e6, "loss": -123_456.7, "kl": -2.5e-8, "reward": 0.5}
    rows = [{"step": i, **{name: value * (1 + i * 1e-5) for name, value in values.items()}} for i in (1, 2)]
    for run in (rows[:1], rows):
        found = measured(write_report(tmp_path / "r.html", title="t", table=[], runs={"sft": run}), tmp_path)
        assert len(found["drawings"]) >= len(values)
        for (left, *_), labels in zip(found["drawings"], found["values"], strict=True):
            assert all(label[0] >= left for label in labels), labels
