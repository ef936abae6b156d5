"""What each algorithm is, part by part, in definitions.txt: a part lost or taken for another is seen here even where no
number of a test happens to depend on it."""

import ast
from pathlib import Path
from typing import Any

import torch
from each import each
from written import written

from hone.algo import ALGORITHMS

torch.set_num_threads(1)

TEXT = (Path(__file__).parent / "definitions.txt").read_text(encoding="utf-8")
BLOCKS = [block.splitlines() for block in TEXT.strip().split("\n\n")]


def value_of(text: str) -> Any:
    """0.1 and None as Python reads them; the rest are words."""
    return ast.literal_eval(text) if text[0].isdigit() or text in ("True", "False", "None") else text


@each(("head", "lines"), [(b[0], b[1:]) for b in BLOCKS])
def test_an_algorithm_is_its_definition(head: str, lines: list[str]) -> None:
    name, *settings = head.split()
    made = ALGORITHMS[name](**{key: value_of(text) for key, text in (setting.split("=") for setting in settings)})
    assert made.name == name
    assert written(made) == dict(line.strip().split(": ", 1) for line in lines)


def test_every_algorithm_is_defined_with_its_defaults() -> None:
    assert sorted(b[0] for b in BLOCKS if " " not in b[0]) == sorted(ALGORITHMS)
