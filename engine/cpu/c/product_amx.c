/* Product kernel for AMX tiles: 32 outputs × 32 rows at a time, K in natural order in four accumulators.

   The weights are the left operand and are loaded in place; x is the right operand and is packed once for all threads:

       packed [blocks of 16 rows][words][16 rows], a word = inputs 2k and 2k + 1 of one row, zeros up to 32 inputs and 16 rows

   So a tile of sums is [16 outputs][16 rows], and is transposed at the end. The operations of a row's sums do not depend on the
   other rows of its tile. Where a matrix ends inside a tile, its last outputs or inputs are first copied and padded with zeros. */

#if defined(__AMX_BF16__) || defined(PORTABLE)
#include "products.h"
#include "tiles.h"
#include "transpose.h"

enum { SIDE = 16, WIDE = 2 * SIDE, LINE = 64, STEP = 32, SEGMENT = 16 * STEP }; /* STEP: inputs in a line */

INLINE int64_t steps_of(const Linear *l) { return (l->inputs + STEP - 1) / STEP; }
static int64_t packed_bytes(const Linear *l, int64_t rows) { return (rows + SIDE - 1) / SIDE * SIDE * steps_of(l) * LINE; }

/* to[word][16]: the words of 16 rows that are LINE bytes long and `row` bytes apart. */
INLINE void pack_tile(const char *from, int64_t row, uint32_t *to) {
    for (int i = 0; i < SIDE; i += VL)
        for (int j = 0; j < SIDE; j += VL) {
            vu t[VL] = {{0}};
            transpose(from + i * row + 4 * j, row, t);
            for (int k = 0; k < VL; k++) store_words(to + (j + k) * SIDE + i, t[k]);
        }
}

/* 16 rows of LINE bytes with zeros where a matrix ends: it has `rows` more rows of `bytes` more bytes. */
INLINE void copy_edge(char (*copy)[LINE], const char *from, int64_t row, int64_t rows, int64_t bytes) {
    memset(copy, 0, SIDE * LINE);
    for (int i = 0; i < SIDE && i < rows; i++) memcpy(copy[i], from + i * row, (size_t)(bytes < LINE ? bytes : LINE));
}

/* The same of 16 outputs whose weights lie as [inputs][outputs], `row` bytes an input: `outputs` and `inputs` are left. */
INLINE void copy_by_input(char (*copy)[LINE], const char *from, int64_t row, int64_t outputs, int64_t inputs) {
    memset(copy, 0, SIDE * LINE);
    for (int k = 0; k < STEP && k < inputs; k++)
        for (int i = 0; i < SIDE && i < outputs; i++) memcpy(copy[i] + 2 * k, from + k * row + 2 * i, 2);
}

