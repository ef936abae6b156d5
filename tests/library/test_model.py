"""`hone.load`: one import gives a model that samples, scores and saves."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import decoder

import hone
from hone.data.text.chat import CHAT_SPECIALS, DEFAULT_TEMPLATE
from hone.data.text.tokenizer import Tokenizer, train_bpe
from hone.errors import HoneError
from hone.model.formats.peft import save_peft
from hone.model.formats.save import save_model
from hone.model.lora import add_lora

torch.set_num_threads(1)

PROMPTS = ["One?", "Two plus", "Three"]
CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template and an adapter of random weights beside it."""
    here = tmp_path_factory.mktemp("library")
    tokenizer = train_bpe([], vocab_size=262, specials=CHAT_SPECIALS)
    tokenizer = Tokenizer(tokenizer.inner, eos=tokenizer.eos, pad=tokenizer.pad, chat_template=DEFAULT_TEMPLATE)
    save_model(decoder(tokenizer.vocab_size, layers=2), tokenizer, here / "model")
    adapted = decoder(tokenizer.vocab_size, layers=2)
    add_lora(adapted, rank=2, alpha=8, seed=1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(2))
    save_peft(adapted, here / "adapter")
    return here


@pytest.fixture(scope="module")
def model(folder: Path) -> hone.Model:
    return hone.load(folder / "model")


def test_each_prompt_has_n_samples_with_text_tokens_logprobs_and_stop(model: hone.Model):
    found = model.sample(PROMPTS, n=3, max_tokens=7)
    assert [len(group) for group in found] == [3, 3, 3]
    for sample in (s for group in found for s in group):
        assert len(sample.tokens) == len(sample.logprobs) <= 7
        assert all(x <= 0 for x in sample.logprobs)
        body = sample.tokens[:-1] if sample.stop == "token" else sample.tokens
        assert sample.text == model.tokenizer.decode(body)
        assert sample.stop in ("token", "length")


def test_the_seed_decides_what_is_written(model: hone.Model):
    assert model.sample(PROMPTS, seed=1, max_tokens=9) == model.sample(PROMPTS, seed=1, max_tokens=9)
    assert model.sample(PROMPTS, seed=1, max_tokens=9) != model.sample(PROMPTS, seed=2, max_tokens=9)


def test_a_chat_is_rendered_by_the_template(model: hone.Model):
    ((chat,),) = model.sample([CHAT], max_tokens=5)
    ((plain,),) = model.sample(["1+1?"], max_tokens=5)
    assert chat.logprobs != plain.logprobs
    (again,) = model.logprobs([CHAT], [chat])
    assert again == pytest.approx(chat.logprobs, abs=1e-4)


def test_logprobs_are_those_that_the_sampler_recorded(model: hone.Model, folder: Path):
    for adapter in (None, folder / "adapter"):
        found = model.sample(PROMPTS, n=2, max_tokens=8, adapter=adapter)
        again = model.logprobs(PROMPTS, found, adapter=adapter)
        for recorded, scored in zip((s for g in found for s in g), (x for g in again for x in g), strict=True):
            assert scored == pytest.approx(recorded.logprobs, abs=1e-4), adapter


def test_threads_get_what_one_alone_gets(model: hone.Model, folder: Path):
    alone = model.sample(PROMPTS, n=4, max_tokens=12), model.sample(PROMPTS, max_tokens=12, adapter=folder / "adapter")
    scored = model.logprobs(PROMPTS, alone[0])

    def work(number: int) -> bool:
        adapter = folder / "adapter" if number % 2 else None
        same = model.sample(PROMPTS, n=1 if adapter else 4, max_tokens=12, adapter=adapter) == alone[number % 2]
        return same and model.logprobs(PROMPTS, alone[0]) == scored

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))


def test_prompts_and_completions_come_from_any_iterable(model: hone.Model):
    assert model.sample(iter(PROMPTS), max_tokens=3) == model.sample(PROMPTS, max_tokens=3)
    expected = model.logprobs(PROMPTS[:2], [[5, 6], [7]])
    for make in (torch.tensor, np.array, tuple, lambda ids: list(np.array(ids))):
        assert model.logprobs(PROMPTS[:2], iter([make([5, 6]), make([7])])) == expected, make


