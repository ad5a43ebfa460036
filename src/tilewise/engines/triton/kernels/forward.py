"""The forward kernel: online softmax over the key tiles of a query tile."""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import LN2, chunk_range, finalize_rows, fwd_rows
from tilewise.engines.gpu.kernels.primitives import (
    accumulate_pv,
    all_runs,
    apply_dropout,
    dot_rows,
    final_scores,
    full_runs,
    has_nonfinite,
    kv_head,
    load_kv,
    load_rows,
    mask_applies,
    masked_runs,
    overflowed,
    run_of,
    store_rows,
)


@triton.jit
def fwd(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """out, lse and the maximum score of one query tile of one (batch, head).

    Programs of a head start with the longest rows of the tile map, so that none of them finishes long after the others. A program visits full tiles
    first, in a loop without mask or bounds, then the others: both loops stay small and are pipelined on their own. With C.anchored it is the other way
    round (attend_anchored). A NaN or infinity at a masked key spoils a tile's P V (0 * NaN is NaN); a program that finds its result non-finite, or sums
    out of range, recomputes it.
    """
    M: tl.constexpr = C.value.m
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    MAPPED: tl.constexpr = C.value.mapped
    SINKS: tl.constexpr = C.value.sinks
    PAGE: tl.constexpr = C.value.page
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    pid = tl.program_id(0)
    i_bh, i_tile = pid // args.n_tiles, pid % args.n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    row = i_b * args.schedule.strides[0] + i_h * args.schedule.strides[1]
    if MAPPED:
        i_tile = tl.load(args.schedule.order + row + i_tile)
        row += i_tile
    o_q = i_tile * M + tl.arange(0, M)
    first = i_tile * M
    p_q = tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1]
    b_q = load_rows(p_q + first * args.strides.q[2], args.strides.q, n_q - i_tile * M, M, D, D_TRUE)  # [M, D]
    if C.value.upcast:
        b_q = b_q.to(tl.float32)
    p_k = kv_head(tensors.k, args.strides.k, i_b, i_h // ratio, PAGE)
    p_v = kv_head(tensors.v, args.strides.v, i_b, i_h // ratio, PAGE)
    p_out = tensors.out + (i_b * args.strides.out[0] + i_h * args.strides.out[1])
    if C.value.anchored:
        b_m, b_l, b_acc = attend_anchored(b_q, (p_k, p_v), (i_b, i_h), o_q, row, tensors, args, MASK, SCORE, C)
    else:
        b_m, b_l, b_acc = attend_tiles(b_q, (p_k, p_v), (i_b, i_h), o_q, row, tensors, args, MASK, SCORE, C)
    is_unsound = has_nonfinite(b_acc) | overflowed(b_m, b_l)
    o_row = i_bh.to(tl.int64) * n_q + o_q
    if C.value.anchored:
        if SINKS:
            b_m, b_l, b_acc = with_sums_of_one(b_m, b_l, b_acc)
    else:
        tl.store(tensors.max_score + o_row, b_m * LN2, mask=o_q < n_q)
    b_out, b_lse = finalize_rows(b_m, b_l, b_acc, tensors.sinks, i_h, args.mods.keep_scale, SINKS)
    tl.store(tensors.lse + o_row, b_lse, mask=o_q < n_q)
    store_rows(p_out + first * args.strides.out[2], args.strides.out, b_out, n_q - i_tile * M, M, DV, DV_TRUE)
    if is_unsound:
        if C.value.anchored:
            fwd_again((p_q, p_k, p_v, p_out), row, (i_b, i_h), i_bh, first, M, tensors, args, MASK, SCORE, C)
        else:
            fwd_rows((p_q, p_k, p_v, p_out), row, (i_b, i_h), i_bh, first, tl.minimum(first + M, n_q), tensors, args, MASK, SCORE, C)


@triton.jit
def attend_tiles(b_q, kv, bh, o_q, row, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """Maximum [M], sum [M] and weighted values [M, DV] of the query tile over all its key tiles: first the full ones, then the others."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    DV: tl.constexpr = C.value.dv
    STAGES: tl.constexpr = C.value.stages
    MASKED_STAGES: tl.constexpr = C.value.masked_stages
    GIVEN: tl.constexpr = C.value.given
    n_kv = args.shape.n_kv
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, DV], tl.float32)
    if C.value.mapped:
        first, last = full_runs(args.schedule, row)
        for run in range(first, last):
            start, stop = run_of(args.schedule, run)
            for i_kv in tl.range(start, stop, num_stages=STAGES):
                b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, -1, tensors, args, MASK, SCORE, False, True, C)
        first, last = masked_runs(args.schedule, row)
        for run in range(first, last):
            start, stop = run_of(args.schedule, run)
            applies = mask_applies(args.schedule, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=MASKED_STAGES):
                b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, applies, tensors, args, MASK, SCORE, True, True, C)
    else:
        for i_kv in tl.range(0, n_kv // N, num_stages=STAGES):
            b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, -1, tensors, args, None, SCORE, False, True, C)
        if n_kv % N != 0:
            b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, n_kv // N, -1, tensors, args, None, SCORE, True, True, C)
    return b_m, b_l, b_acc


@triton.jit
def attend_anchored(b_q, kv, bh, o_q, row, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """The same with maxima in masked tiles alone, which come first. Full tiles keep them as anchors (docs/kernels/softmax.md): weights may exceed 1, and
    nothing is rescaled. Rows without one take that of the first full tile."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    DV: tl.constexpr = C.value.dv
    STAGES: tl.constexpr = C.value.stages
    MASKED_STAGES: tl.constexpr = C.value.masked_stages
    GIVEN: tl.constexpr = C.value.given
    n_kv = args.shape.n_kv
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, DV], tl.float32)
    if C.value.mapped:
        first, last = masked_runs(args.schedule, row)
        for run in range(first, last):
            start, stop = run_of(args.schedule, run)
            applies = mask_applies(args.schedule, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=MASKED_STAGES):
                b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, applies, tensors, args, MASK, SCORE, True, True, C)
        first, last = full_runs(args.schedule, row)
        if first < last:
            start, stop = run_of(args.schedule, first)
            b_m = anchors((b_q, o_q), b_m, kv[0], bh, start, args, MASK, SCORE, C)
        for run in range(first, last):
            start, stop = run_of(args.schedule, run)
            for i_kv in tl.range(start, stop, num_stages=STAGES):
                b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, -1, tensors, args, MASK, SCORE, False, False, C)
    else:
        if n_kv % N != 0:
            b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, n_kv // N, -1, tensors, args, None, SCORE, True, True, C)
        if n_kv >= N:
            b_m = anchors((b_q, o_q), b_m, kv[0], bh, 0, args, None, SCORE, C)
        for i_kv in tl.range(0, n_kv // N, num_stages=STAGES):
            b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), kv, bh, i_kv, -1, tensors, args, None, SCORE, False, False, C)
    return b_m, b_l, b_acc


