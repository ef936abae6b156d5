"""Attention over paged KV memory, with the rotation of positions and the writing of keys and values fused in.

pool: [blocks, layers, 2, K, block_size, E], of which a kernel gets one layer's part; a row's table names its blocks.
Keys are stored rotated. They are visited from the first to the last in steps that depend on nothing but the row's own
length and the launch's settings, so that a row's numbers are the same whatever is beside it.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rotated(AT, GAIN, COS, SIN, keep, eps, NORM: tl.constexpr, E: tl.constexpr):
    """Heads at AT [R, 1], normed and rotated by the angles at COS and SIN [R or 1, 1]: float32 [R, E]

    (a, b) -> (a cos - b sin, b cos + a sin): each number is loaded with its partner in the other half.
    """
    half: tl.constexpr = E // 2
    i = tl.arange(0, E)[None]
    partner = (i + half) % E
    x = tl.load(AT + i, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(AT + partner, mask=keep, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None]
        dtype: tl.constexpr = GAIN.dtype.element_ty  # the decoder rounds between the norm and the rotation
        x = (x * factor * tl.load(GAIN + i).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y * factor * tl.load(GAIN + partner).to(tl.float32)).to(dtype).to(tl.float32)
    cos, sin = tl.load(COS + i % half), tl.load(SIN + i % half)
    return x * cos + tl.where(i < half, -y, y) * sin


@triton.jit
def _absorb(q, k, v, seen, top, total, out, scale):
    """The running softmax of queries [R, E] takes in a block of keys and values [T, E]; seen: bool [R, T]"""
    x = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp(x - higher[:, None])
    shrink = tl.exp(top - higher)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def _absorb_whole(q, k, v, top, total, out, scale):
    """The same where every key is seen"""
    x = tl.dot(q, tl.trans(k)) * scale
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp(x - higher[:, None])
    shrink = tl.exp(top - higher)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def _own(
    line, own_at, KGAIN, cos, sin, q, eps, scale, KV: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the row's own key and value to the pool; the queries' score of that key, and the value"""
    dims = tl.arange(0, E)[None]
    one = tl.arange(0, 1)[:, None]
    k = _rotated(line + KV * G * E + one, KGAIN, cos, sin, one < 1, eps, NORM, E).to(own_at.dtype.element_ty)
    v = tl.load(line + (KV * G + KV) * E + dims)
    tl.store(own_at + dims, k)
    tl.store(own_at + KV * BS * E + dims, v)
    return tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale, v.to(tl.float32)


