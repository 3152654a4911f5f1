/* Attention over paged KV on CPUs.

   The result of a query depends only on its own tokens. A unit is the blocks of UNIT tokens that begin at a multiple of UNIT. A
   query processes its context one unit after another, with online softmax in fp32 (Milakov & Gimelshein 2018; Dao et al. 2022).
   Each number of a query has its own lane. So tiles of 1 … 6 queries, shared and private units, and any number of threads run the
   same operations on the same lanes in the same order. A masked position adds exactly 0. The units of a query are never split
   over threads. A sink is one more score without a value: it is added to the sum of weights after the last unit. A soft cap is
   applied to scores before they are masked.

   The bits are the same for every VL: sums of weights have LANES lanes, of which a vector holds VL, and neither packing nor the
   units depend on VL.

   Sharing: adjacent rows whose next unit has the same blocks process it together, so that it is read once for all of them. They
   separate where their tables differ (a walk over the trie of the tables, so prefixes can be nested).

   Memory. A layer of a block of the pool is K [kv_heads, block_size, dim] and then V [kv_heads, block_size, value_dim]. A block may
   also have layers of other shapes, for which attention is called separately. Inside one head's K or V of one block the elements are packed into
   32-bit words, VL words being one vector register. A word is one fp32, or a pair of bf16 (low half first):

       K   [block_size / VL][S][VL] words    word (tile, s, lane) = dims 2s, 2s+1 of token tile · VL + lane   (fp32: dim s)
       V   [block_size / 2][E] words         word (t, d) = dim d of tokens 2t, 2t+1                            (fp32: token t)

   with S = D / 2 for bf16, D for fp32, D = dim and E = value_dim. So scores (lanes = tokens) and output (lanes = dims) are both one product
   acc[query][lanes] += word[query][step] · B[step][lanes] without sums across lanes. Where block_size, D or E is no
   multiple of LANES, K and V stay plain [block_size][D or E] and are packed, zero-padded, when they are read.

   bf16 is multiplied by vdpbf16ps if that is fastest, else by the two FMAs to which it is equal: of each pair the odd product
   first, then the even one, with denormal numbers as zero. Weights are rounded to bf16 before they are multiplied by V, and the
   rounded weights are summed, so that they add up to one. No contraction by the compiler: FMA is written out. */

#include "vectors.h"

#include "flush.h"
#include "layout.h"

enum {
    LANES = 16,
    TILE = VL == 4 ? 3 : 6,  /* queries that share the loads of a block, */
    MOST = VL == 16 ? 4 : 2, /* and vectors that share those of a query: as many as fit the registers */
    MAX_QUERIES = 192,                    /* of one item */
    CHUNK_QUERIES = 48,                   /* wanted of one chunk and one kv head: their state stays in the L1/L2 cache */
    MAX_DIM = 576,
    MAX_NUMBERS = MAX_QUERIES * 256, /* of all queries of one item: wide heads have fewer queries */
    MAX_BLOCK = 512,
    UNIT = 128,          /* tokens of small blocks that are met as one: they share a maximum, and loads and stores of acc */
    MAX_UNIT = UNIT / VL,
    MAX_PLAIN = 64 * 256, /* largest padded block_size · dim that is packed on the fly */
    WRITE_TOKENS = 32,
    WORTH_A_THREAD = 384, /* (query, position) pairs: fewer take less time than it takes to wake a second thread */
};
#define MASKED -1e30f

/* 2^x for x ≤ 0, relative error 3e-6 (coarse, for weights that become bf16) or 1.2e-7; exactly 1 at 0; 0 where a masked score is
   -inf; NaN stays NaN. 2^(x - floor x) by a polynomial, times 2^(floor x). */
INLINE vf exp2_(vf x, int coarse) {
    x = max_(all(-160), x);
#if VL == 16
    const vf floored = (vf)_mm512_roundscale_ps((__m512)x, 0x09), f = x - floored;
#else
    const vf nearest = to_floats(to_integers(x)), floored = nearest - choose(less(x, nearest), all(1), all(0)), f = x - floored;
#endif
    vf p;
    if (coarse) {
        p = fma_(all(0.013426687568426132f), f, all(0.0522424690425396f));
        p = fma_(p, f, all(0.2412802129983902f));
        p = fma_(p, f, all(0.6930448412895203f));
    } else {
        p = fma_(all(0.00021612919226754457f), f, all(0.0012467845808714628f));
        p = fma_(p, f, all(0.009675451554358006f));
        p = fma_(p, f, all(0.055485282093286514f));
        p = fma_(p, f, all(0.2402293086051941f));
        p = fma_(p, f, all(0.6931470632553101f));
    }
    p = fma_(p, f, all(1.0f));
#if VL == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)floored);
#else
    return p * (vf)((__builtin_convertvector(floored, vi) + (127 + 64)) << 23) * all(0x1p-64f); /* what is denormal becomes 0 */
#endif
}

