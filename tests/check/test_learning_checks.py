"""Learners whose forward pass, reference, gradient, update or files are not what they should be."""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_world import World, failing, job_of, verdict
from each import each

import hone.algo
from hone.check import plan, suite
from hone.check.perturb import perturb_weights
from hone.check.probe import Probe
from hone.check.report import Finding
from hone.checkpoint import state
from hone.model.policy import Policy, frozen_copy
from hone.model.vocab import token_stats
from hone.storage import files
from hone.storage.files import save_tensors
from hone.train import optim
from hone.train import update as step


def test_dropout_in_the_forward_pass_is_found(world: World):
    job = job_of(world, "sft")
    embedding = job.policy.decoder.model.embed_tokens
    embedding.register_forward_hook(lambda module, inputs, out: F.dropout(out, 0.2, training=module.training))
    assert verdict(job, "forward pass")[0] == "fail"
    job.policy.eval()
    assert verdict(job, "forward pass")[0] == "pass"


def test_rows_that_see_their_neighbour_in_a_packed_line_are_found(world: World, monkeypatch: pytest.MonkeyPatch):
    def leaky(document: torch.Tensor) -> torch.Tensor:
        width = document.shape[1]
        return torch.ones(width, width, dtype=torch.bool).tril().expand(len(document), 1, width, width)

    monkeypatch.setattr("hone.model.layout.block_causal", leaky)
    assert failing(job_of(world, "sft")) == {"layouts"}


def test_a_reference_that_is_another_model_is_found(world: World):
    job = job_of(world, "dpo")
    assert isinstance(job.policy, Policy)
    with perturb_weights(list(job.policy.parameters())):
        other = frozen_copy(job.policy)
    job.learner.reference = job.policy.reference = other
    assert failing(job) == {"reference"}


def test_a_reference_that_moves_with_the_policy_is_found(world: World):
    job = job_of(world, "grpo")
    assert isinstance(job.policy, Policy)
    job.learner.reference = job.policy.reference = job.policy
    assert failing(job) == {"reference"}
    assert "it moves when the policy moves" in verdict(job, "reference")[1]


def test_a_critic_that_would_not_learn_is_found(world: World):
    job = job_of(world, hone.algo.ppo(value=0.0))
    assert failing(job) == {"gradient"}
    assert "the critic would not learn" in verdict(job, "gradient")[1]


def test_weights_that_are_not_finite_are_found(world: World):
    job = job_of(world, "sft")
    next(job.policy.decoder.parameters()).data.fill_(float("nan"))
    assert {"gradient", "one step"} <= failing(job)
    assert "not finite" in verdict(job, "gradient")[1]


def test_a_parameter_that_no_gradient_reaches_is_named(world: World):
    job = job_of(world, "sft")
    job.policy.register_parameter("spare", torch.nn.Parameter(torch.zeros(2)))
    state, seen = verdict(job, "gradient")
    assert state == "warn"
    assert "no gradient reaches spare" in seen


def test_a_loss_that_depends_on_how_the_batch_is_cut_is_found(world: World):
    def mean(fwd: Any, batch: Any) -> torch.Tensor:
        return -fwd.logp / len(batch)

    job = job_of(world, replace(hone.algo.sft(), loss=((1.0, mean),)))
    assert failing(job) == {"batch cut"}


def test_an_optimiser_that_climbs_is_found(world: World):
    job = job_of(world, "sft")
    for group in job.learner.optimizer.param_groups:
        group["maximize"] = True
    assert failing(job) == {"one step", "update in force"}


def test_a_step_that_is_too_long_is_noted(world: World):
    state, seen = verdict(job_of(world, "grpo", "optim.lr=0.03"), "one step")
    assert state == "warn"
    assert "it falls along" in seen


def one_step(world: World, *settings: str, algo: str = "sft") -> Finding:
    (found,) = suite.examine(job_of(world, algo, *settings), only=("one step",)).findings
    return found


def test_a_rate_that_is_far_too_high_fails_and_the_remedy_is_a_rate_that_passes(world: World):
    for algo in ("sft", "grpo", "dpo", "ppo", "reward_model", "kto"):
        for rate in ("1.0", "10.0", "1000.0"):
            for more in ((), ("lora.rank=2",), ("optim.warmup=2",)):
                found = one_step(world, f"optim.lr={rate}", *more, algo=algo)
                assert found.verdict == "fail", f"{algo} {rate} {more}: {found}"
                better = found.remedy.partition(";")[0].removeprefix("set ")
                assert better.startswith("optim.lr="), found.remedy
                mended = one_step(world, better, *more, algo=algo)
                assert mended.verdict == "pass", f"{algo} {rate} {more} -> {better}: {mended}"


