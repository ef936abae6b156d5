"""Rollouts to tensors: the one place that shifts and pads."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from hone.errors import HoneError
from hone.types import ABSENT, Batch, Group, Rollout, Stop, Support

BY_TOKEN = ("gen_logp", "support_size", "step_reward", "step_label")
Array = np.ndarray[Any, np.dtype[Any]]


def collate(groups: Sequence[Group], *, pad_id: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """inputs[t] = token t, targets[t] = token t+1; mask, gen_logp and step_reward move with their token."""
    return add_scores(token_table(groups, pad_id=pad_id), groups, dtype=dtype) if any(groups) else _empty(dtype)


def token_table(groups: Sequence[Group], *, pad_id: int = 0) -> Batch:
    """What a forward pass reads of rollouts, whether they are scored or not."""
    rows = [r for g in groups for r in g]
    if not all(len(r.tokens) for r in rows):
        raise ValueError("a row has no token: collate needs at least one in each")
    lengths = np.fromiter((len(r.tokens) for r in rows), np.int64, len(rows))
    real: Array = np.arange(lengths.max()) < lengths[:, None]
    inputs = _pad([r.tokens for r in rows], real, pad_id, np.int64)
    mask = _shift(_pad([r.mask for r in rows], real, False, np.bool_), False)
    cut_off = Stop.LENGTH  # looked up once: an enum's member takes longer than all else that is done to a row here
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(_shift(inputs, pad_id)),
        mask=torch.from_numpy(mask),
        real=torch.from_numpy(real),
        group=torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g) for g in groups])),
        truncated=torch.from_numpy(np.fromiter((r.stop is cut_off for r in rows), np.bool_, len(rows))),
        support=_support(rows, real, mask),
    )


def _support(rows: list[Rollout], real: Array, mask: Array) -> Support | None:
    """What the sampler could have drawn at each trained token, where it was recorded."""
    if not _has(rows, "support_size"):
        return None
    sizes = _pad([r.support_size for r in rows], real, 0, np.int64)
    flat = sizes.flatten()
    first = _shift((flat.cumsum() - flat).reshape(sizes.shape), 0)
    size = _shift(sizes, 0)
    if (mask & (size < 1)).any():
        raise ValueError("a trained token has no support: the sampler has to record one for each token that it writes")
    ids = torch.from_numpy(np.concatenate([np.asarray(r.support, dtype=np.int64) for r in rows]))
    return Support(first=torch.from_numpy(first), size=torch.from_numpy(np.where(mask, size, 0)), ids=ids)


def add_scores(batch: Batch, groups: Sequence[Group], *, dtype: torch.dtype = torch.float32) -> Batch:
    """Adds rewards, limits, labels, margins and the sampler's log-probs to the table, which is on the host.

    Rows with an invalid reward are not trained on.
    """
    rows = [r for g in groups for r in g]
    mask, real = batch.mask.numpy(), batch.real.numpy()
    label, step_mask = _labels(rows, real, dtype)
    reward, valid = _rewards(rows, dtype)
    mask = mask if step_mask is None else step_mask
    if valid is not None:
        mask = mask & valid[:, None]
    return replace(
        batch,
        mask=torch.from_numpy(mask),
        reward=reward,
        valid=ABSENT if valid is None else torch.from_numpy(valid),
        limit=torch.tensor([r.limit for r in rows]),
        step_reward=_token_column(rows, "step_reward", real, dtype),
        label=label,
        margin=torch.tensor([r.margin for r in rows], dtype=dtype),
        gen_logp=_token_column(rows, "gen_logp", real, dtype),
    )


def _empty(dtype: torch.dtype) -> Batch:
    """No rows, with every column that rows can give: what a rank without a share goes on with."""
    token = torch.zeros(0, 1, dtype=torch.int64)
    flag, number = token.bool(), token.to(dtype)
    return Batch(
        inputs=token,
        targets=token,
        mask=flag,
        real=flag,
        group=token[:, 0],
        reward=number[:, 0],
        valid=flag[:, 0],
        truncated=flag[:, 0],
        limit=token[:, 0],
        step_reward=number,
        label=number[:, 0],
        margin=number[:, 0],
        gen_logp=number,
    )


def _pad(rows: Sequence[Sequence[Any]], real: Array, fill: Any, dtype: DTypeLike) -> Array:
    """One masked write, if any."""
    flat = _end_to_end(rows, dtype)
    if len(flat) == real.size:
        return flat.reshape(real.shape)
    padded = np.full(real.shape, fill, dtype)
    padded[real] = flat
    return padded


def _end_to_end(rows: Sequence[Sequence[Any]], dtype: DTypeLike) -> Array:
    """All rows in one array.

    Arrays of one type are copied as bytes; otherwise a row that several rollouts share is converted once.
    """
    arrays = [row for row in rows if isinstance(row, array)]
    kinds = {row.typecode for row in arrays}
    if len(arrays) == len(rows) and len(kinds) == 1:  # as a sampler gives them: bytes are joined ten times as fast
        return np.frombuffer(bytearray().join(arrays), kinds.pop()).astype(dtype, copy=False)
    once = {id(row): row for row in rows}
    read = {number: np.asarray(row) for number, row in once.items()}
    return np.concatenate([read[id(row)] for row in rows], dtype=dtype, casting="unsafe")


def _shift(x: Array, fill: Any) -> Array:
    """From a token's own index to the index of the token before it, which is where it is predicted."""
    return np.concatenate([x[:, 1:], np.full((len(x), 1), fill, x.dtype)], axis=1)


