// One product on tensors: the vocabulary head.

#include <stdint.h>

#include "product.h"

constexpr long CHUNK = 192;  // outputs that a thread takes at once

// out [n, outputs] = x [n, in] W^T + bias, adapters left out; space: n in, in whole vectors, and 64
extern "C" void hone_product(const Linear *layer, int64_t in, int64_t outputs, const float *x, int64_t n,
                             float *out, float *space, int64_t threads) {
    Vec *turned = (Vec *)(((uintptr_t)space + 63) & ~(uintptr_t)63);
    const long vectors = pieces(n, LANES);
    for (long g = 0; g < vectors; g += WIDE) {
        const long width = least(WIDE, vectors - g) * LANES;
        float *to = (float *)(turned + g * in);
        for (long l = 0; l < width; l++)
            for (long f = 0; f < in; f++) to[f * width + l] = g * LANES + l < n ? x[(g * LANES + l) * in + f] : 0.0f;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long c = 0; c < pieces(outputs, CHUNK); c++)
        for (long g = 0; g < vectors; g += WIDE) {
            const long end = least(outputs, (c + 1) * CHUNK), t = g * LANES;
            auto take = [&](long at, auto &y) {
                constexpr int OUT = sizeof(y) / sizeof(y[0]), V = sizeof(y[0]) / sizeof(y[0][0]);
                const long some = least(V * LANES, n - t);
                for (long l = 0; l < some; l++)
                    for (int j = 0; j < OUT; j++) out[(t + l) * outputs + at + j] = y[j][l / LANES][l % LANES];
            };
#define CALL(V) product_of<V>(*layer, in, c * CHUNK, end, turned + g * in, nullptr, take)
            BY_WIDTH(least(WIDE, vectors - g), CALL)
#undef CALL
        }
}
