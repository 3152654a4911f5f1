/* Recurrent layers, with a state of fixed size per sequence: causal depthwise convolutions, the gated delta rule, and Mamba-2.
   Bf16 or fp32 inputs, sums and states in fp32.

   A row is a run of tokens of one sequence. It starts from the state in the slot that it reads (-1: zeros), and writes the state
   after its last token to a slot (-1: none), which may be the same one.

   Tokens are computed one by one, never in chunks, so the operations of a token do not depend on where its row begins and ends.
   Except for the sums named below, no operation combines numbers of different rows, heads, channels or columns, so results do not
   depend on other rows or threads. Each number has its own lane, or sums have 16 lanes, so the bits do not depend on VL. */

#include "flush.h"
#include "layout.h"
#include "recurrence.h"
#include "transpose.h"

enum {
    MOST_TAPS = 8,
    CHANNELS = 256, /* of a convolution that are computed at once */
    MOST = 512,    /* keys of a delta rule, numbers of a Mamba-2 state for each channel */
    WIDE = 4,                        /* vectors of columns of a delta rule that are computed at once */
    WIDEST = VL == 16 ? 8 : WIDE,    /* the same for a row of one token, whose state is read from memory: whole lines in order */
    TILE = 64 * MOST,
    HEADS_EACH = 4, /* heads of a row that a thread takes at once: the state of the next one is fetched ahead */
    WORTH_A_THREAD = 1 << 15, /* numbers of states that are advanced: fewer take less time than it takes to wake a thread */
};

enum { FITS, BAD_STARTS, BAD_READ, BAD_WRITE };
int64_t check_rows(const Rows *r) {
    if (r->starts[0] != 0 || r->starts[r->count] > r->tokens) return BAD_STARTS;
    for (int64_t i = 0; i < r->count; i++) {
        if (r->starts[i + 1] <= r->starts[i]) return BAD_STARTS;
        if (r->reads[i] < -1 || r->reads[i] >= r->slots) return BAD_READ;
        if (r->writes[i] < -1 || r->writes[i] >= r->slots) return BAD_WRITE;
    }
    return FITS;
}

static void run_if_worth(const Team *team, int64_t numbers, void (*body)(void *, void *), void *work) {
    Team alone = *team;
    if (numbers < WORTH_A_THREAD) alone.threads = 1;
    run(&alone, body, work);
}

INLINE float number(const void *p, int64_t at, int64_t is_bf16) {
    if (!is_bf16) return ((const float *)p)[at];
    const uint32_t word = (uint32_t)((const bf16 *)p)[at] << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}
INLINE vf get(const void *p, int64_t at, int64_t n, int64_t is_bf16) {
    return is_bf16 ? load_some_bf16((const bf16 *)p + at, n, 0) : load_some((const float *)p + at, n, 0);
}
INLINE void put(void *p, int64_t at, int64_t n, vf x, int64_t is_bf16) {
    if (is_bf16)
        store_some_bf16((bf16 *)p + at, n, x);
    else
        store_some((float *)p + at, n, x);
}
INLINE vf as(vf x, int64_t is_bf16) { return is_bf16 ? rounded(x) : x; }
INLINE float one(vf x) { return x[0]; }
INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

/* to [padded(n)] = x [n], then zeros */
INLINE void widen(const void *x, int64_t at, int64_t n, int64_t is_bf16, float *to) {
    for (int64_t i = 0; i < padded(n); i += VL) store(to + i, i < n ? get(x, at + i, n - i, is_bf16) : all(0));
}

/* ---- convolution ---- */

/* The state of `n` channels, to vectors for each tap, and back. */
INLINE void read_columns(const void *state, int64_t kept, int64_t n, float to[][CHANNELS], int is_bf16) {
    for (int64_t c = 0; c < n; c++)
        for (int64_t j = 0; j < kept; j++) to[j][c] = number(state, c * kept + j, is_bf16);
}
INLINE void write_columns(void *state, int64_t kept, int64_t n, float *const *from, int is_bf16) {
    for (int64_t c = 0; c < n; c++)
        for (int64_t j = 0; j < kept; j++) {
            uint32_t word;
            memcpy(&word, from[j] + c, 4);
            if (is_bf16)
                ((bf16 *)state)[c * kept + j] = (bf16)(word >> 16);
            else
                ((uint32_t *)state)[c * kept + j] = word;
        }
}

