/* Product kernels with one output per vector lane: `product_fma` on any CPU, `product_dot` on CPUs with vdpbf16ps.

   Many rows: a panel's weights are transposed piece by piece into the cache,

       packed [words][PANEL],  a word = one fp32, or inputs 2i and 2i + 1 of one output in bf16

   and then acc[row][output] += x[row][word] · packed[word][output] for all rows. Few rows: what was transposed goes straight from
   registers into the sums of VL outputs, which stay in registers too.

   There is one chain of additions for each output, and no sum crosses lanes. In fp32 a chain runs over all inputs, in order. In bf16
   the arithmetic is that of vdpbf16ps, with or without the instruction: of each pair the odd product first, then the even one, each
   an FMA that flushes denormal numbers to zero, and chains of CHUNK inputs that are added up in order. So all CPUs get the same
   bits, and those of oneDNN (brg_matmul) where that uses avx512_core_bf16. */

#include "products.h"
#include "transpose.h"

enum { VECTORS = 3, TILE = VL == 16 ? 8 : 4, STRIDE = 8 }; /* a tile: TILE rows × VECTORS vectors of outputs */
enum { STRIPE = VECTORS * VL, STRIPES = PANEL / STRIPE };  /* outputs that a tile has of a panel */

/* Rows of x that lie side by side, number by number, as these kernels read them: [block of rows][number][row of the block]. */
enum { SIDE = VL == 16 ? 16 : 8 };

/* Number `at` of row `r` of `rows`, `numbers` each; `side`: from there to the next number. */
typedef struct {
    const uint32_t *x;
    int64_t side;
} Beside;
INLINE Beside beside(const uint32_t *x, int64_t numbers, int64_t rows, int64_t r, int64_t at) {
    const int64_t block = r / SIDE * SIDE, side = rows - block < SIDE ? rows - block : SIDE;
    return (Beside){x + block * numbers + at * side + r - block, side};
}

/* How weights are read: vdpbf16ps on words; words, widened in registers; or fp32 numbers, bf16 having been widened before. */
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

/* sum + a · b: the two products of a pair of bf16, the odd one first, or those of fp32 numbers. */
INLINE vf add_product(vf sum, vu a, vu b, int kind) {
#ifdef __AVX512BF16__
    if (kind == DOT) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)kind;
    return fma_((vf)a, (vf)b, sum);
}

/* ---- tiles: acc[rows][nv vectors] += x[rows][numbers] · packed[numbers][nv vectors]; `side`: from one number of x to the next ---- */

