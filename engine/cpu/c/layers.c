/* All layers of a Llama-like decoder except attention, in bf16 or fp32, on any CPU.

   Eager torch makes some fifty small kernels of a layer, each with a barrier of all threads. Here all layers are one parallel
   region, or one from attention to attention where that is called from Python:

       x ─ o_proj(attention) + residual ─ norm ─ silu(gate) · up ─ down + residual ─► x ─ norm ─ q, k, v ─ rope ─► attention
           └──────────────────────── layer i ───────────────────────────────────┘         └──── layer i + 1 ────┘

   Every tensor that eager transformers would have written is rounded to bf16 where that rounds it, and the sums of a norm are in
   the order of torch's own. Products are those of products.h. Weights are read as they lie in the parameters, [outputs][inputs],
   so that new ones are seen at once. */

#include "layout.h"
#include "products.h"

enum { NORM_ROWS = 8 };

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

INLINE void norm_as(const void *x, const void *weight, float eps, int64_t n, void *out, int is_bf16) {
    const vf scale = all(1.0f / sqrtf(sum_of_squares(x, n, is_bf16) / (float)n + eps));
    for (int64_t i = 0; i < n; i += VL)
        put(out, i, get(weight, i, is_bf16) * as(get(x, i, is_bf16) * scale, is_bf16), is_bf16);
}
static void norm(const void *x, const void *weight, float eps, int64_t n, void *out, int64_t is_bf16) {
    is_bf16 ? norm_as(x, weight, eps, n, out, 1) : norm_as(x, weight, eps, n, out, 0);
}

/* x · cos + rotate_half(x) · sin for every head of one token, in place. */
INLINE void rope_as(void *x, int64_t heads, int64_t dim, const void *cos, const void *sin, int is_bf16) {
    for (int64_t at = 0; at < heads * dim; at += dim)
        for (int64_t d = 0, e = dim / 2; e < dim; d += VL, e += VL) {
            const vf a = get(x, at + d, is_bf16), b = get(x, at + e, is_bf16);
            const vf low = as(minus(b) * get(sin, d, is_bf16), is_bf16), high = as(a * get(sin, e, is_bf16), is_bf16);
            put(x, at + d, as(a * get(cos, d, is_bf16), is_bf16) + low, is_bf16);
            put(x, at + e, as(b * get(cos, e, is_bf16), is_bf16) + high, is_bf16);
        }
}
static void rope(void *x, int64_t heads, int64_t dim, const void *cos, const void *sin, int64_t is_bf16) {
    is_bf16 ? rope_as(x, heads, dim, cos, sin, 1) : rope_as(x, heads, dim, cos, sin, 0);
}

/* ---- a step between two attentions ---- */

typedef struct {
    Linear q, k, v, o, gate, up, down;
    const void *norm_in, *norm_post, *q_norm, *k_norm; /* the last two NULL, or [head_dim] */
    float eps_in, eps_post, eps_q, eps_k;
} Layer;

typedef struct {
    const Layer *done, *next; /* either may be NULL */
    int64_t tokens, hidden, head_dim, is_bf16;
    void *x, *normed, *inner;    /* [tokens][hidden], the same, [tokens][widest gate] */
    const void *attended;        /* [tokens][q_heads · head_dim] */
    void *q, *k, *v;             /* [tokens][heads · head_dim] */
    const void *cos, *sin;       /* [tokens][head_dim] */
    void *packed;                /* room for what is multiplied, as products read it */
    const void *head_norm;       /* of the last norm and the LM head, for `rollout_head` */
    const Linear *head;
    float head_eps;
    void *logits;                /* [tokens][vocabulary] */
} Between;

/* Row `i` of a tensor of `width` numbers a row. */
INLINE void *row(const Between *b, const void *tensor, int64_t i, int64_t width) {
    return (char *)tensor + i * width * (b->is_bf16 ? 2 : 4);
}

static void norm_rows(Worker *w, const Between *b, const void *weight, float eps) {
    for (int64_t i; (i = take(w, (b->tokens + NORM_ROWS - 1) / NORM_ROWS)) >= 0;)
        for (int64_t r = i * NORM_ROWS; r < b->tokens && r < (i + 1) * NORM_ROWS; r++)
            norm(row(b, b->x, r, b->hidden), weight, eps, b->hidden, row(b, b->normed, r, b->hidden), b->is_bf16);
}

