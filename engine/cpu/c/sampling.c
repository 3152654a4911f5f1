/* Sampling by inverse CDF from rows of logits, with the log-probs of torch's log_softmax.

   Sums over a vocabulary are kept in LANES lanes, of which a vector holds VL, and folded in one order: a draw has the same bits
   for every VL. */

#include "vectors.h"

#include "layout.h"
#include "threads.h"

typedef struct {
    const void *logits; /* [rows][vocabulary] fp32 or bf16 */
    int64_t is_bf16, vocabulary, draws;
    const int64_t *row;       /* [draws] */
    const float *temperature; /* [draws], 0 = greedy */
    const double *uniform;    /* [draws] in [0, 1), or -1 - t: the token t is given */
    int32_t *token;           /* [draws], and so the others */
    float *logprob, *raw;     /* raw: at temperature 1, or NULL */
    uint8_t *finite;
    int64_t lanes;            /* 16 or 8: the sum of a log-prob has so many, as torch's has with AVX-512 or AVX2 */
    const uint8_t *cuts;      /* [draws]: it cuts its distribution or forbids a token; NULL: none does */
    const int64_t *top_k;     /* [draws], 0 = off */
    const float *top_p, *min_p;
    const int64_t *first;     /* [draws + 1]: forbidden[first[i]] … forbidden[first[i + 1] - 1] are those of draw i */
    const int32_t *forbidden;
    float *scratch;           /* [threads][2][scratch_row], of the vocabulary in whole LANES and LANES more */
    int64_t scratch_row, *seats; /* seats: threads that have come, 0 at first */
    const int64_t *top;       /* [draws]: so many most probable tokens are wanted of each; NULL: none are */
    int64_t most;             /* columns of the next two, [draws][most], filled with -1 and -inf */
    int32_t *top_id;
    float *top_logprob;
} Draw;

typedef struct {
    const char *logits;
    int is_bf16, lanes;
    int64_t n;
    float temperature;
} Logits;

enum { LANES = 16, BLOCK = 32 * LANES, MAX_BLOCKS = (1 << 20) / BLOCK };

/* VL scaled logits from token i on; -inf after the end of the vocabulary. */
INLINE vf scaled(const Logits *l, int64_t i, int plain) {
    if (i >= l->n) return all(-INFINITY);
    const vf x = l->is_bf16 ? load_some_bf16((const bf16 *)l->logits + i, l->n - i, -INFINITY)
                            : load_some((const float *)l->logits + i, l->n - i, -INFINITY);
    return plain ? x : x / all(l->temperature);
}

/* The first 8 of LANES lanes take on the others, one after the other, in the order of a vector of 8. */
INLINE void add_eights(vf *sum, const vf *x) {
#if VL == 16
    const vu upper = {8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15};
    *sum = *sum + *x + __builtin_shuffle(*x, upper);
#else
    for (int p = 0; p < PARTS; p++) sum[p % (8 / VL)] += x[p];
#endif
}

/* The sum of exp(x - top) over the vocabulary, in the bits of torch's log_softmax; cumulative[b] = the mass of blocks 0 … b. */
INLINE float mass(const Logits *l, float top, double *cumulative, int plain, int lanes) {
    vf sum[PARTS], block[PARTS], e[PARTS];
    double before = 0;
    UNROLL for (int p = 0; p < PARTS; p++) sum[p] = all(0);
    for (int64_t b = 0; b * BLOCK < l->n; b++) {
        const int64_t end = l->n - b * BLOCK < BLOCK ? l->n : (b + 1) * BLOCK;
        UNROLL for (int p = 0; p < PARTS; p++) block[p] = all(0);
        for (int64_t i = b * BLOCK; i < end; i += LANES) {
            UNROLL for (int p = 0; p < PARTS; p++) {
                e[p] = exp_(scaled(l, i + p * VL, plain) - all(top));
                block[p] += e[p];
                if (lanes == 16) sum[p] += e[p];
            }
            if (lanes == 8) add_eights(sum, e);
        }
        cumulative[b] = before += fold16(block);
    }
    if (lanes == 16) return fold16(sum);
    float eight[LANES] = {0};
    UNROLL for (int p = 0; p < (VL == 16 ? 1 : 8 / VL); p++) store(eight + p * VL, sum[p]);
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++) eight[i] += eight[i + half];
    return eight[0];
}
static float mass_of(const Logits *l, float top, double *cumulative) {
    const int plain = l->temperature == 1;
    if (l->lanes == 8) return plain ? mass(l, top, cumulative, 1, 8) : mass(l, top, cumulative, 0, 8);
    return plain ? mass(l, top, cumulative, 1, 16) : mass(l, top, cumulative, 0, 16);
}

