/* What a Llama-like decoder does beside attention, for CPUs with avx512_bf16, in the numbers of torch itself.

   Eager torch makes some fifty small kernels of a layer, each with a barrier of all threads. Here all layers are one parallel
   region, or one from attention to attention where that is called from Python:

       x ─ o_proj(attention) + residual ─ norm ─ silu(gate) · up ─ down + residual ─► x ─ norm ─ q, k, v ─ rope ─► attention
           └──────────────────────── layer i ───────────────────────────────────┘         └──── layer i + 1 ────┘

   The bits are torch's: every sum below is in the order of the kernel that torch would have run, and every tensor that torch
   would have written is rounded to bf16 where torch rounds it. Python compares both before it trusts this file, since another
   release or another CPU may sum in another order (then torch does the work).

   Weights are read as they lie in the parameters, [outputs][inputs] bf16, so that new ones are seen at once. A product takes a
   panel of PANEL outputs, transposes pieces of it into the cache,

       packed [PIECE / 2][PANEL] words, a word = inputs 2i and 2i + 1 of one output

   and then acc[row][output] += x[row][word] · packed[word][output] with vdpbf16ps, all rows against a piece: one chain of
   additions for each output over `chunk` inputs, chunks added up in order. This is oneDNN's arithmetic (brg_matmul), it is the
   same for any number of rows, and no sum ever crosses lanes. */

#ifdef __AVX512BF16__
#include "vectors.h"

#include "threads.h"

enum { VECTORS = 3, PANEL = VECTORS * VL, PIECE = 512, TILE = 8, ROWS = 256, NORM_ROWS = 8 };

INLINE __m512 load16(const bf16 *p) { return (__m512)load_bf16(p); }
INLINE void store16(bf16 *p, __m512 x) { store_bf16(p, (vf)x); }

/* ---- products ---- */

typedef struct {
    const bf16 *w, *bias; /* [outputs][inputs], [outputs] or NULL */
    int64_t outputs, inputs, chunk;
} Linear;

typedef struct {
    uint32_t packed[PIECE / 2 * PANEL];
    float sum[2][ROWS * PANEL], part[ROWS * PANEL];
} __attribute__((aligned(64))) Scratch;

/* What is read next, fetched a few lines at a time between the work on what is read now: a core drops prefetches when too many
   are under way. */
typedef struct {
    const char *at, *end;
} Ahead;
INLINE void fetch(Ahead *ahead, int lines) {
    const char *stop = ahead->at + 64 * lines < ahead->end ? ahead->at + 64 * lines : ahead->end;
    if (lines <= 8) /* measured: to L1, unless they come in crowds */
        for (; ahead->at < stop; ahead->at += 64) __builtin_prefetch(ahead->at, 0, 3);
    else
        for (; ahead->at < stop; ahead->at += 64) __builtin_prefetch(ahead->at, 0, 2);
}

/* Words of rows i and i + 8 beside each other. */
INLINE __m512i pair(const uint32_t *p, int64_t row) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 8 * row));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* 16 outputs × 16 words, transposed. Rows of `from` are `row` words apart, of `to` PANEL. */
INLINE void transpose(const uint32_t *from, int64_t row, uint32_t *to) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int half = 0; half < 2; half++, from += 8, to += 8 * PANEL) {
        __m512i a[8], b[8];
        for (int i = 0; i < 8; i++) a[i] = pair(from + i * row, row);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) /* a[i + j] holds words j and j + 4 of rows i … i + 3 and i + 8 … i + 11 */
            for (int j = 0; j < 2; j++) {
                a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
                a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
            }
        for (int j = 0; j < 4; j++) {
            _mm512_storeu_si512(to + j * PANEL, _mm512_permutex2var_epi64(a[j], low, a[4 + j]));
            _mm512_storeu_si512(to + (j + 4) * PANEL, _mm512_permutex2var_epi64(a[j], high, a[4 + j]));
        }
    }
}

/* FEW: rows that leave nothing to do but to read weights, line by line. STRIDE: words of a tile between two fetches. */
enum { FEW = 8, STRIDE = 8 };

