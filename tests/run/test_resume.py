"""A run that was stopped and continued leaves the same bits as one that never was: weights, moments, logs, samples."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import (
    Crash,
    Wire,
    World,
    arguments,
    assert_same_run,
    contents,
    crash,
    interrupt,
    metrics,
    recipe,
    temporary,
    watched,
)

import hone
from hone.algo import ALGORITHMS
from hone.cli import main
from hone.config.recipe import Recipe
from hone.errors import HoneError, Interrupted
from hone.storage.files import load_tensors

torch.set_num_threads(1)

VARIANTS = {
    "sft with a LoRA": ("sft", ["lora.rank=2"]),
    "sft on a schedule": ("sft", ["optim.schedule=cosine", "optim.warmup=2", "optim.weight_decay=0.1"]),
    "dpo with a LoRA": ("dpo", ["lora.rank=2"]),
    "ppo, own critic, adaptive KL": ("ppo", ["critic.kind=own", "algo.beta=0.1", "algo.kl_target=0.001"]),
    "ppo, shared critic, in parts": ("ppo", ["critic.kind=shared", "train.epochs=2", "train.minibatches=2"]),
    "grpo, adaptive KL": ("grpo", ["algo.kl_target=0.001"]),
    "grpo with a LoRA": ("grpo", ["lora.rank=2"]),
    "grpo with a LoRA, sampled ahead": ("grpo", ["lora.rank=2", "train.lag=1", "train.mismatch=mask"]),
    "dapo in parts, sampled ahead": ("dapo", ["train.lag=1", "train.mismatch=truncate", "train.minibatches=2"]),
    "refreshed reference, sampled ahead": (
        "grpo",
        ["train.lag=1", "train.mismatch=mask", "train.reference_refresh=2", "algo.kl_target=0.001"],
    ),
    "ppo in bfloat16, sampled ahead": ("ppo", ["train.dtype=bfloat16", "train.lag=1", "train.mismatch=truncate"]),
    "refreshed reference": ("grpo", ["train.reference_refresh=2"]),
    "refreshed reference, later": ("grpo", ["train.reference_refresh=3"]),
    "refreshed reference with a LoRA": ("grpo", ["lora.rank=2", "train.reference_refresh=2"]),
    "refreshed reference of dpo": ("dpo", ["train.reference_refresh=1"]),
    "reward model with a LoRA": ("reward_model", ["lora.rank=2"]),
    "sft in bfloat16": ("sft", ["train.dtype=bfloat16"]),
    "ppo in bfloat16": ("ppo", ["train.dtype=bfloat16", "critic.kind=own"]),
    "grpo with a LoRA in bfloat16": ("grpo", ["train.dtype=bfloat16", "lora.rank=2"]),
    "moments of one byte": ("sft", ["optim.bits=8"]),
    "moments on the host": ("sft", ["optim.offload=true"]),
    "moments of one byte, own critic": ("ppo", ["optim.bits=8", "critic.kind=own", "optim.schedule=linear"]),
    "nothing learned yet": ("expert_iteration", ["algo.threshold=99.0"]),
}


def ahead(name: str) -> list[str]:
    """The settings with which an algorithm is sampled ahead; none where it may not be."""
    algo = ALGORITHMS[name]()
    if not algo.online or algo.on_policy or algo.trust_region:
        return []
    return ["train.lag=1", *(["train.mismatch=truncate"] if algo.credit else [])]


CASES = {
    **{name: (name, list[str]()) for name in ALGORITHMS},
    **{f"{name}, sampled ahead": (name, found) for name in ALGORITHMS if (found := ahead(name))},
    **VARIANTS,
}


def stop(made: Recipe, monkeypatch: pytest.MonkeyPatch, *, step: int, act: Callable[[], None] = interrupt) -> str:
    """Run until the step is reported, then do the act; what was printed."""
    wire = Wire(step, made.train.steps, act)
    with pytest.raises((Interrupted, Crash)):
        watched(lambda: hone.run(made), wire, monkeypatch)
    return wire.getvalue()


# Sampling ahead is the loop's work: the fast tests take one algorithm with groups, one with a critic, one of pairs.
ALL_BUT_FEW = {f"{name}, sampled ahead" for name in ALGORITHMS} - {
    f"{name}, sampled ahead" for name in ("grpo", "ppo", "online_dpo")
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ALL_BUT_FEW else n for n in CASES])
def test_stopped_and_resumed_is_as_if_never_stopped(name: str, world: World, tmp_path: Path, monkeypatch):
    algo, settings = CASES[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, algo, whole, *settings))
    stop(recipe(world, algo, cut, *settings), monkeypatch, step=2)
    assert [row["step"] for row in metrics(cut)] == [1, 2]
    assert hone.resume(cut) == cut / "checkpoints/step-000004"
    assert_same_run(whole, cut, step=4)


def test_control_values_and_references_are_in_the_comparison(world: World, tmp_path: Path):
    """What the test above compares is what the brief asks for: it would be worth little if these were not saved."""
    settings = ["critic.kind=own", "algo.beta=0.1", "algo.kl_target=0.001", "train.reference_refresh=2"]
    folder = hone.run(recipe(world, "ppo", tmp_path / "run", *settings))
    state = json.loads((folder / "state.json").read_text())
    assert state["control"]["kl_coef"] != 0.1
    assert (state["updates"], state["version"]) == (4, 4)
    assert state["parts"]["roller"]["requests"] == 4 * 3 * 3
    weights, moments = load_tensors(folder / "learner.safetensors"), load_tensors(folder / "optimizer.safetensors")
    assert all(name.startswith("critic.") for name in weights), "the policy's own are in the model's file already"
    assert len(moments) == 3 * (len(weights) + len(load_tensors(folder / "model.safetensors")))
    assert (folder / "reference.safetensors").is_file()


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_crash_between_saves_goes_back_to_the_last_one(step: int, world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = ["train.steps=6", "save.every=2", "save.keep=1"]
    hone.run(recipe(world, "grpo", whole, *settings))
    stop(recipe(world, "grpo", cut, *settings), monkeypatch, step=step, act=crash)
    if step == 1:
        with pytest.raises(HoneError, match="no checkpoint to continue from: start it again with `hone run`"):
            hone.resume(cut)
        hone.run(recipe(world, "grpo", cut, *settings))
    else:
        hone.resume(cut)
    assert_same_run(whole, cut, step=6)


def test_many_stops_are_as_none(world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = ["train.steps=6", "algo.beta=0.05", "save.every=1"]
    hone.run(recipe(world, "ppo", whole, *settings))
    made = recipe(world, "ppo", cut, *settings)
    stop(made, monkeypatch, step=1)
    for step, act in ((2, interrupt), (3, crash), (4, interrupt), (5, crash)):
        with pytest.raises((Interrupted, Crash)):
            watched(lambda: hone.resume(cut), Wire(step, 6, act), monkeypatch)
    hone.resume(cut)
    assert_same_run(whole, cut, step=6)


def test_a_run_longer_than_planned_is_the_long_run(world: World, tmp_path: Path, capsys):
    """`hone run --resume` with more steps; `hone resume` then knows of them."""
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    hone.run(recipe(world, "sft", whole, "train.steps=6"))
    hone.run(recipe(world, "sft", grown, "train.steps=3"))
    command = arguments(recipe(world, "sft", grown, "train.steps=6"), world)
    assert main([*command, "--resume"]) == 0
    assert capsys.readouterr().out.strip() == str(grown / "checkpoints/step-000006")
    assert_same_run(whole, grown, step=6)
    assert json.loads((grown / "config.json").read_text())["recipe"]["train"]["steps"] == 6
    assert main(["resume", str(grown)]) == 0
    assert "6 of 6 steps are done" in capsys.readouterr().err


def test_run_with_resume_starts_what_was_never_started(world: World, tmp_path: Path):
    whole, asked = tmp_path / "whole", tmp_path / "asked"
    hone.run(recipe(world, "sft", whole))
    hone.run(recipe(world, "sft", asked), resume=True)
    assert_same_run(whole, asked, step=4)


def test_resuming_a_finished_run_says_so_and_changes_nothing(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    folder = hone.run(recipe(world, "rloo", out))
    before = contents(out)
    capsys.readouterr()
    for command in (["resume", str(out)], [*arguments(recipe(world, "rloo", out), world), "--resume"]):
        assert main(command) == 0
        said = capsys.readouterr()
        assert said.out.strip() == str(folder)
        assert f"4 of 4 steps are done; for more: hone resume {out} train.steps=8" in said.err
    assert contents(out) == before
    assert main(said.err.strip().rpartition("hone ")[2].split()) == 0  # as it is printed
    assert (out / "checkpoints/step-000008").is_dir()


def test_a_run_may_be_moved_and_resumed_from_anywhere(world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    hone.run(recipe(world, "grpo", whole))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stop(recipe(world, "grpo", Path("runs/x")), monkeypatch, step=2)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    shutil.move(tmp_path / "here/runs/x", cut)
    assert hone.resume("../cut") == Path("../cut/checkpoints/step-000004")
    assert_same_run(whole, cut, step=4)
    assert list((tmp_path / "there").iterdir()) == []


def test_the_recipes_own_model_may_be_gone_by_then(world: World, tmp_path: Path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(world / "model", tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "lora.rank=2"]
    hone.run(recipe(world, "grpo", whole, *settings))
    stop(recipe(world, "grpo", cut, *settings), monkeypatch, step=2)
    shutil.rmtree(tmp_path / "model")
    hone.resume(cut)
    assert_same_run(whole, cut, step=4)


def test_settings_come_back_as_they_were_written(world: World, tmp_path: Path, monkeypatch):
    """Names with dots, letters of all kinds, bytes that are no text, and rewards in their own order."""
    place = tmp_path / 'v1.2 \N{GRINNING FACE} "ü"'
    shutil.copytree(world / "scorer", place / "judge")
    shutil.copy(world.data("problems"), place / "p: [x] \udcff.jsonl")
    settings = [f"data={place}/p: [x] \udcff.jsonl", "name=1e5", "optim.lr=3e-05", "algo.value_clip=none"]
    reward = {f"model:{place}/judge": 0.5, "format": 0.25}
    whole, cut = (replace(recipe(world, "ppo", place / out, *settings), reward=reward) for out in ("whole", "cut"))
    hone.run(whole)
    stop(cut, monkeypatch, step=2)
    hone.resume(place / "cut")
    assert_same_run(place / "whole", place / "cut", step=4)


def test_the_first_rollouts_after_a_resume_know_their_version(world: World, tmp_path: Path, monkeypatch):
    seen = list[int]()

    def versions(rollout):
        seen.append(rollout.version)
        return float(sum(rollout.tokens) % 3)

    made = replace(recipe(world, "grpo", tmp_path / "run"), reward=versions)
    stop(made, monkeypatch, step=2)
    hone.run(made, resume=True)
    assert [seen[i] for i in range(0, len(seen), 9)] == [0, 1, 2, 3]


# --- damage ---


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = ["model.safetensors", "learner.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_said(name: str, damage, world: World, tmp_path: Path, capsys):
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    hone.run(recipe(world, "reinforce_baseline", whole, "save.every=2"))
    shutil.copytree(whole, hurt)
    damage(hurt / "checkpoints/step-000004" / name)
    capsys.readouterr()
    hone.resume(hurt)
    err = capsys.readouterr().err
    assert err.startswith("passed over step-000004: ")
    assert name in err.splitlines()[0] or name == "manifest.json"  # a flipped hash accuses another file
    assert_same_run(whole, hurt, step=4)


def test_the_damaged_checkpoint_does_not_push_out_a_whole_one(world: World, tmp_path: Path, monkeypatch):
    """With keep=1 the newest by name is the damaged one; what is kept is what was just saved."""
    out = tmp_path / "run"
    settings = ["train.steps=6", "save.every=1", "save.keep=2"]
    hone.run(recipe(world, "sft", out, *settings))
    truncate(out / "checkpoints/step-000006/state.json")
    longer = recipe(world, "sft", out, "train.steps=7", "save.every=1", "save.keep=1")
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(longer, resume=True), Wire(6, 7, interrupt), monkeypatch)
    assert [p.name for p in (out / "checkpoints").glob("step-*")] == ["step-000006"]
    hone.resume(out)
    assert metrics(out)[-1]["step"] == 7


def test_where_every_checkpoint_is_damaged_nothing_is_overwritten(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    made = recipe(world, "sft", out, "save.every=2")
    hone.run(made)
    for folder in (out / "checkpoints").glob("step-*"):
        flip(folder / "model.safetensors")
    before = contents(out)
    command = arguments(made, world)
    for arguments_, says in (
        (["resume", str(out)], "no checkpoint in"),
        ([*command, "--resume"], "no checkpoint in"),
        (command, "already holds a run"),
    ):
        capsys.readouterr()
        assert main(arguments_) == 2
        assert says in capsys.readouterr().err.splitlines()[-1]
    assert contents(out) == before


def test_a_damaged_start_is_said_with_the_way_out(world: World, tmp_path: Path):
    out = tmp_path / "run"
    made = recipe(world, "dpo", out)
    hone.run(made)
    flip(out / "start/model.safetensors")
    with pytest.raises(HoneError, match=r"start a new run, with model\.path set to a checkpoint"):
        hone.run(replace(made, train=replace(made.train, steps=5)), resume=True)


def test_what_a_killed_process_left_aside_is_swept_away(world: World, tmp_path: Path):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out))
    half = out / "checkpoints/.step-000006.12345.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (out / ".config.json.12345.tmp").write_text("{")
    hone.run(recipe(world, "sft", out, "train.steps=5"), resume=True)
    assert temporary(out) == []


@pytest.mark.parametrize("old", ["0.001", '"small"', "train"], ids=["a number", "a name", "a key"])
def test_settings_that_were_damaged_are_no_other_settings(old: str, world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out, "train.steps=1"))
    good = {name: (out / name).read_text() for name in ("recipe.json", "config.json")}
    assert all(old in text for text in good.values())
    (out / "config.json").write_text(good["config.json"].replace(old, old[:-2] + "9" + old[-1]))
    assert main(["resume", str(out), "train.steps=2"]) == 2
    assert "config.json is damaged: copy it back" in capsys.readouterr().err
    (out / "config.json").write_text(good["config.json"])
    (out / "recipe.json").write_text(good["recipe.json"].replace(old, old[:-2] + "9" + old[-1]))
    hone.resume(out, settings=["train.steps=2"])
    whole = hone.run(recipe(world, "sft", tmp_path / "whole", "train.steps=2"))
    assert_same_run(tmp_path / "whole", out, step=2)
    assert (whole / "model.safetensors").is_file()
    assert json.loads((out / "recipe.json").read_text())["optim"]["lr"] == 0.001


# --- what cannot be resumed ---


@pytest.mark.parametrize(
    "change",
    [
        {"data": [{"prompt": "1+1=", "answer": "2"}]},
        {"eval_data": [{"prompt": "1+1=", "answer": "2"}]},
        {"reward": lambda completion: float(len(completion))},
        {"algo": hone.algo.grpo(beta=0.0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_only_python_holds_is_resumed_by_python_only(change, world: World, tmp_path: Path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    made = replace(recipe(world, "grpo", whole), **change)
    hone.run(made)
    made = replace(made, out=str(cut))
    with pytest.raises(Interrupted, match=r"hone\.run\(recipe, resume=True\)"):
        watched(lambda: hone.run(made), Wire(2, 4, interrupt), monkeypatch)
    capsys.readouterr()
    assert main(["resume", str(cut)]) == 2
    err = capsys.readouterr().err
    assert f"was started with {next(iter(change))} made in Python: continue it with `hone run RECIPE --resume`" in err
    assert err.count("\n") == 1
    hone.run(made, resume=True)
    assert_same_run(whole, cut, step=4)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda out: None, "no folder"),
        (lambda out: out.mkdir(), "is not a run"),
        (lambda out: (out.mkdir(), (out / "config.json").write_text("{")), "cannot be read"),
        (lambda out: (out.mkdir(), (out / "config.json").write_text("{}")), "is not a run"),
    ],
    ids=["absent", "empty", "torn", "strange"],
)
def test_what_is_no_run_is_not_resumed(prepare, says, tmp_path: Path, capsys):
    out = tmp_path / "run"
    prepare(out)
    assert main(["resume", str(out)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_part_of_a_run_names_the_run(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    folder = hone.run(recipe(world, "sft", out, "train.steps=1"))
    for part in (folder, folder.parent):
        assert main(["resume", str(part)]) == 2
        assert f"is inside of a run: continue that one, with `hone resume {out}`" in capsys.readouterr().err


def test_a_run_whose_config_is_gone_goes_on_by_its_recipe(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", tmp_path / "whole", "train.steps=3"))
    folder = hone.run(recipe(world, "sft", out, "train.steps=2"))
    (out / "config.json").unlink()
    assert main(["resume", str(out), "train.steps=3"]) == 0
    assert_same_run(tmp_path / "whole", out, step=3)
    assert json.loads((out / "config.json").read_text())["recipe"]["train"]["steps"] == 3, "it was written anew"
    (out / "config.json").write_text("{")
    assert main(["resume", str(out)]) == 2
    assert "remove it, to go on by recipe.json" in capsys.readouterr().err
    for name in ("config.json", "recipe.json"):
        (out / name).unlink()
    assert main(["resume", str(out)]) == 2
    newest = f"model.path={folder.with_name('step-000003')}"
    assert f"its settings are gone, so start anew with {newest}" in capsys.readouterr().err
    made = arguments(recipe(world, "sft", out), world)
    assert main(made) == 2
    assert "holds checkpoints without recipe.json and config.json: choose another out=" in capsys.readouterr().err
    assert main([*made, newest, f"out={tmp_path / 'new'}"]) == 0, "the remedies are followed"


def test_a_log_that_was_taken_away_is_missed(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    hone.run(recipe(world, "sft", out, "train.steps=2"))
    (out / "metrics.jsonl").unlink()
    hone.resume(out, settings=["train.steps=3"])
    assert "metrics.jsonl ends at step 0, those up to 2 are not in it" in capsys.readouterr().err


def test_other_rows_in_the_same_file_begin_anew_where_that_is_allowed(world: World, tmp_path: Path, capsys):
    out, data = tmp_path / "run", tmp_path / "rows.jsonl"
    shutil.copy(world.data("answers"), data)
    hone.run(recipe(world, "sft", out, f"data={data}", "train.steps=2"))
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:-1]))
    assert main(["resume", str(out), "train.steps=3"]) == 2
    assert "the data's rows was 7 when saved and is 6 now" in (err := capsys.readouterr().err)
    assert "--allow-change goes on, and begins the source anew" in err
    assert main(["resume", str(out), "train.steps=3", "--allow-change"]) == 0
    assert "the source begins anew" in capsys.readouterr().err
    assert [row["step"] for row in metrics(out)] == [1, 2, 3]
