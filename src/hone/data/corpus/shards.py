"""The two passes over a shard: filter it, then write what is kept. Each leaves its files whole, the count file last."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus import documents, duplicates, filters, overlap
from hone.data.corpus.atomic import atomic_write, write_json
from hone.data.corpus.documents import Document, Shard
from hone.data.corpus.run import CorpusRun, load
from hone.data.corpus.settings import CorpusSettings
from hone.data.corpus.tally import SHOWN, Tally
from hone.errors import HoneError

Task = tuple[str, str, int]  # folder, hash of the settings, shard
KEPT, EXACT, NEAR = -1, 0, 1


def filter_shard(task: Task) -> None:
    """Documents that pass go to N.jsonl, their hashes, places and signatures to N.*.npy, the counts to N.json."""
    run = load(Path(task[0]), task[1])
    number, shard, settings = task[2], run.shards[task[2]], run.settings
    tally, hashes, places = Tally(), list[bytes](), list[int]()
    signed = [np.empty((0, settings.permutations), dtype=np.uint32)]
    with atomic_write(run.file(number, ".jsonl")) as file:
        for batch in filters.batches(read(shard, settings, tally)):
            kept = filters.judge(batch, settings, tally=tally, file=shard.path)
            own, signs = _sketches(kept, settings, tally)
            hashes += own
            signed.append(signs)
            places += [document.at for document in kept]
            for document in kept:
                file.write(_line({"text": document.text, "at": document.at, "size": document.size}))
    _save(run.file(number, ".hashes.npy"), np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2))
    _save(run.file(number, ".places.npy"), np.array(places, dtype=np.int64))
    _save(run.file(number, ".signed.npy"), np.concatenate(signed))
    write_json(run.file(number, ".json"), {**tally.plain(), "passed": len(places), "source": shard.source})


def read(shard: Shard, settings: CorpusSettings, tally: Tally) -> Iterator[Document]:
    """The shard's documents, counted; the first bad one is an error if the settings are strict."""
    records = documents.read(shard, column=settings.column, split=settings.split, limit=settings.max_document)
    while True:
        with tally.timed("read", 0):
            document = next(records, None)
        if document is None:
            return
        tally.add_document(document.size)
        tally.steps["read"][0] += document.size
        if document.problem and settings.strict:
            why = document.problem.replace("_", " ")
            raise HoneError(f"{shard.path} byte {document.at}: the record is {why}: repair it, or leave out --strict")
        yield document


def _sketches(kept: list[Document], settings: CorpusSettings, tally: Tally) -> tuple[list[bytes], NDArray[np.uint32]]:
    """Hashes and signatures, by which copies are found; empty for a step that is off."""
    size = sum(document.size for document in kept)
    hashes: list[bytes] = []
    signed = np.empty((0, settings.permutations), dtype=np.uint32)
    if settings.exact:
        with tally.timed("exact", size):
            hashes = [duplicates.text_hash(document.text) for document in kept]
    if settings.near is not None:
        with tally.timed("near", size):
            texts = (document.text for document in kept)
            signed = duplicates.signatures(texts, shingle=settings.shingle, permutations=settings.permutations)
    return hashes, signed


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


def _save(path: Path, values: Any) -> None:
    with atomic_write(path) as file:
        np.save(file, values, allow_pickle=False)


@lru_cache(1)
def index_of(evals: tuple[str, ...], fields: tuple[str, ...], n: int, short: int) -> overlap.Index:
    """The index of the evaluation sets, built once in a process."""
    return overlap.build({name: overlap.read_items(name, fields) for name in evals}, n=n, short=short)


def _index(settings: CorpusSettings) -> overlap.Index | None:
    if not settings.evals:
        return None
    return index_of(settings.evals, settings.eval_fields, settings.ngram, settings.short)


