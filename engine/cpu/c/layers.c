/* All layers of a decoder in one parallel region, in bf16 or fp32, on any CPU.

   Eager torch runs some fifty small kernels per layer, each with a barrier of all threads. Here a model is a list of steps, and
   the threads meet at a barrier after each step:

       norm ─ multiply (q, k, v) ─ heads (norms, rope) ─ attend ───────────── multiply (o) + residual ─ norm ─ multiply (gated) ─
       multiply (down) + residual                                                                       a Llama-like layer

   A multiply whose inputs are cut into slices is a sum (sums.h), which ranks may share.

       norm ─ multiply (mixed, z, a, b) ─ convolve ─ decay ─ delta ─ gated norm ─ multiply (out) + residual ─ norm ─ …
                                                                                                      a gated delta net

   A step refers to the tensors that it reads and writes by their numbers among the buffers of a forward. Weights are read from the
   parameters in place, [outputs][inputs], so a refresh in place takes effect at the next forward.

   Numbers are rounded to bf16 where eager transformers rounds them, and the sums of a norm have torch's order. Products are
   computed by products.h, recurrent mixers by recurrence.h. */

#include "layout.h"
#include "products.h"
#include "recurrence.h"
#include "sums.h"

enum { NORM_ROWS = 8, NONE = -1 };

INLINE vf get(const void *p, int64_t at, int is_bf16) {
    return is_bf16 ? load_bf16((const bf16 *)p + at) : load((const float *)p + at);
}
INLINE void put(void *p, int64_t at, vf x, int is_bf16) {
    if (is_bf16)
        store_bf16((bf16 *)p + at, x);
    else
        store((float *)p + at, x);
}
INLINE vf as(vf x, int is_bf16) { return is_bf16 ? rounded(x) : x; }

/* ---- norm and rope ---- */

typedef struct {
    const void *weight; /* NULL: no norm */
    float eps;
    int32_t plus_one; /* x · (1 + weight) in fp32, rounded once; else x is rounded before it is multiplied by the weight */
} Norm;

/* The sum of squares of n numbers, a multiple of 32, added up as torch's `sum` does (cascade_sum, in vectors of 8): four chains
   of vectors, each folded into a chain of the next level every `step` vectors. */
INLINE float sum_of_squares(const void *x, int64_t n, int is_bf16) {
    enum { LEVELS = 4, CHAINS = 4, WIDTH = CHAINS * 8, PER = WIDTH / VL }; /* the 8 lanes of 4 chains lie side by side */
    const int64_t size = n / WIDTH;
    int power = 0;
    while ((int64_t)1 << power < size) power++;
    power = power / LEVELS > 4 ? power / LEVELS : 4;
    vf acc[LEVELS][PER];
    for (int level = 0; level < LEVELS; level++)
        UNROLL for (int c = 0; c < PER; c++) acc[level][c] = all(0);
    for (int64_t i = 0; i < size; i++) {
        UNROLL for (int c = 0; c < PER; c++) {
            const vf y = get(x, i * WIDTH + c * VL, is_bf16);
            acc[0][c] += y * y;
        }
        for (int level = 1; level < LEVELS && ((i + 1) & (((int64_t)1 << level * power) - 1)) == 0; level++)
            for (int c = 0; c < PER; c++) acc[level][c] += acc[level - 1][c], acc[level - 1][c] = all(0);
    }
    float lanes[WIDTH], sum = 0;
    for (int level = 1; level < LEVELS; level++)
        for (int c = 0; c < PER; c++) acc[0][c] += acc[level][c];
    for (int c = 0; c < PER; c++) store(lanes + c * VL, acc[0][c]);
    for (int c = 1; c < CHAINS; c++)
        for (int l = 0; l < 8; l++) lanes[l] += lanes[c * 8 + l];
    for (int l = 0; l < 8; l++) sum += lanes[l];
    return sum;
}

