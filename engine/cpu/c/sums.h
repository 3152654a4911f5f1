/* Interface of sums.c: products whose inputs are cut into slices, and the memory in which ranks exchange what they have of them. */
#pragma once

#include "products.h"

enum { SLICES = 8, MOST_RANKS = 8 };

/* In memory that all ranks map, zeros at first. */
typedef struct {
    int32_t lost; /* a rank that has ended, counted from 1; 0: none */
    char apart[60];
    struct {
        int32_t arrived, asleep; /* exchanges that a rank has come to; ranks that sleep until it comes. `arrived` is a futex */
        int64_t size[2];         /* of what it exchanges in this turn and in the one before; equal on all ranks that are in step */
        char apart[40];
    } of[MOST_RANKS];
} Meeting;

/* Of one rank. */
typedef struct {
    int64_t rank, ranks, room;  /* room: numbers of a part */
    int64_t patience_ms;        /* how long a rank waits for another one */
    int64_t turn;               /* exchanges so far */
    int64_t failed;             /* 0, or `lost`, or minus the rank that did not come in time, counted from 1, or that minus
                                   MOST_RANKS if it came to exchange something else */
    float *parts;               /* [2][ranks][room]: of this exchange, and of the one before, which some may still read */
    Meeting *meeting;           /* NULL: there is one rank */
} Exchange;

INLINE float *part_of(const Exchange *e, int64_t rank) { return e->parts + (e->turn % 2 * e->ranks + rank) * e->room; }

/* Wait until all ranks have come here as often as this one: then their parts are written. size: of what is exchanged. By one
   thread. */
HIDDEN void meet(Exchange *e, int64_t size);

/* out [rows][outputs] = residual + (x · wᵀ + bias), each term rounded; residual may be NULL. `l` has `slices` of the eight. */
typedef struct {
    Linear l;
    int64_t slices, rows;
    const void *x, *residual;
    void *out, *packed; /* packed: room for rollout_sum_bytes */
    Exchange *exchange;
} Sum;
HIDDEN int sum_slices(Worker *w, const Sum *p); /* by all threads; ends with a barrier; 0: the exchange has failed */
