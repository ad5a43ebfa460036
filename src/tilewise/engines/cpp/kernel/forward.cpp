// The forward pass. For every tile of queries, over the tiles of keys it may attend to:
//
//     S^T = score(scale K Q^T), -inf where masked                  P = exp(S - base), base >= row max - 8
//     l = l exp(base - base') + sum P                                O^T = O^T exp(base - base') + V^T dropout(P)
//
// and at the end out = O / l, lse = base + log l. A row with nothing to attend has l = 0: out = 0, lse = -inf.
#include "classify.h"
#include "decode.h"
#include "tiles.h"
#ifdef PAIRS
#include "pairs.h"
#endif

typedef compute_type<ELEMENT>::type real;

namespace {

constexpr real RESCALE_THRESHOLD = 8;  // rescale only when the max has grown by more than this, so weights stay below exp(8)

struct QueryTile {  // the state of up to LANES queries
    i64 lanes;      // those that are computed
    real* q;        // [d][LANES] Q^T in panels, once `has_q`
    bool has_q;
    real* acc;      // [dv][LANES] O^T
    real* row_max;  // [LANES] the largest score so far
    real* base;     // [LANES] weights are exp(score - base)
    real* total;    // [LANES] the sum of weights
    real* scores;   // [KEYS][LANES]
    real* keys;     // [KEYS][d] a copy, if the tensor cannot be read in place
    real* values;   // [KEYS][dv] likewise
    real* finite_values;    // [KEYS][dv] with NaN and Inf as 0, if there are any
    real* final;            // [KEYS][LANES] the scores before exp, in that case
    uint8_t* dropout_keep;  // [KEYS][LANES]
    u32* pairs;             // for products of pairs: [d / 2][LANES] Q^T, then [KEYS / 2][LANES] weights
};

QueryTile make_tile(const Problem& p) {
    const i64 d = padded(p.d, 32), dv = padded(p.dv, 32);
    const i64 numbers = (d + dv) * (LANES + KEYS) + KEYS * dv + 2 * KEYS * LANES + 3 * LANES + (d + KEYS) / 2 * LANES;
    scratch.reserve((size_t)numbers * sizeof(real) + KEYS * LANES + 16 * 64);
    QueryTile t;
    t.q = scratch.take<real>(d * LANES);
    t.acc = scratch.take<real>(dv * LANES);
    t.row_max = scratch.take<real>(LANES);
    t.base = scratch.take<real>(LANES);
    t.total = scratch.take<real>(LANES);
    t.scores = scratch.take<real>(KEYS * LANES);
    t.keys = scratch.take<real>(KEYS * p.d);
    t.values = scratch.take<real>(KEYS * p.dv);
    t.finite_values = scratch.take<real>(KEYS * p.dv);
    t.final = scratch.take<real>(KEYS * LANES);
    t.dropout_keep = scratch.take<uint8_t>(KEYS * LANES);
    t.pairs = scratch.take<u32>((d + KEYS) / 2 * LANES);
    return t;
}

// Sets the base to the row max and rescales acc and total.
void rebase(QueryTile& t, i64 dv) {
    real decay[LANES];
    for (i64 x = 0; x < t.lanes; x += WIDTH<real>) {
        const vec<real> row_max = load(t.row_max + x), base = row_max == -INFINITE<real> ? vec<real>{} : row_max;
        store(decay + x, exponential(load(t.base + x) - base));
        store(t.base + x, row_max);
        store(t.total + x, load(t.total + x) * load(decay + x));
    }
    for (i64 d = 0; d < dv; d++)
        for (i64 l = 0; l < t.lanes; l++) t.acc[d * LANES + l] *= decay[l];
}

// Online softmax: turns scores into weights. The base is raised to the row max only once it is RESCALE_THRESHOLD behind, so that acc is seldom rescaled.
void softmax_step(QueryTile& t, i64 n, i64 dv) {
    constexpr int N = 2;  // vectors at a time: more do not fit 16 registers
    constexpr i64 STRIDE = WIDTH<real>;
    i32 behind = 0;
    real* const scores = t.scores;
    for (i64 x = 0; x < t.lanes; x += N * STRIDE) {
        vec<real> row_max[N];
        for (int i = 0; i < N; i++) row_max[i] = load(t.row_max + x + i * STRIDE);
        for (i64 j = 0; j < n; j++)
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) {
                const vec<real> s = load(scores + j * LANES + x + i * STRIDE);
                row_max[i] = s > row_max[i] ? s : row_max[i];
            }
        for (int i = 0; i < N; i++) store(t.row_max + x + i * STRIDE, row_max[i]);
    }
    for (i64 l = 0; l < t.lanes; l++) behind |= t.row_max[l] > t.base[l] + RESCALE_THRESHOLD;
    if (behind) rebase(t, dv);
    for (i64 x = 0; x < t.lanes; x += N * STRIDE) {
        vec<real> base[N], sum[N] = {};
        for (int i = 0; i < N; i++) {
            const vec<real> at = load(t.base + x + i * STRIDE);
            base[i] = at == -INFINITE<real> ? vec<real>{} : at;
        }
        for (i64 j = 0; j < n; j++) {
            real* row = scores + j * LANES + x;
            vec<real> weight[N];
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) weight[i] = load(row + i * STRIDE) - base[i];
            exponentials(weight);
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) {
                store(row + i * STRIDE, weight[i]);
                sum[i] += weight[i];
            }
        }
        for (int i = 0; i < N; i++) store(t.total + x + i * STRIDE, load(t.total + x + i * STRIDE) + sum[i]);
    }
}