/* out [n] = norm of x, then multiplied by silu(gate) in fp32, or added to `residual`, where there is one. */
INLINE void norm_as(const void *x, const Norm *norm, int64_t n, const void *gate, const void *residual, void *out, int is_bf16) {
    const vf scale = all(1.0f / sqrtf(sum_of_squares(x, n, is_bf16) / (float)n + norm->eps));
    for (int64_t i = 0; i < n; i += VL) {
        const vf weight = get(norm->weight, i, is_bf16), scaled = get(x, i, is_bf16) * scale;
        vf y = norm->plus_one ? scaled * (all(1) + weight) : weight * as(scaled, is_bf16);
        if (gate) y = as(y, is_bf16) * silu(get(gate, i, is_bf16));
        if (residual) y = get(residual, i, is_bf16) + as(y, is_bf16);
        put(out, i, y, is_bf16);
    }
}
static void norm(const void *x, const Norm *norm, int64_t n, const void *gate, const void *residual, void *out, int64_t is_bf16) {
    is_bf16 ? norm_as(x, norm, n, gate, residual, out, 1) : norm_as(x, norm, n, gate, residual, out, 0);
}

/* x · cos + rotate_half(x) · sin for the first `dim` numbers of every head of one token, in place. */
INLINE void rope_as(void *x, int64_t heads, int64_t apart, int64_t dim, const void *cos, const void *sin, int is_bf16) {
    for (int64_t h = 0, at = 0; h < heads; h++, at += apart)
        for (int64_t d = 0, e = dim / 2; e < dim; d += VL, e += VL) {
            const vf a = get(x, at + d, is_bf16), b = get(x, at + e, is_bf16);
            const vf low = as(minus(b) * get(sin, d, is_bf16), is_bf16), high = as(a * get(sin, e, is_bf16), is_bf16);
            put(x, at + d, as(a * get(cos, d, is_bf16), is_bf16) + low, is_bf16);
            put(x, at + e, as(b * get(cos, e, is_bf16), is_bf16) + high, is_bf16);
        }
}
static void rope(void *x, int64_t heads, int64_t apart, int64_t dim, const void *cos, const void *sin, int64_t is_bf16) {
    is_bf16 ? rope_as(x, heads, apart, dim, cos, sin, 1) : rope_as(x, heads, apart, dim, cos, sin, 0);
}

/* ---- steps; tensors are numbers of buffers, [tokens][width] each ---- */

typedef struct {
    Norm norm;
    int64_t source, residual, to, width; /* residual: of buffers, or NONE */
} NormStep;

typedef struct {
    Linear l[MOST_PRODUCTS];
    int64_t count, gated, source, residual, to[MOST_PRODUCTS]; /* gated: as Products has it */
} MultiplyStep;

typedef struct {
    Linear l;
    int64_t slices, source, residual, to; /* slices: of the eight that `l` has */
    Exchange *exchange;
} SumStep;

typedef struct {
    int64_t tensor, width, heads, apart; /* apart: numbers from one head to the next */
    Norm norm;
} HeadsOf;
typedef struct {
    HeadsOf q, k;
    int64_t dim, turned, cos, sin; /* the first `turned` numbers of each head are turned by cos and sin [tokens][turned]; 0: none */
} HeadsStep;

typedef struct {
    int64_t layer; /* of those with attention */
} AttendStep;

/* attended · sigmoid(gate), in place. The gate of a head lies `first` numbers behind that of its query. */
typedef struct {
    int64_t attended, tensor, width, first, apart, heads, dim;
} GateStep;

typedef struct {
    const void *weight, *bias;                                      /* [channels][taps], [channels] or NULL */
    int64_t layer, source, width, x, before, after;                 /* x …: first number in a row of `source`; gates may be NONE */
    int64_t to, channels, taps, silu;
} ConvolveStep;

/* b becomes sigmoid(b), and g = rate · softplus(a + dt_bias). rates: fp32, [heads] of each layer in turn, not of each token; g: fp32. */
typedef struct {
    const void *dt_bias; /* [heads] */
    int64_t layer, rates, a, b, g, heads;
} DecayStep;

typedef struct {
    int64_t layer, mixed, b, g, to, heads, key_heads, keys, columns; /* mixed: queries, keys and values side by side */
    float scale, eps;
} DeltaStep;

typedef struct {
    Norm norm;
    int64_t tensor, gate, heads, dim; /* in place */
} GatedNormStep;

