/* Products of a mixture's experts, each with the rows of the tokens that chose it, in one parallel region; then the sum of a token's
   results.

   Rows are sorted by expert. A group is an expert with at least one row. Sums and roundings are those of linear.c, so a row has the
   same bits whichever rows share its expert. */

#include "layout.h"
#include "products.h"

enum { BLOCK = 16, COLUMNS = 512 }; /* rows that are packed at once, as AMX reads them; numbers of a token that are added up at once */

typedef struct {
    Linear all;            /* weight [experts][outputs][inputs], bias [experts][outputs] or NULL */
    int64_t gated;         /* outputs are two halves, gate and up: out = silu(gate) · up */
    int64_t groups, k;     /* k: choices of a token; 0: x has a row for each choice, sorted */
    const int64_t *expert; /* [groups] */
    const int64_t *begin;  /* [groups + 1] first row of each */
    const int64_t *choice; /* [rows] token · k + place */
    int64_t *blocks, *parts; /* room for [groups + 1] each: BLOCK rows and ROWS rows before a group, cut off at its end */
    const void *x;           /* [tokens or rows][inputs] */
    void *gathered, *packed; /* room for [rows][inputs]; for what `rollout_packed_bytes` says of rows + 15 · groups */
    void *out;               /* [rows][outputs, or half of them] */
} Grouped;

INLINE int64_t rows_of(const Grouped *g, int64_t group) { return g->begin[group + 1] - g->begin[group]; }

/* A group's weights; of gated ones the first or the second half. */
INLINE Linear weights_of(const Grouped *g, int64_t group, int half) {
    Linear l = g->all;
    l.outputs = g->gated ? g->all.outputs / 2 : g->all.outputs;
    const int64_t at = g->expert[group] * g->all.outputs + half * l.outputs;
    l.w = (const char *)l.w + bytes_of(&l, at * l.inputs);
    if (l.bias) l.bias = (const char *)l.bias + bytes_of(&l, at);
    return l;
}

/* The group of an item, where `before` counts the items of the groups before each; it is probably near `group`. */
INLINE int64_t group_of(const Grouped *g, const int64_t *before, int64_t each, int64_t item, int64_t group) {
    while (item < each * before[group]) group--;
    while (group < g->groups && item >= each * before[group + 1]) group++;
    return group;
}

/* Work: BLOCK rows of a group, side by side and then as the kernel reads them. */
static void gather(Worker *w, const Grouped *g, const Product *product, int64_t packed_block) {
    const int64_t row = bytes_of(&g->all, g->all.inputs);
    for (int64_t i, group = 0; (i = take(w, g->blocks[g->groups])) >= 0;) {
        group = group_of(g, g->blocks, 1, i, group);
        const int64_t first = (i - g->blocks[group]) * BLOCK, left = rows_of(g, group) - first, at = g->begin[group] + first;
        const int64_t rows = left < BLOCK ? left : BLOCK;
        for (int64_t r = at; g->k && r < at + rows; r++)
            memcpy((char *)g->gathered + r * row, (const char *)g->x + g->choice[r] / g->k * row, (size_t)row);
        if (packed_block) {
            Region region;
            Share share;
            Worker alone = alone_in(&region, &share);
            const void *from = g->k ? g->gathered : g->x;
            product->pack(&alone, &g->all, (const char *)from + at * row, rows, (char *)g->packed + i * packed_block);
        }
    }
}