// From the scaled products of a tile to its weights: score, mask, softmax, dropout.
void scores_to_weights(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked, bool keep_final) {
    if (p.score.by_query) apply(p.score.by_query, p.score, b, h, kv0, n, q0, q_last, t.scores);
    if (masked) apply(p.mask.by_query, p.mask, b, h, kv0, n, q0, q_last, t.scores);
    if (keep_final) __builtin_memcpy(t.final, t.scores, (size_t)(n * LANES) * sizeof(real));
    softmax_step(t, n, p.dv);
    if (!p.dropout_threshold) return;
    dropout_keep_tile(p, b, h, q0, kv0, n, t.dropout_keep);
    for (i64 k = 0; k < n * LANES; k++) t.scores[k] = t.dropout_keep[k] ? t.scores[k] : 0;
}

void load_queries(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last) {
    if (!t.has_q) transpose_rows<BLOCK_COLUMNS<real>>(row_ptr<ELEMENT>(p.query, b, h, q0), p.query.stride[2], p.query.stride[3], q_last - q0 + 1, p.d, t.q);
    t.has_q = true;
}

void attend_block(const Problem& p, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const i64 hk = h / (p.heads / p.kv_heads);
    load_queries(p, t, b, h, q0, q_last);
    const Rows<real> keys = stored_rows(p, p.key, b, hk, kv0, n, p.d, t.keys, p.d);
    const Rows<real> values = stored_rows(p, p.value, b, hk, kv0, n, p.dv, t.values, p.dv);
    const bool has_nonfinite = (masked || p.score.by_query) && !all_finite(values, n, p.dv);
    const Rows<real> finite = has_nonfinite ? zero_nonfinite(values, n, p.dv, t.finite_values, p.dv) : values;
    product<real>(keys.data, keys.stride, 1, columns_of_panels((const real*)t.q, p.d), t.scores, LANES, n, t.lanes, p.d, (real)p.scale, false);
    scores_to_weights(p, t, b, h, q0, q_last, kv0, n, masked, has_nonfinite);
    product<real>(finite.data, 1, finite.stride, columns_of_rows((const real*)t.scores, LANES), t.acc, LANES, p.dv, t.lanes, n, 1, true);
    if (has_nonfinite) add_attended_nonfinite<real>(t.final, 1, LANES, values, t.acc, 1, LANES, t.lanes, p.dv, n);
}

// The index of the packed block that holds exactly the n keys from kv0 on; -1 if there is none.
i64 packed_block(const Forward& f, i64 b, i64 hk, i64 kv0, i64 n) {
    const Problem& p = f.problem;
    if (!f.packed.keys || kv0 % KEYS || n != at_most(KEYS, p.n_kv - kv0)) return -1;
    return (b * p.kv_heads + hk) * ((p.n_kv + KEYS - 1) / KEYS) + kv0 / KEYS;
}

