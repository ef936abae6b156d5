"""A backend or runner whose folder is deleted is not missed: everything still works, in plain code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience

import hone

HERE, SOURCE = Path(__file__).resolve().parent, Path(hone.__file__).parent
FOLDERS = ("model/backends/fused", "model/backends/native", "engine/runners/cuda", "engine/runners/native")
# what plain code computes in float64, and what the decoder's own choice computes in float32
WAYS = {"plain": "Way()", "default": "Way(dtype=torch.float32, layout='shared', backends=None)"}
CASES = ("grpo", "ppo", "dpo")

PROGRAM = f"""
import hashlib, json, sys
import torch
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
from ways import CASES, Way, trajectory
import hone

def digest(found):
    h = hashlib.sha256()
    for weight in found.weights:
        h.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
    h.update(json.dumps([{{k: float(v).hex() for k, v in sorted(m.items())}} for m in found.metrics]).encode())
    return h.hexdigest()

torch.set_num_threads(1)
ways = {{"plain": {WAYS["plain"]}, "default": {WAYS["default"]}}}
runs = [(case, name) for case in {CASES!r} for name in ways]
found = {{f"{{case}}, {{name}}": digest(trajectory(CASES[case], ways[name])) for case, name in runs}}
print(json.dumps({{"source": hone.__file__, "found": found}}))
"""


def without(folder: Path, deleted: tuple[str, ...]) -> Path:
    """A copy of the source in the folder, some of its own folders deleted."""
    shutil.copytree(SOURCE, folder / "hone", ignore=shutil.ignore_patterns("__pycache__"))
    for name in deleted:
        shutil.rmtree(folder / "hone" / name)
    return folder


def started(source: Path, *command: str, **variables: str) -> str:
    """What the command prints, with the source in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=source,
        capture_output=True,
        text=True,
        timeout=patience(600),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def trajectories(source: Path, **variables: str) -> dict[str, str]:
    """Hashes of three algorithms' trajectories, by algorithm and way."""
    told = json.loads(started(source, "-c", PROGRAM, **variables).splitlines()[-1])
    assert told["source"].startswith(str(source)), "the copy is what runs"
    return told["found"]


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    """The trajectories of the whole source in plain code."""
    return trajectories(SOURCE.parent, HONE_BACKENDS="plain")


def test_without_all_of_them_trajectories_are_those_of_plain_code(tmp_path: Path, plain: dict[str, str]) -> None:
    assert trajectories(without(tmp_path, FOLDERS)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_without_one_of_them_the_others_still_work(folder: str, tmp_path: Path, plain: dict[str, str]) -> None:
    whole, found = trajectories(SOURCE.parent), trajectories(without(tmp_path, (folder,)))
    on_a_cpu = folder.endswith("native")  # the others are a GPU's
    for name, value in found.items():
        if not on_a_cpu or name.endswith("plain"):
            assert value == whole[name], name
    if folder == "model/backends/native":
        assert found["grpo, default"] != whole["grpo, default"], "the backend computes in another order"


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [*[(folder,) for folder in FOLDERS], FOLDERS])
def test_the_demo_runs_without_them(deleted: tuple[str, ...], tmp_path: Path) -> None:
    source = without(tmp_path / "source", deleted)
    out = tmp_path / "demo"
    started(source, "-m", "hone", "demo", "--quick", "--out", str(out))
    assert any(out.rglob("config.json"))
