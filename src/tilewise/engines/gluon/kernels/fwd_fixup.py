"""Recomputes query tiles whose result the Hopper forward found non-finite: a NaN at a masked key that reached other rows, or a sum out of range."""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.nonfinite_rows import fwd_rows
from tilewise.engines.triton.kernels.forward import fwd_again

AGAIN: tl.constexpr = tl.constexpr(64)  # rows at a time: query tiles may have 192


@triton.jit
def fwd_fixup(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """One program for C.tiles query tiles. The forward marks a tile by an lse of NaN in one of its rows; then all of them are recomputed.

    This is a kernel of its own because it needs the mask function, which the Hopper forward does not have (see mask_bits.py), and registers that the
    Hopper forward cannot spare. Where nothing is wrong, it only reads lse.
    """
    M: tl.constexpr = C.value.m
    ROWS: tl.constexpr = C.value.rows
    TILES: tl.constexpr = C.value.tiles
    first = tl.program_id(0) * TILES
    o = tl.arange(0, TILES * ROWS)
    o_tile = tl.minimum(first + o // ROWS, args.n_all - 1)
    o_q = o_tile % args.n_tiles * M + o % ROWS
    inside = (o % ROWS < M) & (o_q < args.shape.n_q)
    b_lse = tl.load(tensors.lse + (o_tile // args.n_tiles).to(tl.int64) * args.shape.n_q + o_q, mask=inside, other=0.0)  # [TILES * ROWS]
    if tl.max(tl.where(b_lse == b_lse, 0, 1), 0) > 0:
        for tile in range(first, tl.minimum(first + TILES, args.n_all)):
            fix_tile(tile, tensors, args, MASK, SCORE, C)


@triton.jit
def fix_tile(tile, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, C: tl.constexpr):
    """Recomputes a query tile of all heads' if it is marked."""
    M: tl.constexpr = C.value.m
    ROWS: tl.constexpr = C.value.rows
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    i_bh, i_tile = tile // args.n_tiles, tile % args.n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_q = i_tile * M + tl.arange(0, ROWS)
    b_lse = tl.load(tensors.lse + i_bh.to(tl.int64) * n_q + o_q, mask=o_q < tl.minimum(n_q, i_tile * M + M), other=0.0)  # [ROWS]
    if tl.max(tl.where(b_lse == b_lse, 0, 1), 0) > 0:
        head = (
            tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1],
            tensors.k + i_b * args.strides.k[0] + (i_h // ratio) * args.strides.k[1],
            tensors.v + i_b * args.strides.v[0] + (i_h // ratio) * args.strides.v[1],
            tensors.out + i_b * args.strides.out[0] + i_h * args.strides.out[1],
        )
        row = i_b * args.schedule.strides[0] + i_h * args.schedule.strides[1] + i_tile
        stop = tl.minimum(i_tile * M + M, n_q)
        if C.value.anchored:
            for first in range(i_tile * M, stop, AGAIN):
                fwd_again(head, row, (i_b, i_h), i_bh, first, AGAIN, tensors, args, MASK, SCORE, C)
        else:
            fwd_rows(head, row, (i_b, i_h), i_bh, i_tile * M, stop, tensors, args, MASK, SCORE, C)
