"""Recomputes the rows of a tile one at a time, where a kernel found a NaN or an infinity in its result.

A masked element has weight 0, and 0 * NaN is NaN: in a matrix product, a NaN or infinity at a masked key would reach every row of the tile. These
functions leave masked elements out of each sum instead. They are slow, quick to compile and rarely run: the fast kernels only check whether their
results are finite. They also stay accurate for scores beyond 2^30: a score is rounded to base 2 before the maximum is subtracted, and no weight of
the backward exceeds 1.

Full tiles go through the same loop as partial ones (their mask allows everything), so that one body is compiled instead of two.

A row is a block [1, ...], so that masks and scores see the shapes they see elsewhere: q as a column, kv as a row. `tensors`, `args` and C are those of
the kernel that calls (see kernel_args.py).
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.primitives import (
    LOG2E,
    all_runs,
    dropout_keep_of,
    final_scores,
    load_kv,
    load_rows,
    mask_applies,
    rounded_product,
    run_of,
    store_rows,
)

CHUNK: tl.constexpr = tl.constexpr(16)  # keys, or queries, per step: less than a tile, so that there is little to compile
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def chunk_range(schedule, run, n, MAPPED: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr = CHUNK):
    """The first chunk of a run of tiles, and the one after its last; without a tile map, of all n elements."""
    if MAPPED:
        start, stop = run_of(schedule, run)
        return start * (TILE // SIZE), stop * (TILE // SIZE)
    else:
        return 0, (n + SIZE - 1) // SIZE


@triton.jit
def masked_sum(b_w, b_s, b_x):
    """Sum of w x over unmasked elements: w and the scores s are [N, 1], x is [N, C]. An unmasked infinity or NaN of x becomes the result."""
    b_term = tl.where(tl.abs(b_x) < float("inf"), b_w * b_x, b_x)  # [N, C]
    return tl.sum(tl.where(b_s != float("-inf"), b_term, 0.0), 0)


# -- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def fwd_rows(head, row, bh, i_bh, start_q, stop_q, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """out, lse and the maximum of some rows of a query tile, written over what the fast kernel wrote. `head` are q, k, v and out of this head."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    MAPPED: tl.constexpr = C.value.mapped
    GIVEN: tl.constexpr = C.value.given
    SINKS: tl.constexpr = C.value.sinks
    n_q, n_kv = args.shape.n_q, args.shape.n_kv
    for i_q in range(start_q, stop_q):
        o_q = i_q + tl.arange(0, 1)
        b_q = load_rows(head[0] + i_q * args.strides.q[2], args.strides.q, 1, 1, D, D_TRUE).to(tl.float32)  # [1, D]
        b_m = tl.full([1], float("-inf"), tl.float32)
        b_l = tl.zeros([1], tl.float32)
        b_acc = tl.zeros([1, DV], tl.float32)
        first, last = all_runs(args.schedule, row, MAPPED)
        for run in range(first, last):
            start, stop = chunk_range(args.schedule, run, n_kv, MAPPED, N)
            applies = mask_applies(args.schedule, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=1):
                b_m, b_l, b_acc = row_step(b_q, (b_m, b_l, b_acc), (head[1], head[2]), bh, o_q, i_kv, n_kv, applies, tensors, args, MASK, SCORE, C)
        b_out, b_lse = finalize_rows(b_m, b_l, b_acc, tensors.sinks, bh[1], args.mods.keep_scale, SINKS)
        o_row = i_bh.to(tl.int64) * n_q + o_q
        tl.store(tensors.max_score + o_row, b_m * LN2)
        tl.store(tensors.lse + o_row, b_lse)
        store_rows(head[3] + i_q * args.strides.out[2], args.strides.out, b_out, 1, 1, DV, DV_TRUE)


