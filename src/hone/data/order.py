"""Orders that a run is saved under: the same for ever, whatever the version of numpy."""

import numpy as np


def bits(n: int, *key: int) -> np.ndarray:
    """n random 64-bit numbers of a key; numpy promises raw bits for every version, but not its permutations."""
    return np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)


def permutation(n: int, *key: int) -> list[int]:
    """0..n-1 in the order of the key's random bits.

    >>> sorted(permutation(5, 1, 2)) == [0, 1, 2, 3, 4]
    True
    """
    return np.argsort(bits(n, *key), kind="stable").tolist()
