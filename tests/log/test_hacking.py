"""The reward-hacking view: shares and disagreement by hand, drift, top samples, and what the page shows of them."""

import json
from pathlib import Path

import pytest
import torch

from hone.cli import main
from hone.log.rollouts import add_hacking_signs
from hone.log.stats import Stats
from hone.report.hacking import Drift, drifts, top
from hone.types import Outcome, Rollout

torch.set_num_threads(1)


def rollout(value: float | None, *, held_out: float | None = None, **added: float) -> Rollout:
    parts = {} if held_out is None else {"held_out": held_out}
    return Rollout(tokens=[1], mask=[True], outcome=Outcome(value=value, parts=parts, added=added))


def watched(*rollouts: Rollout) -> dict[str, float]:
    stats = Stats()
    add_hacking_signs(stats, rollouts)
    return stats.means()


def test_shares_are_of_all_that_was_added_whatever_its_sign():
    # |1| + |0.5| of 1.5, and |-0.5| of 0.5: math 1 of 2, style 1 of 2
    found = watched(rollout(1.5, math=1.0, style=0.5), rollout(-0.5, math=0.0, style=-0.5), rollout(None, math=9.0))
    assert found == {"share/math": 0.5, "share/style": 0.5}
    assert watched(rollout(1.0)) == {}


def test_disagreement_and_what_is_rewarded_for_nothing():
    rows = [
        rollout(1.0, held_out=1.0),
        rollout(1.0, held_out=0.0),
        rollout(0.9, held_out=0.0),
        rollout(0.0, held_out=0.0),
    ]
    assert watched(*rows, rollout(0.0)) == {"disagreement": 0.5, "hacked": pytest.approx(2 / 3)}
    assert watched(rollout(0.0, held_out=1.0))["disagreement"] == 1.0


def test_drift_compares_the_first_tenth_with_the_last():
    rows = [{"step": n, "length": float(n), "reward/math": 1.0, "loss": 0.0} for n in range(1, 21)]
    assert drifts(rows) == [Drift("length", 1.5, 19.5), Drift("reward/math", 1.0, 1.0)]
    assert drifts([{"length": None}, {"length": True}]) == []


def test_the_top_samples_are_the_best_each_once_and_latest_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hone.report.hacking.MOST", 3)
    rows = [(1, "a", 1.0), (2, "b", 0.5), (3, "a", 1.0), (4, "c", None), (5, "d", 1.0)]
    samples = [{"step": step, "completion": text, "reward": reward} for step, text, reward in rows]
    assert [(s["step"], s["completion"]) for s in top(samples)] == [(5, "d"), (3, "a"), (2, "b")]


def test_a_run_has_a_report_with_the_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "<run>"
    folder.mkdir()
    rows = [
        {"step": n, "reward": n / 9, "reward/x<y": 1.0, "share/x<y": 0.75, "length": n, "hacked": 0.25}
        for n in range(9)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 10, "rew')
    sample = {
        "step": 1,
        "prompt": "q",
        "completion": "<script>best",
        "reward": 1.0,
        "parts": {},
        "length": 1,
        "stop": "token",
    }
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert main(["report", str(folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    page = path.read_text()
    assert path == folder / "report.html"
    for shown in (
        "Reward hacking?",
        "Top-rewarded samples",
        "share/x&lt;y",
        "first tenth",
        "0.75",
        "&lt;script&gt;best",
    ):
        assert shown in page
    assert "held-out verifier refuses" in page
    assert "<script>best" not in page


def test_a_folder_that_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(tmp_path)]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
