"""Ragged batches with every column filled, and forward passes to go with them."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from hone.algo import ALGORITHMS, Algorithm, assign_credit, objective, terms
from hone.algo.weight import Totals, weigh
from hone.types import ABSENT, Batch, Forward, Outcome, Rollout, Stop

ALL = sorted(ALGORITHMS)
ONLINE = [name for name in ALL if ALGORITHMS[name]().online]
ANNOTATED = ("old_logp", "ref_logp", "ref_kl", "old_value", "bootstrap", "baseline", "kl_coef", "kl_baseline")
ROWS, WIDTH, GROUP = 8, 9, 4

# row by row: untrained positions, trained ones (o is an observed token between two turns); the last real position
# of a row has no target
SHAPES = ("..ttttt.", ".ttott.", "...t.", ".tttttttt."[:WIDTH], "..tt.", ".ttttt.", "..tottt.", ".tt.")


def table(shape: str, letters: str) -> list[bool]:
    return [c in letters for c in shape] + [False] * (WIDTH - len(shape))


def ragged(seed: int = 0) -> Batch:
    """Eight rows of unequal length in two groups (or four pairs), float64, every column filled, none NaN."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.tensor([table(s, "t") for s in SHAPES])
    real = torch.tensor([table(s, ".to") for s in SHAPES])
    full = torch.float64
    batch = Batch(
        inputs=torch.zeros(ROWS, WIDTH, dtype=torch.long),
        targets=torch.zeros(ROWS, WIDTH, dtype=torch.long),
        mask=mask,
        real=real,
        group=torch.arange(ROWS) // GROUP,
        reward=normal(ROWS),
        valid=torch.ones(ROWS, dtype=torch.bool),
        truncated=torch.tensor([False, True] * 4),
        limit=torch.full((ROWS,), 8),
        step_reward=torch.where(normal(ROWS, WIDTH) > 0, normal(ROWS, WIDTH), torch.nan),
        margin=torch.rand(ROWS // 2, generator=g, dtype=full).repeat_interleave(2),
        gen_logp=-normal(ROWS, WIDTH).abs() - 0.1,
        old_logp=-normal(ROWS, WIDTH).abs() - 0.1,
        ref_logp=-normal(ROWS, WIDTH).abs() - 0.1,
        ref_kl=normal(ROWS, WIDTH).abs(),
        old_value=normal(ROWS, WIDTH),
        bootstrap=torch.where(torch.tensor([False, True] * 4), normal(ROWS), 0.0),
        baseline=torch.full((ROWS,), 0.25, dtype=full),
        kl_coef=torch.full((ROWS,), 0.3, dtype=full),
        kl_baseline=torch.full((ROWS,), 0.05, dtype=full),
    )
    return batch


def with_label(batch: Batch, algo: Algorithm) -> Batch:
    """A row's label; a process reward model's a token's."""
    if "label" not in algo.needs:
        return batch
    by_row = torch.tensor([1.0, 0.0] * (ROWS // 2), dtype=torch.float64)
    by_token = (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0).double()
    by_step = any(term is terms.step_bce for _, term in algo.loss)
    return replace(batch, label=by_token if by_step else by_row)


def without_row(batch: Batch, row: int) -> Batch:
    """The row's reward is invalid, as collate would write it."""
    keep = torch.arange(ROWS) != row
    return replace(batch, valid=keep, mask=batch.mask & keep[:, None], reward=torch.where(keep, batch.reward, 0.0))


def lean(batch: Batch, algo: Algorithm) -> Batch:
    """Only the annotated columns that the algorithm declares."""
    return replace(batch, **{c: ABSENT for c in ANNOTATED if c not in algo.needs})


def prepared(algo: Algorithm, batch: Batch | None = None) -> Batch:
    """Credited and weighed as one optimiser step; an online batch has an invalid row."""
    if batch is None:
        batch = with_label(ragged(), algo)
        batch = without_row(batch, 5) if algo.online and algo.unit == 1 else batch
    batch = lean(batch, algo)
    batch = assign_credit(batch, algo)
    return weigh(batch, algo.weigh, Totals(rows=int(batch.mask.any(-1).sum()), tokens=int(batch.mask.sum())))


def forward_of(batch: Batch, *, seed: int = 1, on_policy: bool = False) -> Forward:
    """Every field, each a leaf that takes a gradient; 0 where the model gives 0."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(batch.targets.shape, generator=g, dtype=torch.float64)

    near = ragged().old_logp if batch.old_logp is ABSENT else batch.old_logp
    raw = {
        "logp": near if on_policy else (near + 0.3 * normal()).clamp(max=-0.01),
        "entropy": normal().abs(),
        "ref_kl": normal().abs(),
        "old_kl": normal().abs(),
    }
    columns = {name: torch.where(batch.mask, x, 0.0) for name, x in raw.items()}
    columns["value"] = torch.where(batch.real, normal(), 0.0)
    return Forward(**{name: x.detach().clone().requires_grad_() for name, x in columns.items()})


def leaves(fwd: Forward) -> dict[str, Tensor]:
    return {f.name: x for f in fields(fwd) if (x := getattr(fwd, f.name)) is not ABSENT}


def rows_of(fwd: Forward, index: Tensor | slice) -> Forward:
    return Forward(**{name: x[index] for name, x in leaves(fwd).items()})


def loss_and_gradient(fwd: Forward, batch: Batch, algo: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective and its gradient on each wanted field; zeros where a field has no part in it."""
    wanted = {name: x for name, x in leaves(fwd).items() if name in algo.wants}
    loss = objective(Forward(**wanted), batch, algo.loss)
    grads = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return loss.detach(), dict(zip(wanted, grads, strict=True))


def grad(x: Tensor) -> Tensor:
    """What backward() left on a leaf."""
    assert x.grad is not None
    return x.grad


def one_token(**columns: Tensor) -> Batch:
    """Rows of one trained token, from [B, 1] and [B] columns."""
    rows = len(next(iter(columns.values())))
    ones = torch.ones(rows, 1, dtype=torch.long)
    base = Batch(inputs=ones, targets=ones, mask=ones.bool(), real=ones.bool(), group=torch.zeros(rows).long())
    return replace(base, **columns)


def grouped(rewards: list[float | None], *, group: list[int] | None = None, length: int = 1) -> Batch:
    """One row a reward, None for an invalid one, all of one group unless told; float64."""
    valid = torch.tensor([r is not None for r in rewards])
    rows = len(rewards)
    ones = torch.ones(rows, length, dtype=torch.long)
    return Batch(
        inputs=ones,
        targets=ones,
        mask=ones.bool() & valid[:, None],
        real=ones.bool(),
        group=torch.zeros(rows).long() if group is None else torch.tensor(group),
        reward=torch.tensor([r or 0.0 for r in rewards], dtype=torch.float64),
        valid=valid,
    )


def row_of(mask: list[int], **columns: list[float] | float) -> Batch:
    """One row, float64: lists are [1, T] columns, numbers [1] ones."""
    m = torch.tensor([mask], dtype=torch.bool)
    base = Batch(
        inputs=m.long(), targets=m.long(), mask=m, real=torch.ones_like(m), group=torch.zeros(1).long(),
        valid=torch.ones(1, dtype=torch.bool), reward=torch.zeros(1, dtype=torch.float64),
    )  # fmt: skip
    return replace(base, **{name: torch.tensor([x], dtype=torch.float64) for name, x in columns.items()})


def rollout(
    tokens: list[int], reward: float | None = None, *, stop: Stop = Stop.TOKEN, limit: int = 10, scored: bool = True
) -> Rollout:
    """Prompt [0], then the tokens, all of them trained."""
    outcome = Outcome(value=reward, reason="" if reward is not None else "the verifier crashed") if scored else None
    mask = [False] + [True] * len(tokens)
    return Rollout(tokens=[0, *tokens], mask=mask, stop=stop, limit=limit, outcome=outcome)
