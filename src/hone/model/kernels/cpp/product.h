// Products of weights, with their adapters, and tokens that stand in lanes: y = W x + scale B A x + bias.

#pragma once

#include "lanes.h"

namespace {

constexpr int SUMS = LANES == 8 ? 12 : 24;  // vector registers that sums may take: AVX2 has 16, others 32
constexpr long WIDE = 4;                    // vectors of tokens in a group, at most

struct Low {  // an adapter: y[at .. at + outputs] += scale B A x
    const float *A, *B;  // [rank, in], [outputs, rank]
    int64_t rank, at, outputs;
    double scale;
};

struct Linear {
    const float *weight, *bias;  // [out, in], [out] or null
    const Low *low;
    int64_t lows;  // how many adapters
};

// y += w x
template <int OUT, int V> static inline void tile(const float *w, long in, const Vec *x, Vec (&y)[OUT][V]) {
    Vec acc[OUT][V];
    for (int j = 0; j < OUT; j++)
        for (int v = 0; v < V; v++) acc[j][v] = y[j][v];
    const long ahead = OUT * in;  // the weights of the next tile
    for (long k = 0; k < in; k += LANES) {
        for (int j = 0; j < OUT; j++) __builtin_prefetch(w + j * in + k + ahead);
        const long end = least(in, k + LANES);
        for (long i = k; i < end; i++) {
            Vec here[V];
            for (int v = 0; v < V; v++) here[v] = x[i * V + v];
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) acc[j][v] = fused(w[j * in + i], here[v], acc[j][v]);
        }
    }
    for (int j = 0; j < OUT; j++)
        for (int v = 0; v < V; v++) y[j][v] = acc[j][v];
}

// outputs of a tile, whose sums stay in registers
template <int V> constexpr int outputs() { return SUMS / V < 8 ? SUMS / V : 8; }

// y += B z for the outputs from n on, z [sum of ranks]: scale A x of the adapters
template <int OUT, int V> static inline void widen(const Linear &layer, long n, const Vec *z, Vec (&y)[OUT][V]) {
    for (const Low *a = layer.low; a < layer.low + layer.lows; z += a++->rank * V) {
        const long first = n - a->at, whole = a->outputs - OUT;
        if (0 <= first && first <= whole)
            tile<OUT, V>(a->B + first * a->rank, a->rank, z, y);
        else  // the tile lies across an end of it
            for (int j = 0; j < OUT; j++)
                for (long r = 0; 0 <= first + j && first + j < a->outputs && r < a->rank; r++)
                    for (int v = 0; v < V; v++)
                        y[j][v] = fused(a->B[(first + j) * a->rank + r], z[r * V + v], y[j][v]);
    }
}

template <int OUT, int V, class F>
static inline void product_at(const Linear &layer, long in, long n, const Vec *x, const Vec *z, F take,
                              const Vec *plus) {
    Vec y[OUT][V] = {};
    if (plus)
        for (int j = 0; j < OUT; j++)
            for (int v = 0; v < V; v++) y[j][v] = plus[(n + j) * V + v];
    tile<OUT, V>(layer.weight + n * in, in, x, y);
    widen<OUT, V>(layer, n, z, y);
    if (layer.bias)
        for (int j = 0; j < OUT; j++)
            for (int v = 0; v < V; v++) y[j][v] += layer.bias[n + j];
    take(n, y);
}

// take(n, y): outputs from n on, [OUT][V]; z: as in widen; plus: what they are added to, or null
template <int V, class F>
static inline void product_of(const Linear &layer, long in, long first, long last, const Vec *x, const Vec *z, F take,
                              const Vec *plus = nullptr) {
    constexpr int OUT = outputs<V>();
    long n = first;
    for (; n + OUT <= last; n += OUT) product_at<OUT, V>(layer, in, n, x, z, take, plus);
    for (; n < last; n++) product_at<1, V>(layer, in, n, x, z, take, plus);
}

// CALL(V) for a group of v vectors, 1 to WIDE
#define BY_WIDTH(v, CALL) \
    switch (v) {          \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    default: CALL(4);     \
    }

}  // namespace
