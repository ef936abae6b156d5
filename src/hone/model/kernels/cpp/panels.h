// Products of rows and weights that lie in panels, and of rows with rows: sums stay in registers, in the order of the depth.

#pragma once

#include <string.h>

#include <type_traits>

#include "wide.h"

namespace {

constexpr int SHORT = 4, TALL = BYTES == 32 ? SHORT : 12;  // rows of a tile, whose sums stay in registers
constexpr int ACROSS = 2;                                  // vectors of a tile

template <class T> constexpr long panel() { return ACROSS * Wide<T>::L; }  // outputs of a product that lie together

// to = from + a b, a: [R, depth], or [depth, R] where it lies ALONG the depth; from: null for zero
template <class T, int R, bool ALONG>
static inline void tile(const T *a, long a_step, const T *b, long b_step, long depth, const T *from, T *to, long step) {
    typedef typename Wide<T>::Vec Vec;
    constexpr int L = Wide<T>::L;
    Vec acc[R][ACROSS] = {}, here[ACROSS];
    if (from)
#pragma GCC unroll 16
        for (int j = 0; j < R; j++)
#pragma GCC unroll 4
            for (int v = 0; v < ACROSS; v++) acc[j][v] = load(from + j * step + v * L);
    for (long k = 0; k < depth; k++) {
#pragma GCC unroll 4
        for (int v = 0; v < ACROSS; v++) here[v] = load(b + k * b_step + v * L);
#pragma GCC unroll 16
        for (int j = 0; j < R; j++)
#pragma GCC unroll 4
            for (int v = 0; v < ACROSS; v++)
                acc[j][v] = fused(ALONG ? a[k * a_step + j] : a[j * a_step + k], here[v], acc[j][v]);
    }
#pragma GCC unroll 16
    for (int j = 0; j < R; j++)
#pragma GCC unroll 4
        for (int v = 0; v < ACROSS; v++) store(to + j * step + v * L, acc[j][v]);
}

// y [n, out] = a [n, depth] b + plus, b in panels
template <class T> void product(const T *a, long n, long depth, const T *b, long out, T *y, const T *plus) {
    constexpr long P = panel<T>();
    for (long o = 0; o < out; o += P) {
        const T *there = b + o * depth;
        const auto at = [&](auto rows, long t) {
            const T *from = plus ? plus + t * out + o : nullptr;
            tile<T, rows, false>(a + t * depth, depth, there, P, depth, from, y + t * out + o, out);
            return t + rows;
        };
        long t = 0;
        while (t + TALL <= n) t = at(std::integral_constant<int, TALL>(), t);
        while (t < n) t = at(std::integral_constant<int, SHORT>(), t);
    }
}

// dw [out, in] += dy [n, out]^T x [n, in], its rows from first to last: as many as tiles of TALL and SHORT make
template <class T> void outer(const T *dy, long out, const T *x, long in, long n, T *dw, long first, long last) {
    const auto at = [&](auto rows, long o) {
        for (long i = 0; i < in; i += panel<T>()) {
            T *to = dw + o * in + i;
            tile<T, rows, true>(dy + o, out, x + i, in, n, to, to, in);
        }
        return o + rows;
    };
    long o = first;
    while (o + TALL <= last) o = at(std::integral_constant<int, TALL>(), o);
    while (o < last) o = at(std::integral_constant<int, SHORT>(), o);
}

template <class T> void outer(const T *dy, long out, const T *x, long in, long n, T *dw) {
    outer<T>(dy, out, x, in, n, dw, 0, out);
}

// w [out, in] as panels of its outputs, [out / panel][in][panel]
template <class T> void turned(const T *w, long out, long in, T *to) {
    constexpr long P = panel<T>(), L = Wide<T>::L;
    for (long p = 0; p < out; p += P)
        for (long k = 0; k < in; k += L)
            for (long c = 0; c < P; c += L) {
                typename Wide<T>::Vec square[L];
                for (long l = 0; l < L; l++) square[l] = load(w + (p + c + l) * in + k);
                turn<T>(square);
                for (long l = 0; l < L; l++) store(to + p * in + (k + l) * P + c, square[l]);
            }
}

// w [out, in] as panels of its inputs, [in / panel][out][panel]
template <class T> void cut(const T *w, long out, long in, T *to) {
    constexpr long P = panel<T>();
    for (long p = 0; p < in; p += P)
        for (long o = 0; o < out; o++) memcpy(to + p * out + o * P, w + o * in + p, sizeof(T) * P);
}

}  // namespace
