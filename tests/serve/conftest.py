"""One set of tiny models and one server for all tests of serving."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from little import Server, make_folders, start_server
from patience import patience

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(folders: Path) -> Iterator[Server]:
    made = start_server(folders / "chatty", "--adapter", f"tuned={folders / 'tuned'}", "--max-rows", "8")
    yield made
    assert made.close() == 0


@pytest.fixture(scope="session")
def strict(folders: Path) -> Iterator[Server]:
    """Little patience, and two requests at a time."""
    busy = min(patience(1.0), 2.0)
    before = (
        "import hone.serve.server as s, hone.serve.http as h; "
        f"s.HEAD_SECONDS = h.BODY_SECONDS = {0.6 * busy}; s.STALLED_SECONDS = h.STALLED_SECONDS = {0.5 * busy}; "
        f"h.DRAIN_SECONDS = {0.3 * busy}; h.SLOW_SECONDS = {0.25 * busy}"
    )
    made = start_server(
        folders / "chatty", "--concurrency", "2", "--timeout", f"{1.2 * busy}", "--max-tokens", "900", before=before
    )
    yield made
    assert made.close() == 0
