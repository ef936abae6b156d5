"""PPO was in TRL up to 1.12.0: the comparison runs in a process that sees that version instead of the newest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv" / "trl-1.12.0"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="TRL 1.12.0, the last with PPO, is not here: make old-trl")
def test_one_update_of_the_old_trainer_is_ours():
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "old_ppo_agrees.py")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "ran 5, skipped 0" in done.stdout
