"""The model that policy losses read: a decoder with or without a critic. It maps a Batch to a Forward."""

import copy
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hone.errors import HoneError
from hone.model.decoder import Decoder
from hone.model.layout import Lines, cells, hidden_states, lines_of, scatter
from hone.model.lora import adapter_names, adapter_off
from hone.model.rows import Rows
from hone.model.scorer import ScalarHead, freeze_unused_head
from hone.model.vocab.distribution import STATS, HeadRows, LogRows
from hone.model.vocab.token_stats import Positions, token_stats
from hone.types import Batch, Forward


class Distribution(Protocol):
    """What `reference` and `old` can be: it gives its log-distributions at the mask, row-major, a slice at a time."""

    def log_rows(self, batch: Batch) -> LogRows: ...


@runtime_checkable
class RelativeDistribution(Protocol):
    """A distribution that depends on the student's, with which it is compared."""

    def rows_for(self, batch: Batch, student: LogRows) -> LogRows: ...


class SharedCritic(nn.Module):
    """A value head on the policy's own hidden states."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = ScalarHead(hidden_size, zero=True)


class OwnCritic(nn.Module):
    """A value head on a decoder of its own, which may have another size than the policy's."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = ScalarHead(decoder.config.hidden_size, zero=True)
        freeze_unused_head(decoder)


class Policy(nn.Module):
    """A decoder that gives log-probs, entropies, exact KLs and values, and computes only those in `want`.

    The caller sets `reference` and `old`. They are not part of parameters() or state_dict().
    """

    reference: Distribution | RelativeDistribution | None
    old: Distribution | RelativeDistribution | None

    def __init__(
        self,
        decoder: Decoder,
        *,
        critic: SharedCritic | OwnCritic | None = None,
        temperature: float = 1.0,
        layout: str = "shared",
        chunk: Positions = "fit",
        checkpoint_layers: bool | None = None,
    ) -> None:
        super().__init__()
        if isinstance(critic, OwnCritic) and critic.decoder is decoder:
            raise ValueError("an OwnCritic needs another decoder than the policy's; to share it use SharedCritic")
        if temperature <= 0:
            raise HoneError(f"temperature is {temperature}: training needs a positive one, 1.0 if in doubt")
        self.decoder, self.critic = decoder, critic
        self.temperature, self.layout = temperature, layout
        self.chunk: Positions = chunk
        self.checkpoint_layers = checkpoint_layers
        self.reference = self.old = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("reference", "old"):  # nn.Module would register them as its own
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, batch: Batch, want: frozenset[str]) -> Forward:
        self._check(batch, want)
        stats = want & STATS
        lines = self._lay_out(batch, every="value" in want)
        reads_hidden = stats or ("value" in want and isinstance(self.critic, SharedCritic))
        hidden = self._hidden(lines) if reads_hidden else None
        fields = dict[str, Tensor]()
        if "value" in want:
            fields["value"] = lines.spread(self._values(lines, hidden))
        if hidden is not None and stats:
            at = cells(batch.host.mask, batch.mask.device)
            chosen, head = lines.gather(hidden, at), self.decoder.lm_head.weight
            support = None if batch.support is None else batch.support.at(at)
            own = HeadRows(chosen.detach(), head.detach(), self.temperature, support, self.decoder.finish)
            at_mask = token_stats(
                chosen,
                head,
                batch.targets.flatten()[at],
                want=frozenset(stats),
                temperature=self.temperature,
                support=support,
                chunk=self.chunk,
                keep=self.checkpoint_layers is False,
                against={
                    name: _rows_of(model, batch, own)
                    for name, model in (("ref_kl", self.reference), ("old_kl", self.old))
                    if name in want
                },
                finish=self.decoder.finish,
            )
            fields |= {name: scatter(x, at, batch.mask) for name, x in at_mask.items()}
        return Forward(**fields)

    def log_rows(self, batch: Batch) -> LogRows:
        """The log-distributions at the masked positions, in row-major order, a slice at a time."""
        lines = self._lay_out(batch, every=False)
        at = cells(batch.host.mask, batch.mask.device)
        support = None if batch.support is None else batch.support.at(at)
        hidden = lines.gather(self._hidden(lines), at)
        return HeadRows(hidden, self.decoder.lm_head.weight, self.temperature, support, self.decoder.finish)

    def actor_parameters(self) -> list[nn.Parameter]:
        """The decoder's trainable parameters, also where a SharedCritic uses the decoder."""
        return [p for p in self.decoder.parameters() if p.requires_grad]

    def critic_parameters(self) -> list[nn.Parameter]:
        """The critic's trainable parameters. A shared critic has only its head."""
        return [p for p in self.critic.parameters() if p.requires_grad] if self.critic is not None else []

    def _lay_out(self, batch: Batch, *, every: bool) -> Lines:
        """The tokens to read: all, or those that a log-prob depends on. `longest` is of the whole rows either way."""
        read = batch if every else read_up_to_mask(batch)
        lines = lines_of(read, self.decoder, layout=self.layout)
        if every:
            return lines
        if isinstance(lines.mask, Rows) and batch.mask.is_cpu:
            needed = torch.zeros(lines.tokens.numel(), dtype=torch.bool)
            needed[lines.slot[batch.mask]] = True
            lines = replace(lines, mask=replace(lines.mask, needed=needed))
        real = batch.host.real
        return replace(lines, longest=int(real.sum(-1).max()) if len(real) else 0)

    def _hidden(self, lines: Lines) -> Tensor:
        return hidden_states(self.decoder, lines, checkpoint_layers=self.checkpoint_layers)

    def _values(self, lines: Lines, hidden: Tensor | None) -> Tensor:
        if isinstance(self.critic, OwnCritic):
            own = hidden_states(self.critic.decoder, lines, checkpoint_layers=self.checkpoint_layers)
            return self.critic.head(own)
        assert self.critic is not None, "_check saw to it"
        assert hidden is not None, "forward saw to it"
        return self.critic.head(hidden)

    def _check(self, batch: Batch, want: frozenset[str]) -> None:
        if unknown := want - STATS - {"value"}:
            raise ValueError(f"unknown fields {sorted(unknown)}, a Policy gives {sorted(STATS | {'value'})}")
        if (batch.host.mask & ~batch.host.real).any():
            raise ValueError("the mask is True on padding: a trained target needs a real input")
        if "value" in want and self.critic is None:
            raise HoneError("a value is wanted but the policy has no critic: give it a SharedCritic or OwnCritic")
        for name in ("reference", "old"):
            field = f"{name[:3]}_kl"
            if field in want and getattr(self, name) is None:
                raise HoneError(f"{field} is wanted but there is none to compare with: set policy.{name}")