@triton.jit
def anchors(queries, b_m, p_k, bh, i_kv, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """The rows' maxima [M], in base 2; those of full key tile i_kv for rows that have none, and 0 where that has none either."""
    if tl.min(b_m, 0) == float("-inf"):
        b_s = tile_scores(queries, p_k, bh, i_kv, -1, args, MASK, SCORE, False, C)
        b_m = tl.where(b_m == float("-inf"), tl.max(b_s, 1) * args.mods.scale[1], b_m)
        b_m = tl.where(b_m == float("-inf"), 0.0, b_m)
    return b_m


@triton.jit
def attend_tile(
    queries, state, kv, bh, i_kv, applies, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, C: tl.constexpr
):
    """One key tile of the online softmax: P = 2^(s - max), l = l decay + sum P, acc = acc decay + P V. MASKED: check the mask and the end. EXACT: follow the
    maximum; otherwise it is an anchor, which is kept, and there is no decay.
    `queries` are q [M, D] and their positions [M], the state is maximum [M], sum l [M] and weighted values acc [M, DV]."""
    N: tl.constexpr = C.value.n
    DV: tl.constexpr = C.value.dv
    DV_TRUE: tl.constexpr = C.value.dv_true
    PRECISION: tl.constexpr = C.value.precision
    PAGE: tl.constexpr = C.value.page
    b_q, o_q = queries
    b_m, b_l, b_acc = state
    b_s = tile_scores(queries, kv[0], bh, i_kv, applies, args, MASK, SCORE, MASKED, C)
    c = args.mods.scale[1]
    b_base = b_m
    if EXACT:
        b_top = tl.maximum(b_m, tl.max(b_s, 1) * c)
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)  # a row that has attended to nothing yet subtracts 0: its weights are 0
    b_p = tl.exp2(b_s * c - b_base[:, None])  # [M, N]
    b_sum = tl.sum(b_p, 1)
    if C.value.dropout:
        b_p = apply_dropout(b_p, tensors.seed, args, bh, o_q[:, None], (i_kv * N + tl.arange(0, N))[None, :], C)
    narrow: tl.constexpr = (MASK is None) and (C.value.d <= 128)
    b_v = load_kv(kv[1], args.strides.v, i_kv * N, args.shape.n_kv, bh[0], args.pages, N, DV, DV_TRUE, PAGE, MASKED, narrow).to(b_q.dtype)  # [N, DV]
    if EXACT:
        b_decay = tl.exp2(b_m - b_base)
        return b_top, b_l * b_decay + b_sum, accumulate_pv(b_acc, b_decay, b_p, b_v, PRECISION)
    else:
        return b_m, b_l + b_sum, tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)


