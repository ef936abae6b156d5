"""Attention over paged KV memory, with the rotation of positions and the writing of keys and values fused in.

pool: [blocks, layers, 2, K, block_size, E], of which a kernel gets one layer's part; a row's table names its blocks.
Keys are stored rotated, with the two halves of a head interleaved, (a0, b0, a1, b1, ...): a dot product does not mind
the order, and a query is rotated half by half and interleaved in registers. Keys are visited in blocks from the first
to the last, whatever the batch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.model.kernels.linear import prefetch


@triton.jit
def _rotated(AT, GAIN, cos, sin, keep, eps, NORM: tl.constexpr, E: tl.constexpr):
    """Heads at AT [R, 1], normed and rotated by cos and sin [R or 1, E / 2], halves interleaved: float32 [R, E]."""
    half: tl.constexpr = E // 2
    i = tl.arange(0, half)[None]
    a = tl.load(AT + i, mask=keep, other=0.0).to(tl.float32)
    b = tl.load(AT + half + i, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / E + eps)[:, None]
        dtype: tl.constexpr = GAIN.dtype.element_ty  # the decoder rounds between the norm and the rotation
        a = (a * factor * tl.load(GAIN + i).to(tl.float32)).to(dtype).to(tl.float32)
        b = (b * factor * tl.load(GAIN + half + i).to(tl.float32)).to(dtype).to(tl.float32)
    return tl.interleave(a * cos - b * sin, b * cos + a * sin)


@triton.jit
def _absorb(q, k, v, seen, top, total, out, scale):
    """The running softmax of queries [R, E] takes in a block of keys and values [T, E]; seen: bool, [R or 1, T]"""
    x = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp(x - higher[:, None])
    shrink = tl.exp(top - higher)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def decode(
    QKV, POOL, TABLE, POSITION, ACTIVE, COS, SIN, QGAIN, KGAIN, OUT, scale, eps, table_width,
    LAYERS: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
    WINDOW: tl.constexpr, NORM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query a row: row = program 0, key-value head = program 1, its G query heads (GP >= 16 with padding) together.

    The row's own key and value are written to the pool and enter the sum first, from registers. What earlier steps
    left (state, the first block) is read before the kernel that makes the queries has ended. AHEAD blocks of the next
    layer's keys and values are sent for, which arrive in the cache while the matrix products of this one run.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = E // 2
    heads = tl.arange(0, GP)
    dims = tl.arange(0, E)
    t = tl.arange(0, BS)
    if PDL:
        gdc_launch_dependents()
    active = tl.load(ACTIVE + row)
    position = tl.load(POSITION + row)
    if active == 0:
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    begin = first // BS
    table = TABLE + row * table_width
    at = _block(POOL, tl.load(table + begin), head, LAYERS, KV, BS, E)
    seen = (begin * BS + t < position) & (begin * BS + t >= first)
    k = tl.load(at + t[:, None] * E + dims[None], mask=seen[:, None], other=0.0)
    v = tl.load(at + KV * BS * E + t[:, None] * E + dims[None], mask=seen[:, None], other=0.0)
    cos = tl.load(COS + position * half + tl.arange(0, half))[None]
    sin = tl.load(SIN + position * half + tl.arange(0, half))[None]
    own_at = _block(POOL, tl.load(table + position // BS), head, LAYERS, KV, BS, E) + (position % BS) * E
    if PDL:
        gdc_wait()
    line = QKV + row.to(tl.int64) * ((KV * G + 2 * KV) * E)
    dtype: tl.constexpr = POOL.dtype.element_ty
    mine = heads[:, None] < G
    q = _rotated(line + (head * G + heads[:, None]) * E, QGAIN, cos, sin, mine, eps, NORM, E).to(dtype)
    one = tl.arange(0, 1)[:, None]
    own_k = _rotated(line + (KV * G + head + one) * E, KGAIN, cos, sin, one < 1, eps, NORM, E).to(dtype)
    own_v = tl.load(line + (KV * G + KV + head) * E + dims)[None]
    tl.store(own_at + dims[None], own_k)
    tl.store(own_at + KV * BS * E + dims[None], own_v)
    top = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
    total = tl.full([GP], 1.0, tl.float32)
    out = tl.zeros([GP, E], tl.float32) + own_v.to(tl.float32)
    top, total, out = _absorb(q, k, v, seen[None], top, total, out, scale)
    for block in range(begin + 1, tl.cdiv(position, BS)):
        at = _block(POOL, tl.load(table + block), head, LAYERS, KV, BS, E)
        seen = block * BS + t < position
        k = tl.load(at + t[:, None] * E + dims[None], mask=seen[:, None], other=0.0)
        v = tl.load(at + KV * BS * E + t[:, None] * E + dims[None], mask=seen[:, None], other=0.0)
        top, total, out = _absorb(q, k, v, seen[None], top, total, out, scale)
    out_at = OUT + (row * KV * G + head * G + heads[:, None]) * E + dims[None]
    tl.store(out_at, (out / total[:, None]).to(dtype), mask=mine)
    for block in range(begin, tl.minimum(begin + AHEAD, tl.cdiv(position, BS))):
        at = _block(POOL, tl.load(table + block), head, LAYERS, KV, BS, E) + 2 * KV * BS * E
        prefetch(at, BS * E * 2)
        prefetch(at + KV * BS * E, BS * E * 2)


@triton.jit
def _block(POOL, number, head, LAYERS: tl.constexpr, KV: tl.constexpr, BS: tl.constexpr, E: tl.constexpr):
    """The head's keys in a block; its values are KV * BS * E further."""
    return POOL + (number.to(tl.int64) * (LAYERS * 2 * KV) + head) * (BS * E)