enum { NORM, MULTIPLY, HEADS, ATTEND, GATE, CONVOLVE, DECAY, DELTA, GATED_NORM, SUM };
typedef struct {
    int64_t kind;
    const void *what;
} Step;

typedef struct {
    const Step *steps;
    int64_t count, tokens, is_bf16;
    void *const *buffers;
    void *packed;                                                   /* room for what is multiplied, as products read it */
    void (*attend)(void *call, void (*wait)(void *), void *worker); /* rollout_attend_within of attention.c */
    char *calls;                                                    /* of each layer with attention, call_bytes each */
    int64_t call_bytes;
    Rows rows;                                                      /* of recurrent layers */
    void *const *columns, *const *states;                           /* of each, or NULL: nothing is read or written */
    int64_t columns_slot, states_slot;                              /* numbers from one slot to the next */
} Forward;

/* Number `at` of row `i` of a tensor of `width` numbers a row. */
INLINE void *row(const Forward *f, int64_t tensor, int64_t i, int64_t width, int64_t at) {
    return (char *)f->buffers[tensor] + (i * width + at) * (f->is_bf16 ? 2 : 4);
}

/* Rows of a piece of work that is done row by row: enough pieces for all threads. */
INLINE int64_t rows_each(const Worker *w, int64_t rows) {
    const int64_t each = rows / (4 * w->threads);
    return each < 1 ? 1 : each < NORM_ROWS ? each : NORM_ROWS;
}
/* For each row of this worker. */
#define EACH_ROW(w, f, t)                                                                               \
    for (int64_t each = rows_each(w, (f)->tokens), item; (item = take(w, ((f)->tokens + each - 1) / each)) >= 0;) \
        for (int64_t t = item * each; t < (f)->tokens && t < (item + 1) * each; t++)

static void norm_rows(Worker *w, const Forward *f, const NormStep *s) {
    EACH_ROW(w, f, t) {
        const void *residual = s->residual == NONE ? NULL : row(f, s->residual, t, s->width, 0);
        norm(row(f, s->source, t, s->width, 0), &s->norm, s->width, NULL, residual, row(f, s->to, t, s->width, 0), f->is_bf16);
    }
}

/* Set what is multiplied after step `i`. */
static void set_next(Products *p, const Forward *f, int64_t i) {
    while (++i < f->count) {
        const MultiplyStep *products = f->steps[i].what;
        const SumStep *sum = f->steps[i].what;
        if (f->steps[i].kind == MULTIPLY) {
            p->then = products->l, p->then_count = products->gated ? 1 : products->count;
            return;
        }
        if (f->steps[i].kind == SUM) {
            p->then = &sum->l, p->then_count = 1;
            return;
        }
    }
}

static void multiply_rows(Worker *w, const Forward *f, int64_t i) {
    const MultiplyStep *s = f->steps[i].what;
    Products p = {.count = (int)s->count, .gated = (int)s->gated, .x = f->buffers[s->source], .rows = f->tokens,
                  .residual = s->residual == NONE ? NULL : f->buffers[s->residual], .packed = f->packed};
    for (int64_t j = 0; j < s->count; j++) p.l[j] = &s->l[j], p.out[j] = s->to[j] == NONE ? NULL : f->buffers[s->to[j]];
    set_next(&p, f, i);
    linear(w, &p);
}

static int sum_rows(Worker *w, const Forward *f, const SumStep *s) {
    const Sum sum = {.l = s->l, .slices = s->slices, .rows = f->tokens, .x = f->buffers[s->source], .out = f->buffers[s->to],
                     .residual = s->residual == NONE ? NULL : f->buffers[s->residual], .packed = f->packed,
                     .exchange = s->exchange};
    return sum_slices(w, &sum);
}

INLINE void turn(const Forward *f, const HeadsStep *s, const HeadsOf *h, int64_t t) {
    for (int64_t i = 0; h->norm.weight && i < h->heads; i++) {
        void *x = row(f, h->tensor, t, h->width, i * h->apart);
        norm(x, &h->norm, s->dim, NULL, NULL, x, f->is_bf16);
    }
    if (s->turned)
        rope(row(f, h->tensor, t, h->width, 0), h->heads, h->apart, s->turned, row(f, s->cos, t, s->turned, 0),
             row(f, s->sin, t, s->turned, 0), f->is_bf16);
}
static void turn_heads(Worker *w, const Forward *f, const HeadsStep *s) {
    EACH_ROW(w, f, t) turn(f, s, &s->q, t), turn(f, s, &s->k, t);
}

