// What stands between the products of a decoder layer, forward and backward, on a CPU: norm, rotation, gate, attention.
//
// Everything is a template of the number's type: float64 is for the tests, which compare it with plain layers.
// Rows of tokens lie in one list. A row's own tokens are neighbours in it; before them it may read the first tokens of
// another row of its group. Sums are taken in an order that depends on the number of threads and on nothing else.

#include <math.h>
#include <omp.h>
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

constexpr int QUERIES = 8;    // that are computed together
constexpr long MANY = 1 << 14;  // numbers from which threads share them

struct Row {
    int64_t own, count;      // its own tokens: the first, how many
    int64_t shared, common;  // those before them, of another row
    int64_t skip;            // how many of its own ask nothing
};

struct Shape {
    int64_t H, K, E, rows, groups, threads;
    const Row *row;
    const int64_t *group;  // [groups + 1] where each group's rows begin
};

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

thread_local Space space;

template <class T> struct Cut {  // pieces of it
    T *next;
    T *take(long n) {
        T *found = next;
        next += up(n, 64);
        return found;
    }
};

// ---- norm, rotation, gate --------------------------------------------------------------------------------------

template <class T> static inline T scale_of(const T *x, long D, double eps) {
    T squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long f = 0; f < D; f++) squares += x[f] * x[f];
    return (T)1 / sqrt(squares / (T)D + (T)eps);
}

// y = x gain / rms(x)
template <class T> void norm(const T *x, const T *gain, double eps, long N, long D, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * D >= MANY)
    for (long t = 0; t < N; t++) {
        const T s = scale_of(x + t * D, D, eps);
#pragma omp simd
        for (long f = 0; f < D; f++) y[t * D + f] = x[t * D + f] * s * gain[f];
    }
}

// dx + plus, and each thread's part of dgain: parts [threads, D], zero before
template <class T>
void norm_grad(const T *x, const T *gain, double eps, const T *dy, const T *plus, long N, long D, T *dx, T *parts,
               long threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (N * D >= MANY)
    for (long t = 0; t < N; t++) {
        const T *a = x + t * D, *g = dy + t * D, *p = plus + t * D;
        T *part = parts + omp_get_thread_num() * D, *to = dx + t * D, dot = 0;
        const T s = scale_of(a, D, eps);
#pragma omp simd reduction(+ : dot)
        for (long f = 0; f < D; f++) dot += g[f] * gain[f] * a[f];
        const T back = dot * s * s / (T)D;
#pragma omp simd
        for (long f = 0; f < D; f++) {
            part[f] += g[f] * a[f] * s;
            to[f] = (g[f] * gain[f] - a[f] * back) * s + p[f];
        }
    }
}

// the first heads of each token's numbers, (a, b) -> (a cos - b sin, b cos + a sin), a and b their halves
template <class T>
void rotate(T *x, const T *cos, const T *sin, long N, long width, long heads, long E, double sign, long threads) {
    const long half = E / 2;
    const T turn = (T)sign;
#pragma omp parallel for num_threads(threads) if (N * width >= MANY)
    for (long t = 0; t < N; t++)
        for (long h = 0; h < heads; h++) {
            T *a = x + t * width + h * E, *b = a + half;
            const T *c = cos + t * E, *s = sin + t * E;
#pragma omp simd
            for (long e = 0; e < half; e++) {
                const T one = a[e], other = b[e];
                a[e] = one * c[e] - other * s[e] * turn;
                b[e] = other * c[e + half] + one * s[e + half] * turn;
            }
        }
}

// y = silu(x[:, :M]) x[:, M:]
template <class T> void gate(const T *x, long N, long M, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * M >= MANY)
    for (long t = 0; t < N; t++) {
        const T *g = x + 2 * t * M, *u = g + M;
        T *to = y + t * M;
#pragma omp simd
        for (long f = 0; f < M; f++) to[f] = g[f] / ((T)1 + exponential(-g[f])) * u[f];
    }
}

// dx of gate's dy, and its y again
template <class T> void gate_grad(const T *x, const T *dy, long N, long M, T *dx, T *y, long threads) {
#pragma omp parallel for num_threads(threads) if (N * M >= MANY)
    for (long t = 0; t < N; t++) {
        const T *g = x + 2 * t * M, *u = g + M, *d = dy + t * M;
        T *dg = dx + 2 * t * M, *du = dg + M, *to = y + t * M;
#pragma omp simd
        for (long f = 0; f < M; f++) {
            const T s = (T)1 / ((T)1 + exponential(-g[f])), silu = g[f] * s;
            to[f] = silu * u[f];
            du[f] = d[f] * silu;
            dg[f] = d[f] * u[f] * s * ((T)1 + g[f] - silu);
        }
    }
}

// ---- attention -------------------------------------------------------------------------------------------------

