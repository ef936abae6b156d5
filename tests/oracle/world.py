"""A world small enough to enumerate: every trajectory with its exact probability, so every expectation is a sum.

Three tokens. In the ragged world token 0 stops and the third token is the last one (rows that get there without a stop
are truncated); in the square world every row has two tokens. After a first token 2 the environment says something.
The policy is a table of logits, one row a state.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.algo import Algorithm, assign_credit, credit, objective
from hone.algo.weight import Totals, weigh
from hone.types import Batch, Forward, sequence_sum

torch.set_num_threads(1)
TOKENS, STOP = 3, 0


def wave(*shape: int, shift: float = 0.0) -> Tensor:
    """Numbers that look random and are the same on every machine, float64 in [-1.3, 1.3]."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    return (1.3 * torch.sin((2.7 + 0.61 * shift) * at.square() + 1.9 * at + 2.4 * shift + 0.4)).view(*shape)


def close(found: Tensor, expected: Tensor, *, atol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def error(found: Tensor, true: Tensor) -> float:
    """|found - true| / |true|"""
    return float((found - true).norm() / true.norm())


@dataclass(frozen=True)
class World:
    """Every trajectory once."""

    batch: Batch  # rewards, step rewards, lengths: all but what a model adds
    state: Tensor  # int64 [N, T]  the state in which each acted token was chosen
    states: int

    def policy(self, shift: float) -> Tensor:
        """Logits of a policy, a leaf, [S, V]."""
        return wave(self.states, TOKENS, shift=shift).requires_grad_()

    def at(self, per_state: Tensor) -> Tensor:
        """[S] -> [N, T], 0 off the mask."""
        return torch.where(self.batch.mask, per_state[self.state], 0.0)

    def logp(self, logits: Tensor) -> Tensor:
        """log pi of each acted token, [N, T]"""
        return torch.where(self.batch.mask, logits.log_softmax(-1)[self.state, self.batch.targets], 0.0)

    def chance(self, logits: Tensor) -> Tensor:
        """The probability of each trajectory, [N]."""
        return self.logp(logits).sum(-1).exp()

    def age(self) -> Tensor:
        """How many tokens were acted before each, [N, T]."""
        return self.batch.mask.cumsum(-1).double() - 1

    def rewards(self) -> Tensor:
        """The reward of each token, outcome on the last one, [N, T]; written out, not taken from the library."""
        out = torch.zeros_like(self.logp(self.policy(0.0))).detach()
        for n, row in enumerate(self.batch.mask.tolist()):
            acted = [t for t, on in enumerate(row) if on]
            out[n, acted[-1]] += self.batch.reward[n]
            if self.batch.step_reward is not None:
                for t in acted:
                    step = float(self.batch.step_reward[n, t])
                    out[n, t] += 0.0 if math.isnan(step) else step
        return out

    def value(self, logits: Tensor, *, gamma: float = 1.0, cost: Tensor | None = None) -> Tensor:
        """E[discounted rewards, less the cost, from the state on], [S]: each row counted by its probability."""
        chance, rewards, age = self.chance(logits).detach(), self.rewards(), self.age()
        rewards = rewards if cost is None else rewards - cost
        total, reached = torch.zeros(self.states).double(), torch.zeros(self.states).double()
        for n, t in self.batch.mask.nonzero().tolist():
            later = (age[n] >= age[n, t]) & self.batch.mask[n]
            to_go = (rewards[n] * gamma ** (age[n] - age[n, t]) * later).sum()
            total[self.state[n, t]] += chance[n] * to_go
            reached[self.state[n, t]] += chance[n]
        return total / reached

    def gain(self, logits: Tensor, *, gamma: float = 1.0, cost: Tensor | None = None) -> Tensor:
        """J = E[sum_k gamma^k r_k], a scalar to differentiate."""
        rewards = self.rewards() if cost is None else self.rewards() - cost
        return (self.chance(logits) * (rewards * gamma ** self.age()).sum(-1)).sum()

    def loss_gradient(self, logits: Tensor, *, gamma: float = 1.0) -> Tensor:
        """-grad J: what the gradient of a loss must be."""
        return gradient(-self.gain(logits, gamma=gamma), logits)

    def forward(self, logits: Tensor, *, ref: Tensor | None = None, old: Tensor | None = None) -> Forward:
        """Every field that an algorithm may want; the critic's value has no part in the policy's gradient."""
        log = logits.log_softmax(-1)
        entropy = self.at(-(log.exp() * log).sum(-1))
        ref_kl = self.at(kl(logits, ref)) if ref is not None else torch.zeros_like(entropy)
        old_kl = self.at(kl(old, logits)) if old is not None else torch.zeros_like(entropy)
        value = torch.zeros_like(entropy)
        return Forward(logp=self.logp(logits), entropy=entropy, value=value, ref_kl=ref_kl, old_kl=old_kl)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each state, from logits, [S]"""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits)
    return found


def _paths(limit: int, stops: bool) -> list[tuple[int, ...]]:
    """Every sequence that ends at its first stop or at the limit."""
    every = [p for n in range(1, limit + 1) for p in itertools.product(range(TOKENS), repeat=n)]
    if not stops:
        return [p for p in every if len(p) == limit]
    return [p for p in every if STOP not in p[:-1] and (p[-1] == STOP or len(p) == limit)]


def make(*, limit: int, stops: bool) -> World:
    """Each row: a prompt token, the acted tokens, the environment's answer where there is one, the last input."""
    paths = _paths(limit, stops)
    index = {
        s: i for i, s in enumerate(sorted({p[:k] for p in paths for k in range(len(p))}, key=lambda s: (len(s), s)))
    }
    width = limit + 3
    cells = torch.full((len(paths), width, 2), -1)  # (token, state) of the acted ones
    real = torch.zeros(len(paths), width, dtype=torch.bool)
    for n, path in enumerate(paths):
        t = 1
        for k, token in enumerate(path):
            cells[n, t] = torch.tensor([token, index[path[:k]]])
            t += 2 if (k, token) == (0, 2) else 1
        real[n, : t + 1] = True
    mask = cells[..., 0] >= 0
    tokens, state = cells.clamp(min=0).unbind(-1)
    steps = wave(len(index), TOKENS, shift=0.3)[state, tokens]
    batch = Batch(
        inputs=tokens.roll(1, -1), targets=tokens, mask=mask, real=real, group=torch.arange(len(paths)),
        reward=wave(len(paths), shift=0.7), valid=torch.ones(len(paths), dtype=torch.bool),
        truncated=torch.tensor([stops and p[-1] != STOP for p in paths]), limit=torch.full((len(paths),), limit),
        step_reward=torch.where(mask & (state % 2 == 0), steps, torch.nan),
    )  # fmt: skip
    return World(batch=batch, state=state, states=len(index))


RAGGED = make(limit=3, stops=True)  # 15 trajectories of 1, 2 and 3 tokens in 7 states
SQUARE = make(limit=2, stops=False)  # 9 trajectories of 2 tokens in 4 states


# --- the algorithm's own gradient, averaged over every iteration it could have sampled ---


def iterations(rows: int, size: int) -> Tensor:
    """The rows of every iteration of `size` independent samples, one iteration after the other."""
    return torch.cartesian_prod(*[torch.arange(rows)] * size).reshape(-1)


def credited(batch: Batch, algo: Algorithm, size: int) -> Batch:
    """Whitening sees one iteration at a time; all else is by group or by row."""
    if not algo.whiten:
        return assign_credit(batch, algo)
    parts = [assign_credit(batch.rows(slice(i, i + size)), algo) for i in range(0, len(batch), size)]
    return replace(
        batch,
        **{
            name: torch.cat([getattr(p, name) for p in parts])
            for name in ("adv", "returns")
            if name in parts[0].columns()
        },
    )


def weighed(batch: Batch, algo: Algorithm, size: int, chance: Tensor) -> Batch:
    """The real weights of each iteration, times its probability [iterations]."""
    tokens = batch.mask.sum(-1).view(-1, size).sum(-1).repeat_interleave(size)
    out = weigh(batch, algo.weigh, Totals(rows=size, tokens=1))
    token_weight = out.token_weight
    for n in tokens.unique().tolist():
        mine = weigh(batch, algo.weigh, Totals(rows=size, tokens=n)).token_weight
        token_weight = torch.where((tokens == n)[:, None], mine, token_weight)
    likely = chance.repeat_interleave(size)
    return replace(out, token_weight=token_weight * likely[:, None], row_weight=out.row_weight * likely)


def expected_gradient(
    algo: Algorithm,
    world: World,
    logits: Tensor,
    *,
    size: int = 1,
    sampler: Tensor | None = None,
    ref: Tensor | None = None,
    correct: Callable[[Batch], Tensor] | None = None,
    **columns: Tensor,
) -> Tensor:
    """E[gradient of the algorithm's objective at `logits`] over iterations of `size` rows of one group.

    Rows are samples of `sampler` (the policy itself unless given), which is pi_old too unless old_logp is a column.
    """
    old = logits.detach() if sampler is None else sampler.detach()
    index = iterations(len(world.batch), size)
    given = {"old_logp": world.logp(old)} | ({} if ref is None else {"ref_logp": world.logp(ref)}) | columns
    batch = replace(world.batch, **given).rows(index)
    batch = replace(batch, group=torch.arange(len(index)) // size)
    batch = credited(batch, algo, size)
    batch = weighed(batch, algo, size, world.chance(old)[index].view(-1, size).prod(-1).detach())
    if correct is not None:
        batch = replace(batch, token_weight=batch.token_weight * correct(batch))
    fwd = world.forward(logits, ref=ref, old=old)
    fwd = Forward(**{name: getattr(fwd, name)[index] for name in ("logp", "entropy", "value", "ref_kl", "old_kl")})
    return gradient(objective(fwd, batch, algo.loss), logits)


def coefficient(world: World, value: float) -> Tensor:
    """A [N] column."""
    return torch.full((len(world.batch),), value, dtype=torch.float64)


def visits(world: World, logits: Tensor, per_state: Tensor) -> Tensor:
    """E[sum over the states of a trajectory of f(s)], with the distribution of states held fixed."""
    return (world.chance(logits).detach() * sequence_sum(world.at(per_state), world.batch.mask)).sum()


def row_return(batch: Batch) -> Tensor:
    """The row's whole reward on each of its tokens: a credit."""
    return torch.where(batch.mask, credit.row_rewards(batch)[:, None], 0.0)