static void gate_rows(Worker *w, const Forward *f, const GateStep *s) {
    const int is_bf16 = (int)f->is_bf16;
    EACH_ROW(w, f, t)
        for (int64_t h = 0; h < s->heads; h++) {
            void *x = row(f, s->attended, t, s->heads * s->dim, h * s->dim);
            const void *gate = row(f, s->tensor, t, s->width, s->first + h * s->apart);
            for (int64_t d = 0; d < s->dim; d += VL)
                put(x, d, get(x, d, is_bf16) * as(sigmoid(get(gate, d, is_bf16)), is_bf16), is_bf16);
        }
}

static void convolve_rows(Worker *w, const Forward *f, const ConvolveStep *s) {
    const void *gates[2] = {s->before == NONE ? NULL : row(f, s->source, 0, 0, s->before),
                            s->after == NONE ? NULL : row(f, s->source, 0, 0, s->after)};
    Convolve work = {.rows = f->rows, .x = row(f, s->source, 0, 0, s->x), .weight = s->weight, .bias = s->bias, .before = gates[0],
                     .after = gates[1], .states = f->columns ? f->columns[s->layer] : NULL, .out = f->buffers[s->to],
                     .x_token = s->width, .slot = f->columns_slot, .channels = s->channels, .taps = s->taps, .silu = s->silu,
                     .is_bf16 = f->is_bf16};
    convolve(w, &work);
}

INLINE vf some(const void *p, int64_t at, int64_t n, int is_bf16) {
    return is_bf16 ? load_some_bf16((const bf16 *)p + at, n, 0) : load_some((const float *)p + at, n, 0);
}
INLINE void decay_row(const Forward *f, const DecayStep *s, int64_t t, int is_bf16) {
    const void *a = row(f, s->a, t, s->heads, 0);
    void *b = row(f, s->b, t, s->heads, 0);
    float *g = (float *)f->buffers[s->g] + t * s->heads;
    const float *rates = (const float *)f->buffers[s->rates] + s->layer * s->heads;
    for (int64_t h = 0, n; (n = s->heads - h) > 0; h += VL) {
        const vf beta = sigmoid(some(b, h, n, is_bf16)), rate = load_some(rates + h, n, 0);
        const vf step = softplus_exact(some(a, h, n, is_bf16) + some(s->dt_bias, h, n, is_bf16));
        store_some(g + h, n, rate * step);
        if (is_bf16)
            store_some_bf16((bf16 *)b + h, n, beta);
        else
            store_some((float *)b + h, n, beta);
    }
}
static void decay_rows(Worker *w, const Forward *f, const DecayStep *s) {
    EACH_ROW(w, f, t) f->is_bf16 ? decay_row(f, s, t, 1) : decay_row(f, s, t, 0);
}

static void delta_rows(Worker *w, const Forward *f, const DeltaStep *s) {
    const int64_t keys = s->key_heads * s->keys, width = 2 * keys + s->heads * s->columns;
    Delta work = {.rows = f->rows, .query = row(f, s->mixed, 0, 0, 0), .key = row(f, s->mixed, 0, 0, keys),
                  .value = row(f, s->mixed, 0, 0, 2 * keys), .beta = f->buffers[s->b], .g = f->buffers[s->g],
                  .states = f->states ? f->states[s->layer] : NULL, .out = f->buffers[s->to], .query_token = width,
                  .query_head = s->keys, .key_token = width, .key_head = s->keys, .value_token = width, .value_head = s->columns,
                  .beta_token = s->heads, .beta_head = 1, .g_token = s->heads, .g_head = 1, .slot = f->states_slot,
                  .heads = s->heads, .key_heads = s->key_heads, .keys = s->keys, .columns = s->columns, .is_bf16 = f->is_bf16,
                  .beta_is_bf16 = f->is_bf16, .normalized = 1, .scale = s->scale, .eps = s->eps};
    delta_rule(w, &work);
}

