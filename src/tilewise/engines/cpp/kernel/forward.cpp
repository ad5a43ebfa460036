// The forward pass. For every tile of queries, over the tiles of keys it may attend to:
//
//     S^T = scale K Q^T, changed by the score, -inf where masked     P = exp(S - base), the base at most 8 below the maximum
//     l = l exp(base - base') + sum P                                O^T = O^T exp(base - base') + V^T dropout(P)
//
// and at the end out = O / l, lse = base + log l. A row with nothing to attend has l = 0: out = 0, lse = -inf.
#include "decode.h"
#include "tiles.h"
#ifdef MATRIX_UNIT
#include "amx.h"
#endif

typedef computed<ELEMENT>::type real;

namespace {

constexpr real FAR_BEHIND = 8;  // weights stay below exp(8)

struct QueryTile {  // the state of LANES queries
    real* q;        // [d][LANES] Q^T, once `has_q`
    bool has_q;
    real* acc;      // [dv][LANES] O^T
    real* high;     // [LANES] the highest score so far
    real* base;     // [LANES] what weights are measured from: exp(score - base)
    real* total;    // [LANES] the sum of weights
    real* scores;   // [KEYS][LANES]
    real* keys;     // [KEYS][d] where keys have to be copied
    real* values;   // [KEYS][dv]
    real* sound;    // [KEYS][dv] values without infinities and NaN, where there are some
    real* final;    // [KEYS][LANES] scores before they become weights, there
    uint8_t* kept;  // [KEYS][LANES]
    u32* pairs;     // for the matrix unit: [d / 2][LANES] Q^T, then [KEYS / 2][LANES] weights
};

QueryTile make_tile(const Problem& p) {
    const i64 d = padded(p.d, 32), dv = padded(p.dv, 32);
    const i64 numbers = (d + dv) * (LANES + KEYS) + KEYS * dv + 2 * KEYS * LANES + 3 * LANES + (d + KEYS) / 2 * LANES;
    scratch.reserve((size_t)numbers * sizeof(real) + KEYS * LANES + 16 * 64);
    QueryTile t;
    t.q = scratch.take<real>(d * LANES);
    t.acc = scratch.take<real>(dv * LANES);
    t.high = scratch.take<real>(LANES);
    t.base = scratch.take<real>(LANES);
    t.total = scratch.take<real>(LANES);
    t.scores = scratch.take<real>(KEYS * LANES);
    t.keys = scratch.take<real>(KEYS * p.d);
    t.values = scratch.take<real>(KEYS * p.dv);
    t.sound = scratch.take<real>(KEYS * p.dv);
    t.final = scratch.take<real>(KEYS * LANES);
    t.kept = scratch.take<uint8_t>(KEYS * LANES);
    t.pairs = scratch.take<u32>((d + KEYS) / 2 * LANES);
    return t;
}

// The base becomes the maximum; what was added up so far shrinks accordingly.
void rebase(QueryTile& t, i64 dv) {
    real decay[LANES];
    for (i64 x = 0; x < LANES; x += WIDTH<real>) {
        const vec<real> high = load(t.high + x), base = high == -INFINITE<real> ? vec<real>{} : high;
        store(decay + x, exponential(load(t.base + x) - base));
        store(t.base + x, high);
        store(t.total + x, load(t.total + x) * load(decay + x));
    }
    for (i64 d = 0; d < dv; d++)
        for (i64 l = 0; l < LANES; l++) t.acc[d * LANES + l] *= decay[l];
}

// Scores become weights. They are measured from a base that follows the maximum only when it has fallen far behind, so that
// what was added up so far is seldom rescaled.
void softmax_step(QueryTile& t, i64 n, i64 dv) {
    i32 behind = 0;
    for (i64 x = 0; x < LANES; x += WIDTH<real>) {
        vec<real> high = load(t.high + x);
        for (i64 j = 0; j < n; j++) {
            const vec<real> s = load(t.scores + j * LANES + x);
            high = s > high ? s : high;
        }
        store(t.high + x, high);
    }
    for (i64 l = 0; l < LANES; l++) behind |= t.high[l] > t.base[l] + FAR_BEHIND;
    if (behind) rebase(t, dv);
    for (i64 x = 0; x < LANES; x += WIDTH<real>) {
        const vec<real> at = load(t.base + x), base = at == -INFINITE<real> ? vec<real>{} : at;
        vec<real> sum{};
        for (i64 j = 0; j < n; j++) {
            const vec<real> weight = exponential(load(t.scores + j * LANES + x) - base);
            store(t.scores + j * LANES + x, weight);
            sum += weight;
        }
        store(t.total + x, load(t.total + x) + sum);
    }
}

// The tile's scaled products become weights, dropped out where that is asked for.
void weigh(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked, bool keep_final) {
    if (p.score.by_query) apply(p.score.by_query, p.score, b, h, kv0, n, q0, q_last, t.scores);
    if (masked) apply(p.mask.by_query, p.mask, b, h, kv0, n, q0, q_last, t.scores);
    if (keep_final) __builtin_memcpy(t.final, t.scores, (size_t)(n * LANES) * sizeof(real));
    softmax_step(t, n, p.dv);
    if (!p.threshold) return;
    keep_tile(p, b, h, q0, kv0, n, t.kept);
    for (i64 k = 0; k < n * LANES; k++) t.scores[k] = t.kept[k] ? t.scores[k] : 0;
}

void load_queries(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last) {
    if (!t.has_q) transpose_rows(place<ELEMENT>(p.query, b, h, q0), p.query.stride[2], p.query.stride[3], q_last - q0 + 1, p.d, t.q);
    t.has_q = true;
}

void attend_block(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const i64 hk = h / (p.heads / p.kv_heads);
    load_queries(p, t, b, h, q0, q_last);
    const Rows<real> keys = rows_of<ELEMENT>(p.key, b, hk, kv0, n, p.d, t.keys, p.d);
    const Rows<real> values = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, t.values, p.dv);
    const bool spoilt = (masked || p.score.by_query) && !all_finite(values, n, p.dv);
    const Rows<real> sound = spoilt ? without_infinities(values, n, p.dv, t.sound, p.dv) : values;
    product<real>(keys.data, keys.stride, 1, t.q, LANES, t.scores, LANES, n, LANES, p.d, (real)p.scale, false);
    weigh(p, t, b, h, q0, q_last, kv0, n, masked, spoilt);
    product<real>(sound.data, 1, sound.stride, t.scores, LANES, t.acc, LANES, p.dv, LANES, n, 1, true);
    if (spoilt) hear_infinities<real>(t.final, 1, LANES, values, t.acc, 1, LANES, LANES, p.dv, n);
}