/* Store x ≥ 0, which is no denormal number, as bf16, and return it rounded. */
INLINE vf store_rounded(bf16 *to, vf x) {
#ifdef __AVX512BF16__
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x); /* rounds as `rounded` does, but takes denormal numbers for zero */
    _mm256_storeu_si256((__m256i *)to, halves);
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
    store_bf16(to, x);
    return rounded(x);
#endif
}

/* ---- the one product: acc[query][lane] += sum over steps of A[query][step] · B[step][lane] ---- */

/* What a step multiplies: fp32 numbers; pairs of bf16, widened, the odd ones first; or pairs, by vdpbf16ps, which does the same in
   one instruction (on some CPUs in more time). A is in words, for WIDENED in two fp32 numbers a step. */
enum { NUMBERS, WIDENED, PAIRS };

typedef struct {
    float *acc;                /* [queries][lanes] */
    const float *a;            /* [queries][steps] words, or twice as many */
    const uint32_t *const *b;  /* words of pieces, whose rows are `row` apart */
    const int64_t *ahead;      /* for each piece, bytes from it to what is read later, to be fetched now if `fetch` */
    int64_t acc_row, a_row, row;
    int steps, per; /* `per` steps of each piece, whose lanes lie side by side; 0: all steps of each, a piece is one vector */
    int fresh, fetch; /* fresh: acc starts at zero, whatever lies there */
} Product;

INLINE vf multiply_add(vf acc, vf a, vf b, int kind) {
    (void)kind;
#ifdef __AVX512BF16__
    if (kind == PAIRS) return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#endif
#if VL == 4 /* where an FMA may be a call: the product of two bf16 is exact in fp32 */
    if (kind == WIDENED) return a * b + acc;
#endif
    return fma_(a, b, acc);
}

/* nv vectors of lanes, from number `lane` on. */
INLINE void product(const Product *p, int64_t lane, int nq, int nv, int kind, int fetch) {
    vf acc[6][4];
    float *to = p->acc + lane;
    const int64_t acc_row = p->acc_row, row = p->row, a_row = p->a_row;
    const int per = p->per ? p->per : p->steps, words = kind == WIDENED ? 2 : 1;
    UNROLL for (int q = 0; q < nq; q++)
        UNROLL for (int v = 0; v < nv; v++) acc[q][v] = p->fresh ? all(0) : load(to + q * acc_row + v * VL);
    const float *a = p->a;
    for (int left = p->steps, piece = 0; left > 0; left -= per, piece++) {
        const uint32_t *b[4];
        const float *end = a + (left < per ? left : per) * words;
        int64_t ahead[4];
        UNROLL for (int v = 0; v < nv; v++) {
            b[v] = p->per ? p->b[piece] + lane + v * VL : p->b[lane / VL + v];
            ahead[v] = p->per ? p->ahead[piece] : p->ahead[lane / VL + v];
        }
        for (int64_t at = 0; a < end; a += words, at += row)
            UNROLL for (int odd = words - 1; odd >= 0; odd--) {
                vf m[4];
                UNROLL for (int v = 0; v < nv; v++) {
                    const vu w = load_words(b[v] + at);
                    m[v] = (vf)(kind != WIDENED ? w : odd ? w & all_words(0xffff0000u) : w << 16);
                    /* to L2: L1 has too few misses in flight */
                    if (fetch && odd == words - 1) __builtin_prefetch((const char *)(b[v] + at) + ahead[v], 0, 2);
                }
                UNROLL for (int q = 0; q < nq; q++) {
                    const vf x = all(a[q * a_row + odd]);
                    UNROLL for (int v = 0; v < nv; v++) acc[q][v] = multiply_add(acc[q][v], x, m[v], kind);
                }
            }
    }
    UNROLL for (int q = 0; q < nq; q++)
        UNROLL for (int v = 0; v < nv; v++) store(to + q * acc_row + v * VL, acc[q][v]);
}

typedef void (*ProductFn)(const Product *, int64_t);
#define KERNEL(kind, nq, name, nv)                                                          \
    static void kind##_##nq##_##name(const Product *p, int64_t lane) {                     \
        p->fetch ? product(p, lane, nq, nv, kind, 1) : product(p, lane, nq, nv, kind, 0); \
    }
#define KERNELS(kind, nq) KERNEL(kind, nq, one, 1) KERNEL(kind, nq, two, 2) KERNEL(kind, nq, most, MOST)
#define NAMES(kind, nq) {kind##_##nq##_one, kind##_##nq##_two, kind##_##nq##_most}
#if VL == 4
#define TILES(kind) KERNELS(kind, 1) KERNELS(kind, 2) KERNELS(kind, 3)
#define ALL(kind) {NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3)}
#else
#define TILES(kind) KERNELS(kind, 1) KERNELS(kind, 2) KERNELS(kind, 3) KERNELS(kind, 4) KERNELS(kind, 5) KERNELS(kind, 6)
#define ALL(kind) {NAMES(kind, 1), NAMES(kind, 2), NAMES(kind, 3), NAMES(kind, 4), NAMES(kind, 5), NAMES(kind, 6)}
#endif
TILES(NUMBERS)
TILES(WIDENED)
#ifdef __AVX512BF16__
TILES(PAIRS)
static const ProductFn kernels[3][TILE][3] = {ALL(NUMBERS), ALL(WIDENED), ALL(PAIRS)};
#else
static const ProductFn kernels[2][TILE][3] = {ALL(NUMBERS), ALL(WIDENED)};
#endif

