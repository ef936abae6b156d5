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

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr int SUMS = LANES == 8 ? 12 : 24;  // vector registers that sums may take: AVX2 has 16, others 32
constexpr long WIDE = 4;     // vectors in a group
constexpr long CHUNK = 48;   // outputs of a product that a thread takes at once
constexpr long STRIP = 8;    // rows of an adapter's A that a thread takes at once
constexpr int SPINS = 4000;  // looks at a barrier before the core is left to others

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Whole __attribute__((vector_size(LANES * 4)));

struct Low {  // an adapter: y[at .. at + outputs] += scale B A x
    const float *A, *B;  // [rank, in], [outputs, rank]
    int64_t rank, at, outputs;
    double scale;
};

struct Linear {
    const float *weight, *bias;  // [out, in], [out] or null
    const Low *low;
    int64_t lows;  // how many adapters
};

struct Layer {
    const float *before, *q_norm, *k_norm, *after;
    Linear qkv, o, gate_up, down;
    float *memory;   // [2, rows, K, columns, E]: keys, values
    int64_t window;  // 0: none
};

struct Model {
    int64_t layers, D, H, K, E, M, rows, columns, rank;  // rank: of all adapters of a linear layer, at most
    double eps;
    const float *embedding, *cos, *sin, *norm;
    const Layer *layer;
};

struct Tokens {
    int64_t count;
    const int64_t *id, *row, *position, *column;  // column: where its key goes
    int64_t apart;  // no two tokens are of one row
};

static inline Vec load(const float *p) { return *(const Loose *)p; }
static inline void store(float *p, Vec x) { *(Loose *)p = x; }
static inline Vec pick(Whole where, Vec a, Vec b) { return (Vec)((where & (Whole)a) | (~where & (Whole)b)); }
static inline Vec greater(Vec a, Vec b) { return pick(a > b, a, b); }
static inline long up(long a, long b) { return (a + b - 1) / b; }
static inline long least(long a, long b) { return a < b ? a : b; }

static inline Vec exponential(Vec x) {
    const float magic = 12582912.0f;  // added, it leaves a whole number in the lowest bits
    Vec zero = {};
    const Whole none = x < -87.0f + zero;
    x = pick(none, -87.0f + zero, x);
    x = pick(x > 88.0f + zero, 88.0f + zero, x);
    Vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return pick(none, zero, y * (Vec)(((Whole)shifted + 127) << 23));
}

