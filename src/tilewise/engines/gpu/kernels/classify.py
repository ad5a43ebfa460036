"""The kernel that classifies tiles: whether a mask allows nothing, something or everything in each."""

import triton
import triton.language as tl


@triton.jit
def classify(p_states, p_tiles, n_tiles, n_share, geometry, mask, MASK: tl.constexpr, BOUNDS: tl.constexpr, C: tl.constexpr):
    """The state of each tile in a list: C.empty, C.partial or C.full.

    A program takes n_share tiles, at most C.tiles. The mask's bounds decide about all of them at once; the mask is evaluated in those that they leave open,
    or in all of them if it has no bounds. Tiles can have any size and are evaluated in blocks of one size, so that a mask has one such kernel, whatever tiles
    the other kernels use.
    """
    TILES: tl.constexpr = C.value.tiles
    EMPTY: tl.constexpr = C.value.empty
    FULL: tl.constexpr = C.value.full
    first = tl.program_id(0) * n_share
    o_tile = tl.arange(0, TILES)
    is_open = o_tile < tl.minimum(n_share, n_tiles - first)
    if BOUNDS is not None:
        b, h, q, kv = tile_bounds(tl.load(p_tiles + first + o_tile, mask=is_open, other=0), geometry)
        allowed = BOUNDS(b, h, q, kv, mask[0], mask[1], mask[2], mask[3])
        is_full, is_empty = (o_tile >= 0) & allowed[0], (o_tile >= 0) & (allowed[1] == 0)
        tl.store(p_states + first + o_tile, tl.where(is_full, FULL, EMPTY), mask=is_open & (is_full | is_empty))
        is_open = is_open & ((is_full | is_empty) == 0)
    left = tl.sum(tl.where(is_open, 1 << o_tile, 0), 0)  # a bit for each tile
    for i_tile in range(0, n_share):
        if (left >> i_tile) & 1:
            tl.store(p_states + first + i_tile, evaluated(tl.load(p_tiles + first + i_tile), geometry, mask, MASK, C))


@triton.jit
def tile_bounds(tile, geometry):
    """The batch element, head, queries and keys of tiles, given by their numbers: the first and the last of each."""
    row, i_kv = (tile // geometry.n_columns).to(tl.int32), (tile % geometry.n_columns).to(tl.int32)
    i_bh, i_q = row // geometry.n_rows, row % geometry.n_rows
    i_b, i_h, q, kv = i_bh // geometry.n_heads, i_bh % geometry.n_heads, i_q * geometry.m, i_kv * geometry.n
    last_q, last_kv = tl.minimum(q + geometry.m, geometry.n_q) - 1, tl.minimum(kv + geometry.n, geometry.n_kv) - 1
    return (i_b, i_b), (i_h, i_h), (q, last_q), (kv, last_kv)


@triton.jit
def evaluated(tile, geometry, mask, MASK: tl.constexpr, C: tl.constexpr):
    """The state of one tile, by evaluating the mask until an element is found that it allows and one that it forbids.

    Blocks are spread: each takes every so many rows and columns of the tile, from another one on, so that the first one shows of nearly all partial tiles what
    they are. Together they are the tile. Positions past its end repeat its last one.
    """
    ROWS: tl.constexpr = C.value.rows
    COLUMNS: tl.constexpr = C.value.columns
    b, h, q, kv = tile_bounds(tile, geometry)
    s_q, s_kv = tl.cdiv(q[1] - q[0] + 1, ROWS), tl.cdiv(kv[1] - kv[0] + 1, COLUMNS)
    forbidden, seen, i_block = 0, 0, 0
    while (i_block < s_q * s_kv) & ((forbidden == 0) | (forbidden == seen)):
        o_q = tl.minimum(q[0] + i_block // s_kv + tl.arange(0, ROWS) * s_q, q[1])[:, None]
        o_kv = tl.minimum(kv[0] + i_block % s_kv + tl.arange(0, COLUMNS) * s_kv, kv[1])[None, :]
        b_forbidden = tl.zeros([ROWS, COLUMNS], tl.int32)  # -1 where an element is forbidden
        b_forbidden += MASK(b[0], h[0], o_q, o_kv, mask[0], mask[1], mask[2], mask[3]) >> 31
        forbidden -= tl.sum(tl.sum(b_forbidden, 0), 0)  # the first sum is mostly one of registers
        seen += ROWS * COLUMNS
        i_block += 1
    return tl.where(forbidden == 0, C.value.full, tl.where(forbidden == seen, C.value.empty, C.value.partial))