def test_a_notebook_shows_what_a_model_is(model: hone.Model, folder: Path):
    size = sum(x.numel() for x in model.decoder.parameters()) / 1e6
    assert repr(model) == f"hone.Model('{folder / 'model'}': {size:.1f}M parameters, float32, on cpu)"


def test_a_tilde_is_the_home_folder(model: hone.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert model.save("~/mine") == tmp_path / "mine"
    assert hone.load("~/mine").folder == tmp_path / "mine"
    assert not (tmp_path / "~").exists()


def test_a_text_is_scored_with_the_stop_token_that_ends_it(model: hone.Model):
    ids = [*model.tokenizer.encode(" and"), model.tokenizer.eos_id]
    assert model.logprobs(["One"], [" and"]) == model.logprobs(["One"], [ids])


def test_token_ids_may_be_numpys(model: hone.Model):
    assert model.logprobs(["One"], [np.array([5, 6])]) == model.logprobs(["One"], [[5, 6]])


def test_completions_keep_their_nesting(model: hone.Model):
    alone = model.logprobs(PROMPTS, ["a", "b", "c"])
    together = model.logprobs(PROMPTS, [["a"], ["b", "a"], []])
    assert [len(group) for group in together] == [1, 2, 0]
    assert together[0][0] == pytest.approx(alone[0], abs=1e-6)


def test_an_adapter_answers_for_its_prompts_alone(model: hone.Model, folder: Path):
    base = model.sample(PROMPTS, max_tokens=8, seed=4)
    adapted = model.sample(PROMPTS, max_tokens=8, seed=4, adapter=str(folder / "adapter"))
    mixed = model.sample(PROMPTS, max_tokens=8, seed=4, adapter=[None, folder / "adapter", None])
    assert [g[0].tokens for g in mixed] == [g[0].tokens for g in (base[0], adapted[1], base[2])]
    assert adapted[1][0].logprobs != base[1][0].logprobs
    assert model.sample(PROMPTS, max_tokens=8, seed=4) == base


def test_an_adapter_is_loaded_once_and_has_a_name(model: hone.Model, folder: Path):
    name = model.load_adapter(folder / "adapter")
    assert model.load_adapter(folder / "adapter") == name
    assert model.sample(["One"], max_tokens=4, adapter=name) == model.sample(
        ["One"], max_tokens=4, adapter=folder / "adapter"
    )


def test_transformers_loads_what_was_saved(model: hone.Model, folder: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for adapter in (None, folder / "adapter"):
        target = model.save(tmp_path / f"saved{adapter is None}", adapter=adapter)
        theirs = AutoModelForCausalLM.from_pretrained(target).eval()
        ids = AutoTokenizer.from_pretrained(target)("One two", return_tensors="pt").input_ids
        with torch.no_grad():
            logp = theirs(ids).logits.log_softmax(-1)
        expected = logp[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
        (found,) = model.logprobs([model.tokenizer.decode(ids[0, :1].tolist())], [ids[0, 1:].tolist()], adapter=adapter)
        assert found == pytest.approx(expected, abs=1e-4), adapter


def test_what_was_saved_loads_equal(model: hone.Model, tmp_path: Path):
    again = hone.load(model.save(tmp_path / "saved"))
    assert again.sample(PROMPTS, max_tokens=6) == model.sample(PROMPTS, max_tokens=6)


def test_a_runs_folder_stands_for_its_newest_checkpoint(folder: Path, tmp_path: Path):
    older, newer = (tmp_path / "run" / "checkpoints" / f"step-{n}" for n in (2, 10))
    loaded = hone.load(folder / "model")
    loaded.save(older)
    with torch.no_grad():
        loaded.decoder.model.embed_tokens.weight.mul_(2)
    loaded.save(newer)
    found = hone.load(tmp_path / "run")
    assert found.folder == newer
    assert found.logprobs(["One"], ["two"]) == loaded.logprobs(["One"], ["two"])


def test_a_name_is_looked_up_in_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cached = tmp_path / "models" / "small"
    hone.load(folder / "model").save(cached)
    sizes = {file.name: file.stat().st_size for file in cached.iterdir()}
    (cached / "fetched.json").write_text(json.dumps({"source": "small", "revision": "", "sizes": sizes}))
    monkeypatch.setenv("HONE_HOME", str(tmp_path))
    assert hone.load("small").folder == cached


def test_evaluate_takes_a_loaded_model(model: hone.Model, folder: Path):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    settings: dict[str, Any] = {"reward": lambda completion: float(len(completion)), "max_tokens": 4}
    assert hone.evaluate(model, rows, **settings) == hone.evaluate(folder / "model", rows, **settings)


def test_evaluate_reads_a_generator_and_a_path(model: hone.Model, tmp_path: Path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = hone.evaluate(model, rows, max_tokens=4)
    assert hone.evaluate(model, (row for row in rows), max_tokens=4) == expected
    assert hone.evaluate(model, tmp_path / "rows.jsonl", max_tokens=4) == expected


def test_what_evaluate_cannot_do_is_said_with_the_remedy(model: hone.Model):
    rows = [{"prompt": "1+1=", "answer": "2"}]
    for settings, says in (
        ({"limit": -1}, r"limit is -1: give a number of problems, or 0 for all"),
        ({"samples": 0}, "samples is 0: set it to 1 or more"),
        ({"reward": None}, "reward is None: give a verifier's name, a function, or names with weights"),
        ({"reward": ["math"]}, "give a verifier's name, a function, or names with weights"),
    ):
        with pytest.raises(HoneError, match=says):
            hone.evaluate(model, rows, max_tokens=4, **settings)


def test_what_cannot_be_done_is_said_in_a_line_with_the_remedy(model: hone.Model, folder: Path, tmp_path: Path):
    long = "a" * 200
    cases = {
        "one prompt": (lambda: model.sample("One?"), r"give a list of prompts, as in \[prompt\]"),
        "one chat": (lambda: model.sample(CHAT), r"give a list of prompts, as in \[prompt\]"),
        "token ids": (lambda: model.sample([[1, 2]]), r"prompt 0 is \[1, 2\]: give text, or a list of chat messages"),
        "no prompt": (lambda: model.sample(["a", None]), "prompt 1 is None: give text"),
        "one text": (lambda: model.logprobs(["a", "b"], "xy"), "completions is one completion: give a list"),
        "no text": (lambda: model.logprobs(["a"], [None]), "a completion is None: give text"),
        "no name": (lambda: hone.load(""), "model is empty"),
        "no samples": (lambda: model.sample(PROMPTS, n=0), "set n to 1 or more"),
        "no tokens": (lambda: model.sample(PROMPTS, max_tokens=0), "max_tokens is 0: set it to 1 or more"),
        "too long": (lambda: model.sample([long]), "shorten the prompt"),
        "too long to score": (lambda: model.logprobs([long], ["a"]), "shorten one of them"),
        "a completion too few": (lambda: model.logprobs(PROMPTS, ["a"]), "3 prompts and 1 completions"),
        "nothing before": (lambda: model.logprobs([""], [[5, 6]]), "a prompt has no token"),
        "no such token": (lambda: model.logprobs(["a"], [[10**6]]), "outside the vocabulary"),
        "no adapter": (lambda: model.sample(PROMPTS, adapter=tmp_path), "give the folder of a PEFT adapter"),
        "too few adapters": (lambda: model.sample(PROMPTS, adapter=[None]), "1 adapters for 3 prompts"),
        "a full folder": (lambda: model.save(folder / "model"), "save into a new folder"),
        "no model": (lambda: hone.load(tmp_path / "nothing"), "no model folder"),
        "an adapter": (lambda: hone.load(folder / "adapter"), "load its base model"),
        "an odd device": (lambda: hone.load(folder / "model", device="tpu"), "use auto, cpu, cuda or cuda:N"),
        "an odd type": (lambda: hone.load(folder / "model", dtype="int3"), "use one of auto, float32, bfloat16"),
    }
    for name, (call, says) in cases.items():
        with pytest.raises(HoneError, match=says) as error:
            call()
        assert "\n" not in str(error.value), name
