"""The stages from a batch to one weight update, with the real policy and decoder in float64."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from each import each

from hone.algo import ALGORITHMS, Algorithm, dpo, grpo, kto, ppo, ppo_penalty, reinforce, reinforce_baseline, rloo, sft
from hone.algo.table import objective
from hone.algo.weight import Totals, mismatch
from hone.data.collate import collate, mismatched_pairs
from hone.errors import HoneError
from hone.log.stats import Stats
from hone.model.policy import Policy
from hone.train import annotate as passes
from hone.train import learner as cut
from hone.train import optim
from hone.train import update as step
from hone.train.learner import Learner
from hone.types import ABSENT, Batch, Forward, ForwardModel, Group

torch.set_num_threads(1)
ALL = sorted(ALGORITHMS)


def update_kl(learner: Learner, batch: Batch) -> float:
    stats = Stats()
    step.measure_update_kl(stats, learner, batch, ppo_penalty())
    return stats.means()["update_kl"]


def double_batch(groups: list[Group]) -> Batch:
    return collate(groups, dtype=torch.float64)


def batch_for(algo: Algorithm, *, seed: int = 0) -> Batch:
    return double_batch(tiny.groups_for(algo, seed=seed))


def mismatched_for(algo: Algorithm) -> Batch | None:
    if "kl_baseline" not in algo.needs:
        return None
    rows = [r for g in tiny.groups_for(algo) for r in g]
    return double_batch([[r] for r in mismatched_pairs(rows)])


def learner_for(algo: Algorithm, **settings: object) -> Learner:
    learner = tiny.learner_for(algo, base=tiny.decoder(width=8, dtype=torch.float64), **settings)  # pyright: ignore
    jolt(learner)
    learner.start_controls(algo)
    return learner


def jolt(learner: Learner) -> None:
    """Away from the reference, and a critic that says something."""
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in optim.parameters_of(learner.optimizer):
            p += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)


def ready(algo: Algorithm, learner: Learner) -> Batch:
    """Annotated, credited and weighed."""
    batch = passes.annotate(batch_for(algo), algo, learner, mismatched=mismatched_for(algo))
    passes.keep_old_policy(learner, algo)
    return step.weigh(step.assign_credit(batch, algo), algo)


# --- annotate ---


class Counted:
    """A real model that notes what is asked of it."""

    def __init__(self, model: ForwardModel) -> None:
        self.model, self.asked = model, list[tuple[int, frozenset[str]]]()

    def __call__(self, batch: Batch, want: frozenset[str]) -> Forward:
        self.asked.append((len(batch), want))
        return self.model(batch, want)


@each("name", ALL)
def test_annotate_fills_what_is_declared_with_one_pass_a_model(name: str) -> None:
    algo = ALGORITHMS[name]()
    learner = learner_for(algo)
    learner.policy = policy = Counted(learner.policy)  # pyright: ignore[reportAttributeAccessIssue]
    reference = Counted(learner.reference) if learner.reference is not None else None
    learner.reference = reference
    before = batch_for(algo)
    batch = passes.annotate(before, algo, learner, mismatched=mismatched_for(algo))
    assert batch.columns().keys() == before.columns().keys() | algo.needs
    extra = 1 if name == "kto" else 0  # the mismatched pairs
    read = {"old_logp": "logp", "old_value": "value"}
    expected = {read[c] for c in algo.needs & read.keys()}
    assert len(policy.asked) == extra + bool(expected)
    if expected:
        assert policy.asked[0] == (len(before), frozenset(expected))
    assert (reference is not None) == ("ref_logp" in algo.needs or algo.teacher is not None)
    if reference is not None and algo.teacher:
        assert reference.asked == []  # its distributions are the policy's to read
    elif reference is not None:
        assert [want for _, want in reference.asked] == [frozenset({"logp"})] * (1 + extra)


def test_the_annotated_columns_are_the_models_own_numbers_however_it_is_cut() -> None:
    algo = ppo(beta=0.2, bootstrap=True)
    algo = replace(algo, needs=algo.needs | {"ref_kl"})
    learner = learner_for(algo)
    base = batch_for(algo)
    direct = learner.policy(base, frozenset({"logp", "value", "ref_kl"}))
    for micro_rows in (1, 5, 100):
        learner.micro_rows = micro_rows
        batch = passes.annotate(base, algo, learner)
        for name, x in {"old_logp": direct.logp, "old_value": direct.value, "ref_kl": direct.ref_kl}.items():
            torch.testing.assert_close(getattr(batch, name), x.detach(), rtol=0, atol=1e-12)
        for b in range(len(batch)):
            last = int(base.real[b].sum()) - 1  # read after the last token
            expected = direct.value[b, last].item() if base.truncated[b] else 0.0
            assert batch.bootstrap[b].item() == pytest.approx(expected, abs=1e-12)
        assert batch.kl_coef.tolist() == pytest.approx([0.2] * len(batch))
        assert not any(x.requires_grad for x in batch.columns().values())
    assert base.truncated.any()
    assert direct.ref_kl.any(), "the policy was moved away from its reference"


def test_control_columns_come_from_the_learner() -> None:
    algo = reinforce_baseline(beta=0.1)
    learner = learner_for(algo)
    learner.control |= {"baseline": 0.75, "kl_coef": 0.5}
    batch = passes.annotate(batch_for(algo), algo, learner)
    assert set(batch.baseline.tolist()) == {0.75}
    assert set(batch.kl_coef.tolist()) == {0.5}


@pytest.mark.parametrize("shift", [0.0, 0.3, -0.3])
def test_ktos_baseline_is_the_mean_gain_on_mismatched_pairs_or_zero(shift: float) -> None:
    algo = kto()
    learner = learner_for(algo)
    pairs = mismatched_for(algo)

    def shifted(batch: Batch, want: frozenset[str]) -> Forward:
        """A reference from which each row's gain is `shift`."""
        move = shift / batch.mask.sum(-1, keepdim=True)
        return Forward(logp=learner.policy(batch, want).logp.detach() - torch.where(batch.mask, move, 0.0))

    learner.reference = shifted
    batch = passes.annotate(batch_for(algo), algo, learner, mismatched=pairs)
    assert batch.kl_baseline[0].item() == pytest.approx(max(0.0, shift), abs=1e-6)
    assert len(set(batch.kl_baseline.tolist())) == 1


