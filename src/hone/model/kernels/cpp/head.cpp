// The vocabulary head of a small model: logits of a list of positions, what their distributions have at the targets, and
// the way back to the logits' gradient. Products and sums are those of the sampler's tokens, to the bit.

#include <math.h>
#include <omp.h>

#include "panels.h"
#include "softmax.h"

namespace {

constexpr long ROWS = 2 * TALL;  // positions that a thread takes at once
thread_local Space rows_of;

// the weights [V, D] in panels, zero where the last one is not full
void lay(const float *weight, long V, long D, float *panels) {
    constexpr long P = panel<float>();
    const long whole = V / P * P;
#pragma omp for schedule(static)
    for (long p = 0; p < whole; p += P) turned<float>(weight + p * D, P, D, panels + p * D);
#pragma omp single
    for (long k = 0; k < D; k++)
        for (long c = 0; whole < V && c < P; c++)
            panels[whole * D + k * P + c] = whole + c < V ? weight[(whole + c) * D + k] : 0.0f;
}

struct Found {
    float *top, *log, *logp, *entropy;  // [N]; entropy: null if nobody asks
};

void look(const float *x, long V, long target, const Found &to, long at) {
    const float top = greatest_of(x, V);
    double total = 0, mixed = 0;
    for (long first = 0; first < V; first += BLOCK) total += weights_of(x, first, least(V, first + BLOCK), top);
    to.top[at] = top;
    to.log[at] = (float)log(total);
    to.logp[at] = log_prob(x[target], top, total);
    if (!to.entropy) return;
    for (long first = 0; first < V; first += BLOCK) {
        Vec part = {};
        for (long i = first, end = least(V, first + BLOCK); i < end; i += LANES) {
            const Vec z = logits_at(x, i, end) - top, w = exponential(z), none = {};
            part += pick(w > none, w * z, none);  // a token of no weight adds nothing, whatever its logit
        }
        mixed += sum(part);
    }
    to.entropy[at] = (float)(log(total) - mixed / total);
}

}  // namespace

extern "C" {

// hidden [N, D], weight [V, D]; logits [N, V] or null; panels: room for D times V in whole panels, and 64
void hone_head(const float *hidden, int64_t N, int64_t D, const float *weight, int64_t V, const int64_t *target,
               float *top, float *log, float *logp, float *entropy, float *logits, float *panels, int64_t threads) {
    const long wide = up(V, panel<float>());
    const Found to = {top, log, logp, entropy};
    panels = (float *)(((uintptr_t)panels + 63) & ~(uintptr_t)63);
#pragma omp parallel num_threads(threads)
    {
        lay(weight, V, D, panels);
        Cut<float> cut = {(float *)rows_of.of(sizeof(float) * (ROWS * (wide + D) + 2 * 64))};
        float *there = cut.take(ROWS * wide), *rest = cut.take(ROWS * D);
#pragma omp for schedule(static)
        for (long first = 0; first < N; first += ROWS) {
            const long n = least(ROWS, N - first), tiles = up(n, SHORT);
            const float *from = hidden + first * D;
            if (tiles > n) {  // products compute whole tiles
                memset(rest, 0, sizeof(float) * tiles * D);
                memcpy(rest, from, sizeof(float) * n * D);
                from = rest;
            }
            float *x = logits && wide == V && tiles == n ? logits + first * V : there;
            product<float>(from, tiles, D, panels, wide, x, nullptr);
            for (long i = 0; i < n; i++) {
                look(x + i * wide, V, target[first + i], to, first + i);
                if (logits && x == there) memcpy(logits + (first + i) * V, x + i * wide, sizeof(float) * V);
            }
        }
    }
}

// logits become g ([token = target] - q), g [N]: the gradient of logp
void hone_head_grad(float *logits, int64_t N, int64_t V, const int64_t *target, const float *top, const float *log,
                    const float *g, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < N; t++) {
        float *x = logits + t * V;
        const float shift = top[t], less = log[t], factor = -g[t];
        long i = 0;
        for (; i + LANES <= V; i += LANES) store(x + i, exponential(load(x + i) - shift - less) * factor);
        for (; i < V; i++) x[i] = exponential(x[i] - shift - less) * factor;
        x[target[t]] += g[t];
    }
}
}
