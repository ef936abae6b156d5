"""How offensive a text is, by alt-profanity-check: a linear model on words, English, inside the package."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hone.errors import HoneError

WINDOW = 100  # words: the model was trained on comments, and a long text would drown a foul passage


@lru_cache(1)
def _model() -> Any:
    try:
        from profanity_check import predict_prob
    except ImportError as error:
        remedy = 'pip install "hone[corpus]", or --toxicity off'
        raise HoneError(f"the toxicity filter needs alt-profanity-check: {remedy}") from error
    return predict_prob


def windows(text: str) -> list[str]:
    """Runs of WINDOW words; the last one may be shorter."""
    words = text.split()
    return [" ".join(words[i : i + WINDOW]) for i in range(0, len(words), WINDOW)] or [""]


def scores(texts: Sequence[str]) -> list[float]:
    """The mean probability over a text's windows that a reader would call the window offensive."""
    cut = [windows(text) for text in texts]
    if not cut:
        return []
    found = np.asarray(_model()([window for part in cut for window in part]), dtype=np.float64)
    ends = np.cumsum([len(part) for part in cut])
    return [float(part.mean()) for part in np.split(found, ends[:-1])]
