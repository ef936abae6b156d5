"""Files that others may have put there, and values beyond all sizes: each is refused in one line, and at once."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.trials.accidents import clear, command
from benchmarks.trials.small_runs import make_world, settings
from hone.config.load import load_function, load_recipe
from hone.config.overrides import from_yaml, override
from hone.config.recipe import Recipe
from hone.config.rules import validate
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.inference.defaults import Sampling, resolve_sampling
from hone.storage.files import sync, verify
from hone.storage.textfile import read_text
from hone.train.guard import SpikeDetector, load_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("outside") / "world")


# --- the user's own Python files ---


@pytest.mark.parametrize("ends", ["raise SystemExit", "import sys; sys.exit(3)", "raise GeneratorExit('x')"])
def test_a_file_that_ends_the_program_is_an_error_and_no_success(world, tmp_path, ends):
    at_once, when_called = tmp_path / "at_once.py", tmp_path / "when_called.py"
    at_once.write_text(f"{ends}\n")
    when_called.write_text(f"def recipe():\n    {ends}\n")
    for file in (at_once, when_called):
        code, said = command("run", str(file), *settings(world, "grpo", tmp_path / "run"))
        assert code == 2, said
        assert f"{file} line {2 if file == when_called else 1} " in said
    with pytest.raises(HoneError, match="cannot be loaded"):
        load_function(f"{at_once}:good")


def test_ctrl_c_while_a_file_is_loaded_stays_ctrl_c(tmp_path):
    (tmp_path / "a.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_recipe(str(tmp_path / "a.py"))


def test_a_file_without_functions_says_what_to_do(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(HoneError, match="has none: write one, or name another file"):
        load_function(f"{tmp_path / 'a.py'}:good")


# --- what is no file ---


def test_a_pipe_or_a_device_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "manifest.json").symlink_to("pipe")
    for name in ("pipe", "zeros", "."):
        with pytest.raises(OSError, match=r"regular|directory"):
            read_text(tmp_path / name)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "pipe")
    with pytest.raises(HoneError, match="no readable"):
        verify(tmp_path)
    with pytest.raises(HoneError, match="no batch"):
        load_rows(tmp_path / "pipe")


@pytest.mark.parametrize("odd", ["pipe", "zeros", "latin"])
def test_odd_files_among_the_recipes_are_told_and_not_waited_for(tmp_path, monkeypatch, capsys, odd):
    (tmp_path / "recipes").mkdir()
    path = tmp_path / "recipes" / "odd.py"
    {"pipe": os.mkfifo, "zeros": lambda p: p.symlink_to("/dev/zero"), "latin": lambda p: p.write_bytes(b"'\xe9'")}[odd](
        path
    )
    monkeypatch.chdir(tmp_path)
    assert command("recipes") == (0, "")
    code, said = command("recipes", "odd")
    assert code == 2
    assert clear(code, said) is None


def test_a_template_that_is_no_file_is_not_passed_over(tmp_path):
    train_bpe([], vocab_size=258).save(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.symlink_to("gone")
    with pytest.raises(HoneError, match="is no file: copy it again"):
        Tokenizer.load(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(HoneError, match="which no template needs"):
        Tokenizer.load(tmp_path)


# --- many and large ---


def _with_added(folder: Path, tokens: list[dict[str, object]]) -> None:
    train_bpe([], vocab_size=258).save(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {str(258 + i): token for i, token in enumerate(tokens)}
    path.write_text(json.dumps(config))


@pytest.mark.timeout(60)
def test_ten_thousand_added_tokens_are_added_at_once_and_keep_their_marks(tmp_path):
    _with_added(tmp_path, [{"content": f"<x{i}>", "special": i % 2 == 0} for i in range(10_000)])
    inner = Tokenizer.load(tmp_path).inner
    added = inner.get_added_tokens_decoder()
    assert [added[258 + i].special for i in range(4)] == [True, False, True, False]
    assert inner.token_to_id("<x9999>") == 258 + 9999


def test_eval_refuses_a_tokenizer_with_more_tokens_than_the_model(world, tmp_path):
    _with_added(tmp_path / "words", [{"content": "<x>"}])
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "words" / name).write_bytes((Path(world.model) / name).read_bytes())
    code, said = command("eval", str(tmp_path / "words"), world.data("problems"), "--max-tokens", "2")
    assert code == 2
    assert "the tokenizer has 259 tokens, the model 258" in said


def test_whole_numbers_that_no_float_holds_are_like_none_at_all(tmp_path):
    for name in ("temperature", "top_p", "top_k", "max_new_tokens", "max_length"):
        (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, name: 10**400}))
        assert resolve_sampling(Sampling(), tmp_path, context=48).sampling.temperature == 1.0
    with pytest.raises(HoneError, match="the losses so far are damaged"):
        SpikeDetector(3.0).load({"usual": [10**400], "tried": []})


@pytest.mark.parametrize(
    "setting",
    ["train.reward_memory=1e308", "train.reward_timeout=1e308", "train.threads=1000000000000", "lora.rank=10000000000",
     "train.prompts=1000000000000", "train.epochs=1000000000000", "sample.group=1000000000000"],
)  # fmt: skip
def test_a_setting_beyond_every_machine_is_refused(setting):
    with pytest.raises(HoneError, match="it must be at most"):
        validate(override(Recipe(data="x.jsonl", reward={"math": 1.0}), [setting]))


ALIASES = {
    "tables": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)),
    "lists": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "endless": "a: &a {x: *a, y: *a}\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ALIASES)
def test_aliases_that_stand_for_a_trillion_values_are_refused_at_once(tmp_path, kind):
    (tmp_path / "a.yaml").write_text(ALIASES[kind])
    with pytest.raises(HoneError, match=r"its aliases stand for .*: write each as name: value"):
        from_yaml(tmp_path / "a.yaml", Recipe())


@pytest.mark.timeout(60)
def test_a_settings_file_of_many_names_is_refused_at_once_and_aliases_still_work(tmp_path):
    (tmp_path / "many.yaml").write_text("".join(f"k{i}: 1\n" for i in range(20_000)))
    with pytest.raises(HoneError, match="no setting 'k0'"):
        from_yaml(tmp_path / "many.yaml", Recipe())
    (tmp_path / "a.yaml").write_text("seed: &n 7\ntrain: {steps: *n}\n")
    made = from_yaml(tmp_path / "a.yaml", Recipe())
    assert (made.seed, made.train.steps) == (7, 7)
