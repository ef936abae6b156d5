from dataclasses import replace

import pytest
from each import each

from hone.config.overrides import Choice, from_yaml, override, to_json
from hone.config.recipe import OFFLINE, PAIRED, LoraSpec, ModelSpec, Recipe, TrainSpec, plan
from hone.config.rules import COLUMNS, validate
from hone.data.rows.columns import RowKind
from hone.errors import HoneError

RIGHT = Recipe(data="tasks.jsonl", model=ModelSpec(path="models/sft"), reward={"math": 1.0})
FRESH = replace(RIGHT, model=ModelSpec(tokenizer="tokenizers/small"))
SFT = replace(RIGHT, algo=Choice("sft"))


def test_a_sensible_recipe_is_valid():
    for recipe in (RIGHT, FRESH, SFT, replace(RIGHT, reward=len), replace(RIGHT, reward="my/rewards.py:score")):
        validate(recipe)


@each(
    ("setting", "says"),
    [
        ("train.steps=0", "train.steps is 0: it must be at least 1"),
        ("train.prompts=0", "at least 1"),
        ("train.max_invalid=1.5", "at most 1"),
        ("train.mismatch_cap=0", "above 0"),
        ("train.eval_every=5", "there is no eval_data"),
        ("sample.temperature=0", "above 0"),
        ("sample.top_p=0", "above 0"),
        ("sample.top_p=1.1", "at most 1"),
        ("sample.group=0", "at least 1"),
        ("optim.lr=0", "above 0"),
        ("optim.critic_lr=-1", "at least 0"),
        ("optim.betas=0.9,1.0", "each must be in [0, 1)"),
        ("save.keep=0", "at least 1"),
        ("lora.rank=-1", "at least 0"),
        ("seed=-1", "at least 0"),
        ("name=a/b", "names a folder"),
        ("name=", "names a folder"),
        ("out=", "out is empty"),
        ("data=", "set data=FILE.jsonl"),
        ("model.path=", "set model.tokenizer=FOLDER"),
        ("reward={}", "set reward.math=1.0"),
        ("reward.math=0", "set reward.math=1.0"),
        ("reward.maths=1", "did you mean 'math'"),
        ("reward.model:=1", "no reward 'model:'"),
        ("reward=maths", "did you mean 'math'"),
    ],
)
def test_nonsense_is_refused_with_a_remedy(setting, says):
    with pytest.raises(HoneError) as caught:
        validate(override(RIGHT, [setting]))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["model.hidden_size=100", "model.heads=3", "model.kv_heads=3"], "use a multiple of 6"),
        (["model.heads=4", "model.kv_heads=3"], "must divide the 4 heads"),
        (["sample.max_tokens=256"], "no room for a prompt"),
    ],
)
def test_the_shape_of_a_fresh_model_is_checked(settings, says):
    with pytest.raises(HoneError, match=says):
        validate(override(FRESH, settings))
    validate(override(RIGHT, settings))  # a loaded model has its own shape


def test_mismatch_correction_needs_a_cap_of_at_least_one():
    with pytest.raises(HoneError, match="mismatch_cap"):
        validate(override(RIGHT, ["train.mismatch=mask", "train.mismatch_cap=0.5"]))


def test_lora_without_targets_is_refused():
    with pytest.raises(HoneError, match="all-linear"):
        validate(replace(RIGHT, lora=LoraSpec(rank=4, targets=())))


@pytest.mark.parametrize("setting", ["train.epochs=2", "train.minibatches=2"])
def test_offline_algorithms_refuse_what_they_would_ignore(setting):
    with pytest.raises(HoneError, match="sft is offline"):
        validate(override(SFT, [setting]))


def test_wrong_types_in_python_are_refused():
    with pytest.raises(HoneError, match=r"train.steps: expected a whole number, got 1\.5"):
        validate(replace(RIGHT, train=TrainSpec(steps=1.5)))  # pyright: ignore
    with pytest.raises(HoneError, match="not int"):
        validate(3)  # pyright: ignore


