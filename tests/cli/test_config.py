import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
from each import each

from hone.config.overrides import (
    OTHER_FRAMEWORKS,
    Choice,
    build_choice,
    check,
    from_yaml,
    override,
    settings_of,
    to_json,
    unknown,
)
from hone.config.recipe import Recipe
from hone.config.values import Misfit, fit
from hone.errors import HoneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    lr: float = 1e-6
    warmup: int = 10
    critic_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["constant", "cosine"] = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str = "run"
    fast: bool = False
    data: str | Sequence[Any] = ""
    note: str | None = None
    targets: tuple[str, ...] = ("all",)
    reward: str | Mapping[str, float] | Callable[..., Any] = field(default_factory=dict)
    algo: Choice = field(default_factory=lambda: Choice("grpo", {"beta": 0.1}))
    optim: Optim = field(default_factory=Optim)


def error_of(function, *arguments) -> str:
    with pytest.raises(HoneError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@each(
    ("setting", "path", "value"),
    [
        ("optim.lr=2", "optim.lr", 2.0),
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("optim.warmup=1_000", "optim.warmup", 1000),
        ("optim.critic_lr=none", "optim.critic_lr", None),
        ("optim.critic_lr=null", "optim.critic_lr", None),
        ("optim.critic_lr=3", "optim.critic_lr", 3.0),
        ("optim.betas=0.5,0.6", "optim.betas", (0.5, 0.6)),
        ("optim.betas=[0, 0.6]", "optim.betas", (0.0, 0.6)),
        ("optim.schedule=cosine", "optim.schedule", "cosine"),
        ("targets=q_proj,v_proj", "targets", ("q_proj", "v_proj")),
        ("targets=q_proj", "targets", ("q_proj",)),
        ("targets=1,2", "targets", ("1", "2")),
        ("name=a=b", "name", "a=b"),
        ("name=none", "name", "none"),
        ("name=1", "name", "1"),
        ("name=true", "name", "true"),
        ("name=", "name", ""),
        ("note=none", "note", None),
        ("note=true", "note", "true"),
        ("fast=true", "fast", True),
        ("fast=False", "fast", False),
        ("data=a,b.jsonl", "data", "a,b.jsonl"),
        ("data=none.jsonl", "data", "none.jsonl"),
        ("reward.math=1", "reward", {"math": 1.0}),
        ("reward.model:runs/rm.v2=0.5", "reward", {"model:runs/rm.v2": 0.5}),
        ("reward={'math': 2}", "reward", {"math": 2.0}),
        ("reward=r.py:f", "reward", "r.py:f"),
    ],
)
def test_an_override_reaches_its_field(setting, path, value):
    found = override(Run(), [setting])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@each(
    ("setting", "says"),
    [
        ("optm.lr=1", "did you mean 'optim'"),
        ("optim.learning_rate=1", "optim.lr, optim.warmup"),
        ("optim.warmpu=1", "did you mean 'optim.warmup'"),
        ("optim.warm=1", "no setting 'optim.warm'; did you mean 'optim.warmup'? there are"),
        ("optim.lrr=1", "no setting 'optim.lrr'; did you mean 'optim.lr'? there are"),
        ("optim.warmup=1.5", "optim.warmup: expected a whole number, got '1.5'"),
        ("optim.warmup=1e3", "a whole number"),
        ("optim.warmup=True", "a whole number"),
        ("optim.lr=true", "expected a number, got 'true'"),
        ("optim.lr=none", "expected a number"),
        ("optim.lr=fast", "expected a number"),
        ("optim.lr=nan", "expected a number"),
        ("optim.lr=1e999", "expected a number"),
        ("optim.lr=" + "9" * 400, "expected a number"),
        ("optim.lr=__import__('os')", "expected a number"),
        ("optim.lr=" + "(" * 5000, "expected a number"),
        ("optim.lr=" + "-" * 50_000 + "1", "expected a number"),
        ("optim.critic_lr=fast", "a number or none"),
        ("optim.betas=0.9", "2 values"),
        ("optim.betas=0.9,0.9,0.9", "2 values"),
        ("optim.schedule=cosin", "one of constant, cosine"),
        ("fast=1", "true or false"),
        ("fast=yes", "true or false"),
        ("optim=1", "group of settings: set one of optim.lr"),
        ("optim.lr.x=1", "no setting 'optim.lr.x'"),
        ("reward.math=high", "reward.math: expected a number"),
        ("algo=", "algo is empty: give a name, as in algo=NAME"),
        ("optim.lr", "write name=value"),
        ("=1", "write name=value"),
        ("", "write name=value"),
        (".=1", "no setting"),
    ],
)
def test_a_slip_is_an_error_that_names_the_remedy(setting, says):
    assert says in error_of(override, Run(), [setting])


def test_an_override_changes_a_copy():
    before = Run()
    assert override(before, ["optim.lr=1"]) != before
    assert before == Run()


def test_later_overrides_win():
    assert override(Run(), ["name=a", "name=b"]).name == "b"


def test_a_new_algorithm_drops_the_settings_of_the_old_one():
    assert override(Run(), ["algo=dapo"]).algo == Choice("dapo", {})
    assert override(Run(), ["algo.beta=0.5"]).algo == Choice("grpo", {"beta": 0.5})


def test_the_order_of_an_algorithm_and_its_settings_does_not_matter():
    expected = Choice("dapo", {"high": 0.3})
    assert override(Run(), ["algo=dapo", "algo.high=0.3"]).algo == expected
    assert override(Run(), ["algo.high=0.3", "algo=dapo"]).algo == expected
    assert override(Run(), ["algo.high=0.3", "algo.name=dapo"]).algo == expected


@pytest.mark.parametrize("written", ["none", "None", "null", "", " ", '""', "''"])
def test_none_empties_a_text_that_is_empty_unless_it_is_set(written, tmp_path):
    assert override(Run(data="a.jsonl"), [f"data={written}"]).data == ""
    (tmp_path / "a.yaml").write_text(f"data: {written}\n")
    assert from_yaml(tmp_path / "a.yaml", Run(data="a.jsonl")).data == ""


def test_none_as_a_setting_of_an_algorithm_is_read_by_its_signature():
    choice = override(Run(), ["algo=dapo", "algo.kl=None", "algo.target=None"]).algo
    assert build_choice(choice, TABLE)[3:5] == ("None", None)


def test_an_option_is_not_its_equal_of_another_type():
    assert fit(1, Literal[1, 2]) == 1
    with pytest.raises(Misfit, match="one of 1, 2"):
        fit(True, Literal[1, 2])


def test_a_reward_that_is_a_function_has_no_parts():
    assert "replace it with reward=" in error_of(override, Run(reward=print), ["reward.math=1"])


def test_reward_weights_add_up_to_one_table():
    run = override(Run(reward={"format": 0.1}), ["reward.math=1", "reward.format=0.2"])
    assert run.reward == {"format": 0.2, "math": 1.0}


# --- choices ---


def dapo(*, low: float = 0.2, high: float = 0.28, kl: str = "none", target: float | None = 1.0, keep: int = 1):
    return ("dapo", low, high, kl, target, keep)


def fixed(*, length: int):
    return ("fixed", length)


TABLE = {"dapo": dapo, "fixed": fixed}


def test_the_signature_is_the_list_of_settings():
    assert settings_of(dapo) == {"low": 0.2, "high": 0.28, "kl": "none", "target": 1.0, "keep": 1}


def test_a_choice_calls_its_factory_with_checked_settings():
    choice = override(Run(), ["algo=dapo", "algo.high=1", "algo.kl=none", "algo.target=none"]).algo
    result = build_choice(choice, TABLE)
    assert result == ("dapo", 0.2, 1.0, "none", None, 1)
    assert type(result[2]) is float


@each(
    ("choice", "says"),
    [
        (Choice("dpao"), "no algorithm 'dpao'; did you mean 'dapo'? there are dapo, fixed"),
        (Choice("dapo", {"hihg": 1.0}), "did you mean 'high'? dapo has low, high, kl, target, keep"),
        (Choice("dapo", {"high": "much"}), "dapo: high is 'much': give a number"),
        (Choice("dapo", {"keep": 1.5}), ": give a whole number"),
        (Choice("dapo", {"keep": True}), ": give a whole number"),
        (Choice("dapo", {"kl": 3}), "kl is 3: give text"),
        (Choice("fixed"), "fixed needs the setting 'length'"),
    ],
)
def test_a_wrong_choice_is_an_error_that_lists_what_exists(choice, says):
    assert says in error_of(build_choice, choice, TABLE)


def test_unknown_lists_everything_even_when_nothing_is_near():
    assert str(unknown("colour", "xyz", ["red", "blue"])) == "no colour 'xyz'; there are red, blue"


# --- files ---


def yaml_file(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_yaml_overrides_nested_settings(tmp_path):
    text = """
name: "7"
fast: true
optim:
  lr: 1e-4
  critic_lr: null
  betas: [0.8, 1]
reward: {math: 1, format: 1e-1}
algo: {high: 0.3, name: dapo}
optim.warmup: 3
"""
    run = from_yaml(yaml_file(tmp_path, text), Run(optim=Optim(critic_lr=1.0)))
    assert run.optim == Optim(lr=1e-4, critic_lr=None, betas=(0.8, 1.0), warmup=3)
    assert run == Run(
        name="7",
        fast=True,
        optim=run.optim,
        reward={"math": 1.0, "format": 0.1},
        algo=Choice("dapo", {"high": 0.3}),
    )


def test_an_empty_table_in_yaml_clears_the_field(tmp_path):
    assert from_yaml(yaml_file(tmp_path, "reward: {}"), Run(reward={"math": 1.0})).reward == {}


def test_an_empty_yaml_file_changes_nothing(tmp_path):
    assert from_yaml(yaml_file(tmp_path, "# nothing\n"), Run()) == Run()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim: {lr: '1'}", "optim.lr: expected a number, got '1'"),
        ("name: 3", "name: expected text, got 3"),
        ("fast: 1", "true or false"),
        ("optm: {lr: 1}", "did you mean 'optim'"),
        ("optim: 3", "group of settings"),
        ("optim:", "group of settings"),
        ("name: a\nname: b", "'name' is given twice"),
        ("optim: {lr: 1, lr: 2}", "'lr' is given twice"),
        ("optim: {lr: 1", "line 1 is not valid YAML"),
        ("name: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("- 1\n- 2", "expected settings"),
        ("1: 2", "1 is not the name of a setting"),
        ("[" * 3000, "not valid YAML"),
    ],
)
def test_a_slip_in_yaml_names_the_file(tmp_path, text, says):
    path = yaml_file(tmp_path, text)
    message = error_of(from_yaml, path, Run())
    assert str(path) in message
    assert says in message


def test_yaml_that_is_missing_or_no_text_is_an_error(tmp_path):
    assert "no file" in error_of(from_yaml, tmp_path / "absent.yaml", Run())
    assert "no file" in error_of(from_yaml, tmp_path, Run())
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "binary.yaml line 1 is not UTF-8" in error_of(from_yaml, tmp_path / "binary.yaml", Run())


def test_what_goes_out_as_json_comes_back(tmp_path):
    run = Run(
        reward={"math": 1.0, "model:runs/rm.v2": 2.5e-7},
        algo=Choice("dapo", {"high": 0.3}),
        optim=Optim(lr=1e-05, betas=(0.1, 0.2)),
        targets=("a", "b"),
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(run)))
    assert from_yaml(path, Run()) == run