def _has(rows: list[Rollout], name: str) -> bool:
    """Whether every row has the field; a field on some rows only is a mistake of the caller."""
    values = [getattr(r, name) for r in rows]
    number = sum(len(v) > 0 for v in values) if name in BY_TOKEN else sum(v is not None for v in values)
    if number not in (0, len(rows)):
        raise ValueError(f"{name} is on {number} of {len(rows)} rows: all or none must have it")
    return number > 0


def _token_column(rows: list[Rollout], name: str, real: Array, dtype: torch.dtype) -> Tensor:
    if not _has(rows, name):
        return ABSENT
    # Cast in numpy: torch's cast of so small a table starts threads that cost more than the rest of collate.
    kind = np.float64 if dtype is torch.float64 else np.float32
    return torch.from_numpy(_shift(_pad([getattr(r, name) for r in rows], real, 0.0, kind), 0.0)).to(dtype)


def _rewards(rows: list[Rollout], dtype: torch.dtype) -> tuple[Tensor, Array | None]:
    if not _has(rows, "outcome"):
        return ABSENT, None
    values = [None if r.outcome is None else r.outcome.value for r in rows]
    reward = torch.tensor([0.0 if v is None else v for v in values], dtype=dtype)
    if not bool(reward.isfinite().all()):
        raise ValueError("an outcome's value is not finite: mark it invalid (value None) instead")
    return reward, np.fromiter((v is not None for v in values), np.bool_, len(values))


def _labels(rows: list[Rollout], real: Array, dtype: torch.dtype) -> tuple[Tensor, Array | None]:
    """KTO's [B] label; or a PRM's [B, T] one with its mask, not shifted: the value is read after the step."""
    by_row, by_step = _has(rows, "label"), _has(rows, "step_label")
    if by_row and by_step:
        raise ValueError("rows have both a label and step labels: a batch holds one kind")
    if by_row:
        return torch.tensor([r.label for r in rows], dtype=dtype), None
    if not by_step:
        return ABSENT, None
    label = _pad([r.step_label for r in rows], real, math.nan, np.float64)
    mask = ~np.isnan(label)
    return torch.from_numpy(np.where(mask, label, 0.0)).to(dtype), mask


def mismatched_pairs(rows: Sequence[Rollout], *, max_tokens: int = 0) -> list[Rollout]:
    """KTO's pairs (x_i, y_{i+1}), cyclic; max_tokens > 0 cuts completions that no longer fit the context."""
    if len(rows) < 2:
        raise HoneError("KTO compares each prompt with another row's completion: use at least 2 rows in a step")
    starts = [next((i for i, m in enumerate(r.mask) if m), None) for r in rows]
    pairs = list[Rollout]()
    for i, row in enumerate(rows):
        j = (i + 1) % len(rows)
        x, y = starts[i], starts[j]
        if x is None or y is None:
            raise ValueError(f"row {i if x is None else j} has no trained token")
        tokens, mask = [*row.tokens[:x], *rows[j].tokens[y:]], [*row.mask[:x], *rows[j].mask[y:]]
        end = max_tokens or len(tokens)
        pairs.append(Rollout(tokens=tokens[:end], mask=mask[:end]))
    return pairs
