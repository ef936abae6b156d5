"""Resuming with other settings: what changes no number is free, the rest is listed and has to be allowed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Wire, World, arguments, assert_same_run, contents, interrupt, metrics, recipe, watched

import hone
from hone.checkpoint.record import _digest
from hone.cli import main
from hone.config.changes import FREE, NEVER, changes
from hone.config.overrides import override, to_json
from hone.config.recipe import Recipe
from hone.errors import HoneError, Interrupted
from hone.storage.files import digest, load_tensors

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def begun(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of grpo that was stopped after two of four steps; nobody writes into it."""
    out = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        watched(lambda: hone.run(recipe(world, "grpo", out)), Wire(2, 4, interrupt), patch)
    return out


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return shutil.copytree(begun, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["seed=4"], "seed was 3 and is 4"),
        (["optim.lr=0.01", "train.prompts=4"], "train.prompts was 3 and is 4; optim.lr was 0.001 and is 0.01"),
        (["algo=ppo"], "algo.name was grpo and is ppo"),
        (["algo.beta=0.5"], "algo.beta was not set and is 0.5"),
        (["reward=math"], "reward.math was not set and is 1.0"),
        (["train.lag=1", "train.mismatch=truncate"], "train.lag was 0 and is 1"),
        (["train.dtype=bfloat16"], "train.dtype was auto and is bfloat16"),
        (["train.steps=6", "optim.schedule=cosine"], "train.steps was 4 and is 6"),
        (["lora.rank=2"], "lora.rank was 0 and is 2"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_leads_elsewhere_is_listed_and_changes_nothing(settings, says: str, run: Path, world: World, capsys):
    before = contents(run)
    assert main(["resume", str(run), *settings]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert ("add --allow-change" in err) != ("model.path=CHECKPOINT" in err)
    assert err.count("\n") == 1
    assert main([*arguments(recipe(world, "grpo", run), world), *settings, "--resume"]) == 2
    assert says in capsys.readouterr().err
    assert contents(run) == before


@pytest.mark.parametrize("setting", ["lora.rank=2", "critic.kind=own", "optim.bits=8", "model.vocab_size=300"])
def test_what_the_weights_do_not_fit_is_refused_even_so(setting: str, run: Path, capsys):
    before = contents(run)
    assert main(["resume", str(run), setting, "--allow-change"]) == 2
    assert "start a new run with model.path=CHECKPOINT" in capsys.readouterr().err
    assert contents(run) == before


def test_what_changes_no_number_is_free(run: Path, world: World, tmp_path: Path):
    """Micro-batches, layout, threads and what is kept or watched; the trajectory is the same to rounding."""
    hone.run(recipe(world, "grpo", tmp_path / "whole"))
    free = ["train.micro_rows=2", "train.layout=padded", "save.every=1", "save.keep=1", "sample.max_rows=4"]
    assert hone.resume(run, settings=free) == run / "checkpoints/step-000004"
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_tensors(r / "checkpoints/step-000004" / name) for r in (run, tmp_path / "whole"))
        for key, x in ours.items():
            torch.testing.assert_close(x, theirs[key], rtol=1e-3, atol=2e-5, msg=f"{name} {key}")
    for one, two in zip(metrics(run), metrics(tmp_path / "whole"), strict=True):
        assert one == pytest.approx(two, rel=1e-3, abs=1e-5)
    assert (run / "samples.jsonl").read_text() == (tmp_path / "whole/samples.jsonl").read_text()


def test_more_steps_on_resume_are_the_longer_run(run: Path, world: World, tmp_path: Path):
    hone.run(recipe(world, "grpo", tmp_path / "whole", "train.steps=6"))
    assert main(["resume", str(run), "train.steps=6"]) == 0
    assert_same_run(tmp_path / "whole", run, step=6)
    assert json.loads((run / "recipe.json").read_text())["train"]["steps"] == 6


def test_what_has_no_step_to_do_keeps_its_settings(run: Path, capsys):
    before = contents(run)
    assert main(["resume", str(run), "train.steps=1", "optim.lr=0.01", "--allow-change"]) == 0
    err = capsys.readouterr().err
    assert "2 of 1 steps are done" in err
    assert "goes on" not in err
    assert contents(run) == before


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["optim.lr=0.01"], "optim.lr was 0.001 and is 0.01"),
        (["algo=dapo"], "algo.name was grpo and is dapo"),
        (["seed=4"], "the source begins anew"),
        (["train.lag=1", "train.mismatch=truncate"], "train.lag was 0 and is 1"),
        (["train.dtype=bfloat16"], "train.dtype was auto and is bfloat16"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_allowed_change_is_told_and_recorded(settings, told: str, run: Path, world: World, capsys):
    assert main(["resume", str(run), *settings, "--allow-change"]) == 0
    assert told in capsys.readouterr().err
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    (change,) = json.loads((run / "config.json").read_text())["changes"]
    assert change["after_step"] == 2
    assert settings[0].partition("=")[0].split(".")[0] in next(iter(change["settings"]))
    capsys.readouterr()
    assert main(["resume", str(run)]) == 0, "what was allowed is the run's from then on"


def test_a_run_with_a_lag_may_go_on_without(world: World, tmp_path: Path, monkeypatch):
    made = recipe(world, "grpo", tmp_path / "run", "train.lag=1", "train.mismatch=truncate")
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(made), Wire(2, 4, interrupt), monkeypatch)
    with pytest.raises(HoneError, match=r"train\.lag was 1 and is 0"):
        hone.resume(tmp_path / "run", settings=["train.lag=0"])
    folder = hone.resume(tmp_path / "run", settings=["train.lag=0"], allow_change=True)
    whole = hone.run(recipe(world, "grpo", tmp_path / "whole", "train.mismatch=truncate"))
    states = [json.loads((f / "state.json").read_text())["parts"]["source"] for f in (folder, whole)]
    assert states[0] == states[1], "tasks that were sampled ahead are taken again"


