// The backward pass, from lse (P = exp(S - lse), delta = dO . O - dlse):
//
//     dV += dropout(P)^T dO     dS = P (dropout(dO V^T) - delta)     dscore = dS * score'     dQ += scale dscore K     dK += scale dscore^T Q
//
// One thread takes a chunk of the keys of one (batch, kv head) and all its queries: five products per tile, nothing recomputed. Each chunk has its own
// sum for dQ; the sums are added in order at the end, so the result does not depend on thread timing.
#include "tiles.h"
#ifdef PAIRS
#include "pairs.h"
#endif

typedef compute_type<ELEMENT>::type real;
typedef void (*ScoreDerivative)(const Program*, i64 b, i64 h, i64 first, i64 rows, i64 first_lane, i64 last_lane, const real* raw, const real* final,
                                real* ds, double* const* gradients);

namespace {

#ifdef PAIRS
constexpr i64 FEATURE_STEP = STEP;  // features come in multiples of this
#else
constexpr i64 FEATURE_STEP = WIDTH<real>;
#endif
constexpr i64 DQ_STEP = 32;

// -- preprocessing: Q and dO packed for the products; delta ------------------------------------------------------------

struct Block {  // LANES queries of one (batch, head)
    i64 b, h, first, count;
};

i64 query_tile(const Backward& f) { return f.problem.schedule.other_tile; }

Block block_of(const Backward& f, i64 b, i64 h, i64 block) {
    const i64 tile = query_tile(f), row = block / f.blocks_per_tile, first = row * tile + block % f.blocks_per_tile * LANES;
    const i64 end = at_most((row + 1) * tile, f.problem.n_q);
    return {b, h, first, at_most(LANES, end - first)};
}

#ifdef PAIRS
// Packs rows as pairs of features, transposed [width / 2][LANES], and as pairs of rows [LANES / 2][width], the latter with NaN and Inf as 0.
// Returns whether all are finite.
bool pack_pairs(const bfloat* from, const i64* stride, i64 count, i64 n, u32* features, u32* rows) {
    const i64 width = padded(n, STEP);
    scratch.reserve((size_t)(LANES * width) * sizeof(bfloat));
    bfloat* packed = scratch.take<bfloat>(LANES * width);
    const bool finite = pack_rows(from, stride[2], stride[3], count, n, packed, width);
    transpose_words((const u32*)packed, width / 2, features, LANES, LANES, width / 2);
    if (!finite) clear_nonfinite(packed, LANES * width);
    pairs_of_rows(packed, width, rows);
    return finite;
}
#endif

void preprocess_block(void* context, i64 item) {
    const Backward& f = *(const Backward*)context;
    const Problem& p = f.problem;
    const i64 bh = item / f.blocks;
    const Block k = block_of(f, bh / p.heads, bh % p.heads, item % f.blocks);
    if (k.count <= 0) return;
    const ELEMENT* q = row_ptr<ELEMENT>(p.query, k.b, k.h, k.first);
    const ELEMENT* dout = row_ptr<ELEMENT>(f.grad_out, k.b, k.h, k.first);
    const i64 dp = padded(p.d, FEATURE_STEP), dvp = padded(p.dv, FEATURE_STEP);
#ifdef PAIRS
    const i64 at = item * LANES / 2;
    const bool queries = pack_pairs(q, p.query.stride, k.count, p.d, (u32*)f.q_lanes + at * dp, (u32*)f.q_rows + at * dp);
    const bool gradients = pack_pairs(dout, f.grad_out.stride, k.count, p.dv, (u32*)f.do_lanes + at * dvp, (u32*)f.do_rows + at * dvp);
    f.finite[item] = queries && gradients;
#else
    transpose_rows<BLOCK_COLUMNS<real>>(q, p.query.stride[2], p.query.stride[3], k.count, p.d, (real*)f.q_lanes + item * p.d * LANES);
    transpose_rows<BLOCK_COLUMNS<real>>(dout, f.grad_out.stride[2], f.grad_out.stride[3], k.count, p.dv, (real*)f.do_lanes + item * p.dv * LANES);
    if (f.q_rows) widen_rows(q, p.query.stride[2], p.query.stride[3], k.count, p.d, (real*)f.q_rows + item * LANES * dp, dp);
    if (f.do_rows) widen_rows(dout, f.grad_out.stride[2], f.grad_out.stride[3], k.count, p.dv, (real*)f.do_rows + item * LANES * dvp, dvp);
#endif
    const RESULT* out = row_ptr<RESULT>(f.out, k.b, k.h, k.first);
    real* delta = (real*)f.delta + bh * p.n_q + k.first;
    const real* dlse = f.grad_lse ? (const real*)f.grad_lse + bh * p.n_q + k.first : nullptr;
    const bool whole = f.out.stride[3] == 1 && f.grad_out.stride[3] == 1;
    for (i64 l = 0; l < k.count; l++, out += f.out.stride[2], dout += f.grad_out.stride[2]) {
        real sum = 0;
        if (whole)
#pragma omp simd reduction(+ : sum)
            for (i64 d = 0; d < p.dv; d++) sum += widen(out[d]) * widen(dout[d]);
        else
            for (i64 d = 0; d < p.dv; d++) sum += widen(out[d * f.out.stride[3]]) * widen(dout[d * f.grad_out.stride[3]]);
        delta[l] = dlse ? sum - dlse[l] : sum;
    }
}

// -- one tile ----------------------------------------------------------------------------------------------------------

struct KeyTile {
    real *keys, *values;    // [KEYS][d], [KEYS][dv] copies, if the tensors cannot be read in place
    real *all_dk, *all_dv;  // [keys of the chunk + KEYS][padded d], [padded dv]
    real *dk, *dv;          // this tile's rows of them
    real *raw, *final;      // [KEYS][LANES] scores before and after score and mask; one buffer if there is no score
    real *weight, *ds;      // [KEYS][LANES]
    uint8_t* dropout_keep;  // [KEYS][LANES]
    Rows<real> k, v;
    bool finite;  // whether all keys and values are
#ifdef PAIRS
    bfloat *k_rows, *v_rows, *k_columns;  // [KEYS][padded d], [KEYS][padded dv], [padded d][KEYS]
    bfloat *weight_rows, *ds_rows;        // [KEYS][LANES]
    u32* ds_pairs;                        // [KEYS / 2][LANES]
#endif
    real *q_copy, *do_copy, *k_copy;  // [LANES][padded d], [LANES][padded dv], [KEYS][d], for tiles with NaN or Inf
};

KeyTile make_tile(const Problem& p, i64 keys) {
    const i64 dp = padded(p.d, FEATURE_STEP), dvp = padded(p.dv, FEATURE_STEP);
    scratch.reserve((size_t)((keys + KEYS * 6) * (dp + dvp) + 6 * KEYS * LANES) * sizeof(real) + KEYS * LANES + 32 * 64);
    KeyTile t;
    t.keys = scratch.take<real>(KEYS * p.d);
    t.values = scratch.take<real>(KEYS * p.dv);
    t.all_dk = scratch.take<real>((keys + KEYS) * dp);
    t.all_dv = scratch.take<real>((keys + KEYS) * dvp);
    __builtin_memset(t.all_dk, 0, (size_t)((keys + KEYS) * dp) * sizeof(real));
    __builtin_memset(t.all_dv, 0, (size_t)((keys + KEYS) * dvp) * sizeof(real));
    t.raw = scratch.take<real>(KEYS * LANES);
    t.final = p.score.by_query ? scratch.take<real>(KEYS * LANES) : t.raw;
    t.weight = scratch.take<real>(KEYS * LANES);
    t.ds = scratch.take<real>(KEYS * LANES);
    t.dropout_keep = scratch.take<uint8_t>(KEYS * LANES);
#ifdef PAIRS
    t.k_rows = scratch.take<bfloat>(KEYS * dp);
    t.v_rows = scratch.take<bfloat>(KEYS * dvp);
    t.k_columns = scratch.take<bfloat>(KEYS * dp);
    t.weight_rows = scratch.take<bfloat>(KEYS * LANES);
    t.ds_rows = scratch.take<bfloat>(KEYS * LANES);
    t.ds_pairs = scratch.take<u32>(KEYS / 2 * LANES);
#endif
    t.q_copy = scratch.take<real>(LANES * dp);
    t.do_copy = scratch.take<real>(LANES * dvp);
    t.k_copy = scratch.take<real>(KEYS * dp);
    return t;
}

#ifndef PAIRS
// A block's rows: the packed copies, or the tensor's own.
Rows<real> block_rows(const void* copies, const Tensor& t, const Block& k, i64 item, i64 width) {
    if (copies) return {(const real*)copies + item * LANES * width, width};
    return {(const real*)row_ptr<ELEMENT>(t, k.b, k.h, k.first), t.stride[2]};
}
#endif

// lse and delta of a block's queries. lse is +inf for rows that attend to nothing and past the last row, so that exp(s - lse) = 0.
struct RowStats {
    real lse[LANES], delta[LANES];
    RowStats(const Backward& f, const Block& k) {
        const i64 at = (k.b * f.problem.heads + k.h) * f.problem.n_q + k.first;
        for (i64 l = 0; l < LANES; l++) {
            const real there = l < k.count ? ((const real*)f.lse)[at + l] : -INFINITE<real>;
            lse[l] = there == -INFINITE<real> ? INFINITE<real> : there;
            delta[l] = l < k.count ? ((const real*)f.delta)[at + l] : 0;
        }
    }
};

// weight = P = exp(final - lse), ds = P * (dP - delta), both 0 where not attended. On entry ds holds dP.
void weights_and_ds(const Backward& f, KeyTile& t, const Block& k, i64 lanes, i64 kv0, i64 n, bool all_attended) {
    const Problem& p = f.problem;
    const RowStats stats(f, k);
    if (p.dropout_threshold) dropout_keep_tile(p, k.b, k.h, k.first, kv0, n, t.dropout_keep);
    const real scale = (real)p.keep_scale;
    if (p.dropout_threshold)
        for (i64 x = 0; x < n * LANES; x++) t.ds[x] = t.dropout_keep[x] ? t.ds[x] * scale : 0;
    constexpr int N = 2;  // vectors at a time
    constexpr i64 STRIDE = WIDTH<real>;
    for (i64 x = 0; x < lanes; x += N * STRIDE)
        for (i64 j = 0; j < n; j++) {
            const i64 at = j * LANES + x;
            vec<real> w[N];
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) w[i] = load(t.final + at + i * STRIDE) - load(stats.lse + x + i * STRIDE);
            exponentials(w);
#pragma GCC unroll 2
            for (int i = 0; i < N; i++) {
                real* ds = t.ds + at + i * STRIDE;
                vec<real> g = w[i] * (load(ds) - load(stats.delta + x + i * STRIDE));
                if (!all_attended) {
                    const vec<real> score = load(t.final + at + i * STRIDE);
                    w[i] = score == -INFINITE<real> ? vec<real>{} : w[i];
                    g = score == -INFINITE<real> ? vec<real>{} : g;
                }
                store(t.weight + at + i * STRIDE, w[i]);
                store(ds, g);
            }
        }
    if (p.dropout_threshold)
        for (i64 x = 0; x < n * LANES; x++) t.weight[x] = t.dropout_keep[x] ? t.weight[x] * scale : 0;
}

