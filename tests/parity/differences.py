"""Where Hone and TRL compute something else, each with the exact relation between the two.

`stated` is what the relation makes of Hone's numbers: it has to be TRL's number, and ours must not be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hone.algo import (
    Algorithm,
    assign_credit,
    cispo,
    credit,
    dapo,
    dpo,
    grpo,
    ipo,
    kto,
    objective,
    orpo,
    prefer,
    rloo,
    simpo,
    terms,
    weight,
)
from hone.algo.weight import Totals, weigh
from hone.data.collate import collate
from hone.model.scorer import Scorer
from hone.types import Batch, Forward, Rollout, sequence_mean
from tests.parity import house, preference, rows
from tests.parity.cases import CASES, TRAJECTORY, Case, group_batch
from tests.parity.house import Result
from tests.parity.llama import reward_model


@dataclass(frozen=True, kw_only=True)
class Found:
    """Three results of one difference."""

    ours: Result
    peer: Result
    stated: Result


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A method and TRL's settings for it."""

    algo: Algorithm
    trl: Mapping[str, Any]


DIFFERENCES: dict[str, Callable[[], Found]] = {}


def difference(function: Callable[[], Found]) -> Callable[[], Found]:
    """Enter it under its own name, with spaces."""
    DIFFERENCES[function.__name__.replace("_", " ")] = cache(function)
    return DIFFERENCES[function.__name__.replace("_", " ")]


def column(x: Tensor, *, shown: int = 0) -> Result:
    """Numbers that are no loss: the one shown stands for it."""
    x = x.detach().double()
    return Result(loss=float(x[shown]), grads={"column": x})


def _per_row(adv: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]: the advantage on each row's first trained token."""
    return adv.gather(1, mask.int().argmax(-1, keepdim=True)).squeeze(1)


def _table(batch: Batch, **more: Tensor) -> dict[str, Tensor]:
    from tests.parity import peer

    columns = {"old_per_token_logps": batch.old_logp, "ref_per_token_logps": batch.ref_logp, "advantages": batch.adv}
    return peer.completions(rows.draw(share=rows.GROUP), batch, **columns) | more


def _trl_group(batch: Batch, *, table: dict[str, Tensor] | None = None, **changed: Any) -> Result:
    from tests.parity import peer

    changed = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, **changed}
    table = _table(batch) if table is None else table
    return peer.group_on_logp(peer.grpo(), house.logp(rows.grouped()), rows.grouped(), table, **changed)


# --- advantages ---


@difference
def grpo_divides_by_the_sample_std() -> Found:
    """adv_TRL (s_{n-1} + eps) = adv (s_n + eps), s_{n-1} = s_n sqrt(n / (n-1))"""
    from tests.parity import peer, scoring

    batch = rows.grouped()
    ours = _per_row(credit.group_zscore(batch), batch.mask)
    std = batch.reward.view(-1, rows.GROUP).std(-1, correction=0).repeat_interleave(rows.GROUP)
    stated = ours * (std + 1e-4) / (std * (rows.GROUP / (rows.GROUP - 1)) ** 0.5 + 1e-4)
    theirs = scoring.score(peer.grpo(), rows.REWARDS)["advantages"]
    return Found(ours=column(ours), peer=column(theirs), stated=column(stated))


@difference
def scale_rewards_batch_is_no_published_name_here() -> Found:
    """(R - group mean) / (sample std of all rewards + eps)"""
    from tests.parity import peer, scoring

    batch = rows.grouped()
    centred = _per_row(credit.group_centred(batch), batch.mask)
    stated = centred / (batch.reward.std() + 1e-4)
    theirs = scoring.score(peer.grpo(), rows.REWARDS, scale_rewards="batch")["advantages"]
    ours = _per_row(credit.group_zscore(batch), batch.mask)
    return Found(ours=column(ours), peer=column(theirs), stated=column(stated))


# --- who is counted ---


