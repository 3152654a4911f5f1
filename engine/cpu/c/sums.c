/* Products whose inputs are cut into eight slices, which ranks may share: each slice is summed in fp32 as products.h does it, and the
   eight sums are added up in a binary tree,

       ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))

   A rank has one, two, four or all of the slices, next to each other, so what it has is a whole branch of the tree, and the bits do not
   depend on the number of ranks. Each rank writes its branch where all can read it, they meet, and each adds up the rest of the tree, in
   the order of the ranks. */

#include <time.h>

#include "layout.h"
#include "sums.h"

enum { LEVELS = 3, WAIT_MS = 20, SPINS_MET = 4000 };

/* ---- ranks meet ---- */

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Sleep while *word is `value`, WAIT_MS at most; wake all that sleep so, in any process. */
static void sleep_shared(int32_t *word, int32_t value) {
#ifdef __linux__
    const struct timespec most = {0, WAIT_MS * 1000000L};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
#else
    (void)word, (void)value, sched_yield();
#endif
}
static void wake_shared(int32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Whether a rank that has come `arrived` times has come to exchange `turn`; both wrap around. */
INLINE int has_come(int32_t arrived, int32_t turn) { return (int32_t)((uint32_t)arrived - (uint32_t)turn) >= 0; }

/* Wait for a rank. Whether it has come. */
static int wait_for(Exchange *e, int64_t rank) {
    Meeting *m = e->meeting;
    int32_t *arrived = &m->of[rank].arrived;
    const int32_t turn = (int32_t)e->turn;
    for (int i = 0; i < SPINS_MET; i++) {
        if (has_come(__atomic_load_n(arrived, __ATOMIC_ACQUIRE), turn)) return 1;
        pause_();
    }
    const int64_t until = now_ms() + e->patience_ms;
    int came = 0;
    __atomic_add_fetch(&m->of[rank].asleep, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        const int32_t seen = __atomic_load_n(arrived, __ATOMIC_SEQ_CST);
        if ((came = has_come(seen, turn))) break;
        if ((e->failed = __atomic_load_n(&m->lost, __ATOMIC_SEQ_CST))) break;
        if (now_ms() > until) {
            e->failed = -(rank + 1);
            break;
        }
        sleep_shared(arrived, seen);
    }
    __atomic_sub_fetch(&m->of[rank].asleep, 1, __ATOMIC_SEQ_CST);
    return came;
}

void meet(Exchange *e, int64_t size) {
    if (!e->meeting || e->failed) return;
    const int32_t turn = (int32_t)e->turn;
    e->meeting->of[e->rank].size[e->turn % 2] = size;
    int32_t *arrived = &e->meeting->of[e->rank].arrived;
    __atomic_store_n(arrived, turn, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&e->meeting->of[e->rank].asleep, __ATOMIC_SEQ_CST)) wake_shared(arrived);
    for (int64_t rank = 0; rank < e->ranks; rank++) {
        if (rank != e->rank && !wait_for(e, rank)) return;
        if (e->meeting->of[rank].size[e->turn % 2] != size) {
            e->failed = -(MOST_RANKS + rank + 1);
            return;
        }
    }
}

/* Begin an exchange: this rank's part is written next. By one thread, or before the threads begin. */
void rollout_turn(Exchange *e) { e->turn++; }

/* End an exchange that is not a product's: all parts are there, if it returns 0. */
int64_t rollout_meet(Exchange *e, int64_t size) {
    meet(e, size);
    return e->failed;
}

/* ---- products ---- */

/* Slice `i` of those that this rank has. */
INLINE Linear slice_of(const Sum *p, int64_t i) {
    Linear l = p->l;
    l.inputs = p->l.inputs / p->slices;
    l.w = (const char *)l.w + bytes_of(&l, i * l.inputs);
    return l;
}

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* x of each slice, [rows][inputs of a slice], as the kernel reads it; returns the first one. Work: a slice. */
static const char *pack_slices(Worker *w, const Sum *p, const Product *product, int64_t first, int64_t rows, int64_t each) {
    const Linear l = slice_of(p, 0);
    const int64_t width = bytes_of(&l, l.inputs), cut = aligned(rows * width);
    const int as_it_lies = !product->packed_bytes(&l, rows);
    char *packed = (char *)p->packed + (as_it_lies ? 0 : p->slices * cut);
    for (int64_t i; (i = take(w, p->slices)) >= 0;) {
        char *to = (char *)p->packed + i * (as_it_lies ? each : cut);
        for (int64_t r = 0; r < rows; r++)
            memcpy(to + r * width, (const char *)p->x + ((first + r) * p->slices + i) * width, (size_t)width);
        if (as_it_lies) continue;
        Region region;
        Share share;
        Worker alone = alone_in(&region, &share);
        product->pack(&alone, &l, to, rows, packed + i * each);
    }
    return packed;
}