/* `vectors` of lanes, as many at a time as there is a kernel for. */
INLINE void multiply(const Product *p, int nq, int vectors, int kind) {
    for (int v = 0, nv; v < vectors; v += nv) {
        nv = vectors - v >= MOST ? MOST : vectors - v >= 2 ? 2 : 1;
        kernels[kind][nq - 1][nv == MOST ? 2 : nv - 1](p, v * VL);
    }
}

/* ---- a step ---- */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef struct {
    char *data; /* the pool */
    int64_t blocks, block_bytes, kv_heads, block_size, dim, value_dim, q_heads, bf16;
    const int64_t *layer_at; /* bytes from the beginning of a block to each layer */
    int64_t rows, tokens, table_row, threads, share;
    int64_t pairs; /* multiply pairs of bf16 by vdpbf16ps: the library must have it */
    const int32_t *query_starts, *context_lens, *table;
    const int64_t *slots;
    int32_t *chunks; /* [≤ tokens][4]: first token, end token, first row, end row */
    int64_t num_chunks, heads; /* an item is a chunk and so many kv heads */
    Parallel parallel; /* GOMP_parallel and GOMP_barrier of the OpenMP that torch runs on, or NULL */
    void (*barrier)(void);
} Step;

typedef struct {
    const Step *step;
    int64_t layer, window;
    const char *q, *k, *v;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head; /* strides in elements */
    char *out;                                                 /* [tokens][q_heads][value_dim] */
    float *lse;                                                /* [tokens][q_heads] or NULL */
    float scale;                                               /* log2(e) · scaling: softmax is computed with 2^x */
    float before;       /* a soft cap: products times this go through tanh, and `scale` is log2(e) · cap; 0: no cap */
    const float *sinks; /* [q_heads] or NULL */
    int64_t next_write, next_item;
} Call;

INLINE int bytes(const Step *s) { return s->bf16 ? 2 : 4; }
INLINE int packed(const Step *s) { return s->block_size % LANES == 0 && s->dim % LANES == 0 && s->value_dim % LANES == 0; }
INLINE int padded(int64_t n) { return (int)((n + VL - 1) / VL * VL); }
INLINE char *half(const Step *s, int64_t block, int64_t layer, int kv, int64_t head) {
    const int64_t width = kv ? s->value_dim : s->dim, before = kv ? s->kv_heads * s->dim : 0;
    return s->data + block * s->block_bytes + s->layer_at[layer] + (before + head * width) * s->block_size * bytes(s);
}

/* Word indices of dim d of token t; `dim` and the number of K steps are padded ones. */
INLINE int64_t k_word(int t, int s, int steps) { return ((int64_t)(t / VL) * steps + s) * VL + t % VL; }

static void write_token(const Call *c, int64_t token) {
    const Step *s = c->step;
    const int64_t slot = s->slots[token], block = slot / s->block_size;
    const int t = (int)(slot % s->block_size), dim = (int)s->dim, width = (int)s->value_dim, size = bytes(s);
    for (int h = 0; h < s->kv_heads; h++) {
        const char *k = c->k + (token * c->k_token + h * c->k_head) * size;
        const char *v = c->v + (token * c->v_token + h * c->v_head) * size;
        char *to_k = half(s, block, c->layer, 0, h), *to_v = half(s, block, c->layer, 1, h);
        if (!packed(s)) {
            memcpy(to_k + (int64_t)t * dim * size, k, dim * size);
            memcpy(to_v + (int64_t)t * width * size, v, width * size);
        } else if (s->bf16) {
            uint32_t *words = (uint32_t *)to_k + k_word(t, 0, dim / 2);
            for (int i = 0; i < dim / 2; i++) memcpy(words + i * VL, k + 4 * i, 4);
            uint16_t *halves = (uint16_t *)to_v + (int64_t)(t / 2) * width * 2 + t % 2;
#if VL == 16
            for (int d = 0; d < width; d += VL) { /* a masked store leaves the neighbour's halves alone, in any thread */
                __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + 2 * d)));
                if (t % 2) x = _mm512_slli_epi32(x, 16);
                _mm512_mask_storeu_epi16(halves - t % 2 + 2 * d, t % 2 ? 0xaaaaaaaau : 0x55555555u, x);
            }
#else
            for (int d = 0; d < width; d++) memcpy(halves + 2 * d, v + 2 * d, 2);