@triton.jit
def row_step(b_q, state, kv, bh, o_q, i_kv, n_kv, applies, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """CHUNK keys (chunk i_kv) of one row's online softmax over n_kv keys. q is [1, D]; the state is maximum [1], sum [1] and weighted values [1, DV]."""
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    DROPOUT: tl.constexpr = C.value.dropout
    PAGE: tl.constexpr = C.value.page
    b_m, b_l, b_acc = state
    first = i_kv * CHUNK
    o_kv = i_kv * CHUNK + tl.arange(0, CHUNK)
    b_k = load_kv(kv[0], args.strides.k, first, n_kv, bh[0], args.pages, CHUNK, D, D_TRUE, PAGE).to(tl.float32)  # [CHUNK, D]
    b_v = load_kv(kv[1], args.strides.v, first, n_kv, bh[0], args.pages, CHUNK, DV, DV_TRUE, PAGE).to(tl.float32)  # [CHUNK, DV]
    b_s = tl.sum(b_k * b_q, 1)[None, :]  # [1, CHUNK]
    b_s = final_scores(b_s, bh, o_q[:, None], o_kv, n_kv, applies, args.mods, MASK, SCORE, True)
    b_s = rounded_product(b_s, args.mods.scale[1])
    b_top = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = tl.exp2(b_s - b_base[:, None])  # P = 2^(s - max)
    b_decay = tl.exp2(b_m - b_base)
    b_l = b_l * b_decay + tl.sum(b_p, 1)
    if DROPOUT:
        b_p = tl.where(dropout_keep_of(tensors.seed, args, bh, o_q[:, None], o_kv[None, :], C), b_p, 0.0)
    b_acc = b_acc * b_decay[:, None] + masked_sum(tl.trans(b_p), tl.trans(b_s), b_v)[None, :]
    return b_top, b_l, b_acc


@triton.jit
def finalize_rows(b_m, b_l, b_acc, p_sinks, i_h, keep_scale, SINKS: tl.constexpr):
    """out = acc / l [M, DV] and lse = (m + log2 l) ln 2 [M] of an online softmax in base 2: maximum m, sum l, weighted values acc."""
    if SINKS:  # one more key, of value 0
        sink = tl.load(p_sinks + i_h).to(tl.float32) * LOG2E
        b_top = tl.maximum(b_m, sink)
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # neither keys nor a sink: -inf - -inf would be NaN
        b_decay = tl.exp2(b_m - b_base)
        b_l = b_l * b_decay + tl.exp2(sink - b_base)
        b_acc = b_acc * b_decay[:, None]
        b_m = b_base
    nothing = b_l == 0.0  # a row that attends to nothing: out = 0, lse = -inf
    b_out = b_acc * (keep_scale / tl.where(nothing, 1.0, b_l))[:, None]
    return b_out, tl.where(nothing, float("-inf"), (b_m + tl.log2(tl.where(nothing, 1.0, b_l))) * LN2)


# -- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def dq_rows(head, schedule, row, bh, i_tile, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dQ = scale dscore K of a query tile's rows. `head` are q, k, v, dO, lse, delta and dQ of this head."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    MAPPED: tl.constexpr = C.value.mapped
    GIVEN: tl.constexpr = C.value.given
    n_q, n_kv = args.shape.n_q, args.shape.n_kv
    for i_q in range(i_tile * M, tl.minimum(i_tile * M + M, n_q)):
        o_q = i_q + tl.arange(0, 1)
        b_q = load_rows(head[0] + i_q * args.strides.q[2], args.strides.q, 1, 1, D, D_TRUE).to(tl.float32)  # [1, D]
        b_do = load_rows(head[3] + i_q * args.strides.do[2], args.strides.do, 1, 1, DV, DV_TRUE).to(tl.float32)  # [1, DV]
        b_lse, b_delta = lse_base2(tl.load(head[4] + o_q)), tl.load(head[5] + o_q)  # [1]
        b_dq = tl.zeros([1, D], tl.float32)
        first, last = all_runs(schedule, row, MAPPED)
        for run in range(first, last):
            start, stop = chunk_range(schedule, run, n_kv, MAPPED, N)
            applies = mask_applies(schedule, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=1):
                b_ds, b_s, b_k = dscore_of_row((b_q, b_do, b_lse, b_delta), (head[1], head[2]), bh, o_q, i_kv, applies, tensors, args, MASK, SCORE, DSCORE, C)
                b_dq += masked_sum(tl.trans(b_ds), tl.trans(b_s), b_k)[None, :]
        store_rows(head[6] + i_q * args.strides.dq[2], args.strides.dq, b_dq * args.mods.scale[2], 1, 1, D, D_TRUE)


@triton.jit
def dscore_of_row(query, kv, bh, o_q, i_kv, applies, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dscore and the final scores [1, CHUNK] of one query and CHUNK keys, and the keys [CHUNK, D]. `query` are the row's q, dO, lse and delta."""
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    DROPOUT: tl.constexpr = C.value.dropout
    b_q, b_do, b_lse, b_delta = query
    n_kv, mods = args.shape.n_kv, args.mods
    first, n_left = i_kv * CHUNK, n_kv - i_kv * CHUNK
    o_kv = i_kv * CHUNK + tl.arange(0, CHUNK)
    b_k = load_rows(kv[0] + first * args.strides.k[2], args.strides.k, n_left, CHUNK, D, D_TRUE).to(tl.float32)  # [CHUNK, D]
    b_v = load_rows(kv[1] + first * args.strides.v[2], args.strides.v, n_left, CHUNK, DV, DV_TRUE).to(tl.float32)  # [CHUNK, DV]
    b_raw = tl.sum(b_k * b_q, 1)[None, :]  # q.k [1, CHUNK]
    b_s = final_scores(b_raw, bh, o_q[:, None], o_kv, n_kv, applies, mods, MASK, SCORE, True)
    b_p = exp2_clamped(b_s * mods.scale[1] - b_lse[:, None])  # P = 2^(s - lse)
    b_dp = tl.sum(b_v * b_do, 1)[None, :]  # dP = dO V^T
    if DROPOUT:
        keep = dropout_keep_of(tensors.seed, args, bh, o_q[:, None], o_kv[None, :], C)
        b_dp = tl.where(keep, b_dp * mods.keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])  # dS = P (dP - delta)
    if DSCORE is not None:
        i_kv = tl.minimum(o_kv, n_kv - 1)[None, :]
        b_ds = b_ds * DSCORE(b_raw * mods.scale[0], bh[0], bh[1], o_q[:, None], i_kv, mods.score[0], mods.score[1], mods.score[2], mods.score[3])
    return b_ds, b_s, b_k


@triton.jit
def dkdv_rows(head, schedule, i_b, i_hk, i_tile, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dK = scale dscore^T Q and dV = dropout(P)^T dO of a key tile's keys, over the query heads that share them.
    `head`: k, v, dK and dV of this key head."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    MAPPED: tl.constexpr = C.value.mapped
    GIVEN: tl.constexpr = C.value.given
    n_heads, ratio, n_q, n_kv = args.shape
    for i_kv in range(i_tile * N, tl.minimum(i_tile * N + N, n_kv)):
        o_kv = i_kv + tl.arange(0, 1)
        b_k = load_rows(head[0] + i_kv * args.strides.k[2], args.strides.k, 1, 1, D, D_TRUE).to(tl.float32)  # [1, D]
        b_v = load_rows(head[1] + i_kv * args.strides.v[2], args.strides.v, 1, 1, DV, DV_TRUE).to(tl.float32)  # [1, DV]
        b_dk = tl.zeros([1, D], tl.float32)
        b_dv = tl.zeros([1, DV], tl.float32)
        for i_g in range(0, ratio):
            i_h = i_hk * ratio + i_g
            p_q = tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1]
            p_do = tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1]
            o_bh = (i_b * n_heads + i_h).to(tl.int64) * n_q
            row = i_b * schedule.strides[0] + i_h * schedule.strides[1] + i_tile
            first, last = all_runs(schedule, row, MAPPED)
            for run in range(first, last):
                start, stop = chunk_range(schedule, run, n_q, MAPPED, M)
                applies = mask_applies(schedule, row, run, GIVEN)
                for i_q in tl.range(start, stop, num_stages=1):
                    queries = (p_q, p_do, tensors.lse + o_bh, tensors.delta + o_bh)
                    b_dk, b_dv = dkdv_step((b_k, b_v, o_kv), (b_dk, b_dv), queries, (i_b, i_h), i_q, applies, tensors, args, MASK, SCORE, DSCORE, C)
        store_rows(head[2] + i_kv * args.strides.dk[2], args.strides.dk, b_dk * args.mods.scale[2], 1, 1, D, D_TRUE)
        store_rows(head[3] + i_kv * args.strides.dv[2], args.strides.dv, b_dv, 1, 1, DV, DV_TRUE)


