/* Transposes VL rows of VL words, `row` bytes apart at any address: to[word][lane = row]. */
#pragma once

#include "vectors.h"

#if VL == 16
/* Words of rows i and i + 8, adjacent. */
INLINE __m512i pair(const char *p, int64_t row) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 8 * row));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE void transpose(const char *from, int64_t row, vu *to) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    UNROLL for (int half = 0; half < 2; half++, from += 32, to += 8) {
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
}
#elif VL == 8
INLINE void transpose(const char *from, int64_t row, vu *to) {
    __m256i a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(from + i * row));
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) /* a[i + j]: words j and j + 4 of rows i … i + 3 */
        UNROLL for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    UNROLL for (int j = 0; j < 4; j++) {
        to[j] = (vu)_mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        to[j + 4] = (vu)_mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
}
#else
INLINE void transpose(const char *from, int64_t row, vu *to) {
    for (int i = 0; i < VL; i++) {
        uint32_t words[VL];
        memcpy(words, from + i * row, sizeof words);
        for (int j = 0; j < VL; j++) to[j][i] = words[j];
    }
}
#endif
