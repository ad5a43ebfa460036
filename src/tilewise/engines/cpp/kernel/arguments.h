// The kernels' arguments. Every field has 8 bytes, so that Python can pack them in order: keep ../arguments.py in step.
#pragma once
#include "vectors.h"

// Calls body(context, item) for every item. Items start in order; each runs on one thread.
typedef void (*Body)(void* context, i64 item);
typedef void (*Run)(Body body, void* context, i64 items, i64 threads);

struct Tensor {  // (batch, heads, sequence, head dim) and its strides, in elements
    void* data;
    i64 stride[4];
};

struct Program {  // a generated function and its arguments
    void* by_query;  // one lane per query, a row per key
    void* by_key;    // one lane per key, a row per query
    const void* const* captures;
    const i64* ints;
    const double* floats;
    const i64* places;  // sizes and strides of the captures
};

struct Runs {  // row r holds runs offsets[r] .. offsets[r + 1]
    const i32 *offsets, *start, *count;
};

struct TileSchedule {  // a tile map; without one, every row is a single full run
    const i32* order;  // [rows] of one (batch, head): longest first
    Runs partial, full;
    i64 stride_batch, stride_head;  // in rows of the map
    i64 rows;                       // of one (batch, head)
    i64 tile, other_tile;           // along the rows' axis and along the other
};

struct Places {  // of a part in the whole problem, for dropout: which square of 16 every 16 queries and keys are (null: this is the whole)
    const i32 *query_squares, *key_squares;
    i64 batch, head;  // of the first
};

// Keys and values in pages: key j of batch element b is row j % size of page table[b * stride + j / size]. Their Tensors are (pages, heads, rows, head dim).
struct Pages {
    const i32* table;  // null: they lie in order
    i64 stride, size, count;
    const i32* lengths;  // [batch] keys that can be attended; null: any that the table has room for
};

struct Problem {
    Run run;
    i64 threads;
    i64 batch, heads, kv_heads, n_q, n_kv, d, dv;
    Tensor query, key, value;
    TileSchedule schedule;
    Program mask, score;
    const void* sinks;  // [heads], compute type
    double scale, keep_scale;
    i64 dropout_threshold, seed;  // an element is dropped if its 16 random bits are below the threshold
    Places places;
    Pages pages;
};

// Keys and values packed for the products, [batch, kv heads, blocks of 64 keys]. For products of pairs: bfloat16, keys [64][padded d] and values
// transposed, [padded dv][64]. Otherwise: panels in the compute type; null if there are too few queries to pay for packing.
struct Packed {
    void *keys, *values;
    uint8_t* finite;  // whether a block's values are all finite
};

struct Forward {
    Problem problem;
    Tensor out;
    void *lse, *max_score;  // [batch, heads, n_q], compute type; null where nobody wants them
    i64 splits;             // decoding: how many ways the keys are split
    void* split_results;    // decoding: [batch, kv_heads, splits, rows] of {acc[dv], max_score, total}
    Packed packed;
};

struct Backward {
    Problem problem;  // its schedule has one row per key tile
    Tensor out, grad_out;
    const void *lse, *grad_lse;  // [batch, heads, n_q]; grad_lse may be absent
    void* delta;                 // [batch, heads, n_q]
    i64 blocks, blocks_per_tile;  // blocks of LANES queries: in one (batch, head), and in one tile of the map
    void *q_lanes, *do_lanes;     // [batch, heads, blocks][d or dv][LANES] in panels; or pairs of features (pairs.h)
    void *q_rows, *do_rows;       // [batch, heads, blocks][LANES][width], null if the tensor's own rows can be read; or pairs of rows
    uint8_t* finite;              // [batch, heads, blocks] of pairs: whether Q and dO are all finite
    void* dq_lanes;               // [chunks][batch, heads, blocks][padded d][LANES]
    uint8_t* dq_written;          // [chunks][batch, heads, blocks] whether a chunk has written its share of dQ
    void *dq, *dk, *dv;           // contiguous, of type RESULT
    void* dscore;                 // generated: the score's derivative; also accumulates the captures' gradients
    double* const* gradients;     // [groups][captures]
    i64 captures;
    i64 chunks;                   // how many chunks the keys of one (batch, kv head) are cut into; items are [chunks, batch, kv heads]
    i64 groups;                   // of items that run in order on one thread, because they accumulate into the same gradients
    const i64 *group_offsets, *group_items;
};

struct Classify {  // packed by ../tile_classifier.py
    Run run;
    i64 threads;
    Program mask;
    i64 heads, q_tiles, kv_tiles, n_q, n_kv;  // of the map, which has one head where the mask does not look at them
    const i64* tiles;                         // [count] among [batch, heads, q_tiles, kv_tiles]
    uint8_t* states;                          // [count]
    i64 count;
};

// -- calls that are alike -------------------------------------------------------------------------------------------------

struct ForwardCall {  // what differs between them
    i64 threads;
    void *query, *key, *value, *out, *lse, *max_score;
    const void* sinks;
    i64 seed;
    void* split_results;
    Packed packed;
};

struct BackwardCall {
    i64 threads;
    void *query, *key, *value, *out, *grad_out;
    const void *lse, *grad_lse;
    void* delta;
    void *q_lanes, *do_lanes, *q_rows, *do_rows;
    uint8_t* finite;
    void* dq_lanes;
    uint8_t* dq_written;
    void *dq, *dk, *dv;
    double* const* gradients;
    i64 seed;
};

INLINE Forward called(Forward f, const ForwardCall& call) {
    f.problem.threads = call.threads;
    f.problem.query.data = call.query;
    f.problem.key.data = call.key;
    f.problem.value.data = call.value;
    f.problem.sinks = call.sinks;
    f.problem.seed = call.seed;
    f.out.data = call.out;
    f.lse = call.lse;
    f.max_score = call.max_score;
    f.split_results = call.split_results;
    f.packed = call.packed;
    return f;
}

INLINE Backward called(Backward f, const BackwardCall& call) {
    f.problem.threads = call.threads;
    f.problem.query.data = call.query;
    f.problem.key.data = call.key;
    f.problem.value.data = call.value;
    f.problem.seed = call.seed;
    f.out.data = call.out;
    f.grad_out.data = call.grad_out;
    f.lse = call.lse;
    f.grad_lse = call.grad_lse;
    f.delta = call.delta;
    f.q_lanes = call.q_lanes;
    f.do_lanes = call.do_lanes;
    f.q_rows = call.q_rows;
    f.do_rows = call.do_rows;
    f.finite = call.finite;
    f.dq_lanes = call.dq_lanes;
    f.dq_written = call.dq_written;
    f.dq = call.dq;
    f.dk = call.dk;
    f.dv = call.dv;
    f.gradients = call.gradients;
    return f;
}