#endif
        } else {
            uint32_t *words = (uint32_t *)to_k + k_word(t, 0, dim);
            for (int i = 0; i < dim; i++) memcpy(words + i * VL, k + 4 * i, 4);
            memcpy(to_v + (int64_t)t * width * 4, v, width * 4);
        }
    }
}

/* ---- one item: a chunk of tokens and some kv heads; its queries are numbered [kv head][token][head of the group] ---- */

typedef struct {
    const Call *call;
    int h0, h1, group, dim, width, size, steps; /* dim, width (of V) and size (of a block) padded to VL */
    int kind, words;                     /* of products, and how many words a step of a query or of weights has */
    int unit;                            /* blocks */
    int t0, t1;
    int32_t position[MAX_QUERIES];
    float m[MAX_QUERIES + VL]; /* running maximum of the scaled scores */
    float l[MAX_QUERIES * LANES]; /* running sum of weights, lane = token % LANES */
    float acc[MAX_NUMBERS];
    float q[MAX_NUMBERS];
    float scores[6 * MAX_BLOCK]; /* [query of a tile][token of a unit] */
    float weights[6 * MAX_BLOCK];
    uint32_t k_packed[MAX_PLAIN], v_packed[MAX_PLAIN], last[MAX_DIM];
} Item;

/* Block `block` of one head in plain order → packed words, of which the first n tokens are visible and the others zero. */
static void pack(Item *w, const char *k, const char *v, int n) {
    const Step *s = w->call->step;
    const int dim = (int)s->dim, width = (int)s->value_dim, steps = w->steps, half_steps = s->bf16 ? 2 : 1;
    memset(w->k_packed, 0, sizeof(uint32_t) * w->size * steps);
    memset(w->v_packed, 0, sizeof(uint32_t) * (w->size / half_steps) * w->width);
    for (int t = 0; t < n; t++) {
        for (int d = 0; d < dim; d++)
            if (s->bf16)
                ((uint16_t *)(w->k_packed + k_word(t, d / 2, steps)))[d % 2] = ((const uint16_t *)k)[t * dim + d];
            else
                w->k_packed[k_word(t, d, steps)] = ((const uint32_t *)k)[t * dim + d];
        for (int d = 0; d < width; d++)
            if (s->bf16)
                ((uint16_t *)(w->v_packed + (t / 2) * w->width + d))[t % 2] = ((const uint16_t *)v)[t * width + d];
            else
                w->v_packed[t * w->width + d] = ((const uint32_t *)v)[t * width + d];
    }
}

typedef struct {
    const int32_t *id;
    int count;
} Unit; /* of blocks, those that a row sees */

typedef struct {
    const uint32_t *k[MAX_BLOCK / VL], *v[MAX_UNIT]; /* K by tiles of VL tokens, V by blocks */
    int64_t k_ahead[MAX_BLOCK / VL], v_ahead[MAX_UNIT];
} Blocks; /* a unit of one kv head; ahead: bytes to the same place of what is read after it */

/* Queries q0 … q0 + nq - 1, at `positions`, meet tokens 0 … n - 1 of the unit that starts at position `start`; those of the
   blocks before `first` have left every window. */