INLINE void tile(const uint32_t *x, int64_t side, const uint32_t *packed, int numbers, float *acc, int fresh, Ahead *ahead,
                 int lines, int rows, int nv, int kind) {
    vf sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) sum[r][v] = fresh ? all(0) : load(acc + r * PANEL + v * VL);
    for (const uint32_t *end = packed + numbers * PANEL; packed < end;) {
        fetch(ahead, lines);
        const uint32_t *stop = packed + STRIDE * PANEL < end ? packed + STRIDE * PANEL : end;
        for (; packed < stop; packed += PANEL, x += side) {
            vu b[VECTORS];
            UNROLL for (int v = 0; v < nv; v++) b[v] = load_words(packed + v * VL);
            UNROLL for (int r = 0; r < rows; r++) {
                const vu a = all_words(x[r]);
                UNROLL for (int v = 0; v < nv; v++) sum[r][v] = add_product(sum[r][v], a, b[v], kind);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) store(acc + r * PANEL + v * VL, sum[r][v]);
}

typedef void (*TileFn)(const uint32_t *, int64_t, const uint32_t *, int, float *, int, Ahead *, int);
#define TILE_FN(kind, rows, nv)                                                                                              \
    static void kind##_##rows##_##nv(const uint32_t *x, int64_t side, const uint32_t *p, int numbers, float *acc, int fresh, \
                                     Ahead *ahead, int lines) {                                                             \
        tile(x, side, p, numbers, acc, fresh, ahead, lines, rows, nv, kind);                                                \
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
TILES(FLOATS)
#ifdef __AVX512BF16__
TILES(DOT)
#endif

/* ---- few rows: acc[rows][nv vectors] = x[rows][words] · the words of nv · VL outputs from `from` on, `row` bytes apart ----

   Words go through registers, DEEP of each output at a time, and meet all rows. A chain of additions waits for itself, so with few rows
   and eight lanes several chains take turns. Where outputs are a multiple of 4 KiB apart, their lines drive each other out of the L1
   cache (docs/benchmarks/native.md#few-rows), so a line is read at once, or the chains are those of two pieces of one vector.
   Meanwhile as many lines are fetched from `next` on, what is read afterwards, in the order of memory, which the hardware's prefetcher
   follows; to L2, as L1 has too few misses in flight. */

enum { LINE = 16 }; /* words */

/* apart: 0; or the nv chains are those of one vector of outputs, so many words from one to the next, and SIDE · PANEL from sum to sum. */
INLINE void chain(const char *from, int64_t row, int64_t words, const char *next, const uint32_t *x, float *acc, int64_t apart, int rows,
                  int nv, int kind) {
    const int per = kind == WORDS ? 2 : 1;
    const int64_t to = apart ? SIDE * PANEL : VL, side = apart * per * rows, step = apart ? 4 * apart : VL * row;
    vf sum[SIDE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) sum[r][v] = all(0);
    for (const char *end = from + 4 * words; from < end; from += 4 * DEEP) {
        vu t[VECTORS][DEEP];
        UNROLL for (int v = 0; v < nv; v++) transpose_deep(from + v * step, row, t[v]);
        UNROLL for (int j = 0; j < DEEP; j++) {
            if (j % (LINE / VL) == 0) /* as many lines as are read */
                UNROLL for (int v = 0; v < nv; v++, next += 64) __builtin_prefetch(next, 0, 2);
            UNROLL for (int half = 0; half < per; half++, x += rows) {
                vu b[VECTORS];
                UNROLL for (int v = 0; v < nv; v++)
                    b[v] = kind != WORDS ? t[v][j] : half ? t[v][j] << 16 : t[v][j] & all_words(0xffff0000u);
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int v = 0; v < nv; v++) sum[r][v] = add_product(sum[r][v], all_words(x[v * side + r]), b[v], kind);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < nv; v++) store(acc + r * PANEL + v * to, sum[r][v]);
}

typedef void (*ChainFn)(const char *, int64_t, int64_t, const char *, const uint32_t *, float *, int64_t);
#define CHAIN(kind, rows, name, nv, apart_)                                                                            \
    static void chain_##kind##_##rows##_##name(const char *from, int64_t row, int64_t words, const char *next,            \
                                             const uint32_t *x, float *acc, int64_t apart) {                            \
        (void)apart, chain(from, row, words, next, x, acc, apart_, rows, nv, kind);                                      \
    }

#define ONE(kind, rows) CHAIN(kind, rows, one, 1, 0)

#if VL == 16
/* The same of whole lines, one at least: while one is multiplied, the next one is loaded into the registers that become free. */
INLINE void chain_of_lines(const char *from, int64_t row, int64_t words, const char *next, const uint32_t *x, float *acc, int rows,
                           int kind) {
    const int per = kind == WORDS ? 2 : 1;
    vf sum[SIDE];
    vu line[LINE], t[LINE];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = all(0);
    UNROLL for (int i = 0; i < LINE; i++) line[i] = load_words((const uint32_t *)(from + i * row));
    const char *end = from + 4 * words;
    do { /* a `for` would be unrolled with the loops in it */
        transpose_registers(line, t);
        from += 4 * LINE;
        const char *soon = from - 4 * LINE * (from >= end);
        UNROLL for (int j = 0; j < LINE; j++, next += 64) {
            __builtin_prefetch(next, 0, 2);
            if (rows > 2) __builtin_prefetch(from + j * row + 32 * LINE, 0, 2); /* a core drops some of the others */
            UNROLL for (int half = 0; half < per; half++) {
                const vu b = kind != WORDS ? t[j] : half ? t[j] << 16 : t[j] & all_words(0xffff0000u);
                UNROLL for (int r = 0; r < rows; r++) sum[r] = add_product(sum[r], all_words(x[r]), b, kind);
                x += rows;
            }
            line[j] = load_words((const uint32_t *)(soon + j * row));
        }
    } while (from < end);
    UNROLL for (int r = 0; r < rows; r++) store(acc + r * PANEL, sum[r]);
}
#define CHAIN_OF_LINES(kind, rows)                                                                                      \
    static void chain_##kind##_##rows##_far(const char *from, int64_t row, int64_t words, const char *next,               \
                                          const uint32_t *x, float *acc, int64_t apart) {                               \
        (void)apart, chain_of_lines(from, row, words, next, x, acc, rows, kind);                                        \
    }

