"""What stands around the Hopper backward, in plain Triton: `prepare` before it and `finish` after it."""

import triton
import triton.language as tl

from tilewise.engines.triton.careful import key_rows, query_rows, weightless
from tilewise.engines.triton.steps import load_rows, store_rows, unsound


@triton.jit
def prepare(
    p_out, p_do, p_lse, p_dlse, p_lse_padded, p_delta_padded, p_delta, p_sum, s_out, s_do, n_heads, n_q, n_padded,
    HAS_DLSE: tl.constexpr, M: tl.constexpr, DV: tl.constexpr, DV_TRUE: tl.constexpr, D_SUM: tl.constexpr,
):  # fmt: skip
    """delta = sum over the head dim of dO * O, less dlse; lse in base 2, +inf where nothing is attended and past the end; dQ's sums = 0."""
    n_tiles = n_padded // M
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    first, n_left = i_tile * M, n_q - i_tile * M
    b_out = load_rows(p_out + i_b * s_out[0] + i_h * s_out[1] + first * s_out[2], s_out, n_left, M, DV, DV_TRUE).to(tl.float32)
    b_do = load_rows(p_do + i_b * s_do[0] + i_h * s_do[1] + first * s_do[2], s_do, n_left, M, DV, DV_TRUE).to(tl.float32)
    inside = tl.arange(0, M) < n_left
    o_row = i_bh.to(tl.int64) * n_q + first + tl.arange(0, M)
    o_padded = i_bh.to(tl.int64) * n_padded + first + tl.arange(0, M)
    b_delta = tl.sum(b_out * b_do, 1)
    if HAS_DLSE:
        b_delta -= tl.load(p_dlse + o_row, mask=inside, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=inside)
    tl.store(p_delta_padded + o_padded, b_delta)
    tl.store(p_lse_padded + o_padded, weightless(tl.load(p_lse + o_row, mask=inside, other=float("-inf"))))
    tl.store(p_sum + o_padded[:, None] * D_SUM + tl.arange(0, D_SUM)[None, :], tl.zeros([M, D_SUM], tl.float32))


@triton.jit
def finish(
    p_q, p_k, p_v, p_do, p_lse, p_delta, p_dq, p_dk, p_dv, p_sum, p_unsound, p_seed, s_q, s_k, s_v, s_do, s_dq, s_dk, s_dv,
    rows, s_rows, n_rows, columns, s_columns, n_columns,  # the map by query tiles and by key tiles
    n_query_programs, n_heads, ratio, n_q, n_kv, n_padded, scale, keep_scale, threshold, mask, score,
    MASK: tl.constexpr, SCORE: tl.constexpr, SLOPE: tl.constexpr, MAPPED: tl.constexpr, GIVEN: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS_M: tl.constexpr, ROWS_N: tl.constexpr, COLUMNS_M: tl.constexpr, COLUMNS_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_TRUE: tl.constexpr, DV_TRUE: tl.constexpr, D_SUM: tl.constexpr,
):  # fmt: skip
    """Some programs bring the sums of a query tile into dQ, the others look after a key tile. What is unsound is done again, carefully."""
    pid = tl.program_id(0)
    if pid < n_query_programs:
        i_bh, i_tile = pid // n_rows, pid % n_rows
        i_b, i_h = i_bh // n_heads, i_bh % n_heads
        o_bh = i_bh.to(tl.int64) * n_q
        p_dq += i_b * s_dq[0] + i_h * s_dq[1]
        bad = 0
        for block in tl.static_range(ROWS_M // 64):
            first = i_tile * ROWS_M + block * 64
            for half in tl.static_range(D_SUM // 64):
                bad |= bring(p_dq, p_sum, s_dq, i_bh.to(tl.int64) * n_padded + first, half, first, n_q, scale, D_TRUE, D_SUM).to(tl.int32)
        if bad != 0:
            query_rows(
                p_q + i_b * s_q[0] + i_h * s_q[1], p_k + i_b * s_k[0] + (i_h // ratio) * s_k[1], p_v + i_b * s_v[0] + (i_h // ratio) * s_v[1],
                p_do + i_b * s_do[0] + i_h * s_do[1], p_lse + o_bh, p_delta + o_bh, p_dq, p_seed, s_q, s_k, s_v, s_do, s_dq,
                rows, i_b * s_rows[0] + i_h * s_rows[1] + i_tile, i_b, i_h, i_tile, n_q, n_kv, scale, keep_scale, threshold, mask, score,
                MASK, SCORE, SLOPE, MAPPED, GIVEN, DROPOUT, ROWS_M, ROWS_N, D, DV, D_TRUE, DV_TRUE)  # fmt: skip
    else:
        pid -= n_query_programs
        if (tl.load(p_unsound + 2 * pid) | tl.load(p_unsound + 2 * pid + 1)) != 0:
            n_kv_heads = n_heads // ratio
            i_bh, i_tile = pid // n_columns, pid % n_columns
            i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
            key_rows(
                p_q, p_k + i_b * s_k[0] + i_hk * s_k[1], p_v + i_b * s_v[0] + i_hk * s_v[1], p_do, p_lse, p_delta,
                p_dk + i_b * s_dk[0] + i_hk * s_dk[1], p_dv + i_b * s_dv[0] + i_hk * s_dv[1], p_seed, s_q, s_k, s_v, s_do, s_dk, s_dv,
                columns, s_columns, i_b, i_hk, i_tile, n_heads, ratio, n_q, n_kv, scale, keep_scale, threshold, mask, score,
                MASK, SCORE, SLOPE, MAPPED, GIVEN, DROPOUT, COLUMNS_M, COLUMNS_N, D, DV, D_TRUE, DV_TRUE)  # fmt: skip


@triton.jit
def bring(p_dq, p_sum, s_dq, row, half: tl.constexpr, first, n_q, scale, D_TRUE: tl.constexpr, D_SUM: tl.constexpr):
    """A part of 64 x 64 of dQ; whether it is unsound. Its sums lie as backward.fragment_order left them."""
    bad = False
    if first < n_q:
        b_x = tl.load(p_sum + row * D_SUM + half * 4096 + tl.arange(0, 4096)) * scale[2]
        b_x = b_x.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64)
        bad = unsound(b_x)
        store_rows(p_dq + first * s_dq[2] + half * 64 * s_dq[3], s_dq, b_x, n_q - first, 64, 64, D_TRUE - half * 64)
    return bad