// Where a stretch of n keys from kv0 on lies among the packed blocks, or -1 if it is not one of them.
i64 packed_block(const Problem& p, i64 b, i64 hk, i64 kv0, i64 n) {
    if (kv0 % KEYS || n != at_most(KEYS, p.n_kv - kv0)) return -1;
    return (b * p.kv_heads + hk) * ((p.n_kv + KEYS - 1) / KEYS) + kv0 / KEYS;
}

#ifdef MATRIX_UNIT
// The same on the matrix unit; false for a stretch that is no packed block.
bool attend_block_by_matrices(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const Problem& p = f.problem;
    const i64 hk = h / (p.heads / p.kv_heads), block = packed_block(p, b, hk, kv0, n);
    if (block < 0) return false;
    const i64 d = padded(p.d, STEP), dv = padded(p.dv, STEP), depth = padded(n, STEP);
    const bool spoilt = !f.packed.finite[block];
    u32* weights = t.pairs + d / 2 * LANES;
    matrix_product((const bfloat*)f.packed.keys + block * KEYS * d, d, t.pairs, LANES, t.scores, LANES, depth, LANES, d, false);
    for (i64 x = 0; x < n * LANES; x++) t.scores[x] *= (real)p.scale;
    weigh(p, t, b, h, q0, q_last, kv0, n, masked, spoilt);
    pairs_of_tile(t.scores, n, weights);
    matrix_product((const bfloat*)f.packed.values + block * dv * KEYS, KEYS, weights, LANES, t.acc, LANES, dv, LANES, depth, true);
    if (spoilt) hear_infinities<real>(t.final, 1, LANES, rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, t.values, p.dv), t.acc, 1, LANES, LANES, p.dv, n);
    return true;
}

