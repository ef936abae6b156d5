"""Overlap of uncleaned training files with evaluation sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus import documents, filters, overlap
from hone.data.corpus.documents import Shard
from hone.data.corpus.pool import check_workers, map_in_processes
from hone.data.corpus.settings import CorpusSettings
from hone.data.corpus.shards import Overlaps, index_of
from hone.data.corpus.tally import SHOWN
from hone.errors import HoneError


@dataclass(frozen=True)
class ShardContents:
    """The overlap of one shard."""

    hits: NDArray[np.uint8]  # packed bits, one for each run of words
    documents: int  # that overlap
    read: int
    examples: dict[str, list[dict[str, Any]]]


def _scan(task: tuple[Shard, CorpusSettings]) -> ShardContents:
    shard, settings = task
    index = index_of(settings.evals, settings.eval_fields, settings.ngram, settings.short)
    overlaps, count = Overlaps(index), 0
    read = documents.read(shard, column=settings.column, split=settings.split, limit=settings.max_document)
    for batch in filters.batches(document for document in read if not document.problem):
        count += len(batch)
        texts, places = [document.text for document in batch], [document.at for document in batch]
        overlaps.look(texts, file=shard.path, places=places)
    return ShardContents(np.packbits(overlaps.hits), overlaps.documents, count, overlaps.examples)


def compare(sources: Sequence[str], settings: CorpusSettings, *, workers: int = 1) -> dict[str, Any]:
    """For every source and evaluation set, the share of items that share a run of words with a document."""
    check_workers(workers)
    if not settings.evals:
        raise HoneError("nothing to compare with: name the evaluation sets with --eval")
    index = index_of(settings.evals, settings.eval_fields, settings.ngram, settings.short)
    shards = documents.plan(sources, shard_bytes=settings.shard_bytes, split=settings.split)
    hits = {source: np.zeros(index.size, dtype=bool) for source in sources}
    examples: dict[str, list[dict[str, Any]]] = {}
    overlapping = read = 0
    results = map_in_processes(_scan, [(shard, settings) for shard in shards], workers=workers)
    for shard, contents in zip(shards, results, strict=True):
        hits[shard.source] |= np.unpackbits(contents.hits, count=index.size).astype(bool)
        overlapping, read = overlapping + contents.documents, read + contents.read
        for name, shown in contents.examples.items():
            examples[name] = [*examples.get(name, []), *shown][:SHOWN]
    if not read:
        raise HoneError(f"no document could be read from {', '.join(sources)}: name the text's column with --column")
    totals = {"ngram": settings.ngram, "documents": overlapping, "read": read}
    return {**totals, "pairs": overlap.summary(index, hits), "examples": examples}
