"""Sequence-classification models of transformers as scorers: slower than our own, and tried when they are loaded."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hone.errors import HoneError
from hone.model.formats.foreign import NO_LIMIT, PROBE, load_with
from hone.model.scorer import Scorer
from hone.types import Batch, Forward


class ForeignScorer(Scorer):
    """An AutoModelForSequenceClassification with one label as a reward model.

    Where its score is that of a linear head on causal hidden states there is one at every token. Of any other, such as
    an encoder, there is one after the last token, and rows that share a pass have the same length: none is padded.
    """

    kind = "reward"

    def __init__(self, inner: Any) -> None:
        super(Scorer, self).__init__()  # an nn.Module, without a decoder of ours
        self.inner = inner
        # the model itself looks for the last token that is no padding, and here nothing is
        inner.config.pad_token_id = -1
        self.eval()
        self.normalise(0.0, 1.0)
        self.everywhere = self._try()

    @property
    def vocab_size(self) -> int:
        return int(self.inner.config.get_text_config().vocab_size)

    def train(self, mode: bool = True) -> Self:
        """No dropout: it only scores."""
        return super().train(False)

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """None: it is not trained here."""
        return []

    def forward(self, batch: Batch, want: frozenset[str]) -> Forward:
        if want - {"value"}:
            raise ValueError(f"a Scorer gives only value, not {sorted(want - {'value'})}")
        context = getattr(self.inner.config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT
        if (longest := int(batch.real.sum(-1).max())) > context:
            raise HoneError(f"a row has {longest} tokens, the reward model's context is {context}: shorten it")
        tokens = torch.where(batch.real, batch.inputs, 0)
        value = self._each(tokens) if self.everywhere else self._last(tokens, batch.real)
        return Forward(value=torch.where(batch.real, (value.float() - self.mean) / self.std, 0.0))

    def _each(self, tokens: Tensor) -> Tensor:
        hidden = self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return self.inner.score(hidden)[..., 0]

    def _last(self, tokens: Tensor, real: Tensor) -> Tensor:
        lengths, value = real.sum(-1), torch.zeros(tokens.shape, device=tokens.device)
        for n in lengths.unique().tolist():
            rows = (lengths == n).nonzero()[:, 0]
            value[rows, n - 1] = self.inner(input_ids=tokens[rows, :n]).logits[:, 0].float()
        return value

    @torch.no_grad()
    def _try(self) -> bool:
        """Whether every token has a score; a model with another number of labels than one is refused."""
        device = next(self.inner.parameters()).device
        tokens = torch.arange(1, 1 + PROBE, device=device)[None] % self.vocab_size
        expected = self.inner(input_ids=tokens).logits
        if tuple(expected.shape) != (1, 1):
            raise several_labels(expected.shape[-1])
        if not isinstance(getattr(self.inner, "score", None), torch.nn.Linear):
            return False
        limit = 1e-3 * float(expected.abs().max()) + 1e-6
        got, shorter = self._each(tokens), self._each(tokens[:, :-2])
        same = (got[:, -1:] - expected).abs().max() <= limit and (shorter - got[:, :-2]).abs().max() <= limit
        return bool(same)


def several_labels(count: int) -> HoneError:
    """The error for a model that gives another number of scores than one."""
    return HoneError(f"the reward model has {count} labels: a reward is one number, use a model with one label")


def load_foreign_scorer(folder: str | Path, *, dtype: torch.dtype) -> ForeignScorer:
    """The reward model of a folder through transformers; code that comes with it is not run."""
    return ForeignScorer(load_with("AutoModelForSequenceClassification", folder, dtype=dtype))
