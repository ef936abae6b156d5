"""Each rule drops the junk it is for, at its limit and not before; the shares are those of a slow count."""

import random
from collections import Counter

import pytest
from each import each
from prose import prose

from hone.data.corpus.quality import RULES, Facts, broken, repeated_share, top_share

GOOD = prose(0)
LINES = GOOD.split("\n")
ONE = prose(1, 12)


def spread(text: str, word: str, every: int) -> str:
    return " ".join(f"{w} {word}" if i % every == 0 else w for i, w in enumerate(text.split()))


JUNK = {
    "min_words": " ".join(GOOD.split()[:49]),
    "max_words": prose(3, 100_001),
    "min_mean_word": " ".join("a to of be it"[i % 13 :][:2] for i in range(60)),
    "max_mean_word": " ".join(f"{w}extraordinarily" for w in GOOD.split()),
    "max_longest_word": prose(4, 3000) + " " + "x" * 1001,
    "max_symbols": spread(GOOD, "#", 8),
    "max_digits": spread(GOOD, "1234567", 3),
    "max_marks": GOOD.replace(" ", " (--) "),
    "min_alphabetic": spread(GOOD, "42", 3),
    "min_stop_words": " ".join(w for w in prose(5, 400).split() if len(w) > 5),
    "max_bullets": "\n".join(f"- {line}" for line in LINES),
    "max_ellipses": "\n".join(f"{line[:-1]}..." if i % 2 else line for i, line in enumerate(LINES)),
    "max_braces": f"{GOOD} {{",
    "max_lorem_ipsum": f"{GOOD} Lorem ipsum dolor.",
    "max_copied_lines": "\n".join([*prose(6, 240).split("\n"), *["Read more here."] * 12]),
    "max_copied_line_chars": "\n".join([*LINES, *LINES[:4]]),
    "max_copied_paragraphs": "\n\n".join([*prose(7, 360).split("\n"), *["A\nb."] * 16]),
    "max_copied_paragraph_chars": f"{GOOD}\n\n{ONE}\nx\n\n{GOOD}",
    **{f"max_top_{n}_gram": spread(GOOD, "always remember this one", 4) for n in (2, 3, 4)},
    **{f"max_repeated_{n}_grams": f"{GOOD} and then {GOOD}" for n in range(5, 11)},
}


def only(name: str, limit: float | None = None) -> dict[str, float | None]:
    return {r.name: ((r.limit if limit is None else limit) if r.name == name else None) for r in RULES}


def test_good_text_breaks_no_rule():
    for seed in range(200):
        assert broken(Facts(prose(seed)), {}) is None


@each("name", [rule.name for rule in RULES])
def test_every_rule_drops_its_junk_and_keeps_good_text(name):
    limits = only(name, 0 if name == "max_braces" else None)
    found = broken(Facts(JUNK[name]), limits)
    assert found is not None
    assert found[0] == name
    assert broken(Facts(GOOD), limits) is None
    assert broken(Facts(JUNK[name]), {rule.name: None for rule in RULES}) is None  # switched off


@each("rule", RULES, ids=lambda rule: rule.name)
def test_the_limit_itself_is_allowed(rule):
    value = rule.measure(Facts(JUNK[rule.name]))
    assert broken(Facts(JUNK[rule.name]), only(rule.name, value)) is None
    past = value + 1e-9 if rule.name.startswith("min_") else value - 1e-9
    assert broken(Facts(JUNK[rule.name]), only(rule.name, past)) == (rule.name, value)


def measured(name: str, text: str) -> float:
    return next(rule for rule in RULES if rule.name == name).measure(Facts(text))


def test_the_measures_by_hand():
    text = "one #two … 3 four...\n- five\n* six...\n\nsix…"  # 9 words: one #two … 3 four... - five * six... six…
    assert measured("min_words", text) == 10
    assert measured("max_mean_word", text) == pytest.approx((3 + 4 + 1 + 1 + 7 + 1 + 4 + 1 + 6 + 4) / 10)
    assert measured("max_symbols", text) == pytest.approx((1 + 2 + 2) / 10)  # one hash, two …, two ...
    assert measured("max_digits", text) == pytest.approx(1 / 32)
    assert measured("max_marks", text) == pytest.approx(1 - (3 + 3 + 4 + 4 + 3 + 3 + 1) / 32)
    assert measured("min_alphabetic", text) == pytest.approx(6 / 10)
    assert measured("max_bullets", text) == 2 / 4
    assert measured("max_ellipses", text) == 3 / 4
    assert measured("max_longest_word", text) == 7


def test_stop_words_are_asked_of_english_only():
    text = "kein Wort davon " * 20
    assert broken(Facts(text), only("min_stop_words")) == ("min_stop_words", 0)
    assert broken(Facts(text, "en"), only("min_stop_words")) == ("min_stop_words", 0)
    assert broken(Facts(text, "de"), only("min_stop_words")) is None


def test_copied_lines_by_hand():
    # four lines, one repeats an earlier one: 1 of 4; characters 3 of 3 + 3 + 2 + 4
    assert measured("max_copied_lines", "abc\nabc\nde\nfghi") == 1 / 4
    assert measured("max_copied_line_chars", "abc\nabc\nde\nfghi") == 3 / 12
    assert measured("max_copied_paragraphs", "a\nb\n\nc\n\na\nb") == 1 / 3


def slow_repeated(words: list[str], n: int) -> float:
    seen, covered = set(), set()
    for i in range(len(words) - n + 1):
        run = tuple(words[i : i + n])
        covered |= set(range(i, i + n)) if run in seen else set()
        seen.add(run)
    return sum(len(words[i]) for i in covered) / max(1, sum(map(len, words)))


def slow_top(words: list[str], n: int) -> float:
    counts = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    most = max(counts.values(), default=0)
    longest = max((sum(map(len, run)) for run, count in counts.items() if count == most), default=0)
    return min(1.0, most * longest / max(1, sum(map(len, words)))) if most > 1 else 0.0


def test_shares_of_repeated_runs_equal_a_slow_count():
    for seed in range(60):
        draw = random.Random(seed)
        words = draw.choices(["a", "bb", "ccc", "dddd", "e" * 9], k=draw.randrange(0, 60))
        words += words[: draw.randrange(0, 20)]
        facts = Facts(" ".join(words))
        for n in draw.sample(range(2, 11), 9):  # in any order: what is known of n - 1 must not mislead
            assert repeated_share(facts, n) == pytest.approx(slow_repeated(words, n))
            assert top_share(facts, n) == pytest.approx(slow_top(words, n))


@each("text", ["", " ", "\n\n", "word", "\x00" * 5, "日本語" * 100, "🙂" * 1000])
def test_odd_texts_are_measured_without_error(text):
    for rule in RULES:
        assert rule.measure(Facts(text)) >= 0


def test_a_text_of_ten_megabytes_is_measured():
    assert broken(Facts("word " * 2_000_000), {}) == ("max_words", 2_000_000)