def test_what_the_rows_lack_is_said_before_anything_is_trained() -> None:
    learner = learner_for(grpo(process=True, beta=0.0))
    with pytest.raises(HoneError, match="step_reward, which the rows lack"):
        passes.annotate(batch_for(grpo()), grpo(process=True, beta=0.0), learner)
    batch = batch_for(sft())
    with pytest.raises(HoneError, match="label, which the rows lack"):
        passes.annotate(batch, kto(), learner_for(kto()), mismatched=batch)
    with pytest.raises(ValueError, match="the learner has none"):
        passes.annotate(batch_for(dpo()), dpo(), learner_for(sft()))


# --- totals and weights ---


def test_totals_count_rows_and_tokens_that_are_trained_on() -> None:
    batch = batch_for(grpo())  # row 1 of 12 is invalid
    assert not batch.mask[1].any()
    assert step.totals(batch) == Totals(rows=11, tokens=int(batch.mask.sum()))


def test_the_mismatch_correction_is_a_factor_on_the_weight() -> None:
    algo = grpo(beta=0.0)
    learner = learner_for(algo)
    batch = step.assign_credit(passes.annotate(batch_for(algo), algo, learner), algo)
    plain = step.weigh(batch, algo)
    for how in ("truncate", "mask"):
        correct = partial(mismatch, how=how, cap=1.5)
        found = step.weigh(batch, algo, correct=correct).token_weight
        assert torch.equal(found, plain.token_weight * correct(batch))
        assert not torch.equal(found, plain.token_weight)


# --- cutting ---


def numbered(rows: int, *, seed: int = 0) -> Batch:
    """Rows of unequal length whose group is their number."""
    batch = double_batch([[r] for r in tiny.random_rows(rows, seed=seed)])
    return replace(batch, group=torch.arange(rows))


