"""draw.py as Triton kernels: one step of every row, from logits to updated state, with no word from the host.

`_scan` sums each chunk of a row; `_cut`, where rows are restricted, finds what top-k, top-p and min-p keep; `_pick`
makes the random number, finds the chunk, a block of it and the token, and writes. A row's numbers depend on its own
logits and state alone. Everything is read from device tensors, so that a CUDA graph can hold a launch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
import triton
import triton.language as tl
from torch import Tensor

from hone.engine.params import HUGE
from hone.engine.runners.cuda.draw_state import BLOCK, STOPS, DrawOut, DrawState, chunk_of

__all__ = ["DrawOut", "DrawState", "launch"]

_INFINITY = tl.constexpr(0x7F800000)  # the bits of +inf: every key of a z <= 0 is at most this
_HUGE = tl.constexpr(HUGE)
_BELOW = tl.constexpr(1 - 2**-53)
_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _uniform(seed, request, count):
    """double `count` of numpy's Philox4x64-10 keyed (seed, request), as in engine/draw.py"""
    key_0, key_1 = seed.to(tl.uint64, bitcast=True), request.to(tl.uint64, bitcast=True)
    m_0, m_1 = tl.full([], _MULTIPLIER_0, tl.uint64), tl.full([], _MULTIPLIER_1, tl.uint64)
    w_0, w_1 = tl.full([], _WEYL_0, tl.uint64), tl.full([], _WEYL_1, tl.uint64)
    a = (count // 4 + 1).to(tl.uint64)
    b = tl.full([], 0, tl.uint64)
    c = b
    d = b
    for _ in range(10):
        high_0, low_0 = tl.umulhi(a, m_0), a * m_0
        high_1, low_1 = tl.umulhi(c, m_1), c * m_1
        a = high_1 ^ b ^ key_0
        b = low_1
        c = high_0 ^ d ^ key_1
        d = low_0
        key_0 += w_0
        key_1 += w_1
    word = count % 4
    x = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    return (x >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _inverse(TEMPERATURE, row):
    """1 / T, and 1 where greedy: a product is cheaper than a quotient for each token"""
    temperature = tl.load(TEMPERATURE + row)
    temperature = tl.where(temperature == 0, 1.0, tl.minimum(tl.maximum(temperature, 1 / _HUGE), _HUGE))
    return tl.div_rn(1.0, temperature)


@triton.jit
def _read(LOGITS, at, V: tl.constexpr):
    """Logits in float32, -inf past the vocabulary"""
    return tl.load(LOGITS + at, mask=at < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _process(x, at, V: tl.constexpr, BIAS, SEEN, penalty, HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr):
    """Repetition penalty, bias and banned tokens"""
    if HAS_SEEN:
        seen = tl.load(SEEN + at, mask=at < V, other=0)
        x = tl.where(seen != 0, tl.where(x > 0, x / penalty, x * penalty), x)
    if HAS_BIAS:
        x += tl.load(BIAS + at, mask=at < V, other=0.0)
    return x


@triton.jit
def _key(z):
    """The bits of -z, z <= 0: the greater z, the smaller"""
    return tl.abs(z).to(tl.int32, bitcast=True)


@triton.jit
def _weight(z, low):
    """exp(z) of what is kept; NaN is kept, so that it shows"""
    return tl.where((_key(z) <= low) | (z != z), tl.exp(z), 0.0)


@triton.jit
def _scan(
    LOGITS, stride, V: tl.constexpr, ACTIVE, TEMPERATURE, PENALTY, BIAS, SEEN, PART, plane,
    HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk's maximum and sum of exp, for the logits and for the logits at its temperature."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(ACTIVE + row) != 0:
        at = chunk * SIZE + tl.arange(0, SIZE)
        x = _read(LOGITS + row.to(tl.int64) * stride, at, V)
        top = tl.max(x)
        # a chunk that is -inf throughout has the sum 0
        total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)))
        to = PART + row * tl.num_programs(1) + chunk
        tl.store(to, top)
        tl.store(to + plane, total)
        inverse = _inverse(TEMPERATURE, row)
        if HAS_BIAS or HAS_SEEN:
            shift = row.to(tl.int64) * V
            penalty = tl.load(PENALTY + row)
            x = _process(x, at, V, BIAS + shift, SEEN + shift, penalty, HAS_BIAS, HAS_SEEN)
            top = tl.max(x)
            total = tl.sum(tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) * inverse))
        elif inverse != 1.0:
            total = tl.sum(tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) * inverse))
        tl.store(to + 2 * plane, top)
        tl.store(to + 3 * plane, total)


