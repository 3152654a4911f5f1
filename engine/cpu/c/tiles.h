/* AMX tile registers and instructions: eight matrices of 16 rows of 64 bytes. With PORTABLE they are emulated in C, for tests.

       tile_dot(c, a, b)   c[m][n] += Σ over k of a[m][2k] · b[k][2n] + a[m][2k + 1] · b[k][2n + 1]

   as Intel's manual has tdpbf16ps: even and odd products are added up by FMA in two sums from zero, the two are added, and that to
   c; denormal numbers are flushed to zero. */
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && !defined(PORTABLE)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The headers of some compilers do not say that these read memory, and what was written before might be left out. */
#define TILES_READ(from) __asm__ volatile("" : : "r"(from) : "memory")
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, row)       \
    do {                              \
        TILES_READ(from);             \
        _tile_loadd(t, from, row);    \
    } while (0)
#define tile_store(t, to, row) _tile_stored(t, to, row)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)

/* Linux gives tiles to a process that asks for them, once. 0 if it does. */
static inline int64_t allow_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA);
}
static inline void tiles_begin(void) {
    struct __attribute__((packed)) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    TILES_READ(&shape);
    _tile_loadconfig(&shape);
}
static inline void tiles_end(void) { _tile_release(); } /* so that nothing saves them while no product runs */

#elif defined(PORTABLE)
static _Thread_local uint32_t portable_tiles[8][16][16];

static inline void tile_zero(int t) { memset(portable_tiles[t], 0, sizeof portable_tiles[t]); }
static inline void tile_load(int t, const void *from, int64_t row) {
    for (int i = 0; i < 16; i++) memcpy(portable_tiles[t][i], (const char *)from + i * row, 64);
}
static inline void tile_store(int t, void *to, int64_t row) {
    for (int i = 0; i < 16; i++) memcpy((char *)to + i * row, portable_tiles[t][i], 64);
}
static inline void tile_dot(int c, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n += VL) {
            vf even = all(0), odd = all(0);
            for (int k = 0; k < 16; k++) {
                const vu x = all_words(portable_tiles[a][m][k]), y = load_words(portable_tiles[b][k] + n);
                even = fma_((vf)(x << 16), (vf)(y << 16), even);
                odd = fma_((vf)(x & all_words(0xffff0000u)), (vf)(y & all_words(0xffff0000u)), odd);
            }
            float *to = (float *)portable_tiles[c][m] + n;
            store(to, load(to) + (even + odd));
        }
}
static inline int64_t allow_tiles(void) { return 0; }
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
#endif
