/* Product kernels with one output per vector lane: `product_fma` on any CPU, `product_dot` on CPUs with vdpbf16ps.

   A panel's weights are transposed piece by piece into the cache,

       packed [words][PANEL],  a word = one fp32, or inputs 2i and 2i + 1 of one output in bf16

   and then acc[row][output] += x[row][word] · packed[word][output] for all rows: one chain of additions for each output, and no
   sum crosses lanes. In fp32 a chain runs over all inputs, in order. In bf16 the arithmetic is that of vdpbf16ps, with or without
   the instruction: of each pair the odd product first, then the even one, each an FMA that flushes denormal numbers to zero, and
   chains of CHUNK inputs that are added up in order. So all CPUs get the same bits, and those of oneDNN (brg_matmul) where that
   uses avx512_core_bf16. */

#include "products.h"
#include "transpose.h"

enum { LANES_PANEL = PANEL / 16 * VL, VECTORS = LANES_PANEL / VL, TILE = VL == 16 ? 8 : 4, STRIDE = 8 };

/* How a tile reads: vdpbf16ps on words; words, widened in registers; or fp32 numbers, bf16 having been widened before. */
enum { DOT, WORDS, FLOATS };

/* Inputs of a chain, as oneDNN has it. */
static int64_t chunk_of(const Linear *l) { return !l->is_bf16 ? l->inputs : l->inputs <= 1024 ? 512 : 1024; }
INLINE int64_t words_of(const Linear *l) { return l->is_bf16 ? (l->inputs + 1) / 2 : l->inputs; }

/* A core drops prefetches when too many are under way, so they come a few at a time. */
INLINE void fetch(Ahead *ahead, int lines) {
    const char *stop = ahead->at + 64 * lines < ahead->end ? ahead->at + 64 * lines : ahead->end;
    if (lines <= 8) /* measured: to L1, unless they come in crowds */
        for (; ahead->at < stop; ahead->at += 64) __builtin_prefetch(ahead->at, 0, 3);
    else
        for (; ahead->at < stop; ahead->at += 64) __builtin_prefetch(ahead->at, 0, 2);
}

/* VL words, from number `word` on, of VL outputs, from number `output` on, of a weight that lies as [inputs][outputs]: zeros beyond
   its end. */
INLINE void block_by_input(const Linear *l, int64_t output, int64_t word, vu *to) {
    enum { SOON = 16 }; /* words that are fetched ahead */
    const int64_t row = bytes_of(l, l->outputs), n = l->outputs - output;
    const char *from = (const char *)l->w + bytes_of(l, output);
    for (int j = 0; j < VL; j++) {
        const int64_t first = l->is_bf16 ? 2 * (word + j) : word + j;
        const char *p = from + first * row;
        to[j] = all_words(0);
        if (first < l->inputs) to[j] = l->is_bf16 ? (vu)load_some_bf16((const bf16 *)p, n, 0) >> 16
                                                  : (vu)load_some((const float *)p, n, 0);
        if (l->is_bf16 && first + 1 < l->inputs) to[j] |= (vu)load_some_bf16((const bf16 *)(p + row), n, 0);
        __builtin_prefetch(p + SOON * (l->is_bf16 ? 2 : 1) * row, 0, 3);
        if (l->is_bf16) __builtin_prefetch(p + (2 * SOON + 1) * row, 0, 3);
    }
}

/* VL words, from number `word` on, of VL outputs, from number `output` on, where the matrix ends among them: zeros beyond. */
INLINE void block_at_edge(const Linear *l, int64_t output, int64_t word, vu *to) {
    const int64_t row = bytes_of(l, l->row), left = bytes_of(l, l->inputs) - 4 * word, outputs = l->outputs - output;
    char copy[VL][4 * VL];
    memset(copy, 0, sizeof copy);
    for (int i = 0; i < VL && i < outputs; i++)
        memcpy(copy[i], (const char *)l->w + (output + i) * row + 4 * word, (size_t)(left < 4 * VL ? left : 4 * VL));
    transpose(copy[0], 4 * VL, to);
}

/* Words as they are, or bf16 widened to fp32, of each pair the odd one first. */
INLINE void put_words(const vu *t, uint32_t *packed, int widened) {
    if (widened)
        _Pragma("GCC unroll 16") for (int j = 0; j < VL; j++) {
            store_words(packed + (2 * j) * PANEL, t[j] & all_words(0xffff0000u));
            store_words(packed + (2 * j + 1) * PANEL, t[j] << 16);
        }
    else
        _Pragma("GCC unroll 16") for (int j = 0; j < VL; j++) store_words(packed + j * PANEL, t[j]);
}