def test_a_critics_rate_that_is_far_too_high_is_named(world: World):
    found = one_step(world, "optim.critic_lr=1.0", algo="ppo")
    assert found.verdict == "fail"
    assert "optim.critic_lr=1 moves a weight by" in found.seen
    better = found.remedy.partition(";")[0].removeprefix("set ")
    assert one_step(world, better, algo="ppo").verdict == "pass"


def test_a_decay_that_takes_the_weights_away_is_found(world: World):
    state, seen = verdict(job_of(world, "sft", "optim.weight_decay=200"), "optimiser")
    assert state == "fail"
    assert "takes 20% of every weight away" in seen


@each("algo", ["sft", "grpo"])
@each("rate", ["1e-12", "1e-20", "1e-30"])
def test_a_rate_that_changes_no_weights_is_blamed_on_the_rate(world: World, rate: str, algo: str):
    found = one_step(world, f"optim.lr={rate}", algo=algo)
    assert (found.verdict, found.remedy) == (
        "fail", f"too small to change float32 weights: raise optim.lr ({float(rate):g})",
    )  # fmt: skip
    whole = suite.examine(job_of(world, algo, f"optim.lr={rate}"))
    assert all("report" not in f.remedy for f in whole.findings)


def test_the_largest_rate_of_a_warm_up_is_tried_too(world: World):
    warm = ("train.steps=4000", "optim.warmup=2000")
    high = one_step(world, "optim.lr=30.0", *warm)
    assert high.verdict == "fail"
    assert "optim.lr=30 moves a weight by" in high.seen
    good = one_step(world, "optim.lr=1e-3", *warm)
    assert good.verdict == "pass"
    assert "at the first rate 5e-07 " in good.seen
    assert good.seen.endswith("at the largest rate 0.001")
    late = one_step(world, "optim.lr=1e-5", *warm)
    assert late.verdict == "pass", "a first rate that is lost in rounding is no fault where the largest one is not"


def test_trying_the_largest_rate_leaves_the_schedule_and_the_weights(world: World):
    job = job_of(world, "sft", "optim.warmup=3")
    before, schedule = copy.deepcopy([p.data for p in job.policy.parameters()]), job.learner.schedule
    assert verdict(job, "one step")[0] == "pass"
    assert job.learner.schedule is schedule
    assert all(torch.equal(p, b) for p, b in zip(job.policy.parameters(), before, strict=True))
    assert job.learner.updates == 0


def test_an_optimiser_that_does_nothing_is_blamed_on_hone(world: World):
    job = job_of(world, "sft")
    job.learner.optimizer.step = lambda closure=None: None  # pyright: ignore
    (found,) = suite.examine(job, only=("one step",)).findings
    assert (found.verdict, found.remedy) == ("fail", "the update does not follow the loss: please report it")


def test_only_a_step_that_no_part_of_helps_is_blamed_on_hone(world: World):
    for rate in ("1e-3", "1.0"):
        job = job_of(world, "sft", f"optim.lr={rate}")
        for group in job.learner.optimizer.param_groups:
            group["maximize"] = True
        (found,) = suite.examine(job, only=("one step",)).findings
        assert (found.verdict, found.remedy) == ("fail", "the update does not follow the loss: please report it")


def test_numbers_of_the_optimiser_that_are_not_the_recipes_are_found(world: World):
    for name, value in (("base_lr", 0.5), ("weight_decay", 0.1), ("betas", (0.5, 0.5))):
        job = job_of(world, "sft")
        job.learner.optimizer.param_groups[0][name] = value
        assert verdict(job, "optimiser")[0] == "fail", name
    job = job_of(world, "ppo", "optim.critic_lr=0.5")
    assert verdict(job, "optimiser")[0] == "pass"
    job.learner.optimizer.param_groups[-1]["base_lr"] = 1e-3
    assert verdict(job, "optimiser")[0] == "fail"


def test_a_clip_that_is_not_the_recipes_is_found(world: World):
    job = job_of(world, "sft")
    job.learner.clip_norm = 9.0
    assert failing(job) == {"optimiser"}


