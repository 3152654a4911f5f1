/* Transposes VL rows of words, `row` bytes apart at any address: to[word][lane = row]. `transpose_deep`: DEEP words of each row;
   `transpose`: VL words. */
#pragma once

#include "vectors.h"

enum { DEEP = VL == 16 ? 8 : 4 };

#if VL == 16
/* Words of rows i and i + 8, adjacent. */
INLINE __m512i pair(const char *p, int64_t row) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 8 * row));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE void transpose_deep(const char *from, int64_t row, vu *to) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    __m512i a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = pair(from + i * row, row);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) /* a[i + j] holds words j and j + 4 of rows i … i + 3 and i + 8 … i + 11 */
        UNROLL for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    UNROLL for (int j = 0; j < 4; j++) {
        to[j] = (vu)_mm512_permutex2var_epi64(a[j], low, a[4 + j]);
        to[j + 4] = (vu)_mm512_permutex2var_epi64(a[j], high, a[4 + j]);
    }
}
/* 16 words of 16 rows, which have been loaded. */
INLINE void transpose_registers(const vu *lines, vu *to) {
    __m512i a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = (__m512i)lines[i];
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) /* a[i + j]: words j, 4 + j, 8 + j, 12 + j of rows i to i + 3 */
        UNROLL for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44), high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
        to[j] = (vu)_mm512_shuffle_i32x4(low, low2, 0x88);
        to[4 + j] = (vu)_mm512_shuffle_i32x4(low, low2, 0xdd);
        to[8 + j] = (vu)_mm512_shuffle_i32x4(high, high2, 0x88);
        to[12 + j] = (vu)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
}
#elif VL == 8
/* Four words of row i, then four of row i + 4, in one vector. */
INLINE __m256i pair(const char *p, int64_t row) {
    const __m128i low = _mm_loadu_si128((const __m128i *)p), high = _mm_loadu_si128((const __m128i *)(p + 4 * row));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
INLINE void transpose_deep(const char *from, int64_t row, vu *to) {
    __m256i a[4], b[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = pair(from + i * row, row);
    UNROLL for (int i = 0; i < 4; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int j = 0; j < 2; j++) {
        to[2 * j] = (vu)_mm256_unpacklo_epi64(b[j], b[j + 2]);
        to[2 * j + 1] = (vu)_mm256_unpackhi_epi64(b[j], b[j + 2]);
    }
}
#else
INLINE void transpose_deep(const char *from, int64_t row, vu *to) {
    for (int i = 0; i < VL; i++) {
        uint32_t words[DEEP];
        memcpy(words, from + i * row, sizeof words);
        for (int j = 0; j < DEEP; j++) to[j][i] = words[j];
    }
}
#endif
INLINE void transpose(const char *from, int64_t row, vu *to) {
    UNROLL for (int i = 0; i < VL; i += DEEP) transpose_deep(from + 4 * i, row, to + i);
}
