"""A run that meets numbers that are not finite: it skips, says so, keeps the rows, and stops after so many."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small import Wire, World, assert_same_run, contents, hone, interrupt, metrics, recipe, watched, write_rows

import hone as package
from hone.algo import sft
from hone.cli import main
from hone.config.recipe import Recipe
from hone.errors import HoneError, Interrupted
from hone.launch.replay import replay
from hone.launch.rescue import nearest_checkpoint
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.save import save_model
from hone.storage import files
from hone.storage.files import load_tensors
from hone.train.guard import load_rows

torch.set_num_threads(1)
ROWS = [{"prompt": f"{a}+{a}{'Z' if a == 3 else '='}", "completion": f"{2 * a}"} for a in range(7)]


@pytest.fixture(scope="module")
def odd(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one letter is NaN: what reads that letter is not finite, all else is."""
    folder = tmp_path_factory.mktemp("odd")
    config = DecoderConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=48, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder(config)
    (letter,) = world.tokenizer.encode("Z")
    with torch.no_grad():
        model.model.embed_tokens.weight[letter] = torch.nan
    save_model(model, world.tokenizer, folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "all.jsonl", [ROWS[3]])
    return folder


def made(world: World, odd: Path, out: Path, *settings: str, rows: str = "rows") -> Recipe:
    data = [f"model.path={odd / 'model'}", f"data={odd / f'{rows}.jsonl'}"]
    return recipe(world, "sft", out, *data, "optim.schedule=linear", "optim.warmup=2", "train.steps=6", *settings)


def test_bad_updates_are_skipped_counted_said_and_kept(world: World, odd: Path, tmp_path: Path, capsys):
    folder = package.run(made(world, odd, tmp_path / "run", "train.prompts=2"))
    counts = [row["bad_updates"] for row in metrics(tmp_path / "run")]
    bad = [step for step, (a, b) in enumerate(zip([0, *counts], counts, strict=False), start=1) if b > a]
    assert 0 < len(bad) < 6
    for row in metrics(tmp_path / "run"):
        assert ("loss" in row) == (row["step"] not in bad)
        assert row["skipped"] == float(row["step"] in bad)
        assert "nonfinite" not in row
    names = sorted(path.name for path in (tmp_path / "run/bad").iterdir())
    assert names == [f"step-{step:06d}.safetensors" for step in bad]
    said = capsys.readouterr().err
    assert f"step {bad[0]}: skipped an update: weight decoder.model.embed_tokens.weight is nan" in said
    assert json.loads((folder / "state.json").read_text())["updates"] == 6 - len(bad)
    assert sum(not x.isfinite().all() for x in load_tensors(folder / "model.safetensors").values()) == 1


def test_stopped_and_resumed_around_a_skip_is_as_if_never_stopped(world: World, odd: Path, tmp_path: Path, monkeypatch):
    whole = made(world, odd, tmp_path / "whole", "train.prompts=2")
    package.run(whole)
    counts = [row["bad_updates"] for row in metrics(tmp_path / "whole")]
    first = counts.index(1.0) + 1
    for step in {first, max(first - 1, 1)}:
        cut = made(world, odd, tmp_path / f"cut-{step}", "train.prompts=2")
        with pytest.raises(Interrupted):
            watched(lambda cut=cut: package.run(cut), Wire(step, 6, interrupt), monkeypatch)
        package.resume(tmp_path / f"cut-{step}")
        assert_same_run(tmp_path / "whole", tmp_path / f"cut-{step}", step=6)
        assert contents(tmp_path / "whole/bad") == contents(tmp_path / f"cut-{step}/bad")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("train.max_bad_updates=3", "3 updates in a row were not finite (train.max_bad_updates)"),
        ("train.max_bad_total=3", "3 updates in all were not finite (train.max_bad_total)"),
    ],
)
def test_too_many_save_and_stop_the_run(setting: str, why: str, world: World, odd: Path, tmp_path: Path):
    out = tmp_path / "run"
    with pytest.raises(HoneError) as error:
        package.run(made(world, odd, out, setting, rows="all"))
    assert str(error.value).startswith(f"stopped at step 3: {why}: lower optim.lr, or mend what `hone replay` finds in")
    assert str(out / "bad") in str(error.value)
    assert "\n" not in str(error.value)
    assert (out / "checkpoints/step-000003").is_dir()
    assert len(list((out / "bad").iterdir())) == 3
    with pytest.raises(HoneError, match="stopped at step 4: 4 updates"):  # the count is part of the checkpoint
        package.resume(out)


def test_ruined_weights_are_told_with_those_to_begin_anew_from(world: World, tmp_path: Path):
    out, bad = tmp_path / "run", ["train.steps=9", "train.max_bad_updates=3", "save.keep=9"]
    package.run(recipe(world, "sft", out, "train.steps=2", *bad[1:]))
    with pytest.raises(HoneError, match="stopped at step 6: 3 updates in a row") as error:  # step 3 ruins them
        package.resume(out, settings=[*bad, "optim.lr=1e30"], allow_change=True)
    anew = re.search(r"`hone run RECIPE --config (\S+) model.path=(\S+) out=ANOTHER optim.lr=LOWER`", str(error.value))
    assert anew is not None
    assert anew[2] == str(out / "checkpoints/step-000002")
    with pytest.raises(HoneError, match=r"stopped at step 9: 3 updates in a row.* of step-000009 gave no finite one"):
        package.resume(out, settings=["optim.lr=1e-3", "train.steps=20"], allow_change=True)
    shutil.rmtree(out / "checkpoints/step-000002")
    with pytest.raises(HoneError, match=f"model.path={out / 'start'} "):
        package.resume(out, settings=["optim.lr=1e-4"], allow_change=True)
    for place in (out / "start", out / "checkpoints/step-000006"):  # the one advised, and that there was a choice
        again = tmp_path / place.name
        settings = ["--config", anew[1], f"model.path={place}", f"out={again}", "optim.lr=1e-3", "train.steps=3"]
        code = main(["run", "sft", *settings])
        assert (code == 0) == (place.name == "start")


