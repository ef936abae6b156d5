"""How to sample: the settings of a request, their checks, and the settings of a batch as tensors."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import SupportsFloat, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.errors import HoneError

DIVERGED = (
    "the model's logits are not finite, its weights have diverged: go back to an earlier checkpoint "
    "and lower the learning rate"
)
TOKENIZER = "the tokenizer does not fit the model, use the one it was trained with"
HUGE = 1e30  # settings are clamped to what float32 can multiply


def check_whole(name: str, value: object) -> None:
    """HoneError unless it is a whole number, numpy's included."""
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
    repetition_penalty: float = 1.0  # of tokens seen, positive logits are divided by it, negative ones multiplied
    bias: Mapping[int, float] = field(default_factory=dict[int, float])  # added to a token's logit
    banned: frozenset[int] = frozenset()  # never written
    stop_ids: frozenset[int]  # writing any of these ends the completion
    stop: tuple[str, ...] = ()  # so does text that contains any of these
    record_support: bool = False  # report which tokens top_k, top_p and min_p leave to draw from, for training
    top_logprobs: int = 0  # how many of the most probable tokens to report at each position
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
        """Check types first: comparing what is no number would raise Python's own error, without a remedy."""
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
        """Whether top_k, top_p or min_p can cut tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def support_recorded(self) -> bool:
        """Whether each token is reported with the tokens that could have been drawn instead."""
        return self.record_support and self.truncated

    @property
    def altered(self) -> tuple[str, ...]:
        """The settings because of which tokens are not drawn from softmax(logits / temperature)."""
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


def check_params(params: SampleParams, vocab: int) -> None:
    """HoneError if a token id is outside the vocabulary, or every token is banned."""
    for name, tokens in (("biased token", params.bias), ("banned token", params.banned), ("stop id", params.stop_ids)):
        if max(tokens, default=0) >= vocab:
            raise HoneError(f"{name} {max(tokens)} is outside the model's vocabulary of {vocab}: {TOKENIZER}")
    if len(params.banned) >= vocab:
        raise HoneError(f"all {vocab} tokens are banned: leave at least one to write")


def check_prompt(name: str, prompt: Sequence[int], *, context: int, vocab_size: int) -> None:
    """HoneError unless the model can read the prompt and write a token after it."""
    if isinstance(prompt, str):
        raise HoneError(f"{name} is text: give token ids, tokenizer.encode(text)")
    try:
        deque(map(index, prompt), maxlen=0)  # C++ would read anything else as whole numbers too
    except TypeError:
        raise HoneError(f"{name} is not a list of whole numbers: give token ids for each prompt, [[1, 2, 3]]") from None
    if not len(prompt):
        raise HoneError(f"{name} has 0 tokens, the model's context is {context}: give it at least one token")
    if len(prompt) + 1 > context:
        raise HoneError(
            f"{name} has {len(prompt)} tokens, the model's context is {context} and a completion needs "
            "one: shorten the prompt, or use a model with a longer context"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise HoneError(f"{name} has token {wrong}, outside the model's vocabulary of {vocab_size}: {TOKENIZER}")


def check_call(
    prompts: Iterable[Sequence[int]], n: int, params: SampleParams, first_request: int,
    *, context: int, vocab_size: int, reads_text: bool,
) -> None:  # fmt: skip
    """HoneError unless a sampler can do the whole call."""
    check_whole("n", n)
    check_whole("first_request", first_request)
    if n < 1 or first_request < 0:
        raise HoneError(f"n is {n} and first_request {first_request}: set n to 1 or more, the other to 0 or more")
    check_params(params, vocab_size)
    check_text(params, reads_text=reads_text)
    for i, prompt in enumerate(prompts):
        check_prompt(f"prompt {i}", prompt, context=context, vocab_size=vocab_size)


def check_text(params: SampleParams, *, reads_text: bool) -> None:
    """HoneError if there are stop strings and tokens cannot be decoded."""
    if params.stop and not reads_text:
        raise HoneError("stop strings need the text of tokens: give the sampler decode=tokenizer.decode")


def check_stops(params: SampleParams, most: int | None) -> None:
    """HoneError if the runner cannot look for so many stop tokens."""
    if most is not None and len(params.stop_ids) > most:
        raise HoneError(f"{len(params.stop_ids)} stop tokens are more than a GPU looks for: give at most {most}")


def check_support(params: SampleParams, *, records: bool) -> None:
    """HoneError if a request asks for the tokens that could have been drawn, and they cannot be recorded."""
    if params.support_recorded and not records:
        raise HoneError(
            "this sampler does not record which tokens top_k, top_p and min_p keep, and training needs that: "
            "set sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0"
        )


# One adapter's name for all prompts, or one for each, where None is the base model. None: the weights as they are.
Adapters = str | Sequence[str | None] | None


PLAIN = SampleParams(max_tokens=1, stop_ids=frozenset())


class Uses:
    """Bits for what a row's settings ask for. What no row of a batch asks for is not computed."""

    SAMPLED = 1
    GREEDY = 2
    TEMPERED = 4
    TOP_K = 8
    TOP_P = 16
    MIN_P = 32
    PENALTY = 64
    BIAS = 128
    RESTRICT = TOP_K | TOP_P | MIN_P

    @staticmethod
    def of(params: SampleParams) -> int:
        """Greedy rows are neither tempered nor restricted."""
        uses = Uses.PENALTY if params.repetition_penalty != 1 else 0
        uses |= Uses.BIAS if params.bias or params.banned else 0
        if params.temperature == 0:
            return uses | Uses.GREEDY
        for on, use in (
            (params.temperature != 1, Uses.TEMPERED),
            (params.top_k > 0, Uses.TOP_K),
            (params.top_p < 1, Uses.TOP_P),
            (params.min_p > 0, Uses.MIN_P),
        ):
            uses |= use if on else 0
        return uses | Uses.SAMPLED


