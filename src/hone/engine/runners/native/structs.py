"""What decode.cpp and product.cpp read, as ctypes: where weights, adapters, memory and tokens are."""

import ctypes

from torch import Tensor

from hone.engine.runners.torch.layers import Linear
from hone.model.lora import Adapter


class CLow(ctypes.Structure):
    """As in product.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("A", "B")),
        *((name, ctypes.c_int64) for name in ("rank", "at", "outputs")),
        ("scale", ctypes.c_double),
    ]


class CLinear(ctypes.Structure):
    """As in product.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("low", ctypes.POINTER(CLow)),
        ("lows", ctypes.c_int64),
    ]


class CLayer(ctypes.Structure):
    """As in decode.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("before", "q_norm", "k_norm", "after")),
        *((name, CLinear) for name in ("qkv", "o", "gate_up", "down")),
        ("memory", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    ]


class CModel(ctypes.Structure):
    """As in decode.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "D", "H", "K", "E", "M", "rows", "columns", "rank")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("embedding", "cos", "sin", "norm")),
        ("layer", ctypes.POINTER(CLayer)),
    ]


class CTokens(ctypes.Structure):
    """As in decode.cpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("id", "row", "position", "column")),
        ("apart", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("lead", "common")),
    ]


def pointer(x: Tensor | None) -> int | None:
    """Where its numbers begin, for a field."""
    assert x is None or x.is_contiguous()
    return None if x is None else x.data_ptr()


def linear(layer: Linear) -> CLinear:
    """The layer, and its adapters that are on."""
    found = [(at, x.adapter) for at, x in layer.adapted if x.enabled]
    on = [low(adapter, at) for at, adapter in found if adapter is not None]
    return CLinear(pointer(layer.weight), pointer(layer.bias), (CLow * len(on))(*on), len(on))


def low(adapter: Adapter, at: int) -> CLow:
    """The adapter, whose outputs begin at `at`."""
    A, B = adapter.lora_A, adapter.lora_B
    return CLow(pointer(A), pointer(B), len(A), at, len(B), adapter.scale)
