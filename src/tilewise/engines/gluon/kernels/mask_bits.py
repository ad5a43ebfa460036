"""Mask bits: a mask inside partial tiles, evaluated once per tile map instead of at every step of the Hopper kernels.

In each row of the scores, a thread of a warpgroup holds the columns 8 j + 2 c + e (c: its place among the four threads of the row; e: 0 or 1;
j < columns / 8). They are the bits 2 j + e of the word [row, c]: a thread loads one word for each of its rows, and an element costs one bit test.
"""

import triton
import triton.language as tl

from tilewise.engines.gpu.kernels.device_map import place_row


@triton.jit
def pack_mask_bits(p_bits, tables, order, captures, geometry, ints, floats, sizes, MASK: tl.constexpr, C: tl.constexpr):
    """The bits of all masked tiles of one row of the tile map, a block of [m, 4] words for each.

    A program packs ROWS_PER_PROGRAM rows of every block, so that it holds only [ROWS_PER_PROGRAM, COLUMNS] elements at a time. Blocks are numbered in the
    order in which the Hopper kernels visit them. `tables` are a schedule's offsets, starts and stops, and the number of each row's first block. `order` is
    where the rows' order is to be written, and how many tiles each has, if nobody has ordered them yet.
    """
    ROWS_PER_PROGRAM: tl.constexpr = C.value.rows_per_program
    COLUMNS: tl.constexpr = C.value.columns
    m, n_q, n_kv = geometry.m, geometry.n_q, geometry.n_kv
    row, i_part = tl.program_id(0) // geometry.n_programs, tl.program_id(0) % geometry.n_programs
    i_bh, i_tile = row // geometry.n_rows, row % geometry.n_rows
    if C.value.orders and i_part == 0:
        place_row(order[0], order[1], row, geometry.n_rows, C.value.chunk)
    i_b, i_h = i_bh // geometry.n_heads, i_bh % geometry.n_heads
    o_row = i_part * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    o_bit = tl.arange(0, COLUMNS) % (COLUMNS // 4)
    o_column = o_bit // 2 * 8 + tl.arange(0, COLUMNS) // (COLUMNS // 4) * 2 + o_bit % 2
    i_block = tl.load(tables[3] + row)
    first_partial = tl.load(tables[0] + 4 * row + 2)  # the runs before this one are full but for the end of the sequence
    for run in range(tl.load(tables[0] + 4 * row + 1), tl.load(tables[0] + 4 * row + 3)):
        for i_column in range(tl.load(tables[1] + run), tl.load(tables[2] + run)):
            if C.value.transposed:
                o_along, o_across = (i_tile * COLUMNS + o_column)[None, :], (i_column * m + o_row)[:, None]
            else:
                o_along, o_across = (i_tile * m + o_row)[:, None], (i_column * COLUMNS + o_column)[None, :]
            if C.value.by_keys:
                o_q, o_kv = o_across, o_along
            else:
                o_q, o_kv = o_along, o_across
            if MASK is None:  # only the end of the row cuts tiles: rows that share a block of bits write the same
                allowed = tl.broadcast_to((n_q - 1 - o_q) if C.value.by_keys else (n_kv - 1 - o_kv), [ROWS_PER_PROGRAM, COLUMNS])  # negative: forbidden
            else:
                allowed = (n_q - 1 - o_q) | (n_kv - 1 - o_kv)
                i_q, i_kv = tl.minimum(o_q, n_q - 1), tl.minimum(o_kv, n_kv - 1)
                allowed |= MASK(i_b, i_h, i_q, i_kv, captures, ints, floats, sizes) & tl.where(run >= first_partial, -1, 0)
            b_bits = tl.where(allowed >= 0, (1 << o_bit)[None, :], 0)  # [ROWS_PER_PROGRAM, COLUMNS]
            b_words = tl.sum(b_bits.reshape(ROWS_PER_PROGRAM, 4, COLUMNS // 4), 2)  # [ROWS_PER_PROGRAM, 4]
            p_words = p_bits + (i_block.to(tl.int64) * m + o_row[:, None]) * 4 + tl.arange(0, 4)[None, :]
            tl.store(p_words, b_words)
            i_block += 1