/* Work: (group, panel or SPAN of them, ROWS rows). */
static void grouped(void *worker, void *work) {
    Worker *w = worker;
    const Grouped *g = work;
    const Tuning *tuning = w->region->team->tuning;
    const Product *product = product_for(&g->all, tuning);
    const int64_t packed_block = product->packed_bytes(&g->all, BLOCK), row = bytes_of(&g->all, g->all.inputs);
    Scratch scratch, *s = &scratch; /* 250 KiB */
    if (g->k || packed_block) {
        gather(w, g, product, packed_block);
        barrier(w);
    }
    const Linear any = weights_of(g, 0, 0);
    const int64_t span = any.by_input ? SPAN : 1, spans = (panels(&any, product) + span - 1) / span;
    const int64_t items = spans * g->parts[g->groups];
    if (product->begin) product->begin();
    for (int64_t i, group = 0; (i = take(w, items)) >= 0;) {
        group = group_of(g, g->parts, spans, i, group);
        const int64_t parts = g->parts[group + 1] - g->parts[group], local = i - spans * g->parts[group];
        const int64_t panel = local / parts * span, first = local % parts * ROWS, left = panels(&any, product) - panel;
        const Linear l[2] = {weights_of(g, group, 0), weights_of(g, group, 1)};
        Ahead next = {NULL, NULL};
        const int64_t then = group_of(g, g->parts, spans, i + 1, group);
        if (then < g->groups) {
            const Linear of = weights_of(g, then, 0);
            const int64_t at = i + 1 - spans * g->parts[then];
            next = panel_of(&of, at / (g->parts[then + 1] - g->parts[then]), product);
        }
        const Ahead ahead[2] = {g->gated ? panel_of(&l[1], panel, product) : next, next};
        const Products p = {.l = {&l[0], &l[1]}, .count = 1, .gated = (int)g->gated, .rows = rows_of(g, group),
                            .out = {(char *)g->out + bytes_of(&any, g->begin[group] * any.outputs)}};
        const char *x = packed_block ? (const char *)g->packed + g->blocks[group] * packed_block
                                     : (const char *)(g->k ? g->gathered : g->x) + g->begin[group] * row;
        multiply_panels(&p, product, panel, left < span ? left : span, ahead, x, first, tuning, s);
    }
    if (product->end) product->end();
}

/* out = the product of each row of x with the weights of its expert, and its bias or gate. */
void rollout_grouped(const Team *team, const Grouped *g) {
    g->blocks[0] = g->parts[0] = 0;
    for (int64_t i = 0; i < g->groups; i++) {
        g->blocks[i + 1] = g->blocks[i] + (rows_of(g, i) + BLOCK - 1) / BLOCK;
        g->parts[i + 1] = g->parts[i] + (rows_of(g, i) + ROWS - 1) / ROWS;
    }
    if (g->groups) run(team, grouped, (void *)g);
}

typedef struct {
    int64_t tokens, k, width, rows, is_bf16;
    const int64_t *place;  /* [tokens][k] rows of a token's choices, ascending; from `rows` on: of no expert */
    const int64_t *choice; /* [rows] */
    const float *weights;  /* [tokens · k] */
    const void *x;         /* [rows][width] */
    void *out;             /* [tokens][width] */
} Combine;

INLINE void combine_as(const Combine *c, int64_t token, int64_t from, int64_t to, int is_bf16) {
    for (int64_t at = from; at < to; at += VL) {
        const int64_t n = to - at;
        vf sum = all(0);
        for (int64_t i = token * c->k; i < (token + 1) * c->k && c->place[i] < c->rows; i++) {
            const int64_t x = c->place[i] * c->width + at;
            const vf y = is_bf16 ? load_some_bf16((const bf16 *)c->x + x, n, 0) : load_some((const float *)c->x + x, n, 0);
            sum += y * all(c->weights[c->choice[c->place[i]]]);
        }
        if (is_bf16)
            store_some_bf16((bf16 *)c->out + token * c->width + at, n, sum);
        else
            store_some((float *)c->out + token * c->width + at, n, sum);
    }
}
static void combine(void *worker, void *work) {
    const Combine *c = work;
    const int64_t pieces = (c->width + COLUMNS - 1) / COLUMNS;
    for (int64_t i; (i = take(worker, c->tokens * pieces)) >= 0;) {
        const int64_t from = i % pieces * COLUMNS, to = from + COLUMNS < c->width ? from + COLUMNS : c->width;
        c->is_bf16 ? combine_as(c, i / pieces, from, to, 1) : combine_as(c, i / pieces, from, to, 0);
    }
}

/* out[token] = the sum of its experts' results times their weights, in order of expert, in fp32, rounded once. */
void rollout_combine(const Team *team, const Combine *c) { run(team, combine, (void *)c); }

const Field rollout_layout_experts[] = {
    FIELD(Grouped, all), FIELD(Grouped, gated), FIELD(Grouped, groups), FIELD(Grouped, k), FIELD(Grouped, expert),
    FIELD(Grouped, begin), FIELD(Grouped, choice), FIELD(Grouped, blocks), FIELD(Grouped, parts), FIELD(Grouped, x),
    FIELD(Grouped, gathered), FIELD(Grouped, packed), FIELD(Grouped, out),
    FIELD(Combine, tokens), FIELD(Combine, k), FIELD(Combine, width), FIELD(Combine, rows), FIELD(Combine, is_bf16),
    FIELD(Combine, place), FIELD(Combine, choice), FIELD(Combine, weights), FIELD(Combine, x), FIELD(Combine, out),
    {NULL, NULL, 0, 0},
};
