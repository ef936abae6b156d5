"""Which language a text is in, by py3langid: a model of 4 MB inside the package, nothing is fetched."""

from functools import lru_cache
from typing import Any

from hone.errors import HoneError

SLICE = 300  # characters at the beginning, middle and end: enough, and the time does not grow with the text


@lru_cache(1)
def _identifier() -> Any:
    try:
        from py3langid import langid
    except ImportError as error:
        raise HoneError(
            'the language filter needs py3langid: pip install "hone[corpus]", or --languages off'
        ) from error
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def languages() -> frozenset[str]:
    """The codes of the languages that the model knows (mostly ISO 639-1)."""
    return frozenset(map(str, _identifier().nb_classes))


def sample(text: str) -> str:
    """The whole text, or three slices of it.

    >>> len(sample("x" * 10_000))
    902
    """
    if len(text) <= 3 * SLICE:
        return text
    middle = (len(text) - SLICE) // 2
    return "\n".join((text[:SLICE], text[middle : middle + SLICE], text[-SLICE:]))


def identify(text: str) -> tuple[str, float]:
    """The most probable language and its probability."""
    code, probability = _identifier().classify(sample(text))
    return str(code), float(probability)