/* The largest logit; -inf or NaN or +inf among them: *finite = 0. */
static float highest(const Logits *l, uint8_t *finite) {
    vf top = all(-INFINITY);
    int64_t good = 0;
    for (int64_t i = 0; i < l->n; i += VL) {
        const vf x = scaled(l, i, 1);
        good += count(equal(x - x, all(0)));
        top = max_(top, x);
    }
    *finite = good == l->n;
    return lane_max(top);
}

static float log_of(float x) {
    float lanes[VL];
    store(lanes, log_(all(x)));
    return lanes[0];
}

static float logit(const Logits *l, int64_t i) {
    float lanes[VL];
    store(lanes, scaled(l, i - i % VL, l->temperature == 1));
    return lanes[i % VL];
}

/* The first token with this logit. */
static int32_t first_with(const Logits *l, float x) {
    for (int64_t i = 0;; i += VL) {
        const unsigned found = bits(equal(scaled(l, i, l->temperature == 1), all(x)));
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
        store(e, exp_(scaled(l, i, l->temperature == 1) - all(top)));
        for (int lane = 0; lane < VL; lane++) {
            before += e[lane];
            if (e[lane] > 0) last = i + lane;
            if (before > target) return (int32_t)(i + lane);
        }
    }
    return (int32_t)last; /* the block's sum was rounded up */
}

/* ---- cuts: weights w = exp(x - top), of which those from some least one on are kept ---- */