#ifdef PAIRS
// attend_block by products of pairs; false if these keys are not a packed block.
bool attend_pairs(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const Problem& p = f.problem;
    const i64 hk = h / (p.heads / p.kv_heads), block = packed_block(f, b, hk, kv0, n);
    if (block < 0) return false;
    const i64 d = padded(p.d, STEP), dv = padded(p.dv, STEP), depth = padded(n, STEP);
    const bool has_nonfinite = !f.packed.finite[block];
    u32* weights = t.pairs + d / 2 * LANES;
    pair_product((const bfloat*)f.packed.keys + block * KEYS * d, d, t.pairs, LANES, t.scores, LANES, depth, t.lanes, d, false);
    for (i64 x = 0; x < n * LANES; x++) t.scores[x] *= (real)p.scale;
    scores_to_weights(p, t, b, h, q0, q_last, kv0, n, masked, has_nonfinite);
    pairs_of_tile(t.scores, n, t.lanes, weights);
    pair_product((const bfloat*)f.packed.values + block * dv * KEYS, KEYS, weights, LANES, t.acc, LANES, dv, t.lanes, depth, true);
    if (has_nonfinite) {
        const Rows<real> values = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, t.values, p.dv);
        add_attended_nonfinite<real>(t.final, 1, LANES, values, t.acc, 1, LANES, t.lanes, p.dv, n);
    }
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
    pack_rows(row_ptr<bfloat>(p.key, b, hk, kv0), p.key.stride[2], p.key.stride[3], n, p.d, (bfloat*)f.packed.keys + item * KEYS * d, d);
    f.packed.finite[item] = pack_rows(row_ptr<bfloat>(p.value, b, hk, kv0), p.value.stride[2], p.value.stride[3], n, p.dv, rows, dv);
    if (!f.packed.finite[item]) clear_nonfinite(rows, KEYS * dv);
    pairs_of_rows(rows, dv, pairs);
    transpose_words(pairs, dv, (u32*)f.packed.values + item * dv * KEYS / 2, KEYS / 2, KEYS / 2, dv);
}
#else
// attend_block from panels; false if these keys are not a packed block, or their values are not all finite.
bool attend_panels(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 kv0, i64 n, bool masked) {
    const Problem& p = f.problem;
    const i64 block = packed_block(f, b, h / (p.heads / p.kv_heads), kv0, n);
    if (block < 0 || !f.packed.finite[block]) return false;
    load_queries(p, t, b, h, q0, q_last);
    product_of_panels((const real*)f.packed.keys + block * KEYS * p.d, columns_of_panels((const real*)t.q, p.d), t.scores, LANES, n, t.lanes, p.d, (real)p.scale, false);
    scores_to_weights(p, t, b, h, q0, q_last, kv0, n, masked, false);
    product_of_panels((const real*)f.packed.values + block * KEYS * p.dv, columns_of_rows((const real*)t.scores, LANES), t.acc, LANES, p.dv, t.lanes, n, (real)1, true);
    return true;
}

void pack_keys(void* context, i64 item) {
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const i64 blocks = (p.n_kv + KEYS - 1) / KEYS, kv0 = item % blocks * KEYS, hk = item / blocks % p.kv_heads, b = item / blocks / p.kv_heads;
    const i64 n = at_most(KEYS, p.n_kv - kv0);
    scratch.reserve((size_t)(LANES * p.d + KEYS * p.dv) * sizeof(real) + 64);
    real* transposed = scratch.take<real>(LANES * p.d);
    transpose_rows<LANES>(row_ptr<ELEMENT>(p.key, b, hk, kv0), p.key.stride[2], p.key.stride[3], n, p.d, transposed);
    pack_panels(transposed, LANES, n, p.d, (real*)f.packed.keys + item * KEYS * p.d);
    const Rows<real> values = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, scratch.take<real>(KEYS * p.dv), p.dv);
    pack_panels(values.data, values.stride, p.dv, n, (real*)f.packed.values + item * KEYS * p.dv);
    f.packed.finite[item] = all_finite(values, n, p.dv);
}
#endif

void attend(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 q_last, i64 first, i64 last, bool masked) {
    for (i64 kv0 = first; kv0 < last; kv0 += KEYS) {
        const i64 n = at_most(KEYS, last - kv0);
#ifdef PAIRS
        if (attend_pairs(f, t, b, h, q0, q_last, kv0, n, masked)) continue;
#else
        if (attend_panels(f, t, b, h, q0, q_last, kv0, n, masked)) continue;
#endif
        attend_block(f.problem, t, b, h, q0, q_last, kv0, n, masked);
    }
}