static void gated_norm_rows(Worker *w, const Forward *f, const GatedNormStep *s) {
    EACH_ROW(w, f, t)
        for (int64_t h = 0; h < s->heads; h++) {
            void *x = row(f, s->tensor, t, s->heads * s->dim, h * s->dim);
            norm(x, &s->norm, s->dim, row(f, s->gate, t, s->heads * s->dim, h * s->dim), NULL, x, f->is_bf16);
        }
}

static void wait_for_team(void *worker) { barrier(worker); }

static void forward(void *worker, void *work) {
    Worker *w = worker;
    const Forward *f = work;
    for (int64_t i = 0; i < f->count; i++) {
        const void *what = f->steps[i].what;
        switch (f->steps[i].kind) {
            case NORM: norm_rows(w, f, what); break;
            case MULTIPLY: multiply_rows(w, f, i); break;
            case HEADS: turn_heads(w, f, what); break;
            case ATTEND: f->attend(f->calls + ((const AttendStep *)what)->layer * f->call_bytes, wait_for_team, w); break;
            case GATE: gate_rows(w, f, what); break;
            case CONVOLVE: convolve_rows(w, f, what); break;
            case DECAY: decay_rows(w, f, what); break;
            case DELTA: delta_rows(w, f, what); break;
            case GATED_NORM: gated_norm_rows(w, f, what); break;
            case SUM:
                if (!sum_rows(w, f, what)) return; /* for every thread: `Exchange.failed` says why */
        }
        barrier(w);
    }
}

/* 0, or what is wrong with the rows (`check_rows`). Rows of no tokens: there are no recurrent layers. */
int64_t rollout_forward(const Team *team, const Forward *f) {
    const int64_t wrong = f->rows.count ? check_rows(&f->rows) : 0;
    if (!wrong) run(team, forward, (void *)f);
    return wrong;
}

const Field rollout_layout_layers[] = {
#define AT(field) FIELD(Norm, field)
    AT(weight), AT(eps), AT(plus_one),
#undef AT
#define AT(field) FIELD(NormStep, field)
    AT(norm), AT(source), AT(residual), AT(to), AT(width),
#undef AT
#define AT(field) FIELD(MultiplyStep, field)
    AT(l), AT(count), AT(gated), AT(source), AT(residual), AT(to),
#undef AT
#define AT(field) FIELD(HeadsOf, field)
    AT(tensor), AT(width), AT(heads), AT(apart), AT(norm),
#undef AT
#define AT(field) FIELD(HeadsStep, field)
    AT(q), AT(k), AT(dim), AT(turned), AT(cos), AT(sin),
#undef AT
#define AT(field) FIELD(SumStep, field)
    AT(l), AT(slices), AT(source), AT(residual), AT(to), AT(exchange),
#undef AT
    FIELD(AttendStep, layer),
#define AT(field) FIELD(GateStep, field)
    AT(attended), AT(tensor), AT(width), AT(first), AT(apart), AT(heads), AT(dim),
#undef AT
#define AT(field) FIELD(ConvolveStep, field)
    AT(weight), AT(bias), AT(layer), AT(source), AT(width), AT(x), AT(before), AT(after), AT(to), AT(channels), AT(taps), AT(silu),
#undef AT
#define AT(field) FIELD(DecayStep, field)
    AT(dt_bias), AT(layer), AT(rates), AT(a), AT(b), AT(g), AT(heads),
#undef AT
#define AT(field) FIELD(DeltaStep, field)
    AT(layer), AT(mixed), AT(b), AT(g), AT(to), AT(heads), AT(key_heads), AT(keys), AT(columns), AT(scale), AT(eps),
#undef AT
#define AT(field) FIELD(GatedNormStep, field)
    AT(norm), AT(tensor), AT(gate), AT(heads), AT(dim),
#undef AT
    FIELD(Step, kind), FIELD(Step, what),
#define AT(field) FIELD(Forward, field)
    AT(steps), AT(count), AT(tokens), AT(is_bf16), AT(buffers), AT(packed), AT(attend), AT(calls), AT(call_bytes), AT(rows),
    AT(columns), AT(states), AT(columns_slot), AT(states_slot),
#undef AT
    {NULL, NULL, 0, 0},
};
