// A decoder in float32 on a CPU: packed tokens in, hidden states out, one call for all layers.
//
// Tokens stand in the lanes of vector registers and a weight is broadcast to them, so weights are read as the learner
// keeps them. A token's numbers come from the same operations in the same order whatever stands in the other lanes,
// however many there are and however many threads compute: they are the same to the bit.
//
// Activations lie in groups of up to WIDE vectors of tokens: [group][feature][vector][lane].

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>

#include "product.h"

constexpr long CHUNK = 48;   // outputs of a product that a thread takes at once
constexpr long STRIP = 8;    // rows of an adapter's A that a thread takes at once
constexpr int SPINS = 4000;  // looks at a barrier before the core is left to others

struct Layer {
    const float *before, *q_norm, *k_norm, *after;
    Linear qkv, o, gate_up, down;
    float *memory;   // keys, values: [2, rows, K, columns, E], or [2, rows, columns, K, E] where heads are woven
    int64_t window;  // 0: none
};

struct Model {
    int64_t layers, D, H, K, E, M, rows, columns, rank;  // rank: of all adapters of a linear layer, at most
    double eps;
    const float *embedding, *cos, *sin, *norm;
    const Layer *layer;
};

// Memory flows best in one stream: where a head is a vector, and a vector of scores holds whole columns, a column's
// heads are neighbours, and a token reads all that its row holds without a gap.
static bool woven(long K, long E) { return E == LANES && LANES % K == 0; }

struct Tokens {
    int64_t count;
    const int64_t *id, *row, *position, *column;  // column: where its key goes
    int64_t apart;  // no two tokens are of one row
    const int64_t *lead, *common;  // by row: another one that has the same first columns, and how many
};

// ---- threads ---------------------------------------------------------------------------------------------------

struct Team {  // threads that compute the same tokens
    int size;
    long phase;
    long *next;          // [phases] the first item that nobody has taken
    int *waiting, *round;
};

