/* nn.Linear for layers.c: chooses a product kernel, distributes its panels among threads, and computes outputs from its sums (bias,
   rounding, residual, silu · mul). */

#include "layout.h"
#include "products.h"
#include "tiles.h"

const Product *product_for(const Linear *l, const Tuning *tuning) {
    if (l->int8) return product_int8(tuning);
    if (!l->is_bf16) return &product_fma;
#if defined(__AMX_BF16__) || defined(PORTABLE)
    return &product_amx;
#elif defined(__AVX512BF16__)
    return tuning->dot ? &product_dot : &product_fma;
#else
    return &product_fma;
#endif
}

INLINE vf get(const void *p, int64_t at, int64_t n, int is_bf16) {
    return is_bf16 ? load_some_bf16((const bf16 *)p + at, n, 0) : load_some((const float *)p + at, n, 0);
}
INLINE void put(void *p, int64_t at, int64_t n, vf x, int is_bf16) {
    if (is_bf16)
        store_some_bf16((bf16 *)p + at, n, x);
    else
        store_some((float *)p + at, n, x);
}
INLINE vf as(vf x, int is_bf16) { return is_bf16 ? rounded(x) : x; }

/* `n` ≤ VL outputs of one row, from number `at` of the matrix on. */
INLINE void finish(const Products *p, int which, const float *sum, const float *other, int64_t row, int64_t at, int64_t n,
                   int is_bf16) {
    const Linear *l = p->l[which];
    const int64_t to = row * l->outputs + at;
    vf y = load(sum);
    if (l->bias) y += get(l->bias, at, n, is_bf16);
    if (p->residual) y = get(p->residual, to, n, is_bf16) + as(y, is_bf16);
    if (p->gated) {
        vf up = load(other);
        if (p->l[1]->bias) up += get(p->l[1]->bias, at, n, is_bf16);
        y = as(y, is_bf16);
        y = as(p->gated == BY_GELU ? gelu_tanh(y) : silu(y), is_bf16) * as(up, is_bf16);
    }
    put(p->out[which], to, n, y, is_bf16);
}

enum { SOON = 8 }; /* rows of outputs whose lines are fetched ahead: they are too far apart for the hardware's prefetcher */
INLINE void fetch_outputs(const Products *p, int which, int64_t row, int64_t from, int64_t n) {
    const Linear *l = p->l[which];
    const int64_t at = bytes_of(l, row * l->outputs + from), size = bytes_of(l, n);
    for (int64_t line = 0; line < size; line += 64) {
        __builtin_prefetch((const char *)p->out[which] + at + line, 1, 3);
        if (p->residual) __builtin_prefetch((const char *)p->residual + at + line, 0, 3);
    }
}

INLINE void finish_panel(const Products *p, int which, const Product *product, int64_t panel, int64_t first, int64_t rows,
                         const float *sum, const float *other, int is_bf16) {
    const int64_t from = panel * product->panel, left = p->l[which]->outputs - from;
    const int64_t width = left < product->panel ? left : product->panel;
    for (int64_t r = 0; r < rows; r++) {
        if (r + SOON < rows) fetch_outputs(p, which, first + r + SOON, from, width);
        for (int64_t v = 0; v < width; v += VL)
            finish(p, which, sum + r * PANEL + v, other + r * PANEL + v, first + r, from + v, width - v, is_bf16);
    }
}

static void finish_rows(const Products *p, int which, const Product *product, int64_t panel, int64_t first, int64_t rows,
                        const float *sum, const float *other) {
    if (p->l[which]->is_bf16)
        finish_panel(p, which, product, panel, first, rows, sum, other, 1);
    else
        finish_panel(p, which, product, panel, first, rows, sum, other, 0);
}

void multiply_panel(const Products *p, const Product *product, int which, int64_t panel, const Ahead *ahead, const void *x,
                    int64_t first, const Tuning *tuning, Scratch *s) {
    const int64_t rows = p->rows - first < ROWS ? p->rows - first : ROWS;
    product->multiply(p->l[which], panel, ahead[0], x, first, rows, tuning, s, s->sum[0]);
    if (p->gated) product->multiply(p->l[1], panel, ahead[1], x, first, rows, tuning, s, s->sum[1]);
    finish_rows(p, which, product, panel, first, rows, s->sum[0], s->sum[1]);
}

void multiply_panels(const Products *p, const Product *product, int64_t panel, int64_t panels, const Ahead *ahead, const void *x,
                     int64_t first, const Tuning *tuning, Scratch *s) {
    if (!p->l[0]->by_input || !product->across || p->rows > FEW) {
        for (int64_t i = 0; i < panels; i++) multiply_panel(p, product, 0, panel + i, ahead, x, first, tuning, s);
        return;
    }
    product->across(p->l[0], panel, panels, x, p->rows, tuning, s);
    for (int64_t i = 0; i < panels; i++)
        finish_rows(p, 0, product, panel + i, 0, p->rows, s->sum[0] + i * FEW * PANEL, s->sum[1]);
}

/* The panels of matrices whose panels are numbered one after the other; of gated ones those of the first. */
typedef struct {
    int64_t parts[MOST_PRODUCTS], all;
    int count;
} Panels;
INLINE Panels panels_of(const Linear *const *l, int count, const Product *product) {
    Panels p = {.count = count};
    for (int i = 0; i < count; i++) p.all += p.parts[i] = panels(l[i], product);
    return p;
}
INLINE int which_of(const Panels *p, int64_t *panel) {
    int which = 0;
    while (*panel >= p->parts[which]) *panel -= p->parts[which++];
    return which;
}