INLINE void tile(const uint32_t *x, int64_t x_row, const uint32_t *packed, int words, float *acc, int fresh, Ahead *ahead,
                 int lines, int rows, int nv) {
    __m512 sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) sum[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * PANEL + v * VL);
    for (const uint32_t *end = x + words; x < end;) {
        fetch(ahead, lines);
        for (const uint32_t *stop = x + STRIDE; x < stop; x++, packed += PANEL) {
            __m512bh b[VECTORS];
            UNROLL for (int v = 0; v < nv; v++) b[v] = (__m512bh)_mm512_loadu_si512(packed + v * VL);
            UNROLL for (int r = 0; r < rows; r++) {
                const __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[r * x_row]);
                UNROLL for (int v = 0; v < nv; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], a, b[v]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) _mm512_storeu_ps(acc + r * PANEL + v * VL, sum[r][v]);
}

typedef void (*TileFn)(const uint32_t *, int64_t, const uint32_t *, int, float *, int, Ahead *, int);
#define TILE_FN(rows, nv)                                                                                                   \
    static void tile_##rows##_##nv(const uint32_t *x, int64_t x_row, const uint32_t *p, int words, float *acc, int fresh,   \
                                   Ahead *ahead, int lines) {                                                               \
        tile(x, x_row, p, words, acc, fresh, ahead, lines, rows, nv);                                                       \
    }
#define TILE_FNS(rows) TILE_FN(rows, 1) TILE_FN(rows, 2) TILE_FN(rows, 3)
#define TILE_NAMES(rows) {tile_##rows##_1, tile_##rows##_2, tile_##rows##_3}
TILE_FNS(1) TILE_FNS(2) TILE_FNS(3) TILE_FNS(4) TILE_FNS(5) TILE_FNS(6) TILE_FNS(7) TILE_FNS(8)
static const TileFn tiles[TILE][VECTORS] = {TILE_NAMES(1), TILE_NAMES(2), TILE_NAMES(3), TILE_NAMES(4),
                                            TILE_NAMES(5), TILE_NAMES(6), TILE_NAMES(7), TILE_NAMES(8)};

INLINE int64_t panels(const Linear *l) { return (l->outputs + PANEL - 1) / PANEL; }

/* The weights of a panel, which lie together. Behind the last one: the panels of the product that follows, if any. */
INLINE Ahead panel_of(const Linear *l, int64_t panel, const Linear *then) {
    if (panel >= panels(l)) {
        if (!then || panel - panels(l) >= panels(then)) return (Ahead){NULL, NULL};
        panel -= panels(l), l = then;
    }
    const int64_t left = l->outputs - panel * PANEL, outputs = left < PANEL ? left : PANEL;
    const bf16 *w = l->w + panel * PANEL * l->inputs;
    return (Ahead){(const char *)w, (const char *)(w + outputs * l->inputs)};
}

/* sum[row][output] = x[row] · w[output] for `rows` ≤ ROWS rows and the outputs of panel number `panel`; how many outputs there
   are comes back. `ahead`: what this thread is likely to read next. */
static int product(const Linear *l, int64_t panel, Ahead ahead, const bf16 *x, int64_t rows, Scratch *s, float *sum) {
    const int64_t first = panel * PANEL, words = l->inputs / 2, tiled = (rows + TILE - 1) / TILE;
    const int width = (int)(l->outputs - first < PANEL ? l->outputs - first : PANEL), nv = width / VL;
    const uint32_t *w = (const uint32_t *)l->w + first * words;
    /* a line is a vector of weights, and there is one to fetch for each that is worked on: STRIDE words of a tile take
       STRIDE · VECTORS of TILE additions, a transposition VL of about four */
    const int per_tile = (int)((STRIDE * VECTORS + tiled - 1) / tiled), per_transposition = (int)(4 * VL / (4 + TILE * tiled));
    const int64_t most = rows <= FEW ? 2 * VL : PIECE;
    for (int64_t begin = 0; begin < l->inputs; begin += l->chunk) {
        const int64_t end = begin + l->chunk < l->inputs ? begin + l->chunk : l->inputs;
        float *acc = begin ? s->part : sum;
        for (int64_t at = begin, piece; at < end; at += piece) {
            piece = end - at < most ? end - at : most;
            const int64_t on = at + 4 * piece; /* for few rows: four lines of each output further, perhaps in the panel ahead */
            const uint32_t *soon = on < l->inputs ? w + on / 2 : ahead.at ? (const uint32_t *)ahead.at + (on - l->inputs) / 2 : w;
            for (int v = 0; v < nv; v++)
                for (int64_t i = 0; i < piece / 2; i += 16) {
                    if (rows > FEW)
                        fetch(&ahead, per_transposition);
                    else
                        for (int r = 0; r < VL; r++) __builtin_prefetch(soon + (v * VL + r) * words + i, 0, 2);
                    transpose(w + v * VL * words + at / 2 + i, words, s->packed + i * PANEL + v * VL);
                }
            for (int64_t r = 0; r < rows; r += TILE) {
                const int n = (int)(rows - r < TILE ? rows - r : TILE);
                tiles[n - 1][nv - 1]((const uint32_t *)x + r * words + at / 2, words, s->packed, (int)piece / 2,
                                     acc + r * PANEL, at == begin, &ahead, rows <= FEW ? 0 : per_tile);
            }
        }
        if (begin)
            for (int64_t i = 0; i < rows * PANEL; i += VL)
                _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sum + i), _mm512_loadu_ps(acc + i)));
    }
    if (l->bias)
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < nv; v++) {
                float *p = sum + r * PANEL + v * VL;
                _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), load16(l->bias + first + v * VL)));
            }
    return width;
}

