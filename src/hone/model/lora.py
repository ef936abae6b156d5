"""Low-rank adapters: train B and A of h = W0 x + scale B A x; switched off, the policy is its own reference."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.forward import LogRows
from hone.model.policy import Policy
from hone.types import Batch, Forward

ALL_LINEAR = "all-linear"  # every linear layer but the vocabulary head


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter: A Gaussian of variance 1 / d_in, B zero."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        like, std = base.weight, base.in_features**-0.5
        # drawn on the CPU in float32, so that a seed means the same adapter on every device
        start = torch.randn(rank, base.in_features, generator=generator) * std
        self.base, self.scale, self.enabled = base, scale, True
        self.lora_A = nn.Parameter(start.to(like.device, like.dtype))
        self.lora_B = nn.Parameter(like.new_zeros(base.out_features, rank))

    @property
    def weight(self) -> Tensor:
        """What the layer multiplies with now, so that it can stand where a plain layer's weight is read."""
        return self.merged() if self.enabled else self.base.weight

    def update(self) -> Tensor:
        """scale B A, [d_out, d_in]"""
        return self.scale * (self.lora_B @ self.lora_A)

    def merged(self) -> Tensor:
        """W0 + scale B A"""
        return self.base.weight + self.update()

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if not self.enabled:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_lora(
    decoder: Decoder,
    *,
    rank: int,
    alpha: float,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    rslora: bool = False,
    seed: int = 0,
) -> list[str]:
    """Freeze the decoder and adapt the layers `targets` name; scale alpha / r, or alpha / sqrt(r) (rsLoRA).

    A target is the end of a layer's name, a regular expression for the whole name, or "all-linear".
    Gives the names of the adapted layers.
    """
    if rank < 1:
        raise HoneError(f"lora rank is {rank}: give at least 1")
    if any(_adapted(decoder)):
        raise HoneError("the model has adapters already: merge them first, or load the base model again")
    layers = {name: m for name, m in decoder.named_modules() if isinstance(m, nn.Linear)}
    names = _matching(list(layers), targets)
    if "lm_head" in names and decoder.lm_head.weight is decoder.model.embed_tokens.weight:
        raise HoneError("lm_head is tied to the embedding: leave it out of the targets or untie the embeddings")
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    for name in names:
        _replace(decoder, name, LoRALinear(layers[name], rank=rank, scale=scale, generator=generator))
    return names


def _matching(layers: list[str], targets: tuple[str, ...]) -> list[str]:
    chosen = set[str]()
    for target in targets:
        hits = {name for name in layers if _matches(name, target)}
        if not hits:
            kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers)
            raise HoneError(f'lora target "{target}" matches no layer: the linear layers are {", ".join(kinds)}')
        chosen |= hits
    if not chosen:
        raise HoneError('no lora targets: give layer names such as ("q_proj", "v_proj") or ("all-linear",)')
    return [name for name in layers if name in chosen]


def _matches(name: str, target: str) -> bool:
    if target == ALL_LINEAR:
        return name != "lm_head"
    try:
        return f".{name}".endswith(f".{target}") or re.fullmatch(target, name) is not None
    except re.error as error:
        raise HoneError(f'lora target "{target}" is no regular expression ({error}): correct it') from error


def _replace(decoder: Decoder, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(parent), leaf, module)


def _adapted(decoder: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    return ((name, m) for name, m in decoder.named_modules() if isinstance(m, LoRALinear))


@contextmanager
def adapter_off(decoder: nn.Module) -> Iterator[None]:
    """Inside, the decoder is its base model."""
    before = [(m, m.enabled) for _, m in _adapted(decoder)]
    try:
        for module, _ in before:
            module.enabled = False
        yield
    finally:
        for module, enabled in before:
            module.enabled = enabled


def lora_parameters(decoder: nn.Module) -> list[nn.Parameter]:
    """Every A and B: r (d_out + d_in) numbers a layer."""
    return [p for _, m in _adapted(decoder) for p in (m.lora_A, m.lora_B)]


def lora_state(decoder: nn.Module) -> dict[str, Tensor]:
    """The adapters alone, with PEFT's endings of the names."""
    return {
        f"{name}.{part}.weight": getattr(m, part).detach()
        for name, m in _adapted(decoder)
        for part in ("lora_A", "lora_B")
    }


def load_lora_state(decoder: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put `lora_state` back into a decoder with the same adapters."""
    here = lora_state(decoder)
    shapes = {name: tuple(x.shape) for name, x in here.items()}
    if shapes != {name: tuple(x.shape) for name, x in state.items()}:
        odd = sorted(n for n in shapes.keys() | state.keys() if n not in here or n not in state)
        what = f"{odd[0]} is on one side only" if odd else "shapes differ"
        raise HoneError(f"the adapter does not fit the model ({what}): use the rank and targets it was made with")
    for name, x in here.items():
        x.copy_(state[name])


def plain_state(decoder: Decoder) -> dict[str, Tensor]:
    """The state dict the decoder would have with its adapters merged; nothing is changed."""
    state = {name: x.detach() for name, x in decoder.state_dict().items()}
    for name, module in _adapted(decoder):
        for part in ("lora_A", "lora_B", "base.weight"):
            del state[f"{name}.{part}"]
        state[f"{name}.weight"] = module.merged().detach()
    return state


@torch.no_grad()
def merge_lora(decoder: Decoder) -> None:
    """Add every adapter to its layer and put the plain layer back, with equal outputs; stays frozen."""
    for name, module in list(_adapted(decoder)):
        module.base.weight.copy_(module.merged())
        _replace(decoder, name, module.base)


def effective_rank(matrix: Tensor) -> float:
    """(sum sigma)^2 / sum sigma^2; 0 for a zero matrix"""
    sigma = torch.linalg.svdvals(matrix.detach().double())
    squares = float(sigma.square().sum())
    return float(sigma.sum()) ** 2 / squares if squares else 0.0


def update_ranks(decoder: nn.Module) -> dict[str, float]:
    """The effective rank of each adapter's update, from r x r matrices: B A = Q_B (R_B R_A') Q_A'."""
    ranks = dict[str, float]()
    for name, m in _adapted(decoder):
        r_b = torch.linalg.qr(m.lora_B.detach().double()).R
        r_a = torch.linalg.qr(m.lora_A.detach().double().T).R
        ranks[name] = effective_rank(r_b @ r_a.T)
    return ranks


class ReferenceView:
    """The policy with its adapters off and no gradient: the reference, at no memory cost."""

    def __init__(self, policy: Policy) -> None:
        if not any(_adapted(policy.decoder)):
            raise HoneError("the policy has no adapters to switch off: use frozen_copy(policy) as its reference")
        self.policy = policy

    @torch.no_grad()
    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward:
        with adapter_off(self.policy.decoder):
            return self.policy(batch, want)

    @torch.no_grad()
    def log_rows(self, batch: Batch) -> LogRows:
        with adapter_off(self.policy.decoder):
            return self.policy.log_rows(batch)

    @torch.no_grad()
    def log_distribution(self, batch: Batch) -> Tensor:
        with adapter_off(self.policy.decoder):
            return self.policy.log_distribution(batch)
