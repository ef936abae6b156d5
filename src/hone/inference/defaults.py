"""How a model writes where nobody says it: by its generation_config.json, and by what its context leaves."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.data.text.json_object import read_object
from hone.launch import build

FILE = "generation_config.json"
MUCH = 0.1  # of the completions: cut off so often, the score is that of the limit
OLD_LENGTH = 20  # what transformers once wrote as max_length for want of anything better


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a model writes."""

    samples: int = 8
    temperature: float | None = None  # None: as the model's generation config has it
    max_tokens: int = 0  # 0: the same, or what the context leaves
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """A sampling with every number in its place, and where each came from."""

    how: Sampling
    temperature_from: str
    length_from: str

    def __str__(self) -> str:
        cut = [f"top_k {self.how.top_k}"] * bool(self.how.top_k) + [f"top_p {self.how.top_p:g}"] * (self.how.top_p < 1)
        warmth = " ".join([f"temperature {self.how.temperature:g}", *cut])
        most = f"at most {self.how.max_tokens} tokens"
        number = f"{self.how.samples} sample{'s' if self.how.samples > 1 else ''} a problem"
        return f"{warmth} ({self.temperature_from}); {most} ({self.length_from}); {number}"


def settle(how: Sampling, folder: Path, *, context: int) -> ResolvedSampling:
    """What was asked, then the model's generation config, then what suits: one answer is the likeliest one."""
    config = read_object(folder / FILE) if (folder / FILE).is_file() else {}
    warmth, why = _temperature(how, config)
    if how.temperature is None and warmth.temperature:
        warmth = replace(warmth, top_k=_integer(config, "top_k"), top_p=_number(config, "top_p", 1.0))
    length, source = _length(how, config, context)
    return ResolvedSampling(how=replace(warmth, max_tokens=length), temperature_from=why, length_from=source)


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


def too_short(truncated: float, settled: ResolvedSampling, *, context: int) -> str:
    """The advice where many completions were cut off before they ended; "" where few were."""
    limit = settled.how.max_tokens
    if truncated <= MUCH:
        return ""
    seen = f"{truncated:.0%} of the completions were cut off"
    if limit >= context - 1:  # the prompt takes its part, so they are shorter than the limit
        end = f"where the context of {context} tokens ends"
        return f"{seen} {end}, and mostly score 0: does the model know where to stop?"
    more = min(2 * limit, context - 1)
    return f"{seen} at {limit} tokens, and mostly score 0: set max_tokens={more} (--max-tokens {more})"