#ifdef PAIRS
// The same without score or dropout: one pass from the unscaled products to the bfloat16 operands of the next products.
void weights_and_ds_in_pairs(const Backward& f, KeyTile& t, const Block& k, i64 lanes, i64 n, bool all_attended) {
    const RowStats stats(f, k);
    const vec<float> scale = broadcast((float)f.problem.scale);
    for (i64 x = 0; x < lanes; x += WIDTH<float>) {
        const vec<float> lse = load(stats.lse + x), delta = load(stats.delta + x);
        for (i64 j = 0; j < padded(n, STEP); j += 2) {
            vec<float> weight[2], ds[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const vec<float> product = load(t.raw + (j + i) * LANES + x);
                weight[i] = exponential(product * scale - lse);
                ds[i] = weight[i] * (load(t.ds + (j + i) * LANES + x) - delta);
                if (!all_attended) {
                    weight[i] = product == -INFINITE<float> ? vec<float>{} : weight[i];
                    ds[i] = product == -INFINITE<float> ? vec<float>{} : ds[i];
                }
                if (j + i >= n) weight[i] = ds[i] = vec<float>{};
            }
            const __m512i ds_pair = narrowed(ds[0], ds[1]);
            store_rows(narrowed(weight[0], weight[1]), t.weight_rows + j * LANES + x, t.weight_rows + (j + 1) * LANES + x);
            store_rows(ds_pair, t.ds_rows + j * LANES + x, t.ds_rows + (j + 1) * LANES + x);
            store_pairs(ds_pair, t.ds_pairs + j / 2 * LANES + x);
        }
    }
}
#endif