def test_replay_names_what_is_not_finite(world: World, odd: Path, tmp_path: Path, capsys):
    out = tmp_path / "run"
    package.run(made(world, odd, out, "train.steps=1", rows="all"))
    capsys.readouterr()
    assert main(["replay", str(out / "bad/step-000001.safetensors")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1, 3 rows, weights of checkpoints/step-000001, exactly those of the time"
    weight = "weight decoder.model.embed_tokens.weight is nan at ["
    assert lines[1].startswith(f"before the forward pass, in the weights: {weight}")
    file = str(out / "bad/step-000001.safetensors")
    assert main(["replay", file, "--all"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert lines == [*every[:2], f"and {len(every) - 2} other tensors: --all or --json lists them"]
    met, names = zip(*(line.partition(" is ")[0].split(": ") for line in every[2:]), strict=True)
    assert names[:3] == ("forward.logp", "loss.0", "loss")
    assert set(met[:3]) == {"in the forward pass of micro-batch 0"}
    assert names[3] == "gradient of decoder.lm_head.weight"  # the backward pass begins there
    assert all(name.startswith("gradient of decoder.") for name in names[3:])
    assert set(met[3:]) == {"in the backward pass of micro-batch 0"}
    assert main(["replay", file, "--json"]) == 0
    assert [f["name"] for f in json.loads(capsys.readouterr().out)["found"]][1:4] == list(names[:3])


@pytest.mark.parametrize("updates", [0, 5])
def test_replay_on_earlier_weights_says_why_nothing_is_found(
    updates: int, world: World, odd: Path, tmp_path: Path, capsys
):
    out = tmp_path / "run"
    package.run(made(world, odd, out, "train.steps=1", rows="all"))
    (file,) = (out / "bad").iterdir()
    batch, about = load_rows(file)
    save_file(dict(batch.columns()), file, metadata={"hone": json.dumps(about | {"updates": updates})})
    saved = out / "checkpoints/step-000001"
    shutil.copytree(saved, tmp_path / "sound")
    weights = tmp_path / "sound/model.safetensors"
    save_file({name: x.nan_to_num() for name, x in load_tensors(weights).items()}, weights)
    (tmp_path / "sound/manifest.json").unlink()
    files.save_folder(saved, lambda to: shutil.copytree(tmp_path / "sound", to, dirs_exist_ok=True) and None)
    capsys.readouterr()
    assert main(["replay", str(file)]) == 0
    _, why, *remedy = capsys.readouterr().out.splitlines()
    assert why.startswith("all is finite with these weights; in the run: weight decoder.model.embed_tokens.weight is")
    kept = "the weights of the time were not saved: a run with save.every=1 save.milestones=1 keeps them"
    assert remedy == ([kept] if updates else [])


def test_replay_needs_neither_data_nor_reward_and_an_algorithm_of_python_with_its_recipe(
    world: World, odd: Path, tmp_path: Path
):
    for name, algo in (("rows", None), ("algo", sft())):
        out = tmp_path / name
        run = replace(made(world, odd, out, "train.steps=1"), data=[ROWS[3]] * 2)
        run = run if algo is None else replace(run, algo=algo)
        package.run(run)
        file = out / "bad/step-000001.safetensors"
        found = replay(file, recipe=run).found
        assert found[0].name == "weight decoder.model.embed_tokens.weight"
        if algo is None:
            assert replay(file).found == found
        else:
            with pytest.raises(HoneError, match="with algo made in Python: replay it with"):
                replay(file)
    assert not torch.are_deterministic_algorithms_enabled()  # as before


def test_replay_takes_the_nearest_weights_and_says_how_near(world: World, odd: Path, tmp_path: Path):
    out = tmp_path / "run"
    package.run(made(world, odd, out, "train.prompts=2", "save.every=2"))
    updates = {
        int(p.name[5:]): json.loads((p / "state.json").read_text())["updates"]
        for p in (out / "checkpoints").glob("step-*")
    }
    assert nearest_checkpoint(out, updates[4]) == (out / "checkpoints/step-000004", 0)
    assert nearest_checkpoint(out, 0) == (None, 0)
    assert nearest_checkpoint(out, updates[2] - 1) == (None, updates[2] - 1)
    assert nearest_checkpoint(out, 99) == (out / "checkpoints/step-000006", 99 - updates[6])


def test_replay_of_another_file_is_refused(world: World, odd: Path, tmp_path: Path):
    code, out, err = hone("replay", str(odd / "rows.jsonl"))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "give a file of RUN_DIR/bad" in err


def test_the_help_states_the_limits(capsys):
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    said = capsys.readouterr().out
    assert "train.max_bad_updates" in said
    assert "train.max_bad_total" in said
