"""The backward kernels: `bwd_preprocess`, then `bwd`, and `dq_postprocess` where dQ is added up in memory.

P = exp(s - lse), dP = dropout(dO V^T), delta = dO . O - dlse, dS = P (dP - delta), dscore = dS * score'
dV = dropout(P)^T dO, dK = scale dscore^T Q, dQ = scale dscore K
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import dkdv_rows, dq_rows, lse_base2
from tilewise.engines.gpu.kernels.primitives import (
    dot_rows_bwd,
    dropout_keep_of,
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
from tilewise.engines.triton import config

# -- bwd_preprocess ---------------------------------------------------------------------------------------------------


@triton.jit
def bwd_preprocess(tensors, args, C: tl.constexpr):
    """delta = sum over the head dim of dO * O, less dlse, of M rows of one (batch, head).

    C.folded: also stores -lse / unit and -delta as 16-bit terms for `add_shift`, so that `bwd` need not split them in every tile. C.has_sums: also clears the
    sums of dQ, which reach past the last query.
    """
    M: tl.constexpr = C.value.m
    DV: tl.constexpr = C.value.dv
    DV_TRUE: tl.constexpr = C.value.dv_true
    n_heads, n_q, n_rows = args.n_heads, args.n_q, args.n_rows
    n_tiles = (n_rows + M - 1) // M
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    first = i_tile * M
    n_left = n_q - i_tile * M
    p_out = tensors.out + i_b * args.strides.out[0] + i_h * args.strides.out[1] + first * args.strides.out[2]
    b_out = load_rows(p_out, args.strides.out, n_left, M, DV, DV_TRUE).to(tl.float32)  # [M, DV]
    p_do = tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1] + first * args.strides.do[2]
    b_do = load_rows(p_do, args.strides.do, n_left, M, DV, DV_TRUE).to(tl.float32)  # [M, DV]
    o_row = i_bh.to(tl.int64) * n_q + i_tile * M + tl.arange(0, M)
    inside = tl.arange(0, M) < n_left
    b_delta = tl.sum(b_out * b_do, 1)  # [M]
    if C.value.has_dlse:
        b_delta -= tl.load(tensors.dlse + o_row, mask=inside, other=0.0)
    tl.store(tensors.delta + o_row, b_delta, mask=inside)
    if C.value.folded:
        b_lse = lse_base2(tl.load(tensors.lse + o_row, mask=inside, other=0.0))  # [M]
        store_shift(tensors.shift, o_row, inside, -b_lse / args.unit, 1.0)
        store_shift(tensors.shift + SHIFT_TERMS, o_row, inside, -b_delta, 0.0)
    if C.value.has_sums:
        D_SUM: tl.constexpr = C.value.d_sum
        o_sum = i_bh.to(tl.int64) * n_rows + first + tl.arange(0, M)
        tl.store(tensors.dq_sums + o_sum[:, None] * D_SUM + tl.arange(0, D_SUM)[None, :], tl.zeros([M, D_SUM], tl.float32))


# dkdv programs hold transposed scores [N keys, M queries] and need lse and delta of every query in every row, which would cost each thread loads and
# registers. A small product adds them instead: weights [N, 16] @ terms^T [16, M], with each number as the sum of three 16-bit terms, exact to 24 bits. A
# fourth term subtracts FAR from the scores of keys past the end, so that their P is 0: their k is 0 as well, and 0 * inf must not reach dQ.
FAR: tl.constexpr = tl.constexpr(60000.0)
SHIFT_TERMS: tl.constexpr = tl.constexpr(config.SHIFT_TERMS)


@triton.jit
def store_shift(p, o_row, inside, b_x, fourth):
    """x [M] as 1024 high + middle + low / 1024, and a fourth term, all in 16 bits: [M, SHIFT_TERMS], the rest 0."""
    dtype: tl.constexpr = p.dtype.element_ty
    b_high = (b_x / 1024).to(dtype)
    b_rest = tl.where(tl.abs(b_high.to(tl.float32)) < float("inf"), b_x - b_high.to(tl.float32) * 1024, 0.0)
    b_middle = b_rest.to(dtype)
    b_low = ((b_rest - b_middle.to(tl.float32)) * 1024).to(dtype)
    o_term = tl.arange(0, SHIFT_TERMS)[None, :]
    b_last = tl.where(o_term == 2, b_low[:, None], tl.where(o_term == 3, fourth, 0.0))
    b_terms = tl.where(o_term == 0, b_high[:, None], tl.where(o_term == 1, b_middle[:, None], b_last))
    tl.store(p + o_row[:, None] * (2 * SHIFT_TERMS) + o_term, b_terms.to(dtype), mask=inside[:, None])


@triton.jit
def shift_weights(o_kv, n_kv, dtype: tl.constexpr):
    """What `add_shift` multiplies the terms by [N, SHIFT_TERMS]: 1024, 1, 1 / 1024, and -FAR for keys past the end."""
    o_term = tl.arange(0, SHIFT_TERMS)[None, :]
    b_fourth = tl.where(o_kv < n_kv, 0.0, -FAR)[:, None]
    return tl.where(o_term == 0, 1024.0, tl.where(o_term == 1, 1.0, tl.where(o_term == 2, 1.0 / 1024, tl.where(o_term == 3, b_fourth, 0.0)))).to(dtype)


@triton.jit
def add_shift(b_x, b_weights, p_shift, first, n_left, M: tl.constexpr, UPCAST: tl.constexpr, BOUNDED: tl.constexpr):
    """x [N, M] plus each query's number: x + weights [N, SHIFT_TERMS] terms^T [SHIFT_TERMS, M]."""
    o_row = tl.arange(0, M)[:, None]
    p = p_shift + first.to(tl.uint32) * (2 * SHIFT_TERMS) + (o_row * (2 * SHIFT_TERMS) + tl.arange(0, SHIFT_TERMS)[None, :])
    if BOUNDED:
        b_terms = tl.load(p, mask=o_row < n_left, other=0.0)  # [M, SHIFT_TERMS]
    else:
        b_terms = tl.load(p)
    if UPCAST:
        b_weights, b_terms = b_weights.to(tl.float32), b_terms.to(tl.float32)
    return tl.dot(b_weights, tl.trans(b_terms), b_x)