@difference
def an_invalid_row_stays_in_the_row_mean() -> Found:
    """TRL = Hone * valid rows / rows: its advantage is 0, but it is counted"""
    algo = grpo(beta=0.0)
    batch = replace(group_batch(algo), **_invalid(rows.grouped((None, *rows.REWARDS[1:]))))
    batch = assign_credit(batch, algo)
    ours = house.on_logp(house.logp(rows.grouped()), batch, algo)
    everything = replace(batch, mask=rows.grouped().mask)
    theirs = _trl_group(everything, loss_type="grpo")
    return Found(ours=ours, peer=theirs, stated=ours.scaled(7 / 8))


@difference
def an_invalid_row_stays_in_the_token_mean() -> Found:
    """TRL = Hone * valid tokens / tokens"""
    algo = dapo(low=0.2, high=0.2)
    batch = replace(group_batch(algo), **_invalid(rows.grouped((None, *rows.REWARDS[1:]))))
    batch = assign_credit(batch, algo)
    ours = house.on_logp(house.logp(rows.grouped()), batch, algo)
    everything = replace(batch, mask=rows.grouped().mask)
    theirs = _trl_group(everything, loss_type="dapo")
    share = int(batch.mask.sum()) / int(everything.mask.sum())
    return Found(ours=ours, peer=theirs, stated=ours.scaled(share))


def _invalid(batch: Batch) -> dict[str, Tensor]:
    return {"reward": batch.reward, "valid": batch.valid, "mask": batch.mask}


@difference
def masked_truncated_rows_stay_in_the_row_mean() -> Found:
    """TRL = Hone * finished rows / rows, for the same advantages"""
    algo = grpo(beta=0.0)
    batch = group_batch(algo)
    keep = ~batch.truncated
    ours = house.on_logp(house.logp(batch), replace(batch, mask=batch.mask & keep[:, None]), algo)
    table = _table(batch)
    table["completion_mask"] = table["completion_mask"] * keep[:, None]  # as mask_truncated_completions does
    theirs = _trl_on_kept(table, batch, loss_type="grpo")
    return Found(ours=ours, peer=theirs, stated=ours.scaled(float(keep.double().mean())))


def _trl_on_kept(table: dict[str, Tensor], batch: Batch, **changed: Any) -> Result:
    """The loss on a table whose mask has lost rows: the log-probs keep their places."""
    from tests.parity import peer

    changed = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, **changed}
    whole = peer.completions(rows.draw(share=rows.GROUP), batch)["completion_mask"]
    leaf = house.logp(batch).requires_grad_()
    given = peer.aligned(leaf, batch, whole)
    forward = lambda *_, **__: (given, torch.zeros_like(given), None)  # noqa: E731
    with peer.settings(
        peer.grpo(), _get_per_token_logps_and_entropies=forward, current_gradient_accumulation_steps=1, **changed
    ):
        loss = peer.grpo().compute_loss(peer.grpo().model, dict(table))
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"logp": house.grad(leaf)})


# --- how the step is cut ---


def _parts(batch: Batch, bounds: list[tuple[int, int]], algo: Algorithm, totals: list[Totals]) -> Result:
    """Hone's terms, weighed part by part with the given counts: what a mean of means would be."""
    leaf = house.logp(batch).requires_grad_()
    total = torch.zeros((), dtype=rows.FULL)
    for (start, end), n in zip(bounds, totals, strict=True):
        part = weigh(batch.rows(slice(start, end)), algo.weigh, n)
        total = total + objective(Forward(logp=leaf[start:end]), part, algo.loss) / len(bounds)
    total.backward()
    return Result(loss=float(total.detach()), grads={"logp": house.grad(leaf)})


def _count(batch: Batch, bounds: list[tuple[int, int]]) -> list[Totals]:
    return [Totals(rows=b - a, tokens=int(batch.mask[a:b].sum())) for a, b in bounds]


