/* Products of weights in eight bits and activations in sixteen, with sums of integers: `int8_g64/1`.

   The inputs of a row of x and of an output are cut into groups of GROUP, the last one padded with zeros. Each group has a scale
   and codes:

       scale = largest |number| / 127 of a weight, rounded up to bf16; / 32512 of x, in fp32; 0 if that is no normal number
       code  = number · (1 / scale), to the nearest integer, halves to even; 0 if the scale is 0
       y     = Σ over the groups, in order, each by an FMA:  (Σ code of x · code of w) · (scale of x · scale of w)

   The inner sum is one of integers, below 2^28, so its order is free: CPUs with VNNI, with AVX2 or without vectors get the same
   bits. It is rounded to fp32 once. A number that is not finite makes its scale NaN, and with it the row. Denormal numbers are
   zero.

   Weights are stored as code + 128, by 16 outputs × 4 inputs, which is a cache line; the groups of up to 48 outputs follow each
   other, and the scales follow all codes:

       codes  [panels of 48 outputs][groups][16 outputs at a time][steps of 4 inputs][16 outputs][4 inputs]
       scales [panels of 48 outputs][groups][16 outputs at a time][16 outputs]

   Of x, a group is its scale, -128 · the sum of its codes, which takes back what is added to the weights, and its codes. vpdpbusd
   multiplies bytes, so there a code is 256 · high + low, and the weights are multiplied by all high bytes, then by all low ones. */

#include "layout.h"
#include "products.h"

enum { GROUP = 64, SIDE = 16, STEPS = GROUP / 4, CODES = GROUP * SIDE, SUBS = PANEL / SIDE, PER = SIDE / VL };
#if VL == 16
enum { TILE = 8, AT_ONCE = SUBS, CHUNK = 8 }; /* rows and blocks of 16 outputs of a tile; groups that many rows meet at once */
#else
enum { TILE = 4, AT_ONCE = 1, CHUNK = 8 };
#endif
enum { BYTES, PAIRS }; /* how codes of x lie: all high bytes, then all low ones; or int16, each four in the order 0, 2, 1, 3 */
enum { HEAD = 8, X_GROUP = HEAD + 2 * GROUP }; /* bytes before the codes of x, and of all */
enum { MOST_W = 127, MOST_X = 127 * 256 };

INLINE int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }
INLINE int64_t blocks_of(int64_t outputs) { return (outputs + SIDE - 1) / SIDE; }

/* The number of a block of 16 outputs × GROUP inputs in memory. */
INLINE int64_t place(int64_t blocks, int64_t groups, int64_t block, int64_t group) {
    const int64_t panel = block / SUBS, left = blocks - panel * SUBS, subs = left < SUBS ? left : SUBS;
    return panel * SUBS * groups + group * subs + block % SUBS;
}

int64_t rollout_int8_bytes(int64_t outputs, int64_t inputs) {
    return blocks_of(outputs) * groups_of(inputs) * (CODES + 2 * SIDE);
}

/* ---- numbers to codes ---- */

/* The codes of n numbers, GROUP at most, with zeros behind them; returns the scale. By a thread that flushes denormal numbers. */
INLINE float encode(const void *x, int64_t at, int64_t n, int is_bf16, int is_weight, int32_t *codes) {
    vf v[GROUP / VL];
    vi top = (vi)all_words(0);
    for (int i = 0; i < GROUP / VL; i++) {
        const int64_t left = n - i * VL;
        v[i] = left <= 0 ? all(0) : is_bf16 ? load_some_bf16((const bf16 *)x + at + i * VL, left, 0)
                                            : load_some((const float *)x + at + i * VL, left, 0);
        const vi size = (vi)((vu)v[i] & all_words(0x7fffffff)); /* NaN is above infinity */
        const vi more = (vi)(size > top);
        top = (size & more) | (top & ~more);
    }
    int32_t most = 0;
    for (int i = 0; i < VL; i++) most = top[i] > most ? top[i] : most;
    float scale, inverse;
    memcpy(&scale, &most, 4);
    scale /= is_weight ? MOST_W : MOST_X;
    if (is_weight) {
        uint32_t word;
        memcpy(&word, &scale, 4);
        word = (word + 0xffff) & 0xffff0000u;
        memcpy(&scale, &word, 4);
    }
    if (most >= 0x7f800000) scale = NAN;
    if (scale < 1.17549435e-38f) scale = 0;
    inverse = scale > 0 ? 1 / scale : 0;
    if (scale > 0)
        for (int i = 0; i < GROUP / VL; i++) store_words((uint32_t *)codes + i * VL, (vu)to_integers(v[i] * all(inverse)));
    else
        memset(codes, 0, GROUP * sizeof *codes);
    return scale;
}