# -- the gradients ---------------------------------------------------------------------------------------------------


@triton.jit
def bwd(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, SCATTER: tl.constexpr, C: tl.constexpr):
    """A program makes dK and dV of one key tile, or dQ of one query tile. Both kinds share one launch, so that neither waits for the other.

    There are two ways to dQ. Where its sums may be made in any order, dkdv programs add their share of dQ to memory (atomic_dq): five products a tile,
    and `dq_postprocess` makes dQ of the sums. Otherwise dq programs compute the scores again: seven products in all, but every sum stays in one
    program's registers and is written once, so that results are bitwise reproducible. dq programs also make the gradients of tensors that the score
    function captures, and add them atomically (as integers where that must be reproducible, see fixed_point.py).
    """
    DKDV: tl.constexpr = C.value.dkdv
    DQ: tl.constexpr = C.value.dq
    pid = tl.program_id(0)
    if C.value.has_dkdv:
        if pid < args.n_dkdv_programs:
            dkdv_program(pid, tensors, args, MASK, SCORE, DSCORE, DKDV)
    if C.value.dkdv.atomic_dq is None:
        if pid >= args.n_dkdv_programs:
            dq_program(pid - args.n_dkdv_programs, tensors, args, MASK, SCORE, DSCORE, SCATTER, DQ)


# -- dK and dV -------------------------------------------------------------------------------------------------------


