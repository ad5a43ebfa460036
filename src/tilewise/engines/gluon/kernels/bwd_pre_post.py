"""The kernels before and after the Hopper backward, in plain Triton: `bwd_preprocess` and `bwd_postprocess`."""

import triton
import triton.language as tl

from tilewise.engines.gluon.patches import HEIGHT as HEIGHT_NUMBER
from tilewise.engines.gpu.kernels.nonfinite_rows import dkdv_rows, dq_rows, lse_base2
from tilewise.engines.gpu.kernels.primitives import has_nonfinite, load_rows

HEIGHT: tl.constexpr = tl.constexpr(HEIGHT_NUMBER)


@triton.jit
def bwd_preprocess(tensors, args, C: tl.constexpr):
    """What the Hopper backward needs of M rows of one (batch, head): delta, lse in base 2, and zeroed sums for dQ.

    delta = sum over the head dim of dO * O, less dlse. lse is +inf where a row attends to nothing and past the end, so that P = 2^(s - lse) = 0
    there without a mask. Both go into padded tensors that TMA loads in whole tiles; with patches, in the order of strips.
    """
    M: tl.constexpr = C.value.m
    DV: tl.constexpr = C.value.dv
    DV_TRUE: tl.constexpr = C.value.dv_true
    D_SUM: tl.constexpr = C.value.d_sum
    PATCHED: tl.constexpr = C.value.patched
    n_heads, n_q, n_padded = args.n_heads, args.n_q, args.n_padded
    n_tiles = n_padded // M
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    first, n_left = i_tile * M, n_q - i_tile * M
    p_out = tensors.out + i_b * args.strides.out[0] + i_h * args.strides.out[1] + first * args.strides.out[2]
    b_out = load_rows(p_out, args.strides.out, n_left, M, DV, DV_TRUE).to(tl.float32)  # [M, DV]
    p_do = tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1] + first * args.strides.do[2]
    b_do = load_rows(p_do, args.strides.do, n_left, M, DV, DV_TRUE).to(tl.float32)  # [M, DV]
    inside = tl.arange(0, M) < n_left
    o_row = i_bh.to(tl.int64) * n_q + first + tl.arange(0, M)
    o_padded = i_bh.to(tl.int64) * n_padded + permuted_row(first + tl.arange(0, M), args.grid_width, PATCHED)
    b_delta = tl.sum(b_out * b_do, 1)  # [M]
    if C.value.has_dlse:
        b_delta -= tl.load(tensors.dlse + o_row, mask=inside, other=0.0)
    tl.store(tensors.delta + o_row, b_delta, mask=inside)
    tl.store(tensors.delta_padded + o_padded, b_delta)
    tl.store(tensors.lse_padded + o_padded, lse_base2(tl.load(tensors.lse + o_row, mask=inside, other=float("-inf"))))
    tl.store(tensors.dq_sums + o_padded[:, None] * D_SUM + tl.arange(0, D_SUM)[None, :], tl.zeros([M, D_SUM], tl.float32))


@triton.jit
def permuted_row(row, grid_width, PATCHED: tl.constexpr):
    """A token's place in the order of strips (patches.py)."""
    if PATCHED:
        y, x = row // grid_width, row % grid_width
        return y // HEIGHT * (HEIGHT * grid_width) + x * HEIGHT + y % HEIGHT
    else:
        return row


@triton.jit
def unpermuted(row, grid_width, PATCHED: tl.constexpr):
    """The inverse: the token at a place in the order of strips."""
    if PATCHED:
        strip, rest = row // (HEIGHT * grid_width), row % (HEIGHT * grid_width)
        return (strip * HEIGHT + rest % HEIGHT) * grid_width + rest // HEIGHT
    else:
        return row


@triton.jit
def bwd_postprocess(tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, C: tl.constexpr):
    """A program turns the sums of one query tile into dQ, or checks one key tile. What is not finite is recomputed row by row.

    The sums lie in the fragment order of the Hopper backward (`dq_sum_block`). That kernel only marks key tiles with a non-finite dK or dV (`nonfinite`):
    to recompute them takes the mask function, which it does not have (see mask_bits.py). Most programs of key tiles end at once.
    """
    DQ: tl.constexpr = C.value.dq
    DKDV: tl.constexpr = C.value.dkdv
    pid = tl.program_id(0)
    if pid < args.n_dq_programs:
        postprocess_dq(pid, tensors, args, MASK, SCORE, DSCORE, DQ, C)
    else:
        postprocess_dkdv(pid - args.n_dq_programs, tensors, args, MASK, SCORE, DSCORE, DKDV, C)