/* Bytes from one slice of x to the next, as the kernel reads it. */
INLINE int64_t slice_bytes(const Linear *l, const Product *product, int64_t rows) {
    const int64_t bytes = product->packed_bytes(l, rows);
    return aligned(bytes ? bytes : rows * bytes_of(l, l->inputs));
}

/* What a thread needs beside a product's own room. */
typedef struct {
    Scratch s;
    float level[LEVELS + 1][ROWS * PANEL];
} Room;

typedef struct {
    const Sum *p;
    const Product *product;
    const Tuning *tuning;
    const char *x;   /* as the kernel reads it */
    int64_t each;    /* bytes from one slice of it to the next */
    int64_t panel, from, rows;
    Ahead ahead;
    Room *room;
} Branch;

/* The sum of `n` slices from number `slice` on, in level[level]. */
static void add_up(const Branch *b, int64_t slice, int64_t n, int level) {
    float *sum = b->room->level[level];
    if (n == 1) {
        const Linear l = slice_of(b->p, slice);
        const int64_t each = (b->ahead.end - b->ahead.at) / b->p->slices;
        const Ahead ahead = {b->ahead.at + slice * each, b->ahead.at + (slice + 1) * each};
        b->product->multiply(&l, b->panel, ahead, b->x + slice * b->each, b->from, b->rows, b->tuning, &b->room->s, sum);
        return;
    }
    add_up(b, slice, n / 2, level);
    add_up(b, slice + n / 2, n / 2, level + 1);
    const float *other = b->room->level[level + 1];
    for (int64_t i = 0; i < b->rows * PANEL; i += VL) store(sum + i, load(sum + i) + load(other + i));
}

/* This rank's branch of `rows` rows. Work: (panel, block of ROWS rows). */
static void multiply_branch(Worker *w, const Sum *p, const Product *product, const char *x, int64_t rows, int64_t each, float *part) {
    const Linear l = slice_of(p, 0);
    const int64_t parts = panels(&l, product), blocks = (rows + ROWS - 1) / ROWS;
    Room room;
    if (product->begin) product->begin();
    for (int64_t i; (i = take(w, parts * blocks)) >= 0;) {
        const int64_t panel = i / blocks, first = i % blocks * ROWS, at = panel * product->panel;
        const int64_t width = l.outputs - at < product->panel ? l.outputs - at : product->panel;
        Branch b = {p, product, w->region->team->tuning, x, each, panel, first, rows - first < ROWS ? rows - first : ROWS,
                    panel_of(&p->l, panel + 1, product), &room};
        add_up(&b, 0, p->slices, 0);
        for (int64_t r = 0; r < b.rows; r++)
            memcpy(part + (first + r) * l.outputs + at, room.level[0] + r * PANEL, 4 * (size_t)width);
    }
    if (product->end) product->end();
}

/* The sum of the parts of `n` ranks from `rank` on. */
INLINE vf part(const Exchange *e, int64_t rank, int64_t at, int64_t n) { return load_some(part_of(e, rank) + at, n, 0); }
INLINE vf all_parts(const Exchange *e, int64_t at, int64_t n) {
    vf sum[MOST_RANKS];
    for (int64_t rank = 0; rank < e->ranks; rank++) sum[rank] = part(e, rank, at, n);
    for (int64_t apart = 1; apart < e->ranks; apart *= 2)
        for (int64_t rank = 0; rank < e->ranks; rank += 2 * apart) sum[rank] += sum[rank + apart];
    return sum[0];
}

INLINE vf get(const void *p, int64_t at, int64_t n, int is_bf16) {
    return is_bf16 ? load_some_bf16((const bf16 *)p + at, n, 0) : load_some((const float *)p + at, n, 0);
}
INLINE void finish(const Sum *p, int64_t first, int64_t row, int64_t at, int64_t n, int is_bf16) {
    const int64_t to = (first + row) * p->l.outputs + at;
    vf y = all_parts(p->exchange, row * p->l.outputs + at, n);
    if (p->l.bias) y += get(p->l.bias, at, n, is_bf16);
    if (p->residual) y = get(p->residual, to, n, is_bf16) + (is_bf16 ? rounded(y) : y);
    if (is_bf16)
        store_some_bf16((bf16 *)p->out + to, n, y);
    else
        store_some((float *)p->out + to, n, y);
}

/* The rows from `first` on. Work: a row. */
static void finish_rows(Worker *w, const Sum *p, int64_t first, int64_t rows) {
    for (int64_t r; (r = take(w, rows)) >= 0;)
        for (int64_t at = 0; at < p->l.outputs; at += VL)
            p->l.is_bf16 ? finish(p, first, r, at, p->l.outputs - at, 1) : finish(p, first, r, at, p->l.outputs - at, 0);
}

