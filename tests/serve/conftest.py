"""One set of tiny models and one server for all tests of serving."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from little import Server, make_folders, start_server

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
    before = (
        "import hone.serve.server as s, hone.serve.http as h; "
        "s.HEAD_SECONDS = 0.6; s.STALLED_SECONDS = 0.5; h.BODY_SECONDS = 0.6; h.DRAIN_SECONDS = 0.3; "
        "h.SLOW_SECONDS = 0.25; h.STALLED_SECONDS = 0.5"
    )
    made = start_server(
        folders / "chatty", "--concurrency", "2", "--timeout", "1.2", "--max-tokens", "900", before=before
    )
    yield made
    assert made.close() == 0
