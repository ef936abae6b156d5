"""Checkpoints of a run: written beside the loop and whole, kept or removed as the recipe says, ready to use."""

import io
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from patience import patience
from small import (
    Wire,
    World,
    arguments,
    assert_same_run,
    contents,
    interrupt,
    metrics,
    recipe,
    start_hone,
    temporary,
    watched,
)

import hone as package
from hone.checkpoint.state import saved_weights
from hone.cli import main
from hone.errors import HoneError, Interrupted
from hone.model.formats.folder import load_decoder
from hone.storage import files as checkpoint
from hone.storage.files import checkpoints, load_tensors

torch.set_num_threads(1)


def twice() -> None:
    interrupt()
    interrupt()


def slow(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object] = lambda: time.sleep(0.02)) -> None:
    """Every file of a checkpoint takes long to be made safe, as on a busy disk."""
    sync = checkpoint.sync

    def slowly(path: Path) -> None:
        if "step-" in str(path):
            wait()
        sync(path)

    monkeypatch.setattr(checkpoint, "sync", slowly)


# --- beside the loop ---


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("sft", ["train.steps=12"]),
        ("ppo", ["critic.kind=own", "train.steps=6"]),
        ("dpo", ["lora.rank=2", "train.steps=6"]),
        ("grpo", ["train.dtype=bfloat16", "train.reference_refresh=1", "train.steps=6"]),
        ("reward_model", ["optim.bits=8", "train.steps=6"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_written_late_is_what_the_step_left(algo: str, settings, world: World, tmp_path: Path, monkeypatch):
    """The loop is steps ahead when the files are written; each holds the bits of its own step."""
    steps = int(settings[-1].partition("=")[2])
    half = steps // 2
    package.run(recipe(world, algo, tmp_path / "short", *settings[:-1], f"train.steps={half}"))
    slow(monkeypatch)
    package.run(recipe(world, algo, tmp_path / "late", *settings, f"save.every={half}"))
    name = checkpoint.name_of(half)
    a, b = (contents(tmp_path / out / "checkpoints" / name) for out in ("short", "late"))
    assert a == b
    assert list(checkpoints(tmp_path / "late/checkpoints")) == [half, steps]


def test_the_loop_does_not_wait_for_the_disk(world: World, tmp_path: Path, monkeypatch):
    out, seen, looked = tmp_path / "run", list[bool](), threading.Event()
    slow(monkeypatch, lambda: looked.wait(patience(30)))

    def look() -> None:
        seen.append((out / "checkpoints/step-000002").exists())
        looked.set()

    watched(lambda: package.run(recipe(world, "sft", out, "save.every=2")), Wire(3, 4, look), monkeypatch)
    assert seen == [False], "step 3 is done while step 2 is still being written"
    assert list(checkpoints(out / "checkpoints")) == [2, 4]
    assert temporary(out) == []


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    sync, left = checkpoint.sync, [times]

    def fails(path: Path) -> None:
        if path.name == "state.json" and left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(checkpoint, "sync", fails)


def test_a_writer_that_fails_once_is_said_and_loses_nothing(world: World, tmp_path: Path, monkeypatch, capsys):
    package.run(recipe(world, "sft", tmp_path / "whole"))
    failing(monkeypatch, 1)
    package.run(recipe(world, "sft", tmp_path / "run", "save.every=1"))
    err = capsys.readouterr().err
    assert "step-000001: Input/output error" in err
    assert "the run is saved anew" in err
    assert_same_run(tmp_path / "whole", tmp_path / "run", step=4)
    assert temporary(tmp_path / "run") == []


def test_a_writer_that_keeps_failing_ends_the_run(world: World, tmp_path: Path, monkeypatch, capsys):
    package.run(recipe(world, "sft", tmp_path / "run", "train.steps=2"))
    before = contents(tmp_path / "run/checkpoints")
    failing(monkeypatch, 99)
    with pytest.raises(HoneError, match=r"Input/output error.*what was saved before is untouched"):
        package.run(recipe(world, "sft", tmp_path / "run", "train.steps=9", "save.every=1"), resume=True)
    assert contents(tmp_path / "run/checkpoints") == before
    assert temporary(tmp_path / "run") == []


def test_a_second_signal_does_not_wait_for_a_slow_disk(world: World, tmp_path: Path, monkeypatch):
    made = recipe(world, "sft", tmp_path / "run", "save.every=1")
    package.run(recipe(world, "sft", tmp_path / "whole"))
    package.run(replace(made, train=replace(made.train, steps=1)))
    slow(monkeypatch, lambda: time.sleep(0.5))
    start = time.monotonic()
    with pytest.raises(Interrupted):
        watched(lambda: package.run(made, resume=True), Wire(3, 4, twice), monkeypatch)
    assert time.monotonic() - start < patience(6)
    monkeypatch.undo()
    package.resume(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run", step=4)
    assert temporary(tmp_path / "run") == []


# --- which are kept ---


def scores(run: Path, metric: str) -> dict[int, float]:
    return {row["step"]: row[metric] for row in metrics(run) if row.get(metric) is not None}


@pytest.mark.parametrize("which", ["highest", "lowest"])
def test_the_last_the_best_and_milestones_are_kept(which: str, world: World, tmp_path: Path):
    settings = ["train.steps=9", "save.every=1", "save.keep=1", "save.milestones=4", "save.best=reward"]
    package.run(recipe(world, "grpo", tmp_path / "run", *settings, f"save.best_is={which}"))
    found = scores(tmp_path / "run", "reward")
    best = (max if which == "highest" else min)(found, key=lambda step: found[step])
    assert set(checkpoints(tmp_path / "run/checkpoints")) == {4, 8, 9, best}
    assert (tmp_path / "run/checkpoints/best").read_text() == checkpoint.name_of(best)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000009"
    checkpoint.verify(tmp_path / "run/checkpoints" / checkpoint.name_of(best))


def test_the_checkpoint_of_a_run_that_a_limit_stopped_may_be_the_best(world: World, tmp_path: Path):
    settings = ["limits.truncated_stop=0.0", "limits.patience_stop=2", "train.steps=9", "save.best=truncated"]
    with pytest.raises(HoneError, match="stopped at step"):
        package.run(recipe(world, "grpo", tmp_path / "run", *settings))
    (last,) = checkpoints(tmp_path / "run/checkpoints")
    assert (tmp_path / "run/checkpoints/best").read_text() == checkpoint.name_of(last)


def test_the_best_held_out_one_outlives_a_resume(world: World, tmp_path: Path, monkeypatch):
    settings = ["train.steps=6", "save.every=1", "save.keep=1", "save.best=eval/loss", "save.best_is=lowest"]
    settings += [f"eval_data={world.data('answers')}", "train.eval_every=1"]
    package.run(recipe(world, "sft", tmp_path / "whole", *settings))
    made = recipe(world, "sft", tmp_path / "cut", *settings)
    with pytest.raises(Interrupted):
        watched(lambda: package.run(made), Wire(3, 6, interrupt), monkeypatch)
    package.resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", step=6)
    a, b = (set(checkpoints(tmp_path / out / "checkpoints")) for out in ("whole", "cut"))
    assert a == b


def test_a_step_that_kept_nothing_has_no_metric_of_an_update_and_ends_no_run(world: World, tmp_path: Path):
    made = recipe(world, "dapo", tmp_path / "run", "train.steps=2", "train.refill_rounds=1", "save.best=loss")
    package.run(replace(made, reward=lambda completion: 1.0))
    assert [row["kept"] for row in metrics(tmp_path / "run")] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["save.best=eval/reward"], "set eval_data"),
        (["save.best=eval/loss", "eval_data=DATA", "save.every=3", "train.eval_every=2"], "train.eval_every"),
        (["save.best=eval/loss", "eval_data=DATA", "save.every=0", "train.eval_every=2"], "save.every"),
        (["save.best=rewrad"], "did you mean 'reward'"),
        (["save.milestones=-1"], "at least 0"),
        (["save.best_is=middle"], "highest"),
    ],
    ids=["no data", "other steps", "by the clock alone", "no such metric", "negative", "middle"],
)
def test_what_cannot_be_kept_is_said_early(settings, says: str, world: World, tmp_path: Path, capsys):
    settings = [setting.replace("DATA", world.data("problems")) for setting in settings]
    assert main([*arguments(recipe(world, "grpo", tmp_path / "run"), world), *settings]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_best_metric_that_no_evaluation_has_is_said_at_the_first_one(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    given = ["save.best=eval/rewrad", f"eval_data={world.data('problems')}", "train.eval_every=1", "train.steps=2"]
    assert main([*arguments(recipe(world, "grpo", out), world), *given]) == 2
    assert "did you mean 'eval/reward'" in capsys.readouterr().err.splitlines()[-1]
    assert main(["resume", str(out), "save.best=eval/reward"]) == 0  # nothing is lost
    assert (out / "checkpoints/best").read_text().strip() == "step-000002"


def test_latest_is_set_right_where_the_one_it_names_is_damaged(world: World, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    package.run(recipe(world, "sft", out, "save.every=2"))
    (out / "checkpoints/step-000004/state.json").write_text("{}")
    made = recipe(world, "sft", out, "train.steps=6")
    with pytest.raises(Interrupted):
        watched(lambda: package.run(made, resume=True), Wire(3, 6, twice), monkeypatch)
    assert (out / "checkpoints/latest").read_text() == "step-000002"


# --- one process ---


def test_two_processes_on_one_run_do_not_meet(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    command = arguments(recipe(world, "sft", out, "train.steps=100000"), world)
    with start_hone(*command) as process:
        try:
            assert process.stderr is not None
            while " 2/100000" not in process.stderr.readline():
                assert process.poll() is None
            before = contents(out / "start")
            for again in ([*command, "--resume"], command):
                capsys.readouterr()
                assert main(again) == 2
                err = capsys.readouterr().err
                assert f"error: {out} is in use by process {process.pid} on " in err
                assert err.count("\n") == 1
            assert contents(out / "start") == before
        finally:
            process.kill()
    assert (out / "lock").exists()
    package.run(recipe(world, "sft", out, "train.steps=2"))  # a dead owner owns nothing
    assert not (out / "lock").exists()


# --- ready to use ---


def test_weights_are_written_once(world: World, tmp_path: Path):
    for algo, settings, apart in (
        ("sft", [], 0),
        ("reward_model", [], 0),
        ("ppo", ["critic.kind=shared"], 2),
        ("dpo", ["lora.rank=2"], 14),
        ("sft", ["train.dtype=bfloat16"], 11),
    ):
        out = tmp_path / "-".join([algo, *settings])
        folder = package.run(recipe(world, algo, out, "train.steps=1", *settings))
        assert len(load_tensors(folder / "learner.safetensors")) == apart, (algo, settings)
    names = ["decoder.model.embed_tokens.weight", "head.weight", "decoder.strange"]
    found = saved_weights(tmp_path / "reward_model/checkpoints/step-000001", names)
    assert set(found) == set(names[:2])


@pytest.fixture(scope="module")
def foreign(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that only transformers computes."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = tmp_path_factory.mktemp("foreign")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=258, max_position_embeddings=48, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, eos_token_id=world.tokenizer.eos_id, bos_token_id=None,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    world.tokenizer.save(folder)
    return folder


def test_every_checkpoint_is_a_model_of_transformers_and_of_chat(
    world: World, foreign: Path, tmp_path: Path, capsys, monkeypatch
):
    from transformers import AutoModelForCausalLM

    for name, settings in {
        "full": ["train.dtype=bfloat16"],
        "lora": ["lora.rank=2"],
        "foreign": [f"model.path={foreign}"],
    }.items():
        out = tmp_path / name
        package.run(recipe(world, "sft", out, "train.steps=2", "save.every=1", *settings))
        for folder in checkpoints(out / "checkpoints").values():
            theirs, ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_decoder(folder)
            ids = torch.arange(9)[None]
            torch.testing.assert_close(theirs(ids).logits, ours.logits(ours(ids)), rtol=1e-3, atol=1e-4)
            if name == "foreign":  # which the engine of chat refuses, whoever made it
                continue
            monkeypatch.setattr(sys, "stdin", io.StringIO("1+1=\n"))
            capsys.readouterr()
            assert main(["chat", str(folder), "--max-tokens", "4"]) == 0
            assert capsys.readouterr().out


def test_a_run_of_a_model_of_transformers_is_resumed_to_the_bit(
    world: World, foreign: Path, tmp_path: Path, monkeypatch
):
    settings = [f"model.path={foreign}", "save.every=1"]
    package.run(recipe(world, "sft", tmp_path / "whole", *settings))
    made = recipe(world, "sft", tmp_path / "cut", *settings)
    with pytest.raises(Interrupted):
        watched(lambda: package.run(made), Wire(2, 4, interrupt), monkeypatch)
    package.resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", step=4)


def test_logs_reach_the_disk_before_the_checkpoint_takes_its_place(world: World, tmp_path: Path, monkeypatch):
    sync, order = checkpoint.sync, list[str]()

    def noted(path: Path) -> None:
        order.append(path.name)
        sync(path)

    monkeypatch.setattr(checkpoint, "sync", noted)
    package.run(recipe(world, "grpo", tmp_path / "run", "train.steps=1"))
    renamed = order.index("checkpoints")  # synced when the folder has got its name
    assert {"metrics.jsonl", "samples.jsonl", "manifest.json", "state.json"} <= set(order[:renamed])
    state = json.loads((tmp_path / "run/checkpoints/step-000001/state.json").read_text())
    assert state["score"] is None