#define BOTH(kind, rows) ONE(kind, rows) CHAIN_OF_LINES(kind, rows)
#define CHAINS(kind)                                                                                                    \
    BOTH(kind, 1) BOTH(kind, 2) BOTH(kind, 3) BOTH(kind, 4) BOTH(kind, 5) BOTH(kind, 6) BOTH(kind, 7) BOTH(kind, 8)     \
    ONE(kind, 9) ONE(kind, 10) ONE(kind, 11) ONE(kind, 12) ONE(kind, 13) ONE(kind, 14) ONE(kind, 15) ONE(kind, 16)      \
    static const ChainFn one_##kind[SIDE] = {                                                                           \
        chain_##kind##_1_one,  chain_##kind##_2_one,  chain_##kind##_3_one,  chain_##kind##_4_one,                       \
        chain_##kind##_5_one,  chain_##kind##_6_one,  chain_##kind##_7_one,  chain_##kind##_8_one,                       \
        chain_##kind##_9_one,  chain_##kind##_10_one, chain_##kind##_11_one, chain_##kind##_12_one,                      \
        chain_##kind##_13_one, chain_##kind##_14_one, chain_##kind##_15_one, chain_##kind##_16_one};                    \
    static const ChainFn far_##kind[] = {chain_##kind##_1_far, chain_##kind##_2_far, chain_##kind##_3_far,              \
                                         chain_##kind##_4_far, chain_##kind##_5_far, chain_##kind##_6_far,              \
                                         chain_##kind##_7_far, chain_##kind##_8_far};
#else
#define TWO(kind, rows) CHAIN(kind, rows, two, 2, 0)
#define THREE(kind, rows) CHAIN(kind, rows, three, 3, 0)
#define CHAINS(kind)                                                                                                    \
    ONE(kind, 1) ONE(kind, 2) ONE(kind, 3) ONE(kind, 4) ONE(kind, 5) ONE(kind, 6) ONE(kind, 7) ONE(kind, 8)             \
    TWO(kind, 1) TWO(kind, 2) TWO(kind, 3) TWO(kind, 4)                                                                 \
    static const ChainFn one_##kind[SIDE] = {chain_##kind##_1_one, chain_##kind##_2_one, chain_##kind##_3_one,          \
                                             chain_##kind##_4_one, chain_##kind##_5_one, chain_##kind##_6_one,          \
                                             chain_##kind##_7_one, chain_##kind##_8_one};                               \
    static const ChainFn two_##kind[] = {chain_##kind##_1_two, chain_##kind##_2_two, chain_##kind##_3_two,              \
                                         chain_##kind##_4_two};
#define FAR(rows) CHAIN(WORDS, rows, far, 2, apart)
FAR(1) FAR(2) FAR(3) FAR(4)
static const ChainFn far_WORDS[] = {chain_WORDS_1_far, chain_WORDS_2_far, chain_WORDS_3_far, chain_WORDS_4_far};
THREE(WORDS, 1) THREE(WORDS, 2)
static const ChainFn three_WORDS[] = {chain_WORDS_1_three, chain_WORDS_2_three};
#endif
CHAINS(WORDS)
CHAINS(FLOATS)
#ifdef __AVX512BF16__
CHAINS(DOT)
#define OF_KIND(table, kind) ((kind) == DOT ? table##_DOT : (kind) == WORDS ? table##_WORDS : table##_FLOATS)
#else
#define OF_KIND(table, kind) ((kind) == WORDS ? table##_WORDS : table##_FLOATS)
#endif

