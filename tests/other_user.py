"""What tests need that start a program as another user of the machine."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python_of_nobody(*interpreters: str) -> str:
    """The first of the interpreters that user nobody may run; without one, or with this tree closed, a skip."""
    if not open_to_all(ROOT):
        pytest.skip(f"user nobody cannot enter {ROOT}: a folder above it is closed to other users (chmod o+x)")
    found = next((p for p in interpreters if open_to_all(p)), None)
    if found is None:
        pytest.skip(f"no interpreter that user nobody may run among {', '.join(interpreters)}")
    return found


def open_to_all(place: str | Path) -> bool:
    """Whether everyone may enter it, or run it, and enter the folders that it lies in."""
    path = Path(os.path.realpath(place))
    return path.exists() and all(p.stat().st_mode & 0o001 for p in (path, *path.parents))
