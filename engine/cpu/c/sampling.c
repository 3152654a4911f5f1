/* Draws by inverse CDF from rows of logits, with the log-probs of torch's own log_softmax. */

#ifdef __AVX512F__
#include "vectors.h"

#include "threads.h"

INLINE __m512 widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

typedef struct {
    const void *logits; /* [rows][vocabulary] fp32 or bf16 */
    int64_t is_bf16, vocabulary, draws;
    const int64_t *row;       /* [draws] */
    const float *temperature; /* [draws], 0 = greedy */
    const double *uniform;    /* [draws] in [0, 1) */
    int32_t *token;           /* [draws], and so the others */
    float *logprob, *raw;     /* raw: at temperature 1, or NULL */
    uint8_t *finite;
    __m512 (*log)(__m512); /* Sleef_logf16_u10 as torch has it, or NULL */
    const uint8_t *cuts;      /* [draws]: it cuts its distribution or forbids a token; NULL: none does */
    const int64_t *top_k;     /* [draws], 0 = off */
    const float *top_p, *min_p;
    const int64_t *first;     /* [draws + 1]: forbidden[first[i]] … forbidden[first[i + 1] - 1] are those of draw i */
    const int32_t *forbidden;
    float *scratch;           /* [threads][2][scratch_row], of the vocabulary in whole VL and one VL more */
    int64_t scratch_row, *seats; /* seats: threads that have come, 0 at first */
} Draw;

typedef struct {
    const char *logits;
    int is_bf16;
    int64_t n;
    float temperature;
} Logits;

/* 16 scaled logits from token i on; what lies behind the vocabulary is -inf. */
INLINE __m512 scaled(const Logits *l, int64_t i, int plain) {
    const __mmask16 in = l->n - i < VL ? (__mmask16)((1u << (l->n - i)) - 1) : 0xffff;
    const __m512 least = _mm512_set1_ps(-INFINITY);
    __m512 x;
    if (l->is_bf16)
        x = _mm512_mask_mov_ps(least, in, widen(_mm256_maskz_loadu_epi16(in, l->logits + 2 * i)));
    else
        x = _mm512_mask_loadu_ps(least, in, l->logits + 4 * i);
    return plain ? x : _mm512_div_ps(x, _mm512_set1_ps(l->temperature));
}

enum { BLOCK = 32 * VL, MAX_BLOCKS = (1 << 20) / BLOCK };

/* The sum of exp(x - top) over the vocabulary, in the bits of torch's log_softmax; cumulative[b] = the mass of blocks 0 … b. */
INLINE float mass(const Logits *l, float top, double *cumulative, int plain) {
    __m512 all = _mm512_setzero_ps();
    double before = 0;
    for (int64_t b = 0; b * BLOCK < l->n; b++) {
        const int64_t end = l->n - b * BLOCK < BLOCK ? l->n : (b + 1) * BLOCK;
        __m512 block = _mm512_setzero_ps();
        for (int64_t i = b * BLOCK; i < end; i += VL) {
            const __m512 e = exp_(_mm512_sub_ps(scaled(l, i, plain), _mm512_set1_ps(top)));
            all = _mm512_add_ps(all, e);
            block = _mm512_add_ps(block, e);
        }
        cumulative[b] = before += _mm512_reduce_add_ps(block);
    }
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
static float mass_of(const Logits *l, float top, double *cumulative) {
    return l->temperature == 1 ? mass(l, top, cumulative, 1) : mass(l, top, cumulative, 0);
}

/* The largest logit; -inf or NaN or +inf among them: *finite = 0. */
static float highest(const Logits *l, uint8_t *finite) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    __mmask16 bad = 0;
    for (int64_t i = 0; i < l->n; i += VL) {
        const __mmask16 in = l->n - i < VL ? (__mmask16)((1u << (l->n - i)) - 1) : 0xffff;
        const __m512 x = scaled(l, i, 1);
        bad |= _mm512_mask_fpclass_ps_mask(in, x, 0x99); /* quiet NaN, ±inf, signalling NaN */
        top = _mm512_max_ps(top, x);
    }
    *finite = !bad;
    return _mm512_reduce_max_ps(top);
}

