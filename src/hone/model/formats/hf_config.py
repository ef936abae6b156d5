"""config.json of a Hugging Face model to a DecoderConfig. A model that the decoder does not compute is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.errors import HoneError
from hone.model.config import ROPES, DecoderConfig, Rope, yarn_attention

CONFIG = "config.json"
# A value beyond these is a mistake or an attack. Smaller mistakes show when shapes are compared with the weights.
LARGEST, MOST_LAYERS, LEAST, MOST = 2**40, 4096, 1e-30, 1e30
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class Unsupported(HoneError):
    """The model is valid, but the decoder does not compute it."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a model_type implies beside the numbers of its config."""

    architecture: str
    qkv_bias: bool = False  # queries, keys and values always have a bias
    bias_option: bool = False  # attention_bias exists, for all four projections
    mlp_option: bool = False  # mlp_bias exists
    qk_norm: bool = False
    windows: bool = False  # sliding_window exists
    window_option: bool = False  # use_sliding_window says whether it holds, max_window_layers from which layer on
    # defaults of Hugging Face's class, for keys that the config lacks
    context: int = 2048
    window: int = 0
    key_value_heads: int = 0  # 0: as many as query heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads


FAMILIES = {
    "llama": Family(architecture="Llama", bias_option=True, mlp_option=True),
    "mistral": Family(architecture="Mistral", windows=True, context=131_072, window=4096, key_value_heads=8),
    "qwen2": Family(
        architecture="Qwen2", qkv_bias=True, windows=True, window_option=True, context=32_768, window=4096,
        key_value_heads=32,
    ),
    "qwen3": Family(
        architecture="Qwen3", bias_option=True, qk_norm=True, windows=True, window_option=True, context=32_768,
        window=4096, key_value_heads=32, head_dim=128,
    ),
}  # fmt: skip


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """The decoder's shape; HoneError says what is wrong."""
    if "model_type" not in hf:
        raise HoneError(f"{CONFIG} has no model_type: copy the whole file from the model's source")
    family = FAMILIES.get(str(hf["model_type"]))
    if family is None:
        known = ", ".join(FAMILIES)
        raise Unsupported(f"model_type is {_short(hf['model_type'])}: the decoder computes {known}: use one of these")
    if missing := [key for key in SIZES if key not in hf]:
        raise HoneError(f"{CONFIG} lacks {', '.join(missing)}: copy the whole file from the model's source")
    _refuse(hf, family)
    try:
        return _shape(hf, family)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise HoneError(f"{CONFIG}: {error}: correct it") from error


def _shape(hf: Mapping[str, Any], family: Family) -> DecoderConfig:
    context = _integer(hf.get("max_position_embeddings", family.context), "max_position_embeddings")
    layers, bias = _integer(hf["num_hidden_layers"], "num_hidden_layers"), bool(hf.get("attention_bias"))
    heads, head_dim = hf.get("num_key_value_heads", family.key_value_heads), hf.get("head_dim", family.head_dim)
    return DecoderConfig(
        family=str(hf["model_type"]),
        **{key: _integer(hf[key], key) for key in SIZES},
        num_key_value_heads=_integer(heads or hf["num_attention_heads"], "num_key_value_heads"),
        head_dim=_integer(head_dim, "head_dim") if head_dim else 0,
        max_position_embeddings=context,
        rope=_rope(hf, context),
        rms_norm_eps=_positive(hf.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        initializer_range=_positive(hf.get("initializer_range", 0.02), "initializer_range"),
        qkv_bias=family.qkv_bias or bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
        qk_norm=family.qk_norm,
        windows=_windows(hf, family, layers),
    )


def _refuse(hf: Mapping[str, Any], family: Family) -> None:
    """Refuse operations that a model of the family may have and the decoder does not compute."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise HoneError(f"{CONFIG} has rope_parameters {_short(rope)}, not an object: copy it again")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    expected = {
        "hidden_act": (hf.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(hf.get("attention_bias")) and not family.bias_option, False),
        "mlp_bias": (bool(hf.get("mlp_bias")) and not family.mlp_option, False),
        "partial_rotary_factor": (partial, 1.0),
    }
    for key, (value, known) in expected.items():
        if value != known:
            raise Unsupported(f"{CONFIG} has {key} {_short(value)}, the decoder computes {known!r}: use another model")


def _rope(hf: Mapping[str, Any], context: int) -> Rope:
    given: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = str(given.get("rope_type", given.get("type", "default")))
    if kind not in ROPES:
        raise Unsupported(
            f"{CONFIG} has rope type {_short(kind)}, the decoder computes {', '.join(ROPES)}: use another model"
        )
    theta = _positive(given.get("rope_theta", hf.get("rope_theta", 10_000.0)), "rope_theta")
    if kind == "default":
        return Rope(theta=theta)
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or context
    factor = _positive(given.get("factor", 1.0), "rope factor")
    attention = 1.0
    if kind == "yarn" and theta == 1:
        raise ValueError("rope_theta is 1, and yarn divides by its logarithm")
    if kind == "llama3" and given.get("low_freq_factor", 1.0) == given.get("high_freq_factor", 4.0):
        raise ValueError("low_freq_factor and high_freq_factor are equal, and llama3 divides by their difference")
    if kind == "yarn":
        scales = [_positive(given[key], key) if given.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")]
        attention = _positive(given.get("attention_factor") or yarn_attention(factor, *scales), "attention_factor")
    return Rope(
        kind=kind,
        theta=theta,
        factor=factor,
        original=_integer(original, "original_max_position_embeddings"),
        low_freq=_positive(given.get("low_freq_factor", 1.0), "low_freq_factor"),
        high_freq=_positive(given.get("high_freq_factor", 4.0), "high_freq_factor"),
        beta_fast=_positive(given.get("beta_fast") or 32.0, "beta_fast"),
        beta_slow=_positive(given.get("beta_slow") or 1.0, "beta_slow"),
        truncate=bool(given.get("truncate", True)),
        attention=attention,
    )


def _windows(hf: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    window = hf.get("sliding_window", family.window)
    if not family.windows or not window or (family.window_option and not hf.get("use_sliding_window")):
        return ()
    window, first = _integer(window, "sliding_window"), hf.get("max_window_layers", 28) if family.window_option else 0
    kinds = hf.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        kind = _short(sorted(map(str, unknown))[0])
        raise Unsupported(f"layer_types has {kind}, which the decoder does not compute: use another model")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _integer(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {_short(value)}, not a positive whole number")
    if value > (MOST_LAYERS if key == "num_hidden_layers" else LARGEST):
        raise ValueError(f"{key} is {_short(value)}, more than any model has")
    return value


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
        raise ValueError(f"{key} is {_short(value)}, not a positive number")
    return float(value)


def _short(value: Any) -> str:
    """A value, shortened for an error. Python prints integers of at most 4300 digits."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > MOST else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
