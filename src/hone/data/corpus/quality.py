"""The quality rules: each is a number measured on a text, and a limit. If a limit is from a paper, the rule names it:
Gopher is Rae et al. 2021, table A1 and appendix A.1.1; C4 is Raffel et al. 2020, section 2.2."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.data.corpus.words import normal_words, run_hashes, word_numbers

LETTERS, DIGITS = re.compile(r"[^\W\d_]+"), re.compile(r"\d+")
BULLETS = tuple("•‣\u2043◦▪●○■□\u2013-*·")
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))


class Runs(NamedTuple):
    """The distinct runs of n words in a text."""

    number: int  # of all runs
    first: NDArray[np.int64]  # where each distinct run first occurs
    counts: NDArray[np.int64]  # how often each occurs


@dataclass(frozen=True)
class Facts:
    """Facts of a text that rules share. Each is computed once, when a rule first needs it."""

    text: str
    language: str = ""  # "": not determined

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [stripped for line in self.text.splitlines() if (stripped := line.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [stripped for part in re.split(r"\n[ \t\r]*\n", self.text) if (stripped := part.strip())]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.words), dtype=np.int64, count=len(self.words))

    @cached_property
    def chars(self) -> int:
        """Characters that are not white space, at least 1."""
        return max(1, int(self.lengths.sum()))

    @cached_property
    def numbers(self) -> NDArray[np.uint64]:
        return word_numbers(self.words)

    @cached_property
    def _runs(self) -> dict[int, Runs | None]:
        return {}

    def runs(self, n: int) -> Runs | None:
        """The runs of n words; None where none occurs twice."""
        if n not in self._runs:
            # What does not repeat with n - 1 words cannot repeat with n.
            alone = n - 1 in self._runs and self._runs[n - 1] is None
            keys = run_hashes(self.numbers, n) if not alone else np.empty(0, dtype=np.uint64)
            _, first, counts = np.unique(keys, return_index=True, return_counts=True)
            self._runs[n] = None if len(counts) == len(keys) else Runs(len(keys), first, counts)
        return self._runs[n]

    @cached_property
    def letters(self) -> int:
        return sum(map(len, LETTERS.findall(self.text)))

    @cached_property
    def digits(self) -> int:
        return sum(map(len, DIGITS.findall(self.text)))


@dataclass(frozen=True)
class Rule:
    name: str  # min_...: dropped below the limit; max_...: dropped above it
    limit: float | None  # None: off unless asked for
    measure: Callable[[Facts], float]
    about: str


def _mean_word(facts: Facts) -> float:
    return facts.chars / max(1, len(facts.words))


def _symbols(facts: Facts) -> float:
    text = facts.text
    return (text.count("#") + text.count("…") + text.count("...")) / max(1, len(facts.words))


def _alphabetic(facts: Facts) -> float:
    return sum(1 for word in facts.words if word.isalpha() or LETTERS.search(word)) / max(1, len(facts.words))


def _stop_words(facts: Facts) -> float:
    """The number of different stop words; a text in another language than English passes."""
    return len(STOP_WORDS.intersection(normal_words(facts.text))) if facts.language in ("", "en") else len(STOP_WORDS)


def _line_share(facts: Facts, *, starts: tuple[str, ...] = (), ends: tuple[str, ...] = ()) -> float:
    count = sum(1 for line in facts.lines if line.startswith(starts) or line.endswith(ends))
    return count / max(1, len(facts.lines))


def _copied(parts: list[str], *, by_chars: bool) -> float:
    """The share of parts (or of their characters) that repeat an earlier part."""
    seen: set[str] = set()
    total = copied = 0
    for part in parts:
        weight = len(part) if by_chars else 1
        total += weight
        copied += weight if part in seen else 0
        seen.add(part)
    return copied / max(1, total)


def top_share(facts: Facts, n: int) -> float:
    """Characters of the most frequent run of n words, times its count, over all; 0 where no run occurs twice."""
    runs = facts.runs(n)
    if runs is None:
        return 0.0
    most = int(runs.counts.max())
    sums = np.concatenate(([0], np.cumsum(facts.lengths)))
    starts = runs.first[runs.counts == most]
    return min(1.0, most * int((sums[starts + n] - sums[starts]).max()) / facts.chars)


def repeated_share(facts: Facts, n: int) -> float:
    """The share of characters in runs of n words that occurred before in the text, each counted once."""
    runs = facts.runs(n)
    if runs is None:
        return 0.0
    again = np.ones(runs.number, dtype=bool)
    again[runs.first] = False
    edges = np.zeros(len(facts.words) + 1, dtype=np.int64)
    edges[: len(again)] += again
    edges[n : n + len(again)] -= again
    return int(facts.lengths[np.cumsum(edges[:-1]) > 0].sum()) / facts.chars


RULES: tuple[Rule, ...] = (
    Rule("min_words", 50, lambda f: len(f.words), "words (Gopher)"),
    Rule("max_words", 100_000, lambda f: len(f.words), "words (Gopher)"),
    Rule("min_mean_word", 3, _mean_word, "characters a word (Gopher)"),
    Rule("max_mean_word", 10, _mean_word, "characters a word (Gopher)"),
    Rule("max_longest_word", 1000, lambda f: max(map(len, f.words), default=0), "characters of the longest word (C4)"),
    Rule("max_symbols", 0.1, _symbols, "hash signs and ellipses a word (Gopher)"),
    Rule("max_digits", 0.2, lambda f: f.digits / f.chars, "digits, share of the characters"),
    Rule("max_marks", 0.25, lambda f: 1 - (f.letters + f.digits) / f.chars, "neither letters nor digits, share"),
    Rule("min_alphabetic", 0.8, _alphabetic, "words with a letter, share (Gopher)"),
    Rule("min_stop_words", 2, _stop_words, "of 8 English stop words, how many occur (Gopher)"),
    Rule("max_bullets", 0.9, partial(_line_share, starts=BULLETS), "lines that start with a bullet, share (Gopher)"),
    Rule("max_ellipses", 0.3, partial(_line_share, ends=("…", "...")), "lines that end in an ellipsis, share (Gopher)"),
    Rule(
        "max_braces", None, lambda f: f.text.count("{"), "curly brackets (C4 allows none; off, for it drops all code)"
    ),
    Rule("max_lorem_ipsum", 0, lambda f: f.text.lower().count("lorem ipsum"), "filler text (C4)"),
    Rule("max_copied_lines", 0.3, lambda f: _copied(f.lines, by_chars=False), "repeated lines, share (Gopher)"),
    Rule("max_copied_line_chars", 0.2, lambda f: _copied(f.lines, by_chars=True), "their characters, share (Gopher)"),
    Rule("max_copied_paragraphs", 0.3, lambda f: _copied(f.paragraphs, by_chars=False), "repeated paragraphs (Gopher)"),
    Rule("max_copied_paragraph_chars", 0.2, lambda f: _copied(f.paragraphs, by_chars=True), "their share (Gopher)"),
    *(
        Rule(f"max_top_{n}_gram", limit, partial(top_share, n=n), f"most frequent {n}-gram, share (Gopher)")
        for n, limit in ((2, 0.20), (3, 0.18), (4, 0.16))
    ),
    *(
        Rule(f"max_repeated_{n}_grams", limit, partial(repeated_share, n=n), f"repeated {n}-grams, share (Gopher)")
        for n, limit in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    ),
)


def broken(facts: Facts, limits: Mapping[str, float | None]) -> tuple[str, float] | None:
    """The first rule that the text breaks, and the measured value."""
    for rule in RULES:
        limit = limits.get(rule.name, rule.limit)
        if limit is None:
            continue
        value = rule.measure(facts)
        if value < limit if rule.name.startswith("min_") else value > limit:
            return rule.name, value
    return None
