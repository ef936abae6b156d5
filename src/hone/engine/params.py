"""What every sampler promises, in-process or remote: the settings it obeys and the call it answers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, SupportsIndex

from hone.errors import HoneError
from hone.types import Group, Rollout


def check_whole(name: str, value: object) -> None:
    """A whole number of any kind, numpy's too, or HoneError."""
    if not isinstance(value, SupportsIndex):
        raise HoneError(f"{name} is {value!r}: set it to a whole number")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """How to sample; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # positive logits of tokens seen are divided by it, negative ones multiplied
    bias: Mapping[int, float] = field(default_factory=dict[int, float])  # added to a token's logit
    banned: frozenset[int] = frozenset()  # never written
    stop_ids: frozenset[int]  # writing any of these ends the completion
    stop: tuple[str, ...] = ()  # as does text that contains any of these
    record_support: bool = False  # report which tokens top_k, top_p and min_p leave to draw from: to train on
    top_logprobs: int = 0  # report so many of the most probable tokens at each position
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_kinds()
        for fine, message in (
            (self.max_tokens >= 1, f"max_tokens is {self.max_tokens}: set it to 1 or more"),
            (
                0 <= self.temperature < math.inf,
                f"temperature is {self.temperature}: set it to 0 (greedy) or a finite positive number",
            ),
            (self.top_k >= 0, f"top_k is {self.top_k}: set it to 0 (off) or more"),
            (0 < self.top_p <= 1, f"top_p is {self.top_p}: set it above 0 and at most 1 (off)"),
            (0 <= self.min_p <= 1, f"min_p is {self.min_p}: set it between 0 (off) and 1"),
            (
                0 < self.repetition_penalty < math.inf,
                f"repetition_penalty is {self.repetition_penalty}: set it to a finite positive number, 1 is off",
            ),
            (all(map(math.isfinite, self.bias.values())), "a bias is not finite: give a number, or use banned"),
            (min(self.bias, default=0) >= 0, "bias has a negative token: give token ids, 0 or more"),
            (min(self.banned, default=0) >= 0, "banned has a negative number: give token ids, 0 or more"),
            ("" not in tuple(self.stop), "a stop string is empty: leave it out"),
            (0 <= self.top_logprobs <= 20, f"top_logprobs is {self.top_logprobs}: set it between 0 and 20"),
            (0 <= self.seed < 2**64, f"seed is {self.seed}: set it between 0 and 2**64 - 1"),
            (min(self.stop_ids, default=0) >= 0, "stop_ids has a negative number: give token ids, 0 or more"),
        ):
            if not fine:
                raise HoneError(message)

    def _check_kinds(self) -> None:
        """Before values are compared: what is no number would be an error of Python's, far from its cause."""
        for name in ("max_tokens", "top_k", "top_logprobs", "seed"):
            check_whole(name, getattr(self, name))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not isinstance(value := getattr(self, name), SupportsFloat):
                raise HoneError(f"{name} is {value!r}: set it to a number")
        if not isinstance(self.bias, Mapping) or not all(isinstance(x, SupportsFloat) for x in self.bias.values()):
            raise HoneError(f"bias is {self.bias!r}: give a number for each token id, as in {{17: -2.0}}")
        for name in ("stop_ids", "banned", "bias"):
            ids = getattr(self, name)
            if not isinstance(ids, Iterable) or not all(isinstance(token, SupportsIndex) for token in ids):
                raise HoneError(f"{name} is {ids!r}: give token ids, whole numbers")
        if isinstance(self.stop, str):
            raise HoneError(f"stop is {self.stop!r}, a string: give a tuple of strings")
        if not isinstance(self.stop, Iterable) or not all(isinstance(text, str) for text in self.stop):
            raise HoneError(f"stop is {self.stop!r}: give a tuple of strings; token ids go into stop_ids")

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left out of the draw by their probability."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def support_recorded(self) -> bool:
        """Whether each token comes with the tokens that could have been drawn in its stead."""
        return self.record_support and self.truncated

    @property
    def altered(self) -> tuple[str, ...]:
        """The settings in force that make the distribution drawn from another than softmax(logits / temperature)."""
        return tuple(
            name
            for name, on in (
                ("top_k", self.top_k > 0),
                ("top_p", self.top_p < 1),
                ("min_p", self.min_p > 0),
                ("repetition_penalty", self.repetition_penalty != 1),
                ("bias", any(self.bias.values())),
                ("banned", bool(self.banned)),
            )
            if on
        )


# One adapter by name for all prompts, or one for each, where None is the base model; None: the weights as they are.
Adapters = str | Sequence[str | None] | None


class Sampler(Protocol):
    """Writes completions with the weights called `version`."""

    version: int

    def publish(self, version: int) -> None:
        """From now on sample from the learner's weights as they are, and call them `version`."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> list[Group]:
        """n rollouts of each prompt; sample j of prompt i is request `first_request + i * n + j`."""
        ...

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        params: SampleParams,
        first_request: int = 0,
        adapter: Adapters = None,
    ) -> Iterator[list[tuple[int, Rollout]]]:
        """The same, step by step: the rollouts that ended in it, sample j of prompt i as number i * n + j."""
        ...