@triton.jit
def tile_scores(queries, p_k, bh, i_kv, applies, args, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr):
    """Final scores [M, N] of one key tile, still to be multiplied by scale[1]."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    D_TRUE: tl.constexpr = C.value.d_true
    PRECISION: tl.constexpr = C.value.precision
    PAGE: tl.constexpr = C.value.page
    b_q, o_q = queries
    n_q, n_kv = args.shape.n_q, args.shape.n_kv
    narrow: tl.constexpr = (MASK is None) and (D <= 128)  # on an H200 10 % faster; with a mask 5 % slower, at D256 3 %
    b_k = load_kv(p_k, args.strides.k, i_kv * N, n_kv, bh[0], args.pages, N, D, D_TRUE, PAGE, MASKED, narrow).to(b_q.dtype)  # [N, D]
    b_s = dot_rows(b_q, b_k, PRECISION)  # S = Q K^T [M, N]
    o_kv = i_kv * N + tl.arange(0, N)
    i_q = tl.minimum(o_q, n_q - 1)[:, None]  # what masks and scores see: never past the end
    return final_scores(b_s, bh, i_q, o_kv, n_kv, applies, args.mods, MASK, SCORE, MASKED)


# -- rows that are computed again ------------------------------------------------------------------------------------------


@triton.jit
def with_sums_of_one(b_m, b_l, b_acc):
    """The same rows as m + log2 l, 1 and acc / l: sums of any size can then be compared with a sink's weight."""
    return b_m + tl.log2(b_l), tl.full(b_l.shape, 1.0, tl.float32), b_acc / tl.where(b_l == 0.0, 1.0, b_l)[:, None]


@triton.jit
def fwd_again(head, row, bh, i_bh, first, ROWS: tl.constexpr, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """out, lse and the maximum of ROWS queries from `first` on with maxima in every tile, written over what was written before; row by row, if that is not
    finite either. `head` are q, k, v and out of this head. Full tiles go through the loop of masked ones, so that there is less to compile."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    MAPPED: tl.constexpr = C.value.mapped
    GIVEN: tl.constexpr = C.value.given
    SINKS: tl.constexpr = C.value.sinks
    n_q = args.shape.n_q
    o_q = first + tl.arange(0, ROWS)
    b_q = load_rows(head[0] + first * args.strides.q[2], args.strides.q, n_q - first, ROWS, D, D_TRUE)  # [ROWS, D]
    if C.value.upcast:
        b_q = b_q.to(tl.float32)
    b_m = tl.full([ROWS], float("-inf"), tl.float32)
    b_l = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, DV], tl.float32)
    first_run, last_run = all_runs(args.schedule, row, MAPPED)
    for run in range(first_run, last_run):
        start, stop = chunk_range(args.schedule, run, args.shape.n_kv, MAPPED, N, N)
        applies = mask_applies(args.schedule, row, run, GIVEN)
        for i_kv in tl.range(start, stop, num_stages=1):
            b_m, b_l, b_acc = attend_tile((b_q, o_q), (b_m, b_l, b_acc), (head[1], head[2]), bh, i_kv, applies, tensors, args, MASK, SCORE, True, True, C)
    b_out, b_lse = finalize_rows(b_m, b_l, b_acc, tensors.sinks, bh[1], args.mods.keep_scale, SINKS)
    o_row = i_bh.to(tl.int64) * n_q + o_q
    tl.store(tensors.max_score + o_row, b_m * LN2, mask=o_q < n_q)
    tl.store(tensors.lse + o_row, b_lse, mask=o_q < n_q)
    store_rows(head[3] + first * args.strides.out[2], args.strides.out, b_out, n_q - first, ROWS, DV, DV_TRUE)
    if has_nonfinite(b_acc) | overflowed(b_m, b_l):
        fwd_rows(head, row, bh, i_bh, first, tl.minimum(first + ROWS, n_q), tensors, args, MASK, SCORE, C)