static void meet(Item *w, int q0, int nq, const int32_t *positions, int64_t start, int first, int n, const Blocks *b, int fetch) {
    const Call *c = w->call;
    const int is_bf16 = (int)c->step->bf16, kind = w->kind, vectors = (n + VL - 1) / VL, size = w->size, width = w->unit * size, dim = w->width;
    const int hidden = first * size; /* tokens */
    const Product in = {.acc = w->scores + hidden, .acc_row = width, .a = w->q + q0 * w->steps * w->words,
                        .a_row = w->steps * w->words, .b = b->k + hidden / VL, .ahead = b->k_ahead + hidden / VL, .row = VL,
                        .steps = w->steps, .fresh = 1, .fetch = fetch};
    multiply(&in, nq, vectors - hidden / VL, kind);
    if (c->before != 0)
        for (int i = 0; i < nq; i++)
            for (int x = hidden; x < vectors * VL; x += VL) {
                float *scores = w->scores + i * width + x;
                store(scores, tanh_(load(scores) * all(c->before)));
            }

    vu lane;
    for (int i = 0; i < VL; i++) lane[i] = (uint32_t)i;
    const vf old = load(w->m + q0);
    vf highest = all(MASKED);
    for (int i = 0; i < nq; i++) {
        const int64_t end = positions[i] + 1 - start < n ? positions[i] + 1 - start : n;
        const int64_t from = c->window > 0 && positions[i] - c->window >= start ? positions[i] - c->window + 1 - start : 0;
        float *scores = w->scores + i * width;
        vf best = all(-INFINITY);
        if (from > 0 || end < vectors * VL)
            for (int x = 0; x < vectors; x++) {
                if (x * VL >= from && (x + 1) * VL <= end) continue;
                vu at = lane + (uint32_t)(x * VL);
                vu seen = (vu)(at < (uint32_t)(end > 0 ? end : 0)) & ~(vu)(at < (uint32_t)from);
                store(scores + x * VL, (vf)(((vu)load(scores + x * VL) & seen) | ((vu)all(-INFINITY) & ~seen)));
            }
        for (int x = 0; x < vectors; x++) best = max_(best, load(scores + x * VL));
        vu here = (vu)(lane == (uint32_t)i);
        highest = (vf)(((vu)all(lane_max(best) * c->scale) & here) | ((vu)highest & ~here));
    }
    float top[VL], shrink[VL];
    highest = max_(highest, old); /* old where highest is NaN: the NaN is in the weights then */
    store(top, highest);
    store(shrink, exp2_(old - highest, is_bf16));

    float *acc = w->acc + q0 * dim;
    for (int i = 0; i < nq; i++) {
        const float *scores = w->scores + i * width;
        float *weights = w->weights + i * width;
        float *l = w->l + (q0 + i) * LANES;
        vf sum[PARTS];
        UNROLL for (int p = 0; p < PARTS; p++) sum[p] = load(l + p * VL) * all(shrink[i]);
        for (int x = 0; x < vectors; x++) {
            vf p = exp2_(fma_(load(scores + x * VL), all(c->scale), all(-top[i])), is_bf16);
            if (kind == PAIRS) {
                p = store_rounded((bf16 *)weights + x * VL, p);
            } else {
                if (is_bf16) p = rounded(p);
                store(weights + x * VL, p);
            }
            sum[x % PARTS] += p;
        }
        UNROLL for (int p = 0; p < PARTS; p++) store(l + p * VL, sum[p]);
        w->m[q0 + i] = top[i];
        if (shrink[i] != 1.0f)
            for (int d = 0; d < dim; d += VL) store(acc + i * dim + d, load(acc + i * dim + d) * all(shrink[i]));
    }

    const int tokens = is_bf16 ? 2 : 1, skip = hidden / tokens, steps = n / tokens, per = size / tokens; /* tokens of a step */
    Product out = {.acc = acc, .acc_row = dim, .a = w->weights + skip * w->words, .a_row = width, .b = b->v + first,
                   .ahead = b->v_ahead + first, .row = dim, .steps = steps - skip, .per = per, .fetch = fetch};
    multiply(&out, nq, dim / VL, kind);
    if (n % tokens) { /* the last pair's second token is not written yet: whatever lies there must not be read */
        const uint32_t *pair = b->v[steps / per] + (int64_t)(steps % per) * dim, *last = w->last;
        for (int d = 0; d < dim; d++) w->last[d] = pair[d] & 0xffffu;
        out.a = w->weights + steps * w->words, out.b = &last, out.steps = 1, out.fetch = 0;
        multiply(&out, nq, dim / VL, kind);
    }
}

/* Tokens t0 … t1 - 1 of the item meet unit number `number` of their rows; `next` is the one that will be read next. */
static void meet_unit(Item *w, int t0, int t1, int64_t number, Unit here, Unit next) {
    const Call *c = w->call;
    const Step *s = c->step;
    const int64_t tokens = w->unit * s->block_size, start = number * tokens;
    int32_t highest = -1, lowest = INT32_MAX;
    for (int t = t0 - w->t0; t < t1 - w->t0; t++) {
        highest = w->position[t] > highest ? w->position[t] : highest;
        lowest = w->position[t] < lowest ? w->position[t] : lowest;
    }
    const int64_t from = c->window > 0 && lowest - c->window + 1 > start ? lowest - c->window + 1 - start : 0;
    if (highest < start || from >= tokens) return;
    const int first = (int)(from / s->block_size), n = (int)(highest + 1 - start < tokens ? highest + 1 - start : tokens);
    const int end = (t1 - w->t0) * w->group, tiles = w->size / VL;
    for (int h = w->h0; h < w->h1; h++) {
        Blocks b;
        for (int j = first; j < here.count; j++) {
            const char *k = half(s, here.id[j], c->layer, 0, h), *v = half(s, here.id[j], c->layer, 1, h), *then = k;
            if (h + 1 < w->h1)
                then = half(s, here.id[j], c->layer, 0, h + 1);
            else if (j < next.count)
                then = half(s, next.id[j], c->layer, 0, w->h0);
            if (!packed(s)) {
                pack(w, k, v, n);
                k = then = (const char *)w->k_packed, v = (const char *)w->v_packed;
            }
            b.v[j] = (const uint32_t *)v, b.v_ahead[j] = then - k;
            for (int i = 0, at = j * tiles; i < tiles; i++, at++)
                b.k[at] = (const uint32_t *)k + (int64_t)i * w->steps * VL, b.k_ahead[at] = then - k;
        }
        for (int q0 = (t0 - w->t0) * w->group, nq, fetch = 1; q0 < end; q0 += nq, fetch = 0) {
            nq = end - q0 < TILE ? end - q0 : TILE;
            int32_t positions[6];
            for (int i = 0; i < nq; i++) positions[i] = w->position[(q0 + i) / w->group];
            meet(w, (h - w->h0) * (w->t1 - w->t0) * w->group + q0, nq, positions, start, first, n, &b, fetch);
        }
    }
}

