/* Measures the peak speed of multiplications and of memory reads here, for `python -m tests.bench products` and for the choice between
   instructions. */

#include <pthread.h>
#include <time.h>

#include "products.h"
#if defined(__AMX_BF16__) && !defined(PORTABLE)
#include "tiles.h"
#endif

enum { FMA, DOT, TILES }; /* kinds of multiplication: what a register peak is of */
enum { WINDOWS = 24, STEPS = 2000, CHAINS = VL == 16 ? 24 : 12 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One window of multiplications on registers alone; how many floating-point operations it was. */
static double multiply_registers(int kind) {
    volatile float seed = 1e-9f, sink;
    vf acc[CHAINS], a = all(seed);
    UNROLL for (int i = 0; i < CHAINS; i++) acc[i] = all(seed); /* volatile: a compiler would make one chain of equal ones */
#if defined(__AMX_BF16__) && !defined(PORTABLE)
    if (kind == TILES) {
        tiles_begin();
        for (int i = 0; i < STEPS; i++) {
            tile_dot(0, 4, 6);
            tile_dot(1, 4, 7);
            tile_dot(2, 5, 6);
            tile_dot(3, 5, 7);
        }
        tiles_end();
        return 4.0 * STEPS * 16 * 16 * 32 * 2;
    }
#endif
    for (int step = 0; step < STEPS; step++)
#ifdef __AVX512BF16__
        if (kind == DOT)
            _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++)
                acc[i] = (vf)_mm512_dpbf16_ps((__m512)acc[i], (__m512bh)a, (__m512bh)a);
        else
#endif
            _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++) acc[i] = fma_(acc[i], a, a);
    for (int i = 0; i < CHAINS; i++) sink = lane_max(acc[i]);
    (void)sink, (void)kind;
    return (double)STEPS * CHAINS * VL * (kind == DOT ? 4 : 2);
}

static double peak(int kind) {
    double best = 0;
    for (int i = 0; i < WINDOWS; i++) {
        const double began = now(), operations = multiply_registers(kind), rate = operations / (now() - began);
        if (rate > best) best = rate;
    }
    return best;
}

typedef struct {
    double rate;
    pthread_mutex_t lock; /* of `rate` */
    int64_t kind;
    const char *data;
    int64_t bytes, piece;
} Measured;

static void peak_of_team(void *worker, void *work) {
    Measured *m = work;
    const double rate = peak((int)m->kind);
    pthread_mutex_lock(&m->lock);
    m->rate += rate;
    pthread_mutex_unlock(&m->lock);
    (void)worker;
}

/* Floating-point operations a second of all threads together, in registers: FMA, DOT or TILES; 0: there is no such instruction. */
double rollout_peak(const Team *team, int64_t kind) {
#ifndef __AVX512BF16__
    if (kind == DOT) return 0;
#endif
#if !defined(__AMX_BF16__) || defined(PORTABLE)
    if (kind == TILES) return 0;
#endif
    Measured m = {.kind = kind, .lock = PTHREAD_MUTEX_INITIALIZER};
    run(team, peak_of_team, &m);
    return m.rate;
}

static void read_all(void *worker, void *work) {
    Worker *w = worker;
    Measured *m = work;
    vu acc[8];
    for (int j = 0; j < 8; j++) acc[j] = all_words(0);
    for (int64_t i; (i = take(w, m->bytes / m->piece)) >= 0;)
        for (const char *p = m->data + i * m->piece, *end = p + m->piece; p < end; p += 8 * sizeof(vu))
            UNROLL for (int j = 0; j < 8; j++) acc[j] += load_words((const uint32_t *)p + j * VL);
    volatile uint32_t sink;
    for (int j = 0; j < 8; j++) sink = acc[j][0];
    (void)sink;
}

/* Read `bytes` (a multiple of 1 MiB) with all threads: for Python to time. */
void rollout_read(const Team *team, const void *data, int64_t bytes) {
    Measured m = {.data = data, .bytes = bytes, .piece = 1 << 20};
    run(team, read_all, &m);
}

/* Fill in what is best here. vdpbf16ps: some CPUs take two cycles for it, in which two FMA of the same bits do as much each; that is
   measured, in about a millisecond. */
void rollout_tune(Tuning *t) {
    *t = (Tuning){.piece = VL == 16 ? 256 : 128, .few = 16};
#if VL == 16
    t->bytes = __builtin_cpu_supports("avx512vnni") != 0;
#endif
#ifdef __AVX512BF16__
    t->dot = peak(DOT) >= 0.9 * peak(FMA);
#endif
}
