"""`algo=FILE.py:function` on the command line: an algorithm of one's own, as rewards are given."""

import json
from pathlib import Path

import pytest
from each import each
from small import World, arguments, recipe

from hone.checkpoint.record import recorded_recipe
from hone.cli import main
from hone.config.overrides import Choice, override
from hone.config.recipe import plan
from hone.config.rules import validate
from hone.errors import HoneError
from hone.launch.build import algorithm

FILE = '''\
"""Algorithms of one's own."""

import torch

from hone import algo


def w_reinforce(right=0.1, wrong: float | None = None):
    def credit(batch):
        of_row = torch.where(batch.reward > 0.5, right, -1.0 if wrong is None else wrong)
        return torch.where(batch.mask, of_row[:, None], 0.0)

    def loss(forward, batch):
        return -batch.adv * forward.logp

    return algo.Algorithm(name="w_reinforce", credit=credit, loss=((1.0, loss),), online=True, on_policy=True)


def same(clip: float = 0.2):
    return algo.grpo(beta=0.0, clip=clip)


def pairs():
    return algo.dpo(beta=0.3)


def needs(size):
    return algo.grpo(beta=size)


def three():
    return 3
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(FILE)
    return str(path)


def metrics(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def command(world: World, made: object, *settings: str) -> list[str]:
    """The command line of the recipe, its algorithm replaced by what the settings say."""
    return [*(a for a in arguments(made, world) if not a.startswith("algo")), *settings]  # type: ignore[arg-type]


def test_a_run_learns_by_the_function_of_a_file_and_goes_on_from_its_folder(world: World, file: str, tmp_path: Path):
    def words(out: Path, *settings: str) -> list[str]:
        return command(world, recipe(world, "grpo", out), *settings)

    ours, theirs, other = tmp_path / "ours", tmp_path / "theirs", tmp_path / "other"
    assert main(words(theirs, "algo=grpo", "algo.beta=0.0", "algo.clip=0.1")) == 0
    assert main(words(ours, f"algo={file}:same", "algo.clip=0.1", "train.steps=2")) == 0
    assert main(["resume", str(ours), "train.steps=4"]) == 0
    assert metrics(ours) == metrics(theirs)
    assert main(words(other, f"algo={file}:w_reinforce", "algo.right=0.5")) == 0
    assert metrics(other) != metrics(theirs)
    assert recorded_recipe(other).algo == Choice(f"{file}:w_reinforce", {"right": 0.5})


def test_its_settings_are_those_of_the_function(world: World, file: str, tmp_path: Path):
    made = recipe(world, "grpo", tmp_path, f"algo={file}:w_reinforce", "algo.wrong=-2", "algo.right=0.3")
    validate(made)
    assert made.online
    assert algorithm(made).name == "w_reinforce"
    assert algorithm(override(made, [f"algo={file}:needs", "algo.size=0.5"])).control[0].start == 0.5


def test_an_offline_one_that_reads_pairs_is_told_by_its_value(world: World, file: str, tmp_path: Path):
    made = recipe(world, "dpo", tmp_path)
    own = override(made, [f"algo={file}:pairs"])
    assert not own.online
    assert plan(own) == plan(made)


@each(
    ("settings", "says"),
    [
        ((":same", "algo.clipp=0.1"), "no setting 'clipp'; did you mean 'clip'?"),
        ((":same", "algo.clip=much"), "clip is 'much': give a number"),
        ((":sane",), "no function 'sane'; did you mean 'same'?"),
        ((":three",), ":three returned int: return a hone.algo.Algorithm"),
        ((":needs",), "needs the setting 'size'"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_the_run(
    world: World, file: str, tmp_path: Path, settings: tuple[str, ...], says: str
):
    made = recipe(world, "grpo", tmp_path, f"algo={file}{settings[0]}", *settings[1:])
    with pytest.raises(HoneError) as caught:
        validate(made)
    assert says in str(caught.value)


def test_its_file_runs_once_and_again_where_it_was_written_anew(world: World, tmp_path: Path):
    path, seen = tmp_path / "counted.py", tmp_path / "seen"
    text = f"open({str(seen)!r}, 'a').write('x')\nfrom hone.algo import grpo\n\ndef mine(): return grpo()\n"
    path.write_text(text)
    made = recipe(world, "grpo", tmp_path, f"algo={path}:mine")
    validate(made)
    assert made.online
    assert seen.read_text() == "x"
    path.write_text(text.replace("grpo", "dpo"))
    assert not made.online


def test_an_unknown_name_lists_files_too(world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=r"no algorithm 'w_reinforce'.*FILE\.py:function"):
        algorithm(recipe(world, "grpo", tmp_path, "algo=w_reinforce"))
