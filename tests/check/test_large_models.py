"""A large model is checked with little text, partly on its first layers: the same faults are found."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_world import World, chat_tokenizer, failing, job_of, make_world, names, recipe, verdict
from places import decoder

import hone.algo
from hone.algo import ALGORITHMS
from hone.check import probe, suite
from hone.check.perturb import perturb_weights
from hone.checkpoint import state
from hone.data.text.tokenizer import train_bpe
from hone.model.formats.save import save_model
from hone.model.policy import Policy, frozen_copy
from hone.rollout.local import LocalSampler
from hone.storage.files import save_tensors
from hone.train import optim
from hone.types import Group


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world with models of four layers."""
    made = make_world(tmp_path_factory.mktemp("deep"))
    for name, tokenizer in (("plain", train_bpe([], vocab_size=258)), ("chat", chat_tokenizer())):
        save_model(decoder(tokenizer.vocab_size, layers=4), tokenizer, made.folder / name)
    return made


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LARGE", 0)


def test_every_algorithm_passes(deep: World):
    for algo in ALGORITHMS:
        report = suite.check(recipe(deep, algo))
        assert names(report, "fail") == set(), f"{algo}: {report.failures}"


def test_adapters_critics_and_chats_pass(deep: World):
    chats = {"model": hone.ModelSpec(path=deep / "chat"), "data": deep / "chats.jsonl"}
    for algo, settings, fields in (
        ("sft", ["lora.rank=2"], {}),
        ("grpo", ["lora.rank=2"], {}),
        ("ppo", ["critic.kind=shared"], {}),
        ("grpo", [], chats),
    ):
        report = suite.check(recipe(deep, algo, *settings, **fields))
        assert names(report, "fail") == set(), f"{algo} {settings}: {report.failures}"


def test_the_checkpoint_is_tried_on_the_first_layers(deep: World):
    assert verdict(job_of(deep, "sft"), "checkpoint")[1].endswith("(tried on 2 of 4 layers)")


def test_examining_moves_nothing(deep: World):
    job = job_of(deep, "grpo")
    before = copy.deepcopy([p.data for p in job.policy.parameters()])
    suite.examine(job)
    assert all(torch.equal(p, b) for p, b in zip(job.policy.parameters(), before, strict=True))
    assert (job.learner.updates, job.step) == (0, 0)


def test_faults_of_the_model_are_found(deep: World):
    job = job_of(deep, "sft")
    embedding = job.policy.decoder.model.embed_tokens
    embedding.register_forward_hook(lambda module, inputs, out: F.dropout(out, 0.2, training=module.training))  # pyright: ignore
    assert "forward pass" in failing(job)
    job = job_of(deep, "dpo")
    assert isinstance(job.policy, Policy)
    with perturb_weights(list(job.policy.parameters())):
        job.learner.reference = job.policy.reference = frozen_copy(job.policy)
    assert failing(job) == {"reference"}
    job = job_of(deep, "sft")
    list(job.policy.parameters())[-2].data.view(-1)[0] = float("nan")
    assert "gradient" in failing(job)


def test_a_sampler_of_other_weights_is_found(deep: World):
    job = job_of(deep, "grpo")
    assert job.roller is not None
    job.roller.sampler = LocalSampler(copy.deepcopy(job.policy.decoder))
    assert failing(job) == {"published weights"}


def test_samples_that_share_their_random_numbers_are_found(deep: World):
    class Shared(LocalSampler):
        def sample(self, prompts: Any, *, n: int, params: Any, first_request: int = 0) -> list[Group]:  # pyright: ignore
            return [g * n for g in super().sample(prompts, n=1, params=params, first_request=first_request)]

    job = job_of(deep, "grpo")
    assert job.roller is not None
    job.roller.sampler = Shared(job.policy.decoder)
    assert "groups differ" in failing(job)


def test_losses_and_layouts_are_found_on_the_first_layers(deep: World, monkeypatch: pytest.MonkeyPatch):
    def mean(fwd: Any, batch: Any) -> torch.Tensor:
        return -fwd.logp / len(batch)

    assert failing(job_of(deep, replace(hone.algo.sft(), loss=((1.0, mean),)))) == {"batch cut"}

    def leaky(document: torch.Tensor) -> torch.Tensor:
        width = document.shape[1]
        return torch.ones(width, width, dtype=torch.bool).tril().expand(len(document), 1, width, width)

    monkeypatch.setattr("hone.model.layout.block_causal", leaky)
    assert failing(job_of(deep, "sft")) == {"layouts"}


def test_faults_of_the_update_are_found(deep: World, monkeypatch: pytest.MonkeyPatch):
    job = job_of(deep, "sft")
    for group in job.learner.optimizer.param_groups:
        group["maximize"] = True
    assert failing(job) == {"one step", "update in force"}
    assert failing(job_of(deep, "sft", "optim.lr=1.0")) == {"one step"}
    monkeypatch.setattr(optim, "clip_gradients", lambda ps, most, parts: torch.tensor(1.0))
    assert failing(job_of(deep, "sft")) == {"update in force"}


def test_a_checkpoint_that_loses_precision_is_found(deep: World, monkeypatch: pytest.MonkeyPatch):
    def rounded(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        save_tensors(path, {name: x.bfloat16().to(x.dtype) if x.ndim else x for name, x in tensors.items()})

    monkeypatch.setattr(state, "save_tensors", rounded)
    assert failing(job_of(deep, "sft")) == {"checkpoint"}