def test_json_names_callables_and_counts_rows():
    run = Run(reward=error_of, data=[{"prompt": "1+1"}] * 3)
    out = to_json(run)
    assert out["reward"].endswith("test_config.error_of")
    assert out["data"] == "3 rows in memory"
    assert to_json(partial(error_of, 1)) == out["reward"]
    assert to_json(["text"] * 65) == "65 rows in memory"
    assert to_json(((1.0, error_of), {"b", "a"})) == [[1.0, out["reward"]], ["a", "b"]]
    assert to_json({"x": float("inf")}) == {"x": "inf"}
    json.dumps(out, allow_nan=False)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (Run(name=3), "name: expected text, got 3"),  # pyright: ignore
        (Run(optim=Optim(warmup=1.5)), "optim.warmup: expected a whole number, got 1.5"),  # pyright: ignore
        (Run(optim=Optim(lr=float("nan"))), "optim.lr: expected a number"),
        (Run(optim=3), "optim: expected Optim, got 3"),  # pyright: ignore
        (Run(algo="grpo"), "algo: expected Choice, got 'grpo'"),  # pyright: ignore
    ],
)
def test_a_config_written_in_python_is_checked_too(run, says):
    assert says in error_of(check, run)


def test_a_right_config_passes_the_check():
    check(Run(data=[1, 2], reward=print, optim=Optim(lr=1)))


@each("name", OTHER_FRAMEWORKS)
def test_what_other_frameworks_call_a_setting_is_answered_with_a_setting(name: str):
    group, _, setting = OTHER_FRAMEWORKS[name].partition(".")
    recipe = Recipe()
    assert hasattr(recipe, group)
    if setting and group != "algo":
        assert hasattr(getattr(recipe, group), setting)
    with pytest.raises(HoneError, match=f"no setting '(train.)?{name}'; did you mean '{OTHER_FRAMEWORKS[name]}'"):
        override(recipe, [f"{name}=1" if not hasattr(recipe, name) else f"train.{name}=1"])
