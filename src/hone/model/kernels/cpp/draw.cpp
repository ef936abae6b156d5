// Drawing tokens by the inverse of their CDF.

#include <math.h>

#include "softmax.h"

constexpr double BELOW = 1 - 0x1p-53;      // times a total gives a number below it
constexpr long MANY = 1 << 17;             // logits from which threads share the rows

// the first token of a block whose running weight exceeds the target, which is below their sum but for rounding
static long place(const float *x, long first, long end, float top, double target) {
    double running = 0;
    long last = end - 1;  // the last one that has a weight
    for (long i = first; i < end; i += LANES) {
        const Vec weight = exponential(logits_at(x, i, end) - top);
        const float some = sum(weight);
        for (int l = 0; some > 0 && l < LANES; l++) last = weight[l] > 0 ? i + l : last;
        if (running + some > target) {
            for (int l = 0; l < LANES; l++)
                if ((running += weight[l]) > target) return i + l;
            return last;
        }
        running += some;
    }
    return last;
}

// the first token whose CDF exceeds u, and its log-prob, for each row of x [n, vocab]
extern "C" void hone_draw(const float *x, int64_t n, int64_t vocab, const double *u, int64_t *token, float *logp,
                          double *space, int64_t threads) {
    const long blocks = pieces(vocab, BLOCK);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (n * vocab >= MANY)
    for (long r = 0; r < n; r++) {
        const float *row = x + r * vocab, top = greatest_of(row, vocab);
        double *running = space + r * blocks, total = 0;
        for (long b = 0; b < blocks; b++)
            running[b] = total += weights_of(row, b * BLOCK, least(vocab, (b + 1) * BLOCK), top);
        const double target = (u[r] < BELOW ? u[r] : BELOW) * total;
        long b = 0;
        while (b < blocks - 1 && !(running[b] > target)) b++;
        token[r] = place(row, b * BLOCK, least(vocab, (b + 1) * BLOCK), top, b ? target - running[b - 1] : target);
        logp[r] = log_prob(row[token[r]], top, total);
    }
}