// Adds a tile to dQ^T (or writes it, unless `add`), dK and dV. The scale of dQ and dK is applied at the end.
#ifdef PAIRS
void accumulate(const Backward& f, KeyTile& t, i64 lanes, i64 item, i64 n, real* dq, bool add) {
    const i64 dp = padded(f.problem.d, STEP), dvp = padded(f.problem.dv, STEP), depth = padded(n, STEP);
    pair_product(t.weight_rows, LANES, (const u32*)f.do_rows + item * LANES / 2 * dvp, dvp, t.dv, dvp, depth, dvp, lanes, true);
    pair_product(t.ds_rows, LANES, (const u32*)f.q_rows + item * LANES / 2 * dp, dp, t.dk, dp, depth, dp, lanes, true);
    pair_product(t.k_columns, KEYS, t.ds_pairs, LANES, dq, LANES, dp, lanes, depth, add);
}
#else
void accumulate(const Backward& f, KeyTile& t, const Block& k, i64 lanes, Rows<real> q, Rows<real> dout, Rows<real> keys, i64 n, real* dq, bool add) {
    const Problem& p = f.problem;
    const i64 dp = padded(p.d, FEATURE_STEP), dvp = padded(p.dv, FEATURE_STEP);
    product<real>(t.weight, LANES, 1, columns_of_rows(dout.data, dout.stride), t.dv, dvp, n, dvp, k.count, 1, true);
    product<real>(t.ds, LANES, 1, columns_of_rows(q.data, q.stride), t.dk, dp, n, dp, k.count, 1, true);
    product<real>(keys.data, 1, keys.stride, columns_of_rows((const real*)t.ds, LANES), dq, LANES, p.d, lanes, n, 1, add);
}
#endif

