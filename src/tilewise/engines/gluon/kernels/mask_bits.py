"""Mask bits: what a mask allows inside the tiles where it applies, as bits, evaluated once for a map instead of at every step.

A thread of a warpgroup holds, of each row of its scores, the columns 8 j + 2 c + e (c: its tma_coords among the four threads of the row;
e: 0 or 1; j up to a tile's columns / 8). They are the bits 2 j + e of the word [row, c], so that a thread loads one word for each
of its rows, and an element costs one test of a bit.
"""

import triton
import triton.language as tl


@triton.jit
def pack_mask_bits(
    p_bits,
    tiles,
    first,
    n_rows,
    n_heads,
    n_blocks,
    m,
    n_q,
    n_kv,  # tiles of m rows, one block of bits for each masked tile of the schedule
    mask,
    MASK: tl.constexpr,
    BY_KEYS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program packs ROWS_PER_PROGRAM rows of all blocks of bits of one row of the map. BY_KEYS: the map's rows are key tiles. TRANSPOSED: a block's rows are the
    map's columns."""
    row, block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    i_bh, i_tile = row // n_rows, row % n_rows
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_row = block * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    o_bit = tl.arange(0, COLUMNS) % (COLUMNS // 4)
    o_column = o_bit // 2 * 8 + tl.arange(0, COLUMNS) // (COLUMNS // 4) * 2 + o_bit % 2
    bits = tl.load(first + row)
    by_mask = tl.load(tiles[1] + 3 * row + 2)  # runs before this one are full but for the end of the sequence
    for run in range(tl.load(tiles[1] + 3 * row + 1), tl.load(tiles[1] + 3 * row + 3)):
        start = tl.load(tiles[2] + run)
        for i_column in range(start, start + tl.load(tiles[3] + run)):
            if TRANSPOSED:
                o_here, o_there = (i_tile * COLUMNS + o_column)[None, :], (i_column * m + o_row)[:, None]
            else:
                o_here, o_there = (i_tile * m + o_row)[:, None], (i_column * COLUMNS + o_column)[None, :]
            if BY_KEYS:
                o_q, o_kv = o_there, o_here
            else:
                o_q, o_kv = o_here, o_there
            allowed = (n_q - 1 - o_q) | (n_kv - 1 - o_kv)  # negative: forbidden
            if MASK is not None:
                i_q, i_kv = tl.minimum(o_q, n_q - 1), tl.minimum(o_kv, n_kv - 1)
                allowed |= MASK(i_b, i_h, i_q, i_kv, mask[0], mask[1], mask[2], mask[3]) & tl.where(run >= by_mask, -1, 0)
            b_bits = tl.where(allowed >= 0, (1 << o_bit)[None, :], 0)
            b_words = tl.sum(b_bits.reshape(ROWS_PER_PROGRAM, 4, COLUMNS // 4), 2)
            p_words = p_bits + (bits.to(tl.int64) * m + o_row[:, None]) * 4 + tl.arange(0, 4)[None, :]
            tl.store(p_words, b_words)
            bits += 1
