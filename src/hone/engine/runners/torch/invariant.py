"""Layers whose numbers for a token depend on that token and those before it alone, to the bit.

Every product has the same shape, TILE tokens, and each token of a tile goes through the same arithmetic wherever it
stands in it; the attention goes over blocks of BLOCK columns, and one that a token does not see leaves its sums as
they are. How a prompt was cut, and what else is in the batch, changes neither. The number of threads may: it belongs
to the machine, and is not to be changed between two runs that are compared.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.engine.runners.torch.kv_cache import RowChunk, Slab, pack_tokens, visible
from hone.engine.runners.torch.layers import TorchLayers, product
from hone.model.decoder import Decoder

TILE = 16  # tokens: the lanes of the widest registers
BLOCK = 64  # columns
ONE_THREAD = 32_767  # numbers that torch does not share out among threads
LANES = 64  # numbers in the widest unrolled loop: what is left over goes through other code

EMPTY = -1e30  # a maximum below every score, and finite, so that nothing less itself is NaN


class InvariantLayers(TorchLayers):
    """One tile at a time, through every layer."""

    def __init__(self, decoder: Decoder, rows: int, capacity: int) -> None:
        super().__init__(decoder, rows, capacity)
        self.alike = dict[tuple[object, ...], bool]()  # by kind of weight: the places of a tile agree to the bit

    def columns(self, needed: int) -> int:
        return -(-needed // BLOCK) * BLOCK

    def read(self, pieces: Sequence[RowChunk]) -> Tensor:
        """Put the pieces into memory; the hidden state after each, [pieces, D]."""
        self.renew()
        tokens, rows, positions = pack_tokens(pieces, self.decoder.device)
        hidden = self._tiles(tokens, rows, positions, positions)
        last = torch.tensor([len(p.tokens) for p in pieces]).cumsum(0) - 1
        return hidden[last.to(hidden.device)]

    def step(self, tokens: Tensor, positions: Tensor, written: Tensor, *, columns: int, even: bool) -> Tensor:
        """One token for each of the first rows, into the columns `written`; hidden states [B, D]."""
        self.weights.check()
        return self._tiles(tokens, torch.arange(len(tokens), device=tokens.device), positions, written)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V]"""
        return torch.cat([super(InvariantLayers, self).logits(tile)[:n] for n, tile in tiles(hidden)])

    def _tiles(self, tokens: Tensor, rows: Tensor, positions: Tensor, written: Tensor) -> Tensor:
        scratch = self.slab.layers[0].shape[3] - 1
        found = list[Tensor]()
        for n, tile in tiles(torch.stack([tokens, rows, positions, written], 1)):
            tile[n:, 3] = scratch
            at = tile[:, 2].contiguous()
            attend = BlockAttention(self.slab, self.windows, tile[:, 1], at)
            x = self._run(tile[:, 0], at, self.slab.slots(tile[:, 1], tile[:, 3]), attend)
            found.append(self.norm(x, self.decoder.model.norm.weight)[:n])
        return torch.cat(found)

    def silu(self, x: Tensor) -> Tensor:
        return calm(F.silu, x)

    def product(self, weight: Tensor, x: Tensor, *, rows: bool = False) -> Tensor:
        """x W^T, every row in one piece"""
        x = x.contiguous()
        kind = (weight.shape, weight.stride(), weight.dtype)
        if kind not in self.alike:
            self.alike[kind] = places_agree(weight)
        if self.alike[kind]:
            return product(weight, x).contiguous()
        return torch.cat([product(weight, row) for row in x.split(1)])

    def add_product(self, x: Tensor, weight: Tensor, a: Tensor) -> None:
        """x += a W^T"""
        x += self.product(weight, a)


class BlockAttention:
    """Each token of a tile looks at the columns of its row up to its own, a block at a time."""

    def __init__(self, slab: Slab, windows: Sequence[int], rows: Tensor, positions: Tensor) -> None:
        self.slab, self.windows, self.rows = slab, windows, rows
        self.blocks = int(positions.max()) // BLOCK + 1
        exact = slab.layers[0].dtype == torch.float64
        self.dtype = torch.float64 if exact else torch.float32
        self.masks = {w: visible(positions, self.blocks * BLOCK, w, self.dtype)[:, None] for w in set(windows)}

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Queries [TILE, H, E], keys and values in the slab already -> [TILE, H E]."""
        N, H, E = q.shape
        memory = self.slab.layers[layer]
        wide = q.to(self.dtype).reshape(N * memory.shape[2], -1, E)
        top = wide.new_full((*wide.shape[:2], 1), EMPTY)
        total, out = torch.zeros_like(top), torch.zeros_like(wide)
        for b in range(self.blocks):
            columns = slice(b * BLOCK, (b + 1) * BLOCK)
            k, v = memory[:, :, :, columns].index_select(1, self.rows).to(self.dtype).flatten(1, 2)
            scores = torch.bmm(wide, k.mT).mul_(E**-0.5)
            scores.view(N, H, BLOCK).add_(self.masks[self.windows[layer]][..., columns])
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            fade = calm(torch.exp, (top - higher).expand_as(scores).contiguous())[..., :1]
            weight = calm(torch.exp, scores.sub_(higher))
            total = total.mul_(fade).add_(weight.sum(-1, keepdim=True))
            out = out.mul_(fade).add_(torch.bmm(weight, v))
            top = higher
        return out.div_(total).to(q.dtype).view(N, H * E)


def tiles(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Rows in tiles, the last one filled up with zeros, and how many of each count."""
    for part in x.split(TILE):
        tile = x.new_zeros(TILE, *x.shape[1:])
        tile[: len(part)] = part
        yield len(part), tile


def calm_rows(size: int) -> int:
    """Rows of so many numbers that may be worked on together, each as if it were alone."""
    return 1 if size % LANES else max(1, ONE_THREAD // size)


def calm(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f of each number of x [N, ...], so cut that none is left over at the end of a loop or of a thread's share."""
    at_once = calm_rows(x[0].numel())
    if len(x) <= at_once:
        return f(x)
    return torch.cat([f(part) for part in x.split(at_once)])


def places_agree(weight: Tensor) -> bool:
    """Whether this machine computes x W^T of a tile in the same way at each place of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TILE, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    straight = product(weight, x)
    return all(bool((product(weight, x.roll(n, 0)).roll(-n, 0) == straight).all()) for n in range(1, TILE))