/* out[rows][outputs] = x · wᵀ + bias (+ residual, after rounding). Work: (panel, block of ROWS rows). */
static void linear(Worker *w, const Linear *l, const Linear *then, const bf16 *x, int64_t rows, const bf16 *residual, bf16 *out,
                   Scratch *s) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t i; (i = take(w, panels(l) * blocks)) >= 0;) {
        const int64_t panel = i / blocks, r0 = i % blocks * ROWS, n = rows - r0 < ROWS ? rows - r0 : ROWS;
        const Ahead ahead = panel_of(l, panel + w->threads, then);
        const int width = product(l, panel, ahead, x + r0 * l->inputs, n, s, s->sum[0]);
        for (int64_t r = 0; r < n; r++)
            for (int v = 0; v < width; v += VL) {
                const int64_t at = (r0 + r) * l->outputs + panel * PANEL + v;
                __m512 y = _mm512_loadu_ps(s->sum[0] + r * PANEL + v);
                if (residual) y = _mm512_add_ps(load16(residual + at), rounded(y));
                store16(out + at, y);
            }
    }
}

/* out[rows][inner] = silu(x · gateᵀ) · (x · upᵀ) */
static void gated(Worker *w, const Linear *gate, const Linear *up, const Linear *then, const bf16 *x, int64_t rows, bf16 *out,
                  Scratch *s) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t i; (i = take(w, panels(gate) * blocks)) >= 0;) {
        const int64_t panel = i / blocks, r0 = i % blocks * ROWS, n = rows - r0 < ROWS ? rows - r0 : ROWS;
        const int width = product(gate, panel, panel_of(gate, panel + w->threads, then), x + r0 * gate->inputs, n, s, s->sum[0]);
        product(up, panel, panel_of(up, panel + w->threads, NULL), x + r0 * up->inputs, n, s, s->sum[1]);
        for (int64_t r = 0; r < n; r++)
            for (int v = 0; v < width; v += VL) {
                const __m512 g = rounded(_mm512_loadu_ps(s->sum[0] + r * PANEL + v)), one = _mm512_set1_ps(1);
                const __m512 minus = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(g), _mm512_set1_epi32(1 << 31)));
                const __m512 silu = rounded(_mm512_div_ps(g, _mm512_add_ps(one, exp_(minus))));
                store16(out + (r0 + r) * gate->outputs + panel * PANEL + v,
                        _mm512_mul_ps(silu, rounded(_mm512_loadu_ps(s->sum[1] + r * PANEL + v))));
            }
    }
}

/* ---- norm and rope ---- */

/* The sum of squares of n numbers, added up as torch's `sum` does (cascade_sum, in vectors of 8): four chains of vectors, each
   folded into a chain of the next level every `step` vectors. */
