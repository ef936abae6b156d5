"""Distillation as a run: which teacher it takes, which it refuses, and what it leaves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import Wire, World, assert_same_run, decoder, interrupt, metrics, recipe, watched

import hone
from hone.config.recipe import Recipe
from hone.data.text.tokenizer import train_bpe
from hone.errors import HoneError, Interrupted
from hone.launch.job import prepare
from hone.model.formats.save import save_model
from hone.model.policy import Policy
from hone.model.teacher import TopKTeacher

torch.set_num_threads(1)


def made(world: World, out: Path, *settings: str) -> Recipe:
    return recipe(world, "distil", out, *settings)


def test_the_teacher_is_the_one_asked_for_frozen_and_at_the_students_temperature(world: World, tmp_path: Path):
    job = prepare(made(world, tmp_path, "sample.temperature=0.5", "lora.rank=2", "train.layout=packed"))
    teacher = job.policy.reference
    assert isinstance(teacher, Policy)
    assert job.learner.reference is teacher
    assert (teacher.temperature, teacher.layout) == (0.5, "packed")
    assert not any(p.requires_grad for p in teacher.parameters())
    expected = decoder(258, seed=2).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in teacher.decoder.state_dict().items())
    bucket_rest = prepare(made(world, tmp_path, "algo.top_k=7", "train.dtype=bfloat16")).policy.reference
    assert isinstance(bucket_rest, TopKTeacher)
    assert bucket_rest.k == 7
    assert bucket_rest.policy.decoder.lm_head.weight.dtype == torch.bfloat16


def test_a_teachers_padding_beyond_the_tokenizer_is_cut_off(world: World, tmp_path: Path):
    save_model(decoder(264, seed=2), world.tokenizer, tmp_path / "wide")
    job = prepare(made(world, tmp_path / "run", f"teacher={tmp_path / 'wide'}"))
    assert isinstance(job.policy.reference, Policy)
    assert len(job.policy.reference.decoder.lm_head.weight) == 258
    hone.run(made(world, tmp_path / "run", f"teacher={tmp_path / 'wide'}", "train.steps=1"))


def test_what_cannot_teach_is_refused_in_one_line(world: World, tmp_path: Path):
    save_model(decoder(258, seed=2), world.tokenizer, tmp_path / "narrow")
    save_model(decoder(300), world.tokenizer, tmp_path / "student")
    save_model(decoder(300, seed=2), train_bpe(["banana " * 9], vocab_size=262), tmp_path / "stranger")
    wrong = {
        "set teacher=FOLDER, a model with the same tokenizer": ["teacher="],
        "no model folder": [f"teacher={tmp_path / 'absent'}"],
        "has 258 tokens and the model 300": [
            f"model.path={tmp_path / 'student'}",
            f"teacher={tmp_path / 'narrow'}",
        ],
        "another vocabulary than the model": [f"teacher={tmp_path / 'stranger'}"],
        "in its teacher's place": ["train.reference_refresh=2"],
        "must be a whole number": ["algo.top_k=-1"],
    }
    for says, settings in wrong.items():
        with pytest.raises(HoneError, match=says) as error:
            hone.run(made(world, tmp_path / "run", *settings))
        assert "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()
    with pytest.raises(HoneError, match="grpo does not learn from a teacher"):
        hone.run(recipe(world, "grpo", tmp_path / "run", f"teacher={world / 'teacher'}"))


def test_it_needs_no_reward_and_says_nothing_of_rewards_that_are_equal(world: World, tmp_path: Path, capsys):
    folder = hone.run(replace(made(world, tmp_path / "run"), reward={}))
    rows = metrics(tmp_path / "run")
    assert not any({"reward", "varied"} & row.keys() for row in rows)
    assert all(row["loss"] > 0 and row["gen_kl"] < 1e-6 for row in rows)
    said = capsys.readouterr().err
    assert "rewards" not in said
    assert "  loss  " in said
    assert json.loads((folder / "state.json").read_text())["updates"] == 4


def test_lumped_runs_resume_exactly_and_another_teacher_is_another_run(world: World, tmp_path: Path, monkeypatch):
    settings = ["algo.top_k=5", "train.epochs=2", "train.minibatches=2"]
    hone.run(made(world, tmp_path / "whole", *settings))
    cut = made(world, tmp_path / "cut", *settings)
    with pytest.raises(Interrupted):
        watched(lambda: hone.run(cut), Wire(2, 4, interrupt), monkeypatch)
    with pytest.raises(HoneError, match=r"other settings: teacher was .*teacher and is .*model: "):
        hone.run(replace(cut, teacher=world / "model"), resume=True)
    hone.resume(tmp_path / "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut", step=4)
