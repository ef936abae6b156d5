"""Where the rows of a batch stand, as the kernels of draw.py read and update it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.engine.params import HUGE, SampleParams, check_params
from hone.errors import HoneError

CHUNK = 4096  # logits one program sums
BLOCK = 128  # logits among which the token is found in the end
STOPS = 8  # stop tokens a row can have here


@dataclass(slots=True, kw_only=True)
class DrawState:
    """What the rows are and where they stand, on the device; R rows."""

    token: Tensor  # int32 [R]  the last one written
    position: Tensor  # int32 [R]  of the next token
    count: Tensor  # int32 [R]  tokens written: which random number is next
    limit: Tensor  # int32 [R]  the most tokens to write
    active: Tensor  # int32 [R]  1: seated and not ended
    seed: Tensor  # int64 [R]  bits of a uint64
    request: Tensor  # int64 [R]  bits of a uint64
    temperature: Tensor  # float32 [R]  0: greedy
    top_k: Tensor  # int32 [R]  0: off
    top_p: Tensor  # float32 [R]
    min_p: Tensor  # float32 [R]
    penalty: Tensor  # float32 [R]
    stop_ids: Tensor  # int32 [R, 8]  -1: none
    part: Tensor  # float32 [4, R, chunks]  of each chunk of the logits, and of what they became: maximum, sum of exp
    low: Tensor  # int32 [R]  the greatest key kept
    bias: Tensor | None = None  # float32 [R, V]  -inf: banned
    seen: Tensor | None = None  # uint8 [R, V]  1: read or written by the row

    @classmethod
    def empty(
        cls, rows: int, vocab: int, device: torch.device | str, *, bias: bool = False, seen: bool = False
    ) -> "DrawState":
        """No row is seated."""

        def of(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=device)

        whole, real = torch.int32, torch.float32
        names = ("token", "position", "count", "limit", "active", "top_k", "low")
        return cls(
            **{name: of(whole) for name in names},
            **{name: of(torch.int64) for name in ("seed", "request")},
            **{name: of(real) for name in ("temperature", "top_p", "min_p", "penalty")},
            stop_ids=of(whole, STOPS).fill_(-1),
            part=torch.zeros((4, rows, -(-vocab // chunk_of(vocab))), device=device),
            bias=of(real, vocab) if bias else None,
            seen=of(torch.uint8, vocab) if seen else None,
        )

    def seat(self, row: int, params: SampleParams, *, request: int, limit: int, read: Sequence[int]) -> None:
        """The row begins to write after the tokens it has read; its settings as float32 can multiply them."""
        stops = sorted(params.stop_ids)
        if len(stops) > STOPS:
            raise HoneError(f"{len(stops)} stop tokens are more than a GPU looks for: give at most {STOPS}")
        for name, value in {
            "token": read[-1] if read else 0,
            "position": len(read),
            "count": 0,
            "limit": limit,
            "active": 1,
            "seed": signed(params.seed),
            "request": signed(request),
            "temperature": params.temperature and min(max(params.temperature, 1 / HUGE), HUGE),
            "top_k": min(params.top_k, 2**31 - 1),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "penalty": min(max(params.repetition_penalty, 1 / HUGE), HUGE),
            "stop_ids": torch.tensor(stops + [-1] * (STOPS - len(stops))),
        }.items():
            getattr(self, name)[row] = value
        self._dense(row, params, read)

    def _dense(self, row: int, params: SampleParams, read: Sequence[int]) -> None:
        if self.bias is None and (params.bias or params.banned):
            raise ValueError("a row has bias or banned tokens: make the state with bias=True")
        if self.seen is None and params.repetition_penalty != 1:
            raise ValueError("a row has a repetition penalty: make the state with seen=True")
        if self.bias is not None:
            check_params(params, self.bias.shape[1])
            self.bias[row] = 0.0
            for token, value in params.bias.items():
                self.bias[row, token] = min(max(value, -HUGE), HUGE)
            self.bias[row, sorted(params.banned)] = -torch.inf
        if self.seen is not None:
            self.seen[row] = 0
            self.seen[row, list(read)] = 1


@dataclass(slots=True, kw_only=True)
class DrawOut:
    """What a launch wrote, on the device; rubbish where the flag is 0."""

    token: Tensor  # int32 [R]
    logp: Tensor  # float32 [R]  under the distribution drawn from
    raw: Tensor  # float32 [R]  under softmax(logits)
    flag: Tensor  # int32 [R]  0: nothing written, 1: a token, 2: a token, and the row has ended

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> "DrawOut":
        """Nothing written."""
        dtypes = {"token": torch.int32, "logp": torch.float32, "raw": torch.float32, "flag": torch.int32}
        return cls(**{name: torch.zeros(rows, dtype=dtype, device=device) for name, dtype in dtypes.items()})


def signed(x: int) -> int:
    """The int64 with the bits of this uint64."""
    return x - 2**64 if x >= 2**63 else x


def chunk_of(vocab: int) -> int:
    """Logits to a chunk: a power of 2."""
    return min(CHUNK, max(BLOCK, 1 << (vocab - 1).bit_length()))