INLINE int first_token(const Item *w, int row) {
    int t = w->call->step->query_starts[row];
    return t > w->t0 ? t : w->t0;
}
INLINE int end_token(const Item *w, int row) {
    int t = w->call->step->query_starts[row + 1];
    return t < w->t1 ? t : w->t1;
}
/* The unit for the row's tokens in this chunk: without blocks after the last of them. */
INLINE Unit unit_of(const Item *w, int row, int64_t number) {
    const Step *s = w->call->step;
    const int64_t first = number * w->unit, last = w->position[end_token(w, row) - 1 - w->t0] / s->block_size;
    const int64_t count = last + 1 - first;
    return (Unit){s->table + row * s->table_row + first, (int)(count < 0 ? 0 : count < w->unit ? count : w->unit)};
}
INLINE int same(Unit a, Unit b) { return a.count == b.count && !memcmp(a.id, b.id, a.count * sizeof *a.id); }

/* Rows r0 … r1 - 1, which have unit `number` in common, from there on; `after` is what will be read when they are done. */
static void walk(Item *w, int r0, int r1, int64_t number, Unit after) {
    const Call *c = w->call;
    if (c->window > 0 && r1 == r0 + 1) { /* blocks that left the window may belong to any sequence */
        int64_t from = (w->position[first_token(w, r0) - w->t0] - c->window + 1) / (w->unit * c->step->block_size);
        number = from > number ? from : number;
    }
    for (int common = 1; common; number++) {
        const Unit here = unit_of(w, r0, number), next = unit_of(w, r0, number + 1);
        if (here.count) meet_unit(w, first_token(w, r0), end_token(w, r1 - 1), number, here, next.count ? next : after);
        for (int r = r0; r < r1 && common; r++) common = next.count && same(unit_of(w, r, number + 1), next);
    }
    for (int a = r0, b; a < r1 && r1 > r0 + 1; a = b) {
        const Unit own = unit_of(w, a, number);
        b = a + 1;
        if (!own.count) continue;
        while (b < r1 && same(unit_of(w, b, number), own)) b++;
        walk(w, a, b, number, b < r1 && unit_of(w, b, number).count ? unit_of(w, b, number) : after);
    }
}

/* All rows of a chunk. */
static void walk_rows(Item *w, int r0, int r1) {
    const Unit none = {NULL, 0};
    for (int a = r0, b; a < r1; a = b) {
        const Unit own = unit_of(w, a, 0);
        b = a + 1;
        while (w->call->step->share && b < r1 && same(unit_of(w, b, 0), own)) b++;
        walk(w, a, b, 0, b < r1 ? unit_of(w, b, 0) : none);
    }
}

static void load_queries(Item *w) {
    const Call *c = w->call;
    const Step *s = c->step;
    const int64_t size = s->dim * bytes(s);
    int i = 0;
    for (int h = w->h0; h < w->h1; h++)
        for (int64_t t = w->t0; t < w->t1; t++)
            for (int g = 0; g < w->group; g++, i++) {
                const char *from = c->q + (t * c->q_token + (h * w->group + g) * c->q_head) * bytes(s);
                float *to = w->q + i * w->steps * w->words;
                if (w->kind == WIDENED) {
                    for (int d = 0; d < w->dim; d += VL) store(to + d, load_some_bf16((const bf16 *)from + d, s->dim - d, 0));
                } else {
                    memcpy(to, from, size);
                    memset((char *)to + size, 0, w->steps * 4 - size);
                }
                w->m[i] = MASKED;
            }
    memset(w->l, 0, sizeof(float) * i * LANES);
    memset(w->acc, 0, sizeof(float) * i * w->width);
}

static void store_outputs(Item *w) {
    const Call *c = w->call;
    const Step *s = c->step;
    int i = 0;
    for (int h = w->h0; h < w->h1; h++)
        for (int64_t t = w->t0; t < w->t1; t++)
            for (int g = 0; g < w->group; g++, i++) {
                const int64_t at = t * s->q_heads + h * w->group + g;
                float sum = 0;
                for (int x = 0; x < LANES; x++) sum += w->l[i * LANES + x];
                float top = w->m[i], kept = 1;
                if (c->sinks) {
                    const float sink = c->sinks[h * w->group + g] * 1.4426950408889634f;
                    top = sink > top ? sink : top;
                    kept = exp2_(all(w->m[i] - top), 0)[0];
                    sum = sum * kept + exp2_(all(sink - top), 0)[0];
                }
                if (c->lse) c->lse[at] = (top + log2f(sum)) * 0.6931471805599453f;
                const float *acc = w->acc + i * w->width, share = kept / sum;
                for (int64_t d = 0; d < s->value_dim; d += VL) {
                    const vf x = load(acc + d) * all(share);
                    if (s->bf16)
                        store_some_bf16((bf16 *)c->out + at * s->value_dim + d, s->value_dim - d, x);
                    else
                        store_some((float *)c->out + at * s->value_dim + d, s->value_dim - d, x);
                }
            }
}

