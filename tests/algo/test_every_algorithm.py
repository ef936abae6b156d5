"""Facts about each entry of ALGORITHMS, so that a new one is covered the day it is added."""

from dataclasses import fields, replace

import algo_cases
import torch
from algo_cases import ALL, ANNOTATED, ONLINE, ROWS
from each import each
from torch import Tensor

from hone.algo import ALGORITHMS, Algorithm, Teacher, assign_credit, distil, grpo, objective, sft, terms
from hone.algo.table import old_logp_from_first_pass
from hone.types import ABSENT, Batch, Forward

torch.set_num_threads(1)

MORE = {  # settings that bring in parts the defaults leave out
    "grpo exact": ("grpo", {"kl": "loss:exact"}),
    "grpo k2*ratio": ("grpo", {"kl": "loss:k2*ratio"}),
    "grpo process": ("grpo", {"process": True}),
    "grpo progress": ("grpo", {"lam": 0.7}),
    "grpo trajectory": ("grpo", {"ratio": "trajectory"}),
    "ppo in full": ("ppo", {"beta": 0.1, "kl": "reward:k1", "bootstrap": True, "dual": 3.0, "entropy": 0.01}),
    "ppo_penalty exact": ("ppo_penalty", {"exact": True}),
    "rloo with kl": ("rloo", {"beta": 0.1}),
    "reinforce with kl": ("reinforce", {"beta": 0.1, "gamma": 0.9}),
    "dpo smoothed": ("dpo", {"smoothing": 0.1}),
    "reward_model centred": ("reward_model", {"centre": 0.1}),
    "pointwise_reward_model bce": ("pointwise_reward_model", {"loss": "bce"}),
}
CASES = ALL + sorted(MORE)
SPLITS = ([1] * 8, [8], [3, 5], [2, 2, 4], [4, 1, 3])


def algorithm(case: str) -> Algorithm:
    name, settings = MORE.get(case, (case, {}))
    return ALGORITHMS[name](**settings)