static float log_of(const Draw *d, float x) {
    return d->log ? _mm512_cvtss_f32(d->log(_mm512_set1_ps(x))) : logf(x);
}

static float logit(const Logits *l, int64_t i) {
    float lanes[VL];
    _mm512_storeu_ps(lanes, scaled(l, i - i % VL, l->temperature == 1));
    return lanes[i % VL];
}

/* The first token with this logit. */
static int32_t first_with(const Logits *l, float x) {
    for (int64_t i = 0;; i += VL) {
        const __mmask16 found = _mm512_cmp_ps_mask(scaled(l, i, l->temperature == 1), _mm512_set1_ps(x), _CMP_EQ_OQ);
        if (found) return (int32_t)i + __builtin_ctz(found);
    }
}

/* The first token whose cumulative mass exceeds `target`: its block first, then the token within. */
static int32_t find(const Logits *l, float top, const double *cumulative, double u) {
    const int64_t blocks = (l->n + BLOCK - 1) / BLOCK;
    const double target = u * cumulative[blocks - 1];
    int64_t b = 0;
    while (b + 1 < blocks && cumulative[b] <= target) b++;
    double before = b ? cumulative[b - 1] : 0;
    int64_t last = b * BLOCK;
    for (int64_t i = b * BLOCK; i < l->n && i < (b + 1) * BLOCK; i += VL) {
        float e[VL];
        _mm512_storeu_ps(e, exp_(_mm512_sub_ps(scaled(l, i, l->temperature == 1), _mm512_set1_ps(top))));
        for (int lane = 0; lane < VL; lane++) {
            before += e[lane];
            if (e[lane] > 0) last = i + lane;
            if (before > target) return (int32_t)(i + lane);
        }
    }
    return (int32_t)last; /* the block's sum was rounded up */
}

/* ---- cuts: weights w = exp(x - top), of which those from some least one on are kept ---- */

/* How many of n weights reach `least`, or what these add up to. n: a multiple of VL. */
INLINE double reaching(const float *w, int64_t n, float least, int counted) {
    int64_t count = 0;
    __m512d low = _mm512_setzero_pd(), high = low;
    for (int64_t i = 0; i < n; i += VL) {
        const __m512 x = _mm512_loadu_ps(w + i);
        const __mmask16 in = _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ);
        if (counted) {
            count += __builtin_popcount(in);
        } else {
            const __m512 kept = _mm512_maskz_mov_ps(in, x);
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(kept)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(kept, 1)));
        }
    }
    return counted ? (double)count : _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

/* The weights on one side of `cut`, side by side, zeros up to a multiple of VL; how many there are with these. In place at will. */
static int64_t one_side(const float *w, int64_t n, float cut, int above, float *to) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += VL) {
        const __m512 x = _mm512_loadu_ps(w + i);
        const __mmask16 reach = _mm512_cmp_ps_mask(x, _mm512_set1_ps(cut), _CMP_GE_OQ), in = above ? reach : (__mmask16)~reach;
        _mm512_storeu_ps(to + kept, _mm512_maskz_compress_ps(in, x)); /* what it writes over has been read */
        kept += __builtin_popcount(in);
    }
    _mm512_storeu_ps(to + kept, _mm512_setzero_ps());
    return (kept + VL - 1) / VL * VL;
}

/* The largest number that enough of the weights reach: `target` of them, or so many that they add up to it. `least` is reached by
   enough of them. Bisection over bits, which have the order of the numbers in [0, 1]; at each turn the weights whose side is
   known leave. `left`: room for n + VL. */
INLINE float edge(const float *w, int64_t n, float least, double target, int counted, float *left) {
    union {
        uint32_t bits;
        float number;
    } low = {.number = least}, high = {.number = 1}, middle;
    high.bits++;
    for (double above = 0; high.bits - low.bits > 1;) { /* above: of the weights from `high` on */
        middle.bits = low.bits + (high.bits - low.bits) / 2;
        const double more = reaching(w, n, middle.number, counted);
        const int enough = above + more >= target;
        n = one_side(w, n, middle.number, enough, left);
        w = left;
        if (enough)
            low = middle;
        else
            high = middle, above += more;
    }
    return low.number;
}