INLINE void convolve_channels(const Convolve *a, int64_t first, int64_t taps, int is_bf16) {
    const int64_t kept = taps - 1, left = a->channels - first, n = left < CHANNELS ? left : CHANNELS, size = is_bf16 ? 2 : 4;
    float weight[MOST_TAPS][CHANNELS] = {0}, columns[MOST_TAPS][CHANNELS] = {0}, bias[CHANNELS] = {0};
    read_columns((const char *)a->weight + first * taps * size, taps, n, weight, is_bf16);
    if (a->bias) widen(a->bias, first, n, is_bf16, bias);
    for (int64_t r = 0; r < a->rows.count; r++) {
        const int32_t from = a->rows.reads[r], to = a->rows.writes[r];
        float *window[MOST_TAPS]; /* the inputs of the token's taps, the oldest first */
        for (int64_t j = 0; j < taps; j++) window[j] = columns[j];
        if (from < 0)
            memset(columns, 0, sizeof columns);
        else
            read_columns((const char *)a->states + (from * a->slot + first * kept) * size, kept, n, columns, is_bf16);
        for (int64_t t = a->rows.starts[r]; t < a->rows.starts[r + 1]; t++) {
            for (int64_t c = 0; c < n; c += VL) {
                const int64_t at = t * a->x_token + first + c;
                vf x = get(a->x, at, n - c, is_bf16);
                if (a->before) x = as(get(a->before, at, n - c, is_bf16) * x, is_bf16);
                store(window[kept] + c, x);
                vf sum = all(0);
                for (int64_t j = 0; j < taps; j++) sum = fma_(load(weight[j] + c), load(window[j] + c), sum);
                if (a->bias) sum += load(bias + c);
                if (a->silu) sum = silu(as(sum, is_bf16));
                if (a->after) sum = get(a->after, at, n - c, is_bf16) * as(sum, is_bf16);
                put(a->out, t * a->channels + first + c, n - c, sum, is_bf16);
            }
            float *oldest = window[0];
            for (int64_t j = 0; j < kept; j++) window[j] = window[j + 1];
            window[kept] = oldest;
        }
        if (to >= 0) write_columns((char *)a->states + (to * a->slot + first * kept) * size, kept, n, window, is_bf16);
    }
}

void convolve(void *worker, void *work) {
    const Convolve *a = work;
    for (int64_t i; (i = take(worker, (a->channels + CHANNELS - 1) / CHANNELS)) >= 0;) {
        const int64_t first = i * CHANNELS;
        switch (a->taps * 2 + a->is_bf16) {
            case 6: convolve_channels(a, first, 3, 0); break;
            case 7: convolve_channels(a, first, 3, 1); break;
            case 8: convolve_channels(a, first, 4, 0); break;
            case 9: convolve_channels(a, first, 4, 1); break;
            default: convolve_channels(a, first, a->taps, (int)a->is_bf16);
        }
    }
}

int64_t rollout_convolve(const Team *team, const Convolve *a) {
    const int64_t wrong = check_rows(&a->rows);
    if (!wrong) run_if_worth(team, a->rows.starts[a->rows.count] * a->channels, convolve, (void *)a);
    return wrong;
}

/* ---- a tile of a state: in the pool, or where it has another width or is needed once more, in a buffer ---- */

typedef struct {
    float *pool_from, *pool_to; /* NULL: zeros, nowhere */
    int64_t row;                /* numbers from one row of the tile to the next, in the pool */
    int64_t rows, width, room;  /* room: the width in the buffer */
    float *buffer;
} Tile;
typedef struct {
    float *at;
    int64_t row;
} Place;

