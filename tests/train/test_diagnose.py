"""What is watched, by hand, and that no cut changes it."""

import math
from dataclasses import replace

import pytest
import torch

from hone.algo import cispo, expert_iteration, grpo, ppo, sft
from hone.log.stats import Stats
from hone.train.update import add_statistics, finish_statistics
from hone.types import Batch, Forward

torch.set_num_threads(1)


def column(*xs: float) -> torch.Tensor:
    return torch.tensor([xs], dtype=torch.float64)


def row(mask: list[int], **columns: torch.Tensor) -> Batch:
    m = torch.tensor([mask], dtype=torch.bool)
    base = Batch(inputs=m.long(), targets=m.long(), mask=m, real=torch.ones_like(m), group=torch.zeros(1).long())
    return replace(base, **columns)


def seen(fwd: Forward, batch: Batch, algo: object = None) -> dict[str, float]:
    stats = Stats()
    add_statistics(stats, fwd, batch, algo or cispo())  # pyright: ignore[reportArgumentType]
    return finish_statistics(stats.means())


def test_ratios_and_the_effective_sample_size() -> None:
    # ratios 1 and 3 (the third is not trained): mean 2, mean square 5, ess 4/5; k3 of old: (3 - 1 - log 3) / 2
    batch = row([1, 1, 0], old_logp=column(0.0, 0.0, 0.0), adv=column(1.0, 1.0, 0.0))
    found = seen(Forward(logp=column(0.0, math.log(3), 9.0)), batch)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["ess"] == pytest.approx(0.8)
    assert found["old_kl"] == pytest.approx((2 - math.log(3)) / 2)
    assert "ratio_square" not in found


def test_the_reference_kl_is_k3_a_token() -> None:
    # d = .5 and 0: (exp(-.5) - 1 + .5) / 2
    batch = row([1, 1], ref_logp=column(-1.0, -1.0))
    found = seen(Forward(logp=column(-0.5, -1.0)), batch, expert_iteration())
    assert found["ref_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 2)
    assert found["nll"] == pytest.approx(0.75)
    # rows of a dataset are no samples of the policy: k3 on them estimates nothing
    assert "ref_kl" not in seen(Forward(logp=column(-0.5, -1.0)), batch, sft())


def test_entropy_is_the_distributions_or_the_samples_and_never_a_datasets() -> None:
    batch = row([1, 1, 0], old_logp=column(-1.0, -3.0, 0.0), adv=column(1.0, 1.0, 0.0))
    logp = column(-1.0, -3.0, 0.0)
    assert seen(Forward(logp=logp), batch)["entropy"] == pytest.approx(2.0)
    assert seen(Forward(logp=logp, entropy=column(0.5, 0.7, 9.0)), batch)["entropy"] == pytest.approx(0.6)
    # a fitted dataset is no collapsed policy
    assert "entropy" not in seen(Forward(logp=logp), batch, sft())


def test_the_samplers_gap_is_measured_at_the_policy_that_was_annotated() -> None:
    # old - gen = .1 and -.2; the present policy has no part in it
    batch = row([1, 1, 0], old_logp=column(-1.0, -1.2, 5.0), gen_logp=column(-1.1, -1.0, 0.0), adv=column(1, 1, 0))
    found = seen(Forward(logp=column(-5.0, -5.0, 0.0)), batch)
    assert found["gen_gap"] == pytest.approx(0.2)
    assert found["gen_kl"] == pytest.approx((math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8) / 2)


def test_the_samplers_kl_is_that_from_the_sampler_to_the_learner() -> None:
    gen, old = column(0.7, 0.2, 0.1), column(0.4, 0.35, 0.25)
    draws = torch.multinomial(gen[0], 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    batch = row([1] * len(draws), old_logp=old.log()[:, draws], gen_logp=gen.log()[:, draws], adv=gen[:, draws])
    forward, backward = float((gen * (gen / old).log()).sum()), float((old * (old / gen).log()).sum())
    assert abs(forward - backward) > 0.01, "the two directions can be told apart"
    assert seen(Forward(logp=batch.old_logp), batch)["gen_kl"] == pytest.approx(forward, abs=2e-3)


def test_explained_variance() -> None:
    # targets 0, 2: variance 1; errors target - value = 0 - .5, 2 - 1.5 = -.5, .5: variance .25
    batch = row([1, 1, 0], returns=column(0.0, 2.0, 50.0))
    found = seen(Forward(value=column(0.5, 1.5, -9.0)), batch, sft())
    assert found["explained_variance"] == pytest.approx(0.75)
    assert found["return"] == pytest.approx(1.0)
    # a constant offset is no error of the variance
    found = seen(Forward(value=column(10.0, 12.0, 0.0)), batch, sft())
    assert found["explained_variance"] == pytest.approx(1.0)


def test_targets_that_do_not_vary_have_no_explained_variance() -> None:
    found = seen(Forward(value=column(0.5, 1.5)), row([1, 1], returns=column(2.0, 2.0)), sft())
    assert "explained_variance" not in found


def test_the_clip_fraction_is_of_trained_tokens() -> None:
    # ratios 1.5 (A > 0: clipped), 1.5 (A < 0: not), 1.0, and one that is not trained
    batch = row([1, 1, 1, 0], old_logp=column(0, 0, 0, 0), adv=column(1.0, -1.0, 1.0, 1.0))
    found = seen(Forward(logp=column(math.log(1.5), math.log(1.5), 0.0, 9.0)), batch, grpo(beta=0.0))
    assert found["clip_fraction"] == pytest.approx(1 / 3)


def test_no_cut_changes_what_is_seen() -> None:
    g = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(6, 5, generator=g, dtype=torch.float64)

    mask = normal() > -0.3
    batch = Batch(
        inputs=mask.long(), targets=mask.long(), mask=mask, real=mask, group=torch.arange(6),
        old_logp=normal(), ref_logp=normal(), gen_logp=normal(), adv=normal(), returns=normal(),
    )  # fmt: skip
    fwd = Forward(logp=normal(), value=normal(), entropy=normal())
    whole = Stats()
    add_statistics(whole, fwd, batch, ppo())
    parts = Stats()
    for rows in (slice(0, 1), slice(1, 5), slice(5, 6)):
        part = Forward(logp=fwd.logp[rows], value=fwd.value[rows], entropy=fwd.entropy[rows])
        add_statistics(parts, part, batch.rows(rows), ppo())
    assert finish_statistics(parts.means()) == pytest.approx(finish_statistics(whole.means()))
