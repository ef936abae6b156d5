"""Other models of transformers: a causal language model as a decoder, a sequence classifier as a scorer.

Both are slower than the decoder. Whatever is assumed of them is tried when they are loaded.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hone.data.text.json_object import read_object
from hone.data.text.pretrained import empty_model, from_pretrained
from hone.data.text.tokenizer_folder import is_panic
from hone.errors import HoneError
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder, Mask
from hone.model.formats.hf_config import CONFIG
from hone.model.formats.weight_files import tensor_index
from hone.model.scorer import Scorer
from hone.types import Batch, Forward

LAYERS = re.compile("layer|block|depth|stage")  # in the key of a number that says how often a part is repeated
TABLES = 1 << 28  # numbers at most in computed buffers, such as masks
NO_LIMIT = 1_048_576  # the context of a model that states none
PROBE = 7  # tokens with which a loaded model is tried


class ForeignCache:
    """transformers' own KV cache, or the tokens themselves for a model whose cache cannot select rows."""

    def __init__(self, inner: Any | None) -> None:
        self.inner, self.tokens, self.length = inner, torch.zeros(0), 0

    def rows(self, index: Tensor) -> Self:
        """The cache of the chosen rows, in that order. It overwrites this one."""
        if self.inner is not None:
            self.inner.batch_select_indices(index)
        self.tokens = self.tokens[index]
        return self


class Foreign(Decoder):
    """An AutoModelForCausalLM as a Decoder: hidden states from its base model, logits from its head.

    It stays in eval mode: dropout would make the learner differ from the sampler. The rows of a batch have the same
    length, or padding after their end, so no model needs a padding mask.
    """

    takes_rows = False

    def __init__(self, inner: Any) -> None:
        super(Decoder, self).__init__()  # nn.Module's, so that no weights are made
        self.inner = inner
        self.eval()
        self.config = _shape(inner.config)
        self.finish = _finish(inner)
        self.selects = _selects_rows(inner)
        self._try()

    @property
    def lm_head(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return next(self.inner.parameters()).device

    @property
    def tied(self) -> bool:
        return self.lm_head.weight is self.inner.get_input_embeddings().weight

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: gradients do not need training mode, and dropout is not wanted."""
        return super().train(False)

    def new_cache(self, rows: int, capacity: int) -> ForeignCache:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An empty cache, which grows as needed."""
        from transformers import DynamicCache

        return ForeignCache(DynamicCache(config=self.inner.config) if self.selects else None)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Mask = None,
        cache: Any = None,
        checkpoint_layers: bool = False,
    ) -> Tensor:
        """int64 [B, T] -> hidden states [B, T, D], with causal attention only."""
        if positions is not None or mask is not None or checkpoint_layers:
            what = f"{self.config.family} models run through transformers"
            raise HoneError(f"{what}, which takes rows as they are: set train.layout=padded, without recomputed layers")
        if cache is None:
            return self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        cache.tokens = torch.cat([cache.tokens, tokens], dim=1) if cache.length else tokens
        cache.length += tokens.shape[1]
        if cache.inner is None:
            seen = self.inner.base_model(input_ids=cache.tokens, use_cache=False).last_hidden_state
            return seen[:, -tokens.shape[1] :]
        return self.inner.base_model(input_ids=tokens, past_key_values=cache.inner, use_cache=True).last_hidden_state

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write in transformers' own format; `state` may have adapters merged into it."""
        plain = {name.removeprefix("inner."): x for name, x in state.items()}
        self.inner.save_pretrained(folder, state_dict=plain)

    @torch.no_grad()
    def _try(self) -> None:
        """Refuse a model that is not causal, or whose logits are not those of its head on the hidden states."""
        tokens = torch.arange(PROBE, device=self.device)[None] % self.config.vocab_size
        expected = self.inner(input_ids=tokens, use_cache=False).logits
        got = self.logits(self(tokens))
        shorter = self.logits(self(tokens[:, :-2]))
        limit = 1e-3 * float(expected.abs().max())
        name = self.config.family
        if got.shape != expected.shape or float((got - expected).abs().max()) > limit:
            raise HoneError(f"{name} makes its logits in a way that is not known here: use another model")
        if float((shorter - expected[:, :-2]).abs().max()) > limit:
            raise HoneError(f"{name} is not causal, later tokens change earlier ones: use a decoder model")


def _shape(hf: Any) -> DecoderConfig:
    """The config that the rest of Hone reads, with defaults where the model's config has no such key."""
    text = hf.get_text_config()

    def number(name: str, default: int) -> int:
        value = getattr(text, name, None)
        return value if isinstance(value, int) and value > 0 else default

    size, heads = number("hidden_size", 1), number("num_attention_heads", 1)
    return DecoderConfig(
        family=str(hf.model_type),
        vocab_size=number("vocab_size", 1),
        hidden_size=size,
        intermediate_size=number("intermediate_size", 4 * size),
        num_hidden_layers=number("num_hidden_layers", 1),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=2 * max(1, size // heads // 2),
        max_position_embeddings=number("max_position_embeddings", NO_LIMIT),
        tie_word_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
    )


def _finish(inner: Any) -> Callable[[Tensor], Tensor] | None:
    """The function that the model applies to its logits after the head: a bias, a scale, a soft cap; None if none."""
    text, head = inner.config.get_text_config(), inner.get_output_embeddings()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    cap = getattr(text, "final_logit_softcapping", None)
    if scale == 1.0 and not cap and getattr(head, "bias", None) is None:
        return None

    def finish(logits: Tensor) -> Tensor:
        bias = inner.get_output_embeddings().bias
        logits = scale * (logits if bias is None else logits + bias)
        return cap * torch.tanh(logits / cap) if cap else logits

    return finish


def _selects_rows(inner: Any) -> bool:
    """Whether the model decodes from a cache whose rows can be selected, tried on two rows."""
    from transformers import DynamicCache

    device = next(inner.parameters()).device
    tokens = torch.tensor([[0, 1], [1, 0]], device=device)
    with torch.no_grad():
        try:
            cache = DynamicCache(config=inner.config)
            inner.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
            cache.batch_select_indices(torch.tensor([1, 1, 0], device=device))
            again = torch.tensor([[0]] * 3, device=device)
            got = inner.base_model(input_ids=again, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        except Exception:  # a model of another kind can raise anything; its prefix is then recomputed for each token
            return False
        whole = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0]], device=device)
        expected = inner.base_model(input_ids=whole, use_cache=False).last_hidden_state[:, -1]
    return bool((got - expected).abs().max() <= 1e-3 * expected.abs().max())


