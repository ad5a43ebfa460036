// What a kernel is called with. Every field has 8 bytes, so that the caller packs them in order; `run.py` lists the same.
#pragma once
#include "vectors.h"

// body(context, item) for every item; items are begun in order, each by one thread.
typedef void (*Body)(void* context, i64 item);
typedef void (*Run)(Body body, void* context, i64 items, i64 threads);

struct Tensor {  // (batch, heads, sequence, head dim) and its strides, in elements
    void* data;
    i64 stride[4];
};

struct Program {  // a generated function and what it is called with
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

struct Walk {  // a tile map, or the whole as one full run per row where there is none
    const i32* order;  // [rows] of one (batch, head), the longest first
    Runs partial, full;
    i64 stride_batch, stride_head;  // in rows of the map
    i64 rows;                       // of one (batch, head)
    i64 tile, other_tile;           // along the rows' axis and along the other
};

struct Problem {
    Run run;
    i64 threads;
    i64 batch, heads, kv_heads, n_q, n_kv, d, dv;
    Tensor query, key, value;
    Walk walk;
    Program mask, score;
    const void* sinks;  // [heads], computed type
    double scale, keep_scale;
    i64 threshold, seed;  // dropout: elements whose 16 bits are below the threshold are dropped
};

// Keys and values laid out for the products, in blocks of 64 keys, [batch, kv heads, blocks] of each: for the matrix unit bfloat16, keys by rows and
// values transposed, [64][padded], [padded][64]; else panels of both in the computed type, null where queries are too few to pay for them.
struct Packed {
    void *keys, *values;
    uint8_t* finite;  // whether a block's values are all finite
};

struct Forward {
    Problem problem;
    Tensor out;
    void *lse, *highest;  // [batch, heads, n_q], computed type
    i64 splits;           // decoding: the parts the keys are cut into
    void* parts;          // decoding: [batch, kv_heads, splits, rows] of {acc[dv], highest, total}
    Packed packed;
};

struct Backward {
    Problem problem;  // its walk goes by keys: one row per tile of keys
    Tensor out, grad_out;
    const void *lse, *grad_lse;  // [batch, heads, n_q]; grad_lse may be absent
    void* delta;                 // [batch, heads, n_q]
    i64 blocks, blocks_per_tile;  // blocks of LANES queries, of one (batch, head) and of one tile of the map
    void *q_lanes, *do_lanes;     // [batch, heads, blocks][d or dv][LANES]; for the matrix unit pairs of features
    void *q_rows, *do_rows;       // [batch, heads, blocks][LANES][width], null where the tensors' own rows serve; for the matrix unit pairs of rows
    uint8_t* finite;              // [batch, heads, blocks] for the matrix unit: whether queries and gradients are
    void* dq_lanes;               // [chunks][batch, heads, blocks][padded d][LANES]
    uint8_t* begun;               // [chunks][batch, heads, blocks] whether a share of dQ holds anything; zero at the start
    void *dq, *dk, *dv;           // contiguous, in the tensors' own type
    void* slope;                  // the score's derivative, which also adds up the captures' gradients
    double* const* gradients;     // [groups][captures]
    i64 captures;
    i64 chunks;                   // parts the keys of one (batch, kv head) are cut into; items are [chunks, batch, kv heads]
    i64 groups;                   // items that one thread takes in order, because they add to the same gradients
    const i64 *group_offsets, *group_items;
};
