"""Every algorithm through `hone.run`, and what it leaves: a folder that loads everywhere and holds what was learned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import ROWS, World, arguments, contents, hone, metrics, recipe, rows_for, temporary, write_rows

import hone as package
from hone.algo import ALGORITHMS
from hone.cli import main
from hone.config.recipe import ModelSpec
from hone.data.text.tokenizer import Tokenizer
from hone.model.formats.folder import load_decoder, load_scorer
from hone.storage.files import load_tensors, verify

torch.set_num_threads(1)

SCORERS = {"reward_model": "reward", "pointwise_reward_model": "reward", "process_reward_model": "step"}
EASY = {"expert_iteration": {"threshold": -1.0}}  # random weights reach no reward of 1
VARIANTS = {
    "sft with a LoRA": ("sft", ["lora.rank=2", "lora.targets=q_proj,v_proj"]),
    "sft by row": ("sft", ["algo.average=row"]),
    "grpo with a LoRA": ("grpo", ["lora.rank=2"]),
    "grpo packed": ("grpo", ["train.layout=packed"]),
    "grpo in parts": ("grpo", ["train.epochs=2", "train.minibatches=2", "train.micro_rows=2"]),
    "grpo corrected": ("grpo", ["train.mismatch=truncate"]),
    "grpo by row ratio": ("grpo", ["algo.ratio=row", "algo.kl=loss:exact"]),
    "ppo with its own critic": ("ppo", ["critic.kind=own", "algo.beta=0.1", "algo.entropy=0.01"]),
    "ppo with a shared critic": ("ppo", ["critic.kind=shared", "algo.bootstrap=true"]),
    "ppo with a LoRA and a critic": ("ppo", ["lora.rank=2", "critic.kind=own"]),
    "ppo_penalty exact": ("ppo_penalty", ["algo.exact=true"]),
    "trpo with a shared critic": ("trpo", ["critic.kind=shared"]),
    "reward model with a LoRA": ("reward_model", ["lora.rank=2", "algo.centre=0.1"]),
    "pointwise reward model by log-odds": ("pointwise_reward_model", ["algo.loss=bce"]),
    "klq with a shared critic": ("klq", ["critic.kind=shared"]),
}


def moved(folder: Path, start: Path) -> bool:
    """Whether any decoder weight differs from the start's."""
    now, before = load_tensors(folder / "model.safetensors"), load_tensors(start / "model.safetensors")
    return any(not torch.equal(now[name], before[name]) for name in now.keys() & before.keys())