def _trl_parts(batch: Batch, bounds: list[tuple[int, int]], **changed: Any) -> Result:
    """TRL's loss, one micro-batch after another, with a leaf for the log-probs."""
    from tests.parity import peer

    changed = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, **changed}
    whole, leaf = _table(batch), house.logp(batch).requires_grad_()
    given = peer.aligned(leaf, batch, whole["completion_mask"])
    total = torch.zeros((), dtype=rows.FULL)
    for start, end in bounds:
        piece = given[start:end]
        forward = lambda *_, x=piece, **__: (x, torch.zeros_like(x), None)  # noqa: E731
        table = {name: x if x.ndim == 0 else x[start:end] for name, x in whole.items()}
        steps = {"current_gradient_accumulation_steps": len(bounds), "args__steps_per_generation": len(bounds)}
        with peer.settings(peer.grpo(), _get_per_token_logps_and_entropies=forward, **{**steps, **changed}):
            total = total + peer.grpo().compute_loss(peer.grpo().model, table)
    total.backward()
    return Result(loss=float(total.detach()), grads={"logp": house.grad(leaf)})


QUARTERS = [(0, 2), (2, 4), (4, 6), (6, 8)]
UNEVEN = [(0, 3), (3, 6), (6, 8)]
HALVES = [(0, 4), (4, 8)]


@difference
def bnpo_is_a_mean_of_the_micro_batches_means() -> Found:
    """TRL = 1/k sum_k (mean over the tokens of micro-batch k)"""
    algo = dapo(low=0.2, high=0.2)
    batch = group_batch(algo)
    ours = house.on_logp(house.logp(batch), batch, algo)
    theirs = _trl_parts(batch, QUARTERS, loss_type="bnpo")
    return Found(ours=ours, peer=theirs, stated=_parts(batch, QUARTERS, algo, _count(batch, QUARTERS)))


@difference
def uneven_micro_batches_weigh_the_same() -> Found:
    """TRL = 1/k sum_k (mean over the rows of micro-batch k): rows of a short one weigh more"""
    algo = grpo(beta=0.0)
    batch = group_batch(algo)
    ours = house.on_logp(house.logp(batch), batch, algo)
    theirs = _trl_parts(batch, UNEVEN, loss_type="grpo")
    return Found(ours=ours, peer=theirs, stated=_parts(batch, UNEVEN, algo, _count(batch, UNEVEN)))


@difference
def dapo_over_two_updates_divides_by_the_mean_count() -> Found:
    """TRL = Hone * the update's own tokens / (tokens of the generation / updates)"""
    algo = dapo(low=0.2, high=0.2)
    batch = group_batch(algo)
    first = batch.rows(slice(0, 4))
    part = weigh(first, algo.weigh, Totals(rows=4, tokens=int(first.mask.sum())))
    leaf = house.logp(batch).requires_grad_()
    loss = objective(Forward(logp=leaf[:4]), part, algo.loss)
    loss.backward()
    ours = Result(loss=float(loss.detach()), grads={"logp": house.grad(leaf)})
    theirs = _trl_parts(
        batch, HALVES[:1], loss_type="dapo", current_gradient_accumulation_steps=1, args__steps_per_generation=2
    )
    factor = float(first.mask.sum()) / (float(batch.mask.sum()) / 2)
    return Found(ours=ours, peer=theirs, stated=ours.scaled(factor))


# --- defaults of the same name ---


@difference
def cispo_has_a_cap_of_epsilon_by_default() -> Found:
    """TRL with only epsilon = 0.2 set caps the ratio at 0.2: on policy a fifth of the gradient"""
    from tests.parity import peer

    algo = cispo()
    batch = group_batch(algo, on_policy=True)
    ours = house.on_logp(house.logp(batch), batch, algo)
    theirs = _trl_group(batch, loss_type="cispo", **peer.fresh_epsilons())
    return Found(ours=ours, peer=theirs, stated=ours.scaled(0.2))


@difference
def grpo_trainer_averages_by_token_by_default() -> Found:
    """TRL's GRPOTrainer with no loss_type set is a token mean: Hone's dapo weights, not grpo's"""
    from tests.parity import peer

    algo = grpo(beta=0.0)
    batch = group_batch(algo)
    ours = house.on_logp(house.logp(batch), batch, algo)
    stated = house.on_logp(house.logp(batch), batch, replace(algo, weigh=weight.token_mean))
    return Found(ours=ours, peer=_trl_group(batch, loss_type=peer.trl.GRPOConfig.loss_type), stated=stated)