/* VL words, from number `word` on, of VL outputs, from number `output` on, packed. */
INLINE void pack_words(const Linear *l, int64_t output, int64_t word, uint32_t *packed, int widened) {
    const int64_t row = bytes_of(l, l->row);
    if (!l->by_input && l->outputs - output >= VL && bytes_of(l, l->inputs) - 4 * word >= 4 * VL) { /* a block that stays in registers */
        vu t[VL];
        transpose((const char *)l->w + output * row + 4 * word, row, t);
        put_words(t, packed, widened);
        return;
    }
    vu t[VL];
    if (l->by_input)
        block_by_input(l, output, word, t);
    else
        block_at_edge(l, output, word, t);
    put_words(t, packed, widened);
}

/* ---- tiles: acc[rows][nv vectors] += x[rows][words] · packed[words][nv vectors] ---- */

INLINE void tile(const uint32_t *x, int64_t x_row, const uint32_t *packed, int words, float *acc, int fresh, Ahead *ahead,
                 int lines, int rows, int nv, int kind) {
    vf sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) sum[r][v] = fresh ? all(0) : load(acc + r * PANEL + v * VL);
    const int per = kind == WORDS ? 2 : 1; /* numbers of x for a word */
    for (const uint32_t *end = packed + words * PANEL; packed < end;) {
        fetch(ahead, lines);
        const uint32_t *stop = packed + STRIDE * PANEL < end ? packed + STRIDE * PANEL : end;
        for (; packed < stop; packed += PANEL, x += per) {
            vu b[VECTORS];
            UNROLL for (int v = 0; v < nv; v++) b[v] = load_words(packed + v * VL);
            if (kind == WORDS) {
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int v = 0; v < nv; v++)
                        sum[r][v] = fma_((vf)all_words(x[r * x_row]), (vf)(b[v] & all_words(0xffff0000u)), sum[r][v]);
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int v = 0; v < nv; v++)
                        sum[r][v] = fma_((vf)all_words(x[r * x_row + 1]), (vf)(b[v] << 16), sum[r][v]);
            } else {
                UNROLL for (int r = 0; r < rows; r++) {
                    const vu a = all_words(x[r * x_row]);
#ifdef __AVX512BF16__
                    if (kind == DOT) {
                        UNROLL for (int v = 0; v < nv; v++)
                            sum[r][v] = (vf)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)a, (__m512bh)b[v]);
                        continue;
                    }
#endif
                    UNROLL for (int v = 0; v < nv; v++) sum[r][v] = fma_((vf)a, (vf)b[v], sum[r][v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) store(acc + r * PANEL + v * VL, sum[r][v]);
}

typedef void (*TileFn)(const uint32_t *, int64_t, const uint32_t *, int, float *, int, Ahead *, int);
#define TILE_FN(kind, rows, nv)                                                                                              \
    static void kind##_##rows##_##nv(const uint32_t *x, int64_t x_row, const uint32_t *p, int words, float *acc, int fresh, \
                                     Ahead *ahead, int lines) {                                                             \
        tile(x, x_row, p, words, acc, fresh, ahead, lines, rows, nv, kind);                                                 \
    }
#define TILE_FNS(kind, rows) TILE_FN(kind, rows, 1) TILE_FN(kind, rows, 2) TILE_FN(kind, rows, 3)
#define TILE_NAMES(kind, rows) {kind##_##rows##_1, kind##_##rows##_2, kind##_##rows##_3}
#if VL == 16
#define TILES(kind)                                                                                                     \
    TILE_FNS(kind, 1) TILE_FNS(kind, 2) TILE_FNS(kind, 3) TILE_FNS(kind, 4)                                             \
    TILE_FNS(kind, 5) TILE_FNS(kind, 6) TILE_FNS(kind, 7) TILE_FNS(kind, 8)                                             \
    static const TileFn kind##_tiles[TILE][VECTORS] = {                                                                 \
        TILE_NAMES(kind, 1), TILE_NAMES(kind, 2), TILE_NAMES(kind, 3), TILE_NAMES(kind, 4),                             \
        TILE_NAMES(kind, 5), TILE_NAMES(kind, 6), TILE_NAMES(kind, 7), TILE_NAMES(kind, 8)};