@each("unit", [1, 2])
@each("rows", [1, 2, 3, 5, 100])
def test_micro_batches_lose_no_row_and_keep_pairs_together(rows: int, unit: int) -> None:
    batch = numbered(12)
    parts = [m.group.tolist() for m in cut.micro_batches(batch, rows=rows, unit=unit)]
    assert sorted(itertools.chain(*parts)) == list(range(12))
    assert max(map(len, parts)) <= max(rows, unit)
    if unit == 2:
        flat = list(itertools.chain(*parts))
        assert all(len(p) % 2 == 0 for p in parts)
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(flat[::2], flat[1::2], strict=True))


@each("unit", [1, 2])
@each("tokens", [1, 7, 20, 33, 10_000])
def test_micro_batches_by_tokens_hold_as_many_rows_as_fit_and_no_more(tokens: int, unit: int) -> None:
    batch = numbered(12)
    parts = list(cut.micro_batches(batch, rows=1, tokens=tokens, unit=unit))
    assert sorted(n for m in parts for n in m.group.tolist()) == list(range(12))
    for m in parts:
        longest = int(m.real.sum(-1).max())
        assert len(m) == unit or len(m) * longest <= tokens
        assert m is parts[-1] or (len(m) + unit) * longest > tokens


def test_micro_batches_begin_with_the_longest_rows() -> None:
    lengths = [int(m.real.sum(-1).max()) for m in cut.micro_batches(numbered(12), rows=3)]
    assert lengths == sorted(lengths, reverse=True)


@each("unit", [1, 2])
@each("count", [1, 2, 3, 6])
def test_mini_batches_lose_no_row_and_keep_pairs_together(count: int, unit: int) -> None:
    parts = [m.group.tolist() for m in cut.split_minibatches(numbered(12), count=count, unit=unit, seed=3)]
    assert len(parts) == count
    assert sorted(itertools.chain(*parts)) == list(range(12))
    assert max(map(len, parts)) - min(map(len, parts)) <= unit
    flat = list(itertools.chain(*parts))
    if unit == 2:
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(flat[::2], flat[1::2], strict=True))


def test_mini_batches_are_shuffled_by_the_seed_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        return [m.group.tolist() for m in cut.split_minibatches(numbered(12), count=3, unit=1, seed=seed)]

    assert order(1) == order(1) != order(2)


def test_evaluate_puts_the_slices_back_in_order() -> None:
    learner = learner_for(sft())
    batch = batch_for(sft())
    whole = learner.policy(batch, frozenset({"logp", "entropy"}))
    sliced = passes.forward_in_slices(learner.policy, batch, frozenset({"logp", "entropy"}), rows=5)
    torch.testing.assert_close(sliced.logp, whole.logp.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sliced.entropy, whole.entropy.detach(), rtol=0, atol=1e-12)
    assert sliced.value is ABSENT
    assert not sliced.logp.requires_grad


# --- update ---


def plain_descent(learner: Learner) -> Learner:
    """One step of size 1 down the gradient, so that the step is the gradient."""
    groups = [{"params": optim.parameters_of(learner.optimizer), "lr": 1.0, "base_lr": 1.0}]
    return replace(learner, optimizer=torch.optim.SGD(groups, lr=1.0), clip_norm=0.0)


def gradient_of(learner: Learner, batch: Batch, algo: Algorithm) -> torch.Tensor:
    """What one update takes off the weights; they are put back."""
    learner = plain_descent(learner)
    before = tiny.parameters_of(learner)
    step.update(learner, batch, algo)
    after = tiny.parameters_of(learner)
    with torch.no_grad():
        for p, x in zip(optim.parameters_of(learner.optimizer), before, strict=True):
            p.copy_(x)
    return torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)])


@each("name", ALL)
def test_the_gradient_does_not_depend_on_the_micro_batches_or_the_layout(name: str) -> None:
    algo = ALGORITHMS[name]()
    learner = learner_for(algo)
    batch = ready(algo, learner)
    learner.micro_rows = 100
    whole = gradient_of(learner, batch, algo)
    assert whole.any()
    for micro_rows, layout in itertools.product((1, 3, 5, 100), ("padded", "packed", "shared")):
        learner.micro_rows, learner.policy.layout = micro_rows, layout  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(gradient_of(learner, batch, algo), whole, rtol=0, atol=1e-12)