template <int W> static inline Vec joined(Vec a, Vec b) {
    Whole low, high;
    for (int l = 0; l < LANES; l++) {
        low[l] = l & W ? LANES + l - W : l;
        high[l] = l & W ? LANES + l : l + W;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

template <int W> static inline Vec sums(const Vec *p) {
    if constexpr (W == LANES)
        return p[0];
    else {
        Vec half[LANES / W / 2];
        for (int i = 0; i < LANES / W / 2; i++) half[i] = joined<W>(p[2 * i], p[2 * i + 1]);
        return sums<2 * W>(half);
    }
}

static inline float sum(Vec x) {
    x = joined<2>(joined<1>(x, x), joined<1>(x, x));
    if constexpr (LANES > 4) x = joined<4>(x, x);
    if constexpr (LANES > 8) x = joined<8>(x, x);
    return x[0];
}

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

// ---- products --------------------------------------------------------------------------------------------------

// y += w x
template <int OUT, int V> static inline void tile(const float *w, long in, const Vec *x, Vec (&y)[OUT][V]) {
    Vec acc[OUT][V];
    for (int j = 0; j < OUT; j++)
        for (int v = 0; v < V; v++) acc[j][v] = y[j][v];
    const long ahead = OUT * in;  // the weights of the next tile
    for (long k = 0; k < in; k += LANES) {
        for (int j = 0; j < OUT; j++) __builtin_prefetch(w + j * in + k + ahead);
        const long end = least(in, k + LANES);
        for (long i = k; i < end; i++) {
            Vec here[V];
            for (int v = 0; v < V; v++) here[v] = x[i * V + v];
            for (int j = 0; j < OUT; j++)
                for (int v = 0; v < V; v++) acc[j][v] += w[j * in + i] * here[v];
        }
    }
    for (int j = 0; j < OUT; j++)
        for (int v = 0; v < V; v++) y[j][v] = acc[j][v];
}

// outputs of a tile, whose sums stay in registers
template <int V> constexpr int outputs() { return SUMS / V < 8 ? SUMS / V : 8; }

// y += B z for the outputs from n on, z [sum of ranks]: scale A x of the adapters
template <int OUT, int V> static inline void widen(const Linear &layer, long n, const Vec *z, Vec (&y)[OUT][V]) {
    for (const Low *a = layer.low; a < layer.low + layer.lows; z += a++->rank * V) {
        const long first = n - a->at, whole = a->outputs - OUT;
        if (0 <= first && first <= whole)
            tile<OUT, V>(a->B + first * a->rank, a->rank, z, y);
        else  // the tile lies across an end of it
            for (int j = 0; j < OUT; j++)
                for (long r = 0; 0 <= first + j && first + j < a->outputs && r < a->rank; r++)
                    for (int v = 0; v < V; v++) y[j][v] += a->B[(first + j) * a->rank + r] * z[r * V + v];
    }
}

template <int OUT, int V, class F>
static inline void product_at(const Linear &layer, long in, long n, const Vec *x, const Vec *z, F take) {
    Vec y[OUT][V] = {};
    tile<OUT, V>(layer.weight + n * in, in, x, y);
    widen<OUT, V>(layer, n, z, y);
    if (layer.bias)
        for (int j = 0; j < OUT; j++)
            for (int v = 0; v < V; v++) y[j][v] += layer.bias[n + j];
    take(n, y);
}

// take(n, y): outputs from n on, [OUT][V]; z: as in widen
template <int V, class F>
static inline void product_of(const Linear &layer, long in, long first, long last, const Vec *x, const Vec *z, F take) {
    constexpr int OUT = outputs<V>();
    long n = first;
    for (; n + OUT <= last; n += OUT) product_at<OUT, V>(layer, in, n, x, z, take);
    for (; n < last; n++) product_at<1, V>(layer, in, n, x, z, take);
}

#define BY_WIDTH(v, CALL) \
    switch (v) {          \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    default: CALL(4);     \
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
    float *scores;      // this thread's own: [H / K][columns]
    Team team;

    long tokens_of_group() const { return wide * LANES; }
    long vectors(long g) const { return least(wide, up(tokens.count, LANES) - g * wide); }
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

    // x / sqrt(|x|^2 / D + eps) * gain, for this thread alone
    void norm(const float *gain) {
        for (long g = first; g < last; g++) {
            const long v = vectors(g);
            const Vec *x0 = at(x, m.D, g);
            Vec *out = normed + (g - first) * wide * m.D, scale[WIDE] = {};
            for (long f = 0; f < m.D; f++)
                for (long i = 0; i < v; i++) scale[i] += x0[f * v + i] * x0[f * v + i];
            for (long i = 0; i < v; i++)
                for (int l = 0; l < LANES; l++) scale[i][l] = 1.0f / sqrtf(scale[i][l] / (float)m.D + (float)m.eps);
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
        for (; strip >= up(a->rank, STRIP); z += a++->rank * V) strip -= up(a->rank, STRIP);
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
        for (long i = 0; i < layer.lows; i++) strips += up(layer.low[i].rank, STRIP);
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
        share(team, up(out, CHUNK), [&](long c) {
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
                for (int v = 0; v < V; v++) x0[(f + j) * V + v] += y[j][v];
        });
    }

    // x += what the layer gives
    void add(const Linear &layer, long in, float *from) {
        lower(layer, in, [&](long g) { return at(from, in, g); });
        share(team, up(m.D, CHUNK), [&](long c) {
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
        share(team, up(m.M, CHUNK), [&](long c) {
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
            for (long e = 0; e < E; e += LANES) squares += load(head + e) * load(head + e);
            const float scale = 1.0f / sqrtf(sum(squares) / (float)E + (float)m.eps);
            for (long e = 0; e < E; e += LANES) store(head + e, load(head + e) * scale * load(gain + e));
        }
        for (long e = 0; e < half; e++) {
            const float a = head[e], b = head[e + half];
            head[e] = a * c[e] - b * s[e + half];
            head[e + half] = b * c[e + half] + a * s[e];
        }
    }

    float *keys(const Layer &a, long row, long head) { return a.memory + (row * m.K + head) * m.columns * m.E; }
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
                float *to = keys(a, tokens.row[t], h) + tokens.column[t] * E;
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
            if (i + 1 < n) fetch(keys(a, tokens.row[next], (i + 1) % m.K), tokens.position[next] * m.E);
            attend_to<S>(a, t, i % m.K);
        });
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
        const float *k = keys(a, tokens.row[t], head) + start * E, *v = k + values();
        const float *q = qkv + t * (m.H + 2 * m.K) * E + head * G * E;
        const float scale = 1.0f / sqrtf((float)E);
        const long n = vectors(t / tokens_of_group()) * LANES;
        for (long g = 0; g < G; g++) {
            const float total = weigh<S>(q + g * E, k, count, scale);
            float *out = lane(seen, m.H * E, t) + (head * G + g) * E * n;
            for (long e = 0; e < E; e += LANES) {
                Vec acc[4] = {};
                long c = 0;
                for (; c + 4 <= count; c += 4)
                    for (int j = 0; j < 4; j++) acc[j] += scores[c + j] * load(v + (c + j) * E + e);
                for (; c < count; c++) acc[0] += scores[c] * load(v + c * E + e);
                Vec y = ((acc[0] + acc[1]) + (acc[2] + acc[3])) / total;
                for (int l = 0; l < LANES; l++) out[(e + l) * n] = y[l];
            }
        }
    }

    // scores of a query against some keys, as exp(score - greatest); their sum
    template <int S> float weigh(const float *q, const float *k, long count, float scale) {
        const long E = S ? S * LANES : m.E;
        Vec top = {};
        top -= INFINITY;
        for (long c = 0; c < count; c += LANES) {
            Vec part[LANES];
            const long some = least(LANES, count - c);
            for (int j = 0; j < LANES; j++) {
                const float *key = k + (c + least(j, some - 1)) * E;
                part[j] = load(q) * load(key);
                for (long e = LANES; e < E; e += LANES) part[j] += load(q + e) * load(key + e);
            }
            Vec found = sums<1>(part) * scale;
            for (long j = some; j < LANES; j++) found[j] = -INFINITY;
            store(scores + c, found);
            top = greater(found, top);
        }
        float greatest = top[0];
        for (int l = 1; l < LANES; l++) greatest = top[l] > greatest ? top[l] : greatest;
        Vec total = {};
        for (long c = 0; c < count; c += LANES) {
            const Vec y = exponential(load(scores + c) - greatest);
            store(scores + c, y);
            total += y;
        }
        return sum(total);
    }

    // S: vectors in a head, 0: any number
    template <int S> void look(const Layer &a) {
        remember<S>(a);
        attend<S>(a);
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
    long per_token, per_thread, head, floats;

    Plan(const Model &m, const Tokens &tokens, long threads, long small) {
        const long vectors = up(tokens.count, LANES);
        solo = small && tokens.apart && threads > 1 && vectors >= threads && vectors % threads == 0;
        wide = WIDE;
        while (solo && vectors / threads % wide) wide--;  // so that every thread has as many groups
        groups = up(vectors, wide);
        phases = 11 * m.layers + 2;
        head = up(2 * phases + 32, 16) * 16;
        per_token = m.D + m.H * m.E + m.M + m.rank + (m.H + 2 * m.K) * m.E;
        per_thread = up(groups * wide * LANES * m.D + up(m.columns, LANES) * LANES, 16) * 16;
        floats = head + groups * wide * LANES * per_token + threads * per_thread + 64;
    }
};

// ---- drawing ---------------------------------------------------------------------------------------------------

constexpr long BLOCK = 1024;               // weights summed in float32; sums of blocks are added in float64
constexpr double BELOW = 1 - 0x1p-53;      // times a total gives a number below it
constexpr long MANY = 1 << 17;             // logits from which threads share the rows

static inline Vec logits_at(const float *x, long i, long end) {
    if (i + LANES <= end) return load(x + i);
    Vec part = {};
    for (int l = 0; l < LANES; l++) part[l] = i + l < end ? x[i + l] : -INFINITY;
    return part;
}

static double weights_of(const float *x, long first, long end, float top) {
    Vec total = {};
    for (long i = first; i < end; i += LANES) total += exponential(logits_at(x, i, end) - top);
    return sum(total);
}

static float greatest_of(const float *x, long n) {
    Vec top = logits_at(x, 0, n);
    for (long i = LANES; i < n; i += LANES) top = greater(logits_at(x, i, n), top);
    float greatest = top[0];
    for (int l = 1; l < LANES; l++) greatest = top[l] > greatest ? top[l] : greatest;
    return greatest;
}

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

extern "C" {

// the first token whose CDF exceeds u, and its log-prob, for each row of x [n, vocab]
void hone_draw(const float *x, int64_t n, int64_t vocab, const double *u, int64_t *token, float *logp, double *space,
               int64_t threads) {
    const long blocks = up(vocab, BLOCK);
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
        logp[r] = (float)((double)(row[token[r]] - top) - log(total));
    }
}

int hone_lanes() { return LANES; }

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
        const long room = plan.per_thread - up(m->columns, LANES) * LANES;
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

// out [n, outputs] = x [n, in] W^T + bias, adapters left out; space: n in, in whole vectors, and 64
void hone_product(const Linear *layer, int64_t in, int64_t outputs, const float *x, int64_t n, float *out,
                  float *space, int64_t threads) {
    Vec *turned = (Vec *)(((uintptr_t)space + 63) & ~(uintptr_t)63);
    const long vectors = up(n, LANES), chunk = 4 * CHUNK;
    for (long g = 0; g < vectors; g += WIDE) {
        const long width = least(WIDE, vectors - g) * LANES;
        float *to = (float *)(turned + g * in);
        for (long l = 0; l < width; l++)
            for (long f = 0; f < in; f++) to[f * width + l] = g * LANES + l < n ? x[(g * LANES + l) * in + f] : 0.0f;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (long c = 0; c < up(outputs, chunk); c++)
        for (long g = 0; g < vectors; g += WIDE) {
            const long end = least(outputs, (c + 1) * chunk), t = g * LANES;
            auto take = [&](long at, auto &y) {
                constexpr int OUT = sizeof(y) / sizeof(y[0]), V = sizeof(y[0]) / sizeof(y[0][0]);
                const long some = least(V * LANES, n - t);
                for (long l = 0; l < some; l++)
                    for (int j = 0; j < OUT; j++) out[(t + l) * outputs + at + j] = y[j][l / LANES][l % LANES];
            };
#define CALL(V) product_of<V>(*layer, in, c * chunk, end, turned + g * in, nullptr, take)
            BY_WIDTH(least(WIDE, vectors - g), CALL)
#undef CALL
        }
}
}
