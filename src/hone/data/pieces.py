"""Texts of many rows at once, where a tokenizer's decoding is no more than its tokens joined."""

import json
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import tokenizers


@lru_cache(maxsize=1)
def byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as a character: printable ones as they are, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Pieces:
    """What each id adds to a text, and what stands between two of them: bytes and nothing, or words and a blank.

    A third of the library's time, on one core: it reads an id as a Python object and makes a string of each token.
    """

    def __init__(self, pieces: Sequence[bytes] | Sequence[str], joint: bytes | str) -> None:
        self.table, self.joint = np.array(pieces, dtype=object), joint

    def texts(self, rows: Sequence["array[int]"]) -> list[str] | None:
        """The text of each row; None where an id is beyond them."""
        ids = np.concatenate(rows)
        if ids.max(initial=0) >= len(self.table):
            return None
        found = self.table[ids].tolist()
        ends = pairwise(accumulate(map(len, rows), initial=0))
        joined = [self.joint.join(found[start:end]) for start, end in ends]
        return [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in joined]


def pieces_of(inner: tokenizers.Tokenizer, size: int) -> Pieces | None:
    """Those of ids below `size`; None of a tokenizer that does more to its tokens than to join them."""
    names, decoder = [inner.id_to_token(i) for i in range(size)], json.loads(inner.to_str()).get("decoder")
    if decoder is not None and decoder["type"] == "ByteLevel":
        return Pieces([_bytes(name or "") for name in names], b"")
    words = [name for name in names if name is not None]
    # an id that is no token would have no blank beside it
    return Pieces(words, " ") if decoder is None and len(words) == size else None


def _bytes(name: str) -> bytes:
    table = byte_of()
    return bytes(table[c] for c in name) if all(c in table for c in name) else name.encode()
