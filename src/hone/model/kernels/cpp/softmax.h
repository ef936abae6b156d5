// A row of logits: the greatest, and the sum of the weights of all tokens, in the same order wherever it is asked for.

#pragma once

#include "lanes.h"

namespace {

constexpr long BLOCK = 1024;               // weights summed in float32; sums of blocks are added in float64

static inline Vec logits_at(const float *x, long i, long end) {
    if (i + LANES <= end) return load(x + i);
    Vec part = {};
    for (int l = 0; l < LANES; l++) part[l] = i + l < end ? x[i + l] : -INFINITY;
    return part;
}

static double weights_of(const float *x, long first, long end, float top) {
    Vec total = {};
    for (long i = first; i < end; i += LANES) total += exponential(logits_at(x, i, end) - top);
    return sum(total);
}

static float greatest_of(const float *x, long n) {
    Vec top = logits_at(x, 0, n);
    for (long i = LANES; i < n; i += LANES) top = greater(logits_at(x, i, n), top);
    return greatest(top);
}

static inline float log_prob(float x, float top, double total) { return (float)((double)(x - top) - log(total)); }

}  // namespace