static void meet(Team &t) {
    int round = __atomic_load_n(t.round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(t.waiting, 1, __ATOMIC_ACQ_REL) == t.size) {
        __atomic_store_n(t.waiting, 0, __ATOMIC_RELAXED);
        __atomic_store_n(t.round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int looks = 0; __atomic_load_n(t.round, __ATOMIC_ACQUIRE) == round; looks++)
        if (looks > SPINS) sched_yield();
}

template <class F> static inline void share(Team &t, long items, F work) {
    if (t.size == 1) {
        for (long i = 0; i < items; i++) work(i);
        return;
    }
    long *next = t.next + t.phase++;
    for (long i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < items;) work(i);
    meet(t);
}

// ---- a model's pass over some groups of tokens -----------------------------------------------------------------

struct Pass {
    const Model &m;
    const Tokens &tokens;
    long wide;          // vectors in a group
    long first, last;   // groups
    float *x, *seen, *hidden, *low;  // by group: D, H E, M, rank features
    float *qkv;         // [tokens][(H + 2 K) E]
    Vec *normed;        // this thread's own: D features of every group
    float *scores;      // this thread's own: [columns], or [columns][K] where heads are woven
    Team team;

    long tokens_of_group() const { return wide * LANES; }
    long vectors(long g) const { return least(wide, pieces(tokens.count, LANES) - g * wide); }
    Vec *at(float *a, long features, long g) const { return (Vec *)a + g * wide * features; }
    float *lane(float *a, long features, long t) const {
        long g = t / tokens_of_group(), l = t % tokens_of_group();
        return (float *)at(a, features, g) + l;
    }

    void embed() {
        share(team, last - first, [&](long i) {
            long g = first + i, v = vectors(g), n = v * LANES;
            float *x0 = (float *)at(x, m.D, g);
            for (long l = 0; l < n; l++) {
                long t = g * tokens_of_group() + l;
                const float *row = t < tokens.count ? m.embedding + tokens.id[t] * m.D : nullptr;
                for (long f = 0; f < m.D; f++) x0[f * n + l] = row ? row[f] : 0.0f;
            }
        });
    }

    // |x|^2 of a vector of tokens, whose features are `step` vectors apart; added up as the learner does (between.h):
    // every LANES-th feature, then neighbours
    Vec squares(const Vec *x0, long step) const {
        Vec part[LANES] = {};
        long f = 0;
        for (; f + LANES <= m.D; f += LANES)
            for (int l = 0; l < LANES; l++) part[l] = fused(x0[(f + l) * step], x0[(f + l) * step], part[l]);
        for (int l = 0; f + l < m.D; l++) part[l] = fused(x0[(f + l) * step], x0[(f + l) * step], part[l]);
        for (int apart = 1; apart < LANES; apart *= 2)
            for (int l = 0; l < LANES; l += 2 * apart) part[l] += part[l + apart];
        return part[0];
    }

    // x / sqrt(|x|^2 / D + eps) * gain, for this thread alone
    void norm(const float *gain) {
        for (long g = first; g < last; g++) {
            const long v = vectors(g);
            const Vec *x0 = at(x, m.D, g);
            Vec *out = normed + (g - first) * wide * m.D, scale[WIDE];
            for (long i = 0; i < v; i++) {
                scale[i] = squares(x0 + i, v);
                for (int l = 0; l < LANES; l++) scale[i][l] = 1.0f / sqrtf(scale[i][l] / (float)m.D + (float)m.eps);
            }
            for (long f = 0; f < m.D; f++)
                for (long i = 0; i < v; i++) out[f * v + i] = x0[f * v + i] * scale[i] * gain[f];
        }
    }

    const Vec *normed_of(long g) const { return normed + (g - first) * wide * m.D; }

    // as far apart for every layer: groups that threads compute alone need not be in the same one
    Vec *low_of(long g) const { return at(low, m.rank, g); }

    template <int V> void lower_at(const Linear &layer, long in, const Vec *from, long g, long strip) {
        const Low *a = layer.low;
        Vec *z = low_of(g);
        for (; strip >= pieces(a->rank, STRIP); z += a++->rank * V) strip -= pieces(a->rank, STRIP);
        const Linear part = {a->A, nullptr, nullptr, 0};
        const long end = least(a->rank, (strip + 1) * STRIP);
        product_of<V>(part, in, strip * STRIP, end, from, nullptr, [&](long r, auto &y) {
            constexpr int OUT = sizeof(y) / sizeof(y[0]);
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) z[(r + j) * V + v] = y[j][v] * (float)a->scale;
        });
    }

    // scale A x of the layer's adapters; from(g): x
    template <class F> void lower(const Linear &layer, long in, F from) {
        long strips = 0;
        for (long i = 0; i < layer.lows; i++) strips += pieces(layer.low[i].rank, STRIP);
        if (!strips) return;
        share(team, (last - first) * strips, [&](long i) {
            const long g = first + i / strips;
#define CALL(V) lower_at<V>(layer, in, from(g), g, i % strips)
            BY_WIDTH(vectors(g), CALL)
#undef CALL
        });
    }

    template <int V> void project_at(const Layer &a, long g, long n, long end) {
        const long width = (m.H + 2 * m.K) * m.E, t = g * tokens_of_group();
        product_of<V>(a.qkv, m.D, n, end, normed_of(g), low_of(g), [&](long at, auto &y) {
            constexpr int OUT = sizeof(y) / sizeof(y[0]);
            for (int l = 0; l < V * LANES; l++)
                for (int j = 0; j < OUT; j++) qkv[(t + l) * width + at + j] = y[j][l / LANES][l % LANES];
        });
    }

    void project(const Layer &a) {
        const long out = (m.H + 2 * m.K) * m.E;
        lower(a.qkv, m.D, [&](long g) { return normed_of(g); });
        share(team, pieces(out, CHUNK), [&](long c) {
            for (long g = first; g < last; g++) {
#define CALL(V) project_at<V>(a, g, c * CHUNK, least(out, (c + 1) * CHUNK))
                BY_WIDTH(vectors(g), CALL)
#undef CALL
            }
        });
    }

    template <int V> void add_at(const Linear &layer, long in, float *from, long g, long n, long end) {
        Vec *x0 = at(x, m.D, g);
        product_of<V>(layer, in, n, end, at(from, in, g), low_of(g), [&](long f, auto &y) {
            constexpr int OUT = sizeof(y) / sizeof(y[0]);
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) x0[(f + j) * V + v] = y[j][v];
        }, x0);
    }

    // x += what the layer gives
    void add(const Linear &layer, long in, float *from) {
        lower(layer, in, [&](long g) { return at(from, in, g); });
        share(team, pieces(m.D, CHUNK), [&](long c) {
            for (long g = first; g < last; g++) {
#define CALL(V) add_at<V>(layer, in, from, g, c * CHUNK, least(m.D, (c + 1) * CHUNK))
                BY_WIDTH(vectors(g), CALL)
#undef CALL
            }
        });
    }

    template <int V> void gate_at(const Layer &a, long g, long n, long end) {
        Vec *h = at(hidden, m.M, g);
        const Vec *from = normed_of(g), *z = low_of(g);
        product_of<V>(a.gate_up, m.D, m.M + n, m.M + end, from, z, [&](long f, auto &y) {
            constexpr int OUT = sizeof(y) / sizeof(y[0]);
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) h[(f - m.M + j) * V + v] = y[j][v];
        });
        product_of<V>(a.gate_up, m.D, n, end, from, z, [&](long f, auto &y) {
            constexpr int OUT = sizeof(y) / sizeof(y[0]);
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) h[(f + j) * V + v] *= y[j][v] / (1.0f + exponential(-y[j][v]));
        });
    }

    void gate(const Layer &a) {
        lower(a.gate_up, m.D, [&](long g) { return normed_of(g); });
        share(team, pieces(m.M, CHUNK), [&](long c) {
            for (long g = first; g < last; g++) {
#define CALL(V) gate_at<V>(a, g, c * CHUNK, least(m.M, (c + 1) * CHUNK))
                BY_WIDTH(vectors(g), CALL)
#undef CALL
            }
        });
    }

    // one head of a token: its norm, and (a, b) -> (a cos - b sin, b cos + a sin), a and b its halves
    template <int S> void turn(float *head, const float *gain, const float *c, const float *s) {
        const long E = S ? S * LANES : m.E, half = E / 2;
        if (gain) {
            Vec squares = {};
            for (long e = 0; e < E; e += LANES) squares = fused(load(head + e), load(head + e), squares);
            const float scale = 1.0f / sqrtf(sum(squares) / (float)E + (float)m.eps);
            for (long e = 0; e < E; e += LANES) store(head + e, load(head + e) * scale * load(gain + e));
        }
        for (long e = 0; e < half; e++) {
            const float a = head[e], b = head[e + half];
            head[e] = fused(a, c[e], -b * s[e + half]);
            head[e + half] = fused(b, c[e + half], a * s[e]);
        }
    }

    float *keys(const Layer &a, long row, long head) { return a.memory + (row * m.K + head) * m.columns * m.E; }
    float *place(const Layer &a, long row, long head, long column) {
        if (woven(m.K, m.E)) return a.memory + ((row * m.columns + column) * m.K + head) * m.E;
        return keys(a, row, head) + column * m.E;
    }
    long values() const { return m.rows * m.K * m.columns * m.E; }  // how far a value is from its key
    long begin() const { return first * tokens_of_group(); }
    long end() const { return least(tokens.count, last * tokens_of_group()); }

    // keys turned, and keys and values put where they are kept
    template <int S> void remember(const Layer &a) {
        const long E = S ? S * LANES : m.E;
        share(team, end() - begin(), [&](long i) {
            const long t = begin() + i;
            const float *c = m.cos + tokens.position[t] * E, *s = m.sin + tokens.position[t] * E;
            float *q = qkv + t * (m.H + 2 * m.K) * E, *k = q + m.H * E, *v = k + m.K * E;
            for (long h = 0; h < m.H; h++) turn<S>(q + h * E, a.q_norm, c, s);
            for (long h = 0; h < m.K; h++) {
                turn<S>(k + h * E, a.k_norm, c, s);
                float *to = place(a, tokens.row[t], h, tokens.column[t]);
                for (long e = 0; e < E; e += LANES) {
                    store(to + e, load(k + h * E + e));
                    store(to + values() + e, load(v + h * E + e));
                }
            }
        });
    }

    template <int S> void attend(const Layer &a) {
        const long n = (end() - begin()) * m.K;
        share(team, n, [&](long i) {
            const long t = begin() + i / m.K, next = begin() + (i + 1) / m.K;
            if (i + 1 < n) fetch(keys(a, tokens.lead[tokens.row[next]], (i + 1) % m.K), tokens.position[next] * m.E);
            attend_to<S>(a, t, i % m.K);
        });
    }

    // Where the first columns of a token's row are read: rows of one prompt read one copy of it, which stays in the
    // cache from one row to the next. Whole vectors of scores, of `each` columns, are of one row.
    struct Places {
        const float *lead, *own;  // keys of the first column
        long split;               // the first that is its own
        const float *of(long column) const { return column < split ? lead : own; }
    };

    Places places(const Layer &a, long t, long head, long start, long each) {
        const long row = tokens.row[t], seen_to = tokens.position[t] + 1;
        const long common = start ? 0 : least(tokens.common[row], seen_to) / each * each;
        return {place(a, tokens.lead[row], head, start), place(a, row, head, start), common};
    }

    // send for the beginning of some keys, and of their values
    void fetch(const float *k, long numbers) {
        for (long i = 0; i <= least(numbers, 64 * 16); i += 16) {
            __builtin_prefetch(k + i);
            __builtin_prefetch(k + values() + i);
        }
    }

    // the queries of token t that share a key-value head
    template <int S> void attend_to(const Layer &a, long t, long head) {
        const long seen_to = tokens.position[t] + 1, G = m.H / m.K, E = S ? S * LANES : m.E;
        const long start = a.window && a.window < seen_to ? seen_to - a.window : 0, count = seen_to - start;
        const Places from = places(a, t, head, start, LANES);
        const float *q = qkv + t * (m.H + 2 * m.K) * E + head * G * E;
        const long n = vectors(t / tokens_of_group()) * LANES;
        for (long g = 0; g < G; g++) {
            const float total = weigh<S>(q + g * E, from, count);
            float *out = lane(seen, m.H * E, t) + (head * G + g) * E * n;
            constexpr int AT_ONCE = S ? S : 1;  // vectors of a head: one column after the other, as the learner does
            for (long e = 0; e < E; e += AT_ONCE * LANES) {
                Vec acc[AT_ONCE] = {};
                for (long c = 0; c < count; c++) {
                    const float *v = from.of(c) + values() + c * E + e;
                    for (int j = 0; j < AT_ONCE; j++) acc[j] = fused(scores[c], load(v + j * LANES), acc[j]);
                }
                for (int j = 0; j < AT_ONCE; j++) {
                    const Vec y = acc[j] / total;
                    for (int l = 0; l < LANES; l++) out[(e + j * LANES + l) * n] = y[l];
                }
            }
        }
    }

    float scale() const { return (float)(1.0 / sqrt((double)m.E)); }

    // scores of a query against some keys, as exp(scale (score - greatest)); their sum
    template <int S> float weigh(const float *q, const Places &from, long count) {
        const long E = S ? S * LANES : m.E;
        Vec top = {};
        top -= INFINITY;
        for (long c = 0; c < count; c += LANES) {
            Vec part[LANES];
            const long some = least(LANES, count - c);
            const float *k = from.of(c);
            for (int j = 0; j < LANES; j++) {
                const float *key = k + (c + least(j, some - 1)) * E;
                part[j] = load(q) * load(key);
                for (long e = LANES; e < E; e += LANES) part[j] = fused(load(q + e), load(key + e), part[j]);
            }
            Vec found = sums<1>(part);
            for (long j = some; j < LANES; j++) found[j] = -INFINITY;
            store(scores + c, found);
            top = greater(found, top);
        }
        const float most = greatest(top);
        Vec total = {};
        for (long c = 0; c < count; c += LANES) {
            const Vec y = exponential((load(scores + c) - most) * scale());
            store(scores + c, y);
            total += y;
        }
        return sum(total);
    }

    template <int K> void attend_woven(const Layer &a) {
        if constexpr (K <= LANES)  // else heads are not woven
            share(team, end() - begin(), [&](long i) {
                const long t = begin() + i, seen_to = tokens.position[t] + 1;
                const long start = a.window && a.window < seen_to ? seen_to - a.window : 0;
                const Places from = places(a, t, 0, start, LANES / K);
                for (long g = 0; g < m.H / K; g++) mix_woven<K>(t, g, from, (seen_to - start) * K);
            });
    }

    // the g-th query of every head of token t, against n vectors: columns of K heads
    template <int K> void mix_woven(long t, long g, const Places &from, long n) {
        const long G = m.H / K, apart = vectors(t / tokens_of_group()) * LANES;
        Vec query[K], acc[K] = {};
        for (int h = 0; h < K; h++) query[h] = load(qkv + (t * (m.H + 2 * K) + h * G + g) * LANES);
        const Vec total = weigh_woven<K>(query, from, n);
        for (long i = 0; i < n; i += K) {
            const float *v = from.of(i / K) + values() + i * LANES;
            for (int h = 0; h < K; h++) acc[h] = fused(scores[i + h], load(v + h * LANES), acc[h]);
        }
        for (int h = 0; h < K; h++) {
            const Vec y = acc[h] / total[h];
            float *out = lane(seen, m.H * LANES, t) + (h * G + g) * LANES * apart;
            for (int l = 0; l < LANES; l++) out[l * apart] = y[l];
        }
    }

    // scores as exp(scale (score - the head's greatest)), a lane each; the sum of a head in every lane of it
    template <int K> Vec weigh_woven(const Vec *query, const Places &from, long n) {
        Vec top = {}, total[K] = {}, part[LANES];  // LANES columns are K vectors: each adds up columns of its own
        top -= INFINITY;
        long i = 0;
        for (; i + LANES <= n; i += LANES) {
            const float *k = from.of(i / K);
            for (int l = 0; l < LANES; l++) part[l] = query[l % K] * load(k + (i + l) * LANES);
            const Vec found = sums<1>(part);
            store(scores + i, found);
            top = greater(found, top);
        }
        if (i < n) {
            const float *k = from.of(i / K);
            for (int l = 0; l < LANES; l++) part[l] = query[l % K] * load(k + least(i + l, n - K + l % K) * LANES);
            const Vec found = sums<1>(part);  // lanes beyond the last column have its scores again
            store(scores + i, found);
            top = greater(found, top);
        }
        top = over_lanes<K>(top, [](Vec a, Vec b) { return greater(a, b); });
        for (long first = 0; first < n; first += K * LANES)
            for (int j = 0; j < K; j++) {
                if ((i = first + j * LANES) >= n) break;
                Vec y = exponential((load(scores + i) - top) * scale());
                if (n - i < LANES) y = first_lanes(y, n - i);
                store(scores + i, y);
                total[j] += y;
            }
        for (int j = 0; j < K; j++) total[j] = over_lanes<K>(total[j], [](Vec a, Vec b) { return a + b; });
        for (int apart = 1; apart < K; apart *= 2)
            for (int j = 0; j < K; j += 2 * apart) total[j] += total[j + apart];
        return total[0];
    }

    // S: vectors in a head, 0: any number
    template <int S> void look(const Layer &a) {
        remember<S>(a);
        if (!woven(m.K, m.E)) return attend<S>(a);
        switch (m.K) {
        case 1: attend_woven<1>(a); break;
        case 2: attend_woven<2>(a); break;
        case 4: attend_woven<4>(a); break;
        case 8: attend_woven<8>(a); break;
        default: attend_woven<16>(a);
        }
    }

    void run() {
        embed();
        for (long i = 0; i < m.layers; i++) {
            const Layer &a = m.layer[i];
            norm(a.before);
            project(a);
            switch (m.E / LANES) {
            case 1: look<1>(a); break;
            case 2: look<2>(a); break;
            case 4: look<4>(a); break;
            case 8: look<8>(a); break;
            default: look<0>(a);
            }
            add(a.o, m.H * m.E, seen);
            norm(a.after);
            gate(a);
            add(a.down, m.M, hidden);
        }
        norm(m.norm);
    }

    // the last norm's output, [tokens][D]
    void give(float *out) {
        const long n = tokens_of_group();
        share(team, last - first, [&](long i) {
            const long g = first + i, width = vectors(g) * LANES;
            const float *from = (const float *)normed_of(g);
            for (long l = 0; l < width && g * n + l < tokens.count; l++)
                for (long f = 0; f < m.D; f++) out[(g * n + l) * m.D + f] = from[f * width + l];
        });
    }
};

