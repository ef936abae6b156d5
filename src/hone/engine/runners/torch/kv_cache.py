"""Keys and values of the rows being decoded, allocated once: a row is its own block."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hone.model.config import DecoderConfig


class Slab:
    """A tensor a layer, [2, rows, K, columns, E]: keys, values.

    by_column: the heads of a column are neighbours in memory, not the columns of a head.
    """

    def __init__(
        self, config: DecoderConfig, rows: int, columns: int, *, like: Tensor, by_column: bool = False
    ) -> None:
        K, E = config.num_key_value_heads, config.head_dim
        shape = (2, rows, columns, K, E) if by_column else (2, rows, K, columns, E)
        self.memory = [_zeros(shape, like) for _ in range(config.num_hidden_layers)]
        self.layers = [x.transpose(2, 3) for x in self.memory] if by_column else self.memory
        self._lines = [x.view(-1, E) for x in self.memory]
        self._step, head = (K, 1) if by_column else (1, columns)  # lines from a column, and a head, to the next
        row = torch.arange(rows)[:, None, None] + rows * torch.arange(2)[:, None]  # of keys, of values
        self._first = (row * K * columns + torch.arange(K) * head).flatten(1).to(like.device)  # [rows, 2 K]
        self.lead = np.arange(rows)  # [rows] another row with the same first columns, where it may read them
        self.common = np.zeros(rows, dtype=np.int64)  # [rows] how many

    def slots(self, rows: slice | Tensor, columns: Tensor) -> Tensor:
        """Where `write` puts a token: a line for each head's key, and for its value, [N 2 K]."""
        return (self._first[rows] + self._step * columns[:, None]).flatten()

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Keys and values of N tokens, [N, 2 K, E]."""
        self._lines[layer].index_copy_(0, slots, kv.reshape(len(slots), -1))

    def read(self, layer: int, rows: slice | Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first columns of some rows, [B, K, columns, E] both."""
        k, v = self.layers[layer][:, :, :, :columns][:, rows]
        return k, v

    def heads(self, layer: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The same of the first rows, a head a matrix: [B K, columns, E] both; no number copied but `by_column`."""
        x = self.layers[layer][:, :rows, :, :columns].flatten(1, 2)
        return x[0], x[1]

    def copy(self, source: int, targets: Sequence[int], columns: int) -> None:
        """The first columns of a row into other rows."""
        others = [t for t in targets if t != source]
        if not columns or not others:
            return
        for rows in _runs(others):
            for x in self.layers:
                x[:, rows, :, :columns] = x[:, source : source + 1, :, :columns]
        self.written([(row, 0) for row in others])
        shared = min(self.common[source], columns)  # a copy of a copy leads to the first one
        self.lead[others], self.common[others] = (self.lead[source], shared) if shared else (source, columns)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero all that the rows hold: a weight of 0 does not hide a number that is not finite."""
        for x in self.layers:
            x[:, list(rows)] = 0
        self.written([(row, 0) for row in rows])

    def written(self, starts: Sequence[tuple[int, int]]) -> None:
        """Columns of rows from some column on are others now: no row reads them in place of its own any more."""
        first = np.full(len(self.lead), np.iinfo(np.int64).max)
        for row, start in starts:
            first[row] = min(first[row], start)
        alone = (self.common > first) | (self.common > first[self.lead])
        self.lead[alone], self.common[alone] = np.flatnonzero(alone), 0

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.layers)


def _runs(rows: Iterable[int]) -> list[slice]:
    """Rows as stretches of neighbours, which are written faster than rows by number."""
    found: list[slice] = []
    for r in sorted(rows):
        if found and found[-1].stop == r:
            found[-1] = slice(found[-1].start, r + 1)
        else:
            found.append(slice(r, r + 1))
    return found


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """On a CPU numpy's zeros, whose memory is taken when it is first written: long contexts are seldom filled."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = like.element_size() * int(np.prod(shape))
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)
