/* Vectors of VL fp32 lanes: 16 with AVX-512, 8 with AVX2 and FMA, 4 in plain C on any architecture.

   Whatever acts on lanes gives each lane the same bits for every VL: FMA is written out (`fma_`), the compiler contracts nothing,
   and where lanes are added up the order is fixed (`fold16`). A file that is written in these words needs no intrinsics. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* early, or accumulators go to the stack and back */
typedef uint16_t bf16;

typedef float vf __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef vf vf_mem __attribute__((aligned(4), may_alias));
typedef vu vu_mem __attribute__((aligned(4), may_alias));
#if VL == 16
typedef __mmask16 vm; /* a bit for each lane */
#else
typedef vu vm; /* all ones or zero in each lane */
#endif

/* ---- memory ---- */

INLINE vf load(const float *p) { return *(const vf_mem *)p; }
INLINE void store(float *p, vf x) { *(vf_mem *)p = x; }
INLINE vu load_words(const uint32_t *p) { return *(const vu_mem *)p; }
INLINE void store_words(uint32_t *p, vu x) { *(vu_mem *)p = x; }

/* ---- numbers ---- */

#if VL == 16
INLINE vf all(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vu all_words(uint32_t x) { return (vu)_mm512_set1_epi32((int)x); }
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); } /* a · b + c */
INLINE vf max_(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); } /* a > b ? a : b, so b where one is NaN */
INLINE vi to_integers(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); } /* to the nearest, halves to even; |x| < 2^22 */
INLINE float lane_max(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#elif VL == 8
INLINE vf all(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vu all_words(uint32_t x) { return (vu)_mm256_set1_epi32((int)x); }
INLINE vf fma_(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf max_(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vi to_integers(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
INLINE float lane_max(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
#else
INLINE vf all(float x) { return (vf){x, x, x, x}; }
INLINE vu all_words(uint32_t x) { return (vu){x, x, x, x}; }
INLINE vf fma_(vf a, vf b, vf c) {
    return (vf){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
INLINE vf max_(vf a, vf b) {
    const vu m = (vu)(a > b);
    return (vf)(((vu)a & m) | ((vu)b & ~m));
}
INLINE vi to_integers(vf x) {
    const vf magic = all(12582912.0f); /* 1.5 · 2^23: what is added to it is rounded to an integer, which stands in the low bits */
    return (vi)(x + magic) - (vi)magic;
}
INLINE float lane_max(vf x) {
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
#endif
INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf minus(vf x) { return (vf)((vu)x ^ all_words(0x80000000u)); }

/* The sum of 16 lanes, which are 16 / VL vectors: the upper half onto the lower one until one is left, as torch does it. */
enum { PARTS = 16 / VL };
INLINE float fold16(const vf *parts) {
    float lanes[16];
    for (int i = 0; i < PARTS; i++) store(lanes + i * VL, parts[i]);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* ---- choices: a comparison with NaN is false ---- */

#if VL == 16
INLINE vm less(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
INLINE vm at_least(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
INLINE vm equal(vf a, vf b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
INLINE vm is_nan(vf x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }
INLINE vf choose(vm m, vf yes, vf no) { return (vf)_mm512_mask_mov_ps((__m512)no, m, (__m512)yes); }
INLINE vm none(void) { return 0; }
INLINE vm first_lanes(int64_t n) { return n < VL ? (__mmask16)((1u << n) - 1) : 0xffff; } /* lanes 0 … n - 1 */
INLINE unsigned bits(vm m) { return m; } /* a bit for each lane */
#else
INLINE vm less(vf a, vf b) { return (vm)(a < b); }
INLINE vm at_least(vf a, vf b) { return (vm)(a >= b); }
INLINE vm equal(vf a, vf b) { return (vm)(a == b); }
INLINE vm is_nan(vf x) { return (vm)(x != x); }
INLINE vf choose(vm m, vf yes, vf no) { return (vf)(((vu)yes & m) | ((vu)no & ~m)); }
INLINE vm none(void) { return all_words(0); }
INLINE vm first_lanes(int64_t n) {
    vu lane;
    for (int i = 0; i < VL; i++) lane[i] = (uint32_t)i;
    return (vm)(lane < all_words(n < VL ? (uint32_t)n : VL));
}
#if VL == 8
INLINE unsigned bits(vm m) { return (unsigned)_mm256_movemask_ps((__m256)m); }
#else
INLINE unsigned bits(vm m) { return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8); }
#endif
#endif
INLINE int count(vm m) { return __builtin_popcount(bits(m)); }

/* The chosen lanes side by side at `to`, which has room for VL numbers; how many there are. */
INLINE int compress(float *to, vm m, vf x) {
#if VL == 16
    store(to, (vf)_mm512_maskz_compress_ps(m, (__m512)x));
    return __builtin_popcount(m);
#else
    int n = 0;
    float lanes[VL];
    store(lanes, x);
    for (unsigned left = bits(m); left; left &= left - 1) to[n++] = lanes[__builtin_ctz(left)];
    return n;
#endif
}

/* ---- tails: n ≤ VL lanes in memory, `fill` in the others ---- */

INLINE vf load_some(const float *p, int64_t n, float fill) {
#if VL == 16
    return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(n), p);
#else
    if (n >= VL) return load(p);
    float lanes[VL];
    for (int i = 0; i < VL; i++) lanes[i] = i < n ? p[i] : fill;
    return load(lanes);
#endif
}
INLINE void store_some(float *p, int64_t n, vf x) {
#if VL == 16
    _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)x);
#else
    float lanes[VL];
    store(lanes, x);
    memcpy(p, lanes, 4 * (size_t)(n < VL ? n : VL));
#endif
}

/* ---- bf16: to the nearest, halves to even; NaN stays NaN ---- */

INLINE vu rounded_bits(vf x) { /* bf16 in the upper halves; something in the lower ones */
    const vu u = (vu)x, r = u + all_words(0x7fff) + ((u >> 16) & all_words(1));
    return (vu)choose(is_nan(x), (vf)(u | all_words(0x400000)), (vf)r);
}
INLINE vf rounded(vf x) { return (vf)(rounded_bits(x) & all_words(0xffff0000u)); }
INLINE vf load_bf16(const bf16 *p) {
#if VL == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif VL == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return (vf)((vu){p[0], p[1], p[2], p[3]} << 16);
#endif
}
INLINE void store_bf16(bf16 *p, vf x) {
    const vu r = rounded_bits(x) >> 16;
#if VL == 16
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)r));
#elif VL == 8
    const __m256i both = _mm256_packus_epi32((__m256i)r, (__m256i)r);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08)));
#else
    for (int i = 0; i < VL; i++) p[i] = (bf16)r[i];
#endif
}
INLINE vf load_some_bf16(const bf16 *p, int64_t n, float fill) {
    if (n >= VL) return load_bf16(p);
    bf16 lanes[VL] = {0};
    memcpy(lanes, p, 2 * (size_t)n);
    return choose(first_lanes(n), load_bf16(lanes), all(fill));
}
INLINE void store_some_bf16(bf16 *p, int64_t n, vf x) {
    if (n >= VL) {
        store_bf16(p, x);
        return;
    }
    bf16 lanes[VL];
    store_bf16(lanes, x);
    memcpy(p, lanes, 2 * (size_t)n);
}

/* ---- functions, in the bits of Sleef's *_u10 with FMA (Shibata & Petrogalli 2020), which torch's vectors use ---- */

/* e^x = 2^n · (1 + rest) with |log (1 + rest)| ≤ log(2) / 2. */
typedef struct {
    vf rest;
    vi n;
} Power;
INLINE Power power_of_e(vf x) {
    const vi n = to_integers(x * all(1.44269504088896340736f));
    const vf q = to_floats(n);
    vf s = fma_(q, all(-0.693145751953125f), x);
    s = fma_(q, all(-1.428606765330187045e-06f), s);
    vf u = all(0.000198527617612853646278381f);
    u = fma_(u, s, all(0.00139304355252534151077271f));
    u = fma_(u, s, all(0.00833336077630519866943359f));
    u = fma_(u, s, all(0.0416664853692054748535156f));
    u = fma_(u, s, all(0.166666671633720397949219f));
    u = fma_(u, s, all(0.5f));
    return (Power){fma_(s * s, u, s), n};
}
INLINE vf exp_(vf x) {
    const Power power = power_of_e(x);
    const vi half = power.n >> 1;
    vf u = all(1) + power.rest;
    u *= (vf)((half + 127) << 23);
    u *= (vf)((power.n - half + 127) << 23);
    u = choose(less(x, all(-104)), all(0), u);
    return choose(less(all(100), x), all(INFINITY), u);
}

/* e / (e + 2) with e = e^2|x| - 1, which is 1 from |x| = 10 on, and the sign of x; a relative error of a few roundings. */
INLINE vf tanh_(vf x) {
    const vu sign = (vu)x & all_words(0x80000000u);
    const vf size = minus(max_(all(-10), minus((vf)((vu)x ^ sign)))); /* NaN stays NaN */
    const Power power = power_of_e(size + size);
    const vf scale = (vf)((power.n + 127) << 23), less_one = fma_(scale, power.rest, scale - all(1));
    return (vf)((vu)(less_one / (less_one + all(2))) | sign);
}

/* A number and what was lost when it was rounded. */
typedef struct {
    vf x, rest;
} Pair;
INLINE Pair sum_of(vf a, vf b) { /* Knuth's two-sum */
    const vf s = a + b, v = s - a;
    return (Pair){s, (a - (s - v)) + (b - v)};
}

/* Natural logarithm: d = m · 2^e with m in [0.75, 1.5), log m = 2 atanh((m - 1) / (m + 1)). */
INLINE vf log_(vf d) {
    const vm tiny = less(d, all(1.17549435e-38f));
    const vf scaled = choose(tiny, d * all(18446744073709551616.0f), d);
    const vi e = (vi)(((vu)(scaled * all(1.0f / 0.75f)) >> 23) & all_words(0xff)) - 127;
    const vf m = (vf)((vi)scaled - (e << 23)), exponent = to_floats(e) - choose(tiny, all(64), all(0));
    const vf high = all(0.69314718246459960938f) * exponent;
    const vf low = fma_(all(-1.904654323148236017e-09f), exponent, fma_(all(0.69314718246459960938f), exponent, minus(high)));
    const Pair above = sum_of(all(-1), m), below = sum_of(all(1), m);
    const vf t = all(1) / below.x, q = above.x * t;
    const vf lost = fma_(minus(below.rest), t, fma_(minus(below.x), t, all(1)));
    const Pair x = {q, fma_(q, lost, fma_(above.rest, t, fma_(t, above.x, minus(q))))};
    const vf x2 = x.x * x.x;
    const vf series = fma_(fma_(all(0.3027294874f), x2, all(0.3996108174f)), x2, all(0.6666694880f));
    const vf s = high + x.x * all(2), rest = (((high - s) + x.x * all(2)) + low) + x.rest * all(2);
    const vf cubic = (x2 * x.x) * series, sum = s + cubic;
    vf r = sum + (((s - sum) + cubic) + rest);
    r = choose(equal(d, all(INFINITY)), all(INFINITY), r);
    r = choose(less(d, all(0)), all(NAN), r);
    r = choose(is_nan(d), all(NAN), r);
    return choose(equal(d, all(0)), all(-INFINITY), r);
}

/* log(1 + d) for d > -1 that is no larger than 10^38: as log_, of 1 + d without the rounding of that sum. */
INLINE vf log1p_(vf d) {
    const vi e = (vi)(((vu)((d + all(1)) * all(1.0f / 0.75f)) >> 23) & all_words(0xff)) - 127;
    const vf t = (vf)((127 - e) << 23), m = fma_(d, t, t - all(1)), exponent = to_floats(e);
    const vf high = all(0.69314718246459960938f) * exponent;
    const vf low = fma_(all(-1.904654323148236017e-09f), exponent, fma_(all(0.69314718246459960938f), exponent, minus(high)));
    const Pair below = sum_of(all(2), m);
    const vf r = all(1) / below.x, q = m * r;
    const vf lost = fma_(minus(below.rest), r, fma_(minus(below.x), r, all(1)));
    const Pair x = {q, fma_(q, lost, fma_(r, m, minus(q)))};
    const vf x2 = x.x * x.x;
    const vf series = fma_(fma_(all(0.3027294874f), x2, all(0.3996108174f)), x2, all(0.6666694880f));
    const vf s = high + x.x * all(2), rest = (((high - s) + x.x * all(2)) + low) + x.rest * all(2);
    const vf cubic = (x2 * x.x) * series, sum = s + cubic;
    const vf r1 = sum + (((s - sum) + cubic) + rest);
    return choose(is_nan(d), all(NAN), choose(equal(d, all(0)), d, r1));
}

/* Numbers with twice the digits. */
INLINE Pair twice(vf x) { return (Pair){x, all(0)}; }
INLINE Pair plus(Pair a, vf b) {
    const Pair s = sum_of(a.x, b);
    return (Pair){s.x, s.rest + a.rest};
}
INLINE Pair plus_pair(Pair a, Pair b) { /* |a| ≥ |b| */
    const vf s = a.x + b.x;
    return (Pair){s, (((a.x - s) + b.x) + a.rest) + b.rest};
}
INLINE Pair times(Pair a, vf b) {
    const vf s = a.x * b;
    return (Pair){s, fma_(a.rest, b, fma_(a.x, b, minus(s)))};
}
INLINE Pair times_pair(Pair a, Pair b) {
    const vf s = a.x * b.x;
    return (Pair){s, fma_(a.x, b.rest, fma_(a.rest, b.x, fma_(a.x, b.x, minus(s))))};
}
INLINE Pair square(Pair a) {
    const vf s = a.x * a.x;
    return (Pair){s, fma_(a.x + a.x, a.rest, fma_(a.x, a.x, minus(s)))};
}
INLINE Pair over(Pair a, Pair b) {
    const vf t = all(1) / b.x, s = a.x * t;
    const vf lost = fma_(minus(b.rest), t, fma_(minus(b.x), t, all(1)));
    return (Pair){s, fma_(s, lost, fma_(a.rest, t, fma_(t, a.x, minus(s))))};
}
INLINE Pair one_over(Pair b) {
    const vf s = all(1) / b.x;
    return (Pair){s, s * fma_(minus(b.rest), s, fma_(minus(b.x), s, all(1)))};
}
INLINE Pair exp_pair(vf x) {
    const vi n = to_integers(x * all(1.44269504088896340736f)), half = n >> 1;
    const vf q = to_floats(n), low = (vf)((half + 127) << 23), high = (vf)((n - half + 127) << 23);
    const Pair s = plus(sum_of(x, q * all(-0.693145751953125f)), q * all(-1.428606765330187045e-06f));
    vf u = all(0.1980960224e-3f);
    u = fma_(u, s.x, all(0.1394256484e-2f));
    u = fma_(u, s.x, all(0.8333456703e-2f));
    u = fma_(u, s.x, all(0.4166637361e-1f));
    Pair t = plus(times_pair(s, plus(times(s, u), all(0.166666659414234244790680580464f))), all(0.5f));
    t = plus_pair(twice(all(1)), plus_pair(s, times_pair(square(s), t)));
    return (Pair){t.x * low * high, t.rest * low * high};
}
/* (e^|x| - e^-|x|) / (e^|x| + e^-|x|), with the sign of x */
INLINE vf tanh_exact(vf x) {
    const vu sign = (vu)x & all_words(0x80000000u);
    const vf size = (vf)((vu)x ^ sign);
    const Pair up = exp_pair(size), down = one_over(up);
    const Pair y = over(plus_pair(up, (Pair){minus(down.x), minus(down.rest)}), plus_pair(up, down));
    const vf r = choose(less(all(8.664339742f), size), all(1), y.x + y.rest);
    return choose(is_nan(x), x, (vf)((vu)r | sign));
}

INLINE vf sigmoid(vf x) { return all(1) / (all(1) + exp_(minus(x))); }
INLINE vf silu(vf x) { return x / (all(1) + exp_(minus(x))); }
/* log(1 + e^x); x itself above 20, as torch's */
INLINE vf softplus(vf x) {
    const vf e = exp_(x), u = all(1) + e; /* what 1 + e lost is added to the logarithm as its derivative */
    return choose(less(all(20), x), x, log_(u) + (e - (u - all(1))) / u);
}
/* The same, as torch has it. */
INLINE vf softplus_exact(vf x) { return choose(less(all(20), x), x, log1p_(exp_(x))); }
/* x · Φ(x), approximated by tanh, as torch has it: its compiler makes an FMA of the cubic term. */
INLINE vf gelu_tanh(vf x) {
    const vf inner = all(0.79788456080286535588f) * fma_(all(0.044715f), x * x * x, x);
    return all(0.5f) * x * (all(1) + tanh_exact(inner));
}
