// The forward pass. For every tile of queries, over the tiles of keys it may attend to:
//
//     S^T = scale K Q^T, changed by the score, -inf where masked     m' = max(m, max S)     P = exp(S - m')
//     l = l exp(m - m') + sum P                                      O^T = O^T exp(m - m') + V^T dropout(P)
//
// and at the end out = O / l, lse = m + log l. A row with nothing to attend has l = 0: out = 0, lse = -inf.
#include "decode.h"
#include "tiles.h"

typedef computed<ELEMENT>::type real;

namespace {

struct QueryTile {  // the state of LANES queries
    real* q;        // [d][LANES] Q^T
    real* acc;      // [dv][LANES] O^T
    real* high;     // [LANES] the highest score so far
    real* total;    // [LANES] the sum of weights
    real* scores;   // [KEYS][LANES]
    real* keys;     // [KEYS][d] where keys have to be copied
    real* values;   // [KEYS][dv]
    real* final;    // [KEYS][LANES] scores before they become weights, where values are not finite
    uint8_t* kept;  // [KEYS][LANES]
};

QueryTile make_tile(const Problem& p) {
    const i64 numbers = (p.d + p.dv) * (LANES + KEYS) + 2 * KEYS * LANES + 2 * LANES;
    scratch.reserve((size_t)numbers * sizeof(real) + KEYS * LANES + 16 * 64);
    QueryTile t;
    t.q = scratch.take<real>(p.d * LANES);
    t.acc = scratch.take<real>(p.dv * LANES);
    t.high = scratch.take<real>(LANES);
    t.total = scratch.take<real>(LANES);
    t.scores = scratch.take<real>(KEYS * LANES);
    t.keys = scratch.take<real>(KEYS * p.d);
    t.values = scratch.take<real>(KEYS * p.dv);
    t.final = scratch.take<real>(KEYS * LANES);
    t.kept = scratch.take<uint8_t>(KEYS * LANES);
    return t;
}

// Scores become weights; the state moves on to the new maximum.
void softmax_step(QueryTile& t, i64 n, i64 dv) {
    real decay[LANES];
    bool moved = false;
    for (i64 x = 0; x < LANES; x += WIDTH<real>) {
        const vec<real> before = load(t.high + x);
        vec<real> high = before;
        for (i64 j = 0; j < n; j++) {
            const vec<real> s = load(t.scores + j * LANES + x);
            high = s > high ? s : high;
        }
        const vec<real> base = high == -INFINITE<real> ? vec<real>{} : high;
        vec<real> sum{};
        for (i64 j = 0; j < n; j++) {
            const vec<real> weight = exponential(load(t.scores + j * LANES + x) - base);
            store(t.scores + j * LANES + x, weight);
            sum += weight;
        }
        const vec<real> shrink = exponential(before - base);
        store(t.total + x, (load(t.total + x) * shrink + sum));
        store(t.high + x, high);
        store(decay + x, shrink);
        for (int l = 0; l < WIDTH<real>; l++) moved |= shrink[l] != 1;
    }
    if (!moved) return;
    for (i64 d = 0; d < dv; d++)
        for (i64 l = 0; l < LANES; l++) t.acc[d * LANES + l] *= decay[l];
}

void attend(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 first, i64 last, bool masked) {
    const i64 hk = h / (p.heads / p.kv_heads);
    for (i64 kv0 = first; kv0 < last; kv0 += KEYS) {
        const i64 n = at_most(KEYS, last - kv0);
        const Rows<real> keys = rows_of<ELEMENT>(p.key, b, hk, kv0, n, p.d, t.keys, p.d);
        product<real>(keys.data, keys.stride, 1, t.q, LANES, t.scores, LANES, n, LANES, p.d, (real)p.scale, false);
        if (p.score.by_query) apply(p.score.by_query, p.score, b, h, kv0, n, q0, q_last, t.scores);
        if (masked) apply(p.mask.by_query, p.mask, b, h, kv0, n, q0, q_last, t.scores);
        const Rows<real> values = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, t.values, p.dv);
        const bool careful = (masked || p.score.by_query) && !all_finite(values, n, p.dv);
        if (careful) __builtin_memcpy(t.final, t.scores, (size_t)(n * LANES) * sizeof(real));
        softmax_step(t, n, p.dv);
        if (p.threshold) {
            keep_tile(p, b, h, q0, kv0, n, t.kept);
            for (i64 k = 0; k < n * LANES; k++) t.scores[k] = t.kept[k] ? t.scores[k] : 0;
        }
        if (careful)
            careful_product<real>(t.scores, t.final, 1, LANES, values, t.acc, 1, LANES, LANES, p.dv, n, 1);
        else
            product<real>(values.data, 1, values.stride, t.scores, LANES, t.acc, LANES, p.dv, LANES, n, 1, true);
    }
}

