"""What a user can get wrong: one line that names the remedy, exit code 2, and not a trace on the disk."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from small import World, arguments, contents, hone, recipe, temporary, write_rows

import hone as package
from hone.cli import main
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError

torch.set_num_threads(1)


@pytest.fixture
def refuse(world: World, tmp_path: Path, capsys):
    """Runs a recipe of the algorithm with settings that must be refused; the error's text."""

    def refuse(algo: str, *settings: str, lines: int = 1) -> str:
        out = tmp_path / "runs" / "run"
        before = contents(tmp_path)
        capsys.readouterr()
        code = main([*arguments(recipe(world, algo, out), world), *settings])
        said = capsys.readouterr()
        assert code == 2, said.err
        assert said.out == ""
        assert "Traceback" not in said.err
        assert len(said.err.splitlines()) == lines, said.err
        assert said.err.splitlines()[-1].startswith("hone: error: ")
        assert contents(tmp_path) == before
        assert not (tmp_path / "runs").exists()
        assert temporary(tmp_path) == []
        return said.err.splitlines()[-1]

    return refuse


# --- settings ---


@pytest.mark.parametrize(
    ("algo", "setting", "says"),
    [
        ("grpo", "train.stpes=3", "no setting 'train.stpes'; did you mean 'train.steps' or"),
        ("grpo", "trian.steps=3", "did you mean 'train'?"),
        ("grpo", "train.steps=many", "train.steps: expected a whole number, got 'many'"),
        ("grpo", "train.steps=2.5", "train.steps: expected a whole number"),
        ("grpo", "train.steps=true", "train.steps: expected a whole number"),
        ("grpo", "train.steps=0", "train.steps is 0: it must be at least 1"),
        ("grpo", "optim.lr=nan", "optim.lr: expected a number"),
        ("grpo", "optim.lr=0", "optim.lr is 0.0: it must be above 0"),
        ("grpo", "train=3", "train is a group of settings: set one of train.steps"),
        ("grpo", "critic.kind=big", "critic.kind: expected one of none, own, shared"),
        ("grpo", "algo=gropo", "no algorithm 'gropo'; did you mean"),
        ("grpo", "algo.bta=1", "no setting 'bta'; did you mean 'beta'?"),
        ("grpo", "algo.beta=high", "grpo: beta is 'high': give a number"),
        ("grpo", "algo.beta=-1", "grpo: beta is -1.0: it must be at least 0"),
        ("grpo", "algo.kl=reward:k3", "use reward:k1 or loss:k3"),
        ("grpo", "sample.group=1", "set sample.group to 2 or more"),
        ("rloo", "sample.group=1", "set sample.group to 2 or more"),
        ("online_dpo", "sample.group=1", "set sample.group to 2 or more"),
        ("reinforce", "train.epochs=2", "reinforce is strictly on policy: set train.epochs=1"),
        ("rloo", "train.minibatches=3", "strictly on policy: set train.epochs=1 and train.minibatches=1"),
        ("a2c", "train.epochs=2", "strictly on policy"),
        ("trpo", "train.epochs=2", "trpo bounds one step an iteration: set train.epochs=1"),
        ("sft", "train.epochs=2", "sft is offline: leave train.epochs and train.minibatches at 1"),
        (
            "grpo",
            "train.minibatches=99",
            "but a step has 3 prompts: set train.minibatches=3 or less, or train.prompts=99 or more",
        ),
        ("kto", "train.prompts=1", "kto compares each row with the next: set train.prompts to 2 or more"),
        ("sft", "lora.rank=2 lora.targets=nothing", 'lora target "nothing" matches no layer'),
        ("grpo", "reward=maths", "no reward 'maths'; did you mean 'math'?"),
        ("grpo", "reward={}", "there is no reward: set reward.math=1.0"),
        ("grpo", "data=", "there is no data: set data=FILE.jsonl"),
        ("grpo", "data=none", "there is no data: set data=FILE.jsonl"),
        ("sft", "train.eval_every=2 eval_data=null", "no eval_data: set eval_data, or train.eval_every=0"),
        ("sft", "read.columns.promt=a", "no column 'promt'; did you mean 'prompt'"),
        ("sft", "read.columns.prompt=", "read.columns.prompt is empty: give the name of a column of the data"),
        ("sft", "read.columns.prompt=question", "line 1: read.columns.prompt is question, which is no column: use one"),
        ("grpo", "out=", "out is empty"),
        ("grpo", "name=a/b", "name is 'a/b': it must be a plain word"),
        ("grpo", "algo.process=true", "grpo with process=true reads step rewards: set process.path=FOLDER"),
    ],
)
def test_a_wrong_setting(algo: str, setting: str, says: str, refuse):
    assert says in refuse(algo, *setting.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no file"),
        ("train:\n  stpes: 3\n", "did you mean 'train.steps' or"),
        ("train: [1, 2]\n", "train"),
        ("train:\n  steps: many\n", "expected a whole number, got 'many'"),
        ("- 1\n- 2\n", "expected settings (name: value), got a list of 2"),
        ("train:\n  steps: 1\n  steps: 2\n", "line 2 is not valid YAML ('steps' is given twice): correct it"),
        ("train: {steps: 1\n", "is not valid YAML"),
        ("seed: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
        ("3: 4\n", "3 is not the name of a setting: put it in quotes"),
    ],
)
def test_a_wrong_settings_file(text: str | None, says: str, refuse, tmp_path: Path):
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text)
    error = refuse("grpo", "--config", str(path))
    assert says in error
    assert "settings.yaml" in error