void pack_keys(void* context, i64 item) {
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const i64 blocks = (p.n_kv + KEYS - 1) / KEYS, kv0 = item % blocks * KEYS, hk = item / blocks % p.kv_heads, b = item / blocks / p.kv_heads;
    const i64 d = padded(p.d, STEP), dv = padded(p.dv, STEP), n = at_most(KEYS, p.n_kv - kv0);
    scratch.reserve((size_t)(2 * KEYS * dv) * sizeof(bfloat) + 64);
    bfloat* rows = scratch.take<bfloat>(KEYS * dv);
    u32* pairs = scratch.take<u32>(KEYS / 2 * dv);
    pack_rows(place<bfloat>(p.key, b, hk, kv0), p.key.stride[2], p.key.stride[3], n, p.d, (bfloat*)f.packed.keys + item * KEYS * d, d);
    f.packed.finite[item] = pack_rows(place<bfloat>(p.value, b, hk, kv0), p.value.stride[2], p.value.stride[3], n, p.dv, rows, dv);
    if (!f.packed.finite[item]) clear_infinities(rows, KEYS * dv);
    pairs_of_rows(rows, dv, pairs);
    transpose_words(pairs, dv, (u32*)f.packed.values + item * dv * KEYS / 2, KEYS / 2, KEYS / 2, dv);
}
#else
// The same from panels; false for a stretch that is no packed block, or whose values are not all finite.
bool attend_panels(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const Problem& p = f.problem;
    const i64 block = f.packed.keys ? packed_block(p, b, h / (p.heads / p.kv_heads), kv0, n) : -1;
    if (block < 0 || !f.packed.finite[block]) return false;
    load_queries(p, t, b, h, q0, q_last);
    product_of_panels((const real*)f.packed.keys + block * KEYS * p.d, t.q, LANES, t.scores, LANES, n, LANES, p.d, (real)p.scale, false);
    weigh(p, t, b, h, q0, q_last, kv0, n, masked, false);
    product_of_panels((const real*)f.packed.values + block * KEYS * p.dv, t.scores, LANES, t.acc, LANES, p.dv, LANES, n, (real)1, true);
    return true;
}

void pack_keys(void* context, i64 item) {
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const i64 blocks = (p.n_kv + KEYS - 1) / KEYS, kv0 = item % blocks * KEYS, hk = item / blocks % p.kv_heads, b = item / blocks / p.kv_heads;
    const i64 n = at_most(KEYS, p.n_kv - kv0);
    scratch.reserve((size_t)(LANES * p.d + KEYS * p.dv) * sizeof(real) + 64);
    real* turned = scratch.take<real>(LANES * p.d);
    transpose_rows(place<ELEMENT>(p.key, b, hk, kv0), p.key.stride[2], p.key.stride[3], n, p.d, turned);
    pack_panels(turned, LANES, n, p.d, (real*)f.packed.keys + item * KEYS * p.d);
    const Rows<real> values = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, scratch.take<real>(KEYS * p.dv), p.dv);
    pack_panels(values.data, values.stride, p.dv, n, (real*)f.packed.values + item * KEYS * p.dv);
    f.packed.finite[item] = all_finite(values, n, p.dv);
}
#endif

