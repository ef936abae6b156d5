"""The example for reading also runs, and learns."""

import importlib.util
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"


def test_minimal_grpo_learns_to_sort() -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("minimal_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    history = module.train(seed=1, steps=60, quiet=True)
    assert sum(history[:5]) / 5 < 0.25  # chance is about 0.1
    assert sum(history[-5:]) / 5 > 0.45