template <class T> struct Head {  // one key-value head of a row, and the query heads that share it
    typedef typename Wide<T>::Vec Vec;
    static constexpr int L = Wide<T>::L;

    const Shape &s;
    const Row &row;
    long head;
    long E, wide, keys, width;  // wide: E in whole vectors; width: numbers of a token
    T scale;

    Head(const Shape &shape, const Row &r, long h)
        : s(shape), row(r), head(h), E(shape.E), wide(up(shape.E, L)), keys(r.common + r.count),
          width((shape.H + 2 * shape.K) * shape.E), scale((T)(1.0 / sqrt((double)shape.E))) {}

    long token(long key) const { return key < row.common ? row.shared + key : row.own + key - row.common; }

    // [keys, wide] and turned, by L keys [E][L]
    void gather(const T *from, T *lines, T *turned) const {
        const long all = up(keys, L);
        memset(lines, 0, sizeof(T) * all * wide);
        for (long k = 0; k < keys; k++) memcpy(lines + k * wide, from + token(k) * width, sizeof(T) * E);
        for (long b = 0; b < all; b += L)
            for (long e = 0; e < E; e++)
                for (int l = 0; l < L; l++) turned[b * E + e * L + l] = lines[(b + l) * wide + e];
    }

    // QUERIES lines of numbers after each other; lines that are missing are zero
    void lines(const T *from, long step, long n, T *to) const {
        memset(to, 0, sizeof(T) * QUERIES * wide);
        for (long i = 0; i < n; i++) memcpy(to + i * wide, from + i * step, sizeof(T) * E);
    }

    // out[i][k] = a[i] . b[k] for keys in whole vectors; room: how far the lines of out are apart
    void against(const T *a, const T *turned, long seen, long room, T *out) const {
        for (long b = 0; b < seen; b += L) {
            Vec acc[QUERIES] = {};
            const T *kt = turned + b * E;
            for (long e = 0; e < E; e++) {
                const Vec here = load(kt + e * L);
                for (int i = 0; i < QUERIES; i++) acc[i] += a[i * wide + e] * here;
            }
            for (int i = 0; i < QUERIES; i++) store(out + i * room + b, acc[i]);
        }
    }

    // out[i] = sum over keys of weight[i][k] line[k]
    void mixed(const T *weight, long room, const T *line, long seen, T *out) const {
        for (long v = 0; v < wide; v += L) {
            Vec acc[QUERIES] = {};
            for (long k = 0; k < seen; k++) {
                const Vec here = load(line + k * wide + v);
                for (int i = 0; i < QUERIES; i++) acc[i] += weight[i * room + k] * here;
            }
            for (int i = 0; i < QUERIES; i++) store(out + i * wide + v, acc[i]);
        }
    }

    // to[k] += sum over queries of weight[i][k] a[i]
    void spread(const T *weight, long room, const T *a, long seen, T *to) const {
        for (long v = 0; v < wide; v += L) {
            Vec given[QUERIES];
            for (int i = 0; i < QUERIES; i++) given[i] = load(a + i * wide + v);
            for (long k = 0; k < seen; k++) {
                Vec acc = load(to + k * wide + v);
                for (int i = 0; i < QUERIES; i++) acc += weight[i * room + k] * given[i];
                store(to + k * wide + v, acc);
            }
        }
    }

    static long room_of(long keys) { return up(keys, 16) + 16; }

    void forward(const T *qkv, T *out, T *log) const {
        const long room = room_of(keys), G = s.H / s.K;
        Cut<T> cut = {(T *)space.of(sizeof(T) * (2 * room * wide + 4096 + QUERIES * (room + 2 * wide + 192)))};
        T *value = cut.take(room * wide), *turned = cut.take(room * wide), *q = cut.take(QUERIES * wide);
        T *score = cut.take(QUERIES * room), *found = cut.take(QUERIES * wide);
        gather(qkv + (s.H + head) * E, value, turned);
        // keys are needed turned and values as lines: the second gather overwrites the lines alone
        for (long k = 0; k < keys; k++)
            memcpy(value + k * wide, qkv + token(k) * width + (s.H + s.K + head) * E, sizeof(T) * E);
        for (long g = head * G; g < (head + 1) * G; g++)
            for (long first = row.skip; first < row.count; first += QUERIES) {
                const long n = least(QUERIES, row.count - first), seen = row.common + first + n;
                lines(qkv + (row.own + first) * width + g * E, width, n, q);
                against(q, turned, seen, room, score);
                T total[QUERIES] = {};
                for (long i = 0; i < n; i++)
                    total[i] = weigh(score + i * room, row.common + first + i + 1, up(seen, L),
                                     log + (row.own + first + i) * s.H + g);
                mixed(score, room, value, seen, found);
                for (long i = 0; i < n; i++) {
                    T *to = out + (row.own + first + i) * s.H * E + g * E;
                    for (long e = 0; e < E; e++) to[e] = found[i * wide + e] / total[i];
                }
            }
    }

    // scores become exp(scale score - greatest), 0 for keys that are not seen; their sum, and its logarithm
    T weigh(T *score, long seen, long end, T *log_of) const {
        T top = score[0], total = 0;
#pragma omp simd reduction(max : top)
        for (long k = 0; k < seen; k++) top = score[k] > top ? score[k] : top;
#pragma omp simd reduction(+ : total)
        for (long k = 0; k < seen; k++) total += score[k] = exponential((score[k] - top) * scale);
        for (long k = seen; k < end; k++) score[k] = 0;
        *log_of = top * scale + (T)log(total);
        return total;
    }

    // dqkv of the row's queries, and added to it that of its keys and values; out: what forward gave
    void backward(const T *qkv, const T *out, const T *log, const T *dout, T *dqkv) const {
        const long room = room_of(keys), G = s.H / s.K;
        Cut<T> cut = {(T *)space.of(sizeof(T) * (6 * room * wide + 4096 + QUERIES * (2 * room + 3 * wide + 320)))};
        T *key = cut.take(room * wide), *key_turned = cut.take(room * wide), *value = cut.take(room * wide);
        T *value_turned = cut.take(room * wide), *dkey = cut.take(room * wide), *dvalue = cut.take(room * wide);
        T *q = cut.take(QUERIES * wide), *d = cut.take(QUERIES * wide), *found = cut.take(QUERIES * wide);
        T *weight = cut.take(QUERIES * room), *slope = cut.take(QUERIES * room);
        gather(qkv + (s.H + head) * E, key, key_turned);
        gather(qkv + (s.H + s.K + head) * E, value, value_turned);
        memset(dkey, 0, sizeof(T) * keys * wide);
        memset(dvalue, 0, sizeof(T) * keys * wide);
        for (long g = head * G; g < (head + 1) * G; g++)
            for (long first = row.skip; first < row.count; first += QUERIES) {
                const long n = least(QUERIES, row.count - first), seen = row.common + first + n, at = row.own + first;
                lines(qkv + at * width + g * E, width, n, q);
                lines(dout + at * s.H * E + g * E, s.H * E, n, d);
                against(q, key_turned, seen, room, weight);
                against(d, value_turned, seen, room, slope);
                for (long i = 0; i < QUERIES; i++) {
                    const long t = at + least(i, n - 1);
                    const T *o = out + t * s.H * E + g * E;
                    T dot = 0;
#pragma omp simd reduction(+ : dot)
                    for (long e = 0; e < E; e++) dot += o[e] * d[i * wide + e];
                    tilt(weight + i * room, slope + i * room, i < n ? row.common + first + i + 1 : 0, up(seen, L),
                         log[t * s.H + g], dot);
                }
                mixed(slope, room, key, seen, found);
                for (long i = 0; i < n; i++) memcpy(dqkv + (at + i) * width + g * E, found + i * wide, sizeof(T) * E);
                spread(weight, room, d, seen, dvalue);
                spread(slope, room, q, seen, dkey);
            }
        for (long k = 0; k < keys; k++) {
            T *to = dqkv + token(k) * width + (s.H + head) * E, *also = to + s.K * E;
            for (long e = 0; e < E; e++) to[e] += dkey[k * wide + e], also[e] += dvalue[k * wide + e];
        }
    }

    // scores become weights p, and what they are multiplied with their slope p (slope - dot) scale
    void tilt(T *weight, T *slope, long seen, long end, T log, T dot) const {
#pragma omp simd
        for (long k = 0; k < seen; k++) {
            const T p = exponential(weight[k] * scale - log);
            weight[k] = p;
            slope[k] = p * (slope[k] - dot) * scale;
        }
        for (long k = seen; k < end; k++) weight[k] = slope[k] = 0;
    }
};