typedef struct {
    const void *x; /* [rows][inputs] */
    int64_t rows, inputs, is_bf16, is_weight;
    void *out;
    int64_t first, end; /* of weights: blocks of 16 outputs */
} Encode;

/* Work: a block of 16 outputs. */
static void encode_weights(void *worker, void *work) {
    const Encode *e = work;
    const int64_t groups = groups_of(e->inputs), blocks = blocks_of(e->rows);
    uint8_t *all_codes = e->out;
    bf16 *all_scales = (bf16 *)(all_codes + blocks * groups * CODES);
    const uint64_t before = flush();
    for (int64_t i; (i = take(worker, e->end - e->first)) >= 0;)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t block = e->first + i, at = place(blocks, groups, block, g), left = e->inputs - g * GROUP;
            uint8_t *codes = all_codes + at * CODES;
            for (int r = 0; r < SIDE; r++) {
                const int64_t row = block * SIDE + r;
                int32_t q[GROUP] __attribute__((aligned(64))) = {0};
                float scale = 0;
                if (row < e->rows)
                    scale = e->is_bf16 ? encode(e->x, row * e->inputs + g * GROUP, left, 1, 1, q)
                                       : encode(e->x, row * e->inputs + g * GROUP, left, 0, 1, q);
                uint8_t bytes[GROUP];
                for (int k = 0; k < GROUP; k++) bytes[k] = (uint8_t)(q[k] + 128);
                for (int k = 0; k < STEPS; k++) memcpy(codes + k * 64 + r * 4, bytes + 4 * k, 4);
                uint32_t word;
                memcpy(&word, &scale, 4);
                all_scales[at * SIDE + r] = (bf16)(word >> 16);
            }
        }
    unflush(before);
}

/* Encode the outputs from block `first` of 16 to `end` of a weight [outputs][inputs]. */
void rollout_int8_encode(const Team *team, const Encode *e) { run(team, encode_weights, (void *)e); }

/* Work: 8 rows. */
static void decode_rows(void *worker, void *work) {
    enum { ROWS_EACH = 8 };
    const Encode *e = work;
    const uint64_t before = flush();
    for (int64_t i; (i = take(worker, (e->rows + ROWS_EACH - 1) / ROWS_EACH)) >= 0;)
        for (int64_t row = i * ROWS_EACH; row < e->rows && row < (i + 1) * ROWS_EACH; row++)
            for (int64_t at = 0; at < e->inputs; at += GROUP) {
                const int64_t n = e->inputs - at < GROUP ? e->inputs - at : GROUP, to = row * e->inputs + at;
                int32_t q[GROUP] __attribute__((aligned(64)));
                const vf scale = all(encode(e->x, to, n, (int)e->is_bf16, (int)e->is_weight, q));
                for (int64_t k = 0; k < n; k += VL) {
                    const vf y = to_floats((vi)load_words((const uint32_t *)q + k)) * scale;
                    if (e->is_bf16)
                        store_some_bf16((bf16 *)e->out + to + k, n - k, y);
                    else
                        store_some((float *)e->out + to + k, n - k, y);
                }
            }
    unflush(before);
}

/* out [rows][inputs] = what codes and scales of x stand for, rounded to x's dtype: of weights, or else of activations. */
void rollout_int8_rounded(const Team *team, const Encode *e) { run(team, decode_rows, (void *)e); }

