"""The decoder's layers in C++ over the torch runner's slab and the learner's own weights.

Weights may change while it runs: what the library does not cover by then goes through torch.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hone.engine.runners.native.structs import CLayer, CModel, CTokens, linear, pointer
from hone.engine.runners.torch.invariant import InvariantLayers
from hone.engine.runners.torch.kv_cache import RowChunk, pack_tokens
from hone.engine.runners.torch.layers import Draw, TorchLayers
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.kernels.cpp.library import address, library
from hone.model.lora import Adapter, LoRALinear

SMALL = 16 << 20  # bytes of weights that stay in the cache: each thread then computes rows of its own
FEWEST_LANES = 4


def why_not_covered(decoder: Decoder) -> str:
    """Why the library cannot compute this decoder here; "" if it can."""
    numbers, size = [*decoder.model.parameters(), *decoder.lm_head.parameters(), decoder.cos], decoder.config.head_dim
    for odd, why in (
        (decoder.device.type != "cpu", f"the model is on {decoder.device}"),
        (any(x.dtype != torch.float32 for x in numbers), "numbers other than float32"),
        (not all(x.is_contiguous() for x in numbers), "weights that do not lie in one piece"),
        (size % FEWEST_LANES, f"heads of {size} dimensions"),
    ):
        if odd:
            return why
    found = library()
    if isinstance(found, str):
        return found
    return f"heads of {size} dimensions" if size % found.hone_lanes() else ""


class NativeLayers(TorchLayers):
    """A token's numbers depend on it and those before it in its row alone, to the bit; what is not covered is computed
    the fast way."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        super().__init__(decoder, rows, capacity)
        found = library()
        assert not isinstance(found, str)
        self.library = found
        self.rows = torch.arange(rows)
        self.space = torch.empty(0)
        self.model, self.found = CModel(), list[int]()
        self.adapted, self.on, self.fits = list[LoRALinear](), list[Adapter | None](), True
        self.small = sum(p.nbytes for p in decoder.parameters()) <= SMALL

    def by_column(self, config: DecoderConfig) -> bool:
        """As decode.cpp reads it."""
        found = library()
        assert not isinstance(found, str)
        return bool(found.hone_woven(ctypes.c_int64(config.num_key_value_heads), ctypes.c_int64(config.head_dim)))

    def read(self, pieces: Sequence[RowChunk]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        self.renew()
        if not self._covered():
            return super().read(pieces)
        tokens, rows, positions = pack_tokens(pieces, self.decoder.device)
        last = torch.tensor([len(p.tokens) for p in pieces]).cumsum(0) - 1
        return self._pass(tokens, rows, positions, positions, apart=False)[last]

    def step(self, tokens: Tensor, positions: Tensor, written: Tensor, *, columns: int, even: bool) -> Tensor:
        """One token for each of the first rows, into the columns `written`; hidden states [B, D]."""
        self.weights.check()
        if not self._covered():
            return super().step(tokens, positions, written, columns=columns, even=even)
        return self._pass(tokens, self.rows[: len(tokens)], positions, written, apart=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        head = self.weights.head
        assert head is not None
        if head.adapted or not self.fits or hidden.dtype != torch.float32:
            return super().logits(hidden)
        (n, width), out = hidden.shape, hidden.new_empty(len(hidden), len(head.weight))
        lanes = self.library.hone_lanes()
        space, hidden = self._space(-(-n // lanes) * lanes * width + 64), hidden.contiguous()
        self.library.hone_product(
            ctypes.byref(linear(head)), ctypes.c_int64(width), ctypes.c_int64(len(head.weight)), address(hidden),
            ctypes.c_int64(n), address(out), address(space), ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return out if self.decoder.finish is None else self.decoder.finish(out)

    def quick_draw(self) -> Draw:
        return self.draw

    def draw(self, logits: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Token and log-prob, [B] each, as engine/draw.py gives them where no setting alters the logits."""
        (n, vocab), token = logits.shape, torch.empty(len(logits), dtype=torch.int64)
        logp, space = torch.empty(n), torch.empty(n * -(-vocab // 1024), dtype=torch.float64)
        self.library.hone_draw(
            address(logits), ctypes.c_int64(n), ctypes.c_int64(vocab), address(u), address(token), address(logp),
            address(space), ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip
        return token, logp

    def _covered(self) -> bool:
        """Whether the library can read the weights and the adapters that are on, wherever they are now."""
        moved = self.found is not self.weights.places
        if moved:
            self.found = self.weights.places
            linear = [x for b in self.weights.blocks for x in (b.qkv, b.o, b.gate_up, b.down)]
            self.adapted = [adapted for layer in linear for _, adapted in layer.adapted]
        on = [x.adapter if x.enabled else None for x in self.adapted]
        if moved or on != self.on:
            self.on, self.fits = on, not why_not_covered(self.decoder)
            self.model = self._model() if self.fits else CModel()
        return self.fits

    def _pass(self, tokens: Tensor, rows: Tensor, positions: Tensor, written: Tensor, *, apart: bool) -> Tensor:
        """Hidden states [N, D] after the last norm; apart: no two tokens are of one row."""
        kept = [x.contiguous() for x in (tokens, rows, positions, written)]
        alike = (x.ctypes.data for x in (self.slab.lead, self.slab.common))
        asked = CTokens(len(tokens), *(x.data_ptr() for x in kept), apart, *alike)
        model, threads = self.model, ctypes.c_int64(torch.get_num_threads())
        model.cos, model.sin = pointer(self.decoder.cos), pointer(self.decoder.sin)  # which grow when they must
        how = (ctypes.byref(model), ctypes.byref(asked))
        small = ctypes.c_int64(self.small)
        space = self._space(self.library.hone_space(*how, threads, small))
        out = torch.empty(len(tokens), model.D)
        self.library.hone_run(*how, address(out), address(space), threads, small)
        return out

    def _space(self, numbers: int) -> Tensor:
        if len(self.space) < numbers:
            self.space = torch.zeros(numbers)
        return self.space

    def _model(self) -> CModel:
        """Where the weights and the memory are."""
        decoder, config = self.decoder, self.decoder.config
        _, rows, K, columns, E = self.slab.layers[0].shape
        layers = [
            CLayer(
                before=pointer(b.before), q_norm=pointer(b.q_norm), k_norm=pointer(b.k_norm), after=pointer(b.after),
                qkv=linear(b.qkv), o=linear(b.o), gate_up=linear(b.gate_up), down=linear(b.down),
                memory=pointer(memory), window=window,
            )
            for b, memory, window in zip(self.weights.blocks, self.slab.memory, self.windows, strict=True)
        ]  # fmt: skip
        linears = [x for layer in layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        rank = max(sum(low.rank for low in x.low[: x.lows]) for x in linears)
        return CModel(
            layers=len(layers), D=config.hidden_size, H=self.H, K=K, E=E, M=config.intermediate_size, rows=rows,
            columns=columns, rank=rank, eps=self.eps, norm=pointer(decoder.model.norm.weight),
            embedding=pointer(decoder.model.embed_tokens.weight), layer=(CLayer * len(layers))(*layers),
        )  # fmt: skip


class NativeInvariantLayers(NativeLayers, InvariantLayers):
    """What is not covered is computed a tile at a time."""