/* Norms of heads, where a layer has them, and rotary embeddings. */
static void turn_heads(Worker *w, const Between *b) {
    const Layer *l = b->next;
    const int64_t dim = b->head_dim, n = b->tokens;
    for (int64_t i; (i = take(w, (n + NORM_ROWS - 1) / NORM_ROWS)) >= 0;)
        for (int64_t t = i * NORM_ROWS; t < n && t < (i + 1) * NORM_ROWS; t++) {
            void *q = row(b, b->q, t, l->q.outputs), *k = row(b, b->k, t, l->k.outputs);
            const void *cos = row(b, b->cos, t, dim), *sin = row(b, b->sin, t, dim);
            const int64_t q_heads = l->q.outputs / dim, k_heads = l->k.outputs / dim;
            for (int64_t h = 0; l->q_norm && h < q_heads; h++)
                norm(row(b, q, h, dim), l->q_norm, l->eps_q, dim, row(b, q, h, dim), b->is_bf16);
            for (int64_t h = 0; l->k_norm && h < k_heads; h++)
                norm(row(b, k, h, dim), l->k_norm, l->eps_k, dim, row(b, k, h, dim), b->is_bf16);
            rope(q, q_heads, dim, cos, sin, b->is_bf16);
            rope(k, k_heads, dim, cos, sin, b->is_bf16);
        }
}

static void between(void *worker, void *work) {
    Worker *w = worker;
    const Between *b = work;
    if (b->done) {
        const Layer *l = b->done;
        const Products o = {.l = {&l->o}, .count = 1, .x = b->attended, .residual = b->x, .out = {b->x}, .rows = b->tokens,
                            .packed = b->packed, .then = &l->gate};
        const Products gated = {.l = {&l->gate, &l->up}, .count = 2, .gated = 1, .x = b->normed, .out = {b->inner},
                                .rows = b->tokens, .packed = b->packed, .then = &l->down};
        const Products down = {.l = {&l->down}, .count = 1, .x = b->inner, .residual = b->x, .out = {b->x}, .rows = b->tokens,
                               .packed = b->packed, .then = b->next ? &b->next->q : NULL};
        linear(w, &o);
        barrier(w);
        norm_rows(w, b, l->norm_post, l->eps_post);
        barrier(w);
        linear(w, &gated);
        barrier(w);
        linear(w, &down);
        barrier(w);
    }
    if (b->next) {
        const Layer *l = b->next;
        const Products qkv = {.l = {&l->q, &l->k, &l->v}, .count = 3, .x = b->normed, .out = {b->q, b->k, b->v},
                              .rows = b->tokens, .packed = b->packed, .then = &l->o};
        norm_rows(w, b, l->norm_in, l->eps_in);
        barrier(w);
        linear(w, &qkv);
        barrier(w);
        turn_heads(w, b);
    }
}

/* All layers in one region, attention included: waking a thread takes as long as a small product. */
typedef struct {
    Between step; /* but for `done` and `next` */
    const Layer *layers;
    int64_t count;
    void (*attend)(void *call, void (*wait)(void *), void *worker); /* rollout_attend_within of attention.c */
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
    const Products logits = {.l = {b->head}, .count = 1, .x = b->normed, .out = {b->logits}, .rows = b->tokens,
                             .packed = b->packed};
    norm_rows(w, b, b->head_norm, b->head_eps);
    barrier(w);
    linear(w, &logits);
}

void rollout_between(const Team *team, const Between *b) { run(team, between, (void *)b); }
void rollout_forward(const Team *team, const Forward *f) { run(team, forward, (void *)f); }
void rollout_head(const Team *team, const Between *b) { run(team, head, (void *)b); }

const Field rollout_layout_layers[] = {
    FIELD(Layer, q), FIELD(Layer, k), FIELD(Layer, v), FIELD(Layer, o), FIELD(Layer, gate), FIELD(Layer, up), FIELD(Layer, down),
    FIELD(Layer, norm_in), FIELD(Layer, norm_post), FIELD(Layer, q_norm), FIELD(Layer, k_norm),
    FIELD(Layer, eps_in), FIELD(Layer, eps_post), FIELD(Layer, eps_q), FIELD(Layer, eps_k),
    FIELD(Between, done), FIELD(Between, next), FIELD(Between, tokens), FIELD(Between, hidden), FIELD(Between, head_dim),
    FIELD(Between, is_bf16), FIELD(Between, x), FIELD(Between, normed), FIELD(Between, inner), FIELD(Between, attended),
    FIELD(Between, q), FIELD(Between, k), FIELD(Between, v), FIELD(Between, cos), FIELD(Between, sin),
    FIELD(Between, packed), FIELD(Between, head_norm), FIELD(Between, head), FIELD(Between, head_eps), FIELD(Between, logits),
    FIELD(Forward, step), FIELD(Forward, layers), FIELD(Forward, count), FIELD(Forward, attend),
    FIELD(Forward, calls), FIELD(Forward, call_bytes),
    {NULL, NULL, 0, 0},
};
