"""Decoding: a few query rows over a long sequence of keys, which is split among many programs."""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import CHUNK, LN2, row_step
from tilewise.engines.gpu.kernels.primitives import (
    LOG2E,
    accumulate_pv,
    apply_dropout,
    as_float16,
    dot_rows,
    final_scores,
    has_nonfinite,
    join_even_odd,
    kv_head,
    load_kv,
    load_rows,
    overflowed,
    split_even_odd,
    unpacked_float8,
)

SEARCHED: tl.constexpr = tl.constexpr(4096)  # elements of the mask evaluated at a time, in search of keys that are attended to


@triton.jit
def decode_split(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """The query rows of one key head over one split of its keys: their maximum, sum and weighted values, or, where there is one split alone, their output.

    The query heads that share a key head are packed into the rows of one tile, so that each key is read once for all of them. Splits take turns with the
    key tiles, so that all have as much to do wherever the keys lie that are attended to. There is no tile map: a program asks the mask for the first and
    the last of its key tiles that any row attends to, and reads none before or after. So a cache that grows within its buffer changes nothing on the
    host, and what is not written yet is not read. `decode_combine` puts the splits together.
    """
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    D_TRUE: tl.constexpr = C.value.d_true
    PAGE: tl.constexpr = C.value.page
    n_heads, ratio, n_q, n_kv = args.shape
    n_splits = args.n_splits
    pid = tl.program_id(0)
    i_bh, i_split = pid // n_splits, pid % n_splits
    n_kv_heads = n_heads // ratio
    i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
    o_row = tl.arange(0, M)
    row = tl.minimum(o_row, ratio * n_q - 1)  # rows past the end repeat the last one and are not stored
    i_h = (i_hk * ratio + row // n_q)[:, None]
    i_q = (row % n_q)[:, None]
    o_d = tl.arange(0, D)
    b_q = tl.load(
        tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1] + i_q * args.strides.q[2] + o_d[None, :] * args.strides.q[3],
        mask=o_d[None, :] < D_TRUE,
        other=0.0,
    )  # [M, D]
    if C.value.upcast:
        b_q = b_q.to(tl.float32)
    if C.value.paired:
        b_q = paired_query(b_q)
    p_k = kv_head(tensors.k, args.strides.k, i_b, i_hk, PAGE)
    p_v = kv_head(tensors.v, args.strides.v, i_b, i_hk, PAGE)

    if C.value.has_lengths:  # pages may have room for far more keys than there are
        n_kv = tl.minimum(n_kv, tl.maximum(tl.load(args.pages.lengths + i_b), 0))
    first, last = i_split, (n_kv + N - 1) // N
    if MASK is not None:
        first, last = seen_tiles((i_b, i_h), i_q, i_split, n_kv, args, MASK, C)
    b_m, b_l, b_acc = split_tiles(b_q, (p_k, p_v), (i_b, i_h), i_q, first, last, n_kv, tensors, args, MASK, SCORE, C)
    put_rows(o_row, (b_m, b_l, b_acc), i_bh, i_split, tensors, args, C)
    if has_nonfinite(b_acc) | overflowed(b_m, b_l):
        split_rows((p_k, p_v), i_bh, i_split, first, last, n_kv, tensors, args, MASK, SCORE, C)


@triton.jit
def seen_tiles(bh, i_q, i_split, n_kv, args, MASK: tl.constexpr, C: tl.constexpr):
    """The first of a split's key tiles in which any row attends to anything, and the one after the last such: a search from either end, several tiles at a
    time, which costs little but where it saves the reading of keys."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    AT_ONCE: tl.constexpr = 1 if M * N >= SEARCHED else SEARCHED // (M * N)  # tiles
    n_splits = args.n_splits
    n_tiles = (n_kv + N - 1) // N
    step = n_splits * AT_ONCE
    lowest, highest = n_tiles, 0
    i_kv = i_split
    while (i_kv < n_tiles) & (lowest == n_tiles):
        lowest, highest = seen_among(bh, i_q, i_kv, n_kv, args, MASK, AT_ONCE, C)
        i_kv += step
    if lowest < n_tiles:
        i_kv = i_split + (n_tiles - 1 - i_split) // step * step
        highest = 0
        while (highest == 0) & (i_kv >= i_split):  # there is one, unless somebody writes to the mask's tensors meanwhile
            _, highest = seen_among(bh, i_q, i_kv, n_kv, args, MASK, AT_ONCE, C)
            i_kv -= step
    return lowest, highest


@triton.jit
def seen_among(bh, i_q, i_kv, n_kv, args, MASK: tl.constexpr, AT_ONCE: tl.constexpr, C: tl.constexpr):
    """The same among some tiles of a split, from tile i_kv on: the number of tiles and 0 if nothing is attended to."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    n_tiles = (n_kv + N - 1) // N
    o = tl.arange(0, AT_ONCE * N)
    o_tile = i_kv + o // N * args.n_splits
    o_kv = o_tile * N + o % N
    mask = args.mods.mask
    allowed = MASK(bh[0], bh[1], i_q, tl.minimum(o_kv, n_kv - 1)[None, :], mask[0], mask[1], mask[2], mask[3])
    seen = ((allowed + tl.zeros([M, AT_ONCE * N], tl.int32)) >= 0) & (o_kv < n_kv)[None, :]
    lowest = tl.min(tl.min(tl.where(seen, o_tile[None, :], n_tiles), 1), 0)
    highest = tl.max(tl.max(tl.where(seen, o_tile[None, :] + 1, 0), 1), 0)
    return lowest, highest


@triton.jit
def put_rows(o_row, state, i_bh, i_split, tensors, args, C: tl.constexpr):
    """Stores packed rows o_row [R] of one key head: maximum, sum and weighted values of a split, or the output, if that is all there is."""
    DV: tl.constexpr = C.value.dv
    DV_TRUE: tl.constexpr = C.value.dv_true
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    b_m, b_l, b_acc = state
    inside = o_row < ratio * n_q
    o_dv = tl.arange(0, DV)
    if C.value.whole:
        n_kv_heads = n_heads // ratio
        row = tl.minimum(o_row, ratio * n_q - 1)
        i_b, i_h, i_q = i_bh // n_kv_heads, (i_bh % n_kv_heads) * ratio + row // n_q, row % n_q
        b_top = b_m
        if C.value.sinks:
            b_sink = tl.load(tensors.sinks + i_h).to(tl.float32) * LOG2E
            b_top = tl.maximum(b_m, b_sink)
        b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_weight = tl.exp2(b_m - b_base)
        b_total = b_l * b_weight
        if C.value.sinks:
            b_total += tl.exp2(b_sink - b_base)
        b_nothing = b_total == 0.0
        b_safe = tl.where(b_nothing, 1.0, b_total)
        b_out = b_acc * (b_weight * (args.mods.keep_scale / b_safe))[:, None]  # [R, DV]
        o_lse = (i_b * n_heads + i_h) * n_q + i_q
        tl.store(tensors.max_score + o_lse, b_m * LN2, mask=inside)
        tl.store(tensors.lse + o_lse, tl.where(b_nothing, float("-inf"), (b_base + tl.log2(b_safe)) * LN2), mask=inside)
        p_out = tensors.out + i_b * args.strides.out[0] + i_h[:, None] * args.strides.out[1] + i_q[:, None] * args.strides.out[2]
        tl.store(p_out + o_dv[None, :] * args.strides.out[3], b_out.to(tensors.out.dtype.element_ty), mask=inside[:, None] & (o_dv[None, :] < DV_TRUE))
    else:
        o_out = (i_bh * args.n_splits + i_split) * (ratio * n_q) + o_row  # into [batch * kv heads, splits, rows]
        tl.store(tensors.row_max + o_out, b_m, mask=inside)
        tl.store(tensors.row_sum + o_out, b_l, mask=inside)
        tl.store(tensors.acc + o_out[:, None].to(tl.int64) * DV_TRUE + o_dv[None, :], b_acc, mask=inside[:, None] & (o_dv[None, :] < DV_TRUE))


@triton.jit
def split_tiles(b_q, kv, bh, i_q, first, last, n_kv, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """Maximum [M], sum [M] and weighted values [M, DV] over a split's key tiles from `first` to `last`. Only the last tile of the sequence can reach past its
    end; where a batch element has several, any can."""
    M: tl.constexpr = C.value.m
    N: tl.constexpr = C.value.n
    DV: tl.constexpr = C.value.dv
    STAGES: tl.constexpr = C.value.stages
    b_m = tl.full([M], float("-inf"), tl.float32)
    b_l = tl.zeros([M], tl.float32)
    b_acc = tl.zeros([M, DV], tl.float32)
    if C.value.paired:
        b_acc = split_even_odd(b_acc)
    n_splits = args.n_splits
    whole = tl.minimum(last, n_kv // N)
    if (C.value.page > 0) and not C.value.has_lengths:
        whole = first
    for i_kv in tl.range(first, whole, n_splits, num_stages=STAGES):
        b_m, b_l, b_acc = split_tile(b_q, (b_m, b_l, b_acc), kv, bh, i_q, i_kv, n_kv, tensors, args, MASK, SCORE, False, C)
    rest = first + (tl.maximum(whole - first, 0) + n_splits - 1) // n_splits * n_splits
    for i_kv in tl.range(rest, last, n_splits, num_stages=1):
        b_m, b_l, b_acc = split_tile(b_q, (b_m, b_l, b_acc), kv, bh, i_q, i_kv, n_kv, tensors, args, MASK, SCORE, True, C)
    if C.value.paired:
        b_acc = join_even_odd(b_acc[0], b_acc[1])
    return b_m, b_l, b_acc


@triton.jit
def split_tile(b_q, state, kv, bh, i_q, i_kv, n_kv, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, BOUNDED: tl.constexpr, C: tl.constexpr):
    """One key tile of the online softmax: P = 2^(s - max), l = l decay + sum P, acc = acc decay + P V."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    DV_TRUE: tl.constexpr = C.value.dv_true
    PRECISION: tl.constexpr = C.value.precision
    PAGE: tl.constexpr = C.value.page
    PAIRED: tl.constexpr = C.value.paired
    b_m, b_l, b_acc = state
    o_kv = i_kv * N + tl.arange(0, N)
    b_k = load_kv(kv[0], args.strides.k, i_kv * N, n_kv, bh[0], args.pages, N, D, D_TRUE, PAGE, BOUNDED, PAIRED=PAIRED)  # [N, D]
    b_v = load_kv(kv[1], args.strides.v, i_kv * N, n_kv, bh[0], args.pages, N, DV, DV_TRUE, PAGE, BOUNDED, PAIRED=PAIRED)  # [N, DV]
    if PAIRED:
        b_s = dot_pairs(b_q, b_k, kv[0].dtype.element_ty, PRECISION)
    else:
        b_s = dot_rows(b_q, b_k.to(b_q.dtype), PRECISION)  # S = Q K^T [M, N]
    b_s = final_scores(b_s, bh, i_q, o_kv, n_kv, -1, args.mods, MASK, SCORE, BOUNDED or MASK is not None)
    c = args.mods.scale[1]
    b_top = tl.maximum(b_m, tl.max(b_s, 1) * c)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = tl.exp2(b_s * c - b_base[:, None])  # [M, N]
    b_decay = tl.exp2(b_m - b_base)
    b_l = b_l * b_decay + tl.sum(b_p, 1)
    if C.value.dropout:
        b_p = apply_dropout(b_p, tensors.seed, args, bh, i_q, o_kv[None, :], C)
    if PAIRED:
        b_even, b_odd = unpacked_float8(b_v, kv[1].dtype.element_ty)
        b_acc = accumulate_pv(b_acc[0], b_decay, b_p, b_even, PRECISION), accumulate_pv(b_acc[1], b_decay, b_p, b_odd, PRECISION)
    else:
        b_acc = accumulate_pv(b_acc, b_decay, b_p, b_v.to(b_q.dtype), PRECISION)
    return b_top, b_l, b_acc


# Two bytes of float8 are loaded as one element of 16 bits: then tensor cores' operands come out of shared memory as fast as others, where those of values
# would come byte by byte. The even columns and the odd ones make a product each. Products are of float16, which takes one instruction for two elements;
# bfloat16 would take another for each, at a quarter of the speed, and be the limit instead of memory.


@triton.jit
def paired_query(b_q):
    """Even columns, odd columns, and what scores have to be multiplied by."""
    if b_q.dtype == tl.bfloat16:
        b_q, b_unit = as_float16(b_q)
    else:
        b_unit = tl.full([b_q.shape[0]], 1.0, tl.float32)
    b_even, b_odd = split_even_odd(b_q)
    return b_even, b_odd, b_unit


@triton.jit
def dot_pairs(query, b_k, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Q K^T [M, N] of a paired_query and pairs of K [N, D // 2]."""
    b_even, b_odd = unpacked_float8(b_k, KIND)
    b_s = tl.dot(query[0], tl.trans(b_even.to(query[0].dtype)), input_precision=PRECISION)
    return tl.dot(query[1], tl.trans(b_odd.to(query[0].dtype)), b_s, input_precision=PRECISION) * query[2][:, None]


@triton.jit
def split_rows(kv, i_bh, i_split, first, last, n_kv, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """The packed rows again, one at a time (see nonfinite_rows.py)."""
    N: tl.constexpr = C.value.n
    D: tl.constexpr = C.value.d
    DV: tl.constexpr = C.value.dv
    D_TRUE: tl.constexpr = C.value.d_true
    ratio, n_q = args.shape.ratio, args.shape.n_q
    n_kv_heads = args.shape.n_heads // ratio
    i_b, i_head = i_bh // n_kv_heads, (i_bh % n_kv_heads) * ratio
    for row in range(0, ratio * n_q):
        i_h, i_q = i_head + row // n_q, row % n_q
        p_q = tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1] + i_q * args.strides.q[2]
        b_q = load_rows(p_q, args.strides.q, 1, 1, D, D_TRUE).to(tl.float32)  # [1, D]
        b_m = tl.full([1], float("-inf"), tl.float32)
        b_l = tl.zeros([1], tl.float32)
        b_acc = tl.zeros([1, DV], tl.float32)
        o_q = i_q + tl.arange(0, 1)
        for i_kv in range(first, last, args.n_splits):
            for i_chunk in tl.range(i_kv * (N // CHUNK), (i_kv + 1) * (N // CHUNK), num_stages=1):
                b_m, b_l, b_acc = row_step(b_q, (b_m, b_l, b_acc), kv, (i_b, i_h), o_q, i_chunk, n_kv, -1, tensors, args, MASK, SCORE, C)
        put_rows(row + tl.arange(0, 1), (b_m, b_l, b_acc), i_bh, i_split, tensors, args, C)


@triton.jit
def decode_combine(tensors, args, C: tl.constexpr):
    """One output row from its splits, which one program loads all at once: out = sum_i w_i acc_i / sum_i w_i l_i with w_i = 2^(m_i - max m)."""
    SPLITS: tl.constexpr = C.value.splits
    DV: tl.constexpr = C.value.dv
    DV_TRUE: tl.constexpr = C.value.dv_true
    SINKS: tl.constexpr = C.value.sinks
    n_heads, ratio, n_q, n_splits = args.n_heads, args.ratio, args.n_q, args.n_splits
    pid = tl.program_id(0)
    n_rows = ratio * n_q
    i_bh, i_row = pid // n_rows, pid % n_rows
    n_kv_heads = n_heads // ratio
    i_b, i_h, i_q = i_bh // n_kv_heads, (i_bh % n_kv_heads) * ratio + i_row // n_q, i_row % n_q
    o_split = tl.arange(0, SPLITS)
    o_row = (i_bh * n_splits + o_split) * n_rows + i_row
    inside = o_split < n_splits
    b_m = tl.load(tensors.row_max + o_row, mask=inside, other=float("-inf"))  # [SPLITS]
    b_l = tl.load(tensors.row_sum + o_row, mask=inside, other=0.0)  # [SPLITS]
    highest = tl.max(b_m, 0)
    top = highest
    if SINKS:
        sink = tl.load(tensors.sinks + i_h).to(tl.float32) * LOG2E
        top = tl.maximum(highest, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    b_weight = tl.exp2(b_m - base)
    total = tl.sum(b_l * b_weight, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    o_d = tl.arange(0, DV)
    b_acc = tl.load(
        tensors.acc + o_row[:, None].to(tl.int64) * DV_TRUE + o_d[None, :], mask=inside[:, None] & (o_d[None, :] < DV_TRUE), other=0.0
    )  # [SPLITS, DV]
    nothing = total == 0.0
    safe = tl.where(nothing, 1.0, total)
    b_out = tl.sum(b_acc * b_weight[:, None], 0) * (args.keep_scale / safe)  # [DV]
    o_lse = (i_b * n_heads + i_h) * n_q + i_q
    tl.store(tensors.max_score + o_lse, highest * LN2)
    tl.store(tensors.lse + o_lse, tl.where(nothing, float("-inf"), (base + tl.log2(safe)) * LN2))
    p_out = tensors.out + i_b * args.s_out[0] + i_h * args.s_out[1] + i_q * args.s_out[2]
    tl.store(p_out + o_d * args.s_out[3], b_out.to(tensors.out.dtype.element_ty), mask=o_d < DV_TRUE)
