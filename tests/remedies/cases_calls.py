"""Errors of functions that programs call, and of files that models are made of; their remedies followed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from places import decoder
from remedy_world import Case, World, call, prepared, tokenizer, typed

import hone
from hone.config.load import load_algorithm, load_function, load_recipe
from hone.config.overrides import Choice
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.engine.params import SampleParams
from hone.eval.sample_metrics import mean_and_error, pass_at_k
from hone.model.formats.cache import cached_folder, resolve
from hone.model.formats.fetch import fetch
from hone.model.formats.folder import load_decoder, load_scorer
from hone.model.formats.peft import load_peft, save_peft
from hone.model.lora import add_lora, select_adapter
from hone.model.scorer import Scorer
from hone.reward.learned.endpoint import Endpoint
from hone.reward.learned.reward_model import combine_scores
from hone.reward.score import as_scorer
from hone.reward.steps import split_steps
from hone.rollout.local import LocalSampler


def params(**given: Any) -> SampleParams:
    return SampleParams(**{"max_tokens": 2, "stop_ids": frozenset({1}), **given})


def parameter(name: str, wrong: Any, right: Any, says: str) -> Case:
    """A setting of the sampler."""
    return call(lambda w: params(**{name: wrong}), lambda w: params(**{name: right}), says)


def sampled(*prompts: Any, n: int = 1, **given: Any) -> None:
    LocalSampler(decoder(258)).sample(list(prompts), n=n, params=params(**given))


def drawn(w: World, *prompts: Any) -> None:
    hone.load(w / "model").sample(prompts, max_tokens=2)


def scored(w: World, completions: Any, *, prompts: Any = ("a", "b")) -> None:
    hone.load(w / "model").logprobs(prompts, completions)


def evaluated(w: World, **given: Any) -> None:
    hone.evaluate(w / "model", w / "problems.jsonl", max_tokens=2, **given)


def damaged(name: str, change: Callable[[Any], Any], says: str) -> Case:
    """A JSON file of a model's folder, changed; the remedy is the file as it was."""

    def loaded(world: World, changes: bool) -> None:
        folder = world.folder_of("model")
        if changes:
            value = change(json.loads((folder / name).read_text()))
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
        Tokenizer.load(folder)
        load_decoder(folder)

    return call(lambda w: loaded(w, True), lambda w: loaded(w, False), says)


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda value: {key: x for key, x in value.items() if key not in names}


def _adapter(world: World, change: Callable[[dict[str, Any]], Any] | None = None, *, lose: str = "") -> None:
    """Save an adapter, change its config, and load it again."""
    folder, model = Path(world.new()), decoder(258)
    add_lora(model, rank=2, alpha=4, targets=("q_proj",))
    save_peft(model, folder)
    if change is not None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    if lose:
        (folder / lose).unlink()
    load_peft(decoder(258), folder)


def adapter(change: Callable[[dict[str, Any]], Any], says: str) -> Case:
    return call(lambda w: _adapter(w, change), _adapter, says)


def _source(world: World, content: str, ask: Callable[[str], Any]) -> None:
    ask(world.file(content, ".py"))


def function(wrong: str, right: str, says: str, *, name: str = "") -> Case:
    """A file of a recipe, as it is and as the message asks for it."""
    return call(
        lambda w: _source(w, wrong, lambda path: load_recipe(f"{path}{name}")()),
        lambda w: _source(w, right, lambda path: load_recipe(f"{path}{name}")()),
        says,
    )