@triton.jit
def _join(PART, COUNT, top, total, out, heads, dims, GP: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr):
    """Leave this stretch's softmax for whoever comes last, who joins them in order: (whether it is us, total, out)"""
    stride: tl.constexpr = GP * (E + 2)
    mine = PART + tl.program_id(2) * stride
    tl.store(mine + heads[:, None] * E + dims[None], out)
    tl.store(mine + GP * E + heads, top)
    tl.store(mine + GP * (E + 1) + heads, total)
    tl.debug_barrier()  # all threads' stores come before the count
    last = tl.atomic_add(COUNT, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(COUNT, 0)
        top = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        out = tl.zeros([GP, E], tl.float32)
        for split in tl.static_range(SPLITS):
            there = PART + split * stride
            other = tl.load(there + GP * E + heads, cache_modifier=".cg")
            higher = tl.maximum(top, other)
            shrink, share = tl.exp(top - higher), tl.exp(other - higher)
            total = total * shrink + share * tl.load(there + GP * (E + 1) + heads, cache_modifier=".cg")
            more = tl.load(there + heads[:, None] * E + dims[None], cache_modifier=".cg")
            out = out * shrink[:, None] + more * share[:, None]
            top = higher
    return last, total, out


@triton.jit
def decode(
    QKV, POOL, TABLE, POSITION, ACTIVE, COS, SIN, QGAIN, KGAIN, OUT, PART, COUNT, scale, eps, table_width,
    LAYERS: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, E: tl.constexpr, BS: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query a row: row = program 0, key-value head = program 1, its G query heads (GP >= 16 with padding) together,
    a stretch of the full blocks = program 2; the first stretch also has the block that is being filled, and the row's
    own key and value, which are written to the pool and enter from registers.

    What earlier steps left (state, the keys of two blocks) is read before the kernel that makes the queries has ended.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, dims, t = tl.arange(0, GP), tl.arange(0, E), tl.arange(0, BS)
    active, position = tl.load(ACTIVE + row), tl.load(POSITION + row)
    if active == 0:
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    full = position // BS
    span = tl.cdiv(full - first // BS, SPLITS)
    begin = first // BS + split * span
    end = tl.minimum(begin + span, full)
    table = TABLE + row * table_width
    inner = t[:, None] * E + dims[None]
    # past the row's end nothing is read: what a block held before could be NaN, which a weight of 0 does not remove
    filling = _block(POOL, tl.load(table + full), head, LAYERS, KV, BS, E)
    here = (t < position % BS) & (full * BS + t >= first) & (split == 0)
    k = tl.load(filling + inner, mask=here[:, None], other=0.0)
    v = tl.load(filling + KV * BS * E + inner, mask=here[:, None], other=0.0)
    some = begin < end
    begun = _block(POOL, tl.load(table + begin, mask=some, other=0), head, LAYERS, KV, BS, E)
    k_begun = tl.load(begun + inner, mask=some, other=0.0)
    v_begun = tl.load(begun + KV * BS * E + inner, mask=some, other=0.0)
    if PDL:
        gdc_wait()
    line = QKV + row.to(tl.int64) * ((KV * G + 2 * KV) * E)
    dtype: tl.constexpr = POOL.dtype.element_ty
    mine = heads[:, None] < G
    cos, sin = COS + position * (E // 2), SIN + position * (E // 2)
    q = _rotated(line + (head * G + heads[:, None]) * E, QGAIN, cos, sin, mine, eps, NORM, E).to(dtype)
    top = tl.full([GP], -1e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    out = tl.zeros([GP, E], tl.float32)
    if split == 0:
        own_at = filling + (position % BS) * E
        top, own = _own(line + head * E, own_at, KGAIN, cos, sin, q, eps, scale, KV, G, E, BS, NORM)
        total += 1.0
        out += own
    top, total, out = _absorb(q, k, v, here[None], top, total, out, scale)
    seen = (begin * BS + t >= first) & some
    top, total, out = _absorb(q, k_begun, v_begun, seen[None], top, total, out, scale)
    # the next block's number is carried along: a load whose address another load gives is fetched too late to help
    number = tl.load(table + begin + 1, mask=begin + 1 < end, other=0)
    for block in range(begin + 1, end):
        at = _block(POOL, number, head, LAYERS, KV, BS, E)
        k = tl.load(at + inner)
        v = tl.load(at + KV * BS * E + inner)
        number = tl.load(table + tl.minimum(block + 1, end - 1))
        top, total, out = _absorb_whole(q, k, v, top, total, out, scale)
    if PDL:
        gdc_launch_dependents()  # not before: the next kernel's programs would take the room of this one's
    last = True
    if SPLITS > 1:
        place = row * KV + head
        part = PART + place.to(tl.int64) * (SPLITS * GP * (E + 2))
        last, total, out = _join(part, COUNT + place, top, total, out, heads, dims, GP, E, SPLITS)
    out_at = OUT + (row * KV * G + head * G + heads[:, None]) * E + dims[None]
    tl.store(out_at, (out / total[:, None]).to(dtype), mask=mine & last)


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
    """Prompt tokens: queries rotated in place, keys and values written to the pool.

    Program 0: a tile of BT tokens; program 1: a head, queries first, then keys, then values.
    OWNER: each token's line in TABLE, -1 for padding.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    half: tl.constexpr = E // 2
    dims = tl.arange(0, E)[None]
    owner = tl.load(OWNER + token, mask=token < count, other=-1)
    real = owner >= 0
    keep = real[:, None]
    position = tl.load(POSITION + token, mask=real, other=0)
    dtype: tl.constexpr = POOL.dtype.element_ty
    line = QKV + token[:, None].to(tl.int64) * ((KV * G + 2 * KV) * E) + head * E
    if head < KV * G + KV:
        turn = position[:, None] * half
        x = _rotated(line, QGAIN if head < KV * G else KGAIN, COS + turn, SIN + turn, keep, eps, NORM, E).to(dtype)
    else:
        x = tl.load(line + dims, mask=keep, other=0.0)
    if head < KV * G:
        tl.debug_barrier()  # in place: every partner has been loaded
        tl.store(line + dims, x, mask=keep)
    else:
        number = tl.load(TABLE + owner * table_width + position // BS, mask=real, other=0).to(tl.int64)
        which = head - KV * G  # keys, then values: the order of the pool
        at = POOL + (number * (LAYERS * 2 * KV) + which) * (BS * E) + (position % BS) * E
        tl.store(at[:, None] + dims, x, mask=keep)


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
    table, end = TABLE + owner * table_width, tl.cdiv(position + count, BS)
    number = tl.load(table + first // BS)
    for block in range(first // BS, end):
        at = _block(POOL, number, head // G, LAYERS, KV, BS, E)
        number = tl.load(table + tl.minimum(block + 1, end - 1))
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
