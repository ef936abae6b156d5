"""Texts as words: the normal form in which texts are compared, and hashes of runs of words."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WORD = re.compile(r"\w+")
ODD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def normal_words(text: str) -> list[str]:
    """Letters and digits only, one case, one form of every character.

    >>> normal_words("The  King's “fool”, No. 2!")
    ['the', 'king', 's', 'fool', 'no', '2']
    """
    return WORD.findall(text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold())


def normal_text(text: str) -> str:
    """One case, one form of every character, single spaces; punctuation stays."""
    text = text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.split())


def word_numbers(words: Sequence[str]) -> NDArray[np.uint64]:
    """Equal words get equal numbers, by first appearance."""
    numbers: dict[str, int] = {}
    return np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), dtype=np.uint64, count=len(words))


def run_hashes(numbers: NDArray[np.uint64], n: int, *, seed: int = 0) -> NDArray[np.uint64]:
    """For every run of n numbers, sum_k mix(x_k) m^k modulo 2^64."""
    count = len(numbers) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    mixed = (numbers + np.uint64(1 + seed)) * np.uint64(ODD)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    total = mixed[:count].copy()
    for k in range(1, n):
        total = total * np.uint64(ODD) + mixed[k : k + count]
    return total
