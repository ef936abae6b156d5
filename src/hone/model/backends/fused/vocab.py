"""vocab/distribution.py as Triton kernels: a chunk's statistics in one pass over its logits, their gradient in another.

Sums are kept relative to the greatest logit so far and scaled when it grows. Logits may be bfloat16; sums are float32.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.model.kernels.tiles import cdiv, power
from hone.model.vocab.distribution import ROW_OF, Chunk, VocabBackend

SIZE, COMPARED_SIZE = 4096, 2048  # logits a program reads at once; fewer where it holds several distributions
WARPS = 8
_TOP, _LOG, _LOGP = (tl.constexpr(ROW_OF[name]) for name in ("top", "log", "logp"))
_ENTROPY, _REF_KL, _OLD_KL = (tl.constexpr(ROW_OF[name]) for name in ("entropy", "ref_kl", "old_kl"))
_REF_TOP, _REF_LOG = (tl.constexpr(ROW_OF[name]) for name in ("ref_top", "ref_log"))
_OLD_TOP, _OLD_LOG = (tl.constexpr(ROW_OF[name]) for name in ("old_top", "old_log"))


@triton.jit
def _read(X, at, V):
    """Logits in float32, -inf past the vocabulary"""
    return tl.load(X + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _raise_maximum(top, x, inverse):
    """The greatest logit with these among them, what z is counted from, and by how much that lowers every z before"""
    higher = tl.maximum(top, tl.max(x))
    zero = tl.where(higher == float("-inf"), 0.0, higher)
    # of nothing but -inf there is no sum to be moved
    return higher, zero, tl.where(top == float("-inf"), 0.0, (top - zero) * inverse)


@triton.jit
def _times(weight, x):
    """weight * x, where a weight of 0 adds nothing whatever the x"""
    return tl.where(weight == 0.0, 0.0, weight * x)


@triton.jit
def _other(Y, at, V, top, inverse, GIVEN: tl.constexpr):
    """z of what is compared with, its greatest logit, and the shift; log-probs that are given stay as they are"""
    y = _read(Y, at, V)
    if GIVEN:
        return y, top, top * 0.0
    higher, zero, shift = _raise_maximum(top, y, inverse)
    return (y - zero) * inverse, higher, shift


@triton.jit
def _normaliser(TABLE, stride, top, total, TOP: tl.constexpr, LOG: tl.constexpr, GIVEN: tl.constexpr):
    """What the weights of a distribution that is compared with are divided by; its numbers are stored"""
    norm = total * 0.0 + 1.0 if GIVEN else total
    tl.store(TABLE + TOP * stride, top)
    tl.store(TABLE + LOG * stride, tl.log(norm))
    return norm


@triton.jit
def vocab_stats(
    X, REF, OLD, TARGET, TABLE, V, stride, inverse, ref_inverse, old_inverse,
    HAS_ENTROPY: tl.constexpr, HAS_REF: tl.constexpr, HAS_OLD: tl.constexpr,
    REF_GIVEN: tl.constexpr, OLD_GIVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A position's numbers, into its column of TABLE."""
    row = tl.program_id(0).to(tl.int64)
    X += row * V
    REF += row * V
    OLD += row * V
    TABLE += row
    top = tl.full([], float("-inf"), tl.float32)
    ref_top = tl.full([], 0.0 if REF_GIVEN else float("-inf"), tl.float32)
    old_top = tl.full([], 0.0 if OLD_GIVEN else float("-inf"), tl.float32)
    total = tl.zeros([SIZE], tl.float32)
    ref_total = tl.zeros([SIZE], tl.float32)
    old_total = tl.zeros([SIZE], tl.float32)
    by_z = tl.zeros([SIZE], tl.float32)  # sums of weight z, and so on
    by_ref = tl.zeros([SIZE], tl.float32)
    by_old = tl.zeros([SIZE], tl.float32)
    for first in range(0, V, SIZE):
        at = first + tl.arange(0, SIZE)
        x = _read(X, at, V)
        top, zero, shift = _raise_maximum(top, x, inverse)
        z = (x - zero) * inverse
        weight, scale = tl.exp(z), tl.exp(shift)
        if HAS_REF:
            r, ref_top, moved = _other(REF, at, V, ref_top, ref_inverse, REF_GIVEN)
            by_ref = (by_ref + (shift - moved) * total) * scale + _times(weight, z - r)
            if not REF_GIVEN:
                ref_total = ref_total * tl.exp(moved) + tl.exp(r)
        if HAS_OLD:
            o, old_top, moved = _other(OLD, at, V, old_top, old_inverse, OLD_GIVEN)
            heavy = tl.exp(o)
            by_old = (by_old + (moved - shift) * old_total) * tl.exp(moved) + _times(heavy, o - z)
            old_total = old_total * tl.exp(moved) + heavy
        if HAS_ENTROPY:
            by_z = (by_z + shift * total) * scale + _times(weight, z)
        total = total * scale + weight
    whole = tl.sum(total)
    log = tl.log(whole)
    target = tl.load(TARGET + row)
    known = (target >= 0) & (target < V)
    x = tl.load(X + target, mask=known, other=float("nan")).to(tl.float32)
    tl.store(TABLE + _TOP * stride, top)
    tl.store(TABLE + _LOG * stride, log)
    tl.store(TABLE + _LOGP * stride, (x - top) * inverse - log)
    if HAS_ENTROPY:
        tl.store(TABLE + _ENTROPY * stride, log - tl.sum(by_z) / whole)
    if HAS_REF:
        norm = _normaliser(TABLE, stride, ref_top, tl.sum(ref_total), _REF_TOP, _REF_LOG, REF_GIVEN)
        tl.store(TABLE + _REF_KL * stride, tl.sum(by_ref) / whole - tl.log(whole / norm))
    if HAS_OLD:
        mass = tl.sum(old_total)
        norm = _normaliser(TABLE, stride, old_top, mass, _OLD_TOP, _OLD_LOG, OLD_GIVEN)
        tl.store(TABLE + _OLD_KL * stride, (tl.sum(by_old) + mass * tl.log(whole / norm)) / norm)


