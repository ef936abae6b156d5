"""Drawing tokens from logits, reproducibly: the random numbers belong to a request, not to a batch.

Logits go through repetition penalty, bias and banned tokens, temperature, top-k, top-p and min-p, in this order. What a
row draws depends only on its own logits, u and settings. u is numpy's Philox4x64-10 with the key (seed, request),
computed for many requests at once.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hone.engine.params import SamplingTensors, Uses

BLOCK = 1024  # tokens whose weights are summed in the logits' precision; sums of blocks are added in float64
BELOW = 1 - 2**-53  # times a total gives a number below it
SMALL = 4096  # on a CPU rows of up to so many tokens are sorted whole
# the constants of Philox4x64 (Salmon et al. 2011), as [2, 1]: one entry for each of the two products of a round
MULTIPLIER = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
WEYL = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
ROUNDS = 10
WORDS = 4  # doubles made by one block
AHEAD = 64  # doubles a row of RandomStreams holds, a multiple of WORDS

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_LOW_MULTIPLIER, _HIGH_MULTIPLIER = MULTIPLIER & _LOW, MULTIPLIER >> _HALF

Words = NDArray[np.uint64]


def uniforms(seed: int, requests: Sequence[int], count: int) -> Tensor:
    """float64 [count, B] in [0, 1): column b is the stream of (seed, requests[b]), the same whatever the batch."""
    return torch.from_numpy(philox_uniforms(seed, np.array(requests, dtype=np.uint64), 0, count))


def process(x: Tensor, sampling: SamplingTensors) -> Tensor:
    """[B, V]: penalty (positive logits of tokens seen are divided by it, others multiplied), bias and banned."""
    uses, y = sampling.any, x
    if uses & Uses.PENALTY:
        assert sampling.seen is not None
        penalty = sampling.penalty.to(x.dtype)[:, None]
        y, less = sampling.buffer("y", x), sampling.buffer("z", x)
        torch.where(x > 0, torch.div(x, penalty, out=y), torch.mul(x, penalty, out=less), out=y)
        torch.where(sampling.seen, y, x, out=y)
    if uses & Uses.BIAS:
        assert sampling.bias is not None
        y = torch.add(y, sampling.bias, out=sampling.buffer("y", x))
    return y


def threshold(z: Tensor, weight: Tensor, sampling: SamplingTensors) -> Tensor:
    """[B, 1]: tokens below it are cut. z [B, V]: tempered logits less their maximum; weight: exp(z).

    top-k keeps every token that ties with the k-th. top-p keeps a token if the more probable ones that top-k left
    have less than top_p of its mass: the smallest set that reaches it, and what ties with its last token. min-p keeps
    p >= min_p * max p. The most probable token, z = 0, is always kept.
    """
    low = torch.full_like(z[:, :1], -math.inf)
    for use, cut in ((Uses.TOP_K, _kth), (Uses.TOP_P, _nucleus)):
        rows = np.flatnonzero(sampling.uses & use)
        if len(rows) == len(z):
            low = torch.maximum(low, cut(z, weight, sampling, low))
        elif len(rows):
            index = torch.from_numpy(rows).to(z.device)
            low[index] = torch.maximum(low[index], cut(z[index], weight[index], sampling.rows(index), low[index]))
    if sampling.any & Uses.MIN_P:
        low = torch.maximum(low, sampling.min_p.log().to(z.dtype)[:, None])
    return low.clamp_(max=0.0)


def _kth(z: Tensor, weight: Tensor, sampling: SamplingTensors, low: Tensor) -> Tensor:
    most = int(sampling.host[2].max())
    return z.topk(most, dim=-1).values.gather(-1, sampling.top_k[:, None] - 1)


def _nucleus(z: Tensor, weight: Tensor, sampling: SamplingTensors, low: Tensor) -> Tensor:
    """The z with which the mass at or above `low`, added up from the greatest, reaches top_p of its total."""
    if sampling.any & Uses.TOP_K:
        weight = weight.masked_fill(z < low, 0.0)
    total, top_p = _running(weight)[:, -1:], sampling.top_p[:, None]
    # tokens below `floor` have less than 1 - top_p of the mass all together: the sum stops before them
    floor = ((1 - top_p) * total / z.shape[-1]).log() - 1e-3
    best = _descending(z, torch.maximum(floor.to(z.dtype), low))
    at = torch.searchsorted(best.exp().cumsum(-1, dtype=torch.float64), top_p * total)
    found = best.gather(-1, at.clamp(max=best.shape[-1] - 1))
    return found.masked_fill_(at == best.shape[-1], -math.inf)  # rounding kept the sum below top_p: keep all


def _descending(z: Tensor, floor: Tensor) -> Tensor:
    """Each row's entries of at least its floor, the greatest first, and then -inf."""
    if z.is_cpu:  # numpy sorts 20 times as fast as torch at [64, 300]
        if z.shape[-1] > SMALL:
            rows = [row[row >= least] for row, least in zip(z.numpy(), floor.numpy(), strict=True)]
            best = np.full((len(z), max(1, *map(len, rows))), np.inf, dtype=rows[0].dtype)
            for out, row in zip(best, rows, strict=True):
                np.negative(row, out=out[: len(row)])
        else:
            best = -z.numpy()
        best.sort(axis=-1)
        z = torch.from_numpy(np.negative(best, out=best))
    else:
        z = z.topk(max(1, int((z >= floor).sum(-1).max())), dim=-1).values
    return z.masked_fill_(z < floor, -math.inf)