/* This rank's branch of the rows from `first` on, in `part`. Ends with a barrier. */
static void add_branch(Worker *w, const Sum *p, int64_t first, int64_t rows, float *part) {
    const Linear l = slice_of(p, 0);
    const Product *product = product_for(&l, w->region->team->tuning);
    const int64_t each = slice_bytes(&l, product, rows);
    const char *x = pack_slices(w, p, product, first, rows, each);
    barrier(w);
    multiply_branch(w, p, product, x, rows, each, part);
    barrier(w);
}

/* Begin an exchange. Returns this rank's part of it. */
static float *begin_exchange(Worker *w, Exchange *e) {
    if (take(w, 1) == 0) rollout_turn(e);
    barrier(w);
    return part_of(e, e->rank);
}

/* Add up the parts of the rows from `first` on, when all ranks have written theirs. Ends with a barrier; 0: the exchange has failed. */
static int end_exchange(Worker *w, const Sum *p, int64_t first, int64_t rows) {
    if (take(w, 1) == 0) meet(p->exchange, rows * p->l.outputs);
    barrier(w);
    if (p->exchange->failed) return 0;
    finish_rows(w, p, first, rows);
    barrier(w);
    return 1;
}

INLINE int64_t rows_at_once(const Sum *p, int64_t first) {
    const int64_t most = p->exchange->room / p->l.outputs, left = p->rows - first;
    return left < most ? left : most;
}

int sum_slices(Worker *w, const Sum *p) {
    for (int64_t first = 0, rows; first < p->rows; first += rows) {
        rows = rows_at_once(p, first);
        float *part = begin_exchange(w, p->exchange);
        add_branch(w, p, first, rows, part);
        if (!end_exchange(w, p, first, rows)) return 0;
    }
    return 1;
}

/* Products of several weights, each with rows of its own, in as few exchanges as one product of all rows. */
typedef struct {
    Sum all;               /* its weight is [experts][outputs][inputs], without bias */
    int64_t groups;        /* weights that have rows */
    const int64_t *expert; /* [groups] */
    const int64_t *begin;  /* [groups + 1] first row of each */
} GroupedSum;

/* This rank's branches of the rows from `first` on, in `part`. */
static void add_branches(Worker *w, const GroupedSum *g, int64_t first, int64_t rows, float *part) {
    const int64_t weight = bytes_of(&g->all.l, g->all.l.outputs * g->all.l.row);
    for (int64_t i = 0; i < g->groups; i++) {
        const int64_t from = g->begin[i] > first ? g->begin[i] : first;
        const int64_t to = g->begin[i + 1] < first + rows ? g->begin[i + 1] : first + rows;
        if (from >= to) continue;
        Sum p = g->all;
        p.l.w = (const char *)p.l.w + g->expert[i] * weight;
        add_branch(w, &p, from, to - from, part + (from - first) * p.l.outputs);
    }
}

static void grouped(void *worker, void *work) {
    Worker *w = worker;
    const GroupedSum *g = work;
    for (int64_t first = 0, rows; first < g->all.rows; first += rows) {
        rows = rows_at_once(&g->all, first);
        add_branches(w, g, first, rows, begin_exchange(w, g->all.exchange));
        if (!end_exchange(w, &g->all, first, rows)) return;
    }
}

static void alone(void *worker, void *work) { sum_slices(worker, work); }

/* 0, or how the exchange failed (`Exchange.failed`). */
int64_t rollout_sum(const Team *team, const Sum *p) {
    run(team, alone, (void *)p);
    return p->exchange->failed;
}

int64_t rollout_grouped_sum(const Team *team, const GroupedSum *g) {
    run(team, grouped, (void *)g);
    return g->all.exchange->failed;
}

/* The most that x takes in `packed`. */
int64_t rollout_sum_bytes(const Team *team, int64_t rows, int64_t inputs, int64_t slices, int64_t is_bf16) {
    const Linear l = {.outputs = 1, .inputs = inputs / slices, .is_bf16 = is_bf16};
    return slices * (aligned(rows * bytes_of(&l, l.inputs)) + slice_bytes(&l, product_for(&l, team->tuning), rows));
}

const Field rollout_layout_sums[] = {
    FIELD(Meeting, lost), FIELD(Meeting, apart), FIELD(Meeting, of),
#define AT(field) FIELD(Exchange, field)
    AT(rank), AT(ranks), AT(room), AT(patience_ms), AT(turn), AT(failed), AT(parts), AT(meeting),
#undef AT
#define AT(field) FIELD(Sum, field)
    AT(l), AT(slices), AT(rows), AT(x), AT(residual), AT(out), AT(packed), AT(exchange),
#undef AT
    FIELD(GroupedSum, all), FIELD(GroupedSum, groups), FIELD(GroupedSum, expert), FIELD(GroupedSum, begin),
    {NULL, NULL, 0, 0},
};
