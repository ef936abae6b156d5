"""A layer for many prompt tokens: products by cuBLAS, which is faster there, norms and gate by their own kernels."""

# Triton's constexpr takes plain numbers:
# pyright: reportArgumentType=false, reportCallIssue=false
from collections.abc import Callable

import torch
from torch import Tensor

from hone.engine.runners.cuda.step import Launcher
from hone.engine.runners.cuda.weights import LayerTensors
from hone.model.kernels import elementwise
from hone.model.kernels.fused_weights import LowRank
from hone.model.kernels.tiles import cdiv

TOKENS = 1_536  # from which it is faster


def large_layer(launcher: Launcher, w: LayerTensors, attend: Callable[[], None]) -> None:
    """x += out(attention(norm(x))); x += down(silu(gate) * up)"""
    b, n, M = launcher.buffers, launcher.rows, launcher.config.intermediate_size
    x, normed, wide, act = b.x[:n], b.scaled[:n], b.wide[:n], b.act[:n]
    _norm(launcher, w.gain)
    _product(normed, w.qkv, w.qkv_bias, w.low_qkv, b.qkv[:n])
    attend()
    _add(b.mixed[:n], w.out, w.low_out, x)
    _norm(launcher, w.mlp_gain)
    _product(normed, w.gate_up, None, w.low_gate_up, wide)
    elementwise.gate[(n, cdiv(M, 1024))](wide, act, M, BM=1024)
    _add(act, w.down, w.low_down, x)


def _norm(launcher: Launcher, gain: Tensor) -> None:
    """scaled = rms_norm(x)"""
    b, n = launcher.buffers, launcher.rows
    elementwise.launch_norm(b.x[:n], gain, b.scaled[:n], launcher.config.rms_norm_eps)


def _product(a: Tensor, weight: Tensor, bias: Tensor | None, adapters: list[LowRank], y: Tensor) -> None:
    """y = a W^T + bias, with its adapters"""
    if bias is None:
        torch.mm(a, weight.t(), out=y)
    else:
        torch.addmm(bias, a, weight.t(), out=y)
    for low in adapters:
        y[:, low.at : low.at + len(low.B)].addmm_(a @ low.A.t(), low.B.t(), alpha=low.scale)


def _add(a: Tensor, weight: Tensor, adapters: list[LowRank], x: Tensor) -> None:
    """x += a W^T, with its adapters"""
    x.addmm_(a, weight.t())
    for low in adapters:
        x.addmm_(a @ low.A.t(), low.B.t(), alpha=low.scale)
