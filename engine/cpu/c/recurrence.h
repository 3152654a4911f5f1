/* Interface of recurrence.c for the layers of a decoder (layers.c): the structs of its kernels, and the kernels as bodies of threads
   of a running region. */
#pragma once

#include "threads.h"

typedef struct {
    const int32_t *starts, *reads, *writes; /* [count + 1], [count], [count] */
    int64_t count, tokens, slots;           /* tokens: that there is room for, padding included */
} Rows;

/* out[t][c] = act(Σ_j w[c][j] · x[t - taps + 1 + j][c] + b[c]), j ascending. Where there are gates, each a tensor beside x with the
   same distance of tokens: x is multiplied by `before` and out by `after`, rounded each time. */
typedef struct {
    Rows rows;
    const void *x, *weight, *bias; /* [tokens][channels], x_token apart; [channels][taps]; [channels] or NULL */
    const void *before, *after;    /* as x, or NULL */
    void *states, *out;            /* [slots][channels][taps - 1], `slot` apart; [tokens][channels] */
    int64_t x_token, slot, channels, taps, silu, is_bf16;
} Convolve;

/* S = decay · S; S += key ⊗ (value - Sᵀ · key) · beta; out = Sᵀ · query */
typedef struct {
    Rows rows;
    const void *query, *key, *value, *beta; /* [tokens][key heads][keys], [tokens][heads][columns], [tokens][heads] */
    const float *g;                         /* log of the decay, [tokens][heads] or [tokens][heads][keys] */
    float *states;                          /* [slots][heads][keys][columns], `slot` apart */
    void *out;                              /* [tokens][heads][columns] */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, beta_token, beta_head, g_token, g_head;
    int64_t slot, heads, key_heads, keys, columns, is_bf16, beta_is_bf16, by_channel, normalized;
    float scale, eps;
} Delta;

#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN int64_t check_rows(const Rows *r); /* 0, or what is wrong */
HIDDEN void convolve(void *worker, void *convolve);
HIDDEN void delta_rule(void *worker, void *delta);