/* The logits of draw i that are left, scaled, as fp32 in `x`; all others are -inf there. Returns the largest one, -inf if none is. */
static float cut(const Draw *d, int64_t i, Logits *l, float *w, float *x) {
    const int64_t n = (l->n + VL - 1) / VL * VL, k = d->top_k[i];
    const int plain = l->temperature == 1;
    for (int64_t j = 0; j < n; j += VL) _mm512_storeu_ps(x + j, scaled(l, j, plain));
    for (int64_t f = d->first[i]; f < d->first[i + 1]; f++) x[d->forbidden[f]] = -INFINITY;
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < n; j += VL) best = _mm512_max_ps(best, _mm512_loadu_ps(x + j));
    const float top = _mm512_reduce_max_ps(best);
    for (int64_t j = 0; j < n; j += VL)
        _mm512_storeu_ps(w + j, exp_(_mm512_sub_ps(_mm512_loadu_ps(x + j), _mm512_set1_ps(top))));
    float least = 1e-45f; /* the smallest there is: whatever has a weight */
    if (d->temperature[i] > 0) {
        if (k > 0 && reaching(w, n, least, 1) > (double)k) least = edge(w, n, least, (double)k, 1, x);
        if (d->min_p[i] > least) least = d->min_p[i];
        if (d->top_p[i] < 1) least = edge(w, n, least, d->top_p[i] * reaching(w, n, least, 0), 0, x);
    }
    for (int64_t j = 0; j < n; j += VL) {
        const __mmask16 in = _mm512_cmp_ps_mask(_mm512_loadu_ps(w + j), _mm512_set1_ps(least), _CMP_GE_OQ);
        _mm512_storeu_ps(x + j, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), in, scaled(l, j, plain)));
    }
    *l = (Logits){(const char *)x, 0, l->n, 1};
    return top;
}

static void draw(const Draw *d, int64_t i, double *cumulative, float *scratch) {
    const Logits own = {
        (const char *)d->logits + d->row[i] * d->vocabulary * (d->is_bf16 ? 2 : 4), (int)d->is_bf16, d->vocabulary, 1};
    const float highest_own = highest(&own, &d->finite[i]), warmth = d->temperature[i] > 0 ? d->temperature[i] : 1;
    d->token[i] = 0, d->logprob[i] = 0;
    if (d->raw) d->raw[i] = 0;
    if (!d->finite[i]) return;
    Logits l = own;
    l.temperature = warmth;
    float top = highest_own / warmth;
    const int cuts = d->cuts && d->cuts[i];
    if (cuts) top = cut(d, i, &l, scratch, scratch + d->scratch_row);
    if (!(d->finite[i] = top > -INFINITY)) return;
    const float log_mass = log_of(d, mass_of(&l, top, cumulative));
    d->token[i] = d->temperature[i] > 0 ? find(&l, top, cumulative, d->uniform[i]) : first_with(&l, top);
    d->logprob[i] = logit(&l, d->token[i]) - top - log_mass;
    if (!d->raw) return;
    d->raw[i] = d->logprob[i];
    if (warmth != 1 || cuts)
        d->raw[i] = logit(&own, d->token[i]) - highest_own - log_of(d, mass_of(&own, highest_own, cumulative));
}

static void draw_all(void *worker, void *work) {
    const Draw *d = work;
    double cumulative[MAX_BLOCKS];
    float *scratch = d->cuts ? d->scratch + 2 * d->scratch_row * __atomic_fetch_add(d->seats, 1, __ATOMIC_RELAXED) : NULL;
    for (int64_t i; (i = take(worker, d->draws)) >= 0;) draw(d, i, cumulative, scratch);
}
void rollout_draw(const Team *team, const Draw *d) { run(team, draw_all, (void *)d); }
#endif