# --- data ---


def test_a_missing_or_strange_data_file(refuse, tmp_path: Path):
    assert "No such file or directory: give the path of a dataset file" in refuse("sft", f"data={tmp_path}/no.jsonl")
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    assert "rows.csv is empty: it needs at least one row" in refuse("sft", f"data={tmp_path}/rows.csv")
    (tmp_path / "rows.xlsx").write_text("PK")
    assert "rows.xlsx is not a kind of file Hone reads" in refuse("sft", f"data={tmp_path}/rows.xlsx")
    assert "no file matches" in refuse("sft", f"data={tmp_path}/*.jsonl")
    assert "gsm9k is no file and no known dataset: did you mean gsm8k?" in refuse("sft", "data=gsm9k")
    assert "no dataset of that name is known (gsm8k, " in refuse("sft", "data=imdb")
    assert "write hf:owner/name:train" in refuse("sft", "data=owner/name")
    (tmp_path / "folder.jsonl").mkdir()
    assert "is a folder: name its files" in refuse("sft", f"data={tmp_path}/folder.jsonl")


@pytest.mark.parametrize("algo", ["sft", "grpo", "dpo"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "rows.jsonl is empty: it needs at least one row"),
        ("\n  \n", "rows.jsonl is empty: it needs at least one row"),
        ('\n{"prompt": \n', "rows.jsonl line 2 is not valid JSON"),
        ("[1, 2]\n", "rows.jsonl line 1 is a list, not an object: write one row as {column: value}"),
        ('{"question": "a"}\n', "line 1"),
        ('{"prompt": "", "completion": "b", "chosen": "b", "rejected": "c"}\n', 'column "prompt" is empty'),
        ('{"prompt": 3, "completion": "b", "chosen": "b", "rejected": "c"}\n', 'column "prompt" is int'),
        ('{"prompt": null, "completion": "b", "chosen": "b", "rejected": "c"}\n', 'column "prompt" is null'),
    ],
)
def test_a_wrong_row_is_named(algo: str, text: str, says: str, refuse, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(text)
    error = refuse(algo, f"data={tmp_path / 'rows.jsonl'}")
    assert says in error
    assert "rows.jsonl" in error


@pytest.mark.parametrize(
    ("algo", "rows", "says"),
    [
        ("sft", "text", "sft reads (prompt, completion) or (messages): add messages"),
        ("sft", "problems", "has prompts but nothing to train on: add completions, or train with a reward"),
        ("pretrain", "answers", "pretrain reads (text): add text"),
        ("dpo", "answers", "dpo reads (prompt, chosen, rejected): add chosen and rejected"),
        ("ipo", "labels", "ipo reads (prompt, chosen, rejected): add chosen and rejected"),
        ("reward_model", "answers", "reward_model reads (prompt, chosen, rejected): add chosen"),
        ("kto", "answers", "kto reads (prompt, completion, label): add label"),
        ("pointwise_reward_model", "answers", "reads (prompt, completion, score) or (prompt, completion, label)"),
        ("process_reward_model", "answers", "reads (prompt, steps, step_labels): add steps and step_labels"),
        ("grpo", "text", 'column "prompt" is missing (found: text): add it or rename one'),
    ],
)
def test_rows_of_another_algorithm(algo: str, rows: str, says: str, refuse, world: World):
    assert says in refuse(algo, f"data={world.data(rows)}")


def test_columns_of_other_names_are_met_with_the_setting_that_maps_them(refuse, tmp_path: Path):
    data = f"data={write_rows(tmp_path / 'rows.jsonl', [{'question': '1+1', 'answer': '2'}])}"
    assert "read.columns.prompt=question" in refuse("sft", data)
    assert "read.columns.prompt=question" in refuse("grpo", data)
    assert "read.columns.completion=answer" in refuse("sft", data, "read.columns.prompt=question")
    told = refuse("dpo", f"data={write_rows(tmp_path / 'b.jsonl', [{'prompt': 'a', 'chosen': 'b', 'worse': 'c'}])}")
    assert 'column "rejected" is missing' in told
    assert "as with read.columns.rejected=worse" in told


def test_rows_longer_than_the_context(refuse, tmp_path: Path):
    long = "7" * 60
    rows = [{"prompt": "1", "completion": "2", "chosen": "3", "rejected": "4"}]
    rows += [{"prompt": long, "completion": "2", "chosen": "3", "rejected": "4"}]
    data = f"data={write_rows(tmp_path / 'rows.jsonl', rows)}"
    assert "rows.jsonl line 2: the prompt has 60 tokens, the limit is 47: read.overlong=drop leaves" in refuse(
        "grpo", data
    )
    for algo in ("sft", "dpo"):
        settings = [data]
        if algo == "sft":
            settings = [f"data={write_rows(tmp_path / 'sft.jsonl', [{'prompt': '1', 'completion': long}])}"]
        assert "tokens, the limit is 48: read.overlong=drop leaves such rows out, read.overlong=truncate" in refuse(
            algo, *settings
        )
    assert "the prompt has 60 tokens" in refuse("grpo", f"eval_{data}")


# --- models ---


def test_a_missing_or_wrong_model(refuse, world: World, tmp_path: Path):
    assert "no model folder" in refuse("sft", f"model.path={tmp_path / 'absent'}")
    assert "runs/demo/nothing: `hone demo` makes it" in refuse("sft", "model.path=runs/demo/nothing")
    assert "runs/demo/data/steps.jsonl: No such file or directory: `hone label-steps` makes it" in refuse(
        "sft", "data=runs/demo/data/steps.jsonl"
    )
    assert "runs/process: `hone run process` makes it" in refuse("sft", "model.path=runs/process")
    error = refuse("sft", f"model.path={tmp_path / 'absent'}", f"model.tokenizer={world / 'tokenizer'}")
    assert "no model folder" in error
    assert "there is no config.json in" in refuse("sft", f"model.path={world / 'tokenizer'}")
    assert "model.path is empty, so the model is fresh: set model.tokenizer=FOLDER" in refuse("sft", "model.path=")
    assert "unknown tensors score" in refuse("sft", f"model.path={world / 'scorer'}")
    assert "no model folder" in refuse("grpo", f"reward=model:{tmp_path / 'absent'}")
    assert "train a reward model from it first" in refuse("grpo", f"reward=model:{world / 'model'}")


def test_damaged_weights(refuse, world: World, tmp_path: Path):
    hurt = tmp_path / "hurt"
    shutil.copytree(world / "model", hurt)
    weights = hurt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors is damaged" in refuse("sft", f"model.path={hurt}")
    weights.unlink()
    assert "has no model.safetensors" in refuse("sft", f"model.path={hurt}")
    (hurt / "config.json").write_text("{")
    assert "is not JSON" in refuse("sft", f"model.path={hurt}")


def test_a_vocabulary_that_does_not_fit(refuse, world: World, tmp_path: Path):
    large = train_bpe(["many words and more words"] * 9, vocab_size=262)
    large.save(tmp_path / "large")
    says = "the tokenizer has 262 tokens, the model 258: set the model's vocab_size to 262 or more"
    assert says in refuse("sft", f"model.tokenizer={tmp_path / 'large'}")
    fresh = ["model.path=", f"model.tokenizer={tmp_path / 'large'}"]
    assert "the tokenizer has 262 tokens, the model 200" in refuse("sft", *fresh, "model.vocab_size=200")


# --- rewards ---


@pytest.mark.parametrize(
    ("name", "says", "lines"),
    [
        ("raises", "9 of 9 rewards are invalid, more than 20%; most often (9 times): RuntimeError: two lines (", 2),
        ("none", "the reward returned NoneType None, expected a finite number", 2),
        ("nan", "the reward returned float nan, expected a finite number", 2),
        ("infinite", "the reward returned float inf, expected a finite number", 2),
        ("text", "the reward returned str 'good', expected a finite number", 2),
        ("exits", "SystemExit: 3", 2),
        ("too_few", "reward too_few returned a list of 8, expected a list of 9: return one value for each", 2),
        ("no_list", "reward no_list returned a float, expected a list of 9", 2),
        ("wrong_names", "reward wrong_names has the parameter 'answer': name them from completion, task, rollout", 1),
        ("bytes_sun", "no function 'bytes_sun'; did you mean 'bytes_sum'?", 1),
    ],
)
def test_a_wrong_reward(name: str, says: str, lines: int, refuse, world: World):
    assert says in refuse("grpo", f"reward={world / 'rewards.py'}:{name}", lines=lines)


def test_a_missing_or_broken_reward_file(refuse, tmp_path: Path):
    assert "no file absent.py: check the path" in refuse("grpo", "reward=absent.py:score")
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert "line 1 cannot be loaded: SyntaxError" in refuse("grpo", f"reward={tmp_path / 'broken.py'}:f")


def test_invalid_rewards_later_on_leave_what_was_saved(world: World, tmp_path: Path, capsys):
    (tmp_path / "tires.py").write_text(
        "calls = [0]\n\ndef tires(completions):\n    calls[0] += 1\n"
        "    return [None if calls[0] > 3 else i % 2 for i, _ in enumerate(completions)]\n"
    )
    out = tmp_path / "run"
    made = recipe(world, "grpo", out, f"reward={tmp_path / 'tires.py'}:tires")
    assert main([*arguments(made, world), "save.every=2"]) == 2
    assert "9 of 9 rewards are invalid" in capsys.readouterr().err.splitlines()[-1]
    assert [p.name for p in sorted((out / "checkpoints").glob("step-*"))] == ["step-000002", "step-000003"]
    assert temporary(out) == []


# --- places ---


def test_a_folder_that_holds_a_run_is_left_alone(world: World, tmp_path: Path, capsys):
    out = tmp_path / "run"
    made = recipe(world, "sft", out)
    package.run(made)
    before = contents(out)
    capsys.readouterr()
    assert main(arguments(made, world)) == 2
    says = f"hone: error: {out} already holds a run: continue it with `hone resume {out}`, or choose another out=\n"
    assert capsys.readouterr().err == says
    assert contents(out) == before


def test_a_folder_that_holds_a_model_is_left_alone(world: World, tmp_path: Path, capsys):
    """out= set to the model's own folder would write the run's config.json over the model's."""
    out = tmp_path / "model"
    shutil.copytree(world / "model", out)
    before = contents(out)
    assert main([*arguments(recipe(world, "sft", out), world), f"model.path={out}"]) == 2
    assert "has a config.json that is not of a run: choose another out=" in capsys.readouterr().err
    assert contents(out) == before


def test_a_folder_with_a_users_own_notes_is_used_and_they_stay(world: World, tmp_path: Path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("mine")
    made = recipe(world, "grpo", tmp_path / "run")
    assert main([*arguments(made, world), f"reward={world / 'rewards.py'}:none"]) == 2
    assert contents(tmp_path / "run") == {"notes.txt": b"mine"}
    assert main(arguments(made, world)) == 0
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    capsys.readouterr()


def test_a_file_in_the_way(world: World, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file/run"):
        assert main(arguments(recipe(world, "sft", out), world)) == 2
        err = capsys.readouterr().err
        assert "a file is in the way, choose another path" in err
        assert err.count("\n") == 1
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_place_that_cannot_be_written(world: World, tmp_path: Path, capsys):
    place = tmp_path / "sealed"
    place.mkdir()
    root = os.geteuid() == 0
    command = ["mount", "-t", "tmpfs", "-o", "ro", "none", str(place)] if root else ["chmod", "555", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("root here may not mount, and nothing is read-only for root")
    try:
        assert main(arguments(recipe(world, "sft", place / "run"), world)) == 2
    finally:
        subprocess.run(["umount", str(place)] if root else ["chmod", "755", str(place)], check=True)
    err = capsys.readouterr().err
    assert "choose a folder that you may write to, with out=FOLDER" in err
    assert err.count("\n") == 1
    assert contents(tmp_path) == {}


# --- evaluation, debugging, recipes ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--reward", "maths"], "no reward 'maths'; did you mean 'math'?"),
        (["--reward", "model:"], "no reward 'model:'"),
        (["--reward", "REWARDS:none"], "valid reward, most often (7 of 7 times): the reward returned NoneType None"),
        (["--reward", "REWARDS:raises"], "rewards.py:12): mend the reward function"),
        (["--samples", "0"], "set n to 1 or more"),
        (["--limit", "-1"], "limit is -1: give a number of problems, or 0 for all"),
        (["--temperature", "-1"], "temperature is -1.0: set it to 0 (greedy)"),
        (["--max-tokens", "0"], "max_tokens is 0: set it to 1 or more"),
    ],
)
def test_a_wrong_evaluation(options: list[str], says: str, world: World, capsys):
    options = [option.replace("REWARDS", world / "rewards.py") for option in options]
    assert main(["eval", world / "model", world.data("problems"), *options]) == 2
    said = capsys.readouterr()
    *progress, error = said.err.splitlines()
    assert says in error
    assert said.out == ""
    assert not progress or "--reward" in options  # only there has anything been sampled


@pytest.mark.parametrize("setting", ["train.stpes=3", "data=absent.jsonl", "reward=REWARDS:raises"])
def test_debug_shows_the_traceback_and_then_the_line(setting: str, world: World, tmp_path: Path, capsys):
    setting = setting.replace("REWARDS", world / "rewards.py")
    assert main(["--debug", *arguments(recipe(world, "grpo", tmp_path / "run"), world), setting]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1].startswith("hone: error: ")
    assert contents(tmp_path) == {}


def test_the_process_itself_exits_with_two_and_one_line(world: World, tmp_path: Path):
    made = recipe(world, "grpo", Path("run"))
    code, out, err = hone(*arguments(made, world), "sample.group=1", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err == "hone: error: grpo compares samples of one prompt: set sample.group to 2 or more\n"
    assert list(tmp_path.iterdir()) == []


def test_the_process_is_quick_to_refuse_what_needs_no_torch(world: World, tmp_path: Path):
    for arguments_, says in (
        (["run", "absent"], "no recipe 'absent'"),
        (["run", "absent.py"], "no file absent.py"),
        (["resume", "absent"], "no folder absent"),
        (["algos", "gropo"], "did you mean"),
    ):
        code, out, err = hone(*arguments_, cwd=tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("hone: error: ")
        assert says in err


def test_errors_from_python_are_the_same(world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=r"set sample\.group to 2 or more"):
        package.run(recipe(world, "grpo", tmp_path / "run", "sample.group=1"))
    with pytest.raises(HoneError, match=r"a recipe returns a hone\.Recipe"):
        package.run({"data": "x"})  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_the_error_line_is_one_line_whatever_is_in_it(refuse, tmp_path: Path):
    (tmp_path / "a\nb.jsonl").write_text("")
    assert "is empty" in refuse("sft", f"data={tmp_path}/a\nb.jsonl")
