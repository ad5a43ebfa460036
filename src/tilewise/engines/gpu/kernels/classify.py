"""The kernel that looks into tiles: whether a mask allows nothing, something or everything of each.

It takes tiles of any size, in blocks of one size, so that a mask has one such kernel whatever tiles the others cut.
"""

import triton
import triton.language as tl


@triton.jit
def classify(
    p_states,
    p_tiles,
    n_tiles,
    n_heads,
    n_rows,
    n_columns,
    n_q,
    n_kv,
    m,
    n,  # tiles of m x n by their numbers in a list of all, row by row
    mask,  # (captures, ints, floats, sizes and strides)
    MASK: tl.constexpr,
    EMPTY: tl.constexpr,
    PARTIAL: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES_PER_PROGRAM: tl.constexpr,
):
    first = tl.program_id(0) * TILES_PER_PROGRAM
    for i_tile in range(first, tl.minimum(first + TILES_PER_PROGRAM, n_tiles)):
        tile = tl.load(p_tiles + i_tile)
        row, i_kv = tile // n_columns, (tile % n_columns).to(tl.int32)
        i_bh, i_q = (row // n_rows).to(tl.int32), (row % n_rows).to(tl.int32)
        forbidden, seen = count_forbidden(i_bh // n_heads, i_bh % n_heads, i_q, i_kv, n_q, n_kv, m, n, mask, MASK, ROWS, COLUMNS)
        tl.store(p_states + i_tile, tl.where(forbidden == 0, FULL, tl.where(forbidden == seen, EMPTY, PARTIAL)))


@triton.jit
def count_forbidden(i_b, i_h, i_q, i_kv, n_q, n_kv, m, n, mask, MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """How many of a tile's elements are forbidden, and how many were looked at: places past its end count as its last one."""
    last_q, last_kv = tl.minimum(i_q * m + m, n_q) - 1, tl.minimum(i_kv * n + n, n_kv) - 1
    b_forbidden = tl.zeros([ROWS, COLUMNS], tl.int32)  # the number of blocks, negated, in which a place is forbidden
    seen = 0
    for q in range(i_q * m, last_q + 1, ROWS):
        o_q = tl.minimum(q + tl.arange(0, ROWS), last_q)[:, None]
        for kv in range(i_kv * n, last_kv + 1, COLUMNS):
            o_kv = tl.minimum(kv + tl.arange(0, COLUMNS), last_kv)[None, :]
            b_forbidden += MASK(i_b, i_h, o_q, o_kv, mask[0], mask[1], mask[2], mask[3]) >> 31  # negative: forbidden
            seen += ROWS * COLUMNS
    return -tl.sum(tl.sum(b_forbidden, 1), 0), seen