// Adds what accumulate() left out: NaN and Inf at attended positions.
void accumulate_nonfinite(const Backward& f, KeyTile& t, const Block& k, Rows<real> q, Rows<real> dout, i64 n, real* dq) {
    const Problem& p = f.problem;
    add_attended_nonfinite<real>(t.final, LANES, 1, dout, t.dv, padded(p.dv, FEATURE_STEP), 1, n, p.dv, k.count);
    add_attended_nonfinite<real>(t.final, LANES, 1, q, t.dk, padded(p.d, FEATURE_STEP), 1, n, p.d, k.count);
    add_attended_nonfinite<real>(t.final, 1, LANES, t.k, dq, 1, LANES, LANES, p.d, n);
}

// One key tile against one block of queries.
void process_tile(const Backward& f, KeyTile& t, const Block& k, i64 block, i64 chunk, i64 kv0, i64 n, bool masked, double* const* gradients) {
    const Problem& p = f.problem;
    const i64 item = (k.b * p.heads + k.h) * f.blocks + block, dp = padded(p.d, FEATURE_STEP), dvp = padded(p.dv, FEATURE_STEP), last = k.first + k.count - 1;
    const i64 lanes = lanes_of<real>(k.count);
    const bool scored = p.score.by_query != nullptr, selective = masked || scored;
    const i64 share = chunk * p.batch * p.heads * f.blocks + item;
    real* dq = (real*)f.dq_lanes + share * padded(p.d, DQ_STEP) * LANES;
    const bool dq_written = f.dq_written[share];
    f.dq_written[share] = true;
#ifdef PAIRS
    pair_product(t.k_rows, dp, (const u32*)f.q_lanes + item * dp / 2 * LANES, LANES, t.raw, LANES, padded(n, STEP), lanes, dp, false);
    pair_product(t.v_rows, dvp, (const u32*)f.do_lanes + item * dvp / 2 * LANES, LANES, t.ds, LANES, padded(n, STEP), lanes, dvp, false);
    const bool plain = !scored && !p.dropout_threshold && p.scale > 0 && p.scale <= 1;
    if (!plain)
        for (i64 x = 0; x < n * LANES; x++) t.raw[x] *= (real)p.scale;
#else
    constexpr bool plain = false;
    product<real>(t.k.data, t.k.stride, 1, columns_of_panels((const real*)f.q_lanes + item * p.d * LANES, p.d), t.raw, LANES, n, lanes, p.d, (real)p.scale, false);
    product<real>(t.v.data, t.v.stride, 1, columns_of_panels((const real*)f.do_lanes + item * p.dv * LANES, p.dv), t.ds, LANES, n, lanes, p.dv, 1, false);
#endif
    if (scored) {
        __builtin_memcpy(t.final, t.raw, (size_t)(n * LANES) * sizeof(real));
        apply(p.score.by_query, p.score, k.b, k.h, kv0, n, k.first, last, t.final);
    }
    if (masked) apply(p.mask.by_query, p.mask, k.b, k.h, kv0, n, k.first, last, t.final);
    if (k.count < LANES && scored)
        for (i64 j = 0; j < n; j++)
            for (i64 l = k.count; l < LANES; l++) t.final[j * LANES + l] = -INFINITE<real>;
    if (!plain) weights_and_ds(f, t, k, lanes, kv0, n, !selective);
    if (scored) ((ScoreDerivative)f.dscore)(&p.score, k.b, k.h, kv0, n, k.first, last, t.raw, t.final, t.ds, gradients);
#ifdef PAIRS
    if (plain) {
        weights_and_ds_in_pairs(f, t, k, lanes, n, !selective);
    } else {
        rows_of_tile(t.weight, n, lanes, t.weight_rows);
        rows_of_tile(t.ds, n, lanes, t.ds_rows);
        pairs_of_tile(t.ds, n, lanes, t.ds_pairs);
    }
    accumulate(f, t, lanes, item, n, dq, dq_written);
    if (t.finite && f.finite[item]) return;
    const Rows<real> q{t.q_copy, dp}, dout{t.do_copy, dvp};
    t.k = rows_of<bfloat>(p.key, k.b, k.h / (p.heads / p.kv_heads), kv0, n, p.d, t.keys, p.d);
    widen_rows(row_ptr<bfloat>(p.query, k.b, k.h, k.first), p.query.stride[2], p.query.stride[3], k.count, p.d, t.q_copy, dp);
    widen_rows(row_ptr<bfloat>(f.grad_out, k.b, k.h, k.first), f.grad_out.stride[2], f.grad_out.stride[3], k.count, p.dv, t.do_copy, dvp);
#else
    const Rows<real> q = block_rows(f.q_rows, p.query, k, item, dp), dout = block_rows(f.do_rows, f.grad_out, k, item, dvp);
    if (!selective || (t.finite && all_finite(q, k.count, p.d) && all_finite(dout, k.count, p.dv)))
        return accumulate(f, t, k, lanes, q, dout, t.k, n, dq, dq_written);
    accumulate(f, t, k, lanes, zero_nonfinite(q, k.count, p.d, t.q_copy, dp), zero_nonfinite(dout, k.count, p.dv, t.do_copy, dvp),
               zero_nonfinite(t.k, n, p.d, t.k_copy, p.d), n, dq, dq_written);
#endif
    accumulate_nonfinite(f, t, k, q, dout, n, dq);
}

