"""Batches that the kernels of draw.py and the torch of draw.py must answer alike.

Run as a program, this file interprets the kernels on a CPU, where no GPU is: Triton must be told before it is imported.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hone.engine.draw import draw, philox_uniforms
from hone.engine.params import SampleParams, SamplingTensors, Uses
from hone.engine.runners.cuda.draw_state import DrawOut, DrawState

HOLE = None
NAMES = ("token", "logp", "raw", "flag")
READ = (1, 3, 3, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows with their settings, a hole where there are none, and logits for each step."""

    vocab: int
    rows: Sequence[dict[str, Any] | None]
    steps: int = 2
    dtype: torch.dtype = torch.float32
    scale: float = 3.0
    start: int = 0  # tokens each row has written before
    limit: int = 10**7
    bad: dict[int, float] = field(default_factory=dict[int, float])  # row -> a value put among its logits

    @property
    def params(self) -> list[SampleParams | None]:
        base = {"max_tokens": 1, "stop_ids": frozenset()}
        return [None if row is None else SampleParams(**{**base, **row}) for row in self.rows]

    @property
    def uses(self) -> int:
        return SamplingTensors.of([p for p in self.params if p], self.vocab, "cpu").any

    def logits(self) -> Tensor:
        """[steps, B, V]; coarse, so that there are ties."""
        chance = torch.Generator().manual_seed(self.vocab)
        x = torch.randn((self.steps, len(self.rows), self.vocab), generator=chance) * self.scale
        x = (x * 8).round() / 8
        for row, value in self.bad.items():
            x[:, row, self.vocab // 2] = value
        return x.to(self.dtype)


SAMPLED: list[dict[str, Any] | None] = [
    {}, {"temperature": 0.7, "seed": 2**64 - 1}, HOLE, {"temperature": 0.0}, {"temperature": 2.5, "seed": 2**63},
    {"temperature": 1e-300}, {"temperature": 1e300},
]  # fmt: skip
RESTRICTED: list[dict[str, Any] | None] = [
    {"top_k": 1}, {"top_k": 3}, {"top_p": 0.8}, {"top_p": 1e-300}, {"min_p": 0.1}, {"min_p": 1.0}, HOLE, {},
    {"temperature": 0.0, "top_k": 5}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.4, "top_p": 0.99, "top_k": 10**9},
]  # fmt: skip
MARKED: list[dict[str, Any] | None] = [
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.5, "temperature": 0.5}, {"bias": {1: 2.0, 3: -4.0}}, {},
    {"banned": frozenset({0, 2})}, {"temperature": 0.0, "repetition_penalty": 2.0, "banned": frozenset({4})}, HOLE,
    {"bias": {5: 1e300}}, {"banned": frozenset(range(6))},
]  # fmt: skip
EVERYTHING = [
    {"temperature": 1.4, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "bias": {4: 2.5},
     "banned": frozenset({6})},
    *RESTRICTED[:3], *MARKED[:5], {"temperature": 0.0},
]  # fmt: skip
CASES = {
    "seven tokens": Case(vocab=7, rows=SAMPLED, steps=4),
    "one chunk": Case(vocab=300, rows=SAMPLED, steps=4),
    "several chunks": Case(vocab=9001, rows=SAMPLED, dtype=torch.bfloat16),
    "whole chunks": Case(vocab=8192, rows=SAMPLED, dtype=torch.float16),
    "flat": Case(vocab=16384, rows=[{"seed": seed} for seed in (0, 7, 2**64 - 1)] * 2, scale=0.0, start=10**6),
    "restricted": Case(vocab=300, rows=RESTRICTED, steps=1),
    "restricted, several chunks": Case(vocab=5000, rows=RESTRICTED, dtype=torch.bfloat16, steps=1),
    "restricted, seven tokens": Case(vocab=7, rows=RESTRICTED, steps=1),
    "penalty and bias": Case(vocab=7, rows=MARKED, steps=3),
    "penalty and bias, several chunks": Case(vocab=4999, rows=MARKED, steps=3, dtype=torch.bfloat16),
    "everything": Case(vocab=4500, rows=EVERYTHING, dtype=torch.bfloat16, steps=1),
    "a limit": Case(vocab=50, rows=SAMPLED, steps=4, limit=3),
    "stop tokens": Case(vocab=4, rows=[{"stop_ids": frozenset({0, 3})}, {"stop_ids": frozenset({2})}, {}] * 4, steps=4),
    "not finite": Case(
        vocab=5000, steps=1,
        rows=[{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {}, {}, {"temperature": 0.5}],
        bad={0: math.nan, 1: math.nan, 2: math.nan, 3: math.inf, 5: math.inf, 6: -math.inf},
    ),
}  # fmt: skip


def expected(case: Case) -> dict[str, Tensor]:
    """What draw.py gives, and the flags by the rules: [steps, B] each."""
    seats = [(row, p) for row, p in enumerate(case.params) if p]
    knobs = SamplingTensors.of([p for _, p in seats], case.vocab, "cpu", [READ[: case.vocab]] * len(seats))
    at = torch.tensor([row for row, _ in seats])
    active = torch.ones(len(seats), dtype=torch.bool)
    out = {name: torch.zeros((case.steps, len(case.rows)), dtype=torch.float64) for name in NAMES}
    for step, logits in enumerate(case.logits()):
        u = philox_uniforms([p.seed for _, p in seats], at.numpy(), case.start + step, 1)[0]
        token, logp, raw = draw(logits[at], torch.from_numpy(u), knobs)
        knobs.add_written(token)
        stopped = torch.tensor([int(t) in p.stop_ids for t, (_, p) in zip(token, seats, strict=True)])
        ended = stopped | (case.start + step + 1 >= case.limit)
        flag = active * (1 + ended.int())
        for name, value in zip(NAMES, (token, logp, raw, flag), strict=True):
            out[name][step, at] = value.double() * (active if name != "flag" else 1)
        active &= ~ended
    return out


def launched(case: Case, device: str) -> dict[str, Tensor]:
    """What the kernels write: [steps, B] each, 0 where nothing was written; and the state in the end, [B]."""
    from hone.engine.runners.cuda.draw import launch

    uses, rows = case.uses, len(case.rows)
    penalty, bias = bool(uses & Uses.PENALTY), bool(uses & Uses.BIAS)
    state = DrawState.empty(rows + 1, case.vocab, device, bias=bias, seen=penalty)
    for row, p in enumerate(case.params):
        if p is not None:
            state.seat(row, p, request=row, limit=case.limit, read=READ[: case.vocab])
            state.count[row] = case.start
    out = {name: torch.zeros((case.steps, rows), dtype=torch.float64) for name in NAMES}
    for step, logits in enumerate(case.logits()):
        written = DrawOut.empty(rows + 1, device)
        launch(logits.to(device), state, written, rows, restrict=bool(uses & Uses.RESTRICT), penalty=penalty, bias=bias)
        for name in NAMES:
            value = getattr(written, name)[:rows].double().cpu()
            out[name][step] = torch.where(written.flag[:rows].cpu() > 0, value, 0.0)
    names = ("token", "position", "count", "active")
    return {**out, **{f"state {name}": getattr(state, name)[:rows].cpu() for name in names}}


if __name__ == "__main__":
    import interpreted  # noqa: F401 (before Triton)

    results = {name: launched(case, "cpu") for name, case in CASES.items()}
    save_file({f"{name}: {key}": x for name, result in results.items() for key, x in result.items()}, sys.argv[1])
