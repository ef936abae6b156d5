// Vectors of numbers, the exponential function, and memory that a thread keeps: what all C++ files share.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <type_traits>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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
    typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Index;
    typedef Index Whole __attribute__((vector_size(BYTES)));
    typedef T Vec __attribute__((vector_size(BYTES)));
    typedef T Loose __attribute__((vector_size(BYTES), aligned(sizeof(T))));
};

template <class T> static inline typename Wide<T>::Vec load(const T *p) { return *(const typename Wide<T>::Loose *)p; }
template <class T> static inline void store(T *p, typename Wide<T>::Vec x) { *(typename Wide<T>::Loose *)p = x; }

// a b + c, rounded once where the processor can. It is said in so many words because compilers fuse some sums and
// leave others, by the shape of a loop: library.py has them fuse nothing, and bits do not depend on a tile's shape.
static inline float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static inline double fused(double a, double b, double c) {
#if defined(__FP_FAST_FMA)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__) && defined(__FMA__)
#define FUSED(a, b, c, X86, ARM) _mm512_fmadd_##X86(a, b, c)
#elif defined(__AVX2__) && defined(__FMA__)
#define FUSED(a, b, c, X86, ARM) _mm256_fmadd_##X86(a, b, c)
#elif defined(__FMA__)
#define FUSED(a, b, c, X86, ARM) _mm_fmadd_##X86(a, b, c)
#elif defined(__aarch64__)
#define FUSED(a, b, c, X86, ARM) vfmaq_##ARM(c, a, b)
#else
#define FUSED(a, b, c, X86, ARM) (a * b + c)
#endif

typedef Wide<float>::Vec Floats;
typedef Wide<double>::Vec Doubles;
static inline Floats fused(Floats a, Floats b, Floats c) { return (Floats)FUSED(a, b, c, ps, f32); }
static inline Doubles fused(Doubles a, Doubles b, Doubles c) { return (Doubles)FUSED(a, b, c, pd, f64); }
#undef FUSED

// a number in every lane: what is taken from it is nothing, and costs nothing
template <class N> static inline N each(float x) { return x - N{}; }

static inline Floats fused(float a, Floats b, Floats c) { return fused(a - Floats{}, b, c); }
static inline Doubles fused(double a, Doubles b, Doubles c) { return fused(a - Doubles{}, b, c); }

static inline long pieces(long a, long b) { return (a + b - 1) / b; }  // of b, so that they hold a
static inline long up(long a, long b) { return pieces(a, b) * b; }
static inline long least(long a, long b) { return a < b ? a : b; }

// exp(x) / 2^n for x from -87 to 88; N: a float or a vector of them; the lowest bits of `shifted` are n
template <class N> static inline N significand(N x, N &shifted) {
    const float magic = 12582912.0f;  // added, it leaves a whole number in the lowest bits
    shifted = fused(x, each<N>(1.44269504088896341f), each<N>(magic));
    const N n = shifted - magic;
    const N r = fused(n, each<N>(2.12194440e-4f), fused(n, each<N>(-0.693359375f), x));
    N y = fused(r, each<N>(1.9875691500e-4f), each<N>(1.3981999507e-3f));
    y = fused(y, r, each<N>(8.3334519073e-3f));
    y = fused(y, r, each<N>(4.1665795894e-2f));
    y = fused(y, r, each<N>(1.6666665459e-1f));
    y = fused(y, r, each<N>(5.0000001201e-1f));
    return fused(y * r, r, r) + 1.0f;
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

// ---- across the lanes of a vector ------------------------------------------------------------------------------

// sums of W neighbouring lanes become sums of 2 W: those of a and of b in turn
template <class T, int W>
static inline typename Wide<T>::Vec joined(typename Wide<T>::Vec a, typename Wide<T>::Vec b) {
    constexpr int L = Wide<T>::L;
    typename Wide<T>::Whole low, high;
    for (int l = 0; l < L; l++) {
        low[l] = l & W ? L + l - W : l;
        high[l] = l & W ? L + l : l + W;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// all lanes, neighbours first: what a row's numbers are added up to has these bits wherever it is computed
template <class T> static inline T sum_of(typename Wide<T>::Vec x) {
    constexpr int L = Wide<T>::L;
    x = joined<T, 1>(x, x);
    if constexpr (L > 2) x = joined<T, 2>(x, x);
    if constexpr (L > 4) x = joined<T, 4>(x, x);
    if constexpr (L > 8) x = joined<T, 8>(x, x);
    return x[0];
}

// a square of numbers becomes its own mirror image: blocks beside the diagonal change places, ever larger ones
template <class T> static inline void turn(typename Wide<T>::Vec *x) {
    constexpr int L = Wide<T>::L;
    typename Wide<T>::Whole low, high;
#pragma GCC unroll 4
    for (int step = 1; step < L; step *= 2) {
        for (int l = 0; l < L; l++) low[l] = l & step ? L + l - step : l, high[l] = l & step ? L + l : l + step;
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) {
            if (i & step) continue;
            const typename Wide<T>::Vec a = x[i], b = x[i + step];
            x[i] = __builtin_shuffle(a, b, low);
            x[i + step] = __builtin_shuffle(a, b, high);
        }
    }
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
