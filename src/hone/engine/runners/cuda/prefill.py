"""Attention of prompts over paged KV memory: their keys and values are written to it, then many queries read it.

As in attention_kernels.py, keys are visited from first to last, so that a prompt's numbers depend on itself alone.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from hone.engine.runners.cuda.attention_kernels import _absorb, _block, _rotated


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