def test_a_reward_by_name_weighs_one():
    assert Recipe(reward="math").reward == {"math": 1.0}
    assert override(Recipe(), ["reward=model:runs/rm"]).reward == {"model:runs/rm": 1.0}
    assert override(Recipe(reward="math"), ["reward.format=0.1"]).reward == {"math": 1.0, "format": 0.1}
    assert override(Recipe(reward={"math": 1.0, "format": 0.1}), ["reward=f1"]).reward == {"f1": 1.0}


def test_the_run_is_written_to_a_folder_of_its_name():
    assert str(Recipe(name="x").run_dir) == "runs/x"
    assert str(Recipe(out="here/{brace}").run_dir) == "here/{brace}"


@each(
    ("settings", "expected"),
    [
        (
            ["train.minibatches=2"],
            "32 prompts x 8 samples = 256 rows; 1 epoch x 2 minibatches = 2 updates; 4 micro-batches of 64 rows each",
        ),
        (
            ["train.epochs=2", "train.minibatches=2", "train.micro_rows=100"],
            "32 prompts x 8 samples = 256 rows; 2 epochs x 2 minibatches = 4 updates; "
            "8 micro-batches of at most 100 rows",
        ),
        (  # 10 rows in 2 minibatches: 5 and 5; of at most 4 rows: 2 + 2
            ["train.prompts=5", "sample.group=2", "train.minibatches=2", "train.micro_rows=4"],
            "5 prompts x 2 samples = 10 rows; 1 epoch x 2 minibatches = 2 updates; 4 micro-batches of at most 4 rows",
        ),
        (
            ["train.prompts=1", "sample.group=1"],
            "1 prompt x 1 sample = 1 row; 1 epoch x 1 minibatch = 1 update; 1 micro-batch of 1 row each",
        ),
        (["algo=sft"], "32 rows; 1 epoch x 1 minibatch = 1 update; 1 micro-batch of 32 rows each"),
        (["algo=dpo"], "32 pairs = 64 rows; 1 epoch x 1 minibatch = 1 update; 1 micro-batch of 64 rows each"),
    ],
)
def test_the_plan_counts_in_rows(settings, expected):
    assert plan(override(RIGHT, settings)) == expected


def test_the_recipe_and_the_algorithms_agree_on_what_is_offline_and_paired():
    from hone.algo import ALGORITHMS

    made = {name: factory() for name, factory in ALGORITHMS.items()}
    assert {name for name, algo in made.items() if not algo.online} == OFFLINE
    assert {name for name, algo in made.items() if not algo.online and algo.unit == 2} == PAIRED


def test_a_recipe_comes_back_from_its_json(tmp_path):
    import json

    recipe = override(FRESH, ["algo=dapo", "algo.high=0.3", "optim.lr=3e-6", "limits.entropy_stop=none"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(recipe)))
    assert from_yaml(path, Recipe()) == recipe


def test_an_algorithm_may_be_a_value_made_in_python():
    from hone.algo import dpo, grpo

    recipe = replace(RIGHT, algo=grpo(beta=0.0))
    validate(recipe)
    assert recipe.online
    assert plan(recipe) == plan(RIGHT)
    assert plan(replace(RIGHT, algo=dpo())) == plan(replace(RIGHT, algo=Choice("dpo")))
    assert override(recipe, ["algo=dapo", "algo.high=0.3"]).algo == Choice("dapo", {"high": 0.3})
    with pytest.raises(HoneError, match="choose one with algo=NAME"):
        override(recipe, ["algo.high=0.3"])
    with pytest.raises(HoneError, match=r"use Choice\('grpo'\)"):
        validate(replace(RIGHT, algo="grpo"))


def test_every_column_of_a_shape_can_be_mapped():
    assert {name for kind in RowKind for name in kind.split(", ")} <= set(COLUMNS)
    mapped = override(FRESH, [f"read.columns.{name}=theirs" for name in COLUMNS])
    assert mapped.read.columns == dict.fromkeys(COLUMNS, "theirs")