def test_a_parameter_outside_the_optimiser_is_found(world: World):
    job = job_of(world, "sft")
    job.learner.optimizer.param_groups[0]["params"].pop()
    assert verdict(job, "optimiser")[0] == "fail"


def test_a_schedule_that_stays_at_zero_is_found(world: World):
    job = job_of(world, "sft")
    job.learner.schedule = lambda n: 0.0
    assert verdict(job, "optimiser")[0] == "fail"
    assert verdict(job_of(world, "sft", "optim.warmup=9"), "optimiser")[0] == "warn"


def test_clipping_that_is_not_done_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optim, "clip_gradients", lambda ps, most, parts: torch.tensor(1.0))
    assert failing(job_of(world, "sft")) == {"update in force"}
    assert "exceeds optim.clip_norm=1" in verdict(job_of(world, "sft"), "update in force")[1]


def test_a_schedule_that_does_not_reach_the_step_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optim, "set_rate", lambda optimizer, factor: 0.0)
    assert failing(job_of(world, "sft", "optim.warmup=3")) == {"update in force"}


def test_weight_decay_that_does_not_reach_the_step_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    taken = step.apply_gradients

    def without(learner: Any, *rest: Any) -> bool:
        groups = learner.optimizer.param_groups
        before = [g["weight_decay"] for g in groups]
        for g in groups:
            g["weight_decay"] = 0.0
        finite = taken(learner, *rest)
        for g, decay in zip(groups, before, strict=True):
            g["weight_decay"] = decay
        return finite

    monkeypatch.setattr(step, "apply_gradients", without)
    assert failing(job_of(world, "sft", "optim.weight_decay=0.5")) == {"update in force"}


# --- files and room ---


def test_a_checkpoint_that_loses_precision_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    exact = save_tensors

    def rounded(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        exact(path, {name: x.bfloat16().to(x.dtype) if x.ndim else x for name, x in tensors.items()})

    monkeypatch.setattr(state, "save_tensors", rounded)
    assert failing(job_of(world, "sft")) == {"checkpoint"}


def test_a_cursor_that_is_not_restored_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    job = job_of(world, "sft")
    monkeypatch.setattr(type(job.source), "load", lambda self, state: None)
    assert failing(job) == {"checkpoint"}
    assert "source" in verdict(job, "checkpoint")[1]


def test_moments_or_counters_that_are_not_restored_are_found(world: World, monkeypatch: pytest.MonkeyPatch):
    job = job_of(world, "sft")
    with monkeypatch.context() as patch:
        patch.setattr(state, "load_optimizer", lambda optimizer, tensors: None)
        assert failing(job) == {"checkpoint"}
        assert "moment" in verdict(job, "checkpoint")[1]
    whole = files.read_json
    monkeypatch.setattr(files, "read_json", lambda path: {**whole(path), "updates": 0})
    assert failing(job) == {"checkpoint"}
    assert verdict(job, "checkpoint")[1] == "not as it was saved: updates"


def test_the_trial_checkpoint_is_removed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan.tempfile, "tempdir", str(tmp_path))
    assert verdict(job_of(world, "grpo", "lora.rank=2"), "checkpoint")[0] == "pass"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_found(world: World, monkeypatch: pytest.MonkeyPatch):
    job = job_of(world, "sft", "save.every=1", "save.keep=2")
    model = sum(p.numel() for p in job.policy.parameters()) * 4
    need = 3 * 3 * model + model  # 3 checkpoints of weights and two moments; and the start

    def free(number: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=number))

    free(need - 1)
    assert verdict(job, "disk")[0] == "fail"
    free(need)
    assert verdict(job, "disk")[0] == "warn"
    free(2 * need)
    assert verdict(job, "disk")[0] == "pass"
    free(100)
    assert verdict(job, "checkpoint")[0] == "warn"