def load_with(kind: str, folder: str | Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The folder's model, loaded by the named class of transformers; all weights must be there.

    Code in the folder runs only with trust_remote_code.
    """
    if find_spec("transformers") is None:
        raise HoneError(
            f'{folder} is of a family that the decoder does not compute: pip install "hone[hf]" to run it anyway'
        )
    try:
        from transformers.utils import logging

        logging.disable_progress_bar()  # a run has a bar of its own
        if not trust_remote_code:
            _check_size(kind, Path(folder))
        loaded = from_pretrained(
            kind,
            folder,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except HoneError:
        raise
    except BaseException as error:  # transformers raises anything from OSError to KeyError here
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise HoneError(f"transformers cannot load {folder} ({reason}): correct it, or use another model") from error
    inner, report = loaded
    # transformers would draw missing weights at random, and only warn
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            some = ", ".join(sorted(map(str, report[what]))[:3])
            raise HoneError(
                f"the weights in {folder} do not fit its config ({what.split('_')[0]}: {some}): copy it again"
            )
    return inner


def _check_size(kind: str, folder: Path) -> None:
    """Refuse a config that asks for more numbers than the weight files hold, before memory is allocated for it."""
    stored = tensor_index(folder)
    config = read_object(folder / CONFIG)
    for key, value in _numbers(config):
        if LAYERS.search(key) and isinstance(value, int) and value > len(stored):
            has = f"{len(stored)} tensors"
            raise HoneError(f"the weights in {folder} do not fit its config ({key} {value}, {has}): copy it again")
    held = sum(math.prod(x.shape) for x in stored.values())
    model = empty_model(kind, folder)
    asked = sum(p.numel() for p in model.parameters())
    tables = sum(b.numel() for b in model.buffers())
    if asked > 2 * held or tables > max(held, TABLES):  # 2: a tied head is counted twice
        raise HoneError(
            f"the weights in {folder} do not fit its config (it asks for {max(asked, tables)} numbers, they have "
            f"{held}): copy it again"
        )


def _numbers(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value of a config with its key, at any depth. The values of a list all have the list's key."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        key, item = todo.pop()
        if isinstance(item, dict):
            todo += item.items()
        elif isinstance(item, list):
            todo += [(key, x) for x in item]
        else:
            yield key, item


# --- scorers ---


class ForeignScorer(Scorer):
    """An AutoModelForSequenceClassification with one label as a reward model.

    A model with a linear head on causal hidden states gives a score at each token. Any other, such as an encoder, gives
    one at the last token; rows of the same length share a pass, so that none is padded.
    """

    kind = "reward"

    def __init__(self, inner: Any) -> None:
        super(Scorer, self).__init__()  # nn.Module's, so that no decoder is needed
        self.inner = inner
        # the model reads the score of the last token that is no padding; here no token is padding
        inner.config.pad_token_id = -1
        self.eval()
        self.normalise(0.0, 1.0)
        self.scores_each_token = self._try()

    @property
    def vocab_size(self) -> int:
        return int(self.inner.config.get_text_config().vocab_size)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: it only scores."""
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
        value = self._scores(tokens) if self.scores_each_token else self._last_scores(tokens, batch.real)
        return Forward(value=torch.where(batch.real, (value.float() - self.mean) / self.std, 0.0))

    def _scores(self, tokens: Tensor) -> Tensor:
        hidden = self.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return self.inner.score(hidden)[..., 0]

    def _last_scores(self, tokens: Tensor, real: Tensor) -> Tensor:
        lengths, value = real.sum(-1), torch.zeros(tokens.shape, device=tokens.device)
        for n in lengths.unique().tolist():
            rows = (lengths == n).nonzero()[:, 0]
            value[rows, n - 1] = self.inner(input_ids=tokens[rows, :n]).logits[:, 0].float()
        return value

    @torch.no_grad()
    def _try(self) -> bool:
        """Whether each token has a score; refuse a model with several labels."""
        device = next(self.inner.parameters()).device
        tokens = torch.arange(1, 1 + PROBE, device=device)[None] % self.vocab_size
        expected = self.inner(input_ids=tokens).logits
        if tuple(expected.shape) != (1, 1):
            raise label_count_error(expected.shape[-1])
        if not isinstance(getattr(self.inner, "score", None), torch.nn.Linear):
            return False
        limit = 1e-3 * float(expected.abs().max()) + 1e-6
        got, shorter = self._scores(tokens), self._scores(tokens[:, :-2])
        same = (got[:, -1:] - expected).abs().max() <= limit and (shorter - got[:, :-2]).abs().max() <= limit
        return bool(same)


def label_count_error(count: int) -> HoneError:
    """The error for a model that does not give exactly one score."""
    return HoneError(f"the reward model has {count} labels: a reward is one number, use a model with one label")
