"""The report in a real browser, with no network: it renders, draws its curves, and asks for nothing from outside."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hone.log.report import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=3000",
]  # fmt: skip


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
        [str(BROWSER), *QUIET, profile, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
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
        timeout=120,
        check=True,
    )
    assert shot.stat().st_size > 20_000  # an empty page compresses to less
