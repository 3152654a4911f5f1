/* Interface of the product kernels, x · wᵀ: one file and one line of `product_for` (linear.c) for each kernel.

   A kernel multiplies the rows of x with a *panel* of outputs, whose weights are read in place, and leaves fp32 sums; what
   becomes of these (bias, rounding, residual, silu · mul) is in linear.c and the same for all. The bits of a sum depend on its
   row of x and its row of weights alone. */
#pragma once

#include "flush.h"
#include "threads.h"
#include "vectors.h"

#define HIDDEN __attribute__((visibility("hidden")))
enum { PANEL = 48, ROWS = 256 }; /* floats between two rows of sums; rows that meet a panel at once, at most */
enum { SPAN = 8, FEW = 16 };     /* panels of a weight [inputs][outputs] that are read side by side; with so many rows at most */

typedef struct {
    const void *w, *bias; /* [outputs][inputs], [outputs] or NULL */
    int64_t outputs, inputs, is_bf16;
    int64_t by_input; /* the weight lies as [inputs][outputs] */
    int64_t int8;     /* the weight is codes of eight bits, as product_int8.c has them; is_bf16 is of x and of the bias */
    int64_t row;      /* numbers from the weights of an output to those of the next one, unless by_input or int8 */
} Linear;

INLINE int64_t bytes_of(const Linear *l, int64_t numbers) { return numbers * (l->is_bf16 ? 2 : 4); }

/* Of one thread. */
typedef struct {
    uint32_t packed[512 * PANEL];
    float sum[2][ROWS * PANEL], part[ROWS * PANEL];
} __attribute__((aligned(64))) Scratch;

/* What is read next, fetched a few lines at a time between the work on what is read now. */
typedef struct {
    const char *at, *end;
} Ahead;

typedef struct {
    int panel; /* outputs, at most PANEL */
    /* Bytes of x as the kernel reads it; 0: as it lies. */
    int64_t (*packed_bytes)(const Linear *l, int64_t rows);
    void (*pack)(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed); /* by all threads; no barrier */
    void (*begin)(void), (*end)(void);                                                  /* of a thread's work, or NULL */
    /* sum[row][output of the panel] for the `rows` ≤ ROWS rows from row number `first` of x, a multiple of ROWS. */
    void (*multiply)(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,
                     const Tuning *tuning, Scratch *s, float *sum);
    /* s->sum[panel][row of FEW][output of the panel] of a weight [inputs][outputs], for SPAN panels and FEW rows at most; or NULL. */
    void (*across)(const Linear *l, int64_t panel, int64_t panels, const void *x, int64_t rows, const Tuning *tuning, Scratch *s);
} Product;

INLINE int64_t panels(const Linear *l, const Product *product) { return (l->outputs + product->panel - 1) / product->panel; }

HIDDEN Ahead codes_of_panel(const Linear *l, int64_t panel); /* of product_int8.c */

/* The weights of a panel, which lie together; nothing where there is no such panel. */
INLINE Ahead panel_of(const Linear *l, int64_t panel, const Product *product) {
    if (panel >= panels(l, product) || l->by_input) return (Ahead){NULL, NULL}; /* by input: scattered */
    if (l->int8) return codes_of_panel(l, panel);
    const int64_t left = l->outputs - panel * product->panel, outputs = left < product->panel ? left : product->panel;
    const char *w = (const char *)l->w + bytes_of(l, panel * product->panel * l->row);
    return (Ahead){w, w + bytes_of(l, outputs * l->row)};
}

extern HIDDEN const Product product_fma, product_dot, product_amx;
HIDDEN const Product *product_int8(const Tuning *tuning);
HIDDEN const Product *product_for(const Linear *l, const Tuning *tuning);

/* Products of the same x, and what becomes of them:
       out[i] = x · l[i]ᵀ + bias                          if neither is asked for
       out[0] = residual + x · l[0]ᵀ                      (each term rounded first, as torch does)
       out[0] = act(x · l[0]ᵀ) · (x · l[1]ᵀ)              if gated */
enum { NOT_GATED, BY_SILU, BY_GELU };
enum { MOST_PRODUCTS = 4 };
typedef struct {
    const Linear *l[MOST_PRODUCTS];
    void *out[MOST_PRODUCTS];
    int count, gated;
    const void *x, *residual;
    int64_t rows;
    void *packed; /* room for `packed_bytes` */
    const Linear *then; /* whose weights are read next, `then_count` of them: work of one list of panels */
    int64_t then_count;
} Products;
HIDDEN void linear(Worker *w, const Products *p); /* by all threads of a region; ends without a barrier */

/* One panel of p->l[which], and of p->l[1] if gated, for the rows (ROWS at most) from number `first` on. x: as the kernel reads it;
   ahead: what is read next, of each of the two. */
HIDDEN void multiply_panel(const Products *p, const Product *product, int which, int64_t panel, const Ahead *ahead, const void *x,
                           int64_t first, const Tuning *tuning, Scratch *s);

/* The same for `panels` of p->l[0] from `panel` on, SPAN at most. */
HIDDEN void multiply_panels(const Products *p, const Product *product, int64_t panel, int64_t panels, const Ahead *ahead,
                            const void *x, int64_t first, const Tuning *tuning, Scratch *s);