def read_up_to_mask(batch: Batch) -> Batch:
    """Without the tokens after a row's last trained target, since no log-prob depends on them.

    A row without a trained target stays as it is.
    """
    at = batch.host
    needed = at.mask.flip(-1).cumsum(-1).flip(-1) > 0
    read = replace(at, real=at.real & (needed | ~at.mask.any(-1, keepdim=True)))
    return read if batch.host_copy is None else replace(batch, host_copy=read)


def _rows_of(model: Distribution | RelativeDistribution | None, batch: Batch, own: LogRows) -> LogRows:
    assert model is not None
    with torch.no_grad():
        if isinstance(model, RelativeDistribution):
            return model.rows_for(batch, own)
        return model.log_rows(batch)


def frozen_copy(policy: Policy) -> Policy:
    """A deep copy without gradients or critic, to be `reference` or `old`."""
    return frozen_policy(copy.deepcopy(policy.decoder), policy)


def frozen_policy(decoder: Decoder, like: Policy) -> Policy:
    """A policy without gradients, with the temperature, layout and chunk of `like`."""
    policy = Policy(decoder, temperature=like.temperature, layout=like.layout, chunk=like.chunk)
    return policy.requires_grad_(False).eval()


class ReferenceView:
    """The policy without its adapters and without gradients: a reference that takes no memory."""

    def __init__(self, policy: Policy) -> None:
        if not adapter_names(policy.decoder):
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
