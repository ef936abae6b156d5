"""Cases that need a process of their own: Triton's interpreter is chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def written_by(program: Path, path: Path) -> Path:
    """The file that the program wrote to this path."""
    subprocess.run([sys.executable, str(program), str(path)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return path
