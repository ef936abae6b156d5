"""`hone.algo` without the rest of Hone: a batch of one's own, and errors that name what is missing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hone.algo import (
    Batch,
    Forward,
    Totals,
    a2c,
    assign_credit,
    distil,
    dpo,
    dr_grpo,
    grpo,
    kto,
    objective,
    orpo,
    ppo,
    reinforce_baseline,
    reward_model,
    rloo,
    sft,
    totals,
    weigh,
)
from hone.algo.table import missing_column
from hone.algo.weight import token_mean
from hone.cli import main
from hone.config.overrides import Choice, override
from hone.config.recipe import Recipe
from hone.errors import HoneError
from hone.launch import build

torch.set_num_threads(1)

MASK = torch.tensor([[True, True, True, True], [True, False, False, False]])


def made(**columns: Tensor) -> Batch:
    """A group of two answers, of four tokens and of one."""
    tokens = torch.zeros(2, 4, dtype=torch.long)
    base = Batch(inputs=tokens, targets=tokens, mask=MASK, real=MASK, group=torch.zeros(2, dtype=torch.long))
    return replace(base, **columns)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


REWARD, LOGP = numbers(1.0, 0.0), torch.full((2, 4), -1.0, dtype=torch.float64)


def test_rewards_are_valid_unless_it_is_said_which_are_not():
    assert made(reward=REWARD).valid.tolist() == [True, True]
    assert made(reward=REWARD, valid=torch.tensor([True, False])).valid.tolist() == [True, False]
    assert made().valid is None


def test_a_reward_that_is_no_number_is_not_taken_for_a_valid_one():
    with pytest.raises(ValueError, match="a reward is not finite: write 0"):
        made(reward=numbers(1.0, float("nan")))


def test_a_batch_refuses_columns_that_would_give_other_numbers_without_a_word():
    square = torch.zeros(2, 2)  # as many rows as tokens: a column of rows would broadcast along the tokens
    token = square.long()
    base = {"inputs": token, "targets": token, "mask": square == 0, "real": square == 0, "group": token[0]}
    for name, column, says in (
        ("old_logp", square[0], r"old_logp has shape \(2,\), expected \(2, 2\)"),
        ("reward", square, r"reward has shape \(2, 2\), expected \(2,\)"),
        ("label", square[:1], r"label has shape \(1, 2\), expected \(2, 2\) or \(2,\)"),
        ("targets", token[0], r"targets has shape \(2,\), expected \[B, T\]"),
        ("reward", torch.tensor([1, 0]), r"reward is torch.int64, expected floating point: write reward.float\(\)"),
        ("reward", torch.tensor([True, False]), "reward is torch.bool, expected floating point"),
        ("mask", token, r"mask is torch.int64, expected bool: write mask.bool\(\)"),
        ("reward", [1.0, 0.0], "reward is a list: give a tensor"),
    ):
        with pytest.raises(ValueError, match=says):
            Batch(**{**base, name: column})  # pyright: ignore[reportArgumentType]


def test_a_forward_pass_is_not_broadcast_over_the_batch():
    batch = weigh(made(), sft())
    for logp in (LOGP[:, :1], LOGP[:1], LOGP[0], LOGP[:, :, None]):
        with pytest.raises(ValueError, match=r"logp has shape \(.*\), expected \(2, 4\)"):
            objective(Forward(logp=logp), batch, sft())


def test_half_a_pair_is_refused():
    one = made().rows(slice(0, 1))
    for algo in (dpo(), orpo(), reward_model()):
        with pytest.raises(ValueError, match=f"{algo.name} reads pairs, .*: 1 rows are no pairs"):
            objective(Forward(logp=LOGP[:1], value=LOGP[:1]), weigh(one, algo), algo)


def test_an_algorithm_that_was_not_made_is_told_how_to_make_it():
    for algo in (grpo, "grpo"):
        with pytest.raises(ValueError, match=r"as in grpo\(\)"):
            assign_credit(made(reward=REWARD), algo)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"as in grpo\(\)"):
            objective(Forward(logp=LOGP), made(), algo)  # pyright: ignore[reportArgumentType]


def test_a_setting_of_another_type_is_refused():
    with pytest.raises(HoneError, match="grpo: process is 'no': it must be True or False"):
        grpo(process="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(HoneError, match="kl=None is not a KL setting"):
        grpo(kl=None)  # pyright: ignore[reportArgumentType]


def test_the_totals_of_a_batch_are_those_that_weigh_takes():
    batch = made()
    assert totals(batch) == Totals(rows=2, tokens=5)
    assert totals(replace(batch, mask=MASK & MASK[:, 1:2])) == Totals(rows=1, tokens=4)
    assert totals(batch, reduce=lambda x: 3 * x) == Totals(rows=6, tokens=15)
    algo = grpo()
    assert torch.equal(weigh(batch, algo).token_weight, weigh(batch, algo, totals(batch)).token_weight)


def test_grpos_average_is_a_setting():
    # two rows of 4 and 1 tokens; 5 tokens in all; limits 8 and 2
    limit = torch.tensor([8, 2])
    for average, long, short in (("row", 1 / 8, 1 / 2), ("token", 1 / 5, 1 / 5), ("limit", 1 / 16, 1 / 4)):
        found = weigh(made(limit=limit), grpo(average=average)).token_weight
        assert found[0].tolist() == [long] * 4, average
        assert found[1].tolist() == [short, 0, 0, 0], average
    assert grpo().weigh is grpo(average="row").weigh
    with pytest.raises(HoneError, match="average='sum' does not exist: use one of token, row, limit"):
        grpo(average="sum")


def test_the_loss_of_each_average_by_hand():
    # advantages +1 and -1 (less eps), ratio 1: the loss is -sum of weight * adv
    batch = made(reward=REWARD, old_logp=LOGP, limit=torch.tensor([8, 2]))
    for average, expected in (("row", 0.0), ("token", -3 / 5), ("limit", 0.0)):
        algo = grpo(beta=0.0, average=average)
        ready = weigh(assign_credit(batch, algo), algo)
        loss = objective(Forward(logp=LOGP), ready, algo)
        assert loss.item() == pytest.approx(expected * 0.5 / (0.5 + 1e-4)), average
        assert torch.equal(loss, objective(Forward(logp=LOGP), ready, algo.loss))


def test_a_credit_names_the_column_that_it_lacks():
    for algo, columns, lacking in (
        (grpo(), {}, "grpo reads reward, which this batch lacks: give each row its reward"),
        (rloo(), {}, "rloo reads reward"),
        (a2c(), {"reward": REWARD}, "a2c reads old_value"),
        (ppo(), {"reward": REWARD}, "ppo reads old_value, which this batch lacks: fill it with the critic's values"),
        (reinforce_baseline(), {"reward": REWARD}, "reinforce_baseline reads baseline"),
        (grpo(process=True), {"reward": REWARD}, "grpo reads step_reward"),
        (rloo(beta=0.1), {"reward": REWARD, "ref_logp": LOGP, "kl_coef": REWARD}, "rloo reads old_logp"),
        (rloo(beta=0.1), {"reward": REWARD, "old_logp": LOGP, "kl_coef": REWARD}, "rloo reads ref_logp"),
    ):
        with pytest.raises(ValueError, match=lacking):
            assign_credit(made(**columns), algo)


def test_a_credit_names_the_first_of_several_columns_that_it_lacks():
    with pytest.raises(ValueError, match="ppo reads bootstrap"):
        assign_credit(made(), ppo(bootstrap=True))
    with pytest.raises(ValueError, match="ppo reads bootstrap"):
        assign_credit(made(reward=REWARD, old_value=LOGP), ppo(bootstrap=True))


def test_a_credit_of_steps_needs_no_reward_of_the_row():
    step_reward = torch.tensor([[0.5, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    algo = grpo(process=True)
    columns = {"old_logp": LOGP, "ref_logp": LOGP, "kl_coef": REWARD, "step_reward": step_reward}
    assert assign_credit(made(**columns), algo).adv is not None


def test_a_loss_of_ones_own_names_the_column_that_it_lacks_and_keeps_its_own_errors():
    def far_from_reference(fwd: Forward, batch: Batch) -> Tensor:
        return batch.ref_logp.exp() - fwd.logp.exp()  # None has no exp

    def wrong(fwd: Forward, batch: Batch) -> Tensor:
        return fwd.logp + "1"  # pyright: ignore[reportOperatorIssue, reportReturnType]

    def choosy(fwd: Forward, batch: Batch) -> Tensor:
        if isinstance(batch, Batch):
            raise TypeError("not this one")
        return fwd.logp

    batch = weigh(made(adv=LOGP), grpo())
    with pytest.raises(ValueError, match="far_from_reference reads ref_logp, which this batch lacks"):
        objective(Forward(logp=LOGP), batch, ((1.0, far_from_reference),))
    with pytest.raises(TypeError, match="unsupported operand"):
        objective(Forward(logp=LOGP), batch, ((1.0, wrong),))
    with pytest.raises(TypeError, match="not this one"):
        objective(Forward(logp=LOGP), batch, ((1.0, choosy),))


def test_a_loss_names_the_column_that_it_lacks():
    full = {"adv": LOGP, "old_logp": LOGP, "ref_logp": LOGP, "kl_coef": REWARD}
    for algo, dropped in ((grpo(), "old_logp"), (grpo(), "ref_logp"), (grpo(), "kl_coef"), (grpo(), "adv")):
        batch = weigh(made(**{name: x for name, x in full.items() if name != dropped}), algo)
        with pytest.raises(ValueError, match=f"grpo reads {dropped}, which this batch lacks: "):
            objective(Forward(logp=LOGP), batch, algo)
    with pytest.raises(ValueError, match="clipped reads old_logp, which this batch lacks"):
        objective(Forward(logp=LOGP), weigh(made(adv=LOGP), grpo()), grpo().loss)
    for algo in (dpo(), kto()):
        with pytest.raises(ValueError, match=f"{algo.name} reads (ref_logp|label), which this batch lacks"):
            objective(Forward(logp=LOGP), weigh(made(), algo), algo)


def test_a_column_that_a_stage_fills_is_missed_with_what_fills_it():
    filled = ("reward", "step_reward", "label", "old_logp", "ref_logp", "kl_coef", "old_value", "adv", "returns")
    generic = [c for c in (*filled, "token_weight") if "replace(batch" in str(missing_column("it", c))]
    assert generic == []
    assert str(missing_column("it", "gen_logp")).endswith("fill it, as in replace(batch, gen_logp=...)")


def test_a_credit_of_ones_own_needs_no_reward():
    algo = replace(grpo(), credit=lambda batch: torch.ones_like(LOGP))
    batch = assign_credit(made(old_logp=LOGP, ref_logp=LOGP, kl_coef=REWARD), algo)
    assert torch.equal(batch.adv, torch.ones_like(LOGP))


def test_half_of_the_weights_are_not_enough():
    for half in ({"token_weight": LOGP}, {"row_weight": REWARD}):
        with pytest.raises(ValueError, match="grpo reads token_weight, which this batch lacks"):
            objective(Forward(logp=LOGP), made(adv=LOGP, old_logp=LOGP, **half), grpo())


def test_a_batch_that_was_not_weighed_and_a_forward_pass_that_lacks_a_field_are_named():
    with pytest.raises(ValueError, match=r"grpo reads token_weight, .*weigh\(batch, algo\) adds it"):
        objective(Forward(logp=LOGP), made(adv=LOGP, old_logp=LOGP), grpo())
    batch = weigh(made(adv=LOGP, returns=LOGP, old_value=LOGP), a2c())
    with pytest.raises(ValueError, match="a2c reads value, which this forward pass lacks"):
        objective(Forward(logp=LOGP), batch, a2c())
    with pytest.raises(ValueError, match="distil reads ref_kl, which this forward pass lacks"):
        objective(Forward(logp=LOGP), batch, distil())
    with pytest.raises(ValueError, match="grpo reads logp, which this forward pass lacks"):
        objective(Forward(), batch, grpo())


def test_an_average_by_limit_needs_a_limit():
    for algo in (dr_grpo(), grpo(average="limit")):
        with pytest.raises(ValueError, match="reads limit, which this batch lacks: fill it, or give max_tokens"):
            weigh(made(), algo)
        with pytest.raises(ValueError, match="divides by the column limit, which is 0"):
            weigh(made(limit=torch.tensor([4, 0])), algo)
    with_prompt = replace(made(), real=torch.ones_like(MASK))
    assert weigh(with_prompt, dr_grpo(max_tokens=10)).token_weight.sum().item() == pytest.approx(5 / 20)
    nothing = replace(made(), mask=torch.zeros_like(MASK))
    assert weigh(nothing, dr_grpo(max_tokens=10)).token_weight.tolist() == [[0.0] * 4] * 2


def test_only_rows_that_are_trained_on_need_a_limit():
    first = replace(made(limit=torch.tensor([1, 0])), mask=MASK & torch.tensor([[True], [False]]))
    assert weigh(first, dr_grpo()).token_weight.tolist() == [[1.0] * 4, [0.0] * 4]


def test_the_average_is_set_from_the_command_line_and_shown_by_hone_algos(capsys: pytest.CaptureFixture[str]):
    recipe = override(Recipe(algo=Choice("grpo")), ["algo.average=token"])
    assert build.algorithm(recipe).weigh is token_mean
    with pytest.raises(HoneError, match="average='tokens' does not exist: use one of token, row, limit"):
        build.algorithm(override(Recipe(algo=Choice("grpo")), ["algo.average=tokens"]))
    assert main(["algos", "grpo"]) == 0
    assert "average" in capsys.readouterr().out
