"""The decoder's forward pass as kernel launches over buffers that exist already, so that it can be captured."""

# Triton's constexpr takes plain numbers, and a launch takes options:
# pyright: reportArgumentType=false, reportCallIssue=false
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hone.engine.runners.cuda.linear import embed, gated, linear, normed, residual
from hone.engine.runners.cuda.weights import LayerTensors
from hone.model.config import DecoderConfig
from hone.model.kernels import elementwise
from hone.model.kernels.fused_weights import LowRank
from hone.model.kernels.tiles import CUBLAS_ROWS, ROWS, Tile, cdiv, most_parts, power, tile


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations of up to `rows` tokens; views of the first dimension are buffers of fewer."""

    x: Tensor  # [rows, D]
    scaled: Tensor  # [rows, D]  x times the gain of the norm that reads it next
    squares: Tensor  # float32 [rows, P]  sums of squares of x by column tile
    qkv: Tensor  # [rows, (H + 2 K) E]
    mixed: Tensor  # [rows, H E]
    wide: Tensor  # [rows, 2 M]  gate and up, only for layers with adapters there
    act: Tensor  # [rows, M]
    low: Tensor  # [rows, rank]

    @staticmethod
    def of(config: DecoderConfig, rows: int, *, rank: int, wide: bool, like: Tensor) -> "Buffers":
        rows = cdiv(rows, ROWS) * ROWS
        D, E, M = config.hidden_size, config.head_dim, config.intermediate_size
        heads, keys = config.num_attention_heads * E, config.num_key_value_heads * E

        def zeros(size: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(rows, size, dtype=dtype, device=like.device)

        parts = most_parts(D)
        return Buffers(
            zeros(D), zeros(D), zeros(parts, torch.float32), zeros(heads + 2 * keys), zeros(heads),
            zeros(2 * M if wide else 0), zeros(M), zeros(rank),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Launches over one set of buffers, with the settings that are the same for every kernel of a step.

    parts: how many sums of squares the x at hand has, known to whoever wrote it.
    """

    config: DecoderConfig
    buffers: Buffers
    rows: int
    invariant: bool
    pdl: bool  # kernels start while the one before ends (Hopper's programmatic launch)
    tma: bool  # matrices are loaded by Hopper's copy engine

    def _tile(self, N: int, K: int, *, double: bool = False) -> tuple[Tile, tuple[int, int], dict[str, Any]]:
        t = tile(self.rows, N, K, invariant=self.invariant, double=double)
        options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        options |= {"BM": t.rows, "BN": t.cols, "BK": t.depth, "num_warps": t.warps, "num_stages": t.stages}
        options |= {"EVEN": K % t.depth == 0 and N % t.cols == 0, "PDL": self.pdl}
        return t, (cdiv(self.rows, t.rows), cdiv(N, t.cols)), options

    def _sides(self, a: Tensor, weight: Tensor, t: Tile) -> tuple[Any, Any, bool]:
        """The two matrices as descriptors where the copy engine can read them, and whether it can."""
        if not (self.tma and t.copied) or any(x.stride(0) * x.element_size() % 16 for x in (a, weight)):
            return a, weight, False
        left = TensorDescriptor.from_tensor(a, [t.rows, t.depth])
        return left, TensorDescriptor.from_tensor(weight, [t.cols, t.depth]), True

    def embed(self, table: Tensor, tokens: Tensor, gain: Tensor) -> int:
        """x = the tokens' embeddings"""
        b, D = self.buffers, self.config.hidden_size
        embed[(self.rows,)](
            table, tokens, gain, b.x, b.scaled, b.squares, D, P=b.squares.shape[1], PDL=self.pdl,
            BD=power(D), num_warps=4, **({"launch_pdl": True} if self.pdl else {}),
        )  # fmt: skip
        return 1

    def linear(self, a: Tensor, parts: int, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
        """y = a W^T / rms + bias; parts 0: a is not the scaled x, and is not divided"""
        (N, K), b = weight.shape, self.buffers
        t, grid, options = self._tile(N, K)
        A, W, tma = self._sides(a, weight, t)
        linear[grid](
            A, b.squares, W, weight, weight if bias is None else bias, y, N, K, parts, self.config.rms_norm_eps,
            a.stride(0), y.stride(0), P=b.squares.shape[1] if parts else 0, HAS_BIAS=bias is not None, TMA=tma,
            **options,
        )  # fmt: skip

    def add(self, a: Tensor, weight: Tensor, y: Tensor, *, gain: Tensor | None, scale: float = 1.0) -> int:
        """y += scale a W^T; gain: y is x, and the norm that reads it next has this gain"""
        (N, K), b = weight.shape, self.buffers
        t, grid, options = self._tile(N, K)
        A, W, tma = self._sides(a, weight, t)
        residual[grid](
            A, W, weight, y, weight if gain is None else gain, b.scaled, b.squares, scale, N, K,
            a.stride(0), y.stride(0), P=0 if gain is None else b.squares.shape[1], TMA=tma, **options,
        )  # fmt: skip
        return cdiv(N, t.cols)

    def head(self, parts: int, gain: Tensor, weight: Tensor, logits: Tensor) -> None:
        """logits = norm(x) W^T in float32; large ones by cuBLAS, which is faster there"""
        b, D = self.buffers, self.config.hidden_size
        if self.invariant or not self.tma or self.rows < CUBLAS_ROWS:
            self.linear(b.scaled, parts, weight, None, logits)
            return
        normed[(self.rows,)](
            b.x, gain, b.squares, b.scaled, D, parts, self.config.rms_norm_eps, P=b.squares.shape[1], PDL=self.pdl,
            BD=power(D), num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip
        torch.mm(b.scaled[: self.rows], weight.t(), out_dtype=torch.float32, out=logits[: self.rows])

    def low(self, a: Tensor, parts: int, adapters: list[LowRank], y: Tensor) -> None:
        """y += scale (a A^T / rms) B^T for each adapter, at its columns"""
        for adapter in adapters:
            h = self.buffers.low[:, : len(adapter.A)]
            self.linear(a, parts, adapter.A, None, h)
            self.add(h, adapter.B, y[:, adapter.at :], gain=None, scale=adapter.scale)

    def into_x(self, a: Tensor, weight: Tensor, adapters: list[LowRank], gain: Tensor) -> int:
        """x += a W^T, with its adapters, ready for the norm with this gain"""
        b = self.buffers
        parts = self.add(a, weight, b.x, gain=None if adapters else gain)
        for adapter in adapters:  # a layer has at most one that is on
            h = b.low[:, : len(adapter.A)]
            self.linear(a, 0, adapter.A, None, h)
            parts = self.add(h, adapter.B, b.x, gain=gain, scale=adapter.scale)
        return parts

    def gated(self, w: LayerTensors, parts: int) -> None:
        """act = silu(gate) * up"""
        b, M, K = self.buffers, self.config.intermediate_size, self.config.hidden_size
        if w.low_gate_up:
            self.linear(b.scaled, parts, w.gate_up, None, b.wide)
            self.low(b.scaled, parts, w.low_gate_up, b.wide)
            elementwise.gate[(self.rows, cdiv(M, 1024))](b.wide, b.act, M, BM=1024)
            return
        t, grid, options = self._tile(M, K, double=True)
        A, W, tma = self._sides(b.scaled, w.gate_up, t)
        gated[grid](
            A, b.squares, W, w.gate_up, b.act, M, K, parts, self.config.rms_norm_eps, P=b.squares.shape[1], TMA=tma,
            **options,
        )  # fmt: skip

    def layer(self, w: LayerTensors, parts: int, next_gain: Tensor, attend: Callable[[], None]) -> int:
        """x += out(attention(x)); x += down(silu(gate) * up), ready for the next layer's norm"""
        b = self.buffers
        self.linear(b.scaled, parts, w.qkv, w.qkv_bias, b.qkv)
        self.low(b.scaled, parts, w.low_qkv, b.qkv)
        attend()
        parts = self.into_x(b.mixed, w.out, w.low_out, w.mlp_gain)
        self.gated(w, parts)
        return self.into_x(b.act, w.down, w.low_down, next_gain)
