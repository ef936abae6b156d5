"""The task of benchmarks/credit.py: what is asked, what is right, and how often its writer slips."""

import json
from pathlib import Path

from benchmarks.careless import COUNT, LETTERS, SLIPS, World


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_tables_and_the_writers_are_nearly(tmp_path: Path) -> None:
    world = World(3)
    world.write(tmp_path / "data", answers=4_000, problems=50, held_out=50)
    for row in (*rows(tmp_path / "data" / "problems.jsonl"), *rows(tmp_path / "data" / "held_out.jsonl")):
        asked = row["prompt"].removesuffix("=").replace("?", "").split()
        assert len(asked) == COUNT
        assert row["answer"] == " ".join(c + world.right[c] for c in asked)
    written = [pair for row in rows(tmp_path / "data" / "answers.jsonl") for pair in row["completion"].split()]
    slipped = {c: [pair[1] for pair in written if pair[0] == c and pair[1] != world.right[c]] for c in LETTERS}
    assert all(set(found) == {world.wrong[c]} for c, found in slipped.items())  # always the same
    share = len([x for found in slipped.values() for x in found]) / len(written)
    assert SLIPS[0] < share < SLIPS[1]


def test_a_seed_is_a_table() -> None:
    assert World(1).right == World(1).right
    assert World(1).right != World(2).right
