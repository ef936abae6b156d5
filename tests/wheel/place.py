"""An installed Hone, and an empty folder of a user's in which it is tried."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALLED = os.environ.get("HONE_WHEEL", "")  # the folder that tests/wheel/install.py made


@dataclass(frozen=True)
class Place:
    """Commands run in the folder, with a HOME of its own, and see nothing of the clone."""

    folder: Path
    home: Path

    def environment(self, kind: str) -> dict[str, str]:
        path = [str(Path(INSTALLED) / kind / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(path),
            "HOME": str(self.home),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *words: str, kind: str = "core", said: str = "") -> subprocess.CompletedProcess[str]:
        """kind: `core` has what `pip install hone` brings, `full` its extras too."""
        return subprocess.run(
            words, cwd=self.folder, env=self.environment(kind), input=said, capture_output=True, text=True
        )

    def hone(self, *words: str, kind: str = "core", said: str = "") -> str:
        """What a command prints that has to end well."""
        done = self.run("hone", *words, kind=kind, said=said)
        assert done.returncode == 0, f"hone {' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout + done.stderr

    def python(self, source: str, kind: str = "core") -> str:
        done = self.run("python", "-c", source, kind=kind)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout
