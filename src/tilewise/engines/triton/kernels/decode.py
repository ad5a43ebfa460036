"""Decoding: a few query rows over a long stretch of keys, which is split among many programs.

The query heads that share a key head are packed into the rows of one tile, so each key is read once for all of them. There is
no tile map: each program first asks the mask which of its key tiles anyone attends to, then reads only from the first to
the last of those. A cache that grows within its buffer therefore changes nothing on the host.
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import CHUNK, row_step
from tilewise.engines.gpu.kernels.primitives import LOG2E, accumulate_pv, apply_dropout, dot_rows, final_scores, has_nonfinite, load_rows, overflowed


@triton.jit
def decode_split(
    p_q,
    p_k,
    p_v,
    p_acc,
    p_m,
    p_l,
    p_seed,
    s_q,
    s_k,
    s_v,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_splits,
    per_split,
    scale,
    threshold,
    mask,
    score,  # per_split: key tiles of a program
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
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
):
    """Maximum, sum and weighted values of the packed rows over one split of the keys."""
    pid = tl.program_id(0)
    i_bh, i_split = pid // n_splits, pid % n_splits
    n_kv_heads = n_heads // ratio
    i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
    o_row = tl.arange(0, M)
    inside = o_row < ratio * n_q
    row = tl.minimum(o_row, ratio * n_q - 1)  # rows past the end repeat the last one and are not stored
    i_h = (i_hk * ratio + row // n_q)[:, None]
    i_q = (row % n_q)[:, None]
    o_d = tl.arange(0, D)
    b_q = tl.load(p_q + i_b * s_q[0] + i_h * s_q[1] + i_q * s_q[2] + o_d[None, :] * s_q[3], mask=o_d[None, :] < D_TRUE, other=0.0)
    if UPCAST:
        b_q = b_q.to(tl.float32)
    p_k += i_b * s_k[0] + i_hk * s_k[1]
    p_v += i_b * s_v[0] + i_hk * s_v[1]

    first = i_split * per_split
    last = tl.minimum(first + per_split, (n_kv + N - 1) // N)
    if MASK is not None:
        lowest, highest = last, first
        for i_kv in range(first, last):
            o_kv = i_kv * N + tl.arange(0, N)
            allowed = MASK(i_b, i_h, i_q, tl.minimum(o_kv, n_kv - 1)[None, :], mask[0], mask[1], mask[2], mask[3])
            anyone = tl.max(tl.max(allowed + tl.zeros([M, N], tl.int32), 1), 0) >= 0
            lowest = tl.where(anyone, tl.minimum(lowest, i_kv), lowest)
            highest = tl.where(anyone, i_kv + 1, highest)
        first, last = lowest, highest

    b_m, b_l, b_acc = split_tiles(
        b_q,
        p_k,
        p_v,
        s_k,
        s_v,
        p_seed,
        i_b,
        i_h,
        i_q,
        first,
        last,
        n_kv,
        scale,
        threshold,
        mask,
        score,
        MASK,
        SCORE,
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
    )
    # [batch * kv heads, splits, rows]
    o_out = (i_bh * n_splits + i_split) * (ratio * n_q) + o_row
    tl.store(p_m + o_out, b_m, mask=inside)
    tl.store(p_l + o_out, b_l, mask=inside)
    o_dv = tl.arange(0, DV)
    tl.store(p_acc + o_out[:, None].to(tl.int64) * DV_TRUE + o_dv[None, :], b_acc, mask=inside[:, None] & (o_dv[None, :] < DV_TRUE))
    if has_nonfinite(b_acc) | overflowed(b_m, b_l):
        split_rows(
            p_q,
            p_k,
            p_v,
            p_acc,
            p_m,
            p_l,
            p_seed,
            s_q,
            s_k,
            s_v,
            (i_bh * n_splits + i_split) * (ratio * n_q),
            i_b,
            i_hk * ratio,
            first,
            last,
            ratio,
            n_q,
            n_kv,
            scale,
            threshold,
            mask,
            score,
            MASK,
            SCORE,
            DROPOUT,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
        )


@triton.jit
def split_rows(
    p_q,
    p_k,
    p_v,
    p_acc,
    p_m,
    p_l,
    p_seed,
    s_q,
    s_k,
    s_v,
    o_out,
    i_b,
    i_head,
    first,
    last,
    ratio,
    n_q,
    n_kv,
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
    """The packed rows again, one at a time and carefully."""
    for row in range(0, ratio * n_q):
        i_h, i_q = i_head + row // n_q, row % n_q
        b_q = load_rows(p_q + i_b * s_q[0] + i_h * s_q[1] + i_q * s_q[2], s_q, 1, 1, D, D_TRUE).to(tl.float32)
        b_m = tl.full([1], float("-inf"), tl.float32)
        b_l = tl.zeros([1], tl.float32)
        b_acc = tl.zeros([1, DV], tl.float32)
        for i_kv in tl.range(first * (N // CHUNK), last * (N // CHUNK), num_stages=1):
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
                i_q + tl.arange(0, 1),
                i_kv,
                n_kv,
                -1,
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
        o_row = o_out + row + tl.arange(0, 1)
        tl.store(p_m + o_row, b_m)
        tl.store(p_l + o_row, b_l)
        o_dv = tl.arange(0, DV)
        tl.store(p_acc + o_row[:, None].to(tl.int64) * DV_TRUE + o_dv[None, :], b_acc, mask=o_dv[None, :] < DV_TRUE)


@triton.jit
def split_tiles(
    b_q,
    p_k,
    p_v,
    s_k,
    s_v,
    p_seed,
    i_b,
    i_h,
    i_q,
    first,
    last,
    n_kv,
    scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
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
):
    """The tiles from `first` to `last`, of which only the very last key tile may reach past the end."""
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, DV], tl.float32)
    whole = tl.minimum(last, n_kv // N)
    for i_kv in tl.range(first, whole, num_stages=STAGES):
        b_m, b_l, b_acc = split_tile(
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
            i_q,
            i_kv,
            n_kv,
            scale,
            threshold,
            mask,
            score,
            MASK,
            SCORE,
            DROPOUT,
            False,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
            PRECISION,
            UPCAST,
        )
    for i_kv in tl.range(tl.maximum(first, whole), last, num_stages=1):
        b_m, b_l, b_acc = split_tile(
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
            i_q,
            i_kv,
            n_kv,
            scale,
            threshold,
            mask,
            score,
            MASK,
            SCORE,
            DROPOUT,
            True,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
            PRECISION,
            UPCAST,
        )
    return b_m, b_l, b_acc


@triton.jit
def split_tile(
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
    i_q,
    i_kv,
    n_kv,
    scale,
    threshold,
    mask,
    score,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BOUNDED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One key tile."""
    n_left = n_kv - i_kv * N
    o_kv = i_kv * N + tl.arange(0, N)
    b_k = load_rows(p_k + i_kv * N * s_k[2], s_k, n_left, N, D, D_TRUE, BOUNDED)
    b_v = load_rows(p_v + i_kv * N * s_v[2], s_v, n_left, N, DV, DV_TRUE, BOUNDED)
    if UPCAST:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    b_s = dot_rows(b_q, b_k, PRECISION)
    b_s = final_scores(b_s, scale, i_b, i_h, i_q, o_kv, n_kv, -1, mask, score, MASK, SCORE, BOUNDED or MASK is not None)
    c = scale[1]
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * c)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = tl.exp2(b_s * c - b_base[:, None])
    b_decay = tl.exp2(b_m - b_base)
    b_l = b_l * b_decay + tl.sum(b_p, 1)
    if DROPOUT:
        b_p = apply_dropout(b_p, p_seed, threshold, i_b, i_h, i_q, o_kv[None, :])
    b_acc = accumulate_pv(b_acc, b_decay, b_p, b_v, PRECISION)
    return b_top, b_l, b_acc


