"""What stands around the Hopper backward, in plain Triton: `prepare` before it and `finish` after it."""

import triton
import triton.language as tl

from tilewise.engines.gluon.patches import HEIGHT as HEIGHT_NUMBER
from tilewise.engines.gpu.kernels.nonfinite_rows import dkdv_rows, dq_rows, lse_base2
from tilewise.engines.gpu.kernels.primitives import has_nonfinite, load_rows

HEIGHT: tl.constexpr = tl.constexpr(HEIGHT_NUMBER)


@triton.jit
def bwd_preprocess(
    p_out,
    p_do,
    p_lse,
    p_dlse,
    p_lse_padded,
    p_delta_padded,
    p_delta,
    p_sum,
    s_out,
    s_do,
    n_heads,
    n_q,
    n_padded,
    grid_width,
    HAS_DLSE: tl.constexpr,
    PATCHED: tl.constexpr,
    M: tl.constexpr,
    DV: tl.constexpr,
    DV_TRUE: tl.constexpr,
    D_SUM: tl.constexpr,
):
    """delta = sum over the head dim of dO * O, less dlse; lse in base 2, +inf where nothing is attended and past the end; dQ's sums = 0."""
    n_tiles = n_padded // M
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    first, n_left = i_tile * M, n_q - i_tile * M
    b_out = load_rows(p_out + i_b * s_out[0] + i_h * s_out[1] + first * s_out[2], s_out, n_left, M, DV, DV_TRUE).to(tl.float32)
    b_do = load_rows(p_do + i_b * s_do[0] + i_h * s_do[1] + first * s_do[2], s_do, n_left, M, DV, DV_TRUE).to(tl.float32)
    inside = tl.arange(0, M) < n_left
    o_row = i_bh.to(tl.int64) * n_q + first + tl.arange(0, M)
    o_padded = i_bh.to(tl.int64) * n_padded + permuted_row(first + tl.arange(0, M), grid_width, PATCHED)
    b_delta = tl.sum(b_out * b_do, 1)
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + o_row, mask=inside, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=inside)
    tl.store(p_delta_padded + o_padded, b_delta)
    tl.store(p_lse_padded + o_padded, lse_base2(tl.load(p_lse + o_row, mask=inside, other=float("-inf"))))
    tl.store(p_sum + o_padded[:, None] * D_SUM + tl.arange(0, D_SUM)[None, :], tl.zeros([M, D_SUM], tl.float32))


@triton.jit
def permuted_row(row, grid_width, PATCHED: tl.constexpr):
    """Where a token is in the order of strips (patches.py)."""
    if PATCHED:
        y, x = row // grid_width, row % grid_width
        return y // HEIGHT * (HEIGHT * grid_width) + x * HEIGHT + y % HEIGHT
    else:
        return row


@triton.jit
def unpermuted(row, grid_width, PATCHED: tl.constexpr):
    """The way back: where a token in the order of strips was unpermuted."""
    if PATCHED:
        strip, rest = row // (HEIGHT * grid_width), row % (HEIGHT * grid_width)
        return (strip * HEIGHT + rest % HEIGHT) * grid_width + rest // HEIGHT
    else:
        return row


