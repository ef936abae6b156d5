"""Rows that begin alike, as one list, and attention over them with its gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.model.backends.fused import shared_attention
from hone.model.layout import lay_out_shared, move_record
from hone.model.rows import Rows, Tables, Tiles, round_size
from hone.types import Batch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KEYS, SIZE = 4, 2, 16
# lengths, groups, and how many tokens the rows of a group have in common, or each of them with its first
ROWS: dict[str, tuple[list[int], list[int], int | list[int]]] = {
    "a group": ([9, 8, 7, 9], [0, 0, 0, 0], 4),
    "two groups, between each other": ([9, 8, 7, 9, 9], [0, 1, 0, 1, 1], 3),
    "nothing in common": ([9, 8, 7], [0, 1, 2], 2),
    "a row that is another's beginning": ([8, 7, 8], [0, 0, 0], 7),
    "an empty row": ([5, 0, 5], [0, 0, 1], 2),
    "one row twice": ([5, 5, 5], [0, 0, 1], 5),
    "many rows": ([40 - n % 7 for n in range(70)], [n // 7 for n in range(70)], 20),
    "rows of several tiles": ([200, 130, 64, 65, 1], [0, 0, 0, 1, 1], 3),
    "a prompt of several tiles": ([150, 131, 200, 129], [0, 0, 0, 0], 129),
    "rows that leave the first one here and there": ([170, 100, 9, 140, 90], [0, 0, 0, 0, 0], [0, 70, 2, 64, 90]),
}

LONG = ("two groups, between each other", "rows of several tiles", "rows that leave the first one here and there")
CASES: list[dict[str, Any]] = [{"name": name} for name in ROWS]
CASES += [{"name": name, "window": window} for name in LONG for window in (1, 3, 70)]
CASES += [{"name": name, "filled": True, "window": window} for name in LONG for window in (0, 5)]
CASES += [{"name": name, "size": 128, "window": window} for name, window in zip(LONG, (0, 0, 70), strict=True)]
CASES += [{"name": LONG[2], "heads": heads} for heads in ((2, 2), (3, 1))]


def batch_of(lengths: list[int], group: list[int], common: int | list[int], device: str = "cpu") -> Batch:
    """Rows of a group begin with the same tokens."""
    B, W = len(lengths), max(lengths)
    tokens = torch.randint(1, 61, (B, W + 1), generator=torch.Generator().manual_seed(B))
    for row, (g, same) in enumerate(zip(group, [common] * B if isinstance(common, int) else common, strict=True)):
        tokens[row, :same] = tokens[group.index(g), :same]
        if isinstance(common, list) and same:
            tokens[row, same] = 61 - tokens[group.index(g), same]  # no more than that
    real = torch.arange(W) < torch.tensor(lengths)[:, None]
    batch = Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:], mask=real, real=real, group=torch.tensor(group))
    return batch.to(device)


def rows_of(name: str) -> tuple[Rows, Rows]:
    """For tables, and for kernels."""
    batch = batch_of(*ROWS[name])
    plain, tiled = (lay_out_shared(batch.inputs, batch.real, batch.group, kernels=way).mask for way in (False, True))
    assert isinstance(plain, Rows)
    assert isinstance(tiled, Rows)
    return plain, tiled


def inputs(tokens: int, size: int = SIZE, heads: tuple[int, int] = (HEADS, KEYS)) -> list[Tensor]:
    """Queries, keys and values [1, heads, tokens, size]"""
    generator, (H, K) = torch.Generator().manual_seed(0), heads
    drawn = (torch.randn(1, n, tokens, size, generator=generator, dtype=torch.float64) for n in (H, K, K))
    return [x.requires_grad_() for x in drawn]


def with_gradients(rows: Rows, given: list[Tensor], *, read: int | None = None, kernels: bool = False) -> list[Tensor]:
    """What is answered, and what a weighted sum of it gives to queries, keys and values; of the first `read` tokens."""
    if kernels:  # on a CPU too, in the interpreter
        assert isinstance(rows.by, Tiles)
        q, k, v = (x[0].transpose(0, 1) for x in given)
        out = shared_attention.attend(q, k, v, rows.spans, rows.by, window=rows.window).flatten(1)[None]
    else:
        out = rows.attend(*given, shares_keys=True)
    out = out[:, : out.shape[1] if read is None else read]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad((out * weights.to(out)).sum(), given)]


def differences(
    name: str,
    *,
    window: int = 0,
    size: int = SIZE,
    heads: tuple[int, int] = (HEADS, KEYS),
    filled: bool = False,
    dtype: torch.dtype,
    device: str,
) -> float:
    """How far kernels are from tables in float64, at most, relative to the largest number or 1.

    filled: the list is filled up, with tokens that nobody reads.
    """
    plain, tiled = (replace(rows, window=window) for rows in rows_of(name))
    assert isinstance(plain.by, Tables)
    assert isinstance(tiled.by, Tiles)
    tokens = len(plain.by.owner)
    exact = inputs(round_size(tokens) if filled else tokens, size, heads)
    truth = with_gradients(plain, [x[:, :, :tokens].detach().requires_grad_() for x in exact])
    there = move_record(tiled, torch.device(device))
    found = with_gradients(
        there, [x.detach().to(device, dtype).requires_grad_() for x in exact], read=tokens, kernels=True
    )
    assert all(torch.isfinite(x).all() for x in found)
    assert not any(x[:, :, tokens:].any() for x in found[1:]), "what nobody reads was given something"
    cut = [found[0], *(x[:, :, :tokens] for x in found[1:])]
    return max(float((a - b.cpu()).abs().max() / a.abs().max().clamp(min=1)) for a, b in zip(truth, cut, strict=True))
