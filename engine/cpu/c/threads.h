/* Runs a function in a team of threads: those of torch's OpenMP, so that no second pool competes for the cores. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>
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

enum { SPINS = 1200 };

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

/* How many pieces of a thread's share of the work are taken. */
typedef struct {
    int64_t taken[2]; /* of this phase and of the one after it */
} __attribute__((aligned(64))) Share;

typedef struct {
    const Team *team;
    void (*body)(void *, void *);
    void *work;
    Share *shares; /* [threads] */
    int32_t entered;
    int32_t arrived, phase, asleep; /* of the barrier; `phase` is a futex */
} Region;
typedef struct {
    Region *region;
    int phase, threads, id;
    int finished; /* shares of this phase in which nothing is left, from its own on */
} Worker;

/* The first piece of a worker's share. */
INLINE int64_t share_of(int64_t items, int64_t id, int64_t threads) { return items * id / threads; }

/* The next piece of work of this phase, or -1: of the worker's own share, which is the same part of each phase so that it finds in its
   core's cache what it has written before; then of the shares of those that are slower. */
INLINE int64_t take(Worker *w, int64_t items) {
    for (; w->finished < w->threads; w->finished++) {
        const int id = (w->id + w->finished) % w->threads;
        const int64_t i = share_of(items, id, w->threads) +
                          __atomic_fetch_add(&w->region->shares[id].taken[w->phase % 2], 1, __ATOMIC_RELAXED);
        if (i < share_of(items, id + 1, w->threads)) return i;
    }
    return -1;
}

/* Wait for all threads: awake for some 20 µs, then asleep, as the one that is missing may need this very core. */
static void barrier(Worker *w) {
    Region *r = w->region;
    const int32_t phase = w->phase++;
    w->finished = 0;
    if (__atomic_add_fetch(&r->arrived, 1, __ATOMIC_SEQ_CST) == w->threads) {
        __atomic_store_n(&r->arrived, 0, __ATOMIC_RELAXED);
        for (int i = 0; i < w->threads; i++) /* for the phase after the next one */
            __atomic_store_n(&r->shares[i].taken[phase % 2], 0, __ATOMIC_RELAXED);
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

/* A worker that is alone in its region, with `share` for its pieces. */
INLINE Worker alone_in(Region *r, Share *share) {
    *share = (Share){{0}};
    *r = (Region){.shares = share};
    return (Worker){.region = r, .threads = 1};
}

static void enter(void *region) {
    Region *r = region;
    Worker w = {.region = r, .threads = r->team->threads > 1 && r->team->parallel ? r->team->team() : 1,
                .id = __atomic_fetch_add(&r->entered, 1, __ATOMIC_RELAXED)};
    r->body(&w, r->work);
}

static void run(const Team *team, void (*body)(void *, void *), void *work) {
    const int64_t threads = team->threads > 1 && team->parallel ? team->threads : 1;
    Share shares[threads];
    memset(shares, 0, sizeof shares);
    Region region = {.team = team, .body = body, .work = work, .shares = shares};
    if (threads > 1)
        team->parallel(enter, &region, (unsigned)threads, 0);
    else
        enter(&region);
}