def cut(sizes: list[int], unit: int, seed: int) -> list[Tensor]:
    """Rows in random order, cut to the sizes; pairs stay together."""
    order = torch.randperm(ROWS // unit, generator=torch.Generator().manual_seed(seed))
    rows = (order[:, None] * unit + torch.arange(unit)).flatten()
    if unit == 2:
        sizes = [2 * n for n in sizes if sum(sizes) == ROWS // 2] or [2, 2, 4]
    return list(rows.split(sizes))


@each("case", CASES)
def test_loss_and_gradient_add_up_over_any_split(case: str) -> None:
    algo = algorithm(case)
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(batch)
    whole, grads = algo_cases.loss_and_gradient(fwd, batch, algo)
    for seed, sizes in enumerate(SPLITS):
        total, parts = torch.zeros(()).double(), {name: torch.zeros_like(g) for name, g in grads.items()}
        for rows in cut(sizes, algo.unit, seed):
            loss, part = algo_cases.loss_and_gradient(algo_cases.rows_of(fwd, rows), batch.rows(rows), algo)
            total += loss
            for name, g in part.items():
                parts[name][rows] += g
        torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)
        for name in grads:
            torch.testing.assert_close(parts[name], grads[name], rtol=0, atol=1e-12)
    assert any(g.any() for g in grads.values())


def spoilt(x: Tensor, keep: Tensor, rubbish: float) -> Tensor:
    return x.detach().where(keep, rubbish)


@each("rubbish", [1e4, -1e4])
@each("case", CASES)
def test_rubbish_off_the_mask_changes_neither_loss_nor_gradient(case: str, rubbish: float) -> None:
    algo = algorithm(case)
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(batch)
    clean, grads = algo_cases.loss_and_gradient(fwd, batch, algo)
    per_token = {n: x for n, x in batch.columns().items() if x.ndim == 2 and x.is_floating_point()}
    dirty = replace(batch, **{n: spoilt(x, batch.mask, rubbish) for n, x in per_token.items()})
    # a reward model reads the value after the last token, which is off the mask but no padding
    kept = {"value": batch.real if case.startswith(("reward_model", "pointwise")) else batch.mask}
    fields_ = {n: spoilt(x, kept.get(n, batch.mask), rubbish) for n, x in algo_cases.leaves(fwd).items()}
    dirty_fwd = Forward(**{n: x.requires_grad_() for n, x in fields_.items()})
    loss, dirty_grads = algo_cases.loss_and_gradient(dirty_fwd, dirty, algo)
    torch.testing.assert_close(loss, clean, rtol=0, atol=1e-12)
    for name, g in dirty_grads.items():
        torch.testing.assert_close(g, grads[name], rtol=0, atol=1e-12)
        assert not g[~kept.get(name, batch.mask)].any()


@each("rubbish", [torch.inf, -torch.inf, torch.nan])
@each("case", CASES)
def test_a_log_prob_that_is_no_number_off_the_mask_does_no_harm(case: str, rubbish: float) -> None:
    algo = algorithm(case)
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(batch)
    clean, grads = algo_cases.loss_and_gradient(fwd, batch, algo)
    spoil = {
        n: x
        for n in ("gen_logp", "old_logp", "ref_logp", "ref_kl", "step_reward")
        if (x := getattr(batch, n)) is not ABSENT
    }
    dirty = replace(batch, **{n: spoilt(x, batch.mask, rubbish) for n, x in spoil.items()})
    loss, dirty_grads = algo_cases.loss_and_gradient(fwd, dirty, algo)
    assert torch.equal(loss, clean)
    assert all(torch.equal(g, grads[n]) for n, g in dirty_grads.items())
    spoilt_credit, credit = assign_credit(dirty, algo), assign_credit(batch, algo)
    for name in {"adv", "returns"} & credit.columns().keys():
        assert torch.equal(getattr(spoilt_credit, name)[batch.mask], getattr(credit, name)[batch.mask])


SCORED = [c for c in CASES if algorithm(c).online and algorithm(c).unit == 1]  # a row's reward may be invalid


@each("case", SCORED)
def test_an_invalid_row_has_no_part_in_loss_or_gradient(case: str) -> None:
    algo = algorithm(case)
    base = algo_cases.ragged()
    batch = algo_cases.prepared(algo, algo_cases.without_row(base, 5))
    other = replace(
        base,
        **{n: x.index_fill(0, torch.tensor([5]), 7.0) for n, x in base.columns().items() if x.dtype == torch.float64},
    )
    other = algo_cases.prepared(algo, algo_cases.without_row(other, 5))
    fwd = algo_cases.forward_of(batch)
    loss, grads = algo_cases.loss_and_gradient(fwd, batch, algo)
    again, grads_again = algo_cases.loss_and_gradient(fwd, other, algo)
    assert torch.equal(loss, again)
    for name, g in grads.items():
        assert torch.equal(g, grads_again[name])
        assert not g[5].any()
    # and the others' weights are those of a batch without it
    kept = torch.tensor([i for i in range(ROWS) if i != 5])
    without = algo_cases.prepared(algo, base.rows(kept))
    alone, _ = algo_cases.loss_and_gradient(algo_cases.rows_of(fwd, kept), without, algo)
    torch.testing.assert_close(alone, loss, rtol=0, atol=1e-12)


class Recorder:
    """Stands for a record and notes which fields are read."""

    def __init__(self, record: Batch | Forward) -> None:
        self.record, self.read = record, set[str]()

    def __getattr__(self, name: str) -> object:
        self.read.add(name)
        return getattr(self.record, name)


@each("case", CASES)
def test_the_loss_reads_only_the_columns_and_fields_it_declares(case: str) -> None:
    algo = algorithm(case)
    full = algo_cases.prepared(algo)
    annotated = {c: getattr(algo_cases.ragged(), c) for c in ANNOTATED}
    batch, fwd = Recorder(replace(full, **annotated)), Recorder(algo_cases.forward_of(full))
    for _, term in algo.loss:
        term(fwd, batch)  # pyright: ignore[reportArgumentType]
    given = {"inputs", "targets", "mask", "real", "group", "margin", "adv", "returns"}
    assert batch.read <= algo.needs | given
    assert {f for f in fwd.read if f in {x.name for x in fields(Forward)}} <= algo.wants


@each("case", CASES)
def test_what_it_watches_needs_nothing_more(case: str) -> None:
    algo = algorithm(case)
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(batch)
    lean = Forward(**{n: x for n, x in algo_cases.leaves(fwd).items() if n in algo.wants})
    for name, term in algo.watch:
        seen = term(lean, batch)
        trained = seen[batch.mask] if seen.ndim == 2 else seen
        assert trained.isfinite().all()
        if name != "margin":  # the others are shares
            assert set(trained.tolist()) <= {0.0, 1.0}


@each("name", ALL)
def test_every_declared_column_matters(name: str) -> None:
    algo = ALGORITHMS[name]()
    batch = algo_cases.with_label(algo_cases.ragged(), algo)
    fwd = algo_cases.forward_of(batch)
    before, _ = algo_cases.loss_and_gradient(fwd, algo_cases.prepared(algo, batch), algo)
    noise = torch.linspace(0.1, 0.9, ROWS, dtype=torch.float64)
    for column in algo.needs:
        x: Tensor = getattr(batch, column)
        moved = 1 - x if column == "label" else x + noise.view(-1, *[1] * (x.ndim - 1))
        other = algo_cases.prepared(algo, replace(batch, **{column: moved}))
        after, _ = algo_cases.loss_and_gradient(fwd, other, algo)
        assert after != before, f"{name} declares {column} and does not read it"


@each("name", ALL)
def test_every_wanted_field_takes_a_gradient(name: str) -> None:
    algo = ALGORITHMS[name]()
    batch = algo_cases.prepared(algo)
    _, grads = algo_cases.loss_and_gradient(algo_cases.forward_of(batch), batch, algo)
    watched = {"logp"} if algo.teacher else set[str]()
    assert {n for n, g in grads.items() if not g.any()} == watched


NO_RATIO = {"klq"}  # a regression, not a policy gradient
POLICY_GRADIENTS = [n for n in ONLINE if ALGORITHMS[n]().credit is not None and n not in NO_RATIO]


@each("name", POLICY_GRADIENTS)
def test_on_policy_the_surrogate_has_the_policy_gradients_gradient(name: str) -> None:
    algo = ALGORITHMS[name]()
    batch = algo_cases.prepared(algo)
    fwd = algo_cases.forward_of(replace(batch, old_logp=algo_cases.ragged().old_logp), on_policy=True)
    (found,) = torch.autograd.grad(objective(fwd, batch, algo.loss[:1]), fwd.logp)
    (expected,) = torch.autograd.grad(objective(fwd, batch, ((1.0, terms.policy_gradient),)), fwd.logp)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert found.any()


@each("name", [n for n in ONLINE if ALGORITHMS[n]().credit is not None])
def test_advantages_are_zero_off_the_mask_and_always_finite(name: str) -> None:
    algo = ALGORITHMS[name]()
    worlds = {
        "as sampled": algo_cases.ragged(),
        "one valid member": replace(algo_cases.ragged(), valid=torch.tensor([True] + [False] * 3 + [True] * 4)),
        "all invalid": replace(algo_cases.ragged(), valid=torch.zeros(ROWS, dtype=torch.bool)),
        "equal rewards": replace(algo_cases.ragged(), reward=torch.full((ROWS,), 0.1, dtype=torch.float64)),
        "groups of one": replace(algo_cases.ragged(), group=torch.arange(ROWS)),
    }
    for batch in worlds.values():
        batch = replace(batch, mask=batch.mask & batch.valid[:, None])
        found = assign_credit(algo_cases.lean(batch, algo), algo)
        assert found.adv.isfinite().all()
        assert found.returns is ABSENT or found.returns.isfinite().all()
        assert not found.adv[~batch.mask].any()


def test_old_log_probs_that_nothing_has_filled_are_those_of_the_pass_itself() -> None:
    batch = replace(algo_cases.ragged(), old_logp=ABSENT)
    fwd = algo_cases.forward_of(algo_cases.ragged())
    filled = old_logp_from_first_pass(fwd, batch, grpo())
    assert filled.old_logp.equal(fwd.logp)
    assert not filled.old_logp.requires_grad
    assert old_logp_from_first_pass(fwd, batch, sft()) is batch
    assert old_logp_from_first_pass(fwd, filled, grpo()) is filled


def test_a_teacher_is_compared_over_the_whole_vocabulary_unless_told_otherwise() -> None:
    assert Teacher().top_k == 0
    assert distil(top_k=5).teacher == Teacher(top_k=5)