@triton.jit
def _exponent(
    LOGITS, at, V: tl.constexpr, BIAS, SEEN, penalty, top, inverse, HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr
):
    """(y - max y) / T, for y the processed logits"""
    return (_process(_read(LOGITS, at, V), at, V, BIAS, SEEN, penalty, HAS_BIAS, HAS_SEEN) - top) * inverse


@triton.jit
def _select(
    LOGITS, V: tl.constexpr, BIAS, SEEN, penalty, top, inverse, goal, most,
    MASS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The least key for which the tokens with keys up to it reach `goal`.

    The goal is a number of tokens. With MASS it is a sum of weights, over tokens with keys up to `most`.
    Each pass finds two bits of the key, the highest first: their digit is how many of its three bounds miss the goal.
    """
    key = tl.full([], 0, tl.int64)
    unit = tl.full([], 1 << 30, tl.int64)
    for _ in range(16):
        a = tl.minimum(key + unit - 1, _INFINITY).to(tl.int32)
        b = tl.minimum(key + 2 * unit - 1, _INFINITY).to(tl.int32)
        c = tl.minimum(key + 3 * unit - 1, _INFINITY).to(tl.int32)
        up_to_a = tl.zeros([SIZE], tl.float32)
        up_to_b = tl.zeros([SIZE], tl.float32)
        up_to_c = tl.zeros([SIZE], tl.float32)
        for first in range(0, V, SIZE):
            at = first + tl.arange(0, SIZE)
            z = _exponent(LOGITS, at, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
            place = _key(z)
            value = tl.where(place <= most, tl.exp(z), 0.0) if MASS else tl.full([SIZE], 1.0, tl.float32)
            up_to_a += tl.where(place <= a, value, 0.0)
            up_to_b += tl.where(place <= b, value, 0.0)
            up_to_c += tl.where(place <= c, value, 0.0)
        digit = (tl.sum(up_to_a) < goal).to(tl.int64) + (tl.sum(up_to_b) < goal).to(tl.int64)
        digit += (tl.sum(up_to_c) < goal).to(tl.int64)
        key += digit * unit
        unit = unit // 4
    return tl.minimum(key, _INFINITY).to(tl.int32)


@triton.jit
def _mass(
    LOGITS, V: tl.constexpr, BIAS, SEEN, penalty, top, inverse, most,
    HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The weight of the tokens with keys up to `most`, summed as _select does"""
    total = tl.zeros([SIZE], tl.float32)
    for first in range(0, V, SIZE):
        at = first + tl.arange(0, SIZE)
        z = _exponent(LOGITS, at, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
        total += tl.where(_key(z) <= most, tl.exp(z), 0.0)
    return tl.sum(total)


@triton.jit
def _cut(
    LOGITS, stride, V: tl.constexpr, chunks: tl.constexpr, ACTIVE, TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY,
    BIAS, SEEN, PART, plane, LOW,
    HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The greatest key that top-k, top-p and min-p keep, and the sums of the chunks over what is kept."""
    row = tl.program_id(0)
    top_k, top_p, min_p = tl.load(TOP_K + row), tl.load(TOP_P + row), tl.load(MIN_P + row)
    restricted = ((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0)
    low = tl.full([], _INFINITY, tl.int32)
    if (tl.load(ACTIVE + row) != 0) & restricted & (tl.load(TEMPERATURE + row) != 0.0):
        LOGITS += row.to(tl.int64) * stride
        BIAS += row.to(tl.int64) * V
        SEEN += row.to(tl.int64) * V
        penalty, inverse = tl.load(PENALTY + row), _inverse(TEMPERATURE, row)
        c = tl.arange(0, CHUNKS)
        part = PART + row * chunks + c
        top = tl.max(tl.load(part + 2 * plane, mask=c < chunks, other=float("-inf")))
        if (top_k > 0) & (top_k < V):
            low = _select(
                LOGITS, V, BIAS, SEEN, penalty, top, inverse, top_k.to(tl.float32), low,
                False, HAS_BIAS, HAS_SEEN, SIZE,
            )  # fmt: skip
        if top_p < 1.0:
            goal = top_p * _mass(LOGITS, V, BIAS, SEEN, penalty, top, inverse, low, HAS_BIAS, HAS_SEEN, SIZE)
            reached = _select(LOGITS, V, BIAS, SEEN, penalty, top, inverse, goal, low, True, HAS_BIAS, HAS_SEEN, SIZE)
            low = tl.minimum(low, reached)
        if min_p > 0.0:
            low = tl.minimum(low, _key(tl.log(min_p)))
        for chunk in range(chunks):
            at = chunk * SIZE + tl.arange(0, SIZE)
            z = _exponent(LOGITS, at, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
            to = PART + row * chunks + chunk
            tl.store(to + 2 * plane, top)
            tl.store(to + 3 * plane, tl.sum(_weight(z, low)))
    tl.store(LOW + row, low)


@triton.jit
def _find(weight, target, SIZE: tl.constexpr):
    """The first of the weights at which their running total exceeds the target, and the total before it"""
    weight = weight.to(tl.float64)
    running = tl.cumsum(weight, 0)
    # the target comes of a sum in another order: stay below this one, so that what is found has raised it
    target = tl.minimum(target, tl.max(running) * _BELOW)
    found = tl.minimum(tl.sum((running <= target).to(tl.int32)), SIZE - 1)
    at = tl.arange(0, SIZE)
    return found, target - tl.sum(tl.where(at == found - 1, running, 0.0))


@triton.jit
def _token(
    LOGITS, V: tl.constexpr, BIAS, SEEN, penalty, top, inverse, low, chunk, target,
    HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The token of this chunk where its running weight exceeds the target: the block, then inside it"""
    BLOCKS: tl.constexpr = SIZE // INNER
    at = chunk * SIZE + tl.arange(0, BLOCKS)[:, None] * INNER + tl.arange(0, INNER)[None]
    z = _exponent(LOGITS, at, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
    block, target = _find(tl.sum(_weight(z, low), 1), target, BLOCKS)
    first = chunk * SIZE + block * INNER
    at = first + tl.arange(0, INNER)
    z = _exponent(LOGITS, at, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
    place, target = _find(_weight(z, low), target, INNER)
    return first + place


@triton.jit
def _best(
    LOGITS, V: tl.constexpr, BIAS, SEEN, penalty, top, chunk,
    HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The first token of this chunk that has the row's maximum"""
    at = chunk * SIZE + tl.arange(0, SIZE)
    y = _process(_read(LOGITS, at, V), at, V, BIAS, SEEN, penalty, HAS_BIAS, HAS_SEEN)
    return tl.min(tl.where(y == top, at, V - 1))


@triton.jit
def _pick(
    LOGITS, stride, V: tl.constexpr, chunks: tl.constexpr, TOKEN, POSITION, COUNT, LIMIT, ACTIVE, SEED, REQUEST,
    TEMPERATURE, PENALTY, STOPS_, BIAS, SEEN, PART, plane, LOW, OUT_TOKEN, OUT_LOGP, OUT_RAW, OUT_FLAG,
    RESTRICT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEEN: tl.constexpr,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr, INNER: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """A token for the row, its log-probs, and the row's state after it."""
    row = tl.program_id(0)
    flag = tl.full([], 0, tl.int32)
    if tl.load(ACTIVE + row) != 0:
        LOGITS += row.to(tl.int64) * stride
        BIAS += row.to(tl.int64) * V
        SEEN += row.to(tl.int64) * V
        penalty, inverse = tl.load(PENALTY + row), _inverse(TEMPERATURE, row)
        c = tl.arange(0, CHUNKS)
        part, inside = PART + row * chunks + c, c < chunks
        x_tops = tl.load(part, mask=inside, other=float("-inf"))
        x_sums = tl.load(part + plane, mask=inside, other=0.0)
        tops = tl.load(part + 2 * plane, mask=inside, other=float("-inf"))
        sums = tl.load(part + 3 * plane, mask=inside, other=0.0)
        x_top, top = tl.max(x_tops), tl.max(tops)
        x_total = tl.sum((x_sums * tl.exp(x_tops - x_top)).to(tl.float64))
        weight = (sums * tl.exp((tops - top) * inverse)).to(tl.float64)
        total = tl.sum(weight)
        count = tl.load(COUNT + row)
        if tl.load(TEMPERATURE + row) == 0.0:
            chunk = tl.minimum(tl.min(tl.where(tops == top, c, CHUNKS)), chunks - 1)
            token = _best(LOGITS, V, BIAS, SEEN, penalty, top, chunk, HAS_BIAS, HAS_SEEN, SIZE)
        else:
            u = _uniform(tl.load(SEED + row), tl.load(REQUEST + row), count)
            chunk, target = _find(weight, u * total, CHUNKS)
            low = tl.load(LOW + row) if RESTRICT else tl.full([], _INFINITY, tl.int32)
            chunk = tl.minimum(chunk, chunks - 1)  # NaN finds none
            token = _token(
                LOGITS, V, BIAS, SEEN, penalty, top, inverse, low, chunk, target,
                HAS_BIAS, HAS_SEEN, SIZE, INNER,
            )  # fmt: skip
        token = tl.minimum(token, V - 1)
        x = tl.load(LOGITS + token).to(tl.float32)
        z = _exponent(LOGITS, token, V, BIAS, SEEN, penalty, top, inverse, HAS_BIAS, HAS_SEEN)
        tl.store(OUT_TOKEN + row, token)
        tl.store(OUT_LOGP + row, z - tl.log(total.to(tl.float32)))
        tl.store(OUT_RAW + row, x - x_top - tl.log(x_total.to(tl.float32)))
        stops = tl.load(STOPS_ + row * MANY + tl.arange(0, MANY))
        ended = (tl.sum((stops == token).to(tl.int32)) > 0) | (count + 1 >= tl.load(LIMIT + row))
        flag = tl.where(ended, 2, 1)
        tl.store(TOKEN + row, token)
        tl.store(POSITION + row, tl.load(POSITION + row) + 1)
        tl.store(COUNT + row, count + 1)
        tl.store(ACTIVE + row, tl.where(ended, 0, 1))
        if HAS_SEEN:
            tl.store(SEEN + token, 1)
    tl.store(OUT_FLAG + row, flag)


def launch(
    logits: Tensor, state: DrawState, out: DrawOut, rows: int, *, restrict: bool, penalty: bool, bias: bool
) -> None:
    """A token for each active row in [0, rows), from logits [rows or more, V]; rows that are not active write nothing.

    restrict: some row uses top-k, top-p or min-p; penalty, bias: some row uses those. What is False costs nothing,
    and is not applied.
    """
    V = logits.shape[1]
    size, chunks = chunk_of(V), state.part.shape[2]
    if logits.stride(1) != 1 or len(logits) < rows or chunks != triton.cdiv(V, size):
        raise ValueError(f"logits {tuple(logits.shape)} do not fit {rows} rows of a state with {chunks} chunks")
    s, plane = state, state.part.stride(0)
    biases = s.bias if bias and s.bias is not None else logits
    seen = s.seen if penalty and s.seen is not None else logits
    if (bias and s.bias is None) or (penalty and s.seen is None):
        raise ValueError("the state was made without bias or seen")
    flags = {"HAS_BIAS": bias, "HAS_SEEN": penalty, "SIZE": size}
    several = {"CHUNKS": max(2, triton.next_power_of_2(chunks))}
    _scan[(rows, chunks)](
        logits, logits.stride(0), V, s.active, s.temperature, s.penalty, biases, seen, s.part, plane, **flags
    )
    if restrict:
        _cut[(rows,)](
            logits, logits.stride(0), V, chunks, s.active, s.temperature, s.top_k, s.top_p, s.min_p, s.penalty,
            biases, seen, s.part, plane, s.low, **flags, **several, num_warps=8,
        )  # fmt: skip
    _pick[(rows,)](
        logits, logits.stride(0), V, chunks, s.token, s.position, s.count, s.limit, s.active, s.seed, s.request,
        s.temperature, s.penalty, s.stop_ids, biases, seen, s.part, plane, s.low, out.token, out.logp, out.raw,
        out.flag, RESTRICT=restrict, **flags, **several, INNER=BLOCK, MANY=STOPS,
    )  # fmt: skip
