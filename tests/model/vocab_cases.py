"""Chunks for the kernels of model/backends/fused/vocab.py. As a program, it puts them through Triton's interpreter."""

import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    import interpreted  # noqa: F401 (before Triton)
import torch
from safetensors.torch import save_file
from torch import Tensor

from hone.engine.draw import draw
from hone.engine.params import SampleParams, SamplingTensors
from hone.model.vocab.distribution import ROW_OF, STATS, TABLE_ROWS, Chunk, ComparedLogits
from hone.types import Support

EVERY = ("logp", "entropy", "ref_kl", "old_kl")
SETTINGS: dict[str, dict[str, Any]] = {
    "logp alone": {"want": ("logp",)},
    "entropy": {"want": ("logp", "entropy")},
    "the reference": {"want": ("logp", "ref_kl")},
    "the old one": {"want": ("old_kl",)},
    "everything": {},
    "everything, given": {"given": True},
    "several reads": {"vocab": 5000, "scale": 5.0},
    "several reads, rising": {"vocab": 5000, "scale": 5.0, "order": 1},
    "several reads, given": {"vocab": 5000, "given": True, "order": -1},
    "restricted": {"vocab": 5000, "params": {"top_k": 30, "top_p": 0.9, "min_p": 0.01}},
    "temperature": {"vocab": 700, "temperature": 0.7},
    "bfloat16": {"vocab": 700, "dtype": torch.bfloat16},
    "huge logits": {"scale": 3e4},
    "banned tokens": {"vocab": 5000, "banned": 4500},
    "banned tokens, given": {"vocab": 300, "banned": 200, "given": True},
    "one token": {"vocab": 1},
}


def support_of(logits: Tensor, params: SampleParams) -> Support:
    """What the sampler could draw from these logits, [n, V]."""
    logits = logits.detach().cpu()
    kept = torch.ones(logits.shape, dtype=torch.bool)
    draw(
        logits, torch.zeros(len(logits)), SamplingTensors.of([params] * len(logits), logits.shape[1], "cpu"), kept=kept
    )
    size = kept.sum(-1)
    return Support(first=size.cumsum(0) - size, size=size, ids=kept.nonzero()[:, 1])


def case(
    *,
    want: tuple[str, ...] = EVERY,
    vocab: int = 300,
    rows: int = 5,
    scale: float = 2.0,
    given: bool = False,
    order: int = 0,
    banned: int = 0,
    temperature: float = 1.3,
    dtype: torch.dtype = torch.float32,
    params: dict[str, Any] | None = None,
) -> tuple[Chunk, dict[str, Tensor]]:
    """A chunk and gradients of its statistics; order: 1 the greatest logits come last, -1 first."""
    g = torch.Generator().manual_seed(vocab)
    x, r, o = (torch.randn(rows, vocab, generator=g) * scale for _ in range(3))
    if order:
        x, r, o = (y.sort(-1, descending=order < 0).values for y in (x, r, o))
    targets = torch.randint(0, vocab, (rows,), generator=g)
    x, r, o = ((y[:, :1] + y).to(dtype) if scale < 1e3 else y.to(dtype) for y in (x, r, o))
    if banned:
        for y in (x, r, o):
            y[:, :banned] = -torch.inf
        targets = targets.clamp(min=banned)
    if given:
        r, o = r.float().log_softmax(-1), o.float().log_softmax(-1)
    others = {
        name: ComparedLogits(logits=y, temperature=1.0 if given else t, is_log_prob=given)
        for name, y, t in (("ref_kl", r, 0.8), ("old_kl", o, temperature))
        if name in want
    }
    table = torch.zeros(len(TABLE_ROWS), rows)
    cut = params is not None
    if params is not None:
        setting = SampleParams(max_tokens=1, stop_ids=frozenset(), temperature=temperature, **params)
        outside = support_of(x, setting).outside(slice(None), vocab)
        for y in (x, r, o):
            y.masked_fill_(outside, -torch.inf)
    chunk = Chunk(
        logits=x, targets=targets, table=table, want=frozenset(want), temperature=temperature, cut=cut, others=others
    )
    return chunk, {name: torch.randn(rows, generator=g) for name in want}


def on(chunk: Chunk, device: str, dtype: torch.dtype | None = None) -> Chunk:
    """A copy on another device, of another precision."""

    def moved(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.is_floating_point() else None, copy=True)

    others = {
        name: ComparedLogits(logits=moved(y.logits), temperature=y.temperature, is_log_prob=y.is_log_prob)
        for name, y in chunk.others.items()
    }
    return Chunk(
        logits=moved(chunk.logits), targets=moved(chunk.targets), table=moved(chunk.table).float() if dtype is None
        else moved(chunk.table), want=chunk.want, temperature=chunk.temperature, cut=chunk.cut, others=others,
    )  # fmt: skip


def outcome(backend: Any, chunk: Chunk, upstream: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numbers wanted, and the gradients of all of them together and of each alone."""
    backend.stats(chunk)
    found = {name: chunk.table[ROW_OF[name]].clone() for name in sorted(chunk.want)}
    grads = {name: g.to(chunk.table) for name, g in upstream.items()}
    logits = chunk.logits.clone()
    for name, some in (("d", grads), *((f"d {n}", {n: g}) for n, g in grads.items())):
        chunk.logits.copy_(logits)
        backend.grad(chunk, some)
        found[name] = chunk.logits.clone()
    return found


def outcomes(backend: Any, device: str) -> Iterator[tuple[str, Tensor]]:
    """Of every case, by "case: number"."""
    for name, setting in SETTINGS.items():
        chunk, upstream = case(**setting)
        for what, value in outcome(backend, on(chunk, device), upstream).items():
            yield f"{name}: {what}", value.cpu()


if __name__ == "__main__":
    assert set(EVERY) == STATS
    from hone.model.backends.fused import vocab

    save_file(dict(outcomes(vocab, "cpu")), sys.argv[1])
