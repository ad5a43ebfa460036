"""The backward kernels: `bwd_preprocess`, then `bwd`, whose programs each make dK and dV of a key tile, or dQ of a query tile.

P = exp(s - lse), dP = dropout(dO V^T), delta = dO . O - dlse, dS = P (dP - delta), dscore = dS * score'
dV = dropout(P)^T dO, dK = scale dscore^T Q, dQ = scale dscore K

There are two ways to dQ. Where its sums may be made in any order, the programs of key tiles add their shares of it to memory (ATOMIC_DQ), five products a
tile, and `dq_postprocess` takes it from there. Else programs of query tiles compute the scores again, seven products in all: every sum is dropout_keep in one program's
registers and written once, so the result is the same every time. Those also make the bwd of tensors that a score function captures, which are added
atomically (as integers where that must be repeatable, see fixed_point). As in the forward, what is found has_nonfinite is done again, carefully.
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import dkdv_rows, dq_rows, lse_base2
from tilewise.engines.gpu.kernels.primitives import (
    dot_rows_bwd,
    dropout_keep,
    final_scores,
    full_runs,
    has_nonfinite,
    load_rows,
    mask_applies,
    masked_runs,
    red_add,
    run_of,
    store_rows,
)
from tilewise.engines.triton import launches


@triton.jit
def bwd_preprocess(
    p_out,
    p_do,
    p_lse,
    p_dlse,
    p_delta,
    p_shift,
    s_out,
    s_do,
    n_heads,
    n_q,
    unit,
    HAS_DLSE: tl.constexpr,
    FOLDED: tl.constexpr,
    M: tl.constexpr,
    DV: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """delta = sum over the head dim of dO * O, less dlse; and -lse / unit and -delta in a form that a product can add (`add_shift`)."""
    n_tiles = (n_q + M - 1) // M
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    first = i_tile * M
    n_left = n_q - i_tile * M
    b_out = load_rows(p_out + i_b * s_out[0] + i_h * s_out[1] + first * s_out[2], s_out, n_left, M, DV, DV_TRUE).to(tl.float32)
    b_do = load_rows(p_do + i_b * s_do[0] + i_h * s_do[1] + first * s_do[2], s_do, n_left, M, DV, DV_TRUE).to(tl.float32)
    o_row = i_bh.to(tl.int64) * n_q + i_tile * M + tl.arange(0, M)
    inside = tl.arange(0, M) < n_left
    b_delta = tl.sum(b_out * b_do, 1)
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + o_row, mask=inside, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=inside)
    if FOLDED:
        b_lse = lse_base2(tl.load(p_lse + o_row, mask=inside, other=0.0))
        store_shift(p_shift, o_row, inside, -b_lse / unit, 1.0)
        store_shift(p_shift + SHIFT_TERMS, o_row, inside, -b_delta, 0.0)


# A number per query is wanted at every key of a transposed tile, where each thread would have to load a quarter of them. A product
# brings it there for next to nothing: [N, 16] @ [16, M], with the number as a sum of three 16-bit parts, exact to 24 bits. With a fourth part of 1, the
# product also takes FAR from the scores of dkdv_program past the end: those add nothing to dQ, as their k is 0, unless 2^score is infinite.
FAR: tl.constexpr = tl.constexpr(60000.0)
SHIFT_TERMS: tl.constexpr = tl.constexpr(launches.SHIFT_TERMS)


@triton.jit
def store_shift(p, o_row, inside, b_x, fourth):
    dtype: tl.constexpr = p.dtype.element_ty
    b_high = (b_x / 1024).to(dtype)
    b_rest = tl.where(tl.abs(b_high.to(tl.float32)) < float("inf"), b_x - b_high.to(tl.float32) * 1024, 0.0)
    b_middle = b_rest.to(dtype)
    b_low = ((b_rest - b_middle.to(tl.float32)) * 1024).to(dtype)
    o_part = tl.arange(0, SHIFT_TERMS)[None, :]
    b_last = tl.where(o_part == 2, b_low[:, None], tl.where(o_part == 3, fourth, 0.0))
    b_parts = tl.where(o_part == 0, b_high[:, None], tl.where(o_part == 1, b_middle[:, None], b_last))
    tl.store(p + o_row[:, None] * (2 * SHIFT_TERMS) + o_part, b_parts.to(dtype), mask=inside[:, None])


@triton.jit
def shift_weights(o_kv, n_kv, dtype: tl.constexpr):
    """What `add_shift` multiplies the parts by: 1024, 1, 1 / 1024, and -FAR for dkdv_program past the end."""
    o_part = tl.arange(0, SHIFT_TERMS)[None, :]
    b_fourth = tl.where(o_kv < n_kv, 0.0, -FAR)[:, None]
    return tl.where(o_part == 0, 1024.0, tl.where(o_part == 1, 1.0, tl.where(o_part == 2, 1.0 / 1024, tl.where(o_part == 3, b_fourth, 0.0)))).to(dtype)


@triton.jit
def add_shift(b_x, b_weights, p_shift, first, n_left, M: tl.constexpr, UPCAST: tl.constexpr, BOUNDED: tl.constexpr):
    """x [N, M] plus the number of each query."""
    o_row = tl.arange(0, M)[:, None]
    p = p_shift + first.to(tl.uint32) * (2 * SHIFT_TERMS) + (o_row * (2 * SHIFT_TERMS) + tl.arange(0, SHIFT_TERMS)[None, :])
    if BOUNDED:
        b_parts = tl.load(p, mask=o_row < n_left, other=0.0)
    else:
        b_parts = tl.load(p)
    if UPCAST:
        b_weights, b_parts = b_weights.to(tl.float32), b_parts.to(tl.float32)
    return tl.dot(b_weights, tl.trans(b_parts), b_x)


@triton.jit
def bwd(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_shift,
    p_dq,
    p_dk,
    p_dv,
    p_seed,
    capture_grads,
    dq_sums,  # the last: where sums are made (see above)
    s_q,
    s_k,
    s_v,
    s_do,
    s_dq,
    s_dk,
    s_dv,
    columns,
    s_columns,
    n_columns,
    rows,
    s_rows,
    n_rows,  # the map by key tiles and by query tiles, strides and counts as in the forward
    n_dkdv_programs,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_padded,
    scale,
    keep_scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    SCATTER: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    FOLDED: tl.constexpr,
    DKDV: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,  # DKDV: there are key programs, too. ATOMIC_DQ: they make dQ (see add_dq)
    DKDV_M: tl.constexpr,
    DKDV_N: tl.constexpr,
    DQ_M: tl.constexpr,
    DQ_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    DKDV_STAGES: tl.constexpr,
    DKDV_MASKED_STAGES: tl.constexpr,
    DQ_STAGES: tl.constexpr,
    DQ_MASKED_STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    if DKDV:
        if pid < n_dkdv_programs:
            dkdv_program(
                pid,
                p_q,
                p_k,
                p_v,
                p_do,
                p_lse,
                p_delta,
                p_shift,
                p_dk,
                p_dv,
                p_seed,
                s_q,
                s_k,
                s_v,
                s_do,
                s_dk,
                s_dv,
                dq_sums,
                columns,
                s_columns,
                n_columns,
                n_heads,
                ratio,
                n_q,
                n_kv,
                n_padded,
                scale,
                keep_scale,
                threshold,
                mask,
                score,
                MASK,
                SCORE,
                DSCORE,
                MAPPED,
                GIVEN,
                DROPOUT,
                FOLDED,
                ATOMIC_DQ,
                DKDV_M,
                DKDV_N,
                D,
                DV,
                D_TRUE,
                DV_TRUE,
                PRECISION,
                UPCAST,
                DKDV_STAGES,
                DKDV_MASKED_STAGES,
            )
    if ATOMIC_DQ is None:
        if pid >= n_dkdv_programs:
            dq_program(
                pid - n_dkdv_programs,
                p_q,
                p_k,
                p_v,
                p_do,
                p_lse,
                p_delta,
                p_dq,
                p_seed,
                capture_grads,
                s_q,
                s_k,
                s_v,
                s_do,
                s_dq,
                rows,
                s_rows,
                n_rows,
                n_heads,
                ratio,
                n_q,
                n_kv,
                scale,
                keep_scale,
                threshold,
                mask,
                score,
                MASK,
                SCORE,
                DSCORE,
                SCATTER,
                MAPPED,
                GIVEN,
                DROPOUT,
                DQ_M,
                DQ_N,
                D,
                DV,
                D_TRUE,
                DV_TRUE,
                PRECISION,
                UPCAST,
                DQ_STAGES,
                DQ_MASKED_STAGES,
            )


# -- dK and dV -------------------------------------------------------------------------------------------------------


@triton.jit
def dkdv_program(
    pid,
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_shift,
    p_dk,
    p_dv,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dk,
    s_dv,
    dq_sums,
    tiles,
    s_tiles,
    n_tiles,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_padded,
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
    FOLDED: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """dK and dV of one key tile, over the query heads that share it. Everything is transposed: [N dkdv_program, M dq_program]."""
    n_kv_heads = n_heads // ratio
    i_bh, i_place = pid // n_tiles, pid % n_tiles
    i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
    i_kv = i_place
    if MAPPED:
        i_kv = tl.load(tiles[0] + i_b * s_tiles[0] + i_hk * ratio * s_tiles[1] + i_place)
    first = i_kv * N
    n_left = n_kv - i_kv * N
    b_k = load_rows(p_k + i_b * s_k[0] + i_hk * s_k[1] + first * s_k[2], s_k, n_left, N, D, D_TRUE, True, ATOMIC_DQ is not None)
    b_v = load_rows(p_v + i_b * s_v[0] + i_hk * s_v[1] + first * s_v[2], s_v, n_left, N, DV, DV_TRUE, True, ATOMIC_DQ is not None)
    if UPCAST:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    b_dk, b_dv = dkdv_tiles(
        b_k,
        b_v,
        p_q,
        p_do,
        p_lse,
        p_delta,
        p_shift,
        p_seed,
        s_q,
        s_do,
        dq_sums,
        tiles,
        s_tiles,
        i_b,
        i_hk,
        i_kv,
        n_heads,
        ratio,
        n_q,
        n_kv,
        n_padded,
        scale,
        keep_scale,
        threshold,
        mask,
        score,
        MASK,
        SCORE,
        DSCORE,
        MAPPED,
        GIVEN,
        DROPOUT,
        FOLDED,
        ATOMIC_DQ,
        M,
        N,
        D,
        DV,
        D_TRUE,
        DV_TRUE,
        PRECISION,
        UPCAST,
        STAGES,
        MASKED_STAGES,
    )
    p_k += i_b * s_k[0] + i_hk * s_k[1]
    p_v += i_b * s_v[0] + i_hk * s_v[1]
    p_dk += i_b * s_dk[0] + i_hk * s_dk[1]
    p_dv += i_b * s_dv[0] + i_hk * s_dv[1]
    store_rows(p_dk + first * s_dk[2], s_dk, b_dk * scale[2], n_left, N, D, D_TRUE)
    store_rows(p_dv + first * s_dv[2], s_dv, b_dv, n_left, N, DV, DV_TRUE)
    if has_nonfinite(b_dk) | has_nonfinite(b_dv):
        dkdv_rows(
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
            i_kv,
            n_heads,
            ratio,
            n_q,
            n_kv,
            scale,
            keep_scale,
            threshold,
            mask,
            score,
            MASK,
            SCORE,
            DSCORE,
            MAPPED,
            GIVEN,
            DROPOUT,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
        )


@triton.jit
def dkdv_tiles(
    b_k,
    b_v,
    p_q,
    p_do,
    p_lse,
    p_delta,
    p_shift,
    p_seed,
    s_q,
    s_do,
    dq_sums,
    tiles,
    s_tiles,
    i_b,
    i_hk,
    i_kv,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_padded,
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
    FOLDED: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """dK / scale and dV of the key tile, summed over its query tiles, of all heads that share it."""
    o_kv = i_kv * N + tl.arange(0, N)
    b_w = shift_weights(o_kv, n_kv, p_q.dtype.element_ty)
    b_dk = tl.zeros([N, D], tl.float32)
    b_dv = tl.zeros([N, DV], tl.float32)
    for i_g in range(0, ratio):
        i_h = i_hk * ratio + i_g
        p_qh = p_q + i_b * s_q[0] + i_h * s_q[1]
        p_doh = p_do + i_b * s_do[0] + i_h * s_do[1]
        i_bh = (i_b * n_heads + i_h).to(tl.int64)
        p_lseh, p_deltah = p_lse + i_bh * n_q, p_delta + i_bh * n_q
        p_shifth, p_sumh = p_lseh, p_lseh  # any pointer, where there is none
        if FOLDED:
            p_shifth = p_shift + i_bh * n_q * (2 * SHIFT_TERMS)
        if ATOMIC_DQ is not None:
            p_sumh = dq_sums[0] + i_bh * n_padded * D
        if MAPPED:
            row = i_b * s_tiles[0] + i_h * s_tiles[1] + i_kv
            first, last = full_runs(tiles, row)
            for run in range(first, last):
                start, stop = run_of(tiles, run)
                for i_q in tl.range(start, stop, num_stages=STAGES):
                    b_dk, b_dv = dkdv_tile(
                        b_k,
                        b_v,
                        b_w,
                        b_dk,
                        b_dv,
                        p_qh,
                        p_doh,
                        s_q,
                        s_do,
                        p_lseh,
                        p_deltah,
                        p_shifth,
                        p_sumh,
                        p_seed,
                        i_b,
                        i_h,
                        i_q,
                        o_kv,
                        n_q,
                        n_kv,
                        -1,
                        scale,
                        keep_scale,
                        threshold,
                        mask,
                        score,
                        MASK,
                        SCORE,
                        DSCORE,
                        False,
                        DROPOUT,
                        FOLDED,
                        ATOMIC_DQ,
                        M,
                        N,
                        D,
                        DV,
                        D_TRUE,
                        DV_TRUE,
                        PRECISION,
                        UPCAST,
                    )
            first, last = masked_runs(tiles, row)
            for run in range(first, last):
                start, stop = run_of(tiles, run)
                applies = mask_applies(tiles, row, run, GIVEN)
                for i_q in tl.range(start, stop, num_stages=MASKED_STAGES):
                    b_dk, b_dv = dkdv_tile(
                        b_k,
                        b_v,
                        b_w,
                        b_dk,
                        b_dv,
                        p_qh,
                        p_doh,
                        s_q,
                        s_do,
                        p_lseh,
                        p_deltah,
                        p_shifth,
                        p_sumh,
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
                        True,
                        DROPOUT,
                        FOLDED,
                        ATOMIC_DQ,
                        M,
                        N,
                        D,
                        DV,
                        D_TRUE,
                        DV_TRUE,
                        PRECISION,
                        UPCAST,
                    )
        else:
            for i_q in tl.range(0, n_q // M, num_stages=STAGES):
                b_dk, b_dv = dkdv_tile(
                    b_k,
                    b_v,
                    b_w,
                    b_dk,
                    b_dv,
                    p_qh,
                    p_doh,
                    s_q,
                    s_do,
                    p_lseh,
                    p_deltah,
                    p_shifth,
                    p_sumh,
                    p_seed,
                    i_b,
                    i_h,
                    i_q,
                    o_kv,
                    n_q,
                    n_kv,
                    -1,
                    scale,
                    keep_scale,
                    threshold,
                    mask,
                    score,
                    None,
                    SCORE,
                    DSCORE,
                    False,
                    DROPOUT,
                    FOLDED,
                    ATOMIC_DQ,
                    M,
                    N,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                    PRECISION,
                    UPCAST,
                )
            if n_q % M != 0:
                b_dk, b_dv = dkdv_tile(
                    b_k,
                    b_v,
                    b_w,
                    b_dk,
                    b_dv,
                    p_qh,
                    p_doh,
                    s_q,
                    s_do,
                    p_lseh,
                    p_deltah,
                    p_shifth,
                    p_sumh,
                    p_seed,
                    i_b,
                    i_h,
                    n_q // M,
                    o_kv,
                    n_q,
                    n_kv,
                    -1,
                    scale,
                    keep_scale,
                    threshold,
                    mask,
                    score,
                    None,
                    SCORE,
                    DSCORE,
                    True,
                    DROPOUT,
                    FOLDED,
                    ATOMIC_DQ,
                    M,
                    N,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                    PRECISION,
                    UPCAST,
                )
    return b_dk, b_dv


@triton.jit
def dkdv_tile(
    b_k,
    b_v,
    b_w,
    b_dk,
    b_dv,
    p_q,
    p_do,
    s_q,
    s_do,
    p_lse,
    p_delta,
    p_shift,
    p_sum,
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
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    FOLDED: tl.constexpr,
    ATOMIC_DQ: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query tile's share of dK and dV, and its own in dQ if this ATOMIC_DQ. MASKED tiles may reach past the last query, where q and dO are 0 and so is
    the share. Pointers are those of this head."""
    first = i_q * M
    n_left = n_q - i_q * M
    o_q = i_q * M + tl.arange(0, M)
    b_q = load_rows(p_q + first * s_q[2], s_q, n_left, M, D, D_TRUE, MASKED, ATOMIC_DQ is not None)
    b_do = load_rows(p_do + first * s_do[2], s_do, n_left, M, DV, DV_TRUE, MASKED, ATOMIC_DQ is not None)
    if UPCAST:
        b_q, b_do = b_q.to(tl.float32), b_do.to(tl.float32)
    b_raw = dot_rows_bwd(b_k, b_q, PRECISION)  # [N, M]
    seen_q = tl.minimum(o_q, n_q - 1)[None, :]
    if FOLDED and DSCORE is None:  # no score, or one that only adds: the shift is -lse / scale, before it
        b_s = add_shift(b_raw, b_w, p_shift, first, n_left, M, UPCAST, MASKED)
        b_s = final_scores_t(b_s, scale, i_b, i_h, seen_q, o_kv, n_kv, applies, mask, score, MASK, SCORE, MASKED)
    else:
        b_s = final_scores_t(b_raw, scale, i_b, i_h, seen_q, o_kv, n_kv, applies, mask, score, MASK, SCORE, MASKED)
    if MASKED and SCORE is not None:  # dq_program past the end have no lse to keep their scores small
        b_s = tl.where((o_q < n_q)[None, :], b_s, float("-inf"))
    b_s = b_s * scale[1]
    if FOLDED and DSCORE is not None:
        b_s = add_shift(b_s, b_w, p_shift, first, n_left, M, UPCAST, MASKED)
    if not FOLDED:
        b_s -= lse_base2(tl.load(p_lse + o_q, mask=o_q < n_q, other=0.0))[None, :]
    b_p = tl.exp2(b_s)
    b_dp = dot_rows_bwd(b_v, b_do, PRECISION)
    b_pd = b_p
    if DROPOUT:
        keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q[None, :], o_kv[:, None])
        b_pd = tl.where(keep, b_p * keep_scale, 0.0)
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    if FOLDED:
        b_dp = add_shift(b_dp, b_w, p_shift + SHIFT_TERMS, first, n_left, M, UPCAST, MASKED)
    else:
        b_dp -= tl.load(p_delta + o_q, mask=o_q < n_q, other=0.0)[None, :]
    b_ds = b_p * b_dp
    if DSCORE is not None:
        b_ds = b_ds * DSCORE(b_raw * scale[0], i_b, i_h, seen_q, tl.minimum(o_kv, n_kv - 1)[:, None], score[0], score[1], score[2], score[3])
        if MASKED:  # where the mask forbids, a score may well have no derivative
            b_ds = tl.where(b_s != float("-inf"), b_ds, 0.0)
    b_dv = tl.dot(b_pd.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    b_ds = b_ds.to(b_q.dtype)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
    if ATOMIC_DQ is not None:
        add_dq(p_sum + first.to(tl.uint32) * D + dq_sum_order(D, M), tl.dot(tl.trans(b_k), b_ds, input_precision=PRECISION), ATOMIC_DQ)
    return b_dk, b_dv


@triton.jit
def add_dq(p, b_x, ATOMIC_DQ: tl.constexpr):
    """Adds a share of dQ^T [D, M] to its sums. "red": every thread adds what it holds, which is right where no two hold the same element; the build
    sees to that (build.held_once), and takes "any" instead, which costs a way through shared memory."""
    if ATOMIC_DQ == "red":
        red_add(p, b_x)
    else:
        tl.atomic_add(p, b_x, sem="relaxed")


@triton.jit
def dq_sum_order(D: tl.constexpr, M: tl.constexpr):
    """Where the sums of dQ^T [D, M] lie: blocks of 8 x 8, in which those that the 32 threads of a warp hold after a product follow each other."""
    o_d, o_m = tl.arange(0, D)[:, None], tl.arange(0, M)[None, :]
    return ((o_m // 8 * (D // 8) + o_d // 8) * 64 + o_m % 2 * 32 + o_d % 8 * 4 + o_m % 8 // 2).to(tl.uint32)


# -- dQ --------------------------------------------------------------------------------------------------------------


@triton.jit
def dq_program(
    pid,
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_dq,
    p_seed,
    capture_grads,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dq,
    tiles,
    s_tiles,
    n_tiles,
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
    SCATTER: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """dQ of one query tile; on the way, the bwd of captured tensors."""
    i_bh, i_tile = pid // n_tiles, pid % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    row = i_b * s_tiles[0] + i_h * s_tiles[1]
    if MAPPED:
        i_tile = tl.load(tiles[0] + row + i_tile)
        row += i_tile
    first = i_tile * M
    n_left = n_q - i_tile * M
    o_row = tl.arange(0, M)
    o_q = i_tile * M + o_row
    b_q = load_rows(p_q + i_b * s_q[0] + i_h * s_q[1] + first * s_q[2], s_q, n_left, M, D, D_TRUE)
    b_do = load_rows(p_do + i_b * s_do[0] + i_h * s_do[1] + first * s_do[2], s_do, n_left, M, DV, DV_TRUE)
    if UPCAST:
        b_q, b_do = b_q.to(tl.float32), b_do.to(tl.float32)
    o_bh = i_bh.to(tl.int64) * n_q + first
    b_lse = lse_base2(tl.load(p_lse + o_bh + o_row, mask=o_row < n_left, other=float("inf")))
    b_delta = tl.load(p_delta + o_bh + o_row, mask=o_row < n_left, other=0.0)
    p_k += i_b * s_k[0] + (i_h // ratio) * s_k[1]
    p_v += i_b * s_v[0] + (i_h // ratio) * s_v[1]
    b_dq = dq_tiles(
        b_q,
        b_do,
        b_lse,
        b_delta,
        p_k,
        p_v,
        s_k,
        s_v,
        p_seed,
        capture_grads,
        tiles,
        row,
        i_b,
        i_h,
        o_q,
        n_q,
        n_kv,
        scale,
        keep_scale,
        threshold,
        mask,
        score,
        MASK,
        SCORE,
        DSCORE,
        SCATTER,
        MAPPED,
        GIVEN,
        DROPOUT,
        M,
        N,
        D,
        DV,
        D_TRUE,
        DV_TRUE,
        PRECISION,
        UPCAST,
        STAGES,
        MASKED_STAGES,
    )
    p_dq += i_b * s_dq[0] + i_h * s_dq[1]
    store_rows(p_dq + first * s_dq[2], s_dq, b_dq * scale[2], n_left, M, D, D_TRUE)
    if tl.max(tl.where(tl.abs(b_dq) < float("inf"), 0, 1), None) > 0:  # has_nonfinite(b_dq), as Triton 3.6 can compile it for Blackwell
        o_bh -= first
        dq_rows(
            p_q + i_b * s_q[0] + i_h * s_q[1],
            p_k,
            p_v,
            p_do + i_b * s_do[0] + i_h * s_do[1],
            p_lse + o_bh,
            p_delta + o_bh,
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
            MASK,
            SCORE,
            DSCORE,
            MAPPED,
            GIVEN,
            DROPOUT,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
        )


@triton.jit
def dq_tiles(
    b_q,
    b_do,
    b_lse,
    b_delta,
    p_k,
    p_v,
    s_k,
    s_v,
    p_seed,
    capture_grads,
    tiles,
    row,
    i_b,
    i_h,
    o_q,
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
    SCATTER: tl.constexpr,
    MAPPED: tl.constexpr,
    GIVEN: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):
    """dQ / scale of the query tile, summed over its key tiles."""
    b_dq = tl.zeros([M, D], tl.float32)
    if MAPPED:
        first, last = full_runs(tiles, row)
        for run in range(first, last):
            start, stop = run_of(tiles, run)
            for i_kv in tl.range(start, stop, num_stages=STAGES):
                b_dq = dq_tile(
                    b_q,
                    b_do,
                    b_lse,
                    b_delta,
                    b_dq,
                    p_k,
                    p_v,
                    s_k,
                    s_v,
                    p_seed,
                    capture_grads,
                    i_b,
                    i_h,
                    o_q,
                    i_kv,
                    n_q,
                    n_kv,
                    -1,
                    scale,
                    keep_scale,
                    threshold,
                    mask,
                    score,
                    MASK,
                    SCORE,
                    DSCORE,
                    SCATTER,
                    False,
                    DROPOUT,
                    M,
                    N,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                    PRECISION,
                    UPCAST,
                )
        first, last = masked_runs(tiles, row)
        for run in range(first, last):
            start, stop = run_of(tiles, run)
            applies = mask_applies(tiles, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=MASKED_STAGES):
                b_dq = dq_tile(
                    b_q,
                    b_do,
                    b_lse,
                    b_delta,
                    b_dq,
                    p_k,
                    p_v,
                    s_k,
                    s_v,
                    p_seed,
                    capture_grads,
                    i_b,
                    i_h,
                    o_q,
                    i_kv,
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
                    SCATTER,
                    True,
                    DROPOUT,
                    M,
                    N,
                    D,
                    DV,
                    D_TRUE,
                    DV_TRUE,
                    PRECISION,
                    UPCAST,
                )
    else:
        for i_kv in tl.range(0, n_kv // N, num_stages=STAGES):
            b_dq = dq_tile(
                b_q,
                b_do,
                b_lse,
                b_delta,
                b_dq,
                p_k,
                p_v,
                s_k,
                s_v,
                p_seed,
                capture_grads,
                i_b,
                i_h,
                o_q,
                i_kv,
                n_q,
                n_kv,
                -1,
                scale,
                keep_scale,
                threshold,
                mask,
                score,
                None,
                SCORE,
                DSCORE,
                SCATTER,
                False,
                DROPOUT,
                M,
                N,
                D,
                DV,
                D_TRUE,
                DV_TRUE,
                PRECISION,
                UPCAST,
            )
        if n_kv % N != 0:
            b_dq = dq_tile(
                b_q,
                b_do,
                b_lse,
                b_delta,
                b_dq,
                p_k,
                p_v,
                s_k,
                s_v,
                p_seed,
                capture_grads,
                i_b,
                i_h,
                o_q,
                n_kv // N,
                n_q,
                n_kv,
                -1,
                scale,
                keep_scale,
                threshold,
                mask,
                score,
                None,
                SCORE,
                DSCORE,
                SCATTER,
                True,
                DROPOUT,
                M,
                N,
                D,
                DV,
                D_TRUE,
                DV_TRUE,
                PRECISION,
                UPCAST,
            )
    return b_dq


@triton.jit
def dq_tile(
    b_q,
    b_do,
    b_lse,
    b_delta,
    b_dq,
    p_k,
    p_v,
    s_k,
    s_v,
    p_seed,
    capture_grads,
    i_b,
    i_h,
    o_q,
    i_kv,
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
    SCATTER: tl.constexpr,
    MASKED: tl.constexpr,
    DROPOUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One key tile's share of dQ."""
    n_left = n_kv - i_kv * N
    first = i_kv * N
    b_k = load_rows(p_k + first * s_k[2], s_k, n_left, N, D, D_TRUE, MASKED)
    b_v = load_rows(p_v + first * s_v[2], s_v, n_left, N, DV, DV_TRUE, MASKED)
    if UPCAST:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    o_kv = i_kv * N + tl.arange(0, N)
    b_raw = dot_rows_bwd(b_q, b_k, PRECISION)  # [M, N]
    i_q = tl.minimum(o_q, n_q - 1)[:, None]
    b_s = final_scores(b_raw, scale, i_b, i_h, i_q, o_kv, n_kv, applies, mask, score, MASK, SCORE, MASKED)
    b_p = tl.exp2(b_s * scale[1] - b_lse[:, None])
    b_dp = dot_rows_bwd(b_do, b_v, PRECISION)
    if DROPOUT:
        keep = dropout_keep(p_seed, threshold, i_b, i_h, o_q[:, None], o_kv[None, :])
        b_dp = tl.where(keep, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    seen_kv = tl.minimum(o_kv, n_kv - 1)[None, :]
    if SCATTER is not None:
        attended = (b_s != float("-inf")) & (o_q < n_q)[:, None]
        b_ds = tl.where(attended, b_ds, 0.0)
        SCATTER(b_ds, attended, b_raw * scale[0], i_b, i_h, i_q, seen_kv, score[0], score[1], score[2], score[3], capture_grads)
    if DSCORE is not None:
        b_ds = b_ds * DSCORE(b_raw * scale[0], i_b, i_h, i_q, seen_kv, score[0], score[1], score[2], score[3])
        if MASKED:
            b_ds = tl.where(b_s != float("-inf"), b_ds, 0.0)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)


@triton.jit
def dq_postprocess(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_dq,
    p_sum,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dq,
    tiles,
    s_tiles,
    n_tiles,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_padded,
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
    """dQ of a query tile from the sums that key programs made."""
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    p_dq += i_b * s_dq[0] + i_h * s_dq[1]
    at_once: tl.constexpr = 32 if M >= 32 else M
    b_bad = tl.zeros([at_once * D], tl.int32)
    for part in tl.static_range(M // at_once):
        first = i_tile * M + part * at_once
        b_x = tl.load(p_sum + (i_bh.to(tl.int64) * n_padded + first) * D + tl.arange(0, at_once * D)) * scale[2]
        b_bad |= tl.where(tl.abs(b_x) < float("inf"), 0, 1)  # not of the rows below: Triton 3.6 reduces such permuted ones wrongly
        b_rows = b_x.reshape(at_once // 8, D // 8, 2, 8, 4).permute(0, 4, 2, 1, 3).reshape(at_once, D)  # see dq_sum_order
        store_rows(p_dq + first * s_dq[2], s_dq, b_rows, n_q - first, at_once, D, D_TRUE)
    if tl.max(b_bad, 0) > 0:
        o_bh = i_bh.to(tl.int64) * n_q
        dq_rows(
            p_q + i_b * s_q[0] + i_h * s_q[1],
            p_k + i_b * s_k[0] + (i_h // ratio) * s_k[1],
            p_v + i_b * s_v[0] + (i_h // ratio) * s_v[1],
            p_do + i_b * s_do[0] + i_h * s_do[1],
            p_lse + o_bh,
            p_delta + o_bh,
            p_dq,
            p_seed,
            s_q,
            s_k,
            s_v,
            s_do,
            s_dq,
            tiles,
            i_b * s_tiles[0] + i_h * s_tiles[1] + i_tile,
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
            MASK,
            SCORE,
            DSCORE,
            MAPPED,
            GIVEN,
            DROPOUT,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
        )


# -- shared ----------------------------------------------------------------------------------------------------------


@triton.jit
def final_scores_t(b_s, scale, i_b, i_h, i_q, o_kv, n_kv, applies, mask, score, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr):
    """final_scores of transposed [N dkdv_program, M dq_program] blocks. Keys past the end need no mask: their own sums are not stored, and see FAR."""
    i_kv = tl.minimum(o_kv, n_kv - 1)[:, None]
    if SCORE is not None:
        b_s = SCORE(b_s * scale[0], i_b, i_h, i_q, i_kv, score[0], score[1], score[2], score[3])
    if MASKED and MASK is not None:
        b_s = tl.where((MASK(i_b, i_h, i_q, i_kv, mask[0], mask[1], mask[2], mask[3]) & applies) >= 0, b_s, float("-inf"))
    return b_s