struct Plan {  // how tokens are shared out, and where everything lies in the working memory
    long groups, wide, solo, phases;
    long per_token, per_thread, scores, head, floats;

    Plan(const Model &m, const Tokens &tokens, long threads, long small) {
        const long vectors = pieces(tokens.count, LANES);
        solo = small && tokens.apart && threads > 1 && vectors >= threads && vectors % threads == 0;
        wide = WIDE;
        while (solo && vectors / threads % wide) wide--;  // so that every thread has as many groups
        groups = pieces(vectors, wide);
        phases = 11 * m.layers + 2;
        head = up(2 * phases + 32, 16);
        per_token = m.D + m.H * m.E + m.M + m.rank + (m.H + 2 * m.K) * m.E;
        scores = up(m.columns * (woven(m.K, m.E) ? m.K : 1), LANES);
        per_thread = up(groups * wide * LANES * m.D + scores, 16);
        floats = head + groups * wide * LANES * per_token + threads * per_thread + 64;
    }
};

extern "C" {

int hone_lanes() { return LANES; }

// whether memory is [2, rows, columns, K, E]
int hone_woven(int64_t K, int64_t E) { return woven(K, E); }

// numbers of working memory that a pass needs
int64_t hone_space(const Model *m, const Tokens *tokens, int64_t threads, int64_t small) {
    return Plan(*m, *tokens, threads, small).floats;
}

// out [tokens, D]: the hidden states, after the last norm; small: the weights stay in a core's reach
void hone_run(const Model *m, const Tokens *tokens, float *out, float *space, int64_t threads, int64_t small) {
    const Plan plan(*m, *tokens, threads, small);
    space = (float *)(((uintptr_t)space + 63) & ~(uintptr_t)63);
    long *next = (long *)space;
    for (long i = 0; i < plan.phases; i++) next[i] = 0;
    int *meeting = (int *)(next + plan.phases);
    meeting[0] = meeting[8] = 0;
    const long all = plan.groups * plan.wide * LANES;
    float *x = space + plan.head, *seen = x + all * m->D, *hidden = seen + all * m->H * m->E;
    float *low = hidden + all * m->M, *qkv = low + all * m->rank, *own = qkv + all * (m->H + 2 * m->K) * m->E;
    long group = 0;
#pragma omp parallel num_threads(threads)
    {
        float *mine = own + omp_get_thread_num() * plan.per_thread;
        const long room = plan.per_thread - plan.scores;
        Team team = {plan.solo ? 1 : omp_get_num_threads(), 0, next, meeting, meeting + 8};
        Pass pass = {*m,     *tokens, plan.wide, 0,           plan.groups, x,   seen,
                     hidden, low,     qkv,       (Vec *)mine, mine + room, team};
        if (!plan.solo) {
            pass.run();
            pass.give(out);
        } else
            for (long g; (g = __atomic_fetch_add(&group, 1, __ATOMIC_RELAXED)) < plan.groups;) {
                pass.first = g, pass.last = g + 1;
                pass.run();
                pass.give(out);
            }
    }
}
}
