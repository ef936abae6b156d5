"""Runs of words that training documents share with evaluation items. Hashes find candidates, words decide."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus.words import normal_words, run_hashes
from hone.data.feed import registry
from hone.data.feed.row_store import RowStore
from hone.data.feed.source import read_rows
from hone.errors import HoneError, not_utf8
from hone.storage.textfile import read_text

MOSTLY = 0.8  # an item counts as mostly seen from this share of its runs on


@dataclass(frozen=True)
class NgramIndex:
    """The distinct runs of one length: their words as numbers, and a table to find them by."""

    length: int
    first: int  # the number of the first run among the runs of all lengths
    numbers: NDArray[np.uint64]  # [runs, length]
    seed: int

    @cached_property
    def table(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        keys = _keys(self.numbers, self.seed)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def find(self, numbers: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(places in the text, runs found there); number 0 is a word that no evaluation item has."""
        keys, order = self.table
        hashes = run_hashes(numbers, self.length, seed=self.seed)
        at = np.searchsorted(keys, hashes)
        places = np.flatnonzero((at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == hashes))
        runs = order[at[places]]
        text = numbers[places[:, None] + np.arange(self.length)]
        equal = (text == self.numbers[runs]).all(axis=1)
        return places[equal], runs[equal] + self.first


@dataclass(frozen=True)
class Index:
    """Every run of every evaluation item."""

    names: tuple[str, ...]  # evaluation sets
    vocabulary: Mapping[str, int]
    lengths: tuple[NgramIndex, ...]
    item_of: NDArray[np.int64]  # [links]  item
    run_of: NDArray[np.int64]  # [links]  a run of it
    set_of: NDArray[np.int64]  # [items]  evaluation set
    row_of: NDArray[np.int64]  # [items]  row in the set, from 1

    @property
    def size(self) -> int:
        """The number of distinct runs."""
        return sum(len(runs.numbers) for runs in self.lengths)

    def find(self, texts: Sequence[str]) -> dict[int, list[tuple[int, str]]]:
        """For every text that holds any: the runs in it, with their words."""
        words: list[str] = []
        starts: list[int] = []
        for text in texts:
            starts.append(len(words))
            words += normal_words(text)
            words.append("")  # no item has this word, so that no run crosses into the next text
        numbers = np.fromiter((self.vocabulary.get(w, 0) for w in words), dtype=np.uint64, count=len(words))
        held: dict[int, list[tuple[int, str]]] = {}
        for runs in self.lengths:
            places, found = runs.find(numbers)
            for place, run in zip(places.tolist(), found.tolist(), strict=True):
                which = bisect_right(starts, place) - 1
                held.setdefault(which, []).append((run, " ".join(words[place : place + runs.length])))
        return held

    @cached_property
    def first_item(self) -> NDArray[np.int64]:
        """[runs]  the first item that has it"""
        first = np.full(self.size, len(self.set_of), dtype=np.int64)
        np.minimum.at(first, self.run_of, self.item_of)
        return first


def _keys(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    length = numbers.shape[1]
    return run_hashes(numbers.ravel(), length, seed=seed)[::length]


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a row, however deep it lies."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_of(inner)


def named_set(name: str) -> RowStore | None:
    """The dataset of that name (its test split where it has one, or name:split), if there is one."""
    entry = registry.DATASETS.get(name)
    return registry.find(f"{name}:test" if entry and "test" in entry.files else name, chat=False)


def read_items(path: str, fields: Sequence[str] = ()) -> list[list[str]]:
    """The texts of every item: the rows of a JSON file (their `fields`, or every text), or the lines of a text file."""
    store = named_set(path)
    if store is None and not Path(path).is_file():
        raise HoneError(f"there is no evaluation set {path}: give a .jsonl, .json or .txt file, or a name like gsm8k")
    if path.endswith(".txt"):
        try:
            lines = read_text(Path(path)).split("\n")
        except UnicodeDecodeError as error:
            raise not_utf8(path, error) from error
        return [[line] for line in lines if line.strip()]
    rows = [read.row for read in store.place.read() if not read.problem] if store else read_rows(path)
    for number, row in enumerate(rows, start=1):
        missing = [name for name in fields if name not in row]
        if missing:
            raise HoneError(f'{path} row {number} has no column "{missing[0]}": name another with --eval-field')
    return [list(texts_of([row[name] for name in fields] if fields else row)) for row in rows]


def build(sets: Mapping[str, Sequence[Sequence[str]]], *, n: int, short: int) -> Index:
    """Runs of n words of every text; a text of `short` to n words is one run, a shorter one cannot be looked for."""
    vocabulary: dict[str, int] = {}
    linked: dict[int, dict[tuple[int, ...], list[int]]] = {}  # length -> run -> items
    set_of: list[int] = []
    row_of: list[int] = []
    for which, items in enumerate(sets.values()):
        for row, texts in enumerate(items, start=1):
            for run in {run for text in texts for run in _runs_of(text, vocabulary, n=n, short=short)}:
                linked.setdefault(len(run), {}).setdefault(run, []).append(len(set_of))
            set_of.append(which)
            row_of.append(row)
    lengths: list[NgramIndex] = []
    links: list[tuple[int, int]] = []
    first = 0
    for length in sorted(linked):
        runs = sorted(linked[length])
        links += [(item, first + k) for k, run in enumerate(runs) for item in linked[length][run]]
        lengths.append(_without_collisions(length, first, np.array(runs, dtype=np.uint64)))
        first += len(runs)
    pairs = np.array(sorted(links), dtype=np.int64).reshape(-1, 2)
    return Index(
        names=tuple(sets),
        vocabulary=vocabulary,
        lengths=tuple(lengths),
        item_of=pairs[:, 0],
        run_of=pairs[:, 1],
        set_of=np.array(set_of, dtype=np.int64),
        row_of=np.array(row_of, dtype=np.int64),
    )


def _runs_of(text: str, vocabulary: dict[str, int], *, n: int, short: int) -> Iterator[tuple[int, ...]]:
    numbers = [vocabulary.setdefault(word, len(vocabulary) + 1) for word in normal_words(text)]
    if len(numbers) < min(n, short):
        return
    length = min(n, len(numbers))
    for i in range(len(numbers) - length + 1):
        yield tuple(numbers[i : i + length])


def _without_collisions(length: int, first: int, numbers: NDArray[np.uint64]) -> NgramIndex:
    """The table with a seed under which no two runs share a hash, so that a look-up misses none."""
    for seed in range(64):
        if len(np.unique(_keys(numbers, seed))) == len(numbers):
            return NgramIndex(length, first, numbers, seed)
    raise RuntimeError(f"no seed tells {len(numbers)} runs of {length} words apart")


def summary(index: Index, hits: Mapping[str, NDArray[np.bool_]]) -> list[dict[str, Any]]:
    """One row for every training source and evaluation set."""
    items = len(index.set_of)
    runs = np.bincount(index.item_of, minlength=items)
    rows: list[dict[str, Any]] = []
    for source, hit in hits.items():
        runs_found = np.bincount(index.item_of, weights=hit[index.run_of], minlength=items)
        for which, name in enumerate(index.names):
            own = index.set_of == which
            tested = int((own & (runs > 0)).sum())
            touched = int((own & (runs_found > 0)).sum())
            mostly = int((own & (runs > 0) & (runs_found >= MOSTLY * runs)).sum())
            row = {"source": source, "eval": name, "items": int(own.sum()), "tested": tested, "overlap": touched}
            rows.append({**row, "mostly": mostly, "share": touched / tested if tested else 0.0})
    return rows
