"""The settings of a batch's rows as tensors: each row has its own, and a row is reseated while the others go on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.engine.params import SampleParams
from hone.errors import HoneError

HUGE = 1e30  # settings are kept within what float32 can multiply
PLAIN = SampleParams(max_tokens=1, stop_ids=frozenset())


class Uses:
    """Bits for what a row's settings ask for; what no row asks for costs nothing."""

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
        for asked, use in (
            (params.temperature != 1, Uses.TEMPERED),
            (params.top_k > 0, Uses.TOP_K),
            (params.top_p < 1, Uses.TOP_P),
            (params.min_p > 0, Uses.MIN_P),
        ):
            uses |= use if asked else 0
        return uses | Uses.SAMPLED


def check_params(params: SampleParams, vocab: int) -> None:
    """HoneError where a token id is outside the vocabulary, or no token may be written."""
    for name, tokens in (("biased token", params.bias), ("banned token", params.banned), ("stop id", params.stop_ids)):
        if max(tokens, default=0) >= vocab:
            raise HoneError(
                f"{name} {max(tokens)} is outside the model's vocabulary of {vocab}: "
                "the tokenizer does not fit the model, use the one it was trained with"
            )
    if len(params.banned) >= vocab:
        raise HoneError(f"all {vocab} tokens are banned: leave at least one to write")


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
class Knobs:
    """The settings of B rows, on the logits' device, and which of them any row uses, on the host."""

    table: Tensor  # float64 [6, B]  temperature (1 where greedy), greedy, top_k (V: off), top_p, min_p, penalty
    uses: NDArray[np.int64]  # [B]  Uses of each row
    host: NDArray[np.float64]  # [6, B]  the table, on a GPU a copy: to be read without waiting for it
    vocab: int
    bias: Tensor | None = None  # float32 [B, V]  added to the logits, -inf where banned; None: no row has any
    seen: Tensor | None = None  # bool [B, V]  tokens a row has read or written; None: no row has a penalty
    space: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # working memory of draw, by name

    @classmethod
    def plain(cls, rows: int, vocab: int, device: torch.device | str) -> "Knobs":
        """Every row at temperature 1, for rows to be seated later."""
        return cls.of([PLAIN] * rows, vocab, device)

    @classmethod
    def of(
        cls,
        params: Sequence[SampleParams],
        vocab: int,
        device: torch.device | str,
        read: Sequence[Sequence[int]] | None = None,
    ) -> "Knobs":
        """A row for each of `params`; read: the tokens each has read, for the penalty."""
        host = np.array([_column(each, vocab) for each in params], dtype=np.float64).reshape(-1, 6).T.copy()
        uses = np.array([Uses.of(each) for each in params], dtype=np.int64)
        knobs = cls(table=torch.from_numpy(host).to(device), uses=uses, host=host, vocab=vocab)  # on a CPU the same
        for row in np.flatnonzero(uses & (Uses.BIAS | Uses.PENALTY)).tolist():
            knobs._dense(row, params[row], () if read is None else read[row])
        return knobs

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
        """Working memory like this tensor: the pages of a fresh one cost a CPU more than the arithmetic."""
        have = self.space.get(name)
        if have is None or have.dtype != like.dtype or have.shape[1] != like.shape[1] or len(have) < len(like):
            with torch.inference_mode(False):  # to be written in either mode
                have = self.space[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return have if len(have) == len(like) else have[: len(like)]

    def seat(self, row: int, params: SampleParams, read: Sequence[int] = ()) -> None:
        """The row gets these settings, and has read these tokens."""
        self.host[:, row] = _column(params, self.vocab)
        if not self.table.is_cpu:
            self.table[:, row] = torch.from_numpy(self.host[:, row]).to(self.table.device)
        self.uses[row] = Uses.of(params)
        self._dense(row, params, read)

    def _dense(self, row: int, params: SampleParams, read: Sequence[int]) -> None:
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

    def see(self, token: Tensor) -> None:
        """Each row has written its token of int64 [B]."""
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)

    def move(self, a: int, b: int) -> None:
        """Row b gets what row a has."""
        self.uses[b] = self.uses[a]
        self.host[:, b] = self.host[:, a]
        self.table[:, b] = self.table[:, a]
        for dense in (self.bias, self.seen):
            if dense is not None:
                dense[b] = dense[a]

    def head(self, rows: int) -> "Knobs":
        """The first rows, as views: what is seated or seen later shows in both, but for a table not made yet."""
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

    def rows(self, index: Sequence[int] | Tensor) -> "Knobs":
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