void attend(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 first, i64 last, bool masked) {
    for (i64 kv0 = first; kv0 < last; kv0 += KEYS) {
        const i64 n = at_most(KEYS, last - kv0);
#ifdef MATRIX_UNIT
        if (attend_block_by_matrices(f, t, b, h, q0, q_last, kv0, n, masked)) continue;
#else
        if (attend_panels(f, t, b, h, q0, q_last, kv0, n, masked)) continue;
#endif
        attend_block(f.problem, t, b, h, q0, q_last, kv0, n, masked);
    }
}

void begin(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 count) {
    t.has_q = false;
    __builtin_memset(t.acc, 0, (size_t)(padded(f.problem.dv, 32) * LANES) * sizeof(real));
    for (i64 l = 0; l < LANES; l++) t.high[l] = t.base[l] = -INFINITE<real>, t.total[l] = 0;
#ifdef MATRIX_UNIT
    const Tensor& q = f.problem.query;
    bfloat* rows = (bfloat*)t.scores;
    for (i64 d = 0; d < f.problem.d; d += STEP) {  // by features, so that they fit the scores' place
        pack_rows(place<bfloat>(q, b, h, q0) + d * q.stride[3], q.stride[2], q.stride[3], count, at_most(STEP, f.problem.d - d), rows, STEP);
        transpose_words((const u32*)rows, STEP / 2, t.pairs + d / 2 * LANES, LANES, LANES, STEP / 2);
    }
#endif
}

void finish(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 count) {
    const Problem& p = f.problem;
    real factor[LANES];
    real* lse = (real*)f.lse + (b * p.heads + h) * p.n_q + q0;
    real* highest = (real*)f.highest + (b * p.heads + h) * p.n_q + q0;
    for (i64 l = 0; l < count; l++) {
        const Ending<real> end = ending<real>(t.base[l], t.total[l], p.sinks ? (const real*)p.sinks + h : nullptr, (real)p.keep_scale);
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
    const i64 b = item / w.rows / p.heads, h = item / w.rows % p.heads, place_in_order = item % w.rows;  // a head's keys and values stay in the cache
    const i64 rows = b * w.stride_batch + h * w.stride_head;
    const i64 row = w.order ? w.order[rows + place_in_order] : place_in_order;
    const i64 end = at_most((row + 1) * w.tile, p.n_q);
    QueryTile t = make_tile(p);
#ifdef MATRIX_UNIT
    const MatrixUnit unit;
#endif
    for (i64 q0 = row * w.tile; q0 < end; q0 += LANES) {
        const i64 count = at_most(LANES, end - q0);
        begin(f, t, b, h, q0, count);
        for (int masked = 0; masked < 2; masked++) {
            const Runs& runs = masked ? w.partial : w.full;
            if (runs.offsets == nullptr) {
                if (!masked && !w.order) attend(f, t, b, h, q0, q0 + count - 1, 0, p.n_kv, false);
                continue;
            }
            for (i64 k = runs.offsets[rows + row]; k < runs.offsets[rows + row + 1]; k++) {
                const i64 first = runs.start[k] * w.other_tile, last = at_most((runs.start[k] + runs.count[k]) * w.other_tile, p.n_kv);
                attend(f, t, b, h, q0, q0 + count - 1, first, last, masked && p.mask.by_query);
            }
        }
        finish(f, t, b, h, q0, count);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tilewise_forward(const Forward* f) {
    const Problem& p = f->problem;
    const bool little = p.batch * p.heads * p.n_q * p.n_kv * (p.d + p.dv) < LITTLE_WORK;
    if (f->packed.keys) p.run(pack_keys, (void*)f, p.batch * p.kv_heads * ((p.n_kv + KEYS - 1) / KEYS), little ? 1 : p.threads);
    p.run(query_rows, (void*)f, p.batch * p.heads * p.walk.rows, little ? 1 : p.threads);
}

extern "C" __attribute__((visibility("default"))) void tilewise_decode(const Forward* f) { decode<ELEMENT>(*f); }
