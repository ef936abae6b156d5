"""How a model samples where a setting is left out: by its generation_config.json, then by its context."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.data.text.json_object import read_object
from hone.launch import build

FILE = "generation_config.json"
MAX_TRUNCATED = 0.1  # if a larger share of the completions is cut off, the score measures the limit
OLD_LENGTH = 20  # the max_length that transformers once wrote by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a model samples."""

    samples: int = 8
    temperature: float | None = None  # None: as the model's generation config has it
    max_tokens: int = 0  # 0: as the model's generation config has it, or what the context leaves
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """A sampling in which every number is set, and where each number came from."""

    sampling: Sampling
    temperature_from: str
    length_from: str

    def __str__(self) -> str:
        cut = [f"top_k {self.sampling.top_k}"] * bool(self.sampling.top_k) + [f"top_p {self.sampling.top_p:g}"] * (
            self.sampling.top_p < 1
        )
        chosen = " ".join([f"temperature {self.sampling.temperature:g}", *cut])
        most = f"at most {self.sampling.max_tokens} tokens"
        number = f"{self.sampling.samples} sample{'s' if self.sampling.samples > 1 else ''} a problem"
        return f"{chosen} ({self.temperature_from}); {most} ({self.length_from}); {number}"


def resolve_sampling(how: Sampling, folder: Path, *, context: int) -> ResolvedSampling:
    """Take what was asked, then the model's generation config, then a default: a single answer is the likeliest one."""
    config = read_object(folder / FILE) if (folder / FILE).is_file() else {}
    chosen, why = _temperature(how, config)
    if how.temperature is None and chosen.temperature:
        chosen = replace(chosen, top_k=_integer(config, "top_k"), top_p=_number(config, "top_p", 1.0))
    length, source = _length(how, config, context)
    return ResolvedSampling(sampling=replace(chosen, max_tokens=length), temperature_from=why, length_from=source)


def _temperature(how: Sampling, config: Mapping[str, Any]) -> tuple[Sampling, str]:
    if how.temperature is not None:
        return how, "as asked"
    if config.get("do_sample") is False:
        found, why = 0.0, FILE
    elif "temperature" in config:
        found, why = _number(config, "temperature", 1.0), FILE
    elif config.get("do_sample"):
        found, why = 1.0, FILE
    else:
        found, why = (0.0, "one sample: the likeliest") if how.samples == 1 else (1.0, "several samples: as trained")
    if how.samples > 1 and not found:
        found, why = 1.0, "several samples: as trained"
    return replace(how, temperature=found), why


def _length(how: Sampling, config: Mapping[str, Any], context: int) -> tuple[int, str]:
    if how.max_tokens:
        return how.max_tokens, "as asked"
    left = build.SampleSpec().limit(context)
    if asked := _integer(config, "max_new_tokens"):
        return min(asked, context - 1), FILE
    asked = _integer(config, "max_length")
    if asked > OLD_LENGTH:
        return max(1, min(asked, left)), FILE
    return left, "what the context leaves" if left == context - 1 else "the default"


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    return float(value) if fits else default  # pyright: ignore[reportArgumentType]


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = _number(config, name, 0.0)
    return int(value) if value == int(value) else 0


def too_short(truncated: float, resolved: ResolvedSampling, *, context: int) -> str:
    """Advice if many completions were cut off, else ""."""
    limit = resolved.sampling.max_tokens
    if truncated <= MAX_TRUNCATED:
        return ""
    seen = f"{truncated:.0%} of the completions were cut off"
    if limit >= context - 1:  # the prompt takes its part, so they are shorter than the limit
        end = f"where the context of {context} tokens ends"
        return f"{seen} {end}, and mostly score 0: does the model know where to stop?"
    more = min(2 * limit, context - 1)
    return f"{seen} at {limit} tokens, and mostly score 0: set max_tokens={more} (--max-tokens {more})"