static float sum_of_squares(const bf16 *x, int64_t n) {
    enum { LEVELS = 4, CHAINS = 4, LANES = 8 };
    const int64_t vectors = n / LANES, size = vectors / CHAINS;
    int power = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / LEVELS > 4 ? power / LEVELS : 4;
    const int64_t step = (int64_t)1 << power;
    __m256 acc[LEVELS][CHAINS];
    for (int i = 0; i < LEVELS * CHAINS; i++) acc[i / CHAINS][i % CHAINS] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i < size; i++) {
        for (int c = 0; c < CHAINS; c++) {
            const __m128i h = _mm_loadu_si128((const __m128i *)(x + (CHAINS * i + c) * LANES));
            const __m256 y = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
            acc[0][c] = _mm256_add_ps(acc[0][c], _mm256_mul_ps(y, y));
        }
        for (int level = 1; level < LEVELS && ((i + 1) & ((1 << level * power) - 1)) == 0; level++)
            for (int c = 0; c < CHAINS; c++) {
                acc[level][c] = _mm256_add_ps(acc[level][c], acc[level - 1][c]);
                acc[level - 1][c] = _mm256_setzero_ps();
            }
    }
    for (int level = 1; level < LEVELS; level++)
        for (int c = 0; c < CHAINS; c++) acc[0][c] = _mm256_add_ps(acc[0][c], acc[level][c]);
    for (int c = 1; c < CHAINS; c++) acc[0][0] = _mm256_add_ps(acc[0][0], acc[0][c]); /* n is a multiple of 32: none is left */
    float lanes[LANES], sum = 0;
    _mm256_storeu_ps(lanes, acc[0][0]);
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

static void norm(const bf16 *x, const bf16 *weight, float eps, int64_t n, bf16 *out) {
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += VL)
        store16(out + i, _mm512_mul_ps(load16(weight + i), rounded(_mm512_mul_ps(load16(x + i), scale))));
}

static void norm_rows(Worker *w, const bf16 *x, const bf16 *weight, float eps, int64_t rows, int64_t n, bf16 *out) {
    for (int64_t i; (i = take(w, (rows + NORM_ROWS - 1) / NORM_ROWS)) >= 0;)
        for (int64_t r = i * NORM_ROWS; r < rows && r < (i + 1) * NORM_ROWS; r++) norm(x + r * n, weight, eps, n, out + r * n);
}

/* x · cos + rotate_half(x) · sin for every head of one token, in place. */
static void rope(bf16 *x, int64_t heads, int64_t dim, const bf16 *cos, const bf16 *sin) {
    const __m512i sign = _mm512_set1_epi32(1 << 31);
    for (int64_t h = 0; h < heads; h++, x += dim)
        for (int64_t d = 0; d < dim / 2; d += VL) {
            const __m512 a = load16(x + d), b = load16(x + dim / 2 + d);
            const __m512 minus = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(b), sign));
            const __m512 low = rounded(_mm512_mul_ps(minus, load16(sin + d)));
            const __m512 high = rounded(_mm512_mul_ps(a, load16(sin + dim / 2 + d)));
            store16(x + d, _mm512_add_ps(rounded(_mm512_mul_ps(a, load16(cos + d))), low));
            store16(x + dim / 2 + d, _mm512_add_ps(rounded(_mm512_mul_ps(b, load16(cos + dim / 2 + d))), high));
        }
}

/* ---- a step between two attentions ---- */

typedef struct {
    Linear q, k, v, o, gate, up, down;
    const bf16 *norm_in, *norm_post, *q_norm, *k_norm; /* the last two NULL, or [head_dim] */
    float eps_in, eps_post, eps_q, eps_k;
} Layer;

typedef struct {
    const Layer *done, *next; /* either may be NULL */
    int64_t tokens, hidden, head_dim;
    bf16 *x, *normed, *inner;    /* [tokens][hidden], the same, [tokens][widest gate] */
    const bf16 *attended;        /* [tokens][q_heads · head_dim] */
    bf16 *q, *k, *v;             /* [tokens][heads · head_dim] */
    const bf16 *cos, *sin;       /* [tokens][head_dim] */
    const bf16 *head_norm;       /* of the last norm and the LM head, for `rollout_head` */
    const Linear *head;
    float head_eps;
    bf16 *logits;                /* [tokens][vocabulary] */
} Between;