#else
#define TILES(kind)                                                                                                     \
    TILE_FNS(kind, 1) TILE_FNS(kind, 2) TILE_FNS(kind, 3) TILE_FNS(kind, 4)                                             \
    static const TileFn kind##_tiles[TILE][VECTORS] = {TILE_NAMES(kind, 1), TILE_NAMES(kind, 2), TILE_NAMES(kind, 3),   \
                                                       TILE_NAMES(kind, 4)};
#endif
TILES(WORDS)
TILES(FLOATS)
#ifdef __AVX512BF16__
TILES(DOT)
#endif

/* ---- few rows: a block goes from its transposition straight into the sums, one vector of outputs at a time ---- */

/* acc[rows][one vector] += x[rows][VL words] · block, a tile of rows after the other on the same registers; `soon` is fetched, a
   line of each output between two words of the first. */
INLINE void straight(const char *from, int64_t row, const char *soon, int64_t apart, const uint32_t *x, int64_t x_row,
                     float *acc, int fresh, int rows, int kind) {
    vu t[VL];
    transpose(from, row, t);
    UNROLL for (int first = 0; first < rows; first += TILE, x += TILE * x_row, acc += TILE * PANEL) {
        const int some = rows - first < TILE ? rows - first : TILE;
        vf sum[TILE];
        UNROLL for (int r = 0; r < some; r++) sum[r] = fresh ? all(0) : load(acc + r * PANEL);
        _Pragma("GCC unroll 16") for (int j = 0; j < VL; j++) {
            if (!first) __builtin_prefetch(soon + j * apart, 0, 2);
            if (kind == WORDS) {
                const vf odd = (vf)(t[j] & all_words(0xffff0000u)), even = (vf)(t[j] << 16);
                UNROLL for (int r = 0; r < some; r++) sum[r] = fma_((vf)all_words(x[r * x_row + 2 * j]), odd, sum[r]);
                UNROLL for (int r = 0; r < some; r++) sum[r] = fma_((vf)all_words(x[r * x_row + 2 * j + 1]), even, sum[r]);
            } else {
                UNROLL for (int r = 0; r < some; r++) sum[r] = fma_((vf)all_words(x[r * x_row + j]), (vf)t[j], sum[r]);
            }
        }
        UNROLL for (int r = 0; r < some; r++) store(acc + r * PANEL, sum[r]);
    }
}

typedef void (*StraightFn)(const char *, int64_t, const char *, int64_t, const uint32_t *, int64_t, float *, int);
#define STRAIGHT(kind, rows)                                                                                            \
    static void straight_##kind##_##rows(const char *from, int64_t row, const char *soon, int64_t apart,                \
                                         const uint32_t *x, int64_t x_row, float *acc, int fresh) {                     \
        straight(from, row, soon, apart, x, x_row, acc, fresh, rows, kind);                                                    \
    }