/* Work: (16 rows, SEGMENT inputs). */
static void pack(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {
    const int64_t row = 2 * l->inputs, steps = steps_of(l), segments = (l->inputs + SEGMENT - 1) / SEGMENT;
    for (int64_t i; (i = take(w, (rows + SIDE - 1) / SIDE * segments)) >= 0;) {
        const int64_t block = i / segments, first = i % segments * (SEGMENT / STEP), left = rows - block * SIDE;
        for (int64_t step = first; step < first + SEGMENT / STEP && step < steps; step++) {
            const char *from = (const char *)x + block * SIDE * row + step * LINE;
            char copy[SIDE][LINE];
            const int whole = left >= SIDE && row - step * LINE >= LINE;
            if (!whole) copy_edge(copy, from, row, left, row - step * LINE);
            pack_tile(whole ? from : copy[0], whole ? row : LINE, (uint32_t *)packed + (block * steps + step) * SIDE * SIDE);
        }
    }
}

INLINE void fetch(Ahead *ahead, int64_t lines) {
    const char *stop = ahead->at + LINE * lines < ahead->end ? ahead->at + LINE * lines : ahead->end;
    for (; ahead->at < stop; ahead->at += LINE) __builtin_prefetch(ahead->at, 0, 2);
}

/* Tiles 0 … 3 += (outputs w0, w1) × (rows x0, x1) over `steps` lines. */
INLINE void multiply_lines(const char *w0, const char *w1, int64_t row, const char *x0, const char *x1, int64_t steps, int outputs,
                           int rows, Ahead *ahead, int64_t lines) {
    for (int64_t i = 0; i < steps; i++, w0 += LINE, w1 += LINE, x0 += SIDE * LINE, x1 += SIDE * LINE) {
        tile_load(4, w0, row);
        tile_load(6, x0, LINE);
        tile_dot(0, 4, 6);
        if (rows == 2) {
            tile_load(7, x1, LINE);
            tile_dot(1, 4, 7);
        }
        fetch(ahead, lines);
        if (outputs == 2) {
            tile_load(5, w1, row);
            tile_dot(2, 5, 6);
            if (rows == 2) tile_dot(3, 5, 7);
        }
    }
}

/* sum[row][output] of one tile, which has come to lie at t [output][row]. */
INLINE void put_tile(const float *t, float *sum) {
    for (int i = 0; i < SIDE; i += VL)
        for (int j = 0; j < SIDE; j += VL) {
            vu lanes[VL] = {{0}};
            transpose((const char *)(t + i * SIDE + j), LINE, lanes);
            for (int k = 0; k < VL; k++) store_words((uint32_t *)sum + (j + k) * PANEL + i, lanes[k]);
        }
}

/* `outputs`, `rows`: tiles of each, 1 or 2. left: outputs that the matrix has from w on. */
INLINE void multiply_block(const Linear *l, const char *w, const char *x, int64_t left, int outputs, int rows, Ahead *ahead,
                           int64_t lines, Scratch *s, float *sum) {
    const int64_t row = 2 * l->row, steps = steps_of(l), block = steps * SIDE * LINE;
    const int64_t direct = left < outputs * SIDE || l->by_input ? 0 : l->inputs / STEP; /* steps that need no copy */
    const char *x1 = rows == 2 ? x + block : x;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    multiply_lines(w, w + SIDE * row, row, x, x1, direct, outputs, rows, ahead, lines);
    for (int64_t i = direct; i < steps; i++) {
        char copy[2][SIDE][LINE] __attribute__((aligned(64)));
        for (int o = 0; o < outputs; o++)
            if (l->by_input)
                copy_by_input(copy[o], w + o * LINE / 2 + i * STEP * 2 * l->outputs, 2 * l->outputs, left - o * SIDE,
                              l->inputs - i * STEP);
            else
                copy_edge(copy[o], w + o * SIDE * row + i * LINE, row, left - o * SIDE, 2 * l->inputs - i * LINE);
        multiply_lines(copy[0][0], copy[1][0], LINE, x + i * SIDE * LINE, x1 + i * SIDE * LINE, 1, outputs, rows, ahead, lines);
    }
    float *t = (float *)s->packed; /* four tiles */
    tile_store(0, t, LINE);
    if (rows == 2) tile_store(1, t + SIDE * SIDE, LINE);
    if (outputs == 2) tile_store(2, t + 2 * SIDE * SIDE, LINE);
    if (outputs == 2 && rows == 2) tile_store(3, t + 3 * SIDE * SIDE, LINE);
    for (int o = 0; o < outputs; o++)
        for (int r = 0; r < rows; r++) put_tile(t + (2 * o + r) * SIDE * SIDE, sum + r * SIDE * PANEL + o * SIDE);
}

static void multiply(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,
                     const Tuning *tuning, Scratch *s, float *sum) {
    const int64_t block = steps_of(l) * SIDE * LINE, blocks = (rows + SIDE - 1) / SIDE, left = l->outputs - panel * WIDE;
    const char *w = (const char *)l->w + panel * WIDE * 2 * (l->by_input ? 1 : l->row), *from = (const char *)x + first / SIDE * block;
    const int64_t lines = (WIDE + (blocks + 1) / 2 - 1) / ((blocks + 1) / 2); /* the panel ahead, over all passes of this one */
    (void)tuning;
#ifdef PORTABLE
    const uint64_t before = flush();
#endif
    for (int64_t b = 0; b < blocks; b += 2, from += 2 * block, sum += WIDE * PANEL) {
        if (left > SIDE && blocks - b > 1)
            multiply_block(l, w, from, left, 2, 2, &ahead, lines, s, sum);
        else if (left > SIDE)
            multiply_block(l, w, from, left, 2, 1, &ahead, lines, s, sum);
        else if (blocks - b > 1)
            multiply_block(l, w, from, left, 1, 2, &ahead, lines, s, sum);
        else
            multiply_block(l, w, from, left, 1, 1, &ahead, lines, s, sum);
    }
#ifdef PORTABLE
    unflush(before);
#endif
}

const Product product_amx = {WIDE, packed_bytes, pack, tiles_begin, tiles_end, multiply, NULL};
#endif
