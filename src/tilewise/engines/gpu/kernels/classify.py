"""The kernel that classifies tiles: whether a mask allows nothing, something or everything in each."""

import triton
import triton.language as tl


@triton.jit
def classify(p_states, p_tiles, n_tiles, geometry, mask, MASK: tl.constexpr, C: tl.constexpr):
    """The state of each tile in a list: C.empty, C.partial or C.full.

    A program takes a few tiles, one after the other, because a tile is little work. Tiles can have any size and are evaluated in blocks of one
    size, so that a mask has one such kernel, whatever tiles the other kernels use.
    """
    TILES_PER_PROGRAM: tl.constexpr = C.value.tiles_per_program
    EMPTY: tl.constexpr = C.value.empty
    PARTIAL: tl.constexpr = C.value.partial
    FULL: tl.constexpr = C.value.full
    first = tl.program_id(0) * TILES_PER_PROGRAM
    for i_tile in range(first, tl.minimum(first + TILES_PER_PROGRAM, n_tiles)):
        tile = tl.load(p_tiles + i_tile)
        row, i_kv = tile // geometry.n_columns, (tile % geometry.n_columns).to(tl.int32)
        i_bh, i_q = (row // geometry.n_rows).to(tl.int32), (row % geometry.n_rows).to(tl.int32)
        forbidden, seen = count_forbidden(i_bh // geometry.n_heads, i_bh % geometry.n_heads, i_q, i_kv, geometry, mask, MASK, C)
        tl.store(p_states + i_tile, tl.where(forbidden == 0, FULL, tl.where(forbidden == seen, EMPTY, PARTIAL)))


@triton.jit
def count_forbidden(i_b, i_h, i_q, i_kv, geometry, mask, MASK: tl.constexpr, C: tl.constexpr):
    """How many elements of a tile are forbidden, and how many were evaluated. Positions past the tile's end repeat its last one."""
    ROWS: tl.constexpr = C.value.rows
    COLUMNS: tl.constexpr = C.value.columns
    m, n = geometry.m, geometry.n
    last_q, last_kv = tl.minimum(i_q * m + m, geometry.n_q) - 1, tl.minimum(i_kv * n + n, geometry.n_kv) - 1
    b_forbidden = tl.zeros([ROWS, COLUMNS], tl.int32)  # minus the number of blocks that forbid each position
    seen = 0
    for q in range(i_q * m, last_q + 1, ROWS):
        o_q = tl.minimum(q + tl.arange(0, ROWS), last_q)[:, None]
        for kv in range(i_kv * n, last_kv + 1, COLUMNS):
            o_kv = tl.minimum(kv + tl.arange(0, COLUMNS), last_kv)[None, :]
            b_forbidden += MASK(i_b, i_h, o_q, o_kv, mask[0], mask[1], mask[2], mask[3]) >> 31  # negative: forbidden
            seen += ROWS * COLUMNS
    return -tl.sum(tl.sum(b_forbidden, 1), 0), seen
