"""Every built-in recipe runs two steps on a tiny stand-in for what `hone demo` leaves."""

import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hone
from hone.algo import ALGORITHMS
from hone.check import suite
from hone.config.load import load_recipe
from hone.config.overrides import build_choice, override
from hone.config.recipe import Recipe, plan
from hone.config.rules import validate
from hone.data.text.tokenizer import Tokenizer
from hone.demo import stages, world
from hone.demo.stages import FILES, QUICK
from hone.demo.world import make_data, make_tokenizer, write_rows
from hone.errors import MADE_BY, made_by
from hone.model.config import DecoderConfig
from hone.model.decoder import Decoder
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.save import save_model
from hone.model.scorer import Scorer

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
REAL = {  # on real data: test_real_recipes.py
    "sft_gsm8k", "lora_gsm8k", "pretrain_tinyshakespeare", "grpo_gsm8k", "ppo_gsm8k", "dpo_smollm2",
}  # fmt: skip
NAMES = sorted({path.stem for path in (ROOT / "src/hone/recipes").glob("*.py") if not path.stem.startswith("_")} - REAL)
SMALL = ["train.steps=2", "train.prompts=3", "train.minibatches=1", "optim.warmup=1", "train.micro_rows=16"]
ONLINE = ["sample.group=2", "sample.max_tokens=6"]
FRESH = ["model.hidden_size=32", "model.intermediate_size=48", "model.layers=1", "model.heads=2", "model.kv_heads=2"]


def decoder(tokenizer: Tokenizer, *, seed: int) -> Decoder:
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=QUICK.context,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config)


def stand_in(folder: Path) -> None:
    """runs/demo with the demo's own data, steps, and models that nobody trained."""
    demo = folder / "runs/demo"
    sizes = replace(QUICK, documents=40, answers=20, problems=12, held_out=4)
    make_data(demo / "data", sizes, seed=0)
    tokenizer = make_tokenizer(demo / "data", sizes)
    stream, rng = world.problems(random.Random(1)), random.Random(2)
    sums = [next(stream) for _ in range(6)]
    pairs = [{"prompt": p.prompt, "chosen": world.written_answer(p, rng), "rejected": "no"} for p in sums]
    write_rows(demo / "data" / FILES["preferences"], pairs)
    for stage, seed in (("pretrain", 0), ("sft", 1), ("grpo", 3)):
        save_model(decoder(tokenizer, seed=seed), tokenizer, demo / stage / "model")
    steps = [{"prompt": p.prompt, "steps": [world.careful(p)], "step_labels": [n % 2]} for n, p in enumerate(sums)]
    write_rows(demo / "data/steps.jsonl", steps)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        save_model(Scorer(decoder(tokenizer, seed=2)), tokenizer, demo / "reward/model")
        judge = Scorer(decoder(tokenizer, seed=4), kind="step")
        save_model(judge, tokenizer, folder / "runs/process/checkpoints/step-000030")
    (folder / "runs/process/checkpoints/latest").write_text("step-000030")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/demo in it, as after `hone demo`."""
    folder = tmp_path_factory.mktemp("clone")
    stand_in(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_the_clone(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(clone)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(NAMES) & (sys.modules.keys() - before):
        del sys.modules[name]


def tiny(name: str, out: Path) -> Recipe:
    made = load_recipe(name)()
    settings = [*SMALL, *(ONLINE if made.online else []), *(FRESH if not made.model.path else [])]
    return override(made, [*settings, f"out={out}"])


def test_there_are_recipes():
    assert {"pretrain", "sft", "sft_lora", "reward", "dpo", "grpo", "ppo", "distil"} <= set(NAMES)


def test_every_recipe_saves_by_the_clock_and_keeps_the_last_two():
    for name in (*NAMES, *sorted(REAL)):
        save = load_recipe(name)().save
        assert (save.minutes, save.keep) == (5.0, 2), name


def test_what_a_recipe_starts_from_is_made_by_a_command_that_errors_name():
    for name in (*NAMES, *sorted(REAL)):
        made = load_recipe(name)()
        rewards = [part.partition(":")[2] for part in made.reward] if isinstance(made.reward, dict) else []
        read = [made.model.path, made.model.tokenizer, made.data, made.eval_data, made.process.path, made.teacher]
        for path in (*read, *rewards):
            if str(path).startswith("runs/"):
                assert made_by(str(path)), f"{name} reads {path}"
    for remedy in MADE_BY.values():
        assert re.match(r"`hone (demo|label-steps|corpus clean|run (process|sft_gsm8k))` makes it", remedy)
    assert made_by("runs/demo.jsonl") == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_and_makes_sense(name: str):
    made = load_recipe(name)()
    validate(made)
    assert made.name == name
    assert made.run_dir == Path("runs") / name
    assert build_choice(made.algo, ALGORITHMS).online == made.online
    assert "row" in plan(made)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_reads_is_what_the_demo_leaves(name: str):
    made = load_recipe(name)()
    paths = [made.model.path, made.model.tokenizer, made.data, made.eval_data, made.teacher]
    paths += [made.process.path]
    paths += [key.removeprefix("model:") for key in made.reward if key.startswith("model:")]  # pyright: ignore
    assert all(Path(path).exists() for path in paths if path)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_two_steps(name: str, tmp_path: Path):
    made = tiny(name, tmp_path / "run")
    folder = hone.run(made)
    assert folder == tmp_path / "run/checkpoints/step-000002"
    load = load_scorer if "reward" in made.algo_name else load_decoder
    load(folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<think>", specials=True) == Tokenizer.load("runs/demo/tokenizer").encode(
        "<think>", specials=True
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_passes_its_check(name: str, tmp_path: Path):
    made = tiny(name, tmp_path / "run")
    report = suite.check(made)
    assert report.failures == []
    warned = {f.name for f in report.findings if f.verdict == "warn"}
    assert warned <= ({"reward values", "signal"} if "math" in made.reward else set())  # nobody trained its model
    assert not (tmp_path / "run").exists()


def test_the_recipes_are_the_demos_stages():
    """A reader of the recipes finds what the demo did: same files, algorithm, rewards and kind of critic."""
    for stage in stages.ORDER:
        ours, theirs = load_recipe(stage)(), stages.recipe(stage, Path("runs/demo"), QUICK, seed=0)
        for name in ("algo_name", "data", "critic", "lora"):
            assert getattr(ours, name) == getattr(theirs, name), f"{stage}: {name}"
        assert set(ours.reward) == set(theirs.reward), stage  # pyright: ignore
        assert ours.model.path == theirs.model.path, stage


def test_the_example_in_the_readme_runs_as_it_stands():
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (example,) = (block.partition("```")[0] for block in blocks if "hone.run(" in block)
    exec(compile(example.replace("steps=3", "steps=1"), "README.md", "exec"), {})
    assert (Path("runs") / "mine" / "checkpoints" / "step-000001").is_dir()