// -- one chunk of keys -------------------------------------------------------------------------------------------------

void load_keys(const Backward& f, KeyTile& t, i64 b, i64 hk, i64 kv0, i64 n) {
    const Problem& p = f.problem;
#ifdef PAIRS
    const i64 dp = padded(p.d, STEP), dvp = padded(p.dv, STEP);
    const bool keys = pack_rows(row_ptr<bfloat>(p.key, b, hk, kv0), p.key.stride[2], p.key.stride[3], n, p.d, t.k_rows, dp);
    const bool values = pack_rows(row_ptr<bfloat>(p.value, b, hk, kv0), p.value.stride[2], p.value.stride[3], n, p.dv, t.v_rows, dvp);
    t.finite = keys && values;
    const bfloat* rows = t.k_rows;
    if (!keys) {
        bfloat* cleared = (bfloat*)t.q_copy;  // q_copy and k_copy are still free here
        __builtin_memcpy(cleared, t.k_rows, (size_t)(KEYS * dp) * sizeof(bfloat));
        clear_nonfinite(cleared, KEYS * dp);
        rows = cleared;
    }
    pairs_of_rows(rows, dp, (u32*)t.k_copy);
    transpose_words((const u32*)t.k_copy, dp, (u32*)t.k_columns, KEYS / 2, KEYS / 2, dp);
#else
    t.k = rows_of<ELEMENT>(p.key, b, hk, kv0, n, p.d, t.keys, p.d);
    t.v = rows_of<ELEMENT>(p.value, b, hk, kv0, n, p.dv, t.values, p.dv);
    t.finite = (p.mask.by_query || p.score.by_query) && all_finite(t.k, n, p.d) && all_finite(t.v, n, p.dv);  // not needed if everything is attended
#endif
}