def check_outputs(folder: Path, out: Path, *, steps: int, online: bool) -> None:
    assert folder == out / "checkpoints" / f"step-{steps:06d}"
    verify(folder)
    assert moved(folder, out / "start")
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all("nonfinite" not in row for row in rows)
    assert "loss" in rows[-1]
    assert (out / "samples.jsonl").exists() == online
    assert temporary(out) == []
    assert json.loads((out / "config.json").read_text())["plan"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_and_leaves_a_model(name: str, world: World, tmp_path: Path):
    out = tmp_path / "run"
    folder = package.run(recipe(world, name, out, "train.steps=2", **EASY.get(name, {})))
    check_outputs(folder, out, steps=2, online=rows_for(name) == "problems")
    assert Tokenizer.load(folder).encode("1+1=") == world.tokenizer.encode("1+1=")
    if name in SCORERS:
        assert load_scorer(folder).kind == SCORERS[name]
    else:
        assert load_decoder(folder).config == load_decoder(world / "model").config


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_runs_and_leaves_a_model(name: str, world: World, tmp_path: Path):
    algo, settings = VARIANTS[name]
    out = tmp_path / "run"
    folder = package.run(recipe(world, algo, out, "train.steps=2", *settings))
    check_outputs(folder, out, steps=2, online=rows_for(algo) == "problems")
    load_scorer(folder) if algo in SCORERS else load_decoder(folder)


def test_the_start_is_the_model_that_was_given(world: World, tmp_path: Path):
    for settings in ([], ["lora.rank=2"]):
        out = tmp_path / f"run{len(settings)}"
        package.run(recipe(world, "sft", out, "train.steps=1", *settings))
        given, kept = (
            load_tensors(Path(world / "model/model.safetensors")),
            load_tensors(out / "start/model.safetensors"),
        )
        assert given.keys() == kept.keys()
        assert all(torch.equal(given[name], kept[name]) for name in given)


def test_an_adapter_leaves_the_other_layers_alone(world: World, tmp_path: Path):
    folder = package.run(recipe(world, "sft", tmp_path / "run", "lora.rank=2", "lora.targets=q_proj"))
    given, now = load_tensors(Path(world / "model/model.safetensors")), load_tensors(folder / "model.safetensors")
    changed = {name for name in given if not torch.equal(given[name], now[name])}
    assert changed == {"model.layers.0.self_attn.q_proj.weight"}


@pytest.mark.parametrize("name", ["reward_model", "ppo", "pretrain", "dapo"])
def test_one_seed_gives_one_run_whatever_was_drawn_before(name: str, world: World, tmp_path: Path):
    out = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for seed, folder in zip((3, 3, 4), out, strict=True):
        torch.manual_seed(int.from_bytes(folder.name.encode()))  # the caller's own random numbers
        package.run(recipe(world, name, folder, "train.steps=2", f"seed={seed}"))
    made = [contents(folder / "checkpoints/step-000002") for folder in out]
    assert made[0] == made[1]
    assert made[0]["model.safetensors"] != made[2]["model.safetensors"]


def test_a_fresh_model_has_the_shape_and_the_seed_of_the_recipe(world: World, tmp_path: Path):
    made = recipe(world, "pretrain", tmp_path / "run", "train.steps=1")
    shape = ModelSpec(
        tokenizer=world / "tokenizer", hidden_size=16, intermediate_size=24, layers=2, heads=2, kv_heads=1, context=40
    )
    config = load_decoder(package.run(replace(made, model=shape))).config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (258, 16, 2)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (1, 40)


def test_the_journey_by_hand_each_stage_from_the_last(world: World, tmp_path: Path):
    shape = ["hidden_size=16", "intermediate_size=24", "layers=1", "heads=2", "kv_heads=2", "context=48"]
    fresh = ["model.path=", f"model.tokenizer={world / 'tokenizer'}", *(f"model.{s}" for s in shape)]
    base = package.run(recipe(world, "pretrain", tmp_path / "base", *fresh))
    sft = package.run(recipe(world, "sft", tmp_path / "sft", f"model.path={base}"))
    judge = package.run(recipe(world, "reward_model", tmp_path / "judge", f"model.path={sft}"))
    settings = [f"model.path={sft}", f"reward=model:{judge}", "critic.kind=own", "algo.beta=0.1"]
    ppo = package.run(recipe(world, "ppo", tmp_path / "ppo", *settings))
    assert moved(ppo, tmp_path / "ppo/start")
    scored = [json.loads(line) for line in (tmp_path / "ppo/samples.jsonl").read_text().splitlines()]
    assert {name for row in scored for name in row["parts"]} == {f"model:{judge}"}


def test_held_out_problems_are_scored_when_due_and_at_the_end(world: World, tmp_path: Path):
    held_out = write_rows(tmp_path / "held.jsonl", ROWS["problems"][:2])
    out = tmp_path / "run"
    package.run(recipe(world, "rloo", out, f"eval_data={held_out}", "train.eval_every=3"))
    scored = {row["step"]: row["eval/problems"] for row in metrics(out) if "eval/reward" in row}
    assert scored == {3: 2.0, 4: 2.0}


def test_what_is_asked_for_is_what_the_log_says(world: World, tmp_path: Path):
    out = tmp_path / "run"
    package.run(recipe(world, "sft", out, "optim.warmup=4", "optim.lr=0.008"))
    assert [row["lr"] for row in metrics(out)] == pytest.approx([0.002, 0.004, 0.006, 0.008])


def test_evaluation_is_the_same_from_python_and_the_command_line(world: World, tmp_path: Path, capsys):
    folder = str(package.run(recipe(world, "sft", tmp_path / "run")))
    reward, data = world / "rewards.py:bytes_sum", world.data("problems")
    found = package.evaluate(folder, data, reward=reward, samples=4, max_tokens=5)
    assert found["problems"] == len(ROWS["problems"])
    assert -0.3 <= found["reward"] <= 0.6
    capsys.readouterr()
    assert main(["eval", folder, data, "--reward", reward, "--samples", "4", "--max-tokens", "5"]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert shown == {name: f"{value:.4g}" for name, value in found.items()}


def test_a_loud_reward_breaks_nothing(world: World, tmp_path: Path, capfd):
    out = tmp_path / "run"
    made = recipe(world, "grpo", out, f"reward={world / 'rewards.py:chatty'}", "train.reward_apart=auto")
    assert main(arguments(made, world)) == 0
    said = capfd.readouterr()
    assert said.err.count("to stdout") == 4 * 9  # lines of two workers may meet
    assert said.out.splitlines() == [str(out / "checkpoints/step-000004")]
    assert len(metrics(out)) == 4


def test_the_command_prints_where_the_model_is(world: World, tmp_path: Path):
    code, out, err = hone(*arguments(recipe(world, "grpo", Path("run"), "train.steps=2"), world), cwd=tmp_path)
    assert (code, out) == (0, "run/checkpoints/step-000002\n")
    assert "small  2/2" in err
    assert "Warning" not in err
    load_decoder(tmp_path / out.strip())


def test_the_command_scores_a_model(world: World):
    reward = world / "rewards.py:bytes_sum"
    code, out, err = hone("eval", world / "model", world.data("problems"), "--reward", reward)
    assert code == 0
    assert err.startswith("temperature 0 (one sample")
    assert "\nthe first completion (reward " in err
    assert "\n7 of 7 problems\n" in err
    assert out.startswith("reward ")


def test_transformers_reads_every_model_with_equal_logits(world: World, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "12+7=19 <eos> ü"
    for name, settings in (("pretrain", []), ("sft", ["lora.rank=2"]), ("ppo", ["critic.kind=shared"])):
        folder = package.run(recipe(world, name, tmp_path / name, "train.steps=2", *settings))
        ours, tokenizer = load_decoder(folder), Tokenizer.load(folder)
        theirs, other = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode(text, specials=True)
        assert other(text)["input_ids"] == ids
        assert other.decode(ids) == tokenizer.decode(ids)
        assert (other.eos_token_id, other.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
        assert theirs.config.eos_token_id == tokenizer.eos_id
        tokens = torch.tensor([ids])
        with torch.no_grad():
            torch.testing.assert_close(theirs(tokens).logits, ours.lm_head(ours(tokens)), rtol=1e-5, atol=1e-5)


def test_the_command_scores_the_first_problems_only(world: World):
    code, out, err = hone("eval", world / "model", world.data("problems"), "--limit", "3", "--max-tokens", "4")
    assert code == 0
    assert "\n3 of 3 problems\n" in err
    assert "problems" in out
