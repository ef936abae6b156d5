// What stands between the products of a decoder layer, forward and backward: norm, rotation and gate of a token, and the
// attention of a head in a row of tokens.
//
// Everything is a template of the number's type: float64 is for the tests, which compare it with plain layers.
// Rows of tokens lie in one list. A row's own tokens are neighbours in it; before them it may read the first tokens of
// another row of its group.

#pragma once

#include "wide.h"

namespace {

constexpr int QUERIES = 8;  // that are computed together

struct Row {
    int64_t own, count;      // its own tokens: the first, how many
    int64_t shared, common;  // those before them, of another row
    int64_t skip;            // how many of its own ask nothing
};

struct Heads {
    int64_t H, K, E;  // query heads, key-value heads, numbers of each
};

// ---- a token ---------------------------------------------------------------------------------------------------

template <class T> static inline T scale_of(const T *x, long D, double eps) {
    constexpr int L = Wide<T>::L;
    typename Wide<T>::Vec squares = {};
    long f = 0;
    for (; f + L <= D; f += L) squares = fused(load(x + f), load(x + f), squares);
    for (int l = 0; f + l < D; l++) squares[l] = fused(x[f + l], x[f + l], squares[l]);
    return (T)1 / (T)sqrt(sum_of<T>(squares) / (T)D + (T)eps);
}

// y = x gain / rms(x)
template <class T> static inline void norm_one(const T *x, const T *gain, double eps, long D, T *y) {
    const T s = scale_of(x, D, eps);
#pragma omp simd
    for (long f = 0; f < D; f++) y[f] = x[f] * s * gain[f];
}

// dx + plus, and dgain added to part
template <class T>
static inline void norm_grad_one(const T *x, const T *gain, double eps, const T *dy, const T *plus, long D, T *dx,
                                 T *part) {
    const T s = scale_of(x, D, eps);
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (long f = 0; f < D; f++) dot += dy[f] * gain[f] * x[f];
    const T back = dot * s * s / (T)D;
#pragma omp simd
    for (long f = 0; f < D; f++) {
        part[f] = fused(dy[f] * x[f], s, part[f]);
        dx[f] = fused(fused(-x[f], back, dy[f] * gain[f]), s, plus[f]);
    }
}

// the first heads of a token's numbers, (a, b) -> (a cos - b sin, b cos + a sin), a and b their halves
template <class T> static inline void rotate_one(T *x, const T *cos, const T *sin, long heads, long E, T turn) {
    const long half = E / 2;
    for (long h = 0; h < heads; h++) {
        T *a = x + h * E, *b = a + half;
#pragma omp simd
        for (long e = 0; e < half; e++) {
            const T one = a[e], other = b[e];
            a[e] = fused(one, cos[e], -other * sin[e] * turn);
            b[e] = fused(other, cos[e + half], one * sin[e + half] * turn);
        }
    }
}

// y = silu(x[:M]) x[M:]
template <class T> static inline void gate_one(const T *x, long M, T *y) {
    const T *g = x, *u = x + M;
#pragma omp simd
    for (long f = 0; f < M; f++) y[f] = g[f] / ((T)1 + exponential(-g[f])) * u[f];
}

// dx of gate's dy, and its y again
template <class T> static inline void gate_grad_one(const T *x, const T *dy, long M, T *dx, T *y) {
    const T *g = x, *u = x + M;
    T *dg = dx, *du = dx + M;
#pragma omp simd
    for (long f = 0; f < M; f++) {
        const T s = (T)1 / ((T)1 + exponential(-g[f])), silu = g[f] * s;
        y[f] = silu * u[f];
        du[f] = dy[f] * silu;
        dg[f] = dy[f] * u[f] * s * ((T)1 + g[f] - silu);
    }
}

// ---- attention -------------------------------------------------------------------------------------------------

thread_local Space space;  // of one head

template <class T> struct Head {  // one key-value head of a row, and the query heads that share it
    typedef typename Wide<T>::Vec Vec;
    static constexpr int L = Wide<T>::L;

    const Heads &s;
    const Row &row;
    long head;
    long E, wide, keys, width;  // wide: E in whole vectors; width: numbers of a token
    T scale;

    Head(const Heads &shape, const Row &r, long h)
        : s(shape), row(r), head(h), E(shape.E), wide(up(shape.E, L)), keys(r.common + r.count),
          width((shape.H + 2 * shape.K) * shape.E), scale((T)(1.0 / sqrt((double)shape.E))) {}

    long token(long key) const { return key < row.common ? row.shared + key : row.own + key - row.common; }

    // the numbers of a head: fewer than a call of memcpy is worth
    void copy(const T *from, T *to) const {
        long e = 0;
        for (; e + L <= E; e += L) store(to + e, load(from + e));
        for (; e < E; e++) to[e] = from[e];
    }

    // [keys, wide] and turned, by L keys [E][L]
    void gather(const T *from, T *lines, T *turned) const {
        const long all = up(keys, L);
        memset(lines, 0, sizeof(T) * all * wide);
        for (long k = 0; k < keys; k++) copy(from + token(k) * width, lines + k * wide);
        for (long b = 0; b < all; b += L)
            for (long e = 0; e < E; e += L) {
                Vec square[L];
                for (int l = 0; l < L; l++) square[l] = load(lines + (b + l) * wide + e);
                turn<T>(square);
                for (int l = 0; l < least(L, E - e); l++) store(turned + b * E + (e + l) * L, square[l]);
            }
    }

    // QUERIES lines of numbers after each other; lines that are missing are zero
    void lines(const T *from, long step, long n, T *to) const {
        memset(to, 0, sizeof(T) * QUERIES * wide);
        for (long i = 0; i < n; i++) copy(from + i * step, to + i * wide);
    }

    // the lanes l to l + N of a product with a key, added up: Q queries against L keys; ONE: a head is a vector
    template <int N, int Q, bool ONE> void branch(const T *a, const T *kt, long l, Vec (&out)[Q]) const {
        if constexpr (N > 1) {
            Vec other[Q];
            branch<N / 2, Q, ONE>(a, kt, l, out);
            branch<N / 2, Q, ONE>(a, kt, l + N / 2, other);
            for (int i = 0; i < Q; i++) out[i] += other[i];
            return;
        }
        const Vec zero = {}, here = ONE || l < E ? load(kt + l * L) : zero;
        for (int i = 0; i < Q; i++) out[i] = a[i * wide + l] * here;
        for (long e = l + L; !ONE && e < E; e += L)
            for (int i = 0; i < Q; i++) out[i] = fused(a[i * wide + e], load(kt + e * L), out[i]);
    }

    // `against`, with sums in the order of the sampler's (decode.cpp)
    template <bool ONE> void scored(const T *a, const T *turned, long seen, long room, T *out) const {
        constexpr int Q = 4;
        for (long b = 0; b < seen; b += L)
            for (int i = 0; i < QUERIES; i += Q) {
                Vec found[Q];
                branch<L, Q, ONE>(a + i * wide, turned + b * E, 0, found);
                for (int j = 0; j < Q; j++) store(out + (i + j) * room + b, found[j]);
            }
    }

    // out[i][k] = a[i] . b[k] for keys in whole vectors; room: how far the lines of out are apart
    void against(const T *a, const T *turned, long seen, long room, T *out) const {
        for (long b = 0; b < seen; b += L) {
            Vec acc[QUERIES] = {};
            const T *kt = turned + b * E;
            for (long e = 0; e < E; e++) {
                const Vec here = load(kt + e * L);
                for (int i = 0; i < QUERIES; i++) acc[i] = fused(a[i * wide + e], here, acc[i]);
            }
            for (int i = 0; i < QUERIES; i++) store(out + i * room + b, acc[i]);
        }
    }

    // out[i] = sum over keys of weight[i][k] line[k]
    void mixed(const T *weight, long room, const T *line, long seen, T *out) const {
        for (long v = 0; v < wide; v += L) {
            Vec acc[QUERIES] = {};
            for (long k = 0; k < seen; k++) {
                const Vec here = load(line + k * wide + v);
                for (int i = 0; i < QUERIES; i++) acc[i] = fused(weight[i * room + k], here, acc[i]);
            }
            for (int i = 0; i < QUERIES; i++) store(out + i * wide + v, acc[i]);
        }
    }

    // to[k] += sum over queries of weight[i][k] a[i]
    void spread(const T *weight, long room, const T *a, long seen, T *to) const {
        for (long v = 0; v < wide; v += L) {
            Vec given[QUERIES];
            for (int i = 0; i < QUERIES; i++) given[i] = load(a + i * wide + v);
            for (long k = 0; k < seen; k++) {
                Vec acc = load(to + k * wide + v);
                for (int i = 0; i < QUERIES; i++) acc = fused(weight[i * room + k], given[i], acc);
                store(to + k * wide + v, acc);
            }
        }
    }

    static long room_of(long keys) { return up(keys, 16) + 16; }

    void forward(const T *qkv, T *out, T *log) const {
        const long room = room_of(keys), G = s.H / s.K;
        Cut<T> cut = {(T *)space.of(sizeof(T) * (2 * room * wide + 4096 + QUERIES * (room + 2 * wide + 192)))};
        T *value = cut.take(room * wide), *turned = cut.take(room * wide), *q = cut.take(QUERIES * wide);
        T *score = cut.take(QUERIES * room), *found = cut.take(QUERIES * wide);
        gather(qkv + (s.H + head) * E, value, turned);
        // keys are needed turned and values as lines: the second gather overwrites the lines alone
        for (long k = 0; k < keys; k++)
            copy(qkv + token(k) * width + (s.H + s.K + head) * E, value + k * wide);
        for (long g = head * G; g < (head + 1) * G; g++)
            for (long first = row.skip; first < row.count; first += QUERIES) {
                const long n = least(QUERIES, row.count - first), seen = row.common + first + n;
                lines(qkv + (row.own + first) * width + g * E, width, n, q);
                E == L ? scored<true>(q, turned, seen, room, score) : scored<false>(q, turned, seen, room, score);
                T total[QUERIES] = {};
                for (long i = 0; i < n; i++)
                    total[i] = weigh(score + i * room, row.common + first + i + 1, up(seen, L),
                                     log ? log + (row.own + first + i) * s.H + g : nullptr);
                mixed(score, room, value, seen, found);
                for (long i = 0; i < n; i++) {
                    T *to = out + (row.own + first + i) * s.H * E + g * E;
                    for (long e = 0; e < E; e++) to[e] = found[i * wide + e] / total[i];
                }
            }
    }

    // scores become exp(scale (score - greatest)), 0 for keys that are not seen; their sum, and its logarithm
    T weigh(T *score, long seen, long end, T *log_of) const {
        T top[L], sum[L] = {}, greatest = -INFINITY;
        for (int l = 0; l < L; l++) top[l] = -INFINITY;
        for (long k = 0; k < end; k += L)
#pragma omp simd
            for (int l = 0; l < L; l++) {
                const T x = k + l < seen ? score[k + l] : -INFINITY;
                score[k + l] = x;
                top[l] = x > top[l] ? x : top[l];
            }
#pragma omp simd reduction(max : greatest)
        for (int l = 0; l < L; l++) greatest = top[l] > greatest ? top[l] : greatest;
        for (long k = 0; k < end; k += L)
#pragma omp simd
            for (int l = 0; l < L; l++) sum[l] += score[k + l] = exponential((score[k + l] - greatest) * scale);
        const T total = sum_of<T>(load(sum));
        if (log_of) *log_of = greatest * scale + (T)log(total);
        return total;
    }

    // dqkv of the row's queries, and added to it that of its keys and values; out: what forward gave
    void backward(const T *qkv, const T *out, const T *log, const T *dout, T *dqkv) const {
        const long room = room_of(keys), G = s.H / s.K;
        Cut<T> cut = {(T *)space.of(sizeof(T) * (6 * room * wide + 4096 + QUERIES * (2 * room + 3 * wide + 320)))};
        T *key = cut.take(room * wide), *key_turned = cut.take(room * wide), *value = cut.take(room * wide);
        T *value_turned = cut.take(room * wide), *dkey = cut.take(room * wide), *dvalue = cut.take(room * wide);
        T *q = cut.take(QUERIES * wide), *d = cut.take(QUERIES * wide), *found = cut.take(QUERIES * wide);
        T *weight = cut.take(QUERIES * room), *slope = cut.take(QUERIES * room);
        gather(qkv + (s.H + head) * E, key, key_turned);
        gather(qkv + (s.H + s.K + head) * E, value, value_turned);
        memset(dkey, 0, sizeof(T) * keys * wide);
        memset(dvalue, 0, sizeof(T) * keys * wide);
        for (long g = head * G; g < (head + 1) * G; g++)
            for (long first = row.skip; first < row.count; first += QUERIES) {
                const long n = least(QUERIES, row.count - first), seen = row.common + first + n, at = row.own + first;
                lines(qkv + at * width + g * E, width, n, q);
                lines(dout + at * s.H * E + g * E, s.H * E, n, d);
                against(q, key_turned, seen, room, weight);
                against(d, value_turned, seen, room, slope);
                for (long i = 0; i < QUERIES; i++) {
                    const long t = at + least(i, n - 1);
                    const T *o = out + t * s.H * E + g * E;
                    T dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (long e = 0; e < E; e++) dot += o[e] * d[i * wide + e];
                    tilt(weight + i * room, slope + i * room, i < n ? row.common + first + i + 1 : 0, up(seen, L),
                         log[t * s.H + g], dot);
                }
                mixed(slope, room, key, seen, found);
                for (long i = 0; i < n; i++) copy(found + i * wide, dqkv + (at + i) * width + g * E);
                spread(weight, room, d, seen, dvalue);
                spread(slope, room, q, seen, dkey);
            }
        for (long k = 0; k < keys; k++) {
            T *to = dqkv + token(k) * width + (s.H + head) * E, *also = to + s.K * E;
            for (long e = 0; e < E; e++) to[e] += dkey[k * wide + e], also[e] += dvalue[k * wide + e];
        }
    }

    // scores become weights p, and what they are multiplied with their slope p (slope - dot) scale
    void tilt(T *weight, T *slope, long seen, long end, T log, T dot) const {
#pragma omp simd
        for (long k = 0; k < end; k++) {  // whole vectors: what is beyond the row is found, and set to zero
            const T p = exponential(fused(weight[k], scale, -log));
            weight[k] = p;
            slope[k] = p * (slope[k] - dot) * scale;
        }
        for (long k = seen; k < end; k++) weight[k] = slope[k] = 0;
    }
};

}  // namespace
