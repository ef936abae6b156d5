"""Samplers that hold other weights, another distribution or other prompts than the learner believes."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from check_world import World, failing, job_of, verdict
from places import write_rows

from hone.launch.job import Run
from hone.model.lora import merge_lora
from hone.rollout.local import LocalSampler
from hone.types import Group, Stop


def sampler_of(job: Run) -> Any:
    assert job.roller is not None
    return job.roller.sampler


def put(job: Run, sampler: Any) -> Run:
    assert job.roller is not None
    job.roller.sampler = sampler
    return job


def test_a_sampler_with_a_copy_of_the_weights_is_found_though_the_copy_is_right_at_first(world: World):
    job = job_of(world, "grpo")
    put(job, LocalSampler(copy.deepcopy(job.policy.decoder)))
    assert failing(job) == {"published weights"}
    assert verdict(job, "log-probs agree")[0] == "pass"


def test_a_sampler_without_the_adapters_is_found(world: World):
    job = job_of(world, "grpo", "lora.rank=2")
    base = copy.deepcopy(job.policy.decoder)
    merge_lora(base)
    assert failing(put(job, LocalSampler(base))) == {"published weights"}


def test_a_version_that_does_not_reach_the_sampler_is_found(world: World):
    class Deaf(LocalSampler):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, 0 if name == "version" else value)

    job = job_of(world, "grpo")
    put(job, Deaf(job.policy.decoder))
    assert failing(job) == {"published weights"}
    assert verdict(job, "published weights")[1] == "completions carry the version of older weights"


def test_a_sampler_of_other_weights_is_found(world: World):
    other = job_of(world, "grpo").policy.decoder
    for p in other.parameters():
        p.data.mul_(1.1)
    assert failing(put(job_of(world, "grpo"), LocalSampler(other))) == {"log-probs agree", "published weights"}


def test_a_policy_with_another_temperature_is_found(world: World):
    job = job_of(world, "grpo", "sample.temperature=0.7")
    assert not failing(job)
    job.policy.temperature = 1.0
    assert failing(job) == {"temperature", "log-probs agree", "published weights", "reference"}
    assert "log softmax(logits / 0.7)" in verdict(job, "temperature")[1]


@pytest.mark.parametrize(
    "setting", [{"top_k": 5}, {"repetition_penalty": 1.5}, {"bias": {5: 2.0}}, {"banned": frozenset({5})}]
)
def test_a_distribution_the_learner_does_not_see_is_found(setting: dict[str, Any], world: World):
    job = job_of(world, "grpo")
    assert job.roller is not None
    job.roller.params = replace(job.roller.params, **setting)
    assert failing(job) >= {"temperature", "log-probs agree"}
    assert next(iter(setting)) in verdict(job, "temperature")[1]


def test_samples_that_share_their_random_numbers_are_found(world: World):
    class Shared(LocalSampler):
        def sample(
            self, prompts: Sequence[Sequence[int]], *, n: int, params: Any, first_request: int = 0
        ) -> list[Group]:
            single = super().sample(prompts, n=1, params=params, first_request=first_request)
            return [g * n for g in single]

    job = job_of(world, "grpo")
    assert failing(put(job, Shared(job.policy.decoder))) == {"groups differ"}
    assert "the weights move, the loss does not" in verdict(job, "one step")[1]
    assert "4 of 16 completions in 4 groups are the first of their kind" in verdict(job, "groups differ")[1]


def test_a_policy_that_is_sure_of_itself_may_repeat_itself(world: World):
    job = job_of(world, "grpo", "sample.temperature=0.001")
    state, seen = verdict(job, "groups differ")
    assert state == "warn"
    assert "the policy writes one thing only" in seen


def test_one_sample_a_prompt_is_no_group(world: World):
    assert verdict(job_of(world, "reinforce", "sample.group=1"), "groups differ")[0] == "skip"


def test_completions_of_other_prompts_are_found(world: World):
    class Turned(LocalSampler):
        def sample(
            self, prompts: Sequence[Sequence[int]], *, n: int, params: Any, first_request: int = 0
        ) -> list[Group]:
            return super().sample(prompts, n=n, params=params, first_request=first_request)[::-1]

    job = job_of(world, "grpo")
    assert failing(put(job, Turned(job.policy.decoder))) == {"completions"}
    assert "was sampled from another prompt" in verdict(job, "completions")[1]


def endings(world: World, *settings: str, eager: float, limit: int) -> tuple[str, str]:
    """What `completions` says of a model that is so eager to write its stop token, but never before the 10th token."""

    class Late(LocalSampler):
        def sample(
            self, prompts: Sequence[Sequence[int]], *, n: int, params: Any, first_request: int = 0
        ) -> list[Group]:
            (stop,) = params.stop_ids
            bias = {stop: eager if params.max_tokens >= 10 else -100.0}
            return super().sample(prompts, n=n, params=replace(params, bias=bias), first_request=first_request)

    job = job_of(world, "grpo", f"sample.max_tokens={limit}", *settings)
    return verdict(put(job, Late(job.policy.decoder)), "completions")


def test_answers_that_would_end_with_more_tokens_warn_that_max_tokens_is_too_small(world: World):
    state, seen = endings(world, eager=5.0, limit=6)
    assert state == "warn"
    assert seen == "no sampled answer ended by itself within sample.max_tokens (6): 16 of 16 end within 64"


def test_a_model_that_never_ends_and_a_limit_that_is_long_enough_do_not_warn(world: World):
    assert endings(world, eager=-100.0, limit=6) == ("pass", "16 completions of 6 to 6 tokens, none stopped by itself")
    state, seen = endings(world, eager=5.0, limit=40)
    assert state == "pass"
    assert "stopped by themselves" in seen


def test_answers_of_the_data_that_do_not_fit_into_max_tokens_warn(world: World, tmp_path: Path):
    long = write_rows(tmp_path / "long.jsonl", [{"prompt": f"{a}?\n", "answer": f"{a}{a}{a} in all"} for a in range(9)])
    state, seen = endings(world, f"data={long}", eager=-100.0, limit=6)
    assert state == "warn"
    assert seen.endswith("within sample.max_tokens (6): the answers of the data have 10 tokens or more")


def test_a_stop_token_that_is_not_trained_on_is_found(world: World):
    class Forgetful(LocalSampler):
        def sample(self, *arguments: Any, **named: Any) -> list[Group]:
            groups = super().sample(*arguments, **named)
            return [[replace(r, mask=[*r.mask[:-1], False]) for r in g] for g in groups]

    job = job_of(world, "grpo")
    assert "completions" in failing(put(job, Forgetful(job.policy.decoder)))
    assert verdict(job, "completions")[1] == "the mask is not exactly what the policy wrote"


def test_a_cut_completion_that_says_it_stopped_is_found(world: World):
    class Liar(LocalSampler):
        def sample(self, *arguments: Any, **named: Any) -> list[Group]:
            return [[replace(r, stop=Stop.TOKEN) for r in g] for g in super().sample(*arguments, **named)]

    job = job_of(world, "grpo")
    assert failing(put(job, Liar(job.policy.decoder))) == {"completions"}
    assert sampler_of(job).version == 0