@difference
def the_kl_goes_through_the_ratio_by_default() -> Found:
    """TRL's k3 is times the ratio: Hone's kl="loss:k3*ratio", the gradient of KL(pi || ref)"""
    algo = grpo(beta=0.04)
    batch = group_batch(algo)
    ours = house.on_logp(house.logp(batch), batch, algo)
    stated = house.on_logp(house.logp(batch), batch, grpo(beta=0.04, kl="loss:k3*ratio"))
    return Found(ours=ours, peer=_trl_group(batch, loss_type="grpo", beta=0.04), stated=stated)


# --- preferences ---


def _pairs_on_logp(term: Callable[[Forward, Batch], Tensor]) -> Result:
    batch = preference.pair_batch()
    return house.on_logp(house.logp(batch), batch, Algorithm(loss=((1.0, term),), unit=2))


@difference
def ipo_averages_over_the_tokens() -> Found:
    """TRL: u is the difference of the mean gains a token, not of the sums"""

    def averaged(fwd: Forward, batch: Batch) -> Tensor:
        gain = sequence_mean(fwd.logp - batch.ref_logp, batch.mask)
        return (prefer.pair_margin(gain) - 1 / (2 * 0.3)).square()

    theirs = preference.dpo(Settings(algo=ipo(beta=0.3), trl={"beta": 0.3, "loss_types": ["ipo"]}), "logp")
    return Found(
        ours=preference.ours(Settings(algo=ipo(beta=0.3), trl={}), "logp"), peer=theirs, stated=_pairs_on_logp(averaged)
    )


@difference
def label_smoothing_has_no_part_in_the_sigmoid_loss() -> Found:
    """TRL's sigmoid loss with label_smoothing 0.1 is that with 0"""
    setting = Settings(algo=dpo(beta=0.3, smoothing=0.1), trl={"beta": 0.3, "label_smoothing": 0.1})
    plain = preference.ours(Settings(algo=dpo(beta=0.3), trl={}), "logp")
    return Found(ours=preference.ours(setting, "logp"), peer=preference.dpo(setting, "logp"), stated=plain)


@difference
def robust_dpo_subtracts_the_flipped_loss() -> Found:
    """TRL's robust = (2 (1-e) L_0 - L_e) / (1 - 2e), L_e Hone's loss with smoothing e"""
    e = 0.1
    setting = Settings(
        algo=dpo(beta=0.3, smoothing=e), trl={"beta": 0.3, "label_smoothing": e, "loss_types": ["robust"]}
    )
    smooth = preference.ours(setting, "logp")
    plain = preference.ours(Settings(algo=dpo(beta=0.3), trl={}), "logp")
    stated = plain.scaled(2 * (1 - e) / (1 - 2 * e)).plus(smooth.scaled(-1 / (1 - 2 * e)))
    return Found(ours=smooth, peer=preference.dpo(setting, "logp"), stated=stated)


@difference
def orpo_trains_on_the_prompt_and_averages_by_token() -> Found:
    """TRL's NLL is over prompt and answer of all chosen rows, token by token"""
    from tests.parity import peer

    algo = orpo(odds=0.1)
    table = peer.labelled_pair_table(rows.draw(share=2), peer.orpo())
    theirs = peer.accumulate(peer.orpo(), [table], beta=0.1)
    odds = house.step(house.policy(), rows.pairs(), replace(algo, loss=algo.loss[1:]))
    ours = house.step(house.policy(), rows.pairs(), algo)
    return Found(ours=ours, peer=theirs, stated=odds.plus(_nll_of_chosen(whole=True)))


@difference
def cpo_simpo_adds_the_nll_by_default() -> Found:
    """TRL with loss_type simpo and cpo_alpha left at 1 = SimPO + token-mean NLL of the chosen answers"""
    from tests.parity import peer

    algo = simpo(beta=2.0, gamma=1.0)
    table = peer.labelled_pair_table(rows.draw(share=2), peer.cpo())
    alpha = peer.CPOConfig.cpo_alpha
    theirs = peer.accumulate(peer.cpo(), [table], beta=2.0, simpo_gamma=1.0, cpo_alpha=alpha)
    ours = house.step(house.policy(), rows.pairs(), algo)
    return Found(ours=ours, peer=theirs, stated=ours.plus(_nll_of_chosen(whole=False).scaled(alpha)))


