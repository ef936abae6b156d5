"""Both sides of the preference losses and of the reward model."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from hone.algo import Algorithm, objective
from hone.train.annotate import annotate
from hone.train.learner import Learner
from hone.train.update import weigh
from hone.types import Batch, Forward, sequence_mean
from tests.parity import house, rows
from tests.parity.house import Result, grad
from tests.parity.llama import reward_model

CHOSEN_FIRST = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # TRL's rows as indices of Hone's


class Settled(Protocol):
    """What is read of a case."""

    @property
    def algo(self) -> Algorithm: ...

    @property
    def trl(self) -> Mapping[str, Any]: ...


def pair_batch() -> Batch:
    """The pairs with the reference's log-probs."""
    batch = rows.pairs()
    return replace(batch, ref_logp=house.logp(batch, seed=1))


def ours(case: Settled, level: str) -> Result:
    batch = pair_batch()
    if level == "model":
        return house.step(house.policy(), batch, case.algo)
    return house.on_logp(house.logp(batch), batch, case.algo)


def dpo(case: Settled, level: str, *, pairs: int = 4) -> Result:
    """DPOTrainer's loss; `pairs`: how many a micro-batch."""
    from tests.parity import peer

    tables = peer.pair_tables(rows.draw(share=2), pairs=pairs)
    if level == "model":
        return peer.accumulate(peer.dpo(), tables, **case.trl)
    batch = pair_batch()
    leaf = house.logp(batch).requires_grad_()
    now, reference = dict[int, Tensor](), dict[int, Tensor]()
    for i, table in enumerate(tables):
        index = torch.arange(len(batch)).view(-1, 2)[pairs * i : pairs * (i + 1)].T.flatten()
        mask = table["completion_mask"][:, 1:]
        now[table["input_ids"].data_ptr()] = peer.spread(leaf, batch, mask, order=index)
        reference[table["input_ids"].data_ptr()] = peer.spread(batch.ref_logp, batch, mask, order=index)
    with peer.settings(peer.dpo(), ref_model=peer.stand_in(reference), **case.trl):
        losses = [peer.dpo().compute_loss(peer.stand_in(now), table) / len(tables) for table in tables]
    total = torch.stack(losses).sum()
    total.backward()
    return Result(loss=float(total.detach()), grads={"logp": grad(leaf)})


def smoothed(case: Settled, level: str) -> Result:
    """One pair a micro-batch: TRL's sorted loss with one pair to sort is the smoothed sigmoid loss."""
    return dpo(case, level, pairs=1)


def _row_means(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The leaf, and the mean log-probs of its chosen and rejected rows."""
    leaf = house.logp(batch).requires_grad_()
    chosen, rejected = sequence_mean(leaf, batch.mask).view(-1, 2).unbind(-1)
    return leaf, chosen, rejected


def simpo(case: Settled, level: str) -> Result:
    """CPOTrainer with loss_type simpo and no NLL."""
    from tests.parity import peer

    trainer = peer.cpo()
    if level == "model":
        table = peer.labelled_pair_table(rows.draw(share=2), trainer)
        return peer.accumulate(trainer, [table], **case.trl)
    leaf, chosen, rejected = _row_means(rows.pairs())
    with peer.settings(trainer, **case.trl):
        loss = trainer.cpo_loss(chosen, rejected)[0].mean()
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"logp": grad(leaf)})


def odds(case: Settled, level: str) -> Result:
    """ORPOTrainer's odds-ratio term: its loss is the NLL less beta log sigmoid of the log odds ratio."""
    from tests.parity import peer

    trainer = peer.orpo()
    if level == "logp":
        leaf, chosen, rejected = _row_means(rows.pairs())
        with peer.settings(trainer, **case.trl):
            loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
        loss.backward()
        return Result(loss=float(loss.detach()), grads={"logp": grad(leaf)})
    table = peer.labelled_pair_table(rows.draw(share=2), trainer)
    trainer.model.zero_grad()
    with peer.settings(trainer, **case.trl):
        chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, table)
        loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    loss.backward()
    return Result(loss=float(loss.detach()), grads=house.gradients(trainer.model))


# --- KTO ---


def kto_batch(algo: Algorithm) -> Batch:
    """Annotated by the learner's own stage: reference and z0."""
    batch, twins = rows.labelled()
    policy = house.policy()
    learner = Learner(policy=policy, optimizer=torch.optim.SGD(policy.parameters(), lr=0.1), reference=house.policy(1))
    return annotate(batch, algo, learner, mismatched=twins)


def kto_ours(case: Settled, level: str) -> Result:
    batch = kto_batch(case.algo)
    if level == "model":
        return house.step(house.policy(), batch, case.algo)
    return house.on_logp(house.logp(batch), batch, case.algo)


def kto(case: Settled, level: str) -> Result:
    """KTOTrainer's loss on the mismatched pairs that Hone makes."""
    from tests.parity import peer

    found = rows.draw(share=1)
    (table,) = peer.desirable_tables(found, rows.LABELS, shift=1)
    if level == "model":
        return peer.accumulate(peer.kto(), [table], **case.trl)
    batch, twins = rows.labelled()
    leaf = house.logp(batch).requires_grad_()

    def at(x: Tensor, twin: Tensor) -> Any:
        matched = peer.spread(x, batch, table["completion_mask"][:, 1:])
        crossed = peer.spread(twin, twins, table["KL_completion_mask"][:, 1:])
        return peer.stand_in({table["input_ids"].data_ptr(): matched, table["KL_input_ids"].data_ptr(): crossed})

    reference = at(house.logp(batch, seed=1), house.logp(twins, seed=1))
    with peer.settings(peer.kto(), ref_model=reference, **case.trl):
        loss = peer.kto().compute_loss(at(leaf, house.logp(twins)), table)
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"logp": grad(leaf)})


# --- the reward model ---


def drawn_scores() -> Tensor:
    return torch.randn(8, generator=torch.Generator().manual_seed(7), dtype=rows.FULL)


def scores_ours(case: Settled, level: str) -> Result:
    batch = rows.pairs()
    if level == "model":
        found = reward_model()
        scorer = house.scorer(found.state_dict(), found.config.to_dict())
        result = house.step(scorer, batch, case.algo)
        named = {n.replace("head.", "score."): g for n, g in result.grads.items()}
        named.pop("score.bias", None)  # theirs has none
        return replace(result, grads=named)
    leaf = drawn_scores().requires_grad_()
    last = batch.real & (batch.real.flip(-1).cumsum(-1).flip(-1) == 1)
    loss = objective(Forward(value=leaf[:, None] * last), weigh(batch, case.algo), case.algo.loss)
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"score": grad(leaf)})


def scores(case: Settled, level: str) -> Result:
    """RewardTrainer's loss."""
    from tests.parity import peer

    table = peer.scored_table(rows.draw(share=2), rows.MARGINS)
    if level == "model":
        return peer.accumulate(peer.reward(), [table], **case.trl)
    leaf = drawn_scores().requires_grad_()

    def forward(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=leaf[CHOSEN_FIRST, None])

    with peer.settings(peer.reward(), **case.trl):
        loss = peer.reward().compute_loss(forward, dict(table))
    loss.backward()
    return Result(loss=float(loss.detach()), grads={"score": grad(leaf)})