def _column(params: SampleParams, vocab: int) -> list[float]:
    greedy = params.temperature == 0
    return [
        1.0 if greedy else min(max(params.temperature, 1 / HUGE), HUGE),
        float(greedy),
        float(vocab if greedy or not params.top_k else min(params.top_k, vocab)),
        1.0 if greedy else params.top_p,
        0.0 if greedy else params.min_p,
        min(max(params.repetition_penalty, 1 / HUGE), HUGE),
    ]


@dataclass(slots=True)
class SamplingTensors:
    """The settings of B rows: the numbers on the logits' device, and on the host which of them a row uses."""

    table: Tensor  # float64 [6, B]  temperature (1 where greedy), greedy, top_k (V: off), top_p, min_p, penalty
    uses: NDArray[np.int64]  # [B]  Uses of each row
    host: NDArray[np.float64]  # [6, B]  the table; on a GPU a copy that is read without waiting for the device
    vocab: int
    bias: Tensor | None = None  # float32 [B, V]  added to the logits, -inf where banned; None: no row has a bias
    seen: Tensor | None = None  # bool [B, V]  tokens a row has read or written; None: no row has a penalty
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # working memory of draw, by name

    @classmethod
    def plain(cls, rows: int, vocab: int, device: torch.device | str) -> "SamplingTensors":
        """Every row at temperature 1. Rows get their settings later, by `seat`."""
        return cls.of([PLAIN] * rows, vocab, device)

    @classmethod
    def of(
        cls,
        params: Sequence[SampleParams],
        vocab: int,
        device: torch.device | str,
        read: Sequence[Sequence[int]] | None = None,
    ) -> "SamplingTensors":
        """A row for each of `params`; read: the tokens each has read, for the penalty."""
        host = np.array([_column(each, vocab) for each in params], dtype=np.float64).reshape(-1, 6).T.copy()
        uses = np.array([Uses.of(each) for each in params], dtype=np.int64)
        sampling = cls(table=torch.from_numpy(host).to(device), uses=uses, host=host, vocab=vocab)  # on a CPU the same
        for row in np.flatnonzero(uses & (Uses.BIAS | Uses.PENALTY)).tolist():
            sampling._set_dense(row, params[row], () if read is None else read[row])
        return sampling

    @property
    def any(self) -> int:
        """The bits of Uses that at least one row has."""
        return int(np.bitwise_or.reduce(self.uses))

    @property
    def temperature(self) -> Tensor:
        return self.table[0]

    @property
    def greedy(self) -> Tensor:
        return self.table[1] > 0

    @property
    def top_k(self) -> Tensor:
        return self.table[2].long()

    @property
    def top_p(self) -> Tensor:
        return self.table[3]

    @property
    def min_p(self) -> Tensor:
        return self.table[4]

    @property
    def penalty(self) -> Tensor:
        return self.table[5]

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """Working memory of this shape, used again: new memory costs a CPU more than the arithmetic."""
        found = self.buffers.get(name)
        if found is None or found.dtype != like.dtype or found.shape[1] != like.shape[1] or len(found) < len(like):
            with torch.inference_mode(False):  # so that it can be written in either mode
                found = self.buffers[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return found if len(found) == len(like) else found[: len(like)]

    def seat(self, row: int, params: SampleParams, read: Sequence[int] = ()) -> None:
        """The row gets these settings, and has read these tokens."""
        self.host[:, row] = _column(params, self.vocab)
        if not self.table.is_cpu:
            self.table[:, row] = torch.from_numpy(self.host[:, row]).to(self.table.device)
        self.uses[row] = Uses.of(params)
        self._set_dense(row, params, read)

    def _set_dense(self, row: int, params: SampleParams, read: Sequence[int]) -> None:
        uses, shape, device = Uses.of(params), (len(self.uses), self.vocab), self.table.device
        if uses & Uses.BIAS and self.bias is None:
            self.bias = torch.zeros(shape, device=device)
        if uses & Uses.PENALTY and self.seen is None:
            self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
        if self.bias is not None:
            self.bias[row] = 0.0
            if params.bias:
                values = [min(max(value, -HUGE), HUGE) for value in params.bias.values()]
                self.bias[row, list(params.bias)] = torch.tensor(values, device=device)
            self.bias[row, sorted(params.banned)] = -math.inf
        if self.seen is not None:
            self.seen[row] = False
            if uses & Uses.PENALTY:
                self.seen[row, list(read)] = True

    def add_written(self, token: Tensor) -> None:
        """Note that each row has written its token of int64 [B]."""
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)

    def move(self, a: int, b: int) -> None:
        """Copy the settings of row a to row b."""
        self.uses[b] = self.uses[a]
        self.host[:, b] = self.host[:, a]
        self.table[:, b] = self.table[:, a]
        for dense in (self.bias, self.seen):
            if dense is not None:
                dense[b] = dense[a]

    def head(self, rows: int) -> "SamplingTensors":
        """The first rows as views: later changes show in both, except those of a table that is made later."""
        if rows == len(self.uses):
            return self
        return replace(
            self,
            table=self.table[:, :rows],
            uses=self.uses[:rows],
            host=self.host[:, :rows],
            bias=None if self.bias is None else self.bias[:rows],
            seen=None if self.seen is None else self.seen[:rows],
        )

    def rows(self, index: Sequence[int] | Tensor) -> "SamplingTensors":
        """A copy of these rows, in this order."""
        where = torch.as_tensor(index, dtype=torch.int64)
        there, here = where.to(self.table.device), where.cpu().numpy()
        return replace(
            self,
            table=self.table[:, there],
            uses=self.uses[here],
            host=self.host[:, here],
            bias=None if self.bias is None else self.bias[there],
            seen=None if self.seen is None else self.seen[there],
        )