INLINE Place in_buffer(const Tile *t) { return (Place){t->buffer, t->room}; }
INLINE Place first_place(const Tile *t) {
    if (t->pool_from && t->width == t->room) return (Place){t->pool_from, t->row};
    if (!t->pool_from) memset(t->buffer, 0, 4 * (size_t)(t->rows * t->room));
    for (int64_t i = 0; t->pool_from && i < t->rows; i++) {
        memcpy(t->buffer + i * t->room, t->pool_from + i * t->row, 4 * (size_t)t->width);
        memset(t->buffer + i * t->room + t->width, 0, 4 * (size_t)(t->room - t->width));
    }
    return in_buffer(t);
}
INLINE Place last_place(const Tile *t) {
    return t->pool_to && t->width == t->room ? (Place){t->pool_to, t->row} : in_buffer(t);
}
INLINE void keep(const Tile *t) {
    for (int64_t i = 0; t->pool_to && t->width != t->room && i < t->rows; i++)
        memcpy(t->pool_to + i * t->row, t->buffer + i * t->room, 4 * (size_t)t->width);
}

/* ---- the delta rule ---- */

typedef struct {
    float query[MOST], key[MOST], decay[MOST]; /* as factors of the state's rows */
} Token;

/* x / |x|, the squares being added up in 16 lanes. */
INLINE void normalize(float *x, int64_t n, float eps) {
    vf squares[PARTS];
    for (int p = 0; p < PARTS; p++) squares[p] = all(0);
    for (int64_t i = 0; i < padded(n); i += 16)
        for (int p = 0; p < PARTS; p++) squares[p] = fma_(load(x + i + p * VL), load(x + i + p * VL), squares[p]);
    const vf by = all(1.0f / sqrtf(fold16(squares) + eps));
    for (int64_t i = 0; i < padded(n); i += VL) store(x + i, load(x + i) * by);
}

static void factors(const Delta *d, int64_t token, int64_t head, Token *t) {
    const int64_t key_head = head / (d->heads / d->key_heads), n = d->keys;
    widen(d->query, token * d->query_token + key_head * d->query_head, n, d->is_bf16, t->query);
    widen(d->key, token * d->key_token + key_head * d->key_head, n, d->is_bf16, t->key);
    if (d->normalized) normalize(t->query, n, d->eps), normalize(t->key, n, d->eps);
    for (int64_t i = 0; i < padded(n); i += VL) store(t->query + i, load(t->query + i) * all(d->scale));
    const float *g = d->g + token * d->g_token + head * d->g_head;
    const vf same = exp_(all(g[0]));
    for (int64_t i = 0; i < n; i += VL) store(t->decay + i, d->by_channel ? exp_(load_some(g + i, n - i, 0)) : same);
}

/* The product of the next token's key and the decayed state. */
INLINE void recall(Place from, int64_t keys, const Token *next, int nv, vf *recalled, const float *soon) {
    UNROLL for (int v = 0; v < nv; v++) recalled[v] = all(0);
    for (int64_t k = 0; k < keys; k++) {
        const vf decay = all(next->decay[k]), key = all(next->key[k]);
        if (soon)
            UNROLL for (int v = 0; v < nv / 2; v++) __builtin_prefetch(soon + k * from.row + v * VL, 0, 2);
        UNROLL for (int v = 0; v < nv; v++) recalled[v] = fma_(load(from.at + k * from.row + v * VL) * decay, key, recalled[v]);
    }
}

/* One token: the state goes from one place to another, which may be the same. The next token's `recall` rides along. soon: as large
   as the tile, fetched meanwhile, or NULL. */
