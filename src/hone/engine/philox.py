"""Random numbers that belong to a request: numpy's Philox4x64-10 keyed (seed, request), for many requests at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# the constants of Philox4x64 (Salmon et al. 2011), as [2, 1]: one entry for each of the two products of a round
MULTIPLIER = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
ROUNDS = 10
WORDS = 4  # doubles made by one block
AHEAD = 64  # doubles a row of Streams holds, a multiple of WORDS

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LOW_MULTIPLIER, _HIGH_MULTIPLIER = MULTIPLIER & _LOW, MULTIPLIER >> _HALF

Words = NDArray[np.uint64]


def _high_product(x: Words) -> Words:
    """The upper 64 bits of MULTIPLIER * x, [2, N], from products of 32 bits."""
    low, high = x & _LOW, x >> _HALF
    middle = _HIGH_MULTIPLIER * low + (_LOW_MULTIPLIER * low >> _HALF)
    other = _LOW_MULTIPLIER * high + (middle & _LOW)
    return _HIGH_MULTIPLIER * high + (middle >> _HALF) + (other >> _HALF)


def _block(key: Words, counter: Words) -> Words:
    """[4, N] words for keys [2, N] and counters [N] below 2**64."""
    even, odd = np.zeros_like(key), np.zeros_like(key)  # words 0 and 2, words 1 and 3
    even[0] = counter
    for round in range(ROUNDS):
        low = MULTIPLIER * even
        even, odd = _high_product(even)[::-1] ^ odd ^ (key + WEYL * np.uint64(round)), low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _words(x: ArrayLike) -> Words:
    return np.atleast_1d(np.asarray(x, dtype=np.uint64))


def uniforms(seeds: ArrayLike, requests: ArrayLike, start: ArrayLike, count: int) -> NDArray[np.float64]:
    """float64 [count, B] in [0, 1): column b has doubles start[b] to start[b] + count - 1 of (seeds[b], requests[b]).

    Generator(Philox(key=[seed, request])).random(start + count)[start:], to the bit.
    """
    seed, request, first = np.broadcast_arrays(_words(seeds), _words(requests), _words(start))
    blocks = (count + 2 * WORDS - 2) // WORDS  # enough wherever in a block the first double is
    # numpy's first block has counter 1
    counter = first // np.uint64(WORDS) + np.arange(1, blocks + 1, dtype=np.uint64)[:, None]  # [blocks, B]
    key = np.tile(np.stack([seed, request]), (1, blocks))
    words = _block(key, counter.ravel()).reshape(WORDS, blocks, -1)
    flat = words.transpose(1, 0, 2).reshape(blocks * WORDS, -1)
    offset = (first % np.uint64(WORDS)).astype(np.int64)
    if offset.any():
        flat = np.take_along_axis(flat, offset + np.arange(count)[:, None], axis=0)
    return (flat[:count] >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Streams:
    """A stream for each row of a batch; every row goes at its own pace, and doubles are made AHEAD at a time."""

    def __init__(self, rows: int) -> None:
        self.key = np.zeros((2, rows), dtype=np.uint64)
        self.count = np.zeros(rows, dtype=np.int64)  # doubles a row has drawn
        self._first = np.full(rows, -AHEAD)  # which double the row's table begins with
        self._table = np.zeros((rows, AHEAD))

    def seat(self, row: int, seed: int, request: int, count: int = 0) -> None:
        """The row goes on with double `count` of (seed, request)."""
        self.key[:, row] = seed, request
        self.count[row], self._first[row] = count, -AHEAD

    def move(self, a: int, b: int) -> None:
        """Row b goes on as row a did."""
        for x in (self.count, self._first, self._table):
            x[b] = x[a]
        self.key[:, b] = self.key[:, a]

    def next(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [n]: the next double of each of these rows, which are distinct."""
        at = self.count[rows] - self._first[rows]
        if (at >= AHEAD).any():
            # the half-empty ones too: making doubles costs the same for one row as for many
            self._fill(rows[at >= AHEAD // 2])
            at = self.count[rows] - self._first[rows]
        self.count[rows] += 1
        return self._table[rows, at]

    def _fill(self, rows: NDArray[np.int64]) -> None:
        first = self.count[rows] // WORDS * WORDS
        self._first[rows] = first
        self._table[rows] = uniforms(self.key[0, rows], self.key[1, rows], first, AHEAD).T
