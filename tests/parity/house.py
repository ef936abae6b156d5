"""Hone's side: its own decoder with the peer's weights, and the learner's own stages from a batch to a gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hone.algo import Algorithm, objective
from hone.model.decoder import Decoder
from hone.model.formats.hf_config import config_from_hf
from hone.model.policy import Policy
from hone.model.scorer import Scorer
from hone.train.annotate import forward_in_slices
from hone.train.learner import micro_batches
from hone.train.update import weigh
from hone.types import Batch, Forward, ForwardModel
from tests.parity.llama import language_model
from tests.parity.rows import near


@dataclass(frozen=True, kw_only=True)
class Result:
    """A loss and its gradient, by parameter name."""

    loss: float
    grads: Mapping[str, Tensor]

    def scaled(self, factor: float) -> "Result":
        return Result(loss=factor * self.loss, grads={name: factor * g for name, g in self.grads.items()})

    def plus(self, other: "Result") -> "Result":
        return Result(
            loss=self.loss + other.loss, grads={name: g + other.grads[name] for name, g in self.grads.items()}
        )


def distance(ours: Result, peer: Result) -> tuple[float, float]:
    """The difference of the losses against the larger of loss and 0.1, and of the gradients against the largest entry.

    A policy's loss is a sum of numbers of size 1 that nearly cancel: against itself it would be all rounding.
    """
    assert ours.grads.keys() == peer.grads.keys()
    size = max(float(g.abs().max()) for g in peer.grads.values())
    off = max(float((ours.grads[name] - g).abs().max()) for name, g in peer.grads.items())
    return abs(ours.loss - peer.loss) / max(abs(peer.loss), 0.1), off / max(size, 1e-12)


def gradients(model: nn.Module, *, prefix: str = "") -> dict[str, Tensor]:
    """What backward() left; parameters that took no part have zeros."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {
        n.removeprefix(prefix): torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for n, p in named.items()
    }


def decoder_of(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Decoder:
    """Hone's decoder in float64 with Hugging Face's weights, name by name."""
    decoder = Decoder(config_from_hf(config)).double()
    decoder.load_state_dict(dict(weights), strict=True)
    return decoder


@cache
def _peer_models(seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    model = language_model(seed)
    return model.config.to_dict(), model.state_dict()


def policy(seed: int = 0, *, temperature: float = 1.0, layout: str = "padded") -> Policy:
    """The policy whose weights are those of the peer's model of this seed."""
    return Policy(decoder_of(*_peer_models(seed)), temperature=temperature, layout=layout)


def logp(batch: Batch, *, seed: int = 0, temperature: float = 1.0) -> Tensor:
    """Hone's log-probs of the batch under the model of this seed."""
    return forward_in_slices(policy(seed, temperature=temperature), batch, frozenset({"logp"}), rows=64).logp


def old_logp(batch: Batch, *, temperature: float = 1.0) -> Tensor:
    """Those of a policy near the trained one."""
    return near(logp(batch, temperature=temperature), spread=0.3, seed=3).where(batch.mask, 0.0)


def scorer(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Scorer:
    """A reward model with Hugging Face's backbone and head; a bias, which theirs has not, is 0."""
    backbone = {n: x for n, x in weights.items() if not n.startswith("score.")}
    backbone["lm_head.weight"] = backbone["model.embed_tokens.weight"]
    made = Scorer(decoder_of({**config, "tie_word_embeddings": True}, backbone)).double()
    made.head.load_state_dict({"weight": weights["score.weight"]}, strict=False)
    return made


def step(
    model: ForwardModel, batch: Batch, algo: Algorithm, *, micro_rows: int = 64, prefix: str = "decoder."
) -> Result:
    """The loss and gradient of one optimiser step, by the learner's own weighing and cutting."""
    assert isinstance(model, nn.Module)
    model.zero_grad()
    total = 0.0
    for micro in micro_batches(weigh(batch, algo), rows=micro_rows, unit=algo.unit):
        loss = objective(model(micro, algo.wants), micro, algo.loss)
        loss.backward()
        total += float(loss.detach())
    return Result(loss=total, grads=gradients(model, prefix=prefix))


def on_logp(values: Tensor, batch: Batch, algo: Algorithm) -> Result:
    """The loss of the whole step and its gradient with respect to the log-probs."""
    leaf = values.detach().clone().requires_grad_()
    loss = objective(Forward(logp=leaf), weigh(batch, algo), algo.loss)
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"logp": grad(leaf)})


def grad(leaf: Tensor) -> Tensor:
    """What backward() left on a leaf."""
    assert leaf.grad is not None
    return leaf.grad.clone()
