"""One desk for all tests of checks: nobody writes into it."""

import pytest
import torch
from desk import Desk, make_desk

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return make_desk(tmp_path_factory.mktemp("desk"))