@triton.jit
def dkdv_program(pid, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dK and dV of one key tile, over the query heads that share it. Scores are transposed, [N keys, M queries], so that P^T and dS^T are left operands."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    NARROW: tl.constexpr = C.value.atomic_dq is not None
    ratio, n_kv = args.shape.ratio, args.shape.n_kv
    n_kv_heads = args.shape.n_heads // ratio
    i_bh, i_place = pid // args.n_columns, pid % args.n_columns
    i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
    i_kv = i_place
    if C.value.mapped:
        i_kv = tl.load(args.columns.order + i_b * args.columns.strides[0] + i_hk * ratio * args.columns.strides[1] + i_place)
    first = i_kv * N
    n_left = n_kv - i_kv * N
    p_k = tensors.k + i_b * args.strides.k[0] + i_hk * args.strides.k[1] + first * args.strides.k[2]
    b_k = load_rows(p_k, args.strides.k, n_left, N, D, D_TRUE, True, NARROW)  # [N, D]
    p_v = tensors.v + i_b * args.strides.v[0] + i_hk * args.strides.v[1] + first * args.strides.v[2]
    b_v = load_rows(p_v, args.strides.v, n_left, N, DV, DV_TRUE, True, NARROW)  # [N, DV]
    if C.value.upcast:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    b_dk, b_dv = dkdv_tiles(b_k, b_v, i_b, i_hk, i_kv, tensors, args, MASK, SCORE, DSCORE, C)
    b_dk *= args.mods.scale[2]
    p_k = tensors.k + (i_b * args.strides.k[0] + i_hk * args.strides.k[1])
    p_v = tensors.v + (i_b * args.strides.v[0] + i_hk * args.strides.v[1])
    p_dk = tensors.dk + (i_b * args.strides.dk[0] + i_hk * args.strides.dk[1])
    p_dv = tensors.dv + (i_b * args.strides.dv[0] + i_hk * args.strides.dv[1])
    store_rows(p_dk + first * args.strides.dk[2], args.strides.dk, b_dk, n_left, N, D, D_TRUE)
    store_rows(p_dv + first * args.strides.dv[2], args.strides.dv, b_dv, n_left, N, DV, DV_TRUE)
    if has_nonfinite(b_dk) | has_nonfinite(b_dv):
        dkdv_rows((p_k, p_v, p_dk, p_dv), args.columns, i_b, i_hk, i_kv, tensors, args, MASK, SCORE, DSCORE, C)


@triton.jit
def dkdv_tiles(b_k, b_v, i_b, i_hk, i_kv, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dK / scale [N, D] and dV [N, DV] of the key tile, summed over its query tiles in all heads that share it: full tiles first, then the others."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    STAGES: tl.constexpr = C.value.stages
    MASKED_STAGES: tl.constexpr = C.value.masked_stages
    GIVEN: tl.constexpr = C.value.given
    n_heads, ratio, n_q, n_kv = args.shape
    o_kv = i_kv * N + tl.arange(0, N)
    b_w = shift_weights(o_kv, n_kv, tensors.q.dtype.element_ty)
    b_dk = tl.zeros([N, D], tl.float32)
    b_dv = tl.zeros([N, DV], tl.float32)
    for i_g in range(0, ratio):
        i_h = i_hk * ratio + i_g
        p_q = tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1]
        p_do = tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1]
        i_bh = (i_b * n_heads + i_h).to(tl.int64)
        p_lse, p_delta = tensors.lse + i_bh * n_q, tensors.delta + i_bh * n_q
        p_shift, p_sum = p_lse, p_lse  # stand-ins where there are none
        if C.value.folded:
            p_shift = tensors.shift + i_bh * n_q * (2 * SHIFT_TERMS)
        if C.value.atomic_dq is not None:
            p_sum = tensors.dq_sums[0] + i_bh * args.n_padded * D
        head = (p_q, p_do, p_lse, p_delta, p_shift, p_sum)
        if C.value.mapped:
            row = i_b * args.columns.strides[0] + i_h * args.columns.strides[1] + i_kv
            first, last = full_runs(args.columns, row)
            for run in range(first, last):
                start, stop = run_of(args.columns, run)
                for i_q in tl.range(start, stop, num_stages=STAGES):
                    b_dk, b_dv = dkdv_tile((b_k, b_v, b_w, o_kv), (b_dk, b_dv), head, (i_b, i_h), i_q, -1, tensors, args, MASK, SCORE, DSCORE, False, C)
            first, last = masked_runs(args.columns, row)
            for run in range(first, last):
                start, stop = run_of(args.columns, run)
                applies = mask_applies(args.columns, row, run, GIVEN)
                for i_q in tl.range(start, stop, num_stages=MASKED_STAGES):
                    b_dk, b_dv = dkdv_tile((b_k, b_v, b_w, o_kv), (b_dk, b_dv), head, (i_b, i_h), i_q, applies, tensors, args, MASK, SCORE, DSCORE, True, C)
        else:
            for i_q in tl.range(0, n_q // M, num_stages=STAGES):
                b_dk, b_dv = dkdv_tile((b_k, b_v, b_w, o_kv), (b_dk, b_dv), head, (i_b, i_h), i_q, -1, tensors, args, None, SCORE, DSCORE, False, C)
            if n_q % M != 0:
                b_dk, b_dv = dkdv_tile((b_k, b_v, b_w, o_kv), (b_dk, b_dv), head, (i_b, i_h), n_q // M, -1, tensors, args, None, SCORE, DSCORE, True, C)
    return b_dk, b_dv


@triton.jit
def dkdv_tile(
    keys, sums, head, bh, i_q, applies, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):
    """dK and dV with one query tile's contribution added; with atomic_dq, the tile's dQ is added to memory too.

    `keys` are k, v, the shift's weights and the keys' positions, `head` the pointers of this query head. MASKED tiles may reach past the last query,
    where q and dO are 0 and so is the contribution.
    """
    M: tl.constexpr = C.value.m
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    PRECISION: tl.constexpr = C.value.precision
    UPCAST: tl.constexpr = C.value.upcast
    FOLDED: tl.constexpr = C.value.folded
    ATOMIC_DQ: tl.constexpr = C.value.atomic_dq
    b_k, b_v, b_w, o_kv = keys
    b_dk, b_dv = sums
    p_q, p_do, p_lse, p_delta, p_shift, p_sum = head
    n_q, n_kv, mods = args.shape.n_q, args.shape.n_kv, args.mods
    first = i_q * M
    n_left = n_q - i_q * M
    o_q = i_q * M + tl.arange(0, M)
    b_q = load_rows(p_q + first * args.strides.q[2], args.strides.q, n_left, M, D, D_TRUE, MASKED, ATOMIC_DQ is not None)  # [M, D]
    b_do = load_rows(p_do + first * args.strides.do[2], args.strides.do, n_left, M, DV, DV_TRUE, MASKED, ATOMIC_DQ is not None)  # [M, DV]
    if UPCAST:
        b_q, b_do = b_q.to(tl.float32), b_do.to(tl.float32)
    b_raw = dot_rows_bwd(b_k, b_q, PRECISION)  # K Q^T [N, M]
    seen_q = tl.minimum(o_q, n_q - 1)[None, :]
    if FOLDED and DSCORE is None:  # no score, or one that only adds: the shift is -lse / scale, before it
        b_s = add_shift(b_raw, b_w, p_shift, first, n_left, M, UPCAST, MASKED)
        b_s = final_scores_t(b_s, bh, seen_q, o_kv, n_kv, applies, mods, MASK, SCORE, MASKED)
    else:
        b_s = final_scores_t(b_raw, bh, seen_q, o_kv, n_kv, applies, mods, MASK, SCORE, MASKED)
    if MASKED and SCORE is not None:  # queries past the end have no lse to keep their scores small
        b_s = tl.where((o_q < n_q)[None, :], b_s, float("-inf"))
    b_s = b_s * mods.scale[1]
    if FOLDED and DSCORE is not None:
        b_s = add_shift(b_s, b_w, p_shift, first, n_left, M, UPCAST, MASKED)
    if not FOLDED:
        b_s -= lse_base2(tl.load(p_lse + o_q, mask=o_q < n_q, other=0.0))[None, :]
    b_p = tl.exp2(b_s)  # P^T = 2^(s - lse) [N, M]
    b_dp = dot_rows_bwd(b_v, b_do, PRECISION)  # dP^T = V dO^T [N, M]
    b_pd = b_p
    if C.value.dropout:
        keep = dropout_keep_of(tensors.seed, args, bh, o_q[None, :], o_kv[:, None], C)
        b_pd = tl.where(keep, b_p * mods.keep_scale, 0.0)
        b_dp = tl.where(keep, b_dp * mods.keep_scale, 0.0)
    if FOLDED:
        b_dp = add_shift(b_dp, b_w, p_shift + SHIFT_TERMS, first, n_left, M, UPCAST, MASKED)
    else:
        b_dp -= tl.load(p_delta + o_q, mask=o_q < n_q, other=0.0)[None, :]
    b_ds = b_p * b_dp  # dS^T = P^T (dP^T - delta)
    if DSCORE is not None:
        i_kv = tl.minimum(o_kv, n_kv - 1)[:, None]
        b_ds = b_ds * DSCORE(b_raw * mods.scale[0], bh[0], bh[1], seen_q, i_kv, mods.score[0], mods.score[1], mods.score[2], mods.score[3])
        if MASKED:  # a masked score may have no finite derivative
            b_ds = tl.where(b_s != float("-inf"), b_ds, 0.0)
    b_dv = tl.dot(b_pd.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)  # dV += P^T dO [N, DV]
    b_ds = b_ds.to(b_q.dtype)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)  # dK += dscore^T Q [N, D]
    if ATOMIC_DQ is not None:  # dQ^T += K^T dscore^T [D, M]
        add_dq(p_sum + first.to(tl.uint32) * D + dq_sum_order(D, M), tl.dot(tl.trans(b_k), b_ds, input_precision=PRECISION), ATOMIC_DQ)
    return b_dk, b_dv


@triton.jit
def final_scores_t(b_s, bh, i_q, o_kv, n_kv, applies, mods, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr):
    """final_scores of a transposed block [N keys, M queries]. Keys past the end need no mask: their dK and dV are not stored, and for dQ see FAR."""
    i_kv = tl.minimum(o_kv, n_kv - 1)[:, None]
    if SCORE is not None:
        b_s = SCORE(b_s * mods.scale[0], bh[0], bh[1], i_q, i_kv, mods.score[0], mods.score[1], mods.score[2], mods.score[3])
    if MASKED and MASK is not None:
        b_s = tl.where((MASK(bh[0], bh[1], i_q, i_kv, mods.mask[0], mods.mask[1], mods.mask[2], mods.mask[3]) & applies) >= 0, b_s, float("-inf"))
    return b_s


@triton.jit
def add_dq(p, b_x, ATOMIC_DQ: tl.constexpr):
    """Adds a contribution to dQ^T [D, M] to its sums. "red": every thread adds the elements it holds, which is right where no two threads hold the same
    one. The compiler checks that (compiler.held_once) and otherwise takes "atomic_add", which costs a round trip through shared memory."""
    if ATOMIC_DQ == "red":
        red_add(p, b_x)
    else:
        tl.atomic_add(p, b_x, sem="relaxed")


@triton.jit
def dq_sum_order(D: tl.constexpr, M: tl.constexpr):
    """Where the sums of dQ^T [D, M] lie: in blocks of 8 x 8, such that the elements that a warp's 32 threads hold after a product are adjacent."""
    o_d, o_m = tl.arange(0, D)[:, None], tl.arange(0, M)[None, :]
    return ((o_m // 8 * (D // 8) + o_d // 8) * 64 + o_m % 2 * 32 + o_d % 8 * 4 + o_m % 8 // 2).to(tl.uint32)


# -- dQ --------------------------------------------------------------------------------------------------------------


@triton.jit
def dq_program(pid, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, SCATTER: tl.constexpr, C: tl.constexpr):
    """dQ of one query tile, and its contribution to the gradients of captured tensors."""
    M: tl.constexpr = C.value.m
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    i_bh, i_tile = pid // args.n_rows, pid % args.n_rows
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    row = i_b * args.rows.strides[0] + i_h * args.rows.strides[1]
    if C.value.mapped:
        i_tile = tl.load(args.rows.order + row + i_tile)
        row += i_tile
    first = i_tile * M
    n_left = n_q - i_tile * M
    o_row = tl.arange(0, M)
    o_q = i_tile * M + o_row
    p_q = tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1]
    b_q = load_rows(p_q + first * args.strides.q[2], args.strides.q, n_left, M, D, D_TRUE)  # [M, D]
    p_do = tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1]
    b_do = load_rows(p_do + first * args.strides.do[2], args.strides.do, n_left, M, DV, DV_TRUE)  # [M, DV]
    if C.value.upcast:
        b_q, b_do = b_q.to(tl.float32), b_do.to(tl.float32)
    o_bh = i_bh.to(tl.int64) * n_q + first
    b_lse = lse_base2(tl.load(tensors.lse + o_bh + o_row, mask=o_row < n_left, other=float("inf")))  # [M]
    b_delta = tl.load(tensors.delta + o_bh + o_row, mask=o_row < n_left, other=0.0)  # [M]
    p_k = tensors.k + (i_b * args.strides.k[0] + (i_h // ratio) * args.strides.k[1])
    p_v = tensors.v + (i_b * args.strides.v[0] + (i_h // ratio) * args.strides.v[1])
    b_dq = dq_tiles((b_q, b_do, b_lse, b_delta, o_q), (p_k, p_v), (i_b, i_h), row, tensors, args, MASK, SCORE, DSCORE, SCATTER, C)
    b_dq *= args.mods.scale[2]
    p_dq = tensors.dq + (i_b * args.strides.dq[0] + i_h * args.strides.dq[1])
    store_rows(p_dq + first * args.strides.dq[2], args.strides.dq, b_dq, n_left, M, D, D_TRUE)
    if tl.max(tl.where(tl.abs(b_dq) < float("inf"), 0, 1), None) > 0:  # has_nonfinite(b_dq), as Triton 3.6 can compile it for Blackwell
        o_bh -= first
        head = (p_q, p_k, p_v, p_do, tensors.lse + o_bh, tensors.delta + o_bh, p_dq)
        dq_rows(head, args.rows, row, (i_b, i_h), i_tile, tensors, args, MASK, SCORE, DSCORE, C)


@triton.jit
def dq_tiles(queries, kv, bh, row, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, SCATTER: tl.constexpr, C: tl.constexpr):
    """dQ / scale [M, D] of the query tile, summed over its key tiles: first the full ones, then the others. `queries` are q, dO, lse,
    delta and their positions."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    STAGES: tl.constexpr = C.value.stages
    MASKED_STAGES: tl.constexpr = C.value.masked_stages
    GIVEN: tl.constexpr = C.value.given
    n_kv = args.shape.n_kv
    b_dq = tl.zeros([M, D], tl.float32)
    if C.value.mapped:
        first, last = full_runs(args.rows, row)
        for run in range(first, last):
            start, stop = run_of(args.rows, run)
            for i_kv in tl.range(start, stop, num_stages=STAGES):
                b_dq = dq_tile(queries, b_dq, kv, bh, i_kv, -1, tensors, args, MASK, SCORE, DSCORE, SCATTER, False, C)
        first, last = masked_runs(args.rows, row)
        for run in range(first, last):
            start, stop = run_of(args.rows, run)
            applies = mask_applies(args.rows, row, run, GIVEN)
            for i_kv in tl.range(start, stop, num_stages=MASKED_STAGES):
                b_dq = dq_tile(queries, b_dq, kv, bh, i_kv, applies, tensors, args, MASK, SCORE, DSCORE, SCATTER, True, C)
    else:
        for i_kv in tl.range(0, n_kv // N, num_stages=STAGES):
            b_dq = dq_tile(queries, b_dq, kv, bh, i_kv, -1, tensors, args, None, SCORE, DSCORE, SCATTER, False, C)
        if n_kv % N != 0:
            b_dq = dq_tile(queries, b_dq, kv, bh, n_kv // N, -1, tensors, args, None, SCORE, DSCORE, SCATTER, True, C)
    return b_dq


@triton.jit
def dq_tile(
    queries,
    b_dq,
    kv,
    bh,
    i_kv,
    applies,
    tensors,
    args,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    DSCORE: tl.constexpr,
    SCATTER: tl.constexpr,
    MASKED: tl.constexpr,
    C: tl.constexpr,
):
    """dQ / scale [M, D] with one key tile's contribution added."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    PRECISION: tl.constexpr = C.value.precision
    b_q, b_do, b_lse, b_delta, o_q = queries
    n_q, n_kv, mods = args.shape.n_q, args.shape.n_kv, args.mods
    n_left = n_kv - i_kv * N
    first = i_kv * N
    b_k = load_rows(kv[0] + first * args.strides.k[2], args.strides.k, n_left, N, D, D_TRUE, MASKED)  # [N, D]
    b_v = load_rows(kv[1] + first * args.strides.v[2], args.strides.v, n_left, N, DV, DV_TRUE, MASKED)  # [N, DV]
    if C.value.upcast:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    o_kv = i_kv * N + tl.arange(0, N)
    b_raw = dot_rows_bwd(b_q, b_k, PRECISION)  # Q K^T [M, N]
    i_q = tl.minimum(o_q, n_q - 1)[:, None]
    b_s = final_scores(b_raw, bh, i_q, o_kv, n_kv, applies, mods, MASK, SCORE, MASKED)
    b_p = tl.exp2(b_s * mods.scale[1] - b_lse[:, None])  # P = 2^(s - lse) [M, N]
    b_dp = dot_rows_bwd(b_do, b_v, PRECISION)  # dP = dO V^T [M, N]
    if C.value.dropout:
        keep = dropout_keep_of(tensors.seed, args, bh, o_q[:, None], o_kv[None, :], C)
        b_dp = tl.where(keep, b_dp * mods.keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])  # dS = P (dP - delta)
    seen_kv = tl.minimum(o_kv, n_kv - 1)[None, :]
    if SCATTER is not None:
        attended = (b_s != float("-inf")) & (o_q < n_q)[:, None]
        b_ds = tl.where(attended, b_ds, 0.0)
        b_scaled = b_raw * mods.scale[0]
        score = mods.score
        SCATTER(b_ds, attended, b_scaled, bh[0], bh[1], i_q, seen_kv, score[0], score[1], score[2], score[3], tensors.capture_grads)
    if DSCORE is not None:
        b_ds = b_ds * DSCORE(b_raw * mods.scale[0], bh[0], bh[1], i_q, seen_kv, mods.score[0], mods.score[1], mods.score[2], mods.score[3])
        if MASKED:  # a masked score may have no finite derivative
            b_ds = tl.where(b_s != float("-inf"), b_ds, 0.0)
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)  # dQ += dscore K


@triton.jit
def dq_postprocess(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """dQ of one query tile, from the sums that dkdv programs made: rows come out of `dq_sum_order`, scaled and in dQ's dtype.

    It takes a few rows at a time, to hold little in registers. A tile with a non-finite sum is recomputed row by row.
    """
    M: tl.constexpr = C.value.m
    D: tl.constexpr = C.value.d
    D_TRUE: tl.constexpr = C.value.d_true
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    i_bh, i_tile = tl.program_id(0) // args.n_tiles, tl.program_id(0) % args.n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    p_dq = tensors.dq + (i_b * args.strides.dq[0] + i_h * args.strides.dq[1])
    ROWS: tl.constexpr = 32 if M >= 32 else M  # at a time
    b_nonfinite = tl.zeros([ROWS * D], tl.int32)
    for block in tl.static_range(M // ROWS):
        first = i_tile * M + block * ROWS
        b_x = tl.load(tensors.dq_sums + (i_bh.to(tl.int64) * args.n_padded + first) * D + tl.arange(0, ROWS * D)) * args.mods.scale[2]  # [ROWS * D]
        b_nonfinite |= tl.where(tl.abs(b_x) < float("inf"), 0, 1)  # not of the rows below: Triton 3.6 reduces such permuted blocks wrongly
        b_rows = b_x.reshape(ROWS // 8, D // 8, 2, 8, 4).permute(0, 4, 2, 1, 3).reshape(ROWS, D)  # see dq_sum_order
        store_rows(p_dq + first * args.strides.dq[2], args.strides.dq, b_rows, n_q - first, ROWS, D, D_TRUE)
    if tl.max(b_nonfinite, 0) > 0:
        o_bh = i_bh.to(tl.int64) * n_q
        head = (
            tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1],
            tensors.k + i_b * args.strides.k[0] + (i_h // ratio) * args.strides.k[1],
            tensors.v + i_b * args.strides.v[0] + (i_h // ratio) * args.strides.v[1],
            tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1],
            tensors.lse + o_bh,
            tensors.delta + o_bh,
            p_dq,
        )
        row = i_b * args.schedule.strides[0] + i_h * args.schedule.strides[1] + i_tile
        dq_rows(head, args.schedule, row, (i_b, i_h), i_tile, tensors, args, MASK, SCORE, DSCORE, C)