/* Work: (row, SEGMENT groups). */
INLINE void pack_as(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed, int kind) {
    enum { SEGMENT = 16 };
    const int64_t groups = groups_of(l->inputs), segments = (groups + SEGMENT - 1) / SEGMENT, size = X_GROUP;
    const uint64_t before = flush();
    for (int64_t i; (i = take(w, rows * segments)) >= 0;) {
        const int64_t row = i / segments, first = i % segments * SEGMENT;
        for (int64_t g = first; g < groups && g < first + SEGMENT; g++) {
            char *to = (char *)packed + (row * groups + g) * size;
            int32_t q[GROUP] __attribute__((aligned(64))), sum = 0;
            const int64_t at = row * l->inputs + g * GROUP, left = l->inputs - g * GROUP;
            const float scale = l->is_bf16 ? encode(x, at, left, 1, 0, q) : encode(x, at, left, 0, 0, q);
            for (int k = 0; k < GROUP; k++) sum += q[k];
            sum *= -128;
            memcpy(to, &scale, 4);
            memcpy(to + 4, &sum, 4);
            if (kind == PAIRS)
                for (int k = 0; k < GROUP; k += 4) {
                    const int16_t four[4] = {(int16_t)q[k], (int16_t)q[k + 2], (int16_t)q[k + 1], (int16_t)q[k + 3]};
                    memcpy(to + HEAD + 2 * k, four, sizeof four);
                }
            else
                for (int k = 0; k < GROUP; k++) {
                    const int32_t high = (q[k] + 128) >> 8;
                    to[HEAD + k] = (char)high, to[HEAD + GROUP + k] = (char)(q[k] - 256 * high);
                }
        }
    }
    unflush(before);
}

/* ---- tiles ---- */

INLINE int32_t word_at(const char *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}
INLINE float float_at(const char *p) {
    float x;
    memcpy(&x, p, 4);
    return x;
}
INLINE vi all_integers(int32_t x) { return (vi)all_words((uint32_t)x); }

/* acc + the sum of four products of u and of x, in each lane. */
INLINE vi add_bytes(vi acc, vu u, const char *x) {
#if VL == 16
    const vi four = all_integers(word_at(x));
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(four)); /* only where `Tuning.bytes` says that the CPU has it */
    return acc;
#else
    for (int j = 0; j < 4; j++) acc += (vi)((u >> (8 * j)) & all_words(255)) * all_integers(((const int8_t *)x)[j]);
    return acc;
#endif
}
/* The same; even and odd: those bytes of u as int16. */
INLINE vi add_pairs(vi acc, vu even, vu odd, const char *x) {
    const vi low = all_integers(word_at(x)), high = all_integers(word_at(x + 4));
#if VL == 16
    acc += (vi)_mm512_madd_epi16((__m512i)even, (__m512i)low);
    return acc + (vi)_mm512_madd_epi16((__m512i)odd, (__m512i)high);
#elif VL == 8
    acc += (vi)_mm256_madd_epi16((__m256i)even, (__m256i)low);
    return acc + (vi)_mm256_madd_epi16((__m256i)odd, (__m256i)high);
#else
    (void)even, (void)odd, (void)low, (void)high;
    return acc;
#endif
}

/* Groups of a panel: codes and scales of the first one, `apart` blocks from each to the next; what is read later is `ahead` bytes
   behind, or NULL. */
typedef struct {
    const uint8_t *codes;
    const bf16 *scales;
    const uint8_t *soon;
    int64_t groups, apart;
} Groups;

