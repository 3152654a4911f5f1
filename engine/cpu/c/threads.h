/* A team of threads: those of torch's OpenMP, so that two pools never fight for the cores. */
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif
enum { SPINS = 400 };

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or NULL: one thread */
    int (*team)(void);                                              /* omp_get_num_threads */
    int64_t threads;
} Team;

typedef struct {
    const Team *team;
    void (*body)(void *, void *);
    void *work;
    int64_t next[2];                 /* of this phase and of the one after it */
    int32_t arrived, phase, asleep; /* of the barrier; `phase` is a futex */
} Region;
typedef struct {
    Region *region;
    int phase, threads;
} Worker;

/* The next piece of work of this phase, or -1. */
INLINE int64_t take(Worker *w, int64_t items) {
    const int64_t i = __atomic_fetch_add(&w->region->next[w->phase % 2], 1, __ATOMIC_RELAXED);
    return i < items ? i : -1;
}

/* Wait for all threads: awake for some 10 µs, then asleep, as the one that is missing may need this very core. */
static void barrier(Worker *w) {
    Region *r = w->region;
    const int32_t phase = w->phase++;
    if (__atomic_add_fetch(&r->arrived, 1, __ATOMIC_SEQ_CST) == w->threads) {
        __atomic_store_n(&r->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&r->next[phase % 2], 0, __ATOMIC_RELAXED); /* for the phase after the next one */
        __atomic_store_n(&r->phase, phase + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&r->asleep, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &r->phase, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&r->phase, __ATOMIC_ACQUIRE) != phase) return;
        _mm_pause();
    }
    __atomic_add_fetch(&r->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&r->phase, __ATOMIC_SEQ_CST) == phase)
        syscall(SYS_futex, &r->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    __atomic_sub_fetch(&r->asleep, 1, __ATOMIC_SEQ_CST);
}

static void enter(void *region) {
    Region *r = region;
    Worker w = {r, 0, r->team->threads > 1 && r->team->parallel ? r->team->team() : 1};
    r->body(&w, r->work);
}

static void run(const Team *team, void (*body)(void *, void *), void *work) {
    Region region = {.team = team, .body = body, .work = work};
    if (team->threads > 1 && team->parallel)
        team->parallel(enter, &region, (unsigned)team->threads, 0);
    else
        enter(&region);
}