/* What this worker multiplies first of `p->then`, if anything follows. */
static Ahead first_of_next(const Worker *w, const Products *p, const Product *product) {
    const Linear *l[MOST_PRODUCTS];
    for (int64_t i = 0; i < p->then_count; i++) l[i] = p->then + i;
    const Panels next = panels_of(l, (int)p->then_count, product);
    int64_t panel = share_of(next.all, w->id, w->threads);
    if (panel >= next.all) return (Ahead){NULL, NULL};
    const int which = which_of(&next, &panel);
    return panel_of(l[which], panel, product);
}

/* Work: (panel, block of ROWS rows); two panels at once if gated. A worker's share is some panels; or, where there are blocks enough, some
   rows, which are those that it has in what is done row by row. */
void linear(Worker *w, const Products *p) {
    const Tuning *tuning = w->region->team->tuning;
    const Product *product = product_for(p->l[0], tuning);
    const void *x = p->x;
    Scratch scratch, *s = &scratch; /* 250 KiB */
    if (product->packed_bytes(p->l[0], p->rows)) {
        product->pack(w, p->l[0], x, p->rows, p->packed);
        barrier(w);
        x = p->packed;
    }
    const Panels of = panels_of(p->l, p->gated ? 1 : p->count, product);
    const int64_t blocks = (p->rows + ROWS - 1) / ROWS, items = of.all * blocks, end = share_of(items, w->id + 1, w->threads);
    const int by_rows = blocks >= 2 * w->threads;
    if (product->begin) product->begin();
    for (int64_t i; (i = take(w, items)) >= 0;) {
        int64_t panel = by_rows ? i % of.all : i / blocks, next = panel + 1;
        const int64_t first = (by_rows ? i / of.all : i % blocks) * ROWS;
        const int last = next == of.all || (!by_rows && next == (end + blocks - 1) / blocks);
        const int which = which_of(&of, &panel), after = last ? which : which_of(&of, &next);
        const Ahead ahead[2] = {last ? first_of_next(w, p, product) : panel_of(p->l[after], next, product),
                                p->gated && !last ? panel_of(p->l[1], next, product) : (Ahead){NULL, NULL}};
        multiply_panel(p, product, which, panel, ahead, x, first, tuning, s);
    }
    if (product->end) product->end();
}

static void alone(void *worker, void *work) { linear(worker, work); }

/* out [rows][outputs] = x [rows][inputs] · wᵀ + bias. packed: room for `rollout_packed_bytes`. */
void rollout_linear(const Team *team, const Linear *l, const void *x, int64_t rows, void *packed, void *out) {
    Products work = {.l = {l}, .out = {out}, .count = 1, .x = x, .rows = rows, .packed = packed};
    run(team, alone, &work);
}

typedef struct {
    const Linear *l;
    int64_t count, rows;
    const void *x;
    void *packed, *out;
} InTurn;
static void in_turn(void *worker, void *work) {
    const InTurn *a = work;
    for (int64_t i = 0; i < a->count; i++) {
        const Products p = {.l = {a->l + i}, .out = {a->out}, .count = 1, .x = a->x, .rows = a->rows, .packed = a->packed,
                            .then = a->l + i + 1, .then_count = i + 1 < a->count};
        linear(worker, &p);
        barrier(worker);
    }
}
/* The same x times `count` matrices of one shape, one product after the other, each into `out`, as layers do it: in one region, and
   every product fetches the beginning of the next one. For the benchmark. */
void rollout_linears(const Team *team, const Linear *l, int64_t count, const void *x, int64_t rows, void *packed, void *out) {
    InTurn work = {.l = l, .count = count, .rows = rows, .x = x, .packed = packed, .out = out};
    run(team, in_turn, &work);
}

/* The most that x takes as any product of this type reads it. */
int64_t rollout_packed_bytes(const Team *team, int64_t rows, int64_t inputs, int64_t is_bf16) {
    const Linear l = {.outputs = 1, .inputs = inputs, .is_bf16 = is_bf16};
    return product_for(&l, team->tuning)->packed_bytes(&l, rows);
}

typedef struct {
    const void *x;
    void *out;
    int64_t n, is_bf16;
} Silu;
static void silu_all(void *worker, void *work) {
    enum { PIECE = 256 * VL };
    const Silu *a = work;
    for (int64_t i; (i = take(worker, (a->n + PIECE - 1) / PIECE)) >= 0;)
        for (int64_t at = i * PIECE; at < a->n && at < (i + 1) * PIECE; at += VL)
            put(a->out, at, a->n - at, silu(get(a->x, at, a->n - at, (int)a->is_bf16)), (int)a->is_bf16);
}
/* out[n] = x / (1 + e^-x), each number by itself: torch's own takes another exp for the last numbers of each thread's share. */
void rollout_silu(const Team *team, const void *x, int64_t n, int64_t is_bf16, void *out) {
    Silu work = {x, out, n, is_bf16};
    run(team, silu_all, &work);
}

/* What the operating system must allow before anything else is called: 0 if it does. */
int64_t rollout_prepare(void) {
#if defined(__AMX_BF16__) && !defined(PORTABLE)
    return allow_tiles();
#else
    return 0;
#endif
}

const Field rollout_layout_products[] = {
    FIELD(Linear, w),    FIELD(Linear, bias),  FIELD(Linear, outputs), FIELD(Linear, inputs), FIELD(Linear, is_bf16),
    FIELD(Linear, by_input), FIELD(Linear, int8), FIELD(Linear, row),
    FIELD(Tuning, dot),  FIELD(Tuning, piece), FIELD(Tuning, few),     FIELD(Tuning, bytes),
    {NULL, NULL, 0, 0},
};