def _running(weight: Tensor) -> Tensor:
    """float64 [B, blocks]: the running total of the blocks' weights."""
    whole = weight.shape[-1] // BLOCK * BLOCK
    if whole == 0:
        return weight.sum(-1, keepdim=True).double()
    sums = weight[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < weight.shape[-1]:
        sums = torch.cat([sums, weight[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums.cumsum(-1, dtype=torch.float64)


def _search(weight: Tensor, running: Tensor, u: Tensor) -> Tensor:
    """[B, 1] the first token whose running weight exceeds u of the total: by blocks, then inside the block."""
    vocab = weight.shape[-1]
    target = u[:, None].double().clamp(max=BELOW) * running[:, -1:]
    if running.shape[-1] == 1:
        return _place(weight, target).clamp_(max=vocab - 1)
    block = torch.searchsorted(running, target, right=True).clamp_(max=running.shape[-1] - 1)
    before = torch.where(block > 0, running.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    token = block * BLOCK + torch.arange(BLOCK, device=weight.device)
    inside = weight.gather(-1, token.clamp_(max=vocab - 1))  # past the end the last one is repeated, and found
    return (block * BLOCK + _place(inside, target - before)).clamp_(max=vocab - 1)


def _place(weight: Tensor, target: Tensor) -> Tensor:
    """[B, 1] where the running weight exceeds the target; NaN finds the end."""
    running = weight.cumsum(-1, dtype=torch.float64)
    # the target is a sum in another order: stay below this one, so that the token found has a weight above 0
    return torch.searchsorted(running, torch.minimum(target, running[:, -1:] * BELOW), right=True)


def draw(
    logits: Tensor, u: Tensor, sampling: SamplingTensors, *, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Token, logp and raw, [B] each, for logits [B, V] and u [B] in [0, 1]: the first token whose CDF exceeds u.

    logp is under the distribution drawn from, raw under softmax(logits). Greedy (temperature 0) takes the most
    probable token after penalty, bias and banned, and gives its logp at temperature 1. Logits that are not finite give
    a logp that is not finite; -inf is a token that is never drawn.
    kept: bool [B, V], receives which tokens top-k, top-p and min-p left to draw from.
    """
    uses = sampling.any
    x = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
    y = process(x, sampling)
    x_top = x.amax(-1, keepdim=True)
    # the maximum goes first: a tiny temperature then overflows to -inf, never to +inf or 0 / 0
    z = torch.sub(x, x_top, out=sampling.buffer("z", x))
    weight = _exp(z, sampling.buffer("weight", x))
    running = x_running = _running(weight)
    altered = y is not x or uses & (Uses.TEMPERED | Uses.RESTRICT)
    if altered:
        z = z if y is x else torch.sub(y, y.amax(-1, keepdim=True), out=z)
        z = z.div_(sampling.temperature.to(z.dtype)[:, None]) if uses & Uses.TEMPERED else z
        weight = _exp(z, weight)
        if uses & Uses.RESTRICT:
            cut = z < threshold(z, weight, sampling)
            weight = weight.masked_fill_(cut, 0.0)
            if kept is not None:
                torch.logical_not(cut, out=kept)
        running = _running(weight)
    token = _search(weight, running, u) if uses & Uses.SAMPLED else y.argmax(-1, keepdim=True)
    if uses & Uses.GREEDY and uses & Uses.SAMPLED:
        token = torch.where(sampling.greedy[:, None], y.argmax(-1, keepdim=True), token)
    raw = logp = (z.gather(-1, token) - running[:, -1:].log()).to(x.dtype)
    if altered:
        raw = (x.gather(-1, token) - x_top - x_running[:, -1:].log()).to(x.dtype)
    return token.squeeze(-1), logp.squeeze(-1), raw.squeeze(-1)


def _exp(z: Tensor, out: Tensor) -> Tensor:
    if z.is_cpu and z.shape[-1] <= BLOCK:  # numpy's is faster, and does not wake other threads for so little
        np.exp(z.numpy(), out=out.numpy())
        return out
    return torch.exp(z, out=out)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token and log-prob under softmax(logits) of the k most probable tokens, best first: [B, min(k, V)] each."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    best = x.topk(min(k, x.shape[-1]), dim=-1)
    return best.indices, best.values - x.logsumexp(-1, keepdim=True)


def _high_product(x: Words) -> Words:
    """The upper 64 bits of MULTIPLIER * x, [2, N], from products of 32 bits."""
    low, high = x & _LOW, x >> _HALF
    middle = _HIGH_MULTIPLIER * low + (_LOW_MULTIPLIER * low >> _HALF)
    other = _LOW_MULTIPLIER * high + (middle & _LOW)
    return _HIGH_MULTIPLIER * high + (middle >> _HALF) + (other >> _HALF)


def _block(key: Words, counter: Words) -> Words:
    """[4, N] words for keys [2, N] and counters [N] below 2**64."""
    even, odd = np.zeros_like(key), np.zeros_like(key)  # words 0 and 2, words 1 and 3
    even[0] = counter
    for round in range(ROUNDS):
        low = MULTIPLIER * even
        even, odd = _high_product(even)[::-1] ^ odd ^ (key + WEYL * np.uint64(round)), low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _as_words(x: ArrayLike) -> Words:
    return np.atleast_1d(np.asarray(x, dtype=np.uint64))


def philox_uniforms(seeds: ArrayLike, requests: ArrayLike, start: ArrayLike, count: int) -> NDArray[np.float64]:
    """float64 [count, B] in [0, 1): column b has doubles start[b] to start[b] + count - 1 of (seeds[b], requests[b]).

    Generator(Philox(key=[seed, request])).random(start + count)[start:], to the bit.
    """
    seed, request, first = np.broadcast_arrays(_as_words(seeds), _as_words(requests), _as_words(start))
    blocks = (count + 2 * WORDS - 2) // WORDS  # enough wherever in a block the first double is
    # numpy's first block has counter 1
    counter = first // np.uint64(WORDS) + np.arange(1, blocks + 1, dtype=np.uint64)[:, None]  # [blocks, B]
    key = np.tile(np.stack([seed, request]), (1, blocks))
    words = _block(key, counter.ravel()).reshape(WORDS, blocks, -1)
    flat = words.transpose(1, 0, 2).reshape(blocks * WORDS, -1)
    offset = (first % np.uint64(WORDS)).astype(np.int64)
    if offset.any():
        flat = np.take_along_axis(flat, offset + np.arange(count)[:, None], axis=0)
    return (flat[:count] >> np.uint64(11)).astype(np.float64) * 2.0**-53


class RandomStreams:
    """A stream of random numbers for each row. Rows draw at their own pace, and doubles are made AHEAD at a time."""

    def __init__(self, rows: int) -> None:
        self.key = np.zeros((2, rows), dtype=np.uint64)
        self.count = np.zeros(rows, dtype=np.int64)  # doubles a row has drawn
        self._first = np.full(rows, -AHEAD)  # which double the row's table begins with
        self._table = np.zeros((rows, AHEAD))

    def seat(self, row: int, seed: int, request: int) -> None:
        """Begin the stream of (seed, request) in this row."""
        self.key[:, row] = seed, request
        self.count[row], self._first[row] = 0, -AHEAD

    def move(self, a: int, b: int) -> None:
        """Row b goes on with the stream of row a."""
        for x in (self.count, self._first, self._table):
            x[b] = x[a]
        self.key[:, b] = self.key[:, a]

    def next(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """float64 [n]: the next double of each of these rows, which are distinct."""
        at = self.count[rows] - self._first[rows]
        if (at >= AHEAD).any():
            # fill the half-empty ones too: doubles for one row cost as much as for many
            self._fill(rows[at >= AHEAD // 2])
            at = self.count[rows] - self._first[rows]
        self.count[rows] += 1
        return self._table[rows, at]

    def _fill(self, rows: NDArray[np.int64]) -> None:
        first = self.count[rows] // WORDS * WORDS
        self._first[rows] = first
        self._table[rows] = philox_uniforms(self.key[0, rows], self.key[1, rows], first, AHEAD).T
