"""One world for all tests of checks: nobody writes into it."""

import pytest
import torch
from check_world import World, make_world

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))
