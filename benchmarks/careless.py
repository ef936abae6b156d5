"""A task whose steps can be checked one by one: letters are looked up in a table, by a writer who slips.

"d? k? a?=" is answered by "dQ kB aM": each letter with the one that the table gives. The writer of the training data
takes another one in a tenth to three tenths of the cases, always the same for a letter, and one slip spoils the answer.
"""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import ascii_lowercase

from hone.data.text.tokenizer import train_bpe

LETTERS = ascii_lowercase[:24]
COUNT = 8  # letters of a problem
TOKENS = 3 * COUNT + 4  # of an answer, and some more
SLIPS = 0.1, 0.3


class World:
    """A table, and how often each of its entries is slipped on."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        answers = [c.upper() for c in LETTERS]
        rng.shuffle(answers)
        self.right = dict(zip(LETTERS, answers, strict=True))
        self.wrong = {c: rng.choice([a for a in answers if a != self.right[c]]) for c in LETTERS}
        self.slip = {c: rng.uniform(*SLIPS) for c in LETTERS}
        self.rng = rng

    def problem(self) -> str:
        return "".join(self.rng.choice(LETTERS) for _ in range(COUNT))

    def asked(self, problem: str) -> dict[str, str]:
        """A row for a verifier."""
        return {"prompt": _prompt(problem), "answer": " ".join(c + self.right[c] for c in problem)}

    def written(self, problem: str) -> dict[str, str]:
        """A row to learn from: the careless writer's."""
        letters = [self.wrong[c] if self.rng.random() < self.slip[c] else self.right[c] for c in problem]
        return {"prompt": _prompt(problem), "completion": " ".join(map("".join, zip(problem, letters, strict=True)))}

    def write(self, folder: Path, *, answers: int, problems: int, held_out: int) -> None:
        """answers.jsonl, problems.jsonl, held_out.jsonl and a tokenizer of bytes."""
        folder.mkdir(parents=True)
        _write(folder / "answers.jsonl", (self.written(self.problem()) for _ in range(answers)))
        _write(folder / "problems.jsonl", (self.asked(self.problem()) for _ in range(problems)))
        _write(folder / "held_out.jsonl", (self.asked(self.problem()) for _ in range(held_out)))
        train_bpe([], vocab_size=258).save(folder / "tokenizer")


def _prompt(problem: str) -> str:
    return " ".join(f"{c}?" for c in problem) + "="


def _write(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
