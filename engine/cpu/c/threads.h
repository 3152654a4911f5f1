/* Runs a function in a team of threads: those of torch's OpenMP, so that no second pool competes for the cores. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

enum { SPINS = 400 };

INLINE void pause_(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep while *word is `value`; wake all that sleep so. Without a futex: give the core to another thread, and look again. */
INLINE void sleep_while(int32_t *word, int32_t value) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)word, (void)value, sched_yield();
#endif
}
INLINE void wake_all(int32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* Choices that differ between CPUs and change no bit; filled by `rollout_tune`. */
typedef struct {
    int64_t dot;   /* pairs of bf16 are multiplied by vdpbf16ps; else widened, by two FMA */
    int64_t piece; /* words of a panel that are transposed at once */
    int64_t few;   /* up to so many rows the sums of an output stay in registers */
    int64_t bytes; /* codes of eight bits are multiplied by vpdpbusd; else as pairs of int16 */
} Tuning;

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel, or NULL: one thread */
    int (*team)(void);                                              /* omp_get_num_threads */
    int64_t threads;
    const Tuning *tuning; /* of products */
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
            wake_all(&r->phase);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&r->phase, __ATOMIC_ACQUIRE) != phase) return;
        pause_();
    }
    __atomic_add_fetch(&r->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&r->phase, __ATOMIC_SEQ_CST) == phase)
        sleep_while(&r->phase, phase);
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
