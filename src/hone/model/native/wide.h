// Vectors of numbers, the exponential function, and memory that a thread keeps: what all C++ files share.

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

static inline long pieces(long a, long b) { return (a + b - 1) / b; }  // of b, so that they hold a
static inline long up(long a, long b) { return pieces(a, b) * b; }
static inline long least(long a, long b) { return a < b ? a : b; }

// exp(x) / 2^n for x from -87 to 88; N: a float or a vector of them; the lowest bits of `shifted` are n
template <class N> static inline N significand(N x, N &shifted) {
    const float magic = 12582912.0f;  // added, it leaves a whole number in the lowest bits
    shifted = x * 1.44269504088896341f + magic;
    const N n = shifted - magic;
    const N r = x - n * 0.693359375f + n * 2.12194440e-4f;
    N y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    return y * r * r + r + 1.0f;
}

static inline double exponential(double x) { return exp(x); }

// without branches, so that loops over it become vectors
static inline float exponential(float x) {
    float shifted, power;
    const float y = significand(x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x, shifted);
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
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
