"""What the Hopper kernels found has_nonfinite (a NaN that masked weights carried into other rows, sums beyond float32) is done again, carefully."""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import fwd_rows


@triton.jit
def fwd_fixup(
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
    s_tiles,
    n_heads,
    ratio,
    n_q,
    n_kv,
    n_tiles,
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
    ROWS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_TRUE: tl.constexpr,
    DV_TRUE: tl.constexpr,
):
    """One program per query tile: rows whose lse is NaN are has_nonfinite, and so is what lies in their tile."""
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_q = i_tile * M + tl.arange(0, ROWS)
    b_lse = tl.load(p_lse + i_bh.to(tl.int64) * n_q + o_q, mask=o_q < tl.minimum(n_q, i_tile * M + M), other=0.0)
    if tl.max(tl.where(b_lse == b_lse, 0, 1), 0) > 0:
        fwd_rows(
            p_q + i_b * s_q[0] + i_h * s_q[1],
            p_k + i_b * s_k[0] + (i_h // ratio) * s_k[1],
            p_v + i_b * s_v[0] + (i_h // ratio) * s_v[1],
            p_out + i_b * s_out[0] + i_h * s_out[1],
            p_lse,
            p_max,
            p_sinks,
            p_seed,
            s_q,
            s_k,
            s_v,
            s_out,
            tiles,
            i_b * s_tiles[0] + i_h * s_tiles[1] + i_tile,
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
            MASK,
            SCORE,
            MAPPED,
            GIVEN,
            SINKS,
            DROPOUT,
            M,
            N,
            D,
            DV,
            D_TRUE,
            DV_TRUE,
        )
