"""The data of the demo: sums of four digits, a corpus about them, and worked answers in different styles.

A hash of the problem itself decides which ones are held out, so that no stage can train on one, whatever its data.
Each stage's data is in files, so that anybody can look for a leak.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.demo.stages import FILES, Sizes

TERMS = 4
HELD_OUT_SHARE = 0.05
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@dataclass(frozen=True, slots=True)
class Sum:
    """The problem a + b + c + d of digits from 1 to 9; the same digits in another order are the same problem."""

    digits: tuple[int, ...]

    @property
    def expression(self) -> str:
        return "+".join(map(str, self.digits))

    @property
    def prompt(self) -> str:
        return f"What is {self.expression}?\n"

    @property
    def answer(self) -> str:
        return str(sum(self.digits))

    @property
    def key(self) -> str:
        """What the split hashes: the digits in order of size."""
        return "+".join(map(str, sorted(self.digits)))


def held_out(problem: Sum) -> bool:
    """Whether the problem belongs to the evaluation set; this depends on the problem alone."""
    first = hashlib.sha256(problem.key.encode()).digest()[:4]
    return int.from_bytes(first, "big") < HELD_OUT_SHARE * 2**32


def problems(rng: random.Random, *, evaluation: bool = False) -> Iterator[Sum]:
    """An endless stream of problems from one side of the split."""
    while True:
        problem = Sum(tuple(rng.randint(1, 9) for _ in range(TERMS)))
        if held_out(problem) == evaluation:
            yield problem


def distinct(stream: Iterator[Sum], count: int) -> list[Sum]:
    """The first `count` different problems; the order of their digits may differ."""
    found: dict[Sum, None] = {}
    while len(found) < count:
        found.setdefault(next(stream))
    return list(found)


# --- text ---


def working(problem: Sum) -> str:
    """The sum term by term: `8+3=11 11+6=17 17+2=19`."""
    total, *rest = problem.digits
    steps: list[str] = []
    for digit in rest:
        steps.append(f"{total}+{digit}={total + digit}")
        total += digit
    return " ".join(steps)


def careful(problem: Sum) -> str:
    """A worked answer: term by term, then the result."""
    return f"<think>{working(problem)}</think><answer>{problem.answer}</answer>"


def quick(problem: Sum) -> str:
    """The result at once: right in the data, but more than a small model can do in its head."""
    return f"<think></think><answer>{problem.answer}</answer>"


def untidy(problem: Sum) -> str:
    """A worked answer whose result is not in its tags."""
    return f"<think>{working(problem)}</think>{problem.answer}"


Writer = Callable[[Sum], str]
WRITERS: tuple[Writer, ...] = (careful, quick, untidy)
SHARES = (0.3, 0.6, 0.1)


def written_answer(problem: Sum, rng: random.Random) -> str:
    """An answer by one of the writers."""
    return rng.choices(WRITERS, SHARES)[0](problem)


NAMES = ("Ada", "Emmy", "Kurt", "Sofia", "Alan", "Grace")
THINGS = ("apples", "books", "coins", "stamps", "shells")


def document(rng: random.Random, stream: Iterator[Sum]) -> str:
    """One text of the corpus: an addition, a line of a story, or a problem worked in tags or in brackets."""
    kind = rng.random()
    a, b = rng.randint(1, 9 * (TERMS - 1)), rng.randint(1, 9)
    if kind < 0.1:
        return f"{a}+{b}={a + b}"
    if kind < 0.2:
        return f"{rng.choice(NAMES)} had {a} {rng.choice(THINGS)}, found {b} more, and now has {a + b}."
    problem = next(stream)
    if kind < 0.5:
        return problem.prompt + careful(problem)
    return f"{problem.prompt}({working(problem)})={problem.answer}"


def corpus(rng: random.Random, count: int) -> list[str]:
    """`count` documents that mention no held-out problem."""
    stream = problems(rng)
    return [document(rng, stream) for _ in range(count)]


# --- files ---


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problem_row(problem: Sum) -> dict[str, Any]:
    """A row for a verifier."""
    return {"prompt": problem.prompt, "answer": problem.answer, "problem": problem.key}


def make_data(folder: Path, sizes: Sizes, *, seed: int) -> None:
    """Corpus, worked answers, problems to practise on, and problems to be examined on."""
    rng = random.Random(seed)
    write_rows(folder / FILES["corpus"], ({"text": text} for text in corpus(rng, sizes.documents)))
    stream = problems(rng)
    answers = (next(stream) for _ in range(sizes.answers))
    rows = ({"prompt": p.prompt, "completion": written_answer(p, rng)} for p in answers)
    write_rows(folder / FILES["answers"], rows)
    write_rows(folder / FILES["problems"], map(problem_row, distinct(stream, sizes.problems)))
    # the examination is the same for every seed, so that seeds can be compared
    examined = distinct(problems(random.Random(0), evaluation=True), sizes.held_out)
    write_rows(folder / FILES["held_out"], map(problem_row, examined))


def make_tokenizer(folder: Path, sizes: Sizes) -> Tokenizer:
    """Byte-pair encoding of the corpus and the answers; the four tags are tokens of their own."""
    texts = [
        json.loads(line).get(column, "")
        for name, column in (("corpus", "text"), ("answers", "completion"))
        for line in (folder / FILES[name]).read_text().splitlines()
    ]
    tokenizer = train_bpe(texts, vocab_size=sizes.vocabulary)
    tokenizer.inner.add_tokens(list(TAGS))
    tokenizer = Tokenizer(tokenizer.inner, eos=tokenizer.eos, pad=tokenizer.pad)
    tokenizer.save(folder.parent / "tokenizer")
    return tokenizer
