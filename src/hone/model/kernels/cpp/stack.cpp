// All layers of a small decoder over a list of tokens, forward and backward, with products of its own.
//
// Rows that share no tokens depend on each other nowhere, so a thread takes bundles of rows through all layers by
// itself: no thread waits for another, and what a layer leaves is in the cache when the next one reads it.
// Each share of the bundles adds up gradients of its own, and these are added in order: the sums depend on the number
// of threads and on nothing else.
//
// What the first layer's norm and product make of a token depends on its word alone. Where tokens are many times as many
// as words, it is computed once a word, and so is its gradient.
//
// Tokens are numbered anew, bundle by bundle, each from a multiple of SHORT on. Products compute the numbers between a
// bundle's last token and the next multiple too; nobody reads them.

#include <omp.h>

#include "between.h"
#include "panels.h"

namespace {

template <class T> struct Layer {
    const T *before, *qkv, *o, *after, *gate_up, *down;
};

template <class T> struct Stack {
    int64_t layers, D, M;
    Heads heads;
    double eps;
    int64_t threads, bundles;
    const Layer<T> *layer;
    const Row *row, *ending;  // of all layers but the last, of the last; tokens are counted from the bundle's first
    const int64_t *rows;      // [bundles + 1] where a bundle's rows begin
    const int64_t *first;     // [bundles + 1] its first token
    const int64_t *count;     // [bundles] how many it has
    const int64_t *share;     // [threads + 1] where the bundles begin that a thread takes back
    const int64_t *order;     // where a token is in the list
    const T *cos, *sin;       // [tokens of the list, E]
    int64_t words;
    const int64_t *id;   // [tokens of the list] their words, or null: the stream is given
    const T *embedding;  // [words, D]

    long E() const { return heads.E; }
    long mixed() const { return heads.H * heads.E; }
    long width() const { return (heads.H + 2 * heads.K) * heads.E; }
    long weights() const { return D * (width() + mixed() + 3 * M); }  // of a layer's products
    long trained() const { return weights() + 2 * D; }                // of a layer
    long kept() const { return 2 * D + width() + mixed() + heads.H + 2 * M; }  // numbers of a token and layer
    long tiled() const { return up(words, TALL); }
    long given() const { return tiled() * (width() + D); }  // gradients of what words give to their tokens
};

// ---- weights ---------------------------------------------------------------------------------------------------

template <class T> struct Weights {  // of a layer's four products, in one piece of memory
    T *qkv, *o, *gate_up, *down;
    Weights(const Stack<T> &s, T *at)
        : qkv(at), o(qkv + s.D * s.width()), gate_up(o + s.D * s.mixed()), down(gate_up + 2 * s.D * s.M) {}
};

// all weights in panels; BACK: for gradients of what they read
template <class T, bool BACK> void lay(const Stack<T> &s, T *panels) {
#pragma omp for schedule(static)
    for (long i = 0; i < 4 * s.layers; i++) {
        const Layer<T> &from = s.layer[i / 4];
        const Weights<T> to(s, panels + i / 4 * s.weights());
        const auto put = BACK ? cut<T> : turned<T>;
        switch (i % 4) {
        case 0: put(from.qkv, s.width(), s.D, to.qkv); break;
        case 1: put(from.o, s.D, s.mixed(), to.o); break;
        case 2: put(from.gate_up, 2 * s.M, s.D, to.gate_up); break;
        default: put(from.down, s.D, s.M, to.down);
        }
    }
}

// ---- words -----------------------------------------------------------------------------------------------------

thread_local Space own;  // of a bundle, or of some words

// first [words, width]: the first layer's queries, keys and values, before they are turned
template <class T> void ask(const Stack<T> &s, T *panels, T *first) {
#pragma omp for schedule(static)
    for (long v = 0; v < s.words; v += TALL) {
        T *normed = (T *)own.of(sizeof(T) * TALL * s.D);
        const long n = least(TALL, s.words - v);
        memset(normed, 0, sizeof(T) * TALL * s.D);
        for (long i = 0; i < n; i++)
            norm_one(s.embedding + (v + i) * s.D, s.layer[0].before, s.eps, s.D, normed + i * s.D);
        product<T>(normed, n, s.D, Weights<T>(s, panels).qkv, s.width(), first + v * s.width(), nullptr);
    }
}

// The gradients of the words and of the first layer's norm and product. asked: what tokens gave back to their words, for
// queries, keys and values [tiled, width], and for the stream [tiled, D]; room: [2, tiled, D]. A word that got nothing
// back gives nothing, whatever its numbers are.
template <class T> void answer(const Stack<T> &s, T *panels, const T *asked, T *room, T *dwords, T *grad) {
    const T *stream = asked + s.tiled() * s.width();
    T *normed = room, *dnormed = room + s.tiled() * s.D;
    const Layer<T> &layer = s.layer[0];
    const auto idle = [&](long v) {
        for (long f = 0; f < s.width(); f++)
            if (asked[v * s.width() + f] != 0) return false;
        for (long f = 0; f < s.D; f++)
            if (stream[v * s.D + f] != 0) return false;
        return true;
    };
#pragma omp for schedule(static)
    for (long v = 0; v < s.words; v += TALL) {
        const long n = least(TALL, s.words - v);
        product<T>(asked + v * s.width(), n, s.width(), Weights<T>(s, panels).qkv, s.D, dnormed + v * s.D, nullptr);
        for (long i = v; i < v + n; i++) {
            if (idle(i))
                memset(normed + i * s.D, 0, sizeof(T) * s.D);
            else
                norm_one(s.embedding + i * s.D, layer.before, s.eps, s.D, normed + i * s.D);
        }
    }
#pragma omp for schedule(static)
    for (long o = 0; o < s.width(); o += 4 * TALL)
        outer<T>(asked, s.width(), normed, s.D, s.words, Weights<T>(s, grad + 2 * s.D).qkv, o,
                 least(s.width(), o + 4 * TALL));
#pragma omp single
    for (long v = 0; v < s.words; v++) {
        if (idle(v))
            memset(dwords + v * s.D, 0, sizeof(T) * s.D);
        else
            norm_grad_one(s.embedding + v * s.D, layer.before, s.eps, dnormed + v * s.D, stream + v * s.D, s.D,
                          dwords + v * s.D, grad);
    }
}

// ---- a bundle of rows ------------------------------------------------------------------------------------------

template <class T> struct Bundle {
    const Stack<T> &s;
    long b, n, room;  // its number, how many tokens, in whole tiles
    const int64_t *order;
    long D, M;

    Bundle(const Stack<T> &stack, long number)
        : s(stack), b(number), n(stack.count[b]), room(stack.first[b + 1] - stack.first[b]),
          order(stack.order + stack.first[b]), D(stack.D), M(stack.M) {}

    struct Kept {  // of a layer, for the way back
        T *x, *qkv, *mixed, *stream, *both, *log;
    };

    Kept kept(T *at) const {
        T *qkv = at + room * D, *mixed = qkv + room * s.width(), *stream = mixed + room * s.mixed();
        T *both = stream + room * D, *log = both + room * 2 * M;
        return {at, qkv, mixed, stream, both, log};
    }

    // the tokens whose answers are asked for in the last layer; all: none is left out
    long asked(int64_t *to) const {
        long m = 0;
        for (long r = s.rows[b]; r < s.rows[b + 1]; r++)
            for (long t = s.ending[r].skip; t < s.ending[r].count; t++) to[m++] = s.ending[r].own + t;
        return m;
    }

    static void pick(const T *from, const int64_t *which, long m, long width, T *to) {
        for (long i = 0; i < m; i++) memcpy(to + i * width, from + which[i] * width, sizeof(T) * width);
    }

    void norm(const T *x, const T *gain, long m, T *y) const {
        for (long t = 0; t < m; t++) norm_one(x + t * D, gain, s.eps, D, y + t * D);
    }

    void turn(T *qkv, T sign) const {
        for (long t = 0; t < n; t++)
            rotate_one(qkv + t * s.width(), s.cos + order[t] * s.E(), s.sin + order[t] * s.E(),
                       s.heads.H + s.heads.K, s.E(), sign);
    }

    const Row *rows(bool last) const { return last ? s.ending : s.row; }

    const T *word(long t) const { return s.embedding + s.id[order[t]] * D; }

    // out: of the tokens asked for, others zero; keep: [layers][room][kept], or null; first: what `ask` found, or null
    void forward(const T *in, T *out, const T *panels, T *keep, const T *first) const {
        const long each = room * s.kept();
        Cut<T> cut = {(T *)own.of(sizeof(T) * (each + room * (2 * D + M + s.mixed() + 2) + 6 * 64))};
        T *scratch = cut.take(each), *normed = cut.take(room * D), *gated = cut.take(room * M);
        T *seen = cut.take(room * s.mixed()), *base = cut.take(room * D);
        int64_t *which = (int64_t *)cut.take(2 * room);
        const long answers = asked(which);
        Kept now = kept(keep ? keep : scratch);
        for (long t = 0; t < n; t++) memcpy(now.x + t * D, s.id ? word(t) : in + order[t] * D, sizeof(T) * D);
        for (long l = 0; l < s.layers; l++) {
            const bool last = l == s.layers - 1, some = last && answers < n;
            const long m = some ? answers : n;
            const Layer<T> &layer = s.layer[l];
            const Weights<T> w(s, (T *)panels + l * s.weights());
            if (l || !s.id) {
                norm(now.x, layer.before, n, normed);
                product<T>(normed, n, D, w.qkv, s.width(), now.qkv, nullptr);
            } else
                for (long t = 0; t < n; t++)
                    memcpy(now.qkv + t * s.width(), first + s.id[order[t]] * s.width(), sizeof(T) * s.width());
            turn(now.qkv, 1);
            for (long r = s.rows[b]; r < s.rows[b + 1]; r++)
                for (long h = 0; h < s.heads.K; h++)
                    Head<T>(s.heads, rows(last)[r], h).forward(now.qkv, now.mixed, keep ? now.log : nullptr);
            if (some) pick(now.mixed, which, m, s.mixed(), seen), pick(now.x, which, m, D, base);
            product<T>(some ? seen : now.mixed, m, s.mixed(), w.o, D, now.stream, some ? base : now.x);
            norm(now.stream, layer.after, m, normed);
            product<T>(normed, m, D, w.gate_up, 2 * M, now.both, nullptr);
            for (long t = 0; t < m; t++) gate_one(now.both + 2 * t * M, M, gated + t * M);
            const Kept next = kept(keep && !last ? keep + (l + 1) * each : scratch);
            product<T>(gated, m, M, w.down, D, last ? normed : next.x, now.stream);
            now = last ? now : next;
        }
        for (long t = 0; t < n && answers < n; t++) memset(out + order[t] * D, 0, sizeof(T) * D);
        for (long i = 0; i < answers; i++) memcpy(out + order[which[i]] * D, normed + i * D, sizeof(T) * D);
    }

    // dx of forward's dy, and the gradients of the weights added to `grad` [layers][trained]; words: where tokens are
    // words, what they give back is added here instead (see `answer`)
    void backward(const T *dy, T *dx, const T *panels, T *keep, T *grad, T *words) const {
        Cut<T> cut = {(T *)own.of(sizeof(T) * (room * (5 * D + 4 * M + 2 * s.mixed() + s.width() + 2) + 12 * 64))};
        T *d = cut.take(room * D), *normed = cut.take(room * D), *dnormed = cut.take(room * D);
        T *dstream = cut.take(room * D), *wide = cut.take(room * D), *dh = cut.take(room * M);
        T *gated = cut.take(room * M), *dboth = cut.take(room * 2 * M), *seen = cut.take(room * s.mixed());
        T *dmixed = cut.take(room * s.mixed()), *dqkv = cut.take(room * s.width());
        int64_t *which = (int64_t *)cut.take(2 * room);
        const long answers = asked(which);
        for (long i = 0; i < answers; i++) memcpy(d + i * D, dy + order[which[i]] * D, sizeof(T) * D);
        for (long l = s.layers - 1; l >= 0; l--) {
            const bool last = l == s.layers - 1, some = last && answers < n;
            const long m = some ? answers : n;
            const Layer<T> &layer = s.layer[l];
            const Kept was = kept(keep + l * room * s.kept());
            const Weights<T> w(s, (T *)panels + l * s.weights()), dw(s, grad + l * s.trained() + 2 * D);
            T *dbefore = grad + l * s.trained(), *dafter = dbefore + D;

            product<T>(d, m, D, w.down, M, dh, nullptr);
            for (long t = 0; t < m; t++)
                gate_grad_one(was.both + 2 * t * M, dh + t * M, M, dboth + 2 * t * M, gated + t * M);
            outer<T>(d, D, gated, M, m, dw.down);
            product<T>(dboth, m, 2 * M, w.gate_up, D, dnormed, nullptr);
            norm(was.stream, layer.after, m, normed);
            outer<T>(dboth, 2 * M, normed, D, m, dw.gate_up);
            for (long t = 0; t < m; t++)
                norm_grad_one(was.stream + t * D, layer.after, s.eps, dnormed + t * D, d + t * D, D, dstream + t * D,
                              dafter);
            product<T>(dstream, m, D, w.o, s.mixed(), some ? seen : dmixed, nullptr);
            if (some) {  // rows of the attention are whole again
                memset(dmixed, 0, sizeof(T) * n * s.mixed());
                memset(wide, 0, sizeof(T) * n * D);
                for (long i = 0; i < m; i++) {
                    memcpy(dmixed + which[i] * s.mixed(), seen + i * s.mixed(), sizeof(T) * s.mixed());
                    memcpy(wide + which[i] * D, dstream + i * D, sizeof(T) * D);
                }
                pick(was.mixed, which, m, s.mixed(), seen);
            }
            outer<T>(dstream, D, some ? seen : was.mixed, s.mixed(), m, dw.o);
            memset(dqkv, 0, sizeof(T) * n * s.width());
            for (long r = s.rows[b]; r < s.rows[b + 1]; r++)
                for (long h = 0; h < s.heads.K; h++)
                    Head<T>(s.heads, rows(last)[r], h).backward(was.qkv, was.mixed, was.log, dmixed, dqkv);
            turn(dqkv, -1);
            const T *plus = some ? wide : dstream;
            if (!l && s.id) return give_back(dqkv, plus, words);
            product<T>(dqkv, n, s.width(), w.qkv, D, dnormed, nullptr);
            norm(was.x, layer.before, n, normed);
            outer<T>(dqkv, s.width(), normed, D, n, dw.qkv);
            for (long t = 0; t < n; t++)
                norm_grad_one(was.x + t * D, layer.before, s.eps, dnormed + t * D, plus + t * D, D, d + t * D, dbefore);
        }
        for (long t = 0; t < n; t++) memcpy(dx + order[t] * D, d + t * D, sizeof(T) * D);
    }

    void give_back(const T *dqkv, const T *dstream, T *words) const {
        constexpr long L = Wide<T>::L;
        const auto add = [](const T *from, long width, T *to) {
            for (long f = 0; f < width; f += L) store(to + f, load(to + f) + load(from + f));
        };
        for (long t = 0; t < n; t++) {
            const long v = s.id[order[t]];
            add(dqkv + t * s.width(), s.width(), words + v * s.width());
            add(dstream + t * D, D, words + s.tiled() * s.width() + v * D);
        }
    }
};

// panels: [layers][weights]; kept: as many numbers as all tokens in whole tiles keep, or null; first: [tiled][width]
template <class T> void forward(const Stack<T> &s, const T *in, T *out, T *panels, T *kept, T *first) {
#pragma omp parallel num_threads(s.threads)
    {
        lay<T, false>(s, panels);
        if (s.id) ask<T>(s, panels, first);
#pragma omp for schedule(dynamic, 1)  // nothing is added up here: any thread may take any bundle
        for (long b = 0; b < s.bundles; b++) {
            T *keep = kept ? kept + s.first[b] * s.layers * s.kept() : nullptr;
            Bundle<T>(s, b).forward(in, out, panels, keep, first);
        }
    }
}

// dx: of the stream, or of the words; grad: [layers][trained]; parts: of each share but the first the same, then of each
// share what tokens give back to words, and the room of `answer`
template <class T>
void backward(const Stack<T> &s, const T *dy, T *dx, T *panels, T *kept, T *grad, T *parts) {
    const long all = s.layers * s.trained(), given = s.id ? s.given() : 0;
    T *asked = parts + (s.threads - 1) * all;
#pragma omp parallel num_threads(s.threads)
    {
        lay<T, true>(s, panels);
        for (long i = omp_get_thread_num(); i < s.threads; i += omp_get_num_threads()) {
            T *mine = i ? parts + (i - 1) * all : grad, *back = asked + i * given;
            memset(mine, 0, sizeof(T) * all);
            memset(back, 0, sizeof(T) * given);
            for (long b = s.share[i]; b < s.share[i + 1]; b++)
                Bundle<T>(s, b).backward(dy, dx, panels, kept + s.first[b] * s.layers * s.kept(), mine, back);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long f = 0; f < all; f++)
            for (long i = 1; i < s.threads; i++) grad[f] += parts[(i - 1) * all + f];
#pragma omp for schedule(static)
        for (long f = 0; f < given; f++)
            for (long i = 1; i < s.threads; i++) asked[f] += asked[i * given + f];
        if (s.id) answer<T>(s, panels, asked, asked + s.threads * given, dx, grad);
    }
}

}  // namespace

extern "C" {
int hone_panel_float32() { return panel<float>(); }
int hone_panel_float64() { return panel<double>(); }
int hone_tall() { return TALL; }

#define FUNCTIONS(T, NAME)                                                                                            \
    void hone_stack_##NAME(const Stack<T> *s, const T *in, T *out, T *panels, T *kept, T *first) {                    \
        forward<T>(*s, in, out, panels, kept, first);                                                                 \
    }                                                                                                                 \
    void hone_stack_grad_##NAME(const Stack<T> *s, const T *dy, T *dx, T *panels, T *kept, T *grad, T *parts) {       \
        backward<T>(*s, dy, dx, panels, kept, grad, parts);                                                           \
    }

FUNCTIONS(float, float32)
FUNCTIONS(double, float64)
}