@triton.jit
def decode_combine(
    p_acc,
    p_m,
    p_l,
    p_out,
    p_lse,
    p_max,
    p_sinks,
    s_out,
    n_heads,
    ratio,
    n_q,
    n_splits,
    keep_scale,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    DV: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """One output row from its splits."""
    pid = tl.program_id(0)
    n_rows = ratio * n_q
    i_bh, i_row = pid // n_rows, pid % n_rows
    n_kv_heads = n_heads // ratio
    i_b, i_h, i_q = i_bh // n_kv_heads, (i_bh % n_kv_heads) * ratio + i_row // n_q, i_row % n_q
    o_split = tl.arange(0, SPLITS)
    o_part = (i_bh * n_splits + o_split) * n_rows + i_row
    there = o_split < n_splits
    b_m = tl.load(p_m + o_part, mask=there, other=float("-inf"))
    b_l = tl.load(p_l + o_part, mask=there, other=0.0)
    highest = tl.max(b_m, 0)
    top = highest
    if SINKS:
        sink = tl.load(p_sinks + i_h).to(tl.float32) * LOG2E
        top = tl.maximum(highest, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    b_weight = tl.exp2(b_m - base)
    total = tl.sum(b_l * b_weight, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    o_d = tl.arange(0, DV)
    b_acc = tl.load(p_acc + o_part[:, None].to(tl.int64) * DV_TRUE + o_d[None, :], mask=there[:, None] & (o_d[None, :] < DV_TRUE), other=0.0)
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    b_out = tl.sum(b_acc * b_weight[:, None], 0) * (keep_scale / safe)
    o_lse = (i_b * n_heads + i_h) * n_q + i_q
    tl.store(p_max + o_lse, highest * 0.6931471805599453)
    tl.store(p_lse + o_lse, tl.where(nothing, float("-inf"), (base + tl.log2(safe)) * 0.6931471805599453))
    tl.store(p_out + i_b * s_out[0] + i_h * s_out[1] + i_q * s_out[2] + o_d * s_out[3], b_out.to(p_out.dtype.element_ty), mask=o_d < DV_TRUE)