@triton.jit
def postprocess_dq(pid, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr):
    """dQ of one query tile, in blocks of 64 x 64."""
    M: tl.constexpr = TILES.value.m
    D_TRUE: tl.constexpr = TILES.value.d_true
    D_SUM: tl.constexpr = C.value.d_sum
    PATCHED: tl.constexpr = C.value.patched
    n_heads, ratio, n_q = args.shape.n_heads, args.shape.ratio, args.shape.n_q
    i_bh, i_tile = pid // args.n_rows, pid % args.n_rows
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_bh = i_bh.to(tl.int64) * n_q
    p_dq = tensors.dq + (i_b * args.strides.dq[0] + i_h * args.strides.dq[1])
    nonfinite = 0
    for block in tl.static_range(M // 64):
        first = i_tile * M + block * 64
        for i_d in tl.static_range(D_SUM // 64):
            b_x = dq_sum_block(tensors.dq_sums, i_bh.to(tl.int64) * args.n_padded + first, i_d, first < n_q, args.mods.scale, D_SUM)  # [64, 64]
            nonfinite |= has_nonfinite(b_x).to(tl.int32)
            store_dq_block(p_dq, args.strides.dq, b_x, i_d, first, n_q, args.grid_width, D_TRUE, PATCHED)
    if nonfinite != 0:
        i_done = -1
        for line in range(0, lines_per_tile(M, PATCHED)):
            i_given = unpermuted_tile(i_tile, line, args.n_rows, args.grid_width, M, PATCHED)
            if i_given != i_done:
                head = (
                    tensors.q + i_b * args.strides.q[0] + i_h * args.strides.q[1],
                    tensors.k + i_b * args.strides.k[0] + (i_h // ratio) * args.strides.k[1],
                    tensors.v + i_b * args.strides.v[0] + (i_h // ratio) * args.strides.v[1],
                    tensors.do + i_b * args.strides.do[0] + i_h * args.strides.do[1],
                    tensors.lse + o_bh,
                    tensors.delta + o_bh,
                    p_dq,
                )
                row = i_b * args.rows.strides[0] + i_h * args.rows.strides[1] + i_given
                dq_rows(head, args.rows, row, (i_b, i_h), i_given, tensors, args, MASK, SCORE, DSCORE, TILES)
            i_done = i_given


@triton.jit
def postprocess_dkdv(pid, tensors, args, MASK: tl.constexpr, SCORE: tl.constexpr, DSCORE: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr):
    """dK and dV of one key tile again, if the Hopper backward marked it."""
    N: tl.constexpr = TILES.value.n
    PATCHED: tl.constexpr = C.value.patched
    if (tl.load(tensors.nonfinite + 2 * pid) | tl.load(tensors.nonfinite + 2 * pid + 1)) != 0:
        n_kv_heads = args.shape.n_heads // args.shape.ratio
        i_bh, i_tile = pid // args.n_columns, pid % args.n_columns
        i_b, i_hk = i_bh // n_kv_heads, i_bh % n_kv_heads
        i_done = -1
        for line in range(0, lines_per_tile(N, PATCHED)):
            i_given = unpermuted_tile(i_tile, line, args.n_columns, args.grid_width, N, PATCHED)
            if i_given != i_done:
                head = (
                    tensors.k + i_b * args.strides.k[0] + i_hk * args.strides.k[1],
                    tensors.v + i_b * args.strides.v[0] + i_hk * args.strides.v[1],
                    tensors.dk + i_b * args.strides.dk[0] + i_hk * args.strides.dk[1],
                    tensors.dv + i_b * args.strides.dv[0] + i_hk * args.strides.dv[1],
                )
                dkdv_rows(head, args.columns, i_b, i_hk, i_given, tensors, args, MASK, SCORE, DSCORE, TILES)
            i_done = i_given


@triton.jit
def dq_sum_block(p_sum, row, i_d: tl.constexpr, inside, scale, D_SUM: tl.constexpr):
    """64 rows, and the i_d-th 64 columns, of scaled dQ, 0 past the end. The sums lie in backward.fragment_order."""
    b_x = tl.load(p_sum + row * D_SUM + i_d * 4096 + tl.arange(0, 4096), mask=inside, other=0.0) * scale[2]
    return b_x.reshape(4, 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5).reshape(64, 64)


@triton.jit
def store_dq_block(p_dq, s_dq, b_x, i_d: tl.constexpr, first, n_q, grid_width, D_TRUE: tl.constexpr, PATCHED: tl.constexpr):
    """Stores the rows from `first` on, and the i_d-th 64 columns, where their tokens belong."""
    o_row, o_column = first + tl.arange(0, 64), i_d * 64 + tl.arange(0, 64)
    p = p_dq + unpermuted(o_row, grid_width, PATCHED).to(tl.int64)[:, None] * s_dq[2] + o_column[None, :] * s_dq[3]
    tl.store(p, b_x.to(p_dq.dtype.element_ty), mask=(o_row < n_q)[:, None] & (o_column < D_TRUE)[None, :])


# A tile that is a patch holds lines of HEIGHT tokens, each inside one tile of the unpermuted order. All of those tiles are recomputed.


@triton.constexpr_function
def lines_per_tile(tile, patched):
    """How many unpermuted tiles to look at for one tile."""
    return tile // HEIGHT.value if patched else 1


@triton.jit
def unpermuted_tile(i_tile, line, n_tiles, grid_width, TILE: tl.constexpr, PATCHED: tl.constexpr):
    """The unpermuted tile that holds a tile's line of this number."""
    if PATCHED:
        boxes: tl.constexpr = TILE // (HEIGHT * HEIGHT)
        line = tl.full((), line, tl.int32)  # lines of one row of the grid follow each other
        first = i_tile * TILE + line % boxes * (HEIGHT * HEIGHT) + line // boxes
        return tl.minimum(unpermuted(first, grid_width, True) // TILE, n_tiles - 1)
    else:
        return i_tile