void init_tile(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 count) {
    t.has_q = false;
    t.lanes = lanes_of<real>(count);
    __builtin_memset(t.acc, 0, (size_t)(padded(f.problem.dv, 32) * LANES) * sizeof(real));
    for (i64 l = 0; l < LANES; l++) t.row_max[l] = t.base[l] = -INFINITE<real>, t.total[l] = 0;
#ifdef PAIRS
    const Tensor& q = f.problem.query;
    bfloat* rows = (bfloat*)t.scores;
    for (i64 d = 0; d < f.problem.d; d += STEP) {  // a few features at a time, so that they fit the scores' memory
        pack_rows(row_ptr<bfloat>(q, b, h, q0) + d * q.stride[3], q.stride[2], q.stride[3], count, at_most(STEP, f.problem.d - d), rows, STEP);
        transpose_words((const u32*)rows, STEP / 2, t.pairs + d / 2 * LANES, LANES, LANES, STEP / 2);
    }
#endif
}

void store_tile(const Forward& f, QueryTile& t, i64 b, i64 h, i64 q0, i64 count) {
    const Problem& p = f.problem;
    real factor[LANES];
    const i64 at = (b * p.heads + h) * p.n_q + q0;
    for (i64 l = 0; l < count; l++) {
        const RowEpilogue<real> end = row_epilogue<real>(t.base[l], t.total[l], p.sinks ? (const real*)p.sinks + h : nullptr, (real)p.keep_scale);
        factor[l] = end.factor;
        if (f.lse) ((real*)f.lse)[at + l] = end.lse;
        if (f.max_score) ((real*)f.max_score)[at + l] = t.row_max[l];
    }
    RESULT* out = (RESULT*)row_ptr<RESULT>(f.out, b, h, q0);
    store_transposed(t.acc, factor, out, f.out.stride[2], f.out.stride[3], count, p.dv);
}

// One query tile of the map, in steps of LANES queries.
void query_tile_row(void* context, i64 item) {
    const Forward& f = *(const Forward*)context;
    const Problem& p = f.problem;
    const TileSchedule& schedule = p.schedule;
    const i64 b = item / schedule.rows / p.heads, h = item / schedule.rows % p.heads, rank = item % schedule.rows;  // a head's keys stay in the cache
    const i64 rows = b * schedule.stride_batch + h * schedule.stride_head;
    const i64 row = schedule.order ? schedule.order[rows + rank] : rank;
    const i64 end = at_most((row + 1) * schedule.tile, p.n_q);
    QueryTile t = make_tile(p);
#ifdef PAIRS
    const PairUnit unit;
#endif
    for (i64 q0 = row * schedule.tile; q0 < end; q0 += LANES) {
        const i64 count = at_most(LANES, end - q0);
        init_tile(f, t, b, h, q0, count);
        for (int masked = 0; masked < 2; masked++) {
            const Runs& runs = masked ? schedule.partial : schedule.full;
            if (runs.offsets == nullptr) {
                if (!masked && !schedule.order) attend(f, t, b, h, q0, q0 + count - 1, 0, p.n_kv, false);
                continue;
            }
            for (i64 k = runs.offsets[rows + row]; k < runs.offsets[rows + row + 1]; k++) {
                const i64 first = runs.start[k] * schedule.other_tile, last = at_most((runs.start[k] + runs.count[k]) * schedule.other_tile, p.n_kv);
                attend(f, t, b, h, q0, q0 + count - 1, first, last, masked && p.mask.by_query);
            }
        }
        store_tile(f, t, b, h, q0, count);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tilewise_forward(const Forward* f) {
    const Problem& p = f->problem;
    const bool single_thread = p.batch * p.heads * p.n_q * p.n_kv * (p.d + p.dv) < SINGLE_THREAD_WORK;
    if (f->packed.keys) p.run(pack_keys, (void*)f, p.batch * p.kv_heads * ((p.n_kv + KEYS - 1) / KEYS), single_thread ? 1 : p.threads);
    p.run(query_tile_row, (void*)f, p.batch * p.heads * p.schedule.rows, single_thread ? 1 : p.threads);
}

extern "C" __attribute__((visibility("default"))) void tilewise_decode(const Forward* f) { decode<ELEMENT, RESULT>(*f); }

extern "C" __attribute__((visibility("default"))) void tilewise_classify(const Classify* c) { classify<ELEMENT>(*c); }

extern "C" __attribute__((visibility("default"))) void tilewise_call_forward(const Forward* prepared, const ForwardCall* call) {
    const Forward f = called(*prepared, *call);
    tilewise_forward(&f);
}

extern "C" __attribute__((visibility("default"))) void tilewise_call_decode(const Forward* prepared, const ForwardCall* call) {
    const Forward f = called(*prepared, *call);
    tilewise_decode(&f);
}