INLINE void advance(Place from, Place to, int64_t keys, const Token *t, const Token *next, const vf *delta, int nv, vf *out,
                    vf *recalled, const float *soon) {
    vf sum[WIDEST], read[WIDEST];
    UNROLL for (int v = 0; v < nv; v++) sum[v] = read[v] = all(0);
    for (int64_t k = 0; k < keys; k++) {
        if (soon)
            UNROLL for (int v = nv / 2; v < nv; v++) __builtin_prefetch(soon + k * from.row + v * VL, 0, 2);
        const vf decay = all(t->decay[k]), key = all(t->key[k]), query = all(t->query[k]);
        UNROLL for (int v = 0; v < nv; v++) {
            const vf s = fma_(key, delta[v], load(from.at + k * from.row + v * VL) * decay);
            store(to.at + k * to.row + v * VL, s);
            sum[v] = fma_(s, query, sum[v]);
            if (next) read[v] = fma_(s * all(next->decay[k]), all(next->key[k]), read[v]);
        }
    }
    UNROLL for (int v = 0; v < nv; v++) out[v] = sum[v], recalled[v] = read[v];
}

INLINE void delta_columns(const Delta *d, int64_t row, int64_t head, int64_t column, int64_t width, int nv, int ahead,
                          float *buffer) {
    const int64_t begin = d->rows.starts[row], end = d->rows.starts[row + 1];
    const int64_t read = d->rows.reads[row], write = d->rows.writes[row];
    const int64_t at = head * d->keys * d->columns + column;
    const Tile tile = {read < 0 ? NULL : d->states + read * d->slot + at, write < 0 ? NULL : d->states + write * d->slot + at,
                       d->columns, d->keys, width, nv * VL, buffer};
    Token tokens[2];
    vf recalled[WIDEST], delta[WIDEST], out[WIDEST];
    const float *soon = ahead && tile.pool_from ? tile.pool_from + d->keys * d->columns : NULL;
    Place from = first_place(&tile);
    factors(d, begin, head, &tokens[begin % 2]);
    recall(from, d->keys, &tokens[begin % 2], nv, recalled, end == begin + 1 ? soon : NULL);
    for (int64_t t = begin; t < end; t++) {
        const vf beta = all(number(d->beta, t * d->beta_token + head * d->beta_head, d->beta_is_bf16));
        UNROLL for (int v = 0; v < nv; v++) {
            const int64_t of = t * d->value_token + head * d->value_head + column + v * VL;
            delta[v] = (get(d->value, of, width - v * VL, d->is_bf16) - recalled[v]) * beta;
        }
        if (t + 1 < end) {
            factors(d, t + 1, head, &tokens[(t + 1) % 2]);
            advance(from, in_buffer(&tile), d->keys, &tokens[t % 2], &tokens[(t + 1) % 2], delta, nv, out, recalled, NULL);
        } else {
            advance(from, last_place(&tile), d->keys, &tokens[t % 2], NULL, delta, nv, out, recalled, soon);
        }
        from = in_buffer(&tile);
        UNROLL for (int v = 0; v < nv; v++)
            put(d->out, (t * d->heads + head) * d->columns + column + v * VL, width - v * VL, out[v], d->is_bf16);
    }
    keep(&tile);
}

/* All columns of a head. ahead: the next head's state is read next. */
static void delta_head(const Delta *d, int64_t row, int64_t head, int ahead, float *buffer) {
    const int64_t one = d->rows.starts[row + 1] - d->rows.starts[row] == 1, widest = WIDEST * VL;
    const int64_t most = one && d->keys * widest <= TILE && d->columns % widest == 0 ? widest : WIDE * VL;
    for (int64_t column = 0; column < d->columns; column += most) {
        const int64_t left = d->columns - column, width = left < most ? left : most;
        switch ((width + VL - 1) / VL) {
            case 1: delta_columns(d, row, head, column, width, 1, ahead, buffer); break;
            case 2: delta_columns(d, row, head, column, width, 2, ahead, buffer); break;
            case 3: delta_columns(d, row, head, column, width, 3, ahead, buffer); break;
            case 4: delta_columns(d, row, head, column, width, 4, ahead, buffer); break;
            default: delta_columns(d, row, head, column, width, WIDEST, ahead, buffer);
        }
    }
}

