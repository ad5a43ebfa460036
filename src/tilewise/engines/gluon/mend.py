"""What the Hopper kernels found unsound (a NaN that masked weights carried into other rows, sums beyond float32) is done again, carefully."""

import triton
import triton.language as tl

from tilewise.engines.triton.careful import forward_rows


@triton.jit
def mend_forward(
    p_q, p_k, p_v, p_out, p_lse, p_highest, p_unsound, p_sinks, p_seed, s_q, s_k, s_v, s_out, tiles, s_tiles,
    n_heads, ratio, n_q, n_kv, n_tiles, scale, keep_scale, threshold, mask, score,
    MASK: tl.constexpr, SCORE: tl.constexpr, MAPPED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, PARTS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_TRUE: tl.constexpr, DV_TRUE: tl.constexpr,
):  # fmt: skip
    """One program per query tile, whose PARTS were judged apart."""
    pid = tl.program_id(0)
    unsound = 0
    for part in tl.static_range(PARTS):
        unsound |= tl.load(p_unsound + pid * PARTS + part)
    if unsound != 0:
        i_bh, i_tile = pid // n_tiles, pid % n_tiles
        i_b, i_h = i_bh // n_heads, i_bh % n_heads
        forward_rows(
            p_q + i_b * s_q[0] + i_h * s_q[1], p_k + i_b * s_k[0] + (i_h // ratio) * s_k[1], p_v + i_b * s_v[0] + (i_h // ratio) * s_v[1],
            p_out + i_b * s_out[0] + i_h * s_out[1], p_lse, p_highest, p_sinks, p_seed, s_q, s_k, s_v, s_out, tiles,
            i_b * s_tiles[0] + i_h * s_tiles[1] + i_tile, i_b, i_h, i_bh, i_tile, n_q, n_kv, scale, keep_scale, threshold, mask, score,
            MASK, SCORE, MAPPED, SINKS, DROPOUT, M, N, D, DV, D_TRUE, DV_TRUE)  # fmt: skip