static void run_item(const Call *c, const int32_t *chunk, int64_t head) {
    const Step *s = c->step;
    Item item, *w = &item; /* half a megabyte of address space, of which only what is used is touched */
    const int r0 = chunk[2], r1 = chunk[3];
    w->call = c, w->h0 = (int)head, w->h1 = (int)(head + s->heads < s->kv_heads ? head + s->heads : s->kv_heads);
    w->group = (int)(s->q_heads / s->kv_heads);
    w->dim = padded(s->dim), w->width = padded(s->value_dim), w->size = padded(s->block_size), w->steps = s->bf16 ? w->dim / 2 : w->dim;
    w->kind = !s->bf16 ? NUMBERS : s->pairs ? PAIRS : WIDENED, w->words = w->kind == WIDENED ? 2 : 1;
    w->unit = packed(s) && s->block_size < UNIT ? UNIT / (int)s->block_size : 1;
    w->t0 = chunk[0], w->t1 = chunk[1];
    for (int r = r0; r < r1; r++)
        for (int t = first_token(w, r); t < end_token(w, r); t++)
            w->position[t - w->t0] = s->context_lens[r] - s->query_starts[r + 1] + t;
    load_queries(w);
    walk_rows(w, r0, r1);
    store_outputs(w);
}

static void write_all(Call *c) {
    const int64_t tokens = c->step->tokens;
    for (;;) {
        int64_t from = __atomic_fetch_add(&c->next_write, WRITE_TOKENS, __ATOMIC_RELAXED);
        if (from >= tokens) return;
        for (int64_t t = from; t < tokens && t < from + WRITE_TOKENS; t++) write_token(c, t);
    }
}

/* Chunks from the last to the first: in a long prompt the last ones see most blocks. */
static void attend_all(Call *c) {
    const Step *s = c->step;
    const int64_t parts = (s->kv_heads + s->heads - 1) / s->heads, items = s->num_chunks * parts;
    for (;;) {
        int64_t i = items - 1 - __atomic_fetch_add(&c->next_item, 1, __ATOMIC_RELAXED);
        if (i < 0) return;
        run_item(c, s->chunks + i / parts * 4, i % parts * s->heads);
    }
}

/* A layer's attention by a thread of a team, all of which call this; `wait(worker)` is their barrier. */
void rollout_attend_within(void *call, void (*wait)(void *), void *worker) {
    write_all(call);
    wait(worker);
    const uint64_t before = flush();
    attend_all(call);
    unflush(before);
}
static void wait_for_openmp(void *call) { ((Call *)call)->step->barrier(); }
static void write_and_attend(void *call) { rollout_attend_within(call, wait_for_openmp, call); }

/* Cut the step's tokens into chunks. 0, or what is wrong: 1 a row without tokens or of more tokens than context, 2 a block id,
   3 a slot, 4 the table is too narrow, 5 shared rows, 6 shared blocks that are not the same. */
