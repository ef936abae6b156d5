"""`torchrun -m hone run` on the CPU: one run of several processes, its files those of a process alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import World, arguments, metrics, recipe, temporary

import hone
from hone.config.recipe import Recipe
from hone.dist.join import join_ranks
from hone.errors import HoneError
from hone.launch import build

FATAL = """\
import os


def reward(completion):
    if os.environ["RANK"] == "1":
        os._exit(7)
    return float(len(completion))


def broken(completion):
    if os.environ["RANK"] == "1":
        raise RuntimeError("no verifier here")
    return float(len(completion))
"""
SHARED_OUT = ("train.shard=fsdp", "save.every=2", "train.micro_rows=2", "eval_data={data}", "train.reference_refresh=1")


def start(world: World, made: Recipe, *settings: str, ranks: int = 2) -> subprocess.Popen[str]:
    """The recipe under torchrun; settings that `arguments` does not know follow."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, "-m", "hone", *arguments(made, world), *settings],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def torchrun(world: World, made: Recipe, *settings: str, ranks: int = 2) -> tuple[int, str, str]:
    process = start(world, made, *settings, ranks=ranks)
    out, err = process.communicate()
    return process.returncode, out, err


def assert_nearly_same(one: Path, two: Path, *, step: int) -> None:
    """The same files, the same counters, weights and moments within rounding, metrics likewise."""
    a, b = (run / f"checkpoints/step-{step:06d}" for run in (one, two))
    names = sorted(str(p.relative_to(a)) for p in a.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(b)) for p in b.rglob("*") if p.is_file())
    for name in (n for n in names if n.endswith(".safetensors")):
        ours, theirs = load_file(a / name), load_file(b / name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=2e-4, msg=f"{name} {key}")
    states = [json.loads((folder / "state.json").read_text()) for folder in (a, b)]
    for part in ("updates", "version"):
        assert states[0][part] == states[1][part]
    assert states[0]["parts"]["source"] == states[1]["parts"]["source"]
    for ours, theirs in zip(metrics(one), metrics(two), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize(
    "more", [(), pytest.param(("train.lag=1", "train.mismatch=truncate"), marks=pytest.mark.slow)], ids=["now", "ahead"]
)
def test_two_processes_leave_the_run_of_one_and_either_goes_on_from_it(
    more: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    settings = [*(s.format(data=world.data("problems")) for s in SHARED_OUT), *more]
    alone = recipe(world, "grpo", tmp_path / "alone", *settings)
    hone.run(alone)
    code, out, err = torchrun(world, recipe(world, "grpo", tmp_path / "both"), *settings)
    assert code == 0, err
    assert out.split() == [str(tmp_path / "both/checkpoints/step-000004")], "one of them speaks"
    assert err.count("4/4") == 1
    assert_nearly_same(tmp_path / "alone", tmp_path / "both", step=4)
    assert temporary(tmp_path / "both") == []
    shutil.rmtree(tmp_path / "both/checkpoints/step-000004")
    hone.resume(tmp_path / "both")
    assert_nearly_same(tmp_path / "alone", tmp_path / "both", step=4)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_three_with_its_adapter(world: World, tmp_path: Path) -> None:
    settings = ["lora.rank=2", "save.every=2"]
    alone = recipe(world, "dpo", tmp_path / "alone", *settings)
    hone.run(alone)
    shutil.copytree(tmp_path / "alone", tmp_path / "more")
    shutil.rmtree(tmp_path / "more/checkpoints/step-000004")
    more = recipe(world, "dpo", tmp_path / "more")
    code, _, err = torchrun(world, more, *settings, "train.shard=fsdp_lean", "--resume", ranks=3)
    assert code == 0, err
    assert_nearly_same(tmp_path / "alone", tmp_path / "more", step=4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reward", "another rank has ended"),
        pytest.param("broken", "error: rank 1 could not go on: 6 of 6 rewards are invalid", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_ends_all_and_a_first_step_that_fails_leaves_nothing(
    name: str, said: str, world: World, tmp_path: Path
) -> None:
    (tmp_path / "fatal.py").write_text(FATAL)
    made = recipe(world, "grpo", tmp_path / "run", f"reward={tmp_path}/fatal.py:{name}")
    code, out, err = torchrun(world, made, "train.reward_apart=never")  # in a process of its own it ends that one
    assert code != 0
    assert said in err
    assert out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_share_weights_go_on_with_less_when_torchrun_starts_them_again(world: World, tmp_path: Path) -> None:
    settings = ["train.steps=2", "train.prompts=8"]
    hone.run(recipe(world, "sft", tmp_path / "alone", *settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    made = recipe(world, "sft", tmp_path / "both", *settings)
    program = [str(Path(__file__).with_name("narrow.py")), *arguments(made, world), "train.shard=fsdp", "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hone.__file__).parents[1])}
    done = subprocess.run(
        [*command, "--max-restarts", "3", *program], env=environment, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1: error: out of memory with 4 rows at once: resume, which goes on with at most 2" in done.stderr
    assert_nearly_same(tmp_path / "alone", tmp_path / "both", step=2)
    assert (tmp_path / "both/divisor").read_text() == "32"


def test_ctrl_c_saves_the_run_of_all_processes(world: World, tmp_path: Path) -> None:
    made = recipe(world, "sft", tmp_path / "run", "train.steps=100000")
    process = start(world, made, "train.shard=fsdp")
    assert process.stderr is not None
    for line in process.stderr:
        if " 3/100000 " in line:
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does; torchrun passes it on once more
    err = process.communicate()[1]
    assert process.returncode != 0
    assert "interrupted; the run is saved" in err
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(metrics(tmp_path / "run"))


def test_what_cannot_be_shared_out_is_refused_before_anything_starts(world: World, tmp_path: Path) -> None:
    with pytest.raises(HoneError, match=r"trpo works with the whole gradient .* set train\.shard=none"):
        build.algorithm(recipe(world, "trpo", tmp_path, "train.shard=fsdp"))
    with pytest.raises(HoneError, match=r"trpo moves the weights itself .* set optim\.offload=false"):
        build.algorithm(recipe(world, "trpo", tmp_path, "optim.offload=true"))


def test_ranks_that_torchrun_did_not_start_are_told_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(HoneError, match="start them with torchrun"), join_ranks("cpu"):
        pytest.fail("there is nobody to join")


def test_a_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "99")
    with pytest.raises(HoneError, match="leave the number out"), join_ranks("cuda:0"):
        pytest.fail("every rank would take the same one")
    with pytest.raises(HoneError, match="--nproc-per-node"), join_ranks("cuda"):
        pytest.fail("there are not so many")
