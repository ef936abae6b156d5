"""Cleaning from end to end: filter every shard, find copies among all, write what is kept, train a tokenizer, report.

Every stage writes its results under other names and renames them. A run that is killed at any moment can therefore be
continued, and ends with the same files. The number of workers changes only the time.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus import documents, duplicates, language
from hone.data.corpus.atomic import atomic_write, locked, read_json, write_json
from hone.data.corpus.pool import WorkerKilled, check_workers, map_in_processes
from hone.data.corpus.report import build_report, show
from hone.data.corpus.run import CorpusRun, begin, check_packages, discard
from hone.data.corpus.settings import CorpusSettings
from hone.data.corpus.shards import EXACT, KEPT, NEAR, filter_shard, finish_shard, index_of
from hone.data.corpus.tally import Tally
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError

Say = Callable[[str], None]
READABLE = {  # the remedy for each fault of a record
    "no_text": "name its column with --column",
    "empty": "name another column with --column",
    "not_json": "write one JSON object a line, or call the file .txt",
    "not_utf8": "save it as UTF-8",
    "too_long": "cut it into documents, as with --split line of a .txt file",
}


def silent(message: str) -> None:
    """Report no progress."""


def clean(
    sources: Sequence[str],
    out: str | Path,
    settings: CorpusSettings | None = None,
    *,
    workers: int = 1,
    restart: bool = False,
    say: Say = silent,
) -> dict[str, Any]:
    """Clean the sources; returns the report. Kept documents are in out/data/part-*.jsonl, in the order of the input."""
    settings, folder = settings or CorpusSettings(), Path(out)
    _check(sources, settings, workers)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    with locked(folder):
        resumed = (folder / "manifest.json").exists()
        try:
            run = begin(folder, sources, settings, restart=restart, say=say)
            return _finish(run, workers=workers, say=say)
        except HoneError as error:
            if resumed or isinstance(error, WorkerKilled):
                raise
            discard(folder)
            for path in created:
                path.rmdir()
            raise


def _finish(run: CorpusRun, *, workers: int, say: Say) -> dict[str, Any]:
    """Run the stages that are left; returns the report, whose file is written last."""
    finished = run.folder / "report.json"
    if not finished.exists():
        _stages(run, workers=workers, say=say)
        report = build_report(run)
        run.publish()
        with atomic_write(run.folder / "report.txt") as file:
            file.write(show(report).encode())
        write_json(finished, report)
    if run.work.exists():  # not before the report exists, which is built from these files
        shutil.rmtree(run.work)
    return read_json(finished)


def _check(sources: Sequence[str], settings: CorpusSettings, workers: int) -> None:
    """Refuse wrong arguments before anything is written."""
    check_packages(settings)
    if not sources:
        raise HoneError("nothing to clean: name at least one file or folder")
    check_workers(workers)
    if settings.languages and (strange := sorted(set(settings.languages) - language.languages())):
        raise HoneError(f"no language {strange[0]!r}: choose from {', '.join(sorted(language.languages()))}")
    if settings.evals:
        index_of(settings.evals, settings.eval_fields, settings.ngram, settings.short)
    documents.plan(sources, shard_bytes=settings.shard_bytes, split=settings.split)


def _stages(run: CorpusRun, *, workers: int, say: Say) -> None:
    _over_shards(run, filter_shard, done=".json", workers=workers, say=partial(_say_shards, say, "filter"))
    _refuse_unreadable(run)
    if not (run.work / "verdict.npy").exists():
        say("copies: compare")
        _find_copies(run, workers=workers)
    _over_shards(run, finish_shard, done=".kept.json", workers=workers, say=partial(_say_shards, say, "write"))
    if run.settings.vocab is not None and not (run.folder / "tokenizer").exists():
        say("tokenizer: train")
        _train_tokenizer(run)


def _say_shards(say: Say, stage: str, done: int, total: int) -> None:
    say(f"{stage}: {done} of {total} shards")


def _over_shards(
    run: CorpusRun,
    work: Callable[[tuple[str, str, int]], None],
    *,
    done: str,
    workers: int,
    say: Callable[[int, int], None],
) -> None:
    total = len(run.shards)
    open_ones = [i for i in range(total) if not run.file(i, done).exists()]
    tasks = [(str(run.folder), run.hash, i) for i in open_ones]
    for count, _ in enumerate(map_in_processes(work, tasks, workers=workers), start=1):
        say(total - len(open_ones) + count, total)


def _refuse_unreadable(run: CorpusRun) -> None:
    """Refuse a source with no readable record: its settings are wrong."""
    for source in run.sources:
        counts = [read_json(run.file(i, ".json")) for i, shard in enumerate(run.shards) if shard.source == source]
        seen = sum(c["documents"] for c in counts)
        reasons = {r: n[0] for c in counts for r, n in c["dropped"].items() if r.startswith("unreadable:")}
        bad = sum(n[0] for c in counts for r, n in c["dropped"].items() if r.startswith("unreadable:"))
        if seen and bad == seen:
            why = ", ".join(reason.removeprefix("unreadable:").replace("_", " ") for reason in sorted(reasons))
            most = max(reasons, key=lambda reason: reasons[reason]).removeprefix("unreadable:")
            raise HoneError(f"no record of {source} can be read ({why}): {READABLE.get(most, 'check what is in it')}")


def _concatenate(run: CorpusRun, ending: str) -> NDArray[Any]:
    """Concatenate the arrays of all shards on disk, [documents, ...]."""
    parts = [np.load(run.file(i, ending), mmap_mode="r") for i in range(len(run.shards))]
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    path = run.work / f"all{ending}"
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
        )
        for part in parts:
            file.write(np.ascontiguousarray(part).tobytes())
    return np.load(path, mmap_mode="r" if shape[0] else None)


def _find_copies(run: CorpusRun, *, workers: int) -> None:
    """Write verdict.npy, [documents, 2]: the kind of copy that each document is, and the index of its original."""
    settings, count, tally = run.settings, sum(run.counts), Tally()
    verdict = np.full((count, 2), KEPT, dtype=np.int64)
    size = sum(_passed_bytes(run, i) for i in range(len(run.shards)))
    if settings.exact and count:
        with tally.timed("exact", 0):
            first = duplicates.first_copies(_concatenate(run, ".hashes.npy"))
            copies = np.flatnonzero(first != np.arange(count))
            verdict[copies] = np.stack((np.full(len(copies), EXACT), first[copies]), axis=1)
    if settings.near is not None and count:
        _concatenate(run, ".signed.npy")
        rows = np.flatnonzero(verdict[:, 0] == KEPT)
        with atomic_write(run.work / "rows.npy") as file:
            np.save(file, rows)
        number, width = duplicates.bands(settings.near, settings.permutations)
        tasks = [(str(run.work), band, width, settings.near) for band in range(number)]
        bands = list(map_in_processes(_band, tasks, workers=workers))
        tally.steps["near"] = [0, sum(seconds for _, seconds in bands)]
        with tally.timed("near", 0):
            original = duplicates.nearest_kept([pairs for pairs, _ in bands], count)
        copies = np.flatnonzero(original != np.arange(count))
        verdict[copies] = np.stack((np.full(len(copies), NEAR), original[copies]), axis=1)
    write_json(run.work / "copies.json", {**tally.plain(), "compared": size})
    with atomic_write(run.work / "verdict.npy") as file:
        np.save(file, verdict)


def _passed_bytes(run: CorpusRun, shard: int) -> int:
    counts = read_json(run.file(shard, ".json"))
    return counts["bytes"] - sum(n[1] for n in counts["dropped"].values())


def _band(task: tuple[str, int, int, float]) -> tuple[NDArray[np.int64], float]:
    folder, band, width, threshold = task
    tally = Tally()
    with tally.timed("near", 0):
        signed = np.load(Path(folder) / "all.signed.npy", mmap_mode="r")
        rows = np.load(Path(folder) / "rows.npy")
        pairs = duplicates.band_pairs(signed, rows, band=band, width=width, threshold=threshold)
    return pairs, tally.steps["near"][1]


def kept_texts(run: CorpusRun) -> Iterator[str]:
    """The texts in the output, in order."""
    for i in range(len(run.shards)):
        with open(run.part(i), "rb") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def _train_tokenizer(run: CorpusRun) -> None:
    """Train on a sample by hash, which does not depend on the order of texts or the number of workers."""
    total = sum(len(text.encode()) for text in kept_texts(run))
    share = min(1.0, run.settings.bpe_bytes / max(1, total))
    texts = (text for text in kept_texts(run) if share == 1.0 or _chance(text) < share)
    tokenizer = train_bpe(texts, vocab_size=run.settings.vocab or 0)
    part = run.work / "tokenizer"
    shutil.rmtree(part, ignore_errors=True)
    tokenizer.save(part)
    part.rename(run.folder / "tokenizer")


def _chance(text: str) -> float:
    """A number in [0, 1) by the hash of the text."""
    return int.from_bytes(duplicates.text_hash(text)[:8], "little") / 2**64