def test_memory_that_is_too_little_is_found(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job, told = job_of(world, "sft"), tmp_path / "meminfo"
    certain = 3 * 4 * sum(p.numel() for p in job.policy.parameters())
    monkeypatch.setattr(plan, "MEMORY", str(told))
    monkeypatch.setattr(plan, "LIMITS", (str(tmp_path / "none"),) * 2)
    assert verdict(job, "memory")[0] == "skip"
    for kilobytes, expected in ((certain // 1024 - 1, "fail"), (certain // 1024 + 1, "warn"), (10**9, "pass")):
        told.write_text(f"MemTotal: 1 kB\nMemAvailable: {kilobytes} kB\n")
        assert verdict(job, "memory")[0] == expected
    most, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(plan, "LIMITS", (str(most), str(used)))
    most.write_text("5000\n")
    used.write_text("4000\n")
    assert verdict(job, "memory")[0] == "fail"
    most.write_text("max\n")
    assert verdict(job, "memory")[0] == "pass"


def kept_bytes(world: World, *settings: str, algo: str = "sft") -> int:
    """The estimate of what a backward pass keeps."""
    probe = Probe(job_of(world, algo, *settings))
    tokens = plan._tokens_at_once(probe)
    return plan._backward(probe, tokens, again=plan._recomputed(probe, tokens))


def test_the_estimate_of_memory_is_of_all_that_layers_compute_or_of_their_inputs(world: World):
    config = job_of(world, "sft").policy.decoder.config
    layers, hidden, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    each = 2 * (2 * hidden + 4 * hidden + 2 * config.intermediate_size)  # as many heads for keys as for queries
    assert config.num_key_value_heads == config.num_attention_heads
    longest = max(len(r.tokens) for r in Probe(job_of(world, "sft")).rows)
    tokens = 4 * longest  # train.prompts
    assert kept_bytes(world) == 4 * tokens * (layers * each + vocabulary)
    assert kept_bytes(world, "train.recompute=always") == 4 * tokens * (layers * hidden + each + vocabulary)
    assert kept_bytes(world, "train.dtype=bfloat16") == kept_bytes(world) // 2
    scorer = kept_bytes(world, algo="pointwise_reward_model") / (4 * layers * each)
    assert scorer % 4 == 0, "a scorer has rows of tokens and no logits"


def test_the_estimate_of_memory_follows_micro_batches(world: World):
    longest = max(len(r.tokens) for r in Probe(job_of(world, "sft")).rows)
    whole = kept_bytes(world)
    assert kept_bytes(world, f"train.micro_tokens={2 * longest + 1}") == whole // 2
    assert kept_bytes(world, "train.micro_rows=1") == whole // 4
    assert kept_bytes(world, "train.minibatches=2") == whole // 2
    assert kept_bytes(world, "train.micro_rows=1", algo="dpo") == kept_bytes(world, "train.micro_rows=2", algo="dpo")


def test_the_estimate_of_memory_is_of_completions_as_long_as_they_may_be(world: World):
    probe = Probe(job_of(world, "grpo", "sample.max_tokens=20"))
    assert plan._tokens_at_once(probe) == 4 * 4 * (max(map(len, probe.prompts)) + 20)


def test_only_what_keeps_all_logits_is_told_to_need_them_at_once(world: World, monkeypatch: pytest.MonkeyPatch):
    config = job_of(world, "sft").policy.decoder.config
    whole = kept_bytes(world, "train.recompute=never")
    assert whole == kept_bytes(world)
    monkeypatch.setitem(token_stats.BUDGET, "cpu", 4 * config.vocab_size)  # one position at a time
    assert kept_bytes(world, "train.recompute=never") == whole
    tokens = plan._tokens_at_once(Probe(job_of(world, "sft")))
    assert kept_bytes(world) == whole - 4 * (tokens - 1) * config.vocab_size


def test_moments_are_counted_in_their_own_bits(world: World):
    job = job_of(world, "sft", "train.dtype=bfloat16", "optim.bits=8")
    numbers = sum(p.numel() for p in job.policy.parameters())
    assert plan._optimised(Probe(job)) == numbers * (4 + 1 + 1)  # gradients add up in float32


def test_memory_that_is_short_names_the_setting_that_is_used(world: World, monkeypatch: pytest.MonkeyPatch):
    def remedy(*settings: str) -> str:
        job = job_of(world, "sft", *settings)
        monkeypatch.setattr(plan, "_free_memory", lambda device: plan._optimised(Probe(job)))
        (found,) = suite.examine(job, only=("memory",)).findings
        assert found.verdict == "warn"
        return found.remedy

    assert remedy() == "lower train.micro_rows (64), or set train.recompute=always: no number changes"
    assert remedy("train.micro_tokens=99", "train.recompute=always") == (
        "lower train.micro_tokens (99): no number changes"
    )


def test_moving_weights_and_putting_them_back_is_exact(world: World):
    job = job_of(world, "sft", "lora.rank=2")
    parameters = list(job.policy.parameters())
    before = copy.deepcopy([p.data for p in parameters])
    with perturb_weights(parameters):
        assert all(not torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