static void delta(Worker *w, const Delta *d) {
    float buffer[TILE];
    const int64_t few = d->rows.count * d->heads < 8 * HEADS_EACH * w->threads, each = few ? 1 : HEADS_EACH;
    const int64_t parts = (d->heads + each - 1) / each;
    for (int64_t i; (i = take(w, d->rows.count * parts)) >= 0;) {
        const int64_t row = i / parts, first = i % parts * each, end = first + each < d->heads ? first + each : d->heads;
        for (int64_t head = first; head < end; head++) delta_head(d, row, head, head + 1 < end, buffer);
    }
}

void delta_rule(void *worker, void *work) {
    const uint64_t before = flush();
    delta(worker, work);
    unflush(before);
}

int64_t rollout_delta(const Team *team, const Delta *d) {
    const int64_t wrong = check_rows(&d->rows);
    if (!wrong)
        run_if_worth(team, d->rows.starts[d->rows.count] * d->heads * d->keys * d->columns, delta_rule, (void *)d);
    return wrong;
}

/* ---- Mamba-2: S = e^(dt · A) · S + (dt · x) ⊗ B; out = S · C + D · x ---- */

typedef struct {
    Rows rows;
    const void *x, *dt, *b, *c;      /* [tokens][heads][channels], [tokens][heads], [tokens][groups][numbers] twice */
    const float *a, *skip, *dt_bias; /* [heads]; the last two may be NULL */
    float *states, *out;             /* [slots][heads][channels][numbers], `slot` apart; [tokens][heads][channels] */
    int64_t x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group;
    int64_t slot, heads, groups, channels, numbers, x_is_bf16, b_is_bf16, dt_is_bf16, softplus;
    float dt_least, dt_most;
} Mamba;

