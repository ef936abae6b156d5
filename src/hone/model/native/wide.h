// Vectors of numbers, the exponential function, and memory that a thread keeps: what the learner's C++ files share.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class T> struct Wide {
    static constexpr int L = BYTES / sizeof(T);
    typedef T Vec __attribute__((vector_size(BYTES)));
    typedef T Loose __attribute__((vector_size(BYTES), aligned(sizeof(T))));
};

template <class T> static inline typename Wide<T>::Vec load(const T *p) { return *(const typename Wide<T>::Loose *)p; }
template <class T> static inline void store(T *p, typename Wide<T>::Vec x) { *(typename Wide<T>::Loose *)p = x; }

static inline long up(long a, long b) { return (a + b - 1) / b * b; }
static inline long least(long a, long b) { return a < b ? a : b; }

static inline double exponential(double x) { return exp(x); }

// without branches, so that loops over it become vectors
static inline float exponential(float x) {
    const float magic = 12582912.0f;  // added, it leaves a whole number in the lowest bits
    const float kept = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = kept * 1.44269504088896341f + magic, n = shifted - magic;
    const float r = kept - n * 0.693359375f + n * 2.12194440e-4f;
    float y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : y * power;
}

// ---- memory of a thread ----------------------------------------------------------------------------------------

struct Space {
    char *at = nullptr;
    size_t size = 0;
    ~Space() { free(at); }
    void *of(size_t bytes) {
        if (bytes > size) {
            free(at);
            size = up(bytes, 4096);
            at = (char *)aligned_alloc(64, size);
        }
        return at;
    }
};

template <class T> struct Cut {  // pieces of it
    T *next;
    T *take(long n) {
        T *found = next;
        next += up(n, 64);
        return found;
    }
};

}  // namespace