#define STRAIGHTS(rows) STRAIGHT(WORDS, rows) STRAIGHT(FLOATS, rows)
STRAIGHTS(1) STRAIGHTS(2) STRAIGHTS(3) STRAIGHTS(4)
#if VL == 16
STRAIGHTS(5) STRAIGHTS(6) STRAIGHTS(7) STRAIGHTS(8) STRAIGHTS(9) STRAIGHTS(10) STRAIGHTS(11) STRAIGHTS(12)
STRAIGHTS(13) STRAIGHTS(14) STRAIGHTS(15) STRAIGHTS(16)
enum { STRAIGHT_ROWS = 16 };
#define STRAIGHT_NAMES(kind)                                                                                            \
    {straight_##kind##_1, straight_##kind##_2, straight_##kind##_3, straight_##kind##_4,                                \
     straight_##kind##_5, straight_##kind##_6, straight_##kind##_7, straight_##kind##_8,                                \
     straight_##kind##_9, straight_##kind##_10, straight_##kind##_11, straight_##kind##_12,                             \
     straight_##kind##_13, straight_##kind##_14, straight_##kind##_15, straight_##kind##_16}
#else
enum { STRAIGHT_ROWS = TILE };
#define STRAIGHT_NAMES(kind) {straight_##kind##_1, straight_##kind##_2, straight_##kind##_3, straight_##kind##_4}
#endif
static const StraightFn straights[2][STRAIGHT_ROWS] = {STRAIGHT_NAMES(WORDS), STRAIGHT_NAMES(FLOATS)};

/* ---- a panel ---- */

/* x: words for DOT and of fp32, else numbers, two for each word, the odd one first. */
static void multiply(const Linear *l, int64_t panel, Ahead ahead, const uint32_t *x, int64_t rows, const Tuning *t, Scratch *s,
                     float *sum, int dot) {
    const int64_t output = panel * LANES_PANEL, words = words_of(l), tiled = (rows + TILE - 1) / TILE;
    const int64_t left = l->outputs - output, width = left < LANES_PANEL ? left : LANES_PANEL;
    const int64_t row = bytes_of(l, l->row), chunk = chunk_of(l) / (l->is_bf16 ? 2 : 1);
    const int64_t few = rows <= t->few && !l->by_input;
    const int nv = (int)((width + VL - 1) / VL), kind = dot ? DOT : l->is_bf16 && few ? WORDS : FLOATS;
    const int widened = l->is_bf16 && kind == FLOATS, per = kind == DOT || !l->is_bf16 ? 1 : 2; /* numbers of x for a word */
    const TileFn *tiles = kind == WORDS ? WORDS_tiles[0] : FLOATS_tiles[0];
#ifdef __AVX512BF16__
    if (kind == DOT) tiles = DOT_tiles[0];
#endif
    /* a line is a vector of weights, and there is one to fetch for each that is worked on: STRIDE words of a tile take
       STRIDE · VECTORS of TILE additions, a transposition VL of about four */
    const int per_tile = (int)((STRIDE * VECTORS + tiled - 1) / tiled / (widened ? 2 : 1));
    const int per_transposition = (int)(4 * VL / (4 + TILE * tiled));
    const int64_t most = few ? VL : widened ? t->piece / 2 : t->piece;
    const char *w = (const char *)l->w + output * row;
    for (int64_t begin = 0; begin < words; begin += chunk) {
        const int64_t end = begin + chunk < words ? begin + chunk : words;
        float *acc = begin ? s->part : sum;
        for (int64_t at = begin, piece; at < end; at += piece) {
            piece = end - at < most ? end - at : most;
            const int64_t on = 4 * at + t->near * 64; /* in bytes of each output, perhaps in the panel ahead */
            const char *soon = on < row ? w + on : ahead.at ? ahead.at + (on - row) : w;
            if (few && kind != DOT && rows <= STRAIGHT_ROWS && piece == VL && width == nv * VL) {
                for (int v = 0; v < nv; v++, ahead.at += t->near ? 0 : 4 * VL * VL)
                    straights[kind == FLOATS][rows - 1](w + v * VL * row + 4 * at, row,
                                                        t->near ? soon + v * VL * row : ahead.at, t->near ? row : 4 * VL,
                                                        x + at * per, words * per, acc + v * VL, at == begin);
                continue;
            }
            for (int v = 0; v < nv; v++)
                for (int64_t i = 0; i < piece; i += VL) {
                    if (few && t->near)
                        for (int r = 0; r < VL; r++) __builtin_prefetch(soon + (v * VL + r) * row + 4 * i, 0, 2);
                    else
                        fetch(&ahead, few ? VL : per_transposition);
                    pack_words(l, output + v * VL, at + i, s->packed + i * (widened ? 2 : 1) * PANEL + v * VL, widened);
                }
            for (int64_t r = 0; r < rows; r += TILE) {
                const int n = (int)(rows - r < TILE ? rows - r : TILE);
                tiles[(n - 1) * VECTORS + nv - 1](x + (r * words + at) * per, words * per, s->packed,
                                                  (int)piece * (widened ? 2 : 1), acc + r * PANEL, at == begin, &ahead,
                                                  few ? 0 : per_tile);
            }
        }
        if (begin)
            for (int64_t i = 0; i < rows * PANEL; i += VL) store(sum + i, load(sum + i) + load(acc + i));
    }
}

/* ---- few rows and a weight [inputs][outputs]: a word is made of two inputs where they lie, and goes straight into the sums ----

   A panel's part of an input is short, and the next input is far away. So panels take turns, DEPTH words each: memory is read in
   pieces of SPAN panels. */

enum { DEPTH = 16 };

/* acc[rows][VECTORS] += x[rows][words] · the words of a panel from `w` on, `row` bytes from input to input; what lies DEPTH words
   behind is fetched. */
INLINE void across(const char *w, int64_t row, const char *soon, const uint32_t *x, int64_t x_row, int words, float *acc,
                   int fresh, int rows, int kind) {
    const int inputs = kind == FLOATS ? 1 : 2, per = kind == WORDS ? 2 : 1; /* of a word; numbers of x for it */
    const int vector = kind == FLOATS ? 4 * VL : 2 * VL, lines = (SPAN * VECTORS * vector + 63) / 64; /* of an input */
    vf sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = fresh ? all(0) : load(acc + r * PANEL + v * VL);
    for (int j = 0; j < words; j++, w += inputs * row, x += per) {
        UNROLL for (int i = 0; i < (lines * inputs + SPAN - 1) / SPAN; i++) {
            const int line = j * lines * inputs / SPAN + i;
            __builtin_prefetch(soon + line / lines * row + line % lines * 64, 0, 1);
        }
        vu even[VECTORS], odd[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) {
            even[v] = kind == FLOATS ? load_words((const uint32_t *)(w + v * vector)) : (vu)load_bf16((const bf16 *)(w + v * vector));
            odd[v] = kind == FLOATS ? even[v] : (vu)load_bf16((const bf16 *)(w + row + v * vector));
            if (kind == DOT) even[v] = even[v] >> 16 | odd[v];
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vu a = all_words(x[r * x_row]);
#ifdef __AVX512BF16__
            if (kind == DOT) {
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sum[r][v] = (vf)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)a, (__m512bh)even[v]);
                continue;
            }
#endif
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = fma_((vf)a, (vf)odd[v], sum[r][v]);
            if (kind == FLOATS) continue;
            const vu b = all_words(x[r * x_row + 1]);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = fma_((vf)b, (vf)even[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(acc + r * PANEL + v * VL, sum[r][v]);
}

typedef void (*AcrossFn)(const char *, int64_t, const char *, const uint32_t *, int64_t, int, float *, int);
#define ACROSS(kind, rows)                                                                                                   \
    static void across_##kind##_##rows(const char *w, int64_t row, const char *soon, const uint32_t *x, int64_t x_row,      \
                                       int words, float *acc, int fresh) {                                                  \
        across(w, row, soon, x, x_row, words, acc, fresh, rows, kind);                                                            \
    }
#if VL == 16
#define ACROSSES(kind)                                                                                                  \
    ACROSS(kind, 1) ACROSS(kind, 2) ACROSS(kind, 3) ACROSS(kind, 4)                                                     \
    ACROSS(kind, 5) ACROSS(kind, 6) ACROSS(kind, 7) ACROSS(kind, 8)                                                     \
    static const AcrossFn kind##_across[TILE] = {across_##kind##_1, across_##kind##_2, across_##kind##_3, across_##kind##_4, \
                                                 across_##kind##_5, across_##kind##_6, across_##kind##_7, across_##kind##_8};
#else
#define ACROSSES(kind)                                                                                                  \
    ACROSS(kind, 1) ACROSS(kind, 2) ACROSS(kind, 3) ACROSS(kind, 4)                                                     \
    static const AcrossFn kind##_across[TILE] = {across_##kind##_1, across_##kind##_2, across_##kind##_3, across_##kind##_4};
#endif
ACROSSES(WORDS)
ACROSSES(FLOATS)
#ifdef __AVX512BF16__
ACROSSES(DOT)
#endif

/* A panel at the edge, and all of a matrix with an odd number of inputs in bf16, go the way of more rows. */
static void multiply_across(const Linear *l, int64_t panel, int64_t count, const uint32_t *x, int64_t rows, const Tuning *t,
                            Scratch *s, int dot) {
    const int kind = dot ? DOT : l->is_bf16 ? WORDS : FLOATS, inputs = l->is_bf16 ? 2 : 1;
    const int64_t words = words_of(l), chunk = chunk_of(l) / inputs, row = bytes_of(l, l->outputs), x_row = words * (kind == WORDS ? 2 : 1);
    int64_t whole = l->outputs / LANES_PANEL - panel;
    whole = l->inputs % inputs ? 0 : whole < count ? whole : count;
    const AcrossFn *tiles = kind == WORDS ? WORDS_across : FLOATS_across;
#ifdef __AVX512BF16__
    if (kind == DOT) tiles = DOT_across;
#endif
    const char *w = (const char *)l->w + bytes_of(l, panel * LANES_PANEL);
    for (int64_t begin = 0; begin < words; begin += chunk) {
        const int64_t end = begin + chunk < words ? begin + chunk : words;
        float *acc = begin ? s->part : s->sum[0];
        for (int64_t at = begin; at < end; at += DEPTH)
            for (int64_t p = 0; p < whole; p++)
                for (int64_t r = 0; r < rows; r += TILE)
                    tiles[(rows - r < TILE ? rows - r : TILE) - 1](
                        w + at * inputs * row + bytes_of(l, p * LANES_PANEL), row,
                        w + (at + DEPTH + p * DEPTH / SPAN) * inputs * row, x + r * x_row + at * (kind == WORDS ? 2 : 1), x_row,
                        (int)(end - at < DEPTH ? end - at : DEPTH), acc + (p * FEW + r) * PANEL, at == begin);
        for (int64_t p = 0; begin && p < whole; p++)
            for (int64_t i = p * FEW * PANEL; i < (p * FEW + rows) * PANEL; i += VL) store(s->sum[0] + i, load(s->sum[0] + i) + load(acc + i));
    }
    for (int64_t p = whole; p < count; p++)
        multiply(l, panel + p, (Ahead){NULL, NULL}, x, rows, t, s, s->sum[0] + p * FEW * PANEL, dot);
}

/* ---- x as it is read ---- */

enum { PACK_ROWS = 8 };

static int64_t widened_bytes(const Linear *l, int64_t rows) { return l->is_bf16 ? rows * words_of(l) * 8 : 0; }

/* fp32 numbers, of each pair the odd one first, a zero for the one that an odd number of inputs lacks. */
static void pack_widened(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {
    const int64_t words = words_of(l), whole = l->inputs / 2;
    for (int64_t i; (i = take(w, (rows + PACK_ROWS - 1) / PACK_ROWS)) >= 0;)
        for (int64_t r = i * PACK_ROWS; r < rows && r < (i + 1) * PACK_ROWS; r++) {
            const bf16 *from = (const bf16 *)x + r * l->inputs;
            uint32_t *to = (uint32_t *)packed + r * words * 2;
            for (int64_t j = 0; j < whole; j++) {
                to[2 * j] = (uint32_t)from[2 * j + 1] << 16;
                to[2 * j + 1] = (uint32_t)from[2 * j] << 16;
            }
            if (whole < words) to[2 * whole] = 0, to[2 * whole + 1] = (uint32_t)from[2 * whole] << 16;
        }
}

static void multiply_fma(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,
                         const Tuning *tuning, Scratch *s, float *sum) {
    const int64_t words = words_of(l);
    if (!l->is_bf16) {
        multiply(l, panel, ahead, (const uint32_t *)x + first * words, rows, tuning, s, sum, 0);
        return;
    }
    const uint64_t before = flush();
    multiply(l, panel, ahead, (const uint32_t *)x + first * words * 2, rows, tuning, s, sum, 0);
    unflush(before);
}

static void across_fma(const Linear *l, int64_t panel, int64_t panels, const void *x, int64_t rows, const Tuning *tuning,
                       Scratch *s) {
    const uint64_t before = l->is_bf16 ? flush() : 0;
    multiply_across(l, panel, panels, x, rows, tuning, s, 0);
    if (l->is_bf16) unflush(before);
}

const Product product_fma = {LANES_PANEL, widened_bytes, pack_widened, NULL, NULL, multiply_fma, across_fma};

#ifdef __AVX512BF16__
static int64_t even_bytes(const Linear *l, int64_t rows) { return l->inputs % 2 ? rows * words_of(l) * 4 : 0; }

static void pack_even(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {
    for (int64_t i; (i = take(w, (rows + PACK_ROWS - 1) / PACK_ROWS)) >= 0;)
        for (int64_t r = i * PACK_ROWS; r < rows && r < (i + 1) * PACK_ROWS; r++) {
            bf16 *to = (bf16 *)packed + r * (l->inputs + 1);
            memcpy(to, (const bf16 *)x + r * l->inputs, 2 * (size_t)l->inputs);
            to[l->inputs] = 0;
        }
}

static void multiply_dot(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,
                         const Tuning *tuning, Scratch *s, float *sum) {
    const uint64_t before = flush();
    multiply(l, panel, ahead, (const uint32_t *)x + first * words_of(l), rows, tuning, s, sum, 1);
    unflush(before);
}

static void across_dot(const Linear *l, int64_t panel, int64_t panels, const void *x, int64_t rows, const Tuning *tuning,
                       Scratch *s) {
    const uint64_t before = flush();
    multiply_across(l, panel, panels, x, rows, tuning, s, 1);
    unflush(before);
}

const Product product_dot = {LANES_PANEL, even_bytes, pack_even, NULL, NULL, multiply_dot, across_dot};
#endif
