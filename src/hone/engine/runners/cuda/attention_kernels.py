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
    return _absorb_scores(tl.where(seen, tl.dot(q, tl.trans(k)) * scale, float("-inf")), v, top, total, out)


@triton.jit
def _absorb_whole(q, k, v, top, total, out, scale):
    """The same where every key is seen"""
    return _absorb_scores(tl.dot(q, tl.trans(k)) * scale, v, top, total, out)


@triton.jit
def _absorb_scores(x, v, top, total, out):
    """The same from scores [R, T], -inf where a key is not seen"""
    higher = tl.maximum(top, tl.max(x, 1))
    p = tl.exp(x - higher[:, None])
    shrink = tl.exp(top - higher)
    return higher, total * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * shrink[:, None])


@triton.jit
def _stretch(position, split, BS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """(the first key in sight, the first block of this stretch of full ones, the one after its last)"""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    span = tl.cdiv(position // BS - first // BS, SPLITS)
    begin = first // BS + split * span
    return first, begin, tl.minimum(begin + span, position // BS)


@triton.jit
def _pair(at, keep, values: tl.constexpr):
    """Keys at these places, and their values, which are `values` further; zeros where not kept"""
    return tl.load(at, mask=keep, other=0.0), tl.load(at + values, mask=keep, other=0.0)


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
def _join(PART, COUNT, place, top, total, out, GP: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr):
    """Leave this stretch's softmax for whoever comes last, who joins them in order: (whether it is us, total, out)"""
    stride: tl.constexpr = GP * (E + 2)
    heads, dims = tl.arange(0, GP), tl.arange(0, E)
    first = PART + place.to(tl.int64) * (SPLITS * stride)
    mine = first + tl.program_id(2) * stride
    tl.store(mine + heads[:, None] * E + dims[None], out)
    tl.store(mine + GP * E + heads, top)
    tl.store(mine + GP * (E + 1) + heads, total)
    tl.debug_barrier()  # all threads' stores come before the count
    last = tl.atomic_add(COUNT + place, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(COUNT + place, 0)
        top = tl.full([GP], -1e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        out = tl.zeros([GP, E], tl.float32)
        for split in tl.static_range(SPLITS):
            there = first + split * stride
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
    full = position // BS
    first, begin, end = _stretch(position, split, BS, SPLITS, WINDOW)
    table = TABLE + row * table_width
    inner = t[:, None] * E + dims[None]
    # past the row's end nothing is read: what a block held before could be NaN, which a weight of 0 does not remove
    filling = _block(POOL, tl.load(table + full), head, LAYERS, KV, BS, E)
    here = (t < position % BS) & (full * BS + t >= first) & (split == 0)
    k, v = _pair(filling + inner, here[:, None], KV * BS * E)
    some = begin < end
    begun = _block(POOL, tl.load(table + begin, mask=some, other=0), head, LAYERS, KV, BS, E)
    k_begun, v_begun = _pair(begun + inner, some, KV * BS * E)
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
        last, total, out = _join(PART, COUNT, row * KV + head, top, total, out, GP, E, SPLITS)
    out_at = OUT + (row * KV * G + head * G + heads[:, None]) * E + dims[None]
    tl.store(out_at, (out / total[:, None]).to(dtype), mask=mine & last)


@triton.jit
def _block(POOL, number, head, LAYERS: tl.constexpr, KV: tl.constexpr, BS: tl.constexpr, E: tl.constexpr):
    """The head's keys in a block; its values are KV * BS * E further."""
    return POOL + (number.to(tl.int64) * (LAYERS * 2 * KV) + head) * (BS * E)
