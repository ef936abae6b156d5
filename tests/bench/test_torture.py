"""The torture benchmark, a few seconds of it: kills at chosen moments, and every other way to hurt a run once."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks import torture
from benchmarks.torturing import disk, mishaps, victim
from benchmarks.torturing.kills import ANY, Campaign, campaign
from benchmarks.torturing.page import WORDS, page
from benchmarks.torturing.points import KINDS, SAVES
from benchmarks.torturing.world import World, contents, differences, loops, make_world, temporary
from hone.algo import ALGORITHMS
from hone.rollout.supply import Roller
from hone.storage import files

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world(tmp_path_factory.mktemp("torture"))
    torture.warm(made, tmp_path_factory.mktemp("warm"))
    return made


@pytest.mark.parametrize("loop", ["grpo, sampled ahead", "sft"])
def test_killed_runs_end_as_if_nothing_had_happened(loop: str, world: World, tmp_path: Path):
    found = campaign(world, tmp_path, [loop], 3, seed=1, say=lambda *_: None)
    assert found.wrong == []
    assert found.kills == 3
    assert found.compared >= 1


@pytest.mark.parametrize("kind", ["torn", "renaming"])
def test_every_kind_of_moment_inside_a_save_can_be_chosen(kind: str, world: World, tmp_path: Path):
    whole = victim.run(world.recipe("sft", tmp_path / "whole"), tmp_path / "log")
    assert set(whole.counts) >= SAVES
    told = victim.run(world.recipe("sft", tmp_path / "run"), tmp_path / "log", kill=(kind, whole.counts[kind]))
    assert (told.code, told.killed) == (-9, kind)
    assert temporary(tmp_path / "run")  # it was in the middle of something
    assert victim.run(world.recipe("sft", tmp_path / "run"), tmp_path / "log").code == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == temporary(tmp_path / "run") == []


def test_a_difference_is_seen(world: World, tmp_path: Path):
    """What finds nothing wrong must be able to."""
    for name, settings in (("one", []), ("two", ["optim.lr=0.0011"])):
        victim.run(world.recipe("grpo", tmp_path / name, *settings), tmp_path / "log")
    found = differences(tmp_path / "one", tmp_path / "two")
    assert "checkpoints/step-000006/model.safetensors" in found
    assert "metrics.jsonl" in found
    (tmp_path / "one/checkpoints/.step.tmp").mkdir()
    assert temporary(tmp_path / "one") == ["checkpoints/.step.tmp"]
    assert differences(tmp_path / "one", tmp_path / "none") != []


def test_what_a_run_forgets_is_found_out(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cursor that is not put back, and what a killed process left: children are forked from here, with these gone."""
    victim.run(world.recipe("grpo", tmp_path / "whole"), tmp_path / "log")
    victim.run(world.recipe("grpo", tmp_path / "run"), tmp_path / "log", kill=("writing", 40))
    monkeypatch.setattr(Roller, "load", lambda self, state: None)
    monkeypatch.setattr(files, "sweep", lambda folder: None)
    assert victim.run(world.recipe("grpo", tmp_path / "run"), tmp_path / "log").code == 0
    assert "samples.jsonl" in differences(tmp_path / "whole", tmp_path / "run")
    assert temporary(tmp_path / "run")


def test_a_second_process_and_damaged_files_are_found_out(world: World, tmp_path: Path):
    two = disk.two(world, tmp_path / "two", moments=disk.MOMENTS[:1])
    for case in (two, disk.damaged(world, tmp_path / "damaged", places=60)):
        assert case.wrong == []
        assert case.tried


def test_a_clock_that_is_set_back_costs_nothing(world: World, tmp_path: Path):
    case = mishaps.clock(world, tmp_path / "clock", most=1)
    assert case.wrong == []
    assert case.ends


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in torture.tries(quick=True) if n not in ("two", "damaged", "clock")])
def test_everything_else_ends_well(name: str, world: World, tmp_path: Path):
    case = torture.tries(quick=True)[name](world, tmp_path / "case")
    assert case.wrong == []
    assert case.tried


def test_all_loops_are_there_and_the_page_tells_of_every_kind():
    assert set(loops()) >= set(ALGORITHMS)
    assert WORDS.keys() == {*KINDS, ANY}
    found = Campaign(wrong=["bad"], compared=3)
    found.kinds.update(dict.fromkeys((*KINDS, ANY), 2))
    found.loops.update(["sft"])
    case = disk.Case("a case", tried=4, ends="well")
    text = page(found, [case], 90.0)
    assert "| torn | half of a checkpoint's file is written | yes | 2 |" in text
    assert "**1 broken promises**" in text
    assert "| a case | 4 | 0 | well |" in text
    rows = {row["name"]: row["ok"] for row in torture.rows_of(found, [case], 1.0, quick=False)}
    assert rows["broken promises after a kill"] is False
    assert rows["kills"] is False
    assert rows["a case"] is True


def test_hurting_a_file_hurts_it(tmp_path: Path):
    path, rng = tmp_path / "file", random.Random(0)
    for _ in range(50):
        path.write_bytes(b"0123456789")
        disk._hurt(path, b"0123456789", rng)
        assert contents(tmp_path)["file"] != b"0123456789"
