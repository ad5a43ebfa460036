"""The kernels that make tile schedules on the device: nothing is copied to the host, and every size is known from shapes.

`base_states` evaluates a mask once, in base tiles of 16 x 16. Every kernel's tiles consist of whole base tiles, so that these serve all of them, and both
axes: `schedule_rows` puts them together and writes the runs of each row, `order_rows` the order in which programs take the rows (the Hopper engines' kernel
for mask bits, which comes next there, does that as well: one launch less). Where tiles were chosen from data, those are the base tiles, which kernels' tiles
divide.

A state is made of two bits, FORBIDS and ALLOWS: whether the mask forbids, and whether it allows, any element of a tile. A tile's is the union of its base
tiles'. Chosen tiles have the states of a map instead, which two masks of bits read in the same way: PARTIAL forbids, PARTIAL and FULL allow.
"""

import triton
import triton.language as tl


@triton.jit
def base_states(p_states, captures, geometry, ints, floats, sizes, MASK: tl.constexpr, C: tl.constexpr):
    """The states of the base tiles of a strip: SIZE queries by COLUMNS keys. Positions past the end repeat the last one."""
    SIZE: tl.constexpr = C.value.size
    COLUMNS: tl.constexpr = C.value.columns
    strip, i_block = tl.program_id(0) // geometry.n_blocks, tl.program_id(0) % geometry.n_blocks
    i_bh, i_q = strip // geometry.n_rows, strip % geometry.n_rows
    o_q = tl.minimum(i_q * SIZE + tl.arange(0, SIZE), geometry.n_q - 1)[:, None]
    o_kv = tl.minimum(i_block * COLUMNS + tl.arange(0, COLUMNS), geometry.n_kv - 1)[None, :]
    b_forbidden = tl.zeros([SIZE, COLUMNS], tl.int32)  # -1 where an element is forbidden
    b_forbidden += MASK(i_bh // geometry.n_heads, i_bh % geometry.n_heads, o_q, o_kv, captures, ints, floats, sizes) >> 31
    b_count = tl.sum(tl.sum(b_forbidden, 0).reshape(COLUMNS // SIZE, SIZE), 1)  # of each base tile; the first sum is one of registers
    b_state = tl.where(b_count < 0, C.value.forbids, 0) | tl.where(b_count > -SIZE * SIZE, C.value.allows, 0)
    o_tile = i_block * (COLUMNS // SIZE) + tl.arange(0, COLUMNS // SIZE)
    tl.store(p_states + strip.to(tl.int64) * geometry.n_columns + o_tile, b_state.to(tl.int8), mask=o_tile < geometry.n_columns)


@triton.jit
def schedule_rows(p_states, tables, geometry, C: tl.constexpr):
    """The runs of one row of a tile map: consecutive tiles of one kind, CHUNK tiles at a time, so that a run ends at a chunk's end.

    How many runs a row has only its end shows, so that its full runs are laid down backwards and its partial ones forwards from the same place in the
    row's room. Between them lies the tile that the end of the sequence cuts (see primitives.py).
    """
    CHUNK: tl.constexpr = C.value.chunk
    ALONG: tl.constexpr = C.value.along
    ACROSS: tl.constexpr = C.value.across
    PADDED: tl.constexpr = C.value.padded_across
    n_along, n_across, n_columns = geometry.n_along, geometry.n_across, geometry.n_columns
    row = tl.program_id(0)
    i_bh, i_row = row // geometry.n_rows, row % geometry.n_rows
    o_base = tl.arange(0, C.value.padded_along * PADDED)  # of a tile
    o_along, o_across = o_base // PADDED, o_base % PADDED
    i_along = i_row // geometry.split_along * ALONG + o_along
    in_tile = (o_along < ALONG) & (o_across < ACROSS) & (i_along < n_along)
    p_row = p_states + i_bh.to(tl.int64) * geometry.s_head + i_along * geometry.s_along  # [base tiles of a tile]
    o_tile = tl.arange(0, CHUNK)
    middle = row * (2 * geometry.n_half + 1) + geometry.n_half  # of the row's room
    n_full, n_partial, n_tiles, n_masked, has_cut = 0, 0, 0, 0, 0
    for first in range(0, n_columns, CHUNK):
        i_tile = first + o_tile
        i_across = (i_tile // geometry.split_across)[:, None] * ACROSS + o_across[None, :]
        inside = in_tile[None, :] & (i_across < n_across) & (i_tile < n_columns)[:, None]
        b_states = tl.load(p_row[None, :] + i_across * geometry.s_across, mask=inside, other=0).to(tl.int32)
        b_counts = tl.sum(tl.where((b_states & C.value.forbids) != 0, 1, 0) + tl.where((b_states & C.value.allows) != 0, 0x10000, 0), 1)
        forbids, allows = (b_counts & 0xFFFF) != 0, b_counts >= 0x10000
        is_cut = allows & (i_tile == n_columns - 1) & (geometry.is_cut != 0)
        is_full, is_partial, is_cut = allows & (forbids == 0) & (is_cut == 0), allows & forbids, is_cut & (forbids == 0)
        n_full += write_runs(tables, is_full, first, middle - 1 - n_full, -1, C)
        n_partial += write_runs(tables, is_partial, first, middle + geometry.is_cut + n_partial, 1, C)
        has_cut += tl.sum(is_cut.to(tl.int32), 0)
        n_masked += tl.sum((is_partial | is_cut).to(tl.int32), 0)
        n_tiles += tl.sum(allows.to(tl.int32), 0)
    if geometry.is_cut != 0:  # a run of one tile, or of none
        tl.store(tables[4] + middle, n_columns - has_cut)
        tl.store(tables[5] + middle, n_columns)
    tl.store(tables[1] + row, n_tiles)
    tl.store(tables[2] + row, n_masked)
    tl.store(tables[3] + 4 * row, middle - n_full)
    tl.store(tables[3] + 4 * row + 1, middle)
    tl.store(tables[3] + 4 * row + 2, middle + geometry.is_cut)
    tl.store(tables[3] + 4 * row + 3, middle + geometry.is_cut + n_partial)
    tl.store(tables[6] + row, row * geometry.n_bits)


@triton.jit
def write_runs(tables, is_member, first, place, STEP: tl.constexpr, C: tl.constexpr):
    """Writes the runs of the tiles of a chunk that belong to a set, from `place` on, forwards or backwards; how many there are."""
    CHUNK: tl.constexpr = C.value.chunk
    o_tile = tl.arange(0, CHUNK)
    b_member = is_member.to(tl.int32)
    begins = is_member & ((o_tile == 0) | (tl.gather(b_member, tl.maximum(o_tile - 1, 0), 0) == 0))
    ends = is_member & ((o_tile == CHUNK - 1) | (tl.gather(b_member, tl.minimum(o_tile + 1, CHUNK - 1), 0) == 0))
    b_begins = begins.to(tl.int32)
    i_run = place + STEP * (tl.cumsum(b_begins, 0) - 1)
    tl.store(tables[4] + i_run, first + o_tile, mask=begins)
    tl.store(tables[5] + i_run, first + o_tile + 1, mask=ends)
    return tl.sum(b_begins, 0)


@triton.jit
def order_rows(tables, n_rows, C: tl.constexpr):
    place_row(tables[0], tables[1], tl.program_id(0), n_rows, C.value.chunk)


@triton.jit
def place_row(p_order, p_tiles, row, n_rows, CHUNK: tl.constexpr):
    """Puts one row of a tile map in its place among those of its head: the rows with more tiles come before it, and the earlier ones with as many."""
    i_row = row % n_rows
    head = row - i_row
    n_tiles = tl.load(p_tiles + row)
    before = 0
    for first in range(0, n_rows, CHUNK):
        o_row = first + tl.arange(0, CHUNK)
        b_tiles = tl.load(p_tiles + head + o_row, mask=o_row < n_rows, other=-1)
        before += tl.sum(((b_tiles > n_tiles) | ((b_tiles == n_tiles) & (o_row < i_row))).to(tl.int32), 0)
    tl.store(p_order + head + before, i_row)