/* Which chains take turns: those of nv vectors of outputs, or those of so many parts of one vector's inputs. */
typedef struct {
    ChainFn run;
    int nv, parts;
} Turns;
/* For `rows` rows and some vectors of outputs, `row` bytes from one output to the next. */
static Turns turns_of(int kind, int64_t rows, int64_t row, int64_t vectors) {
#if VL == 16
    (void)vectors;
    if (rows <= 8 && row % 4096 == 0) return (Turns){OF_KIND(far, kind)[rows - 1], 1, 1};
#else
    if (rows <= 2 && vectors >= 3 && row % 1024 && kind == WORDS) return (Turns){three_WORDS[rows - 1], 3, 1};
    if (rows <= 4 && vectors >= 2 && row % 4096) return (Turns){OF_KIND(two, kind)[rows - 1], 2, 1};
    if (rows <= 4 && kind == WORDS && row % 4096 == 0) return (Turns){far_WORDS[rows - 1], 1, 2};
#endif
    return (Turns){OF_KIND(one, kind)[(rows < SIDE ? rows : SIDE) - 1], 1, 1};
}
static const TileFn *tiles_of(int dot) {
#ifdef __AVX512BF16__
    if (dot) return DOT_tiles[0];
#endif
    return (void)dot, FLOATS_tiles[0];
}

/* sum[rows ≤ SIDE][nv vectors], from number `output` on, of all inputs; x: a block of rows. */
static void multiply_vectors(const Linear *l, int64_t output, Turns turns, const char *next, const uint32_t *x, int rows, Scratch *s,
                             float *sum, int dot) {
    const int64_t words = words_of(l), row = bytes_of(l, l->row), chunk = chunk_of(l) / (l->is_bf16 ? 2 : 1);
    const int widened = l->is_bf16 && !dot, per = widened ? 2 : 1, nv = turns.nv;
    const int64_t complete = l->is_bf16 ? l->inputs / 2 : l->inputs; /* words; an odd number of inputs ends with half of one */
    const char *from = (const char *)l->w + output * row;
    for (int64_t begin = 0; begin < words;) {
        const int parts = complete - begin >= turns.parts * chunk ? turns.parts : 1;
        const int64_t end = begin + chunk < words ? begin + chunk : words;
        const int64_t whole = ((end < complete ? end : complete) - begin) / LINE * LINE;
        const int left = (int)(end - begin - whole);
        float *acc = begin || parts > 1 ? s->part : sum;
        const ChainFn run = parts == turns.parts ? turns.run : OF_KIND(one, dot ? DOT : l->is_bf16 ? WORDS : FLOATS)[rows - 1];
        if (whole) run(from + 4 * begin, row, whole, next + 4 * begin * nv * VL, x + begin * per * rows, acc, chunk);
        for (int v = 0; v < nv; v++)
            for (int i = 0; i < left; i += VL)
                pack_words(l, output + v * VL, begin + whole + i, s->packed + i * per * PANEL + v * VL, widened);
        for (int r = 0; left && r < rows; r += TILE)
            tiles_of(dot)[((rows - r < TILE ? rows - r : TILE) - 1) * VECTORS + nv - 1](
                x + (begin + whole) * per * rows + r, rows, s->packed, left * per, acc + r * PANEL, !whole, &(Ahead){NULL, NULL}, 0);
        for (int i = 0; i < parts && acc != sum; i++, acc += SIDE * PANEL)
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < nv; v++) {
                    float *to = sum + r * PANEL + v * VL;
                    const vf more = load(acc + r * PANEL + v * VL);
                    store(to, begin || i ? load(to) + more : more);
                }
        begin += parts * chunk;
    }
}

/* ---- a panel ---- */