/* The sums of VL times 16 lanes in memory, each in the order of `fold16`. */
INLINE vf fold_each(const float *lanes) {
    vu words[16];
    vf sum[16];
    UNROLL for (int i = 0; i < 16; i += VL) transpose((const char *)(lanes + i), 64, words + i);
    UNROLL for (int i = 0; i < 16; i++) sum[i] = (vf)words[i];
    UNROLL for (int half = 8; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

INLINE float step_of(const Mamba *m, int64_t token, int64_t head) {
    float dt = number(m->dt, token * m->dt_token + head * m->dt_head, m->dt_is_bf16);
    if (m->dt_bias) dt = one(as(all(dt + m->dt_bias[head]), m->dt_is_bf16));
    if (m->softplus) dt = one(as(softplus(all(dt)), m->dt_is_bf16));
    return dt < m->dt_least ? m->dt_least : dt > m->dt_most ? m->dt_most : dt;
}

/* Channels first … first + count - 1 of a head. */
static void mamba_channels(const Mamba *m, int64_t row, int64_t head, int64_t first, int64_t count, float *buffer) {
    const int64_t begin = m->rows.starts[row], end = m->rows.starts[row + 1];
    const int64_t read = m->rows.reads[row], write = m->rows.writes[row];
    const int64_t at = (head * m->channels + first) * m->numbers, group = head / (m->heads / m->groups), n = padded(m->numbers);
    const Tile tile = {read < 0 ? NULL : m->states + read * m->slot + at, write < 0 ? NULL : m->states + write * m->slot + at,
                       m->numbers, count, m->numbers, n, buffer};
    float b[MOST], c[MOST], lanes[VL * 16] = {0};
    Place from = first_place(&tile);
    for (int64_t t = begin; t < end; t++) {
        const Place to = t + 1 < end ? in_buffer(&tile) : last_place(&tile);
        const float dt = step_of(m, t, head);
        const vf decay = exp_(all(dt * m->a[head])), skip = all(m->skip ? m->skip[head] : 0);
        widen(m->b, t * m->b_token + group * m->b_group, m->numbers, m->b_is_bf16, b);
        widen(m->c, t * m->c_token + group * m->c_group, m->numbers, m->b_is_bf16, c);
        for (int64_t p = 0; p < count; p += VL) {
            const int64_t some = count - p < VL ? count - p : VL;
            const vf x = get(m->x, t * m->x_token + head * m->x_head + first + p, some, m->x_is_bf16);
            float inputs[VL];
            store(inputs, x * all(dt));
            for (int64_t q = 0; q < some; q++) {
                const float *state = from.at + (p + q) * from.row;
                float *next = to.at + (p + q) * to.row;
                const vf input = all(inputs[q]);
                vf sum[PARTS];
                UNROLL for (int i = 0; i < PARTS; i++) sum[i] = all(0);
                for (int64_t k = 0; k < n; k += 16)
                    UNROLL for (int i = 0; i < PARTS; i++) {
                        const int64_t j = k + i * VL;
                        const vf s = fma_(load(state + j), decay, input * load(b + j));
                        store(next + j, s);
                        sum[i] = fma_(s, load(c + j), sum[i]);
                    }
                UNROLL for (int i = 0; i < PARTS; i++) store(lanes + q * 16 + i * VL, sum[i]);
            }
            vf out = fold_each(lanes);
            if (m->skip) out = fma_(skip, x, out);
            store_some(m->out + (t * m->heads + head) * m->channels + first + p, some, out);
        }
        from = in_buffer(&tile);
    }
    keep(&tile);
}

static void mamba(void *worker, void *work) {
    const Mamba *m = work;
    float buffer[TILE];
    const int64_t at_once = TILE / 4 / padded(m->numbers) / 16 * 16, tile = at_once ? at_once : 16;
    const uint64_t before = flush();
    for (int64_t i; (i = take(worker, m->rows.count * m->heads)) >= 0;)
        for (int64_t first = 0; first < m->channels; first += tile) {
            const int64_t left = m->channels - first;
            mamba_channels(m, i / m->heads, i % m->heads, first, left < tile ? left : tile, buffer);
        }
    unflush(before);
}

int64_t rollout_mamba(const Team *team, const Mamba *m) {
    const int64_t wrong = check_rows(&m->rows);
    if (!wrong) run_if_worth(team, m->rows.starts[m->rows.count] * m->heads * m->channels * m->numbers, mamba, (void *)m);
    return wrong;
}

const Field rollout_layout_recurrence[] = {
    FIELD(Rows, starts), FIELD(Rows, reads), FIELD(Rows, writes), FIELD(Rows, count), FIELD(Rows, tokens), FIELD(Rows, slots),
#define AT(field) FIELD(Convolve, field)
    AT(rows), AT(x), AT(weight), AT(bias), AT(before), AT(after), AT(states), AT(out), AT(x_token), AT(slot), AT(channels), AT(taps), AT(silu),
    AT(is_bf16),
#undef AT
#define AT(field) FIELD(Delta, field)
    AT(rows), AT(query), AT(key), AT(value), AT(beta), AT(g), AT(states), AT(out), AT(query_token), AT(query_head),
    AT(key_token), AT(key_head), AT(value_token), AT(value_head), AT(beta_token), AT(beta_head), AT(g_token), AT(g_head),
    AT(slot), AT(heads), AT(key_heads), AT(keys), AT(columns), AT(is_bf16), AT(beta_is_bf16), AT(by_channel), AT(normalized),
    AT(scale), AT(eps),
#undef AT
#define AT(field) FIELD(Mamba, field)
    AT(rows), AT(x), AT(dt), AT(b), AT(c), AT(a), AT(skip), AT(dt_bias), AT(states), AT(out), AT(x_token), AT(x_head),
    AT(dt_token), AT(dt_head), AT(b_token), AT(b_group), AT(c_token), AT(c_group), AT(slot), AT(heads), AT(groups),
    AT(channels), AT(numbers), AT(x_is_bf16), AT(b_is_bf16), AT(dt_is_bf16), AT(softplus), AT(dt_least), AT(dt_most),
#undef AT
    {NULL, NULL, 0, 0},
};
