"""Micro-batches: Hone's gradient is the same whatever the cut; TRL's is, too, where the normaliser allows it."""

import pytest
from each import each

pytest.importorskip("trl", reason="TRL is not installed: pip install -c constraints.txt -e .[dev]")

from hone.algo import cispo, dapo, dpo, dr_grpo, grpo, gspo, reward_model
from tests.parity import house, llama, peer, preference, rows
from tests.parity.cases import group_batch
from tests.parity.differences import Settings

CLIP = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2}
EVEN = {  # TRL's loss_type and settings, Hone's method
    "grpo": (grpo(beta=0.0), {}),
    "dr_grpo": (dr_grpo(), {}),
    "dapo": (dapo(low=0.2, high=0.2), {}),
    "cispo": (cispo(max_ratio=2.0), {"epsilon_high": 2.0}),
    "grpo by sequence": (gspo(low=0.2, high=0.2), {"importance_sampling_level": "sequence"}),
}


@each("micro_rows", [4, 2, 1])
@each("loss_type", EVEN)
def test_even_cuts_agree_to_the_parameters(loss_type, micro_rows):
    algo, more = EVEN[loss_type]
    batch = group_batch(algo)
    table = peer.completions(
        rows.draw(share=rows.GROUP), batch, old_per_token_logps=batch.old_logp, advantages=batch.adv
    )
    parts = peer.cut(table, rows=micro_rows)
    kind = loss_type.split()[0]
    values = {**CLIP, **more, "loss_type": kind, "args__steps_per_generation": len(parts)}
    theirs = peer.accumulate(peer.grpo(), parts, **values)
    ours = house.step(house.policy(), batch, algo, micro_rows=micro_rows)
    assert max(house.distance(ours, theirs)) <= 2e-5
    whole = house.step(house.policy(), batch, algo)
    assert max(house.distance(ours, whole)) <= 1e-12


def test_bnpo_s_gradient_depends_on_the_cut_and_hone_s_does_not():
    algo = dapo(low=0.2, high=0.2)
    batch = group_batch(algo)
    table = peer.completions(
        rows.draw(share=rows.GROUP), batch, old_per_token_logps=batch.old_logp, advantages=batch.adv
    )
    seen = [peer.accumulate(peer.grpo(), peer.cut(table, rows=n), **CLIP, loss_type="bnpo").loss for n in (8, 4, 2, 1)]
    ours = [house.step(house.policy(), batch, algo, micro_rows=n).loss for n in (8, 4, 2, 1)]
    assert ours == pytest.approx([ours[0]] * 4, rel=1e-12)
    assert seen[0] == pytest.approx(ours[0], abs=1e-6)
    assert max(seen) - min(seen) > 0.01


@pytest.mark.parametrize("pairs", [2, 1])
def test_dpo_agrees_over_even_cuts(pairs):
    setting = Settings(algo=dpo(beta=0.3), trl={"beta": 0.3})
    theirs = preference.dpo(setting, "model", pairs=pairs)
    ours = house.step(house.policy(), preference.pair_batch(), setting.algo, micro_rows=2 * pairs)
    assert max(house.distance(ours, theirs)) <= 2e-5


def test_dpo_s_last_short_micro_batch_weighs_as_much_as_a_full_one():
    setting = Settings(algo=dpo(beta=0.3), trl={"beta": 0.3})
    theirs = preference.dpo(setting, "logp", pairs=3).loss  # three pairs, then one
    batch = preference.pair_batch()
    per_pair = [
        house.on_logp(house.logp(batch)[i : i + 2], batch.rows(slice(i, i + 2)), setting.algo).loss
        for i in range(0, 8, 2)
    ]
    assert theirs == pytest.approx((sum(per_pair[:3]) / 3 + per_pair[3]) / 2, rel=1e-12)
    assert abs(theirs - sum(per_pair) / 4) > 0.01


def test_hone_s_packed_layout_has_trl_s_gradient():
    algo = grpo(beta=0.0)
    batch = group_batch(algo)
    table = peer.completions(
        rows.draw(share=rows.GROUP), batch, old_per_token_logps=batch.old_logp, advantages=batch.adv
    )
    theirs = peer.accumulate(peer.grpo(), [table], **CLIP, loss_type="grpo")
    ours = house.step(house.policy(layout="packed"), batch, algo, micro_rows=3)
    assert max(house.distance(ours, theirs)) <= 2e-5


def test_the_centring_term_has_the_same_scale_in_any_cut():
    algo = reward_model(centre=0.1)
    found = llama.reward_model()
    scorer = house.scorer(found.state_dict(), found.config.to_dict())
    whole, cut = (house.step(scorer, rows.pairs(), algo, micro_rows=n) for n in (8, 2))
    assert max(house.distance(cut, whole)) <= 1e-12