/* sum[rows][16 outputs · subs] += x[rows] · the groups. */
INLINE void tile(const Groups *all_groups, const char *x, int64_t x_row, float *sum, int fresh, int rows, int subs, int kind) {
    const int nv = subs * PER;
    const uint8_t *codes = all_groups->codes, *soon = all_groups->soon;
    const bf16 *scales = all_groups->scales;
    const int64_t apart = all_groups->apart;
    for (int64_t g = 0; g < all_groups->groups; g++, codes += apart * CODES, scales += apart * SIDE, x += X_GROUP) {
        vi acc[TILE][AT_ONCE * PER];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < nv; v++) acc[r][v] = kind == BYTES ? all_integers(0) : all_integers(word_at(x + r * x_row + 4));
        if (kind == BYTES) {
            for (int k = 0; k < STEPS; k++) {
                vu u[AT_ONCE * PER];
                UNROLL for (int v = 0; v < nv; v++)
                    u[v] = load_words((const uint32_t *)(codes + v / PER * CODES + k * 64 + v % PER * 4 * VL));
                UNROLL for (int r = 0; r < rows; r++)
                    UNROLL for (int v = 0; v < nv; v++) acc[r][v] = add_bytes(acc[r][v], u[v], x + r * x_row + HEAD + 4 * k);
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < nv; v++) acc[r][v] = (acc[r][v] << 8) + all_integers(word_at(x + r * x_row + 4));
            __asm__("" : "+r"(codes)); /* or a compiler keeps 48 vectors of codes for the second time, on the stack */
        }
        for (int k = 0; k < STEPS; k++) {
            vu u[AT_ONCE * PER], even[AT_ONCE * PER], odd[AT_ONCE * PER];
            UNROLL for (int v = 0; v < nv; v++) {
                u[v] = load_words((const uint32_t *)(codes + v / PER * CODES + k * 64 + v % PER * 4 * VL));
                if (kind == PAIRS) even[v] = u[v] & all_words(0x00ff00ff), odd[v] = (u[v] >> 8) & all_words(0x00ff00ff);
            }
            if (soon) {
                UNROLL for (int s = 0; s < subs; s++) __builtin_prefetch(soon + (s * STEPS + k) * 64, 0, 2);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                const char *four = x + r * x_row + HEAD + (kind == PAIRS ? 8 * k : GROUP + 4 * k);
                UNROLL for (int v = 0; v < nv; v++)
                    acc[r][v] = kind == PAIRS ? add_pairs(acc[r][v], even[v], odd[v], four) : add_bytes(acc[r][v], u[v], four);
            }
        }
        if (soon) soon += apart * CODES;
        vf scale[AT_ONCE * PER];
        UNROLL for (int v = 0; v < nv; v++) scale[v] = load_bf16(scales + v * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            const vf of_x = all(float_at(x + r * x_row));
            UNROLL for (int v = 0; v < nv; v++) {
                float *to = sum + r * PANEL + v * VL;
                store(to, fma_(to_floats(acc[r][v]), of_x * scale[v], fresh && !g ? all(0) : load(to)));
            }
        }
    }
}

typedef void (*TileFn)(const Groups *, const char *, int64_t, float *, int);
#define TILE_FN(kind, rows, subs)                                                                          \
    static void kind##_##rows##_##subs(const Groups *g, const char *x, int64_t x_row, float *sum, int fresh) { \
        tile(g, x, x_row, sum, fresh, rows, subs, kind);                                                   \
    }
#if VL == 16
#define TILE_FNS(kind, rows) TILE_FN(kind, rows, 1) TILE_FN(kind, rows, 2) TILE_FN(kind, rows, 3)
#define TILE_NAMES(kind, rows) {kind##_##rows##_1, kind##_##rows##_2, kind##_##rows##_3}
#define TILES(kind)                                                                             \
    TILE_FNS(kind, 1) TILE_FNS(kind, 2) TILE_FNS(kind, 3) TILE_FNS(kind, 4)                     \
    TILE_FNS(kind, 5) TILE_FNS(kind, 6) TILE_FNS(kind, 7) TILE_FNS(kind, 8)                     \
    static const TileFn kind##_tiles[TILE][AT_ONCE] = {                                         \
        TILE_NAMES(kind, 1), TILE_NAMES(kind, 2), TILE_NAMES(kind, 3), TILE_NAMES(kind, 4),     \
        TILE_NAMES(kind, 5), TILE_NAMES(kind, 6), TILE_NAMES(kind, 7), TILE_NAMES(kind, 8)};
TILES(BYTES)
TILES(PAIRS)
#else
#define TILES(kind)                                                                         \
    TILE_FN(kind, 1, 1) TILE_FN(kind, 2, 1) TILE_FN(kind, 3, 1) TILE_FN(kind, 4, 1)         \
    static const TileFn kind##_tiles[TILE][AT_ONCE] = {{kind##_1_1}, {kind##_2_1}, {kind##_3_1}, {kind##_4_1}};
#if VL == 8
TILES(PAIRS)
#else
TILES(BYTES)
#endif
#endif