void finish(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 count) {
    const Problem& p = f.problem;
    real factor[LANES];
    real* lse = (real*)f.lse + (b * p.heads + h) * p.n_q + q0;
    real* highest = (real*)f.highest + (b * p.heads + h) * p.n_q + q0;
    for (i64 l = 0; l < count; l++) {
        const Ending<real> end = ending<real>(t.high[l], t.total[l], p.sinks ? (const real*)p.sinks + h : nullptr, (real)p.keep_scale);
        factor[l] = end.factor;
        lse[l] = end.lse;
        highest[l] = t.high[l];
    }
    ELEMENT* out = (ELEMENT*)place<ELEMENT>(f.out, b, h, q0);
    store_transposed(t.acc, factor, out, f.out.stride[2], f.out.stride[3], count, p.dv);
}

// One tile of the map; a map's tile may hold several of LANES queries.
void query_rows(void* context, i64 item) {
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const Walk& w = p.walk;
    const i64 groups = p.batch * p.heads, b = item % groups / p.heads, h = item % groups % p.heads;
    const i64 rows = b * w.stride_batch + h * w.stride_head;
    const i64 row = w.order ? w.order[rows + item / groups] : item / groups;
    const i64 end = at_most((row + 1) * w.tile, p.n_q);
    QueryTile t = make_tile(p);
    for (i64 q0 = row * w.tile; q0 < end; q0 += LANES) {
        const i64 count = at_most(LANES, end - q0);
        transpose_rows(place<ELEMENT>(p.query, b, h, q0), p.query.stride[2], p.query.stride[3], count, p.d, t.q);
        __builtin_memset(t.acc, 0, (size_t)(p.dv * LANES) * sizeof(real));
        for (i64 l = 0; l < LANES; l++) t.high[l] = -INFINITE<real>, t.total[l] = 0;
        for (int masked = 0; masked < 2; masked++) {
            const Runs& runs = masked ? w.partial : w.full;
            if (runs.offsets == nullptr) {
                if (!masked && !w.order) attend(p, t, b, h, q0, q0 + count - 1, 0, p.n_kv, false);
                continue;
            }
            for (i64 k = runs.offsets[rows + row]; k < runs.offsets[rows + row + 1]; k++) {
                const i64 first = runs.start[k] * w.other_tile, last = at_most((runs.start[k] + runs.count[k]) * w.other_tile, p.n_kv);
                attend(p, t, b, h, q0, q0 + count - 1, first, last, masked && p.mask.by_query);
            }
        }
        finish(f, t, b, h, q0, count);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tilewise_forward(const Forward* f) {
    const Problem& p = f->problem;
    const bool little = p.batch * p.heads * p.n_q * p.n_kv * (p.d + p.dv) < LITTLE_WORK;
    p.run(query_rows, (void*)f, p.batch * p.heads * p.walk.rows, little ? 1 : p.threads);
}

extern "C" __attribute__((visibility("default"))) void tilewise_decode(const Forward* f) { decode<ELEMENT>(*f); }
