"""Rows done again, one at a time, where a kernel found its result has_nonfinite.

What is masked has weight 0, and 0 * NaN is NaN: a NaN (or infinity) among masked keys would reach every row of a tile whose
product is one matrix multiplication. These functions leave masked elements out of each sum instead. They are slow, short to
compile and seldom run: the fast kernels only look whether their results are finite. They also keep scores beyond 2^30 apart from
their roundings: a score times a unit is rounded before the largest is subtracted, and no weight of the backward exceeds 1.

Full tiles are walked like partial ones (their mask allows everything), so that there is one body to compile, not two.

A row is a block of shape [1, ...], so that masks and scores see the same shapes as elsewhere: q as a column, kv as a row.
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.primitives import LOG2E, all_runs, dropout_keep, final_scores, load_rows, mask_applies, rounded_product, run_of, store_rows

CHUNK: tl.constexpr = tl.constexpr(16)  # keys, or queries, looked at in one step: tiles are cut smaller, so that there is little to compile


@triton.jit
def chunk_range(tiles, run, n, MAPPED: tl.constexpr, TILE: tl.constexpr):
    """The first chunk of a run of tiles and the one after its last; of n elements without a map."""
    if MAPPED:
        start, stop = run_of(tiles, run)
        return start * (TILE // CHUNK), stop * (TILE // CHUNK)
    else:
        return 0, (n + CHUNK - 1) // CHUNK


@triton.jit
def row_step(
    b_q,
    b_m,
    b_l,
    b_acc,
    p_k,
    p_v,
    s_k,
    s_v,
    p_seed,
    i_b,
    i_h,
    o_q,
    i_kv,
    n_kv,
    applies,
    scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """N keys of the online softmax of one query row. b_q is [1, D], b_m and b_l [1], b_acc [1, DV]."""
    first, n_left = i_kv * N, n_kv - i_kv * N
    o_kv = i_kv * N + tl.arange(0, N)
    b_k = load_rows(p_k + first * s_k[2], s_k, n_left, N, D, D_TRUE).to(tl.float32)
    b_v = load_rows(p_v + first * s_v[2], s_v, n_left, N, DV, DV_TRUE).to(tl.float32)
    b_s = tl.sum(b_k * b_q, 1)[None, :]
    b_s = final_scores(b_s, scale, i_b, i_h, o_q[:, None], o_kv, n_kv, applies, mask, score, MASK, SCORE, True)
    b_s = rounded_product(b_s, scale[1])
    b_top = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_decay = tl.exp2(b_m - b_base)
    b_l = b_l * b_decay + tl.sum(b_p, 1)
    if DROPOUT:
        b_p = tl.where(dropout_keep(p_seed, threshold, i_b, i_h, o_q[:, None], o_kv[None, :]), b_p, 0.0)
    b_acc = b_acc * b_decay[:, None] + masked_sum(tl.trans(b_p), tl.trans(b_s), b_v)[None, :]
    return b_top, b_l, b_acc


@triton.jit
def masked_sum(b_w, b_s, b_x):
    """The sum of w x over what is attended: w and the scores s are [N, 1], x is [N, C]. An infinity or NaN that is heard becomes the result."""
    b_share = tl.where(tl.abs(b_x) < float("inf"), b_w * b_x, b_x)
    return tl.sum(tl.where(b_s != float("-inf"), b_share, 0.0), 0)


# -- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def fwd_rows(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_max,
    p_sinks,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_out,
    tiles,
    row,
    i_b,
    i_h,
    i_bh,
    i_tile,
    n_q,
    n_kv,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    SINKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """The rows of a query tile, written over what the fast way wrote. The pointers are those of this head."""
    for i_q in range(i_tile * M, tl.minimum(i_tile * M + M, n_q)):
        o_q = i_q + tl.arange(0, 1)
        b_q = load_rows(p_q + i_q * s_q[2], s_q, 1, 1, D, D_TRUE).to(tl.float32)
        b_m = tl.full([1], float("-inf"), tl.float32)
        b_l = tl.zeros([1], tl.float32)
        b_acc = tl.zeros([1, DV], tl.float32)
        first, last = all_runs(tiles, row, MAPPED)
        for run in range(first, last):
            start, stop = chunk_range(tiles, run, n_kv, MAPPED, N)
            applies = mask_applies(tiles, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=1):
                b_m, b_l, b_acc = row_step(
                    b_q,
                    b_m,
                    b_l,
                    b_acc,
                    p_k,
                    p_v,
                    s_k,
                    s_v,
                    p_seed,
                    i_b,
                    i_h,
                    o_q,
                    i_kv,
                    n_kv,
                    applies,
                    scale,
                    threshold,
                    mask,
                    score,
                    MASK,
                    SCORE,
                    DROPOUT,
                    CHUNK,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                )
        b_out, b_lse = finalize_rows(b_m, b_l, b_acc, p_sinks, i_h, keep_scale, SINKS)
        o_row = i_bh.to(tl.int64) * n_q + o_q
        tl.store(p_max + o_row, b_m * 0.6931471805599453)
        tl.store(p_lse + o_row, b_lse)
        store_rows(p_out + i_q * s_out[2], s_out, b_out, 1, 1, DV, DV_TRUE)


@triton.jit
def finalize_rows(b_m, b_l, b_acc, p_sinks, i_h, keep_scale, SINKS: tl.constexpr):
    """Output and lse from the maximum, the sum and the weighted values of rows, all in base 2."""
    if SINKS:  # one more key, of value 0
        sink = tl.load(p_sinks + i_h).to(tl.float32) * LOG2E
        b_top = tl.maximum(b_m, sink)
        b_decay = tl.exp2(b_m - b_top)
        b_l = b_l * b_decay + tl.exp2(sink - b_top)
        b_acc = b_acc * b_decay[:, None]
        b_m = b_top
    nothing = b_l == 0.0
    b_out = b_acc * (keep_scale / tl.where(nothing, 1.0, b_l))[:, None]
    return b_out, tl.where(nothing, float("-inf"), (b_m + tl.log2(tl.where(nothing, 1.0, b_l))) * 0.6931471805599453)


# -- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def dscore_of_row(
    b_q,
    b_do,
    b_lse,
    b_delta,
    p_k,
    p_v,
    s_k,
    s_v,
    p_seed,
    i_b,
    i_h,
    o_q,
    i_kv,
    n_kv,
    applies,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """dscore of one query row and N keys, with the final scores, both [1, N], and the keys [N, D]."""
    first, n_left = i_kv * N, n_kv - i_kv * N
    o_kv = i_kv * N + tl.arange(0, N)
    b_k = load_rows(p_k + first * s_k[2], s_k, n_left, N, D, D_TRUE).to(tl.float32)
    b_v = load_rows(p_v + first * s_v[2], s_v, n_left, N, DV, DV_TRUE).to(tl.float32)
    b_raw = tl.sum(b_k * b_q, 1)[None, :]
    b_s = final_scores(b_raw, scale, i_b, i_h, o_q[:, None], o_kv, n_kv, applies, mask, score, MASK, SCORE, True)
    b_p = exp2_clamped(b_s * scale[1] - b_lse[:, None])
    b_dp = tl.sum(b_v * b_do, 1)[None, :]
    if DROPOUT:
        keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q[:, None], o_kv[None, :])
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if DSCORE is not None:
        i_kv = tl.minimum(o_kv, n_kv - 1)[None, :]
        b_ds = b_ds * DSCORE(b_raw * scale[0], i_b, i_h, o_q[:, None], i_kv, score[0], score[1], score[2], score[3])
    return b_ds, b_s, b_k


@triton.jit
def dq_rows(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_dq,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dq,
    tiles,
    row,
    i_b,
    i_h,
    i_tile,
    n_q,
    n_kv,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """dQ of the rows of a query tile. The pointers are those of this head."""
    for i_q in range(i_tile * M, tl.minimum(i_tile * M + M, n_q)):
        o_q = i_q + tl.arange(0, 1)
        b_q = load_rows(p_q + i_q * s_q[2], s_q, 1, 1, D, D_TRUE).to(tl.float32)
        b_do = load_rows(p_do + i_q * s_do[2], s_do, 1, 1, DV, DV_TRUE).to(tl.float32)
        b_lse, b_delta = lse_base2(tl.load(p_lse + o_q)), tl.load(p_delta + o_q)
        b_dq = tl.zeros([1, D], tl.float32)
        first, last = all_runs(tiles, row, MAPPED)
        for run in range(first, last):
            start, stop = chunk_range(tiles, run, n_kv, MAPPED, N)
            applies = mask_applies(tiles, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=1):
                b_ds, b_s, b_k = dscore_of_row(
                    b_q,
                    b_do,
                    b_lse,
                    b_delta,
                    p_k,
                    p_v,
                    s_k,
                    s_v,
                    p_seed,
                    i_b,
                    i_h,
                    o_q,
                    i_kv,
                    n_kv,
                    applies,
                    scale,
                    keep_scale,
                    threshold,
                    mask,
                    score,
                    MASK,
                    SCORE,
                    DSCORE,
                    DROPOUT,
                    CHUNK,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                )
                b_dq += masked_sum(tl.trans(b_ds), tl.trans(b_s), b_k)[None, :]
        store_rows(p_dq + i_q * s_dq[2], s_dq, b_dq * scale[2], 1, 1, D, D_TRUE)


@triton.jit
def dkdv_step(
    b_k,
    b_v,
    b_dk,
    b_dv,
    p_q,
    p_do,
    p_lse,
    p_delta,
    s_q,
    s_do,
    p_seed,
    i_b,
    i_h,
    i_q,
    o_kv,
    n_q,
    n_kv,
    applies,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """The share of M queries in dK and dV of one key. Scores and weights are [M, 1]."""
    first, n_left = i_q * M, n_q - i_q * M
    o_row = tl.arange(0, M)
    o_q = i_q * M + o_row
    b_q = load_rows(p_q + first * s_q[2], s_q, n_left, M, D, D_TRUE).to(tl.float32)
    b_do = load_rows(p_do + first * s_do[2], s_do, n_left, M, DV, DV_TRUE).to(tl.float32)
    b_lse = lse_base2(tl.load(p_lse + first + o_row, mask=o_row < n_left, other=float("inf")))[:, None]
    b_delta = tl.load(p_delta + first + o_row, mask=o_row < n_left, other=0.0)[:, None]
    b_raw = tl.sum(b_q * b_k, 1)[:, None]
    seen_q = tl.minimum(o_q, n_q - 1)[:, None]
    b_s = final_scores(b_raw, scale, i_b, i_h, seen_q, o_kv, n_kv, applies, mask, score, MASK, SCORE, True)
    b_s = tl.where((o_q < n_q)[:, None], b_s, float("-inf"))
    b_p = exp2_clamped(b_s * scale[1] - b_lse)
    b_dp = tl.sum(b_do * b_v, 1)[:, None]
    b_pd = b_p
    if DROPOUT:
        keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q[:, None], o_kv[None, :])
        b_pd = tl.where(keep, b_p * keep_scale, 0.0)
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta)
    if DSCORE is not None:
        b_ds = b_ds * DSCORE(b_raw * scale[0], i_b, i_h, seen_q, o_kv[None, :], score[0], score[1], score[2], score[3])
    return b_dk + masked_sum(b_ds, b_s, b_q)[None, :], b_dv + masked_sum(b_pd, b_s, b_do)[None, :]


@triton.jit
def dkdv_rows(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_dk,
    p_dv,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dk,
    s_dv,
    tiles,
    s_tiles,
    i_b,
    i_hk,
    i_tile,
    n_heads,
    ratio,
    n_q,
    n_kv,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """dK and dV of the keys of a key tile. The pointers of k, v, dk and dv are those of this key head."""
    for i_kv in range(i_tile * N, tl.minimum(i_tile * N + N, n_kv)):
        o_kv = i_kv + tl.arange(0, 1)
        b_k = load_rows(p_k + i_kv * s_k[2], s_k, 1, 1, D, D_TRUE).to(tl.float32)
        b_v = load_rows(p_v + i_kv * s_v[2], s_v, 1, 1, DV, DV_TRUE).to(tl.float32)
        b_dk = tl.zeros([1, D], tl.float32)
        b_dv = tl.zeros([1, DV], tl.float32)
        for i_g in range(0, ratio):
            i_h = i_hk * ratio + i_g
            p_qh = p_q + i_b * s_q[0] + i_h * s_q[1]
            p_doh = p_do + i_b * s_do[0] + i_h * s_do[1]
            o_bh = (i_b * n_heads + i_h).to(tl.int64) * n_q
            row = i_b * s_tiles[0] + i_h * s_tiles[1] + i_tile
            first, last = all_runs(tiles, row, MAPPED)
            for run in range(first, last):
                start, stop = chunk_range(tiles, run, n_q, MAPPED, M)
                applies = mask_applies(tiles, row, run, GIVEN)
                for i_q in tl.range(start, stop, num_stages=1):
                    b_dk, b_dv = dkdv_step(
                        b_k,
                        b_v,
                        b_dk,
                        b_dv,
                        p_qh,
                        p_doh,
                        p_lse + o_bh,
                        p_delta + o_bh,
                        s_q,
                        s_do,
                        p_seed,
                        i_b,
                        i_h,
                        i_q,
                        o_kv,
                        n_q,
                        n_kv,
                        applies,
                        scale,
                        keep_scale,
                        threshold,
                        mask,
                        score,
                        MASK,
                        SCORE,
                        DSCORE,
                        DROPOUT,
                        CHUNK,
                        D,
                        DV,
                        D_TRUE,
                        DV_TRUE,
                    )
        store_rows(p_dk + i_kv * s_dk[2], s_dk, b_dk * scale[2], 1, 1, D, D_TRUE)
        store_rows(p_dv + i_kv * s_dv[2], s_dv, b_dv, 1, 1, DV, DV_TRUE)


@triton.jit
def exp2_clamped(b_x):
    """2^x of exponents that are not positive but for their rounding; NaN stays NaN."""
    return tl.exp2(tl.where(b_x > 0.0, 0.0, b_x))


@triton.jit
def lse_base2(b_lse):
    """lse in base 2; +inf for rows that attend to nothing, so that exp2(s - lse) = 0."""
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E)
