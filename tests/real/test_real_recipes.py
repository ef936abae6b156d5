"""The recipes on real data: two optimiser steps of each on the CPU, with the real model and the real rows."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hone
from hone.check import suite
from hone.config.load import load_recipe
from hone.config.overrides import override
from hone.data.feed.locate import Reading
from hone.launch import build, feeds
from hone.model.formats.folder import load_decoder
from hone.model.formats.peft import is_adapter

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
SMALL = ["train.steps=2", "train.prompts=2", "train.device=cpu", "optim.warmup=1", "train.threads=1"]


@pytest.fixture(autouse=True)
def _data(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ.get("HONE_DATA", SHARED))
    if not (folder / "gsm8k").is_dir():
        pytest.skip("GSM8K is not here: set HONE_DATA to a folder of datasets")
    monkeypatch.setenv("HONE_DATA", str(folder))
    monkeypatch.chdir(ROOT)


def shortest(name: str, number: int) -> list[dict[str, Any]]:
    """The dataset's shortest rows, so that a test is short as well."""
    rows = feeds.load_rows(name, Reading(chat=True))
    return sorted(rows, key=lambda row: len(json.dumps(row)))[:number]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [pytest.param("sft_gsm8k", marks=pytest.mark.slow), "lora_gsm8k"])
def test_two_steps_of_a_recipe_on_gsm8k(name: str, tmp_path: Path):
    made = override(load_recipe(name)(), [*SMALL, f"out={tmp_path}", "optim.lr=0.0003"])
    few = shortest("gsm8k:train", 2)  # the same two in both steps, so that the loss must fall
    done = hone.run(replace(made, data=few, eval_data=shortest("gsm8k:test", 2)))
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged[1]["nll"] < logged[0]["nll"] < 4
    assert 0 < logged[1]["eval/nll"] < 4
    assert load_decoder(done).config == load_decoder(build.resolve("smollm2-135m")).config
    assert is_adapter(done / "adapter") == (name == "lora_gsm8k")


TINY = {  # of what is sampled
    "grpo_gsm8k": ["sample.group=2", "sample.max_tokens=4", "train.steps=1"],
    "ppo_gsm8k": ["sample.group=2", "sample.max_tokens=4", "train.steps=1", "train.minibatches=1"],
    "dpo_smollm2": ["train.steps=1"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_step_of_every_reinforcement_and_preference_recipe(tmp_path: Path):
    for name, settings in TINY.items():
        made = override(load_recipe(name)(), [*SMALL, *settings, f"out={tmp_path / name}"])
        assert isinstance(made.data, str)
        done = hone.run(replace(made, data=shortest(made.data, 2)))
        (logged,) = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert logged["step"] == 1, name
        assert is_adapter(done / "adapter"), name


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_recipes_of_a_real_model_pass_their_check(tmp_path: Path):
    for name in ("sft_gsm8k", "lora_gsm8k", *TINY):
        made = override(load_recipe(name)(), ["train.device=cpu", f"out={tmp_path / name}"])
        assert isinstance(made.data, str)
        rows = shortest(made.data, 40)
        before = time.process_time()
        report = suite.check(replace(made, data=rows, eval_data="", train=replace(made.train, prompts=4, eval_every=0)))
        took = time.process_time() - before
        assert [f.name for f in report.failures] == [], name
        assert took < 60, f"{name} took {took:.0f} CPU seconds"  # 20 on a machine of its own


def test_two_steps_of_pre_training_on_shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from hone.data.text.tokenizer import train_bpe

    text = (Path(os.environ["HONE_DATA"]) / "tinyshakespeare" / "input.txt").read_text()
    train_bpe([text[:100_000]], vocab_size=512).save(tmp_path / "tokenizer")
    settings = [*SMALL, f"out={tmp_path / 'run'}", f"model.tokenizer={tmp_path / 'tokenizer'}", "model.layers=1"]
    done = hone.run(override(load_recipe("pretrain_tinyshakespeare")(), settings))
    assert load_decoder(done).config.vocab_size == 512
    torch.set_num_threads(1)