class Overlaps:
    """The runs of evaluation sets that occur in the documents of one shard."""

    def __init__(self, index: overlap.Index | None) -> None:
        self.index = index
        self.hits = np.zeros(index.size if index else 0, dtype=bool)
        self.documents = 0
        self.examples: dict[str, list[dict[str, Any]]] = {}

    def look(self, texts: Sequence[str], *, file: str, places: Sequence[int]) -> dict[int, str]:
        """For every text that overlaps, the first run that it shares with an item of an evaluation set."""
        runs_by_text = self.index.find(texts) if self.index else {}
        self.documents += len(runs_by_text)
        for which in sorted(runs_by_text):
            for run, words in runs_by_text[which]:
                self.hits[run] = True
                self._show(run, {"file": file, "at": places[which], "words": words})
        return {which: runs[0][1] for which, runs in runs_by_text.items()}

    def _show(self, run: int, place: dict[str, Any]) -> None:
        assert self.index is not None
        item = self.index.first_item[run]
        row = int(self.index.row_of[item])
        shown = self.examples.setdefault(self.index.names[self.index.set_of[item]], [])
        if len(shown) < SHOWN and all(example["row"] != row for example in shown):
            shown.append({"row": row, **place})


def finish_shard(task: Task) -> None:
    """Drop the copies of verdict.npy and, if the settings say so, texts that overlap; counts go to N.kept.json."""
    run = load(Path(task[0]), task[1])
    number, shard, settings = task[2], run.shards[task[2]], run.settings
    base = sum(run.counts[:number])
    verdict = np.load(run.work / "verdict.npy", mmap_mode="r" if sum(run.counts) else None)[
        base : base + run.counts[number]
    ]
    tally, found, kept = Tally(), Overlaps(_index(settings)), [0, 0]
    with atomic_write(run.part(number)) as file:
        for rows in _row_batches(run.file(number, ".jsonl"), verdict):
            left = list(_without_copies(rows, run, shard=shard, tally=tally))
            with tally.timed("overlap", sum(row["size"] for row in left) if settings.evals else 0):
                texts, places = [row["text"] for row in left], [row["at"] for row in left]
                shared = found.look(texts, file=shard.path, places=places)
            if settings.drop_overlap:
                left = list(_without_shared(left, shared, shard=shard, tally=tally))
            kept = [kept[0] + len(left), kept[1] + sum(row["size"] for row in left)]
            where = {"source": shard.source, "file": shard.path}
            file.writelines(_line({"text": row["text"], **where, "at": row["at"]}) for row in left)
    _save(run.file(number, ".hits.npy"), np.packbits(found.hits))
    overlaps = {"documents": found.documents, "examples": found.examples}
    write_json(run.file(number, ".kept.json"), {**tally.plain(), "kept": kept, "overlap": overlaps})


def _row_batches(path: Path, verdict: NDArray[np.int64]) -> Iterator[list[dict[str, Any]]]:
    """The rows of a filtered shard in batches, each row with its kind of copy and its original."""
    with open(path, "rb") as lines:
        rows: list[dict[str, Any]] = []
        held = 0
        for line, (kind, original) in zip(lines, verdict.tolist(), strict=True):
            rows.append({**json.loads(line), "kind": kind, "original": original})
            held += len(line)
            if held >= filters.BATCH_BYTES or len(rows) >= filters.BATCH_DOCUMENTS:
                yield rows
                rows, held = [], 0
        if rows:
            yield rows


def _without_copies(
    rows: Sequence[dict[str, Any]], run: CorpusRun, *, shard: Shard, tally: Tally
) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row["kind"] == KEPT:
            yield row
            continue
        rule = "duplicate:exact" if row["kind"] == EXACT else "duplicate:near"
        few = tally.dropped.get(rule, [0])[0] < SHOWN
        place = {"file": shard.path, "at": row["at"], "text": row["text"]}
        tally.drop(rule, row["size"], measured=f"copy of {_place(run, row['original'])}" if few else "", **place)


def _without_shared(
    rows: Sequence[dict[str, Any]], shared: Mapping[int, str], *, shard: Shard, tally: Tally
) -> Iterator[dict[str, Any]]:
    for which, row in enumerate(rows):
        if which not in shared:
            yield row
            continue
        place = {"file": shard.path, "at": row["at"], "text": row["text"]}
        tally.drop("overlap", row["size"], measured=shared[which], **place)


def _place(run: CorpusRun, document: int) -> str:
    """FILE byte AT of a document, by its number among those that passed the filters."""
    ends = np.cumsum(run.counts)
    shard = int(np.searchsorted(ends, document, side="right"))
    places = np.load(run.file(shard, ".places.npy"), mmap_mode="r")
    return f"{run.shards[shard].path} byte {places[document - (ends[shard] - run.counts[shard])]}"