@triton.jit
def _log_prob(X, at, V, TABLE, stride, inverse, TOP: tl.constexpr, LOG: tl.constexpr):
    """log softmax, by the numbers that vocab_stats left"""
    return (_read(X, at, V) - tl.load(TABLE + TOP * stride)) * inverse - tl.load(TABLE + LOG * stride)


@triton.jit
def vocab_grad(
    X, REF, OLD, TARGET, TABLE, LOGP, ENTROPY, REF_KL, OLD_KL, V, stride, inverse, ref_inverse, old_inverse, blocks,
    HAS_LOGP: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_REF: tl.constexpr,
    HAS_OLD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A block of a position's logits becomes its gradient; LOGP and the like: the statistics' own gradients."""
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    X += row * V
    TABLE += row
    at = block * SIZE + tl.arange(0, SIZE)
    x = _read(X, at, V)
    logq = (x - tl.load(TABLE + _TOP * stride)) * inverse - tl.load(TABLE + _LOG * stride)
    q = tl.exp(logq)
    constant, slope = 0.0, 0.0
    if HAS_LOGP:
        logp = tl.load(LOGP + row)
        constant -= logp
    if HAS_ENTROPY:
        entropy = tl.load(ENTROPY + row)
        constant -= entropy * tl.load(TABLE + _ENTROPY * stride)
        slope -= entropy
    if HAS_OLD:
        old = tl.load(OLD_KL + row)
        constant += old
    if HAS_REF:
        ref = tl.load(REF_KL + row)
        constant -= ref * tl.load(TABLE + _REF_KL * stride)
        slope += ref
        r = _log_prob(REF + row * V, at, V, TABLE, stride, ref_inverse, _REF_TOP, _REF_LOG)
        dz = _times(q, slope * logq + constant - ref * r)
    elif HAS_ENTROPY:
        dz = _times(q, slope * logq + constant)
    else:
        dz = q * constant
    if HAS_OLD:
        dz -= old * tl.exp(_log_prob(OLD + row * V, at, V, TABLE, stride, old_inverse, _OLD_TOP, _OLD_LOG))
    if HAS_LOGP:
        here = (at == tl.load(TARGET + row)) & (x > float("-inf"))
        dz += tl.where(here, logp, 0.0)
    tl.store(X + at, (dz * inverse).to(X.dtype.element_ty), mask=at < V)


def stats(chunk: Chunk) -> None:
    """Write what the chunk wants, and what its gradient will read, into its table."""
    if len(chunk.logits):
        pointers, numbers, size = _arguments(chunk)
        given = [name in chunk.others and chunk.others[name].is_log_prob for name in ("ref_kl", "old_kl")]
        vocab_stats[(len(chunk.logits),)](
            *pointers, *numbers, HAS_ENTROPY="entropy" in chunk.want, HAS_REF="ref_kl" in chunk.want,
            HAS_OLD="old_kl" in chunk.want, REF_GIVEN=given[0], OLD_GIVEN=given[1], SIZE=size, num_warps=WARPS,
        )  # fmt: skip


def grad(chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
    """The logits become their gradient; upstream: that of each statistic that has one, [n]; the table is filled."""
    if len(chunk.logits):
        pointers, numbers, size = _arguments(chunk)
        blocks = cdiv(chunk.logits.shape[1], size)
        names = ("logp", "entropy", "ref_kl", "old_kl")
        grads = [upstream[name].float().contiguous() if name in upstream else chunk.logits for name in names]
        vocab_grad[(len(chunk.logits) * blocks,)](
            *pointers, *grads, *numbers, blocks, HAS_LOGP="logp" in upstream,
            HAS_ENTROPY="entropy" in upstream, HAS_REF="ref_kl" in upstream, HAS_OLD="old_kl" in upstream,
            SIZE=size, num_warps=WARPS,
        )  # fmt: skip


def _arguments(chunk: Chunk) -> tuple[list[Tensor], list[float], int]:
    """What both kernels take: pointers, then numbers; and the logits to read at once."""
    x, table = chunk.logits, chunk.table
    others = [chunk.others.get(name) for name in ("ref_kl", "old_kl")]
    rows = [x, *(x if y is None else y.logits for y in others)]
    if table.stride(1) != 1 or not all(y.is_contiguous() for y in rows):
        raise ValueError("logits and the table's rows must be contiguous")
    inverses = [1 / chunk.temperature, *(1.0 if y is None else 1 / y.temperature for y in others)]
    most = COMPARED_SIZE if any(others) else SIZE
    size = min(most, max(128, power(x.shape[1])))
    return [*rows, chunk.targets.contiguous(), table], [x.shape[1], table.stride(0), *inverses], size


class FusedVocab(VocabBackend):
    """On a GPU; float64, which is for checking, stays in torch."""

    name, priority = "fused", 2

    def covers(self, logits: Tensor) -> str | None:
        return None if logits.is_cuda and logits.dtype != torch.float64 else f"{logits.dtype} on {logits.device}"

    def stats(self, chunk: Chunk) -> None:
        stats(chunk)

    def grad(self, chunk: Chunk, upstream: Mapping[str, Tensor]) -> None:
        grad(chunk, upstream)