INLINE void multiply_as(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows, float *sum,
                        const TileFn tiles[TILE][AT_ONCE], int kind) {
    const int64_t groups = groups_of(l->inputs), blocks = blocks_of(l->outputs), left = blocks - panel * SUBS;
    const int64_t subs = left < SUBS ? left : SUBS, x_row = groups * X_GROUP, chunk = rows <= TILE ? groups : CHUNK;
    const uint8_t *codes = (const uint8_t *)l->w + panel * SUBS * groups * CODES;
    const bf16 *scales = (const bf16 *)((const uint8_t *)l->w + blocks * groups * CODES) + panel * SUBS * groups * SIDE;
    const char *from = (const char *)x + first * x_row;
    const uint64_t before = flush();
    for (int64_t g = 0; g < groups; g += chunk) {
        const int64_t some = groups - g < chunk ? groups - g : chunk;
        const uint8_t *soon = ahead.at ? (const uint8_t *)ahead.at + g * subs * CODES : NULL;
        for (int64_t r = 0; r < rows; r += TILE) {
            const int64_t n = rows - r < TILE ? rows - r : TILE;
            for (int64_t s = 0; s < subs; s += AT_ONCE) {
                const Groups part = {codes + (g * subs + s) * CODES, scales + (g * subs + s) * SIDE,
                                     r || !soon ? NULL : soon + s * CODES, some, subs};
                const int64_t at_once = subs - s < AT_ONCE ? subs - s : AT_ONCE;
                /* Measured: a single row takes a sixth less time twice, as its own tile is so fast that a core drops prefetches. */
                const int twice = kind == BYTES && rows == 1;
                tiles[n - 1 + twice][at_once - 1](&part, from + r * x_row + g * X_GROUP, twice ? 0 : x_row, sum + r * PANEL + s * SIDE,
                                                  g == 0);
            }
        }
    }
    unflush(before);
}

#define PRODUCT(kind, name)                                                                                                  \
    static int64_t packed_##kind(const Linear *l, int64_t rows) { return rows * groups_of(l->inputs) * X_GROUP; }      \
    static void pack_##kind(Worker *w, const Linear *l, const void *x, int64_t rows, void *packed) {                         \
        pack_as(w, l, x, rows, packed, kind);                                                                               \
    }                                                                                                                        \
    static void multiply_##kind(const Linear *l, int64_t panel, Ahead ahead, const void *x, int64_t first, int64_t rows,     \
                                const Tuning *tuning, Scratch *s, float *sum) {                                              \
        (void)tuning, (void)s;                                                                                               \
        multiply_as(l, panel, ahead, x, first, rows, sum, kind##_tiles, kind);                                               \
    }                                                                                                                        \
    static const Product name = {PANEL, packed_##kind, pack_##kind, NULL, NULL, multiply_##kind, NULL};

#if VL == 16
PRODUCT(BYTES, of_bytes)
PRODUCT(PAIRS, of_pairs)
const Product *product_int8(const Tuning *tuning) { return tuning->bytes ? &of_bytes : &of_pairs; }
#elif VL == 8
PRODUCT(PAIRS, of_pairs)
const Product *product_int8(const Tuning *tuning) { return (void)tuning, &of_pairs; }
#else
PRODUCT(BYTES, of_bytes)
const Product *product_int8(const Tuning *tuning) { return (void)tuning, &of_bytes; }
#endif

Ahead codes_of_panel(const Linear *l, int64_t panel) {
    const int64_t groups = groups_of(l->inputs), left = blocks_of(l->outputs) - panel * SUBS;
    const char *codes = (const char *)l->w + panel * SUBS * groups * CODES;
    return (Ahead){codes, codes + (left < SUBS ? left : SUBS) * groups * CODES};
}

/* The most that `rows` rows of x take as the product reads them. */
int64_t rollout_int8_packed_bytes(int64_t rows, int64_t inputs) { return rows * groups_of(inputs) * X_GROUP; }

const Field rollout_layout_int8[] = {
    FIELD(Encode, x), FIELD(Encode, rows), FIELD(Encode, inputs), FIELD(Encode, is_bf16), FIELD(Encode, is_weight),
    FIELD(Encode, out), FIELD(Encode, first), FIELD(Encode, end),
    {NULL, NULL, 0, 0},
};