// One key tile against those query blocks first .. last of a head that attend to it.
void process_query_blocks(const Backward& f, KeyTile& t, i64 b, i64 h, i64 row, i64 kv0, i64 n, i64 first, i64 last, i64 chunk, double* const* gradients) {
    const Problem& p = f.problem;
    const TileSchedule& schedule = p.schedule;
    const i64 map_row = b * schedule.stride_batch + h * schedule.stride_head + row;
    bool loaded = false;
    for (int masked = 0; masked < 2; masked++) {
        const Runs& runs = masked ? schedule.partial : schedule.full;
        const i64 first_run = runs.offsets ? runs.offsets[map_row] : 0, last_run = runs.offsets ? runs.offsets[map_row + 1] : !masked;
        for (i64 r = first_run; r < last_run; r++) {
            const i64 begin = at_least(first, runs.offsets ? runs.start[r] * f.blocks_per_tile : 0);
            const i64 end = at_most(last, runs.offsets ? (runs.start[r] + runs.count[r]) * f.blocks_per_tile : f.blocks);
            for (i64 block = begin; block < end; block++) {
                const Block k = block_of(f, b, h, block);
                if (k.count <= 0) continue;
                if (!loaded) load_keys(f, t, b, h / (p.heads / p.kv_heads), kv0, n);
                loaded = true;
                process_tile(f, t, k, block, chunk, kv0, n, masked && p.mask.by_query, gradients);
            }
        }
    }
}