int rollout_plan(Step *s, const int32_t *shared, int64_t groups) {
    const int64_t group = s->q_heads / s->kv_heads;
    int64_t most = CHUNK_QUERIES / group, wanted = (s->tokens * s->kv_heads + 3 * s->threads - 1) / (3 * s->threads);
    most = most > wanted ? wanted : most;
    most = most < 1 ? 1 : most;
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t count = s->query_starts[r + 1] - s->query_starts[r], context = s->context_lens[r];
        if (count < 1 || context < count) return 1;
        const int64_t blocks = (context + s->block_size - 1) / s->block_size;
        if (blocks > s->table_row) return 4;
        for (int64_t b = 0; b < blocks; b++) {
            const int32_t id = s->table[r * s->table_row + b];
            if (id < 0 || id >= s->blocks) return 2;
        }
    }
    for (int64_t t = 0; t < s->tokens; t++)
        if (s->slots[t] < 0 || s->slots[t] >= s->blocks * s->block_size) return 3;
    int64_t g = 0;
    s->num_chunks = 0;
    for (int64_t r = 0, end; r < s->rows; r = end) {
        const int32_t *next = g < groups ? shared + 3 * g : NULL;
        if (next && (next[0] < r || next[1] < 1 || next[0] + (int64_t)next[1] > s->rows)) return 5;
        if (next && next[0] == r) {
            end = r + next[1];
            g++;
            for (int64_t o = r + 1; o < end; o++)
                for (int64_t b = 0; b < next[2]; b++)
                    if (b >= s->table_row || s->table[o * s->table_row + b] != s->table[r * s->table_row + b]) return 6;
        } else { /* adjacent rows of one token are one chunk, a longer row is another */
            end = r + 1;
            while (s->query_starts[end] - s->query_starts[r] == end - r && end < s->rows &&
                   s->query_starts[end + 1] - s->query_starts[end] == 1 && !(next && next[0] == end))
                end++;
        }
        const int64_t t0 = s->query_starts[r], tokens = s->query_starts[end] - t0, n = (tokens + most - 1) / most;
        int64_t row = r;
        for (int64_t i = 0; i < n; i++) {
            int32_t *chunk = s->chunks + 4 * s->num_chunks++;
            chunk[0] = (int32_t)(t0 + tokens * i / n), chunk[1] = (int32_t)(t0 + tokens * (i + 1) / n);
            while (s->query_starts[row + 1] <= chunk[0]) row++;
            chunk[2] = (int32_t)row;
            int64_t last = row;
            while (s->query_starts[last + 1] < chunk[1]) last++;
            chunk[3] = (int32_t)last + 1;
        }
    }
    /* With chunks enough for all threads an item takes all kv heads, which lie together; else they are spread. */
    const int64_t queries = MAX_NUMBERS / padded(s->dim > s->value_dim ? s->dim : s->value_dim), fit = (queries < MAX_QUERIES ? queries : MAX_QUERIES) / (most * group);
    s->heads = s->num_chunks < 3 * s->threads ? 1 : fit < s->kv_heads ? fit : s->kv_heads;
    return g == groups ? 0 : 5;
}

/* Write k and v of the step's tokens into the pool (k NULL: they are there), then attend. Strides in elements. cap 0: none; sinks
   [q_heads] or NULL. */
void rollout_attend(const Step *s, int64_t layer, int64_t window, float scaling, float cap, const float *sinks, const void *q,
                    int64_t q_token, int64_t q_head, const void *k, int64_t k_token, int64_t k_head, const void *v,
                    int64_t v_token, int64_t v_head, void *out, float *lse) {
    Call c = {.step = s, .layer = layer, .window = window, .scale = scaling * 1.4426950408889634f, .q = q, .q_token = q_token,
              .q_head = q_head, .k = k, .k_token = k_token, .k_head = k_head, .v = v, .v_token = v_token, .v_head = v_head,
              .out = out, .lse = lse, .sinks = sinks, .next_write = k ? 0 : s->tokens};
    if (cap != 0) c.before = scaling / cap, c.scale = cap * 1.4426950408889634f;
    int64_t threads = s->num_chunks * s->kv_heads / s->heads, pairs = 0;
    threads = threads < s->threads ? threads : s->threads;
    for (int64_t r = 0; r < s->rows && pairs < WORTH_A_THREAD; r++)
        pairs += (s->query_starts[r + 1] - s->query_starts[r]) * (int64_t)s->context_lens[r];
    if (pairs < WORTH_A_THREAD) threads = 1;
    if (threads > 1 && s->parallel) {
        s->parallel(write_and_attend, &c, (unsigned)threads, 0);
    } else {
        write_all(&c);
        const uint64_t before = flush();
        attend_all(&c);
        unflush(before);
    }
}

/* The calls of n layers for `rollout_attend_within`, each over the blocks of its step s[i], as layer at[i] of their pool, with
   values as wide as keys, without caps and sinks. q, k, v and out [tokens][heads][dim] serve each layer in turn; the heads of q
   are `q_head` apart. */
void rollout_calls(Call *to, const Step *const *s, const int64_t *at, int64_t n, const float *scaling, const int64_t *window,
                   const void *q, int64_t q_head, const void *k, const void *v, void *out) {
    for (int64_t i = 0; i < n; i++)
        to[i] = (Call){.step = s[i], .layer = at[i], .window = window[i], .scale = scaling[i] * 1.4426950408889634f, .q = q, .k = k,
                       .v = v, .q_token = s[i]->q_heads * q_head, .k_token = s[i]->kv_heads * s[i]->dim,
                       .v_token = s[i]->kv_heads * s[i]->dim, .q_head = q_head, .k_head = s[i]->dim, .v_head = s[i]->dim, .out = out};
}
int64_t rollout_call_bytes(void) { return sizeof(Call); }

#define AT(field) FIELD(Step, field)
const Field rollout_layout_attention[] = {
    AT(data), AT(blocks), AT(block_bytes), AT(kv_heads), AT(block_size), AT(dim), AT(value_dim), AT(q_heads), AT(bf16), AT(layer_at), AT(rows), AT(tokens),
    AT(table_row), AT(threads), AT(share), AT(pairs), AT(query_starts), AT(context_lens), AT(table), AT(slots), AT(chunks), AT(num_chunks),
    AT(heads), AT(parallel), AT(barrier), {NULL, NULL, 0, 0}};
#undef AT