@triton.jit
def bwd_postprocess(
    p_q,
    p_k,
    p_v,
    p_do,
    p_lse,
    p_delta,
    p_dq,
    p_dk,
    p_dv,
    p_sum,
    p_nonfinite,
    p_seed,
    s_q,
    s_k,
    s_v,
    s_do,
    s_dq,
    s_dk,
    s_dv,
    rows,
    s_rows,
    n_rows,
    columns,
    s_columns,
    n_columns,  # the map by query tiles and by key tiles
    n_dq_programs,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_padded,
    grid_width,
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
    PATCHED: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROWS_M: tl.constexpr,
    ROWS_N: tl.constexpr,
    COLUMNS_M: tl.constexpr,
    COLUMNS_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
    D_SUM: tl.constexpr,
):
    """Some programs bring the sums of a query tile into dQ, the others look after a key tile. What is has_nonfinite is done again, carefully."""
    pid = tl.program_id(0)
    if pid < n_dq_programs:
        i_bh, i_tile = pid // n_rows, pid % n_rows
        i_b, i_h = i_bh // n_heads, i_bh % n_heads
        o_bh = i_bh.to(tl.int64) * n_q
        p_dq += i_b * s_dq[0] + i_h * s_dq[1]
        bad = 0
        for block in tl.static_range(ROWS_M // 64):
            first = i_tile * ROWS_M + block * 64
            for half in tl.static_range(D_SUM // 64):
                b_x = dq_sum_block(p_sum, i_bh.to(tl.int64) * n_padded + first, half, first < n_q, scale, D_SUM)
                bad |= has_nonfinite(b_x).to(tl.int32)
                store_dq_block(p_dq, s_dq, b_x, half, first, n_q, grid_width, D_TRUE, PATCHED)
        if bad != 0:
            i_done = -1
            for line in range(0, lines_per_tile(ROWS_M, PATCHED)):
                i_given = unpermuted_tile(i_tile, line, n_rows, grid_width, ROWS_M, PATCHED)
                if i_given != i_done:
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
                        rows,
                        i_b * s_rows[0] + i_h * s_rows[1] + i_given,
                        i_b,
                        i_h,
                        i_given,
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
                        ROWS_M,
                        ROWS_N,
                        D,
                        DV,
                        D_TRUE,
                        DV_TRUE,
                    )
                i_done = i_given
    else:
        pid -= n_dq_programs
        if (tl.load(p_nonfinite + 2 * pid) | tl.load(p_nonfinite + 2 * pid + 1)) != 0:
            n_kv_heads = n_heads // ratio
            i_bh, i_tile = pid // n_columns, pid % n_columns
            i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
            i_done = -1
            for line in range(0, lines_per_tile(COLUMNS_N, PATCHED)):
                i_given = unpermuted_tile(i_tile, line, n_columns, grid_width, COLUMNS_N, PATCHED)
                if i_given != i_done:
                    dkdv_rows(
                        p_q,
                        p_k + i_b * s_k[0] + i_hk * s_k[1],
                        p_v + i_b * s_v[0] + i_hk * s_v[1],
                        p_do,
                        p_lse,
                        p_delta,
                        p_dk + i_b * s_dk[0] + i_hk * s_dk[1],
                        p_dv + i_b * s_dv[0] + i_hk * s_dv[1],
                        p_seed,
                        s_q,
                        s_k,
                        s_v,
                        s_do,
                        s_dk,
                        s_dv,
                        columns,
                        s_columns,
                        i_b,
                        i_hk,
                        i_given,
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
                        COLUMNS_M,
                        COLUMNS_N,
                        D,
                        DV,
                        D_TRUE,
                        DV_TRUE,
                    )
                i_done = i_given


@triton.jit
def dq_sum_block(p_sum, row, half: tl.constexpr, inside, scale, D_SUM: tl.constexpr):
    """A part of 64 x 64 of dQ, 0 past the end. Its sums lie as backward.fragment_order left them."""
    b_x = tl.load(p_sum + row * D_SUM + half * 4096 + tl.arange(0, 4096), mask=inside, other=0.0) * scale[2]
    return b_x.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64)


@triton.jit
def store_dq_block(p_dq, s_dq, b_x, half: tl.constexpr, first, n_q, grid_width, D_TRUE: tl.constexpr, PATCHED: tl.constexpr):
    o_row, o_column = first + tl.arange(0, 64), half * 64 + tl.arange(0, 64)
    p = p_dq + unpermuted(o_row, grid_width, PATCHED).to(tl.int64)[:, None] * s_dq[2] + o_column[None, :] * s_dq[3]
    tl.store(p, b_x.to(p_dq.dtype.element_ty), mask=(o_row < n_q)[:, None] & (o_column < D_TRUE)[None, :])


# A tile that is a patch holds pieces of HEIGHT tokens, each inside one of the tiles that careful functions know: those are all done again.


@triton.constexpr_function
def lines_per_tile(tile, patched):
    return tile // HEIGHT.value if patched else 1


@triton.jit
def unpermuted_tile(i_tile, line, n_tiles, grid_width, TILE: tl.constexpr, PATCHED: tl.constexpr):
    if PATCHED:
        boxes: tl.constexpr = TILE // (HEIGHT * HEIGHT)
        line = tl.full((), line, tl.int32)  # pieces of one row of the grid follow each other
        first = i_tile * TILE + line % boxes * (HEIGHT * HEIGHT) + line // boxes
        return tl.minimum(unpermuted(first, grid_width, True) // TILE, n_tiles - 1)
    else:
        return i_tile
