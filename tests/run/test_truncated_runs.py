"""Training under top-k, top-p and min-p: the learner's log-probs are renormalised on what the sampler kept."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import World, metrics, recipe

import hone
from hone.algo import ALGORITHMS
from hone.check.suite import examine
from hone.data.collate import collate
from hone.errors import HoneError
from hone.launch.job import Run, prepare
from hone.rollout.local import LocalSampler
from hone.rollout.rollout_file import pack_rollouts, unpack_rollouts
from hone.train.annotate import forward_in_slices
from hone.train.guard import Guard, load_rows
from hone.types import Group, Rollout, Task

torch.set_num_threads(1)

TRUNCATED = (["sample.top_k=5"], ["sample.top_p=0.7"], ["sample.min_p=0.2", "sample.top_k=40"])
LOGP = frozenset({"logp"})


def sampled(job: Run) -> list[Group]:
    assert job.roller is not None
    tasks = [Task(prompt=f"{a}+{a}=") for a in range(4)]
    return job.roller(tasks)


def test_the_learner_recomputes_the_log_probs_that_the_sampler_recorded(world: World, tmp_path: Path):
    for n, cut in enumerate(TRUNCATED):
        for layout in ("shared", "padded"):
            settings = [*cut, "sample.temperature=0.8", f"train.layout={layout}"]
            job = prepare(recipe(world, "grpo", tmp_path / f"run{n}{layout}", *settings))
            batch = collate(sampled(job))
            assert batch.support is not None
            logp = forward_in_slices(job.learner.policy, batch, LOGP, rows=5).logp
            torch.testing.assert_close(logp[batch.mask], batch.gen_logp[batch.mask], rtol=0, atol=2e-5)
            whole = forward_in_slices(job.learner.policy, replace(batch, support=None), LOGP, rows=5).logp
            assert (whole - batch.gen_logp)[batch.mask].min() < -0.01, settings


def test_the_reference_is_renormalised_on_the_same_tokens(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", "sample.top_k=5"))
    batch = collate(sampled(job))
    assert job.learner.reference is not None
    own, ref = (forward_in_slices(m, batch, LOGP, rows=99).logp for m in (job.learner.policy, job.learner.reference))
    torch.testing.assert_close(own, ref, rtol=0, atol=1e-6)


def test_each_token_is_among_those_that_it_was_drawn_from(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", "sample.top_k=5"))
    for r in (r for group in sampled(job) for r in group):
        ids = iter(r.support)
        for token, mask, size in zip(r.tokens, r.mask, r.support_size, strict=True):
            kept = [next(ids) for _ in range(size)]
            assert (token in kept) == mask
            assert size == 5 * mask  # float32 logits of random weights do not tie


def test_a_run_without_truncation_records_nothing(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run"))
    assert all(not r.support_size for group in sampled(job) for r in group)
    assert collate(sampled(job)).support is None


def test_every_online_algorithm_trains_on_truncated_samples(world: World, tmp_path: Path):
    for name in (name for name, make in ALGORITHMS.items() if make().online):
        out = tmp_path / name
        hone.run(recipe(world, name, out, "sample.top_p=0.8", "train.steps=2"))
        found = metrics(out)
        assert len(found) == 2, name
        assert found[0].get("logp_gap", 0.0) < 1e-3, name


def test_the_checks_of_a_run_pass_and_find_a_support_that_is_lost(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", "sample.top_p=0.7"))
    assert not failing(job)
    assert job.roller is not None
    job.roller.params = replace(job.roller.params, record_support=False)
    assert failing(job) >= {"temperature", "log-probs agree"}


def failing(job: Run) -> set[str]:
    return {finding.name for finding in examine(job).findings if finding.verdict == "fail"}


def test_rollouts_ahead_keep_their_support_in_a_checkpoint(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", "sample.top_k=5"))
    groups = sampled(job)
    plain = [replace(r, support_size=(), support=()) for r in groups[0]]
    mixed = [groups[0], plain, groups[1]]
    tensors, about = pack_rollouts(mixed)
    tasks = [g[0].task for g in mixed]
    assert unpack_rollouts(tensors, about, tasks) == mixed  # pyright: ignore[reportArgumentType]


def test_a_run_with_lag_goes_on_from_a_checkpoint_as_if_never_stopped(world: World, tmp_path: Path):
    settings = ["sample.top_p=0.7", "train.lag=1", "train.mismatch=truncate", "save.every=2"]
    hone.run(recipe(world, "grpo", tmp_path / "half", *settings, "train.steps=2"))
    hone.run(recipe(world, "grpo", tmp_path / "whole", *settings))
    hone.resume(tmp_path / "half", settings=["train.steps=4"])
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")


def test_the_rows_of_a_skipped_update_are_kept_with_their_support(tmp_path: Path):
    rows = [Rollout(tokens=[5, 6, 7], mask=[False, True, True], support_size=[0, 2, 1], support=[6, 8, 7])]
    Guard(folder=tmp_path).record_skip(collate([rows]), step=1, about={"updates": 0}, found=[])
    found, _ = load_rows(tmp_path / "step-000001.safetensors")
    assert found.support is not None
    assert found.support.rows(0).outside(slice(2), 9).logical_not().nonzero().tolist() == [[0, 6], [0, 8], [1, 7]]


def test_a_support_that_does_not_fit_its_tokens_is_refused():
    row: dict[str, Any] = {"tokens": [1, 2, 3], "mask": [False, True, True], "gen_logp": [0.0, -1.0, -1.0]}
    with pytest.raises(ValueError, match="3 tokens but 2 entries in support_size"):
        Rollout(**row, support_size=[1, 1], support=[2, 3])
    with pytest.raises(ValueError, match="3 ids in support, support_size asks for others"):
        Rollout(**row, support_size=[0, 1, 1], support=[2, 3, 4])
    with pytest.raises(ValueError, match="a trained token has no support"):
        collate([[Rollout(**row, support_size=[0, 0, 1], support=array("i", [3]))]])
    with pytest.raises(ValueError, match="support_size is on 1 of 2 rows"):
        collate([[Rollout(**row, support_size=[0, 1, 1], support=[2, 3]), Rollout(**row)]])


def test_a_sampler_that_records_nothing_is_refused(world: World, tmp_path: Path):
    job = prepare(recipe(world, "grpo", tmp_path / "run", "sample.top_k=5"))
    decoder = job.policy.decoder
    decoder.takes_rows = False  # as a model that runs through transformers
    assert job.roller is not None
    job.roller.sampler = LocalSampler(decoder)
    with pytest.raises(HoneError, match="does not record which tokens top_k, top_p and min_p keep"):
        sampled(job)


def test_a_teachers_likeliest_tokens_are_not_compared_with_truncated_samples(world: World, tmp_path: Path):
    with pytest.raises(HoneError, match=r"set algo.top_k=0, or sample.top_k=0 sample.top_p=1.0 sample.min_p=0.0"):
        prepare(recipe(world, "distil", tmp_path / "run", "sample.top_k=5", "algo.top_k=3"))