def test_the_step_is_the_gradient_of_the_objective() -> None:
    algo = ppo(entropy=0.1)
    learner = learner_for(algo, micro_rows=3)
    batch = ready(algo, learner)
    parameters = optim.parameters_of(learner.optimizer)
    loss = objective(learner.policy(batch, algo.wants), batch, algo.loss)
    direct = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    torch.testing.assert_close(gradient_of(learner, batch, algo), direct, rtol=0, atol=1e-12)
    stats = step.update(plain_descent(learner), batch, algo).means()
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert stats["grad_norm"] == pytest.approx(direct.norm().item())
    assert (stats["skipped"], stats["lr"]) == (0.0, 1.0)


def test_the_gradient_is_clipped_to_the_norm_and_the_norm_before_is_logged() -> None:
    algo = sft()
    learner = plain_descent(learner_for(algo))
    batch = ready(algo, learner)
    norm = gradient_of(learner, batch, algo).norm().item()
    learner.clip_norm = norm / 10
    before = tiny.parameters_of(learner)
    stats = step.update(learner, batch, algo).means()
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, tiny.parameters_of(learner), strict=True)]).norm()
    assert stats["grad_norm"] == pytest.approx(norm)
    assert moved.item() == pytest.approx(norm / 10, rel=1e-4)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    algo = reinforce()
    learner = learner_for(algo)
    batch = ready(algo, learner)
    step.update(learner, batch, algo)  # so that the optimiser has moments to spoil
    weights = tiny.parameters_of(learner)
    moments = [x.clone() for s in learner.optimizer.state.values() for x in s.values()]
    adv = batch.adv.clone()
    adv[batch.mask.nonzero()[3].unbind()] = bad
    stats = step.update(learner, replace(batch, adv=adv), algo).means()
    assert stats["skipped"] == 1.0
    assert "grad_norm" not in stats
    assert all(torch.equal(a, b) for a, b in zip(weights, tiny.parameters_of(learner), strict=True))
    after = [x for s in learner.optimizer.state.values() for x in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert all(p.grad is None for p in optim.parameters_of(learner.optimizer))
    assert learner.updates == 1
    assert step.update(learner, batch, algo).means()["skipped"] == 0.0


def test_the_schedule_follows_the_updates() -> None:
    algo = sft()
    learner = learner_for(algo, lr=0.5)
    learner.schedule = optim.learning_rate_factor("constant", warmup=4, steps=10)
    batch = ready(algo, learner)
    rates = [step.update(learner, batch, algo).means()["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_batch_without_a_trained_token_is_harmless() -> None:
    algo = grpo(beta=0.0)
    learner = plain_descent(learner_for(algo))
    groups = tiny.groups_for(algo)
    invalid = [[replace(r, outcome=replace(r.outcome, value=None)) for r in g if r.outcome] for g in groups]
    batch = step.weigh(step.assign_credit(passes.annotate(double_batch(invalid), algo, learner), algo), algo)
    before = tiny.parameters_of(learner)
    stats = step.update(learner, batch, algo).means()
    assert stats["loss"] == stats["skipped"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, tiny.parameters_of(learner), strict=True))


@each("name", ALL)
def test_a_rank_without_rows_takes_part_in_the_loss(name: str) -> None:
    """Where ranks share each layer, one that has no rows still makes the others' passes."""
    algo = ALGORITHMS[name]()
    learner, nothing = learner_for(algo), double_batch([])
    batch = passes.annotate(nothing, algo, learner, mismatched=nothing)
    passes.keep_old_policy(learner, algo)
    batch = step.weigh(step.assign_credit(batch, algo), algo)
    loss = objective(learner.policy(batch, algo.wants), batch, algo.loss)
    loss.backward()
    assert loss.item() == 0.0


# --- what changes between iterations ---


def test_update_kl_is_the_k3_mean_of_old_to_now() -> None:
    algo = ppo_penalty()
    learner = learner_for(algo)
    batch = ready(algo, learner)
    assert update_kl(learner, batch) == pytest.approx(0.0, abs=1e-12)
    step.update(learner, batch, algo)
    now = learner.policy(batch, frozenset({"logp"})).logp.detach()
    d = (now - batch.old_logp)[batch.mask]
    assert update_kl(learner, batch) == pytest.approx((d.exp() - 1 - d).mean().item())
    assert update_kl(learner, batch) > 0


def test_the_exact_penalty_compares_with_the_policy_before_the_iteration() -> None:
    algo = ppo_penalty(exact=True)
    learner = learner_for(algo)
    batch = ready(algo, learner)
    assert learner.policy(batch, frozenset({"old_kl"})).old_kl.abs().max() < 1e-12
    before = learner.policy.log_rows(batch)(slice(None)).detach()  # pyright: ignore[reportAttributeAccessIssue]
    step.update(learner, batch, algo)
    after = learner.policy.log_rows(batch)(slice(None)).detach()  # pyright: ignore[reportAttributeAccessIssue]
    found = learner.policy(batch, frozenset({"old_kl"})).old_kl.detach()[batch.mask]
    torch.testing.assert_close(found, (before.exp() * (before - after)).sum(-1), rtol=0, atol=1e-12)
    assert found.max() > 0
    passes.keep_old_policy(learner, algo)
    assert learner.policy(batch, frozenset({"old_kl"})).old_kl.abs().max() < 1e-12


def test_steer_moves_only_what_its_metric_was_seen_for() -> None:
    algo = reinforce_baseline(beta=0.1, kl_target=0.1, decay=0.9)
    learner = learner_for(algo)
    assert learner.control == {"kl_coef": 0.1, "baseline": 0.0}
    step.adapt_controls(learner, algo, {"reward": 2.0})
    assert learner.control == {"kl_coef": 0.1, "baseline": pytest.approx(0.2)}
    step.adapt_controls(learner, algo, {"ref_kl": 0.2})
    assert learner.control == {"kl_coef": pytest.approx(0.102), "baseline": pytest.approx(0.2)}


def test_begin_keeps_what_a_checkpoint_gave() -> None:
    algo = reinforce_baseline(beta=0.1)
    learner = learner_for(sft())
    learner.control = {"baseline": 0.7}
    learner.start_controls(algo)
    assert learner.control == {"baseline": 0.7, "kl_coef": 0.1}


def test_a_constant_is_what_the_settings_say_whatever_a_checkpoint_has() -> None:
    learner = learner_for(sft())
    learner.control = {"kl_coef": 0.04}
    learner.start_controls(grpo(beta=0.5))
    assert learner.control == {"kl_coef": 0.5}
    learner.start_controls(reinforce_baseline(beta=0.1, kl_target=0.1))
    assert learner.control == {"baseline": 0.0, "kl_coef": 0.5}, "an adaptive one goes on from where it is"


def test_credit_is_whitened_where_the_algorithm_says_so() -> None:
    for algo, whitened in ((ppo(), True), (rloo(), False)):
        learner = learner_for(algo)
        batch = step.assign_credit(passes.annotate(batch_for(algo), algo, learner), algo)
        x = batch.adv[batch.mask]
        near: Callable[[float], bool] = lambda v: abs(v) < 1e-6  # noqa: E731
        assert (near(x.mean().item()) and near(x.std(correction=0).item() - 1)) == whitened


def test_the_learner_can_be_any_policy_with_two_sets_of_parameters() -> None:
    policy = Policy(tiny.decoder())
    assert policy.critic_parameters() == []
    learner = Learner(policy=policy, optimizer=optim.adamw(policy.actor_parameters(), lr=0.1))
    batch = step.weigh(collate(tiny.groups_for(sft())), sft())
    assert isinstance(step.update(learner, batch, sft()), Stats)


def test_on_a_cpu_no_more_is_computed_at_once_than_suits_its_caches() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert cut.rows_per_pass(100, rows=64, tokens=0, device=cpu) == cut.CACHE // 100
    assert cut.rows_per_pass(100, rows=64, tokens=0, device=other) == 64
    assert cut.rows_per_pass(10, rows=64, tokens=0, device=cpu) == 64
    assert cut.rows_per_pass(10, rows=64, tokens=25, device=cpu) == 2
    assert cut.rows_per_pass(cut.CACHE + 1, rows=64, tokens=1, device=cpu) == 1