// Takes as many query blocks at a time as fit the L2 cache, and loops over all keys of the chunk for each such group.
void kv_chunk(const Backward& f, i64 item, double* const* gradients) {
    const Problem& p = f.problem;
    const TileSchedule& schedule = p.schedule;
    const i64 hk = item % p.kv_heads, b = item / p.kv_heads % p.batch, chunk = item / p.kv_heads / p.batch, ratio = p.heads / p.kv_heads;
    const i64 first_row = schedule.rows * chunk / f.chunks, last_row = schedule.rows * (chunk + 1) / f.chunks;
    const i64 first_key = first_row * schedule.tile, keys = at_most(last_row * schedule.tile, p.n_kv) - first_key;
    const i64 dp = padded(p.d, FEATURE_STEP), dvp = padded(p.dv, FEATURE_STEP);
    const i64 blocks_in_l2 = at_least(1, l2_bytes() / ((p.d + p.dv) * LANES * 3 * (i64)sizeof(ELEMENT)));
    KeyTile t = make_tile(p, keys);
#ifdef PAIRS
    const PairUnit unit;
#endif
    for (i64 h = hk * ratio; h < (hk + 1) * ratio; h++)
        for (i64 block = 0; block < f.blocks; block += blocks_in_l2)
            for (i64 row = first_row; row < last_row; row++)
                for (i64 kv0 = row * schedule.tile; kv0 < at_most((row + 1) * schedule.tile, p.n_kv); kv0 += KEYS) {
                    const i64 n = at_most(KEYS, at_most((row + 1) * schedule.tile, p.n_kv) - kv0);
                    t.dk = t.all_dk + (kv0 - first_key) * dp;
                    t.dv = t.all_dv + (kv0 - first_key) * dvp;
                    process_query_blocks(f, t, b, h, row, kv0, n, block, at_most(block + blocks_in_l2, f.blocks), chunk, gradients);
                }
    RESULT* dk = (RESULT*)f.dk + ((b * p.kv_heads + hk) * p.n_kv + first_key) * p.d;
    RESULT* dv = (RESULT*)f.dv + ((b * p.kv_heads + hk) * p.n_kv + first_key) * p.dv;
    for (i64 j = 0; j < keys; j++) {
        for (i64 d = 0; d < p.d; d++) narrow(t.all_dk[j * dp + d] * (real)p.scale, dk[j * p.d + d]);
        for (i64 d = 0; d < p.dv; d++) narrow(t.all_dv[j * dvp + d], dv[j * p.dv + d]);
    }
}

void kv_chunk_group(void* context, i64 group) {
    const Backward& f = *(const Backward*)context;
    double* const* gradients = f.gradients + group * f.captures;
    if (f.group_offsets == nullptr) return kv_chunk(f, group, nullptr);
    for (i64 k = f.group_offsets[group]; k < f.group_offsets[group + 1]; k++) kv_chunk(f, f.group_items[k], gradients);
}

// -- postprocessing: dQ from the chunks' shares ------------------------------------------------------------------------

void reduce_dq(void* context, i64 item) {
    const Backward& f = *(const Backward*)context;
    const Problem& p = f.problem;
    const i64 bh = item / f.blocks, size = padded(p.d, DQ_STEP) * LANES, items = p.batch * p.heads * f.blocks;
    const Block k = block_of(f, bh / p.heads, bh % p.heads, item % f.blocks);
    if (k.count <= 0) return;
    RESULT* dq = (RESULT*)f.dq + (bh * p.n_q + k.first) * p.d;
    real* sum = nullptr;
    for (i64 share = item; share < f.chunks * items; share += items) {
        if (!f.dq_written[share]) continue;
        real* other = (real*)f.dq_lanes + share * size;
        if (sum)
            for (i64 x = 0; x < size; x++) sum[x] += other[x];
        else
            sum = other;
    }
    if (sum == nullptr) return (void)__builtin_memset(dq, 0, (size_t)(k.count * p.d) * sizeof(RESULT));
    real scale[LANES];
    for (i64 l = 0; l < LANES; l++) scale[l] = (real)p.scale;
    store_transposed(sum, scale, dq, p.d, 1, k.count, p.d);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tilewise_backward(const Backward* f) {
    const Problem& p = f->problem;
    const bool single_thread = p.batch * p.heads * p.n_q * p.n_kv * (p.d + p.dv) < SINGLE_THREAD_WORK;
    const i64 threads = single_thread ? 1 : p.threads;
    __builtin_memset(f->dq_written, 0, (size_t)(f->chunks * p.batch * p.heads * f->blocks));
    p.run(preprocess_block, (void*)f, p.batch * p.heads * f->blocks, threads);
    p.run(kv_chunk_group, (void*)f, f->groups, threads);
    p.run(reduce_dq, (void*)f, p.batch * p.heads * f->blocks, threads);
}

extern "C" __attribute__((visibility("default"))) void tilewise_call_backward(const Backward* prepared, const BackwardCall* call) {
    const Backward f = called(*prepared, *call);
    tilewise_backward(&f);
}