// out [U, H E] and the logarithms of the sums [U, H]
template <class T> void attend(const Shape *s, const T *qkv, T *out, T *log) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
    for (long i = 0; i < s->rows * s->K; i++) Head<T>(*s, s->row[i / s->K], i % s->K).forward(qkv, out, log);
}

// dqkv [U, (H + 2 K) E], zero before; rows of a group share tokens, so that one thread computes them
template <class T> void attend_grad(const Shape *s, const T *qkv, const T *out, const T *log, const T *dout, T *dqkv) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
    for (long i = 0; i < s->groups * s->K; i++)
        for (long r = s->group[i / s->K]; r < s->group[i / s->K + 1]; r++)
            Head<T>(*s, s->row[r], i % s->K).backward(qkv, out, log, dout, dqkv);
}

}  // namespace

#define FUNCTIONS(T, NAME)                                                                                            \
    void hone_norm_##NAME(const T *x, const T *gain, double eps, int64_t N, int64_t D, T *y, int64_t threads) {       \
        norm<T>(x, gain, eps, N, D, y, threads);                                                                      \
    }                                                                                                                 \
    void hone_norm_grad_##NAME(const T *x, const T *gain, double eps, const T *dy, const T *plus, int64_t N,          \
                               int64_t D, T *dx, T *parts, int64_t threads) {                                         \
        norm_grad<T>(x, gain, eps, dy, plus, N, D, dx, parts, threads);                                               \
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