def _nll_of_chosen(*, whole: bool) -> Result:
    """Hone's own token-mean NLL of the chosen rows, of the answers or of everything that has a target."""
    batch = rows.pairs().rows(torch.arange(0, 8, 2))
    followed = batch.real & batch.real.roll(-1, 1)
    followed[:, -1] = False
    batch = replace(batch, mask=followed if whole else batch.mask)
    return house.step(house.policy(), batch, Algorithm(loss=((1.0, terms.nll),)))


@difference
def kto_pairs_each_prompt_with_the_answer_before() -> Found:
    """TRL: (x_i, y_{i-1}); z0 is that of those pairs"""
    return _kto(shift=-1, size=8)


@difference
def kto_has_a_z0_for_each_micro_batch() -> Found:
    """TRL: mismatched within the micro-batch, one z0 = max(0, mean) each, and a mean of the means"""
    return _kto(shift=-1, size=4)


def _kto(*, shift: int, size: int) -> Found:
    from tests.parity import peer

    algo, found = kto(beta=0.3), rows.draw(share=1)
    tables = peer.desirable_tables(found, rows.LABELS, shift=shift, size=size)
    theirs = peer.accumulate(peer.kto(), tables, beta=0.3)
    batch = preference.kto_batch(algo)
    stated = replace(batch, kl_baseline=_baselines(found, shift=shift, size=size))
    return Found(
        ours=house.step(house.policy(), batch, algo), peer=theirs, stated=house.step(house.policy(), stated, algo)
    )


def _baselines(found: list[rows.Row], *, shift: int, size: int) -> Tensor:
    """z0 of each micro-batch, on its rows."""
    crossed = [
        rows.Row(prompt=row.prompt, completion=found[i // size * size + (i + shift) % size].completion)
        for i, row in enumerate(found)
    ]
    twins = collate([[r.rollout()] for r in crossed], pad_id=rows.PAD, dtype=rows.FULL)
    gain = (house.logp(twins) - house.logp(twins, seed=1)).where(twins.mask, 0.0).sum(-1)
    return gain.view(-1, size).mean(-1).clamp(min=0).repeat_interleave(size)


@difference
def a_stop_token_that_is_also_padding_is_not_scored() -> Found:
    """TRL (transformers): the score is read at the last token that is not the pad token, so before the stop token"""
    model = reward_model(pad=rows.STOP)
    found = rows.draw(share=2)
    width = max(len(r.prompt) + len(r.completion) for r in found)
    tokens = [[*r.prompt, *r.completion] for r in found]
    ids = torch.tensor([t + [rows.STOP] * (width - len(t)) for t in tokens])
    seen = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in tokens])
    theirs = model(input_ids=ids, attention_mask=seen).logits.squeeze(-1)
    scorer = house.scorer(model.state_dict(), model.config.to_dict())
    ours = _scores(scorer, tokens)
    stated = _scores(scorer, [t[:-1] if t[-1] == rows.STOP else t for t in tokens])
    return Found(ours=column(ours, shown=1), peer=column(theirs, shown=1), stated=column(stated, shown=1))


def _scores(scorer: Scorer, tokens: list[list[int]]) -> Tensor:
    made = [[Rollout(tokens=t, mask=[True] * len(t))] for t in tokens]
    batch = collate(made, pad_id=rows.PAD, dtype=rows.FULL)
    return prefer.last_value(scorer(batch, frozenset({"value"})), batch)


@difference
def rloo_clips_the_ratio_of_the_whole_answer() -> Found:
    """TRL off policy: -min(R A, clip(R) A), R the product of the ratios; Hone's rloo is -A log pi and on policy only"""
    case = CASES["rloo, TRL's ratio"]
    plain = Case(name="", algo=rloo(), sides=case.sides)
    return Found(
        ours=case.sides[0](plain, "logp"),
        peer=case.sides[1](case, "logp"),
        stated=case.sides[0](replace(case, algo=TRAJECTORY), "logp"),
    )
