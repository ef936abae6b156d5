"""One tiny world for all tests of runs: nobody writes into it."""

import sys
from collections.abc import Iterator

import pytest
import torch
from small import World, make_world

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _imports_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes and rewards are loaded from files; the next test sees none of them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in {"recipe", "rewards"} & (sys.modules.keys() - before):
        del sys.modules[name]
