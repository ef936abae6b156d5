// A layer's functions between torch's products (between.h), a list of tokens a call, for models that stack.cpp does not
// compute, and the last norm of those that it does. Sums are taken in an order that depends on the number of threads and on nothing else.

#include <omp.h>

#include "between.h"

namespace {

constexpr long MANY = 1 << 14;  // numbers from which threads share them

struct Shape {
    Heads heads;
    int64_t rows, groups, threads;
    const Row *row;
    const int64_t *group;  // [groups + 1] where each group's rows begin
};

template <class T> void norm(const T *x, const T *gain, double eps, long N, long D, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * D >= MANY)
    for (long t = 0; t < N; t++) norm_one(x + t * D, gain, eps, D, y + t * D);
}

// plus: of each token `step` further on; parts: each thread's part of dgain, [threads, D], zero before
template <class T>
void norm_grad(const T *x, const T *gain, double eps, const T *dy, const T *plus, long step, long N, long D, T *dx,
               T *parts, long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (N * D >= MANY)
    for (long t = 0; t < N; t++)
        norm_grad_one(x + t * D, gain, eps, dy + t * D, plus + t * step, D, dx + t * D,
                      parts + omp_get_thread_num() * D);
}

template <class T>
void rotate(T *x, const T *cos, const T *sin, long N, long width, long heads, long E, double sign, long threads) {
#pragma omp parallel for num_threads(threads) if (N * width >= MANY)
    for (long t = 0; t < N; t++) rotate_one(x + t * width, cos + t * E, sin + t * E, heads, E, (T)sign);
}

template <class T> void gate(const T *x, long N, long M, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * M >= MANY)
    for (long t = 0; t < N; t++) gate_one(x + 2 * t * M, M, y + t * M);
}

template <class T> void gate_grad(const T *x, const T *dy, long N, long M, T *dx, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * M >= MANY)
    for (long t = 0; t < N; t++) gate_grad_one(x + 2 * t * M, dy + t * M, M, dx + 2 * t * M, y + t * M);
}

// out [U, H E] and the logarithms of the sums [U, H]
template <class T> void attend(const Shape *s, const T *qkv, T *out, T *log) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
    for (long i = 0; i < s->rows * s->heads.K; i++)
        Head<T>(s->heads, s->row[i / s->heads.K], i % s->heads.K).forward(qkv, out, log);
}

// dqkv [U, (H + 2 K) E], zero before; rows of a group share tokens, so that one thread computes them
template <class T> void attend_grad(const Shape *s, const T *qkv, const T *out, const T *log, const T *dout, T *dqkv) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
    for (long i = 0; i < s->groups * s->heads.K; i++)
        for (long r = s->group[i / s->heads.K]; r < s->group[i / s->heads.K + 1]; r++)
            Head<T>(s->heads, s->row[r], i % s->heads.K).backward(qkv, out, log, dout, dqkv);
}

}  // namespace

#define FUNCTIONS(T, NAME)                                                                                            \
    void hone_norm_##NAME(const T *x, const T *gain, double eps, int64_t N, int64_t D, T *y, int64_t threads) {       \
        norm<T>(x, gain, eps, N, D, y, threads);                                                                      \
    }                                                                                                                 \
    void hone_norm_grad_##NAME(const T *x, const T *gain, double eps, const T *dy, const T *plus, int64_t step,       \
                               int64_t N, int64_t D, T *dx, T *parts, int64_t threads) {                              \
        norm_grad<T>(x, gain, eps, dy, plus, step, N, D, dx, parts, threads);                                         \
    }                                                                                                                 \
    void hone_rotate_##NAME(T *x, const T *cos, const T *sin, int64_t N, int64_t width, int64_t heads, int64_t E,     \
                            double sign, int64_t threads) {                                                           \
        rotate<T>(x, cos, sin, N, width, heads, E, sign, threads);                                                    \
    }                                                                                                                 \
    void hone_gate_##NAME(const T *x, int64_t N, int64_t M, T *y, int64_t threads) { gate<T>(x, N, M, y, threads); }  \
    void hone_gate_grad_##NAME(const T *x, const T *dy, int64_t N, int64_t M, T *dx, T *y, int64_t threads) {         \
        gate_grad<T>(x, dy, N, M, dx, y, threads);                                                                    \
    }                                                                                                                 \
    void hone_attend_##NAME(const Shape *s, const T *qkv, T *out, T *log) { attend<T>(s, qkv, out, log); }            \
    void hone_attend_grad_##NAME(const Shape *s, const T *qkv, const T *out, const T *log, const T *dout, T *dqkv) {  \
        attend_grad<T>(s, qkv, out, log, dout, dqkv);                                                                 \
    }

extern "C" {
FUNCTIONS(float, float32)
FUNCTIONS(double, float64)
}