@triton.jit
def store(
    QKV, POOL, TABLE, POSITION, OWNER, COS, SIN, QGAIN, KGAIN, eps, table_width, count,
    LAYERS: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
    NORM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Prompt tokens: queries rotated in place (halves interleaved), keys and values written to the pool.

    Program 0: a tile of BT tokens; program 1: a head, queries first, then keys, then values.
    OWNER: each token's line in TABLE, -1 for padding.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    half: tl.constexpr = E // 2
    dims = tl.arange(0, E)
    owner = tl.load(OWNER + token, mask=token < count, other=-1)
    real = owner >= 0
    position = tl.load(POSITION + token, mask=real, other=0)
    dtype: tl.constexpr = POOL.dtype.element_ty
    line = QKV + token[:, None].to(tl.int64) * ((KV * G + 2 * KV) * E) + head * E
    keep = real[:, None]
    if head < KV * G + KV:
        cos = tl.load(COS + position[:, None] * half + tl.arange(0, half)[None])
        sin = tl.load(SIN + position[:, None] * half + tl.arange(0, half)[None])
        gain = QGAIN if head < KV * G else KGAIN
        x = _rotated(line, gain, cos, sin, keep, eps, NORM, E).to(dtype)
    else:
        x = tl.load(line + dims[None], mask=keep, other=0.0)
    if head < KV * G:
        tl.store(line + dims[None], x, mask=keep)
    else:
        number = tl.load(TABLE + owner * table_width + position // BS, mask=real, other=0)
        which = head - KV * G  # keys, then values: the order of the pool
        at = POOL + (number.to(tl.int64) * (LAYERS * 2 * KV) + which) * (BS * E) + (position % BS) * E
        tl.store(at[:, None] + dims[None], x, mask=keep)


@triton.jit
def prefill(
    QKV, POOL, TABLE, TILE, OUT, scale, table_width,
    LAYERS: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
    WINDOW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Prompt tokens after `store`: BT queries of one sequence and one head against the pool, earlier tokens included.

    TILE [tiles, 4]: line in TABLE, first token of the batch, its position, tokens (0: nothing to do).
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    owner = tl.load(TILE + tile * 4)
    begin = tl.load(TILE + tile * 4 + 1)
    position = tl.load(TILE + tile * 4 + 2)
    count = tl.load(TILE + tile * 4 + 3)
    if count == 0:
        return
    i = tl.arange(0, BT)
    dims = tl.arange(0, E)
    t = tl.arange(0, BS)
    keep = (i < count)[:, None]
    token = (begin + i).to(tl.int64)
    q = tl.load(QKV + token[:, None] * ((KV * G + 2 * KV) * E) + head * E + dims[None], mask=keep, other=0.0)
    dtype: tl.constexpr = POOL.dtype.element_ty
    top = tl.full([BT], -1e30, tl.float32)
    total = tl.zeros([BT], tl.float32)
    out = tl.zeros([BT, E], tl.float32)
    at_q = position + i
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    for block in range(first // BS, tl.cdiv(position + count, BS)):
        number = tl.load(TABLE + owner * table_width + block)
        at = _block(POOL, number, head // G, LAYERS, KV, BS, E)
        at_k = block * BS + t
        inside = (at_k < position + count)[:, None]
        k = tl.load(at + t[:, None] * E + dims[None], mask=inside, other=0.0)
        v = tl.load(at + KV * BS * E + t[:, None] * E + dims[None], mask=inside, other=0.0)
        seen = at_k[None] <= at_q[:, None]
        if WINDOW > 0:
            seen = seen & (at_k[None] > at_q[:, None] - WINDOW)
        top, total, out = _absorb(q, k, v, seen, top, total, out, scale)
    out_at = OUT + token[:, None] * (KV * G * E) + head * E + dims[None]
    tl.store(out_at, (out / total[:, None]).to(dtype), mask=keep)


@triton.jit
def copy_blocks(POOL, PAIRS, size, BLOCK: tl.constexpr):
    """POOL[b] = POOL[a] for each (a, b) of PAIRS [n, 2]; a block is `size` numbers."""
    pair = tl.program_id(0)
    source = tl.load(PAIRS + pair * 2).to(tl.int64)
    target = tl.load(PAIRS + pair * 2 + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(POOL + target * size + at, tl.load(POOL + source * size + at, mask=at < size, other=0.0), mask=at < size)