/* Few rows of a panel. */
static void multiply_few(const Linear *l, int64_t output, int64_t width, Ahead ahead, const uint32_t *x, int64_t rows, Scratch *s,
                         float *sum, int dot) {
    const int64_t row = bytes_of(l, l->row), numbers = words_of(l) * (l->is_bf16 && !dot ? 2 : 1);
    const int kind = dot ? DOT : l->is_bf16 ? WORDS : FLOATS;
    for (int64_t v = 0, nv; v < width; v += nv * VL) {
        nv = turns_of(kind, rows, row, (width - v) / VL).nv;
        const char *w = (const char *)l->w + (output + v) * row;
        const char *next = v + nv * VL < width ? w + nv * VL * row : ahead.at ? ahead.at : w;
        for (int64_t r = 0; r < rows; r += SIDE, next = w) { /* only the first rows need to fetch */
            const int64_t side = rows - r < SIDE ? rows - r : SIDE;
            multiply_vectors(l, output + v, turns_of(kind, side, row, nv), next, x + r * numbers, (int)side, s, sum + r * PANEL + v, dot);
        }
    }
}

/* x: blocks of rows; words for DOT, else fp32 numbers, two for each word of bf16, the odd one first. */
static void multiply(const Linear *l, int64_t panel, Ahead ahead, const uint32_t *x, int64_t rows, const Tuning *t, Scratch *s,
                     float *sum, int dot) {
    const int64_t output = panel * PANEL, words = words_of(l), tiled = (rows + TILE - 1) / TILE;
    const int64_t left = l->outputs - output, width = left < PANEL ? left : PANEL;
    if (rows <= t->few && !l->by_input && width % VL == 0) {
        multiply_few(l, output, width, ahead, x, rows, s, sum, dot);
        return;
    }
    const int64_t chunk = chunk_of(l) / (l->is_bf16 ? 2 : 1);
    const int nv = (int)((width + VL - 1) / VL), widened = l->is_bf16 && !dot, per = widened ? 2 : 1;
    const TileFn *tiles = tiles_of(dot);
    /* a line is a vector of weights, and there is one to fetch for each that is worked on: STRIDE numbers of a tile take
       STRIDE · VECTORS of TILE additions, a transposition VL of about four */
    const int per_tile = (int)((STRIDE * VECTORS + tiled - 1) / tiled / per);
    const int per_transposition = (int)(4 * VL / (4 + TILE * tiled));
    for (int64_t begin = 0; begin < words; begin += chunk) {
        const int64_t end = begin + chunk < words ? begin + chunk : words;
        float *acc = begin ? s->part : sum;
        for (int64_t at = begin, piece; at < end; at += piece) {
            piece = end - at < t->piece / per ? end - at : t->piece / per;
            for (int v = 0; v < nv; v++)
                for (int64_t i = 0; i < piece; i += VL) {
                    fetch(&ahead, per_transposition);
                    pack_words(l, output + v * VL, at + i, s->packed + i * per * PANEL + v * VL, widened);
                }
            for (int v = 0; v < nv; v += VECTORS)
                for (int64_t r = 0; r < rows; r += TILE) {
                    const Beside b = beside(x, words * per, rows, r, at * per);
                    tiles[((rows - r < TILE ? rows - r : TILE) - 1) * VECTORS + (nv - v < VECTORS ? nv - v : VECTORS) - 1](
                        b.x, b.side, s->packed + v * VL, (int)piece * per, acc + r * PANEL + v * VL, at == begin, &ahead, per_tile);
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
INLINE void across(const char *w, int64_t row, const char *soon, const uint32_t *x, int64_t side, int words, float *acc,
                   int fresh, int rows, int kind) {
    const int inputs = kind == FLOATS ? 1 : 2, per = kind == WORDS ? 2 : 1; /* of a word; numbers of x for it */
    const int vector = kind == FLOATS ? 4 * VL : 2 * VL, spans = SPAN * STRIPES;
    const int lines = (spans * VECTORS * vector + 63) / 64; /* of an input */
    vf sum[TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = fresh ? all(0) : load(acc + r * PANEL + v * VL);
    for (int j = 0; j < words; j++, w += inputs * row, x += per * side) {
        UNROLL for (int i = 0; i < (lines * inputs + spans - 1) / spans; i++) {
            const int line = j * lines * inputs / spans + i;
            __builtin_prefetch(soon + line / lines * row + line % lines * 64, 0, 1);
        }
        vu even[VECTORS], odd[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) {
            even[v] = kind == FLOATS ? load_words((const uint32_t *)(w + v * vector)) : (vu)load_bf16((const bf16 *)(w + v * vector));
            odd[v] = kind == FLOATS ? even[v] : (vu)load_bf16((const bf16 *)(w + row + v * vector));
            if (kind == DOT) even[v] = even[v] >> 16 | odd[v];
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vu a = all_words(x[r]), b = all_words(kind == WORDS ? x[side + r] : 0);
            UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = add_product(sum[r][v], a, kind == DOT ? even[v] : odd[v], kind);
            if (kind == WORDS) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = fma_((vf)b, (vf)even[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(acc + r * PANEL + v * VL, sum[r][v]);
}

typedef void (*AcrossFn)(const char *, int64_t, const char *, const uint32_t *, int64_t, int, float *, int);
#define ACROSS(kind, rows)                                                                                                   \
    static void across_##kind##_##rows(const char *w, int64_t row, const char *soon, const uint32_t *x, int64_t side,       \
                                       int words, float *acc, int fresh) {                                                  \
        across(w, row, soon, x, side, words, acc, fresh, rows, kind);                                                       \
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
    const int64_t words = words_of(l), chunk = chunk_of(l) / inputs, row = bytes_of(l, l->outputs), per = kind == WORDS ? 2 : 1;
    int64_t whole = l->outputs / PANEL - panel;
    whole = l->inputs % inputs ? 0 : whole < count ? whole : count;
    const AcrossFn *tiles = kind == WORDS ? WORDS_across : FLOATS_across;
#ifdef __AVX512BF16__
    if (kind == DOT) tiles = DOT_across;
#endif
    const char *w = (const char *)l->w + bytes_of(l, panel * PANEL);
    for (int64_t begin = 0; begin < words; begin += chunk) {
        const int64_t end = begin + chunk < words ? begin + chunk : words;
        float *acc = begin ? s->part : s->sum[0];
        for (int64_t at = begin; at < end; at += DEPTH)
            for (int64_t p = 0; p < whole * STRIPES; p++)
                for (int64_t r = 0; r < rows; r += TILE) {
                    const Beside b = beside(x, words * per, rows, r, at * per);
                    tiles[(rows - r < TILE ? rows - r : TILE) - 1](
                        w + at * inputs * row + bytes_of(l, p * STRIPE), row,
                        w + (at + DEPTH + p * DEPTH / (SPAN * STRIPES)) * inputs * row, b.x, b.side,
                        (int)(end - at < DEPTH ? end - at : DEPTH), acc + (p / STRIPES * FEW + r) * PANEL + p % STRIPES * STRIPE,
                        at == begin);
                }
        for (int64_t p = 0; begin && p < whole; p++)
            for (int64_t i = p * FEW * PANEL; i < (p * FEW + rows) * PANEL; i += VL) store(s->sum[0] + i, load(s->sum[0] + i) + load(acc + i));
    }
    for (int64_t p = whole; p < count; p++)
        multiply(l, panel + p, (Ahead){NULL, NULL}, x, rows, t, s, s->sum[0] + p * FEW * PANEL, dot);
}

/* ---- x as it is read: blocks of SIDE rows, fewer in the last one ---- */

enum { PACK_WORDS = 256 }; /* of a block that are packed at once */

/* A single row lies as it is read already, if its inputs need not be widened. */
static int64_t beside_bytes(const Linear *l, int64_t rows, int widened) {
    return rows == 1 && !widened && (!l->is_bf16 || l->inputs % 2 == 0) ? 0 : rows * words_of(l) * (widened ? 8 : 4);
}
/* The first `n` lanes; the others may be written too if they lie before `end`, where something else is stored later. */
INLINE void store_first(uint32_t *to, int64_t n, vu lanes, const uint32_t *end) {
    if (end >= to + VL)
        store_words(to, lanes);
    else
        store_some((float *)to, n, (vf)lanes);
}
/* VL words, from number `word` on, of `n` ≤ VL rows from `x` on; zeros beyond the end of a row. end: as in `store_first`. */
INLINE void pack_block(const Linear *l, const char *x, int64_t word, int64_t n, uint32_t *to, int64_t side, const uint32_t *end,
                       int widened) {
    const int64_t row = bytes_of(l, l->inputs), left = row - 4 * word, words = left < 4 * VL ? (left + 3) / 4 : VL;
    uint32_t copy[VL][VL];
    vu t[VL];
    if (n == VL && left >= 4 * VL)
        transpose(x + 4 * word, row, t);
    else if (left >= 4 * VL) {
        for (int64_t r = 0; r < VL; r++)
            store_words(copy[r], load_words((const uint32_t *)(x + (r < n ? r : 0) * row) + word)); /* lanes from n on do not matter */
        transpose((const char *)copy, 4 * VL, t);
    } else {
        memset(copy, 0, sizeof copy);
        for (int64_t r = 0; r < n; r++) memcpy(copy[r], x + r * row + 4 * word, (size_t)left);
        transpose((const char *)copy, 4 * VL, t);
    }
    for (int64_t j = 0; j < words; j++, to += side * (widened ? 2 : 1)) {
        store_first(to, n, widened ? t[j] & all_words(0xffff0000u) : t[j], end);
        if (widened) store_first(to + side, n, t[j] << 16, end);
    }
}
INLINE void pack_beside(Worker *w, const Linear *l, const void *x, int64_t rows, uint32_t *packed, int widened) {
    const int64_t words = words_of(l), per = widened ? 2 : 1, pieces = (words + PACK_WORDS - 1) / PACK_WORDS;
    for (int64_t i; (i = take(w, (rows + SIDE - 1) / SIDE * pieces)) >= 0;) {
        const int64_t block = i / pieces * SIDE, side = rows - block < SIDE ? rows - block : SIDE, from = i % pieces * PACK_WORDS;
        const int64_t to = from + PACK_WORDS < words ? from + PACK_WORDS : words;
        uint32_t *piece = packed + (block * words + from * side) * per;
        const uint32_t *end = side > VL ? NULL : piece + (to - from) * side * per; /* with more rows other lanes are stored before */
        for (int64_t at = from; at < to; at += VL)
            for (int64_t r = 0; r < side; r += VL)
                pack_block(l, (const char *)x + bytes_of(l, (block + r) * l->inputs), at, side - r < VL ? side - r : VL,
                           piece + (at - from) * side * per + r, side, end, widened);
    }
}

static int64_t fma_bytes(const Linear *l, int64_t rows) { return beside_bytes(l, rows, (int)l->is_bf16); }

/* fp32 numbers, of each pair the odd one first, a zero for the one that an odd number of inputs lacks. */
static void pack_fma(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {
    pack_beside(w, l, x, rows, packed, (int)l->is_bf16);
}

static void multiply_fma(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,
                         const Tuning *tuning, Scratch *s, float *sum) {
    const uint64_t before = l->is_bf16 ? flush() : 0;
    multiply(l, panel, ahead, (const uint32_t *)x + first * words_of(l) * (l->is_bf16 ? 2 : 1), rows, tuning, s, sum, 0);
    if (l->is_bf16) unflush(before);
}

static void across_fma(const Linear *l, int64_t panel, int64_t panels, const void *x, int64_t rows, const Tuning *tuning,
                       Scratch *s) {
    const uint64_t before = l->is_bf16 ? flush() : 0;
    multiply_across(l, panel, panels, x, rows, tuning, s, 0);
    if (l->is_bf16) unflush(before);
}

const Product product_fma = {PANEL, fma_bytes, pack_fma, NULL, NULL, multiply_fma, across_fma};

#ifdef __AVX512BF16__
static int64_t dot_bytes(const Linear *l, int64_t rows) { return beside_bytes(l, rows, 0); }

static void pack_dot(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {
    pack_beside(w, l, x, rows, packed, 0);
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

const Product product_dot = {PANEL, dot_bytes, pack_dot, NULL, NULL, multiply_dot, across_dot};
#endif
