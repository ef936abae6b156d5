"""Launches of the attention kernels: rows that write one token each, and prompts."""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.engine.runners.cuda import attention_kernels
from hone.engine.runners.cuda import prefill as reading
from hone.engine.runners.cuda.step import Launcher
from hone.engine.runners.cuda.weights import LayerTensors
from hone.model.config import DecoderConfig
from hone.model.decoder import rope_tables
from hone.model.kernels.tiles import cdiv, power

BLOCK = 32  # columns of a KV block
QUERIES = 64  # prompt tokens a program attends with
WARPS, STAGES = 1, 2  # of a program that attends for a row; more stages take the room of the kernels beside it
BUSY = 768  # programs that keep an H200 busy
SPLITS, INVARIANT = 8, 2  # stretches of a row's keys: at most, and where the batch must not matter
STORE = 32  # prompt tokens a program rotates


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """KV memory and the tables of rotations."""

    pool: Tensor  # [blocks, layers, 2, K, BLOCK, E]
    cos: Tensor  # float32 [positions, E / 2]
    sin: Tensor
    sums: Tensor  # float32: what stretches of keys came to, until they are joined
    arrived: Tensor  # int32 [rows * K]  stretches that have come, 0 between launches

    @staticmethod
    def of(config: DecoderConfig, *, blocks: int, rows: int, positions: int, like: Tensor) -> "KVPool":
        """Empty."""
        KV, E, device = config.num_key_value_heads, config.head_dim, like.device
        shape = (blocks, config.num_hidden_layers, 2, KV, BLOCK, E)
        cos, sin = (x[:, : E // 2].contiguous().to(device) for x in rope_tables(config, positions))
        most = max(n * splits_of(n, KV, invariant=False) for n in range(1, rows + 1))
        size = max(most, rows * INVARIANT) * KV * padded(config.num_attention_heads // KV) * (E + 2)
        return KVPool(
            # zeros, since what a block held before could be NaN, which a weight of 0 does not remove
            pool=torch.zeros(shape, dtype=like.dtype, device=device),
            cos=cos,
            sin=sin,
            sums=torch.zeros(size, device=device),
            arrived=torch.zeros(rows * KV, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlaces:
    """Where each row is: its blocks, the position of its next token, whether it writes."""

    table: Tensor  # int32 [rows, blocks a row]
    position: Tensor  # int32 [rows]
    active: Tensor  # int32 [rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlaces:
    """Where each prompt token is, laid end to end, and which tokens attend together."""

    table: Tensor  # int32 [prompts, blocks a prompt]
    position: Tensor  # int32 [tokens]
    owner: Tensor  # int32 [tokens]  line in the table, -1: padding
    tiles: Tensor  # int32 [tiles, 4]  line, first token, its position, tokens


def _shape(launcher: Launcher, layer: int, w: LayerTensors, *, norm: bool) -> dict[str, Any]:
    c = launcher.config
    G = c.num_attention_heads // c.num_key_value_heads
    shape: dict[str, Any] = {"LAYERS": c.num_hidden_layers, "KV": c.num_key_value_heads, "G": G, "E": c.head_dim}
    return shape | {"BS": BLOCK} | ({"NORM": w.q_norm is not None} if norm else {})


def attend_rows(launcher: Launcher, memory: KVPool, w: LayerTensors, layer: int, at: RowPlaces) -> None:
    """One query a row, whose key and value are written to the pool as well."""
    c, b, pool = launcher.config, launcher.buffers, memory.pool[:, layer]
    G = c.num_attention_heads // c.num_key_value_heads
    splits = splits_of(launcher.rows, c.num_key_value_heads, invariant=launcher.invariant)
    attention_kernels.decode[(launcher.rows, c.num_key_value_heads, splits)](
        b.qkv, pool, at.table, at.position, at.active, memory.cos, memory.sin, *_gains(w), b.mixed,
        memory.sums, memory.arrived, c.head_dim**-0.5, c.rms_norm_eps, at.table.shape[1],
        GP=padded(G), SPLITS=splits,
        WINDOW=c.windows[layer] if c.windows else 0, PDL=launcher.pdl,
        num_warps=WARPS if c.head_dim <= 64 else 2 * WARPS, num_stages=STAGES, **_shape(launcher, layer, w, norm=True),
        **({"launch_pdl": True} if launcher.pdl else {}),
    )  # fmt: skip


def padded(G: int) -> int:
    """Query heads of a program: the matrix units take no fewer than 16."""
    return max(16, power(G))


def splits_of(rows: int, heads: int, *, invariant: bool) -> int:
    """Into how many stretches a row's keys are cut: enough for every multiprocessor to have some warps."""
    if invariant:
        return INVARIANT
    return min(SPLITS, power(max(1, BUSY // (rows * heads))))


def attend_prompts(launcher: Launcher, memory: KVPool, w: LayerTensors, layer: int, at: PromptPlaces) -> None:
    """The tokens of several prompts: keys and values to the pool, then every query against its own prompt."""
    c, b, pool, rows = launcher.config, launcher.buffers, memory.pool[:, layer], len(at.position)
    reading.store[(cdiv(rows, STORE), c.num_attention_heads + 2 * c.num_key_value_heads)](
        b.qkv, pool, at.table, at.position, at.owner, memory.cos, memory.sin, *_gains(w),
        c.rms_norm_eps, at.table.shape[1], rows, BT=STORE, num_warps=4, **_shape(launcher, layer, w, norm=True),
    )  # fmt: skip
    reading.prefill[(len(at.tiles), c.num_attention_heads)](
        b.qkv, pool, at.table, at.tiles, b.mixed, c.head_dim**-0.5, at.table.shape[1],
        WINDOW=c.windows[layer] if c.windows else 0, BT=QUERIES, num_warps=4, num_stages=3,
        **_shape(launcher, layer, w, norm=False),
    )  # fmt: skip


def _gains(w: LayerTensors) -> tuple[Tensor, Tensor]:
    """The gains of the query and key norms; any tensor where there is none."""
    return (w.out, w.out) if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