@triton.jit
def dkdv_step(key, sums, queries, bh, i_q, applies, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dK and dV of one key, with the contribution of CHUNK queries (chunk i_q) added. `key` are its k, v and position, `queries` point to q, dO, lse and delta
    of this query head."""
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    DROPOUT: tl.constexpr = C.value.dropout
    b_k, b_v, o_kv = key
    b_dk, b_dv = sums
    p_q, p_do, p_lse, p_delta = queries
    n_q, n_kv, mods = args.shape.n_q, args.shape.n_kv, args.mods
    first, n_left = i_q * CHUNK, n_q - i_q * CHUNK
    o_row = tl.arange(0, CHUNK)
    o_q = i_q * CHUNK + o_row
    b_q = load_rows(p_q + first * args.strides.q[2], args.strides.q, n_left, CHUNK, D, D_TRUE).to(tl.float32)  # [CHUNK, D]
    b_do = load_rows(p_do + first * args.strides.do[2], args.strides.do, n_left, CHUNK, DV, DV_TRUE).to(tl.float32)  # [CHUNK, DV]
    b_lse = lse_base2(tl.load(p_lse + first + o_row, mask=o_row < n_left, other=float("inf")))[:, None]  # [CHUNK, 1]
    b_delta = tl.load(p_delta + first + o_row, mask=o_row < n_left, other=0.0)[:, None]  # [CHUNK, 1]
    b_raw = tl.sum(b_q * b_k, 1)[:, None]  # q.k [CHUNK, 1]
    seen_q = tl.minimum(o_q, n_q - 1)[:, None]
    b_s = final_scores(b_raw, bh, seen_q, o_kv, n_kv, applies, mods, MASK, SCORE, True)
    b_s = tl.where((o_q < n_q)[:, None], b_s, float("-inf"))
    b_p = exp2_clamped(b_s * mods.scale[1] - b_lse)  # P = 2^(s - lse)
    b_dp = tl.sum(b_do * b_v, 1)[:, None]  # dP = dO V^T
    b_pd = b_p
    if DROPOUT:
        keep = dropout_keep_of(tensors.seed, args, bh, o_q[:, None], o_kv[None, :], C)
        b_pd = tl.where(keep, b_p * mods.keep_scale, 0.0)
        b_dp = tl.where(keep, b_dp * mods.keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta)  # dS = P (dP - delta)
    if DSCORE is not None:
        b_ds = b_ds * DSCORE(b_raw * mods.scale[0], bh[0], bh[1], seen_q, o_kv[None, :], mods.score[0], mods.score[1], mods.score[2], mods.score[3])
    return b_dk + masked_sum(b_ds, b_s, b_q)[None, :], b_dv + masked_sum(b_pd, b_s, b_do)[None, :]


@triton.jit
def exp2_clamped(b_x):
    """2^x for exponents that only rounding makes positive; NaN stays NaN."""
    return tl.exp2(tl.where(b_x > 0.0, 0.0, b_x))


@triton.jit
def lse_base2(b_lse):
    """lse in base 2; +inf for rows that attend to nothing, so that 2^(s - lse) = 0."""
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)
