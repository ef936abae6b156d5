"""The filters of single documents: unreadable records, language, quality, toxicity."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hone.data.corpus import language, quality
from hone.data.corpus.documents import Document
from hone.data.corpus.quality import Facts
from hone.data.corpus.settings import CorpusSettings
from hone.data.corpus.tally import Tally
from hone.errors import HoneError

WINDOW = 100  # words that the toxicity model reads at once: it was trained on comments
BATCH_DOCUMENTS, BATCH_BYTES = 512, 4 << 20
Judged = tuple[Facts, str, str]  # facts of a text, the rule that drops it ("": none), the measured value


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches of documents that are small enough for memory."""
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += document.size
        if len(batch) >= BATCH_DOCUMENTS or held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def by_language(facts: Sequence[Facts], settings: CorpusSettings) -> Iterator[Judged]:
    """Keep documents in one of the languages, with enough confidence."""
    for fact in facts:
        code, probability = language.identify(fact.text)
        fits = code in settings.languages and probability >= settings.confidence
        yield Facts(fact.text, code), "" if fits else "language", f"{code} {probability:.2f}"


def by_quality(facts: Sequence[Facts], settings: CorpusSettings) -> Iterator[Judged]:
    """Keep documents that break no rule."""
    for fact in facts:
        broken = quality.broken(fact, settings.rules)
        yield fact, f"quality:{broken[0]}" if broken else "", f"{broken[1]:.4g}" if broken else ""


def by_toxicity(facts: Sequence[Facts], settings: CorpusSettings) -> Iterator[Judged]:
    """Keep documents whose mean probability is at most the limit."""
    limit = 1.0 if settings.toxicity is None else settings.toxicity
    for fact, score in zip(facts, toxicity([fact.text for fact in facts]), strict=True):
        yield fact, "toxicity" if score > limit else "", f"{score:.3f}"


@lru_cache(1)
def _toxicity_model() -> Any:
    """The linear model on English words that is inside of the package alt-profanity-check."""
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


def toxicity(texts: Sequence[str]) -> list[float]:
    """The mean probability over a text's windows that a reader would call the window offensive."""
    cut = [windows(text) for text in texts]
    if not cut:
        return []
    probabilities = np.asarray(_toxicity_model()([window for part in cut for window in part]), dtype=np.float64)
    ends = np.cumsum([len(part) for part in cut])
    return [float(part.mean()) for part in np.split(probabilities, ends[:-1])]


def judge(batch: Sequence[Document], settings: CorpusSettings, *, tally: Tally, file: str) -> list[Document]:
    """The documents that pass every step; the others are counted under the first rule they break."""
    for document in batch:
        if document.problem:
            place = {"file": file, "at": document.at, "text": document.text}
            tally.drop(f"unreadable:{document.problem}", document.size, **place)
    kept = [document for document in batch if not document.problem]
    facts = [Facts(document.text) for document in kept]
    steps = (
        ("language", by_language, bool(settings.languages)),
        ("quality", by_quality, any(limit is not None for limit in settings.rules.values())),
        ("toxicity", by_toxicity, settings.toxicity is not None),
    )
    for name, step, on in steps:
        if not on:
            continue
        with tally.timed(name, sum(document.size for document in kept)):
            judged = list(zip(kept, step(facts, settings), strict=True))
        for document, (_, rule, measured) in judged:
            if rule:
                place = {"file": file, "at": document.at, "measured": measured, "text": document.text}
                tally.drop(rule, document.size, **place)
        passed = [(document, fact) for document, (fact, rule, _) in judged if not rule]
        kept, facts = [document for document, _ in passed], [fact for _, fact in passed]
    return kept
