"""Exact copies by a hash of the normalised text; near copies by MinHash signatures (rensa) cut into bands.

The first of several copies is kept. A document is dropped as a near copy only if its estimated Jaccard similarity to a
document that is kept reaches the threshold, so that a chain of small changes cannot empty a corpus.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus.words import normal_text, normal_words
from hone.errors import HoneError

SEED = 20_210_705
PART = 4_000_000  # documents sorted at once
DEEP = 16  # how many first documents of its bucket a document is compared with
CHUNK = 65_536  # pairs whose signatures are compared at once
CAUGHT = 0.995  # least probability that a pair at the threshold shares a band


def text_hash(text: str) -> bytes:
    """128 bits of the normalised text."""
    return hashlib.blake2b(normal_text(text).encode(), digest_size=16).digest()


def shingles(text: str, size: int) -> list[str]:
    """The runs of `size` normalised words; a shorter text is one run."""
    words = normal_words(text) or text.split()
    return [" ".join(words[i : i + size]) for i in range(max(1, len(words) - size + 1))]


@lru_cache(1)
def _minhash() -> Any:
    try:
        import rensa
    except ImportError as error:
        raise HoneError('near duplicates need rensa: pip install "hone[corpus]", or --near off') from error
    return getattr(rensa, "RMinHash")  # noqa: B009  the extension module has no type stubs


def signatures(texts: Iterable[str], *, shingle: int, permutations: int) -> NDArray[np.uint32]:
    """[documents, permutations]: the share of places where two rows agree estimates their Jaccard index."""
    rows: list[list[int]] = []
    for text in texts:
        minhash = _minhash()(num_perm=permutations, seed=SEED)
        minhash.update(shingles(text, shingle))
        rows.append(minhash.digest())
    return np.array(rows, dtype=np.uint32).reshape(len(rows), permutations)


def bands(threshold: float, permutations: int) -> tuple[int, int]:
    """(bands b, rows r): the longest r with 1 - (1 - threshold^r)^b >= CAUGHT, b = permutations // r.

    >>> bands(0.8, 128)
    (21, 6)
    """
    for r in range(permutations, 1, -1):
        b = permutations // r
        if 1 - (1 - threshold**r) ** b >= CAUGHT:
            return b, r
    return permutations, 1


def first_copies(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For every row of [n, 2], the index of the first equal row; sorted in parts, so that memory stays small."""
    first = np.arange(len(hashes), dtype=np.int64)
    parts = -(-len(hashes) // PART)
    for part in range(parts):
        rows = np.flatnonzero(hashes[:, 0] % np.uint64(parts) == part)
        own = np.ascontiguousarray(hashes[rows]).view([("a", np.uint64), ("b", np.uint64)]).ravel()
        _, index, inverse = np.unique(own, return_index=True, return_inverse=True)
        first[rows] = rows[index[inverse]]
    return first


def band_pairs(
    signed: NDArray[np.uint32], rows: NDArray[np.int64], *, band: int, width: int, threshold: float
) -> NDArray[np.int64]:
    """[m, 2]: pairs i < j of `rows` that agree on a band and whose signatures agree at `threshold` of all places."""
    keys = np.concatenate(
        [_band_keys(signed[rows[s : s + CHUNK], band * width : (band + 1) * width]) for s in range(0, len(rows), CHUNK)]
        or [np.empty(0, dtype=np.uint64)]
    )
    parts = max(1, -(-len(rows) // PART))
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for part in range(parts):
        own = np.flatnonzero(keys % np.uint64(parts) == part)
        order = own[np.argsort(keys[own], kind="stable")]
        for i, j in _bucket_pairs(keys[order]):
            pairs.append(_similar_pairs(signed, rows[order[i]], rows[order[j]], threshold))
    return np.concatenate(pairs)


def _band_keys(values: NDArray[np.uint32]) -> NDArray[np.uint64]:
    keys = np.zeros(len(values), dtype=np.uint64)
    for column in values.T.astype(np.uint64):
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(31)
    return keys


def _bucket_pairs(keys: NDArray[np.uint64]) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Positions (earlier, later) in sorted keys: every member of a bucket with each of its first DEEP members."""
    if not len(keys):
        return
    new = np.concatenate(([True], keys[1:] != keys[:-1]))
    start = np.flatnonzero(new)[np.cumsum(new) - 1]
    place = np.arange(len(keys))
    for depth in range(DEEP):
        later = np.flatnonzero(place - start > depth)
        if not len(later):
            return
        yield start[later] + depth, later


def _similar_pairs(
    signed: NDArray[np.uint32], first: NDArray[np.int64], second: NDArray[np.int64], threshold: float
) -> NDArray[np.int64]:
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for s in range(0, len(first), CHUNK):
        i, j = first[s : s + CHUNK], second[s : s + CHUNK]
        alike = (signed[i] == signed[j]).mean(axis=1) >= threshold
        pairs.append(np.stack((i[alike], j[alike]), axis=1))
    return np.concatenate(pairs)


def nearest_kept(pairs: Sequence[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """For every document the first kept one that it is a near copy of, else itself."""
    original = np.arange(count, dtype=np.int64)
    merged = np.unique(np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs]), axis=0)
    for i, j in merged[np.lexsort((merged[:, 0], merged[:, 1]))].tolist():
        if original[j] == j and original[i] == i:
            original[j] = i
    return original
