"""A GRPO step is compared in the same precision, and apart from that with less on TRL's side."""

import pytest
import torch

from benchmarks.learning import gpu, peers
from benchmarks.learning.work import Online
from tests.bench.tiny_subject import subject

WORK = Online(prompts=2, group=2, prompt=8, completion=4)


@pytest.mark.parametrize("half", [False, True], ids=["float32 weights", "bfloat16 weights"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_trl_trains_in_float32_beside_a_model_in_bfloat16_unless_less_is_asked_for(half: bool, lora: bool):
    trainer = peers.grpo(subject(torch.bfloat16, lora=lora), WORK, half=half)(1)
    trained = {p.dtype for p in trainer.model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in trainer.model.parameters() if not p.requires_grad}
    assert trainer.args.bf16 is not half
    assert trained == {torch.bfloat16 if half and not lora else torch.float32}
    assert frozen == ({torch.bfloat16} if lora else set())


def test_trl_trains_in_float32_without_autocast_beside_a_model_in_float32():
    trainer = peers.grpo(subject(torch.float32), WORK)(1)
    assert trainer.args.bf16 is False
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_step_with_a_goal_is_compared_and_one_with_less_precision_has_none():
    tiny = subject(torch.bfloat16)
    found = gpu.grpo_step(tiny, WORK, times=1e6, most=1e6, turns=1)
    less = gpu.compared("less", tiny, WORK, turns=1, half=True)
    assert found["name"] == f"H200 GRPO step, tiny, {WORK}"
    assert found["goal"] == ">= 1e+06 x, <= 1e+06 s"
    assert found["ok"] is False
    assert less["goal"] is None
    assert min(found["ours"], found["peer"], less["ours"], less["peer"]) > 0
