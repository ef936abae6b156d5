"""One update of the last PPO trainer that TRL had, run for real on the shared rows, and what it computed on the way."""

from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import datasets
import torch
from torch import Tensor
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from tests.parity import house, llama, rows

CRITIC = 2  # the seed of its weights
VF_COEF, CLIP, KL_COEF = 0.1, 0.2, 0.05


@dataclass(kw_only=True)
class Seen:
    """What the trainer computed."""

    raw: Tensor  # [8, 6] advantages before whitening, TRL's columns
    white: Tensor  # [8, 6]
    mask: Tensor  # [8, 6] the tokens they are whitened over
    loss: float
    grads: dict[str, Tensor]  # of policy.* and value_model.*


def _noise(seed: int, *shape: int) -> Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=rows.FULL)


def logit_noise() -> Tensor:
    """What the old policy's logits have more than the present one's, [8, LIMIT, V]."""
    return _noise(11, 8, rows.LIMIT, rows.VOCAB)


def value_noise() -> Tensor:
    """What the old values have more than the present ones, [8, LIMIT]."""
    return _noise(12, 8, rows.LIMIT)


def written() -> tuple[Tensor, int]:
    """Prompts padded on the left and answers on the right, and where the answers begin."""
    found = rows.draw(share=rows.GROUP)
    left = max(len(r.prompt) for r in found)
    lines = [[rows.PAD] * (left - len(r.prompt)) + r.prompt + r.completion for r in found]
    return torch.tensor([x + [rows.PAD] * (left + rows.LIMIT - len(x)) for x in lines]), left


def build(gamma: float, lam: float) -> PPOTrainer:
    args = PPOConfig(
        **llama.COMMON, response_length=rows.LIMIT, stop_token="eos", num_ppo_epochs=1, num_mini_batches=1,
        total_episodes=8, num_sample_generations=0, kl_coef=KL_COEF, vf_coef=VF_COEF, cliprange=CLIP,
        cliprange_value=CLIP, gamma=gamma, lam=lam, temperature=1.0, missing_eos_penalty=None,
    )  # fmt: skip
    prompts = datasets.Dataset.from_list([{"input_ids": [1] * max(rows.PROMPTS[:2])}] * 8)
    return PPOTrainer(
        args, llama.tokenizer(), llama.language_model(0), llama.language_model(1), llama.reward_model(3), prompts,
        llama.reward_model(CRITIC),
    )  # fmt: skip


@cache
def run(gamma: float, lam: float) -> Seen:
    """Train one step on the shared rows and rewards; old log-probs and values are a little off the present ones."""
    trainer, (tokens, start) = build(gamma, lam), written()
    policy, critic, found = trainer.model.policy, trainer.model.value_model, dict[str, Any]()
    real_reward, real_whiten, real_backward = (
        ppo_trainer.get_reward, ppo_trainer.masked_whiten, trainer.accelerator.backward,
    )  # fmt: skip

    def generate(*_: Any) -> tuple[Tensor, Tensor]:
        logits = ppo_trainer.forward(policy, tokens, rows.PAD).logits[:, start - 1 : -1]
        return tokens, logits + logit_noise()

    def reward(model: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        if model is not critic:
            return tokens, torch.tensor(rows.REWARDS, dtype=rows.FULL), tokens
        value, final, length = real_reward(model, *args)
        value[:, start - 1 : -1, 0] += value_noise()
        return value, final, length

    def whiten(values: Tensor, mask: Tensor, **more: Any) -> Tensor:
        found.update(raw=values.clone(), mask=mask.clone(), white=real_whiten(values, mask, **more))
        return found["white"]

    def backward(loss: Tensor, **more: Any) -> None:
        real_backward(loss, **more)
        found.update(loss=float(loss.detach()), grads=house.gradients(trainer.model))

    with (
        patch.object(ppo_trainer, "batch_generation", generate),
        patch.object(ppo_trainer, "get_reward", reward),
        patch.object(ppo_trainer, "masked_whiten", whiten),
        patch.object(trainer.accelerator, "backward", backward),
    ):
        trainer.train()
    return Seen(**found)