static void between(void *worker, void *work) {
    Worker *w = worker;
    const Between *b = work;
    Scratch scratch, *s = &scratch; /* 200 KiB */
    const int64_t n = b->tokens, hidden = b->hidden, dim = b->head_dim;
    if (b->done) {
        const Layer *l = b->done;
        linear(w, &l->o, &l->gate, b->attended, n, b->x, b->x, s);
        barrier(w);
        norm_rows(w, b->x, l->norm_post, l->eps_post, n, hidden, b->normed);
        barrier(w);
        gated(w, &l->gate, &l->up, &l->down, b->normed, n, b->inner, s);
        barrier(w);
        linear(w, &l->down, b->next ? &b->next->q : NULL, b->inner, n, b->x, b->x, s);
        barrier(w);
    }
    if (b->next) {
        const Layer *l = b->next;
        norm_rows(w, b->x, l->norm_in, l->eps_in, n, hidden, b->normed);
        barrier(w);
        const Linear *each[3] = {&l->q, &l->k, &l->v};
        bf16 *to[3] = {b->q, b->k, b->v};
        const int64_t blocks = (n + ROWS - 1) / ROWS, parts[3] = {panels(&l->q), panels(&l->k), panels(&l->v)};
        for (int64_t i; (i = take(w, (parts[0] + parts[1] + parts[2]) * blocks)) >= 0;) {
            int64_t panel = i / blocks, r0 = i % blocks * ROWS, rows = n - r0 < ROWS ? n - r0 : ROWS;
            int m = 0;
            while (panel >= parts[m]) panel -= parts[m++];
            const Ahead ahead = panel_of(each[m], panel + w->threads, m < 2 ? each[m + 1] : &l->o);
            const int width = product(each[m], panel, ahead, b->normed + r0 * hidden, rows, s, s->sum[0]);
            for (int64_t r = 0; r < rows; r++)
                for (int v = 0; v < width; v += VL)
                    store16(to[m] + (r0 + r) * each[m]->outputs + panel * PANEL + v,
                            _mm512_loadu_ps(s->sum[0] + r * PANEL + v));
        }
        barrier(w);
        for (int64_t i; (i = take(w, (n + NORM_ROWS - 1) / NORM_ROWS)) >= 0;)
            for (int64_t t = i * NORM_ROWS; t < n && t < (i + 1) * NORM_ROWS; t++) {
                bf16 *q = b->q + t * l->q.outputs, *k = b->k + t * l->k.outputs;
                for (int64_t h = 0; l->q_norm && h < l->q.outputs; h += dim) norm(q + h, l->q_norm, l->eps_q, dim, q + h);
                for (int64_t h = 0; l->k_norm && h < l->k.outputs; h += dim) norm(k + h, l->k_norm, l->eps_k, dim, k + h);
                rope(q, l->q.outputs / dim, dim, b->cos + t * dim, b->sin + t * dim);
                rope(k, l->k.outputs / dim, dim, b->cos + t * dim, b->sin + t * dim);
            }
    }
}

/* All layers in one region, attention included: waking a thread takes as long as a small product. */
typedef struct {
    Between step; /* but for `done` and `next` */
    const Layer *layers;
    int64_t count;
    void (*attend)(void *call, void (*wait)(void *), void *worker); /* rollout_attend_within of native.c */
    char *calls;                                                    /* [count], of call_bytes each */
    int64_t call_bytes;
} Forward;

static void wait_for_team(void *worker) { barrier(worker); }

static void forward(void *worker, void *work) {
    const Forward *f = work;
    Between b = f->step;
    for (int64_t i = 0; i <= f->count; i++) {
        b.done = i ? &f->layers[i - 1] : NULL, b.next = i < f->count ? &f->layers[i] : NULL;
        between(worker, &b);
        if (!b.next) return;
        barrier(worker);
        f->attend(f->calls + i * f->call_bytes, wait_for_team, worker);
        barrier(worker);
    }
}

static void head(void *worker, void *work) {
    Worker *w = worker;
    const Between *b = work;
    Scratch scratch;
    norm_rows(w, b->x, b->head_norm, b->head_eps, b->tokens, b->hidden, b->normed);
    barrier(w);
    linear(w, b->head, NULL, b->normed, b->tokens, NULL, b->logits, &scratch);
}

typedef struct {
    const Linear *l;
    const bf16 *x;
    bf16 *out;
    int64_t rows;
} Alone;
static void alone(void *worker, void *work) {
    const Alone *a = work;
    Scratch scratch;
    linear(worker, a->l, NULL, a->x, a->rows, NULL, a->out, &scratch);
}

void rollout_between(const Team *team, const Between *b) { run(team, between, (void *)b); }
void rollout_forward(const Team *team, const Forward *f) { run(team, forward, (void *)f); }
void rollout_head(const Team *team, const Between *b) { run(team, head, (void *)b); }
void rollout_linear(const Team *team, const Linear *l, const bf16 *x, int64_t rows, bf16 *out) {
    Alone work = {l, x, out, rows};
    run(team, alone, &work);
}
#endif