typedef double vd __attribute__((vector_size(4 * VL))); /* VL / 2 of them */
INLINE void add_doubles(vd *low, vd *high, vf x) {
#if VL == 16
    *low += (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    *high += (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#elif VL == 8
    *low += (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
    *high += (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#else
    *low += (vd){x[0], x[1]};
    *high += (vd){x[2], x[3]};
#endif
}

/* How many of n weights reach `least`, or what these add up to. n: a multiple of LANES. */
INLINE double reaching(const float *w, int64_t n, float least, int counted) {
    int64_t found = 0;
    double lanes[LANES];
    vd sum[2 * PARTS];
    UNROLL for (int p = 0; p < 2 * PARTS; p++) sum[p] = (vd){0};
    for (int64_t i = 0; i < n; i += LANES)
        UNROLL for (int p = 0; p < PARTS; p++) {
            const vf x = load(w + i + p * VL);
            const vm in = at_least(x, all(least));
            if (counted)
                found += count(in);
            else
                add_doubles(&sum[2 * p], &sum[2 * p + 1], choose(in, x, all(0)));
        }
    if (counted) return (double)found;
    memcpy(lanes, sum, sizeof lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* The weights on one side of `cut`, side by side, zeros up to a multiple of LANES; how many there are with these. In place at
   will: what is written over has been read. */
static int64_t one_side(const float *w, int64_t n, float cut, int above, float *to) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i += VL) {
        const vf x = load(w + i);
        kept += compress(to + kept, above ? at_least(x, all(cut)) : less(x, all(cut)), x);
    }
    for (int p = 0; p < PARTS; p++) store(to + kept + p * VL, all(0));
    return (kept + LANES - 1) / LANES * LANES;
}

/* The largest number that enough of the weights reach: `target` of them, or so many that they add up to it. `least` is reached by
   enough of them. Bisection over bits, which have the order of the numbers in [0, 1]; at each turn the weights whose side is
   known leave. `left`: room for n + LANES. */
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
    const int64_t n = (l->n + LANES - 1) / LANES * LANES, k = d->top_k[i];
    const int plain = l->temperature == 1;
    for (int64_t j = 0; j < n; j += VL) store(x + j, scaled(l, j, plain));
    for (int64_t f = d->first[i]; f < d->first[i + 1]; f++) x[d->forbidden[f]] = -INFINITY;
    vf best = all(-INFINITY);
    for (int64_t j = 0; j < n; j += VL) best = max_(best, load(x + j));
    const float top = lane_max(best);
    for (int64_t j = 0; j < n; j += VL) store(w + j, exp_(load(x + j) - all(top)));
    float least = 0; /* keeps all tokens, also those whose weight underflows */
    if (d->temperature[i] > 0) {
        if (k > 0 && reaching(w, n, least, 1) > (double)k) least = edge(w, n, least, (double)k, 1, x);
        if (d->min_p[i] > least) least = d->min_p[i];
        if (d->top_p[i] < 1) least = edge(w, n, least, d->top_p[i] * reaching(w, n, least, 0), 0, x);
    }
    for (int64_t j = 0; j < n; j += VL)
        store(x + j, choose(at_least(load(w + j), all(least)), scaled(l, j, plain), all(-INFINITY)));
    for (int64_t f = d->first[i]; f < d->first[i + 1]; f++) x[d->forbidden[f]] = -INFINITY; /* their weight, 0, may be enough */
    *l = (Logits){(const char *)x, 0, l->lanes, l->n, 1};
    return top;
}

/* The k largest logits that are left, the lower id of equal ones first, and their log-probs. */
static void most_probable(const Logits *l, float top, float log_mass, int64_t k, int32_t *id, float *logprob) {
    int64_t have = 0;
    for (int64_t i = 0; i < l->n; i += VL) {
        const vf x = scaled(l, i, l->temperature == 1);
        unsigned found = bits(less(all(have < k ? -INFINITY : logprob[k - 1]), x));
        float lanes[VL];
        if (found) store(lanes, x);
        for (; found; found &= found - 1) {
            const int lane = __builtin_ctz(found);
            if (have == k && !(lanes[lane] > logprob[k - 1])) continue;
            int64_t at = have < k ? have++ : k - 1;
            for (; at > 0 && logprob[at - 1] < lanes[lane]; at--) logprob[at] = logprob[at - 1], id[at] = id[at - 1];
            logprob[at] = lanes[lane], id[at] = (int32_t)i + lane;
        }
    }
    for (int64_t j = 0; j < have; j++) logprob[j] = logprob[j] - top - log_mass;
}

static void draw(const Draw *d, int64_t i, double *cumulative, float *scratch) {
    const Logits own = {
        (const char *)d->logits + d->row[i] * d->vocabulary * (d->is_bf16 ? 2 : 4), (int)d->is_bf16, (int)d->lanes, d->vocabulary, 1};
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
    const float log_mass = log_of(mass_of(&l, top, cumulative));
    if (d->uniform[i] < 0)
        d->token[i] = (int32_t)(-1 - d->uniform[i]);
    else
        d->token[i] = d->temperature[i] > 0 ? find(&l, top, cumulative, d->uniform[i]) : first_with(&l, top);
    d->logprob[i] = logit(&l, d->token[i]) - top - log_mass;
    if (d->top && d->top[i])
        most_probable(&l, top, log_mass, d->top[i], d->top_id + i * d->most, d->top_logprob + i * d->most);
    if (!d->raw) return;
    d->raw[i] = d->logprob[i];
    if (warmth != 1 || cuts)
        d->raw[i] = logit(&own, d->token[i]) - highest_own - log_of(mass_of(&own, highest_own, cumulative));
}

static void draw_all(void *worker, void *work) {
    const Draw *d = work;
    double cumulative[MAX_BLOCKS];
    float *scratch = d->cuts ? d->scratch + 2 * d->scratch_row * __atomic_fetch_add(d->seats, 1, __ATOMIC_RELAXED) : NULL;
    for (int64_t i; (i = take(worker, d->draws)) >= 0;) draw(d, i, cumulative, scratch);
}
void rollout_draw(const Team *team, const Draw *d) { run(team, draw_all, (void *)d); }

#define AT(field) FIELD(Draw, field)
#define AT_TEAM(field) FIELD(Team, field)
const Field rollout_layout_sampling[] = {
    AT(logits), AT(is_bf16), AT(vocabulary), AT(draws), AT(row), AT(temperature), AT(uniform), AT(token), AT(logprob), AT(raw),
    AT(finite), AT(lanes), AT(cuts), AT(top_k), AT(top_p), AT(min_p), AT(first), AT(forbidden), AT(scratch), AT(scratch_row),
    AT(seats), AT(top), AT(most), AT(top_id), AT(top_logprob), AT_TEAM(parallel), AT_TEAM(team), AT_TEAM(threads), AT_TEAM(tuning), {NULL, NULL, 0, 0}};