def test_a_resumed_run_stays_where_it_is(run: Path):
    with pytest.raises(HoneError, match="say where a run lies"):
        hone.resume(run, settings=["out=elsewhere"])


def test_precision_is_what_it_was_begun_in_on_whatever_device(run: Path, monkeypatch):
    """auto means bfloat16 on a GPU: a run begun in float32 on a CPU would lead elsewhere there."""
    assert json.loads((run / "checkpoints/step-000002/state.json").read_text())["dtype"] == "float32"
    seen = list[str]()
    place = hone.launch.build.device_and_dtype  # pyright: ignore[reportAttributeAccessIssue]

    def watching(name: str = "auto", precision: str = "auto"):
        seen.append(precision)
        return place(name, precision)

    monkeypatch.setattr("hone.launch.build.device_and_dtype", watching)
    hone.resume(run, settings=["train.steps=3"])
    assert "float32" in seen


def test_an_offline_run_is_not_continued_online(world: World, tmp_path: Path):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out, "train.steps=1"))
    for allow in (False, True):
        with pytest.raises(HoneError, match=r"algo\.name was sft and is rloo|another model"):
            hone.run(recipe(world, "rloo", out), resume=True, allow_change=allow)


def edited(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def resealed(run: Path, change: Callable[[Any], None]) -> None:
    """Another version's settings, which it has sealed itself."""

    def both(about: Any) -> None:
        change(about["recipe"])
        about["digest"] = _digest(about["recipe"])

    edited(run / "config.json", both)


def test_a_run_of_a_version_that_knew_fewer_settings_goes_on(run: Path, world: World, tmp_path: Path):
    resealed(run, lambda recipe: recipe["train"].pop("rollback"))
    hone.resume(run)
    hone.run(recipe(world, "grpo", tmp_path / "whole"))
    assert_same_run(tmp_path / "whole", run, step=4)


def test_a_run_of_a_version_with_other_settings_says_which_one(run: Path, capsys):
    resealed(run, lambda recipe: recipe["train"].update(warp=9))
    edited(run / "config.json", lambda about: about["versions"].update(hone="9.9"))
    assert main(["resume", str(run)]) == 2
    err = capsys.readouterr().err
    assert "warp" in err
    assert "it was written by Hone 9.9" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [lambda state: state.update(format=2), lambda state: state.update(format=0), lambda state: state.pop("control")],
    ids=["newer", "older", "without"],
)
def test_a_checkpoint_of_another_format_is_told_and_left_alone(change, run: Path, capsys):
    folder = run / "checkpoints/step-000002"
    edited(folder / "state.json", change)
    edited(folder / "manifest.json", lambda names: names.update({"state.json": digest(folder / "state.json")}))
    before = contents(run)
    assert main(["resume", str(run)]) == 2
    err = capsys.readouterr().err
    assert (
        "goes on from format 1: resume with the one that config.json names, or start a new run with model.path=" in err
    )
    assert err.count("\n") == 1
    assert contents(run) == before


def test_free_and_fixed_settings_exist():
    known = to_json(Recipe())
    for path in (*FREE, *NEVER):
        node = known
        for name in path.split("."):
            assert name in node, path
            node = node[name]


def test_every_change_is_seen_however_deep():
    before = override(Recipe(), ["reward.math=1.0", "read.columns.prompt=question", "algo=ppo", "algo.gamma=0.9"])
    now = override(before, ["reward.math=0.5", "algo.gamma=1.0", "optim.betas=0.9,0.99"])
    now = replace(now, read=replace(now.read, columns={}))
    assert changes(now, json.loads(json.dumps(to_json(before)))) == {
        "read.columns.prompt": ("question", None),
        "reward.math": (1.0, 0.5),
        "algo.gamma": (0.9, 1.0),
        "optim.betas": ([0.9, 0.95], [0.9, 0.99]),
    }
    assert changes(before, json.loads(json.dumps(to_json(before)))) == {}
