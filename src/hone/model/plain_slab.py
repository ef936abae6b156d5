"""Keys and values of the rows being decoded, allocated once: a row is its own block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.model.config import DecoderConfig


class Slab:
    """A tensor a layer, [rows, capacity + 1, 2, K, E]: keys, then values; the last column takes what nobody reads."""

    def __init__(self, config: DecoderConfig, rows: int, capacity: int, *, like: Tensor) -> None:
        shape = (rows, capacity + 1, 2, config.num_key_value_heads, config.head_dim)
        self.capacity = capacity
        self.layers = [like.new_zeros(shape) for _ in range(config.num_hidden_layers)]
        self._flat = [x.view(rows * (capacity + 1), -1) for x in self.layers]

    def slots(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Where `write` puts the columns of the rows."""
        return rows * (self.capacity + 1) + columns

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Keys and values side by side, [N, 2 K E], one line a slot."""
        self._flat[layer].index_copy_(0, slots, kv)

    def read(self, layer: int, rows: slice | Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first columns of some rows, [B, K, columns, E] both."""
        kv = self.layers[layer][:, :columns][rows]
        return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first columns of a row into other rows."""
        where = torch.tensor([t for t in targets if t != source], device=self.layers[0].device)
        if not columns or not len(where):
            return
        for x in self.layers:
            x[where, :columns] = x[source, :columns]

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(x.nbytes for x in self.layers)