GOOD = "from hone import Recipe\n\n\ndef recipe():\n    return Recipe()\n"
PARAMETERS = [
    parameter("max_tokens", 0, 1, "set it to 1 or more"),
    parameter("max_tokens", 1.5, 1, "set it to a whole number"),
    parameter("temperature", -1, 0, "set it to 0 (greedy)"),
    parameter("temperature", "hot", 1.0, "set it to a number"),
    parameter("top_k", -1, 0, "set it to 0 (off) or more"),
    parameter("top_p", 0, 1, "set it above 0 and at most 1"),
    parameter("min_p", 2, 1, "set it between 0 (off) and 1"),
    parameter("repetition_penalty", 0, 1, "1 is off"),
    parameter("bias", {3: float("nan")}, {3: 1.0}, "give a number, or use banned"),
    parameter("bias", {-3: 1.0}, {3: 1.0}, "give token ids, 0 or more"),
    parameter("bias", [3], {17: -2.0}, "as in {17: -2.0}"),
    parameter("banned", frozenset({-1}), frozenset({1}), "give token ids, 0 or more"),
    parameter("stop", ("",), (), "leave it out"),
    parameter("stop", "x", ("x",), "give a tuple of strings"),
    parameter("stop", (3,), ("x",), "token ids go into stop_ids"),
    parameter("stop_ids", "a", frozenset({1}), "give token ids, whole numbers"),
    parameter("stop_ids", frozenset({-1}), frozenset({1}), "give token ids, 0 or more"),
    parameter("top_logprobs", 21, 20, "set it between 0 and 20"),
    parameter("seed", -1, 0, "set it between 0 and 2**64 - 1"),
    call(lambda w: drawn(w, [5, 6]), lambda w: drawn(w, "a"), "give text, or a list of chat messages"),
    call(lambda w: scored(w, "ab"), lambda w: scored(w, ["a", "b"]), "give a list with one for each prompt"),
    call(lambda w: scored(w, ["a", None]), lambda w: scored(w, ["a", [5]]), "what `sample` returned, or token ids"),
    call(lambda w: scored(w, ["a"], prompts=[""]), lambda w: scored(w, ["a"], prompts=["b"]), "has no token"),
    call(lambda w: hone.load(""), lambda w: hone.load(w / "model"), "a fetched model's name, or a folder"),
    call(lambda w: evaluated(w, limit=-1), lambda w: evaluated(w, limit=0), "give a number of problems, or 0 for all"),
    call(lambda w: evaluated(w, samples=0), lambda w: evaluated(w, samples=1), "samples is 0: set it to 1 or more"),
    call(lambda w: evaluated(w, reward=None), lambda w: evaluated(w, reward={"math": 1.0}), "names with weights"),
    call(lambda w: hone.rewards.math("4", cast(Any, 4)), lambda w: hone.rewards.math("4", "4"), "gold answer as text"),
    call(lambda w: hone.algo.grpo(process=cast(Any, 1)), lambda w: hone.algo.grpo(process=True), "be True or False"),
    call(lambda w: sampled("text"), lambda w: sampled([5, 6]), "give token ids, tokenizer.encode(text)"),
    call(lambda w: sampled([1.5]), lambda w: sampled([1]), "[[1, 2, 3]]"),
    call(lambda w: sampled([]), lambda w: sampled([5]), "give it at least one token"),
    call(lambda w: sampled([5] * 60), lambda w: sampled([5] * 9), "shorten the prompt"),
    call(lambda w: sampled([300]), lambda w: sampled([257]), "outside the model's vocabulary"),
    call(lambda w: sampled([5], n=0), lambda w: sampled([5], n=1), "set n to 1 or more"),
    call(
        lambda w: sampled([5], stop=("x",)),
        lambda w: LocalSampler(decoder(258), decode=tokenizer(w).decode).sample([[5]], n=1, params=params(stop=("x",))),
        "give the sampler decode=tokenizer.decode",
    ),
    call(
        lambda w: sampled([5], banned=frozenset(range(258))),
        lambda w: sampled([5], banned=frozenset(range(257))),
        "leave at least one to write",
    ),
    call(
        lambda w: LocalSampler(decoder(258), max_rows=0),
        lambda w: LocalSampler(decoder(258), max_rows=1),
        "set it to 1 or more",
    ),
]
FILES = [
    damaged("config.json", lambda _: "{", "copy it again"),
    damaged("config.json", lambda _: [], "not a JSON object"),
    damaged("config.json", without("model_type"), "copy the whole file from the model's source"),
    damaged("config.json", without("hidden_size"), "copy the whole file from the model's source"),
    damaged("config.json", lambda c: {**c, "vocab_size": 9}, "correct config.json"),
    damaged("config.json", lambda c: {**c, "num_hidden_layers": 2}, "copy them again, or correct config.json"),
    damaged("tokenizer_config.json", lambda _: "{", "save the tokenizer there again"),
    damaged("tokenizer_config.json", lambda _: [], "save the tokenizer there again"),
    damaged("tokenizer_config.json", lambda c: {**c, "eos_token": "<none>"}, "add it or name another in its config"),
    damaged("tokenizer_config.json", lambda c: {**c, "chat_settings": 3}, "correct it"),
    damaged("tokenizer_config.json", lambda c: {**c, "eos_token": 3}, "expected the token's text"),
    damaged("tokenizer_config.json", lambda c: {**c, "stop_tokens": 3}, "is not a list of tokens"),
    damaged("tokenizer_config.json", lambda c: {**c, "chat_template": 3}, "is not text: correct it"),
    adapter(lambda c: {**c, "peft_type": "IA3"}, "only LoRA can be loaded"),
    adapter(without("peft_type"), "copy it again"),
    adapter(lambda c: {**c, "lora_dropout": 0.1}, "set it to 0.0 in adapter_config.json"),
    adapter(lambda c: {**c, "r": -2}, "must be a positive number"),
    adapter(lambda c: {**c, "bias": "all"}, "changes biases too"),
    call(lambda w: _adapter(w, lose="adapter_config.json"), _adapter, "give the folder of a PEFT adapter"),
    call(lambda w: _adapter(w, lose="adapter_model.safetensors"), _adapter, "save the adapter again with safetensors"),
    call(lambda w: save_peft(decoder(258), Path(w.new())), _adapter, "add_lora or load_peft first"),
    call(
        lambda w: add_lora(decoder(258), rank=0, alpha=1),
        lambda w: add_lora(decoder(258), rank=1, alpha=1),
        "give at least 1",
    ),
    call(
        lambda w: add_lora(decoder(258), rank=1, alpha=1, targets=()),
        lambda w: add_lora(decoder(258), rank=1, alpha=1, targets=("q_proj", "v_proj")),
        'such as ("q_proj", "v_proj")',
    ),
    call(
        lambda w: add_lora(decoder(258), rank=1, alpha=1, targets=("(",)),
        lambda w: add_lora(decoder(258), rank=1, alpha=1, targets=("all-linear",)),
        "correct it",
    ),
    call(
        lambda w: add_lora(decoder(258), rank=1, alpha=1, name="a b"),
        lambda w: add_lora(decoder(258), rank=1, alpha=1, name="a-b"),
        'letters, digits, "-" and "_"',
    ),
    call(lambda w: select_adapter(decoder(258), "x"), lambda w: _two_adapters(), "add_lora first"),
    call(lambda w: _two_adapters(twice=True), lambda w: _two_adapters(), "give another name"),
    call(lambda w: load_scorer(w / "model"), lambda w: load_scorer(w / "scorer"), "train a reward model from it first"),
    call(lambda w: load_decoder(w.folder), lambda w: load_decoder(w / "model"), "copy the model folder again"),
    call(lambda w: load_decoder(Path("gpt2")), lambda w: load_decoder(w / "model"), "`hone fetch gpt2` brings it"),
    call(
        lambda w: load_decoder(Path("owner/some")),
        lambda w: load_decoder(w / "model"),
        "`hone fetch owner/some` brings it",
    ),
    call(lambda w: cached_folder("../x"), lambda w: cached_folder("smollm2-135m"), "as in smollm2-135m or OWNER/MODEL"),
    call(lambda w: fetch(w / "none.gguf"), lambda w: resolve(w / "model"), "check the path"),
    call(lambda w: resolve(w.file("GGUF", ".gguf")), lambda w: resolve(w / "model"), "--to FOLDER`"),
    call(
        lambda w: Tokenizer.load(w / "none"),
        lambda w: Tokenizer.load(w / "tokenizer"),
        "give the folder that holds tokenizer.json",
    ),
    call(lambda w: train_bpe([], vocab_size=9), lambda w: train_bpe([], vocab_size=258), "need at least 258"),
    call(
        lambda w: train_bpe([], vocab_size=300),
        lambda w: train_bpe(["a b"], vocab_size=260),
        "give it some, or set vocab_size to bytes",
    ),
    call(
        lambda w: tokenizer(w).id_of("<x>"),
        lambda w: train_bpe([], vocab_size=259, specials=["<x>"]).id_of("<x>"),
        "add it to the specials",
    ),
    call(
        lambda w: prepared(w, "sft", f"model.tokenizer={w / 'chat'}"),
        lambda w: prepared(w, "sft"),
        "or use the model's own tokenizer",
    ),
    call(
        lambda w: prepared(w, "distil", f"teacher={w / 'chat'}"),
        lambda w: prepared(w, "distil"),
        "use a teacher with the model's own tokenizer",
    ),
]
PROGRAMS = [
    function("", GOOD, "has several functions or none"),
    function("def a(): pass\n\ndef b(): pass\n", GOOD.replace("def recipe", "def a"), "choose one with", name=""),
    function("def recipe(x): pass\n", GOOD, "a recipe takes no arguments"),
    function("def recipe(): return 3\n", GOOD, "a recipe returns a hone.Recipe"),
    function("x = 1/0\n", GOOD, "cannot be loaded: ZeroDivisionError"),
    call(
        lambda w: load_algorithm(Choice(w.file("def mine(): return 3\n", ".py") + ":mine")),
        lambda w: load_algorithm(
            Choice(w.file("import hone\n\n\ndef mine(): return hone.algo.grpo()\n", ".py") + ":mine")
        ),
        "return a hone.algo.Algorithm",
    ),
    call(lambda w: load_recipe("nothing.py"), lambda w: load_recipe(w.file(GOOD, ".py")), "check the path"),
    call(
        lambda w: load_function("length"),
        lambda w: load_function(w / "rewards.py:length"),
        "write path/file.py:function",
    ),
    call(lambda w: pass_at_k(2, 1, 3), lambda w: pass_at_k(3, 1, 3), "sample more"),
    call(lambda w: mean_and_error([]), lambda w: mean_and_error([1.0]), "evaluate at least one task"),
    call(
        lambda w: combine_scores(np.ones((2, 2)), how="best"),
        lambda w: combine_scores(np.ones((2, 2)), how="mean"),
        "use one of mean",
    ),
    call(lambda w: split_steps("a", ""), lambda w: split_steps("a", "\n"), "as a line break"),
    call(lambda w: Scorer(decoder(258), kind="x"), lambda w: Scorer(decoder(258), kind="reward"), "use one of reward"),
    call(
        lambda w: Scorer(decoder(258)).normalise(0.0, 0.0),
        lambda w: Scorer(decoder(258)).normalise(0.0, 1.0),
        "calibrate on answers of different quality",
    ),
    call(lambda w: as_scorer(cast(Any, 3)), lambda w: as_scorer(lambda completion: 1.0), "wrap it in one"),
    call(lambda w: as_scorer(lambda gold: 1.0), lambda w: as_scorer(lambda completion, task: 1.0), "has the parameter"),
    call(
        lambda w: Endpoint(url="host", model="m"),
        lambda w: Endpoint(url="http://host:1/v1", model="m"),
        "write http://HOST:PORT/v1",
    ),
    call(
        lambda w: Endpoint(url="http://h:1/v1", model="m", key="NO_SUCH_KEY"),
        lambda w: Endpoint(url="http://h:1/v1", model="m", key="PATH"),
        "set it",
    ),
    call(lambda w: hone.algo.grpo(beta=-1.0), lambda w: hone.algo.grpo(beta=0.1), "it must be"),
    call(lambda w: hone.algo.dapo(overlong="x"), lambda w: hone.algo.dapo(), "use one of"),
    call(
        lambda w: hone.algo.grpo(kl_target=0.1, beta=0.0),
        lambda w: hone.algo.grpo(kl_target=0.1, beta=0.1),
        "set beta above 0",
    ),
    call(
        lambda w: hone.algo.pointwise_reward_model(loss="x"),
        lambda w: hone.algo.pointwise_reward_model(),
        "does not exist: use",
    ),
    call(lambda w: typed(w, "inspect", w / "none/here"), lambda w: typed(w, "inspect", w / "model"), "check the path"),
]


def _two_adapters(*, twice: bool = False) -> None:
    model = decoder(258)
    add_lora(model, rank=1, alpha=1, name="one")
    add_lora(model, rank=1, alpha=1, name="one" if twice else "two")
    select_adapter(model, "one")


CALLS: list[Case] = [*PARAMETERS, *FILES, *PROGRAMS]
