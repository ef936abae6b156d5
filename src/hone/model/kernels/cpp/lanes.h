// Vectors of float32 and what is computed with them across their lanes: sums, the greatest, the exponential function.

#pragma once

#include "wide.h"

namespace {

constexpr int LANES = Wide<float>::L;
typedef Wide<float>::Vec Vec;
typedef Wide<float>::Whole Whole;

static inline Vec pick(Whole where, Vec a, Vec b) { return (Vec)((where & (Whole)a) | (~where & (Whole)b)); }
static inline Vec greater(Vec a, Vec b) { return pick(a > b, a, b); }

static inline float greatest(Vec x) {
    float found = x[0];
    for (int l = 1; l < LANES; l++) found = x[l] > found ? x[l] : found;
    return found;
}

static inline Vec exponential(Vec x) {
    Vec zero = {}, shifted;
    const Whole none = x < -87.0f + zero;
    x = pick(none, -87.0f + zero, x);
    x = pick(x > 88.0f + zero, 88.0f + zero, x);
    const Vec y = significand(x, shifted);
    return pick(none, zero, y * (Vec)(((Whole)shifted + 127) << 23));
}

template <int W> static inline Vec sums(const Vec *p) {
    if constexpr (W == LANES)
        return p[0];
    else {
        Vec half[LANES / W / 2];
        for (int i = 0; i < LANES / W / 2; i++) half[i] = joined<float, W>(p[2 * i], p[2 * i + 1]);
        return sums<2 * W>(half);
    }
}

// lanes that are a multiple of K apart put together by f, neighbours first, in every one of them
template <int K, class F> static inline Vec over_lanes(Vec x, F f) {
    for (int step = K; step < LANES; step *= 2) {
        Whole other;
        for (int l = 0; l < LANES; l++) other[l] = l ^ step;
        x = f(x, __builtin_shuffle(x, other));
    }
    return x;
}

// the others zero
static inline Vec first_lanes(Vec x, long n) {
    Whole number;
    for (int l = 0; l < LANES; l++) number[l] = l;
    const Vec zero = {};
    return pick(number < (int32_t)n, x, zero);
}

static inline float sum(Vec x) { return sum_of<float>(x); }

}  // namespace
