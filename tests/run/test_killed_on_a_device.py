"""A run that is killed in the middle of a save goes on to the bits of one that never was, on a CPU and on a GPU.

On a GPU with deterministic kernels, recorded passes and checkpoints copied on the device: `pytest -m gpu` on this file.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small import World, arguments, assert_same_run, recipe, temporary

from hone.storage.files import checkpoints, latest

torch.set_num_threads(1)
KINDS = {
    "grpo with a LoRA": ("grpo", ("lora.rank=2",)),
    "sft": ("sft", ()),
    "dpo": ("dpo", ()),
    "grpo": ("grpo", ()),
    "grpo, sampled ahead, KL steered": (
        "grpo",
        ("train.lag=1", "train.mismatch=truncate", "algo.kl_target=0.001", "train.reference_refresh=3"),
    ),
    "ppo, own critic, minibatches": ("ppo", ("critic.kind=own", "train.minibatches=2")),
}
SHARED = ("train.steps=8", "save.every=2", "save.keep=9", "train.dtype=bfloat16", "train.deterministic=true")
KILLED, FILE = 6, 5  # in which step's checkpoint, and at which of its files
CASES = [
    *(pytest.param(name, "cpu", marks=[pytest.mark.slow] if name != "sft" else []) for name in KINDS),
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in KINDS),
]


def started(world: World, name: str, device: str, out: Path, *more: str, kill: bool = False) -> int:
    """The exit code of `hone run` in a process of its own, which makes a context of its own on the device."""
    algo, settings = KINDS[name]
    told, where = str(out) + ".passes", {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [*arguments(recipe(world, algo, out), world), *settings, *SHARED, f"train.device={device}", *more]
    program = [sys.executable, str(Path(__file__).with_name("killed.py"))]
    return subprocess.run(
        [*program, told, str(KILLED), str(FILE if kill else 0), *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **where}, stdout=subprocess.DEVNULL, timeout=600,
    ).returncode  # fmt: skip


@pytest.mark.parametrize(("name", "device"), CASES)
def test_killed_in_a_save_and_resumed_is_as_if_never_killed(name: str, device: str, world: World, tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert started(world, name, device, whole) == 0
    assert started(world, name, device, cut, kill=True) == -signal.SIGKILL
    assert max(checkpoints(cut / "checkpoints")) == KILLED - 2
    assert latest(cut / "checkpoints") == cut / f"checkpoints/step-{KILLED - 2:06d}"
    assert temporary(cut), "it was in the middle of something"
    assert started(world, name, device, cut, "--resume") == 0
    for passes in ("whole.passes", "cut.passes"):
        assert int((tmp_path / passes).read_text()) > 0, "no pass was recorded"
    assert_same_run(whole, cut, step=8)
    assert temporary(cut) == []
