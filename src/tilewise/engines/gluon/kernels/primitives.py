"""Building blocks of the Hopper kernels: named barriers, mailboxes between warps, TMA coordinates, score functions and mask bits on wgmma's layouts.

The TMA operations (and reinterpret) have short names only in Triton 3.9, long names only in 3.6.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.engines.gluon import named_barriers
from tilewise.engines.gluon.patches import HEIGHT as HEIGHT_NUMBER
from tilewise.engines.gpu import config

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

LOG2E = gl.constexpr(config.LOG2E)
LN2 = gl.constexpr(1.0 / config.LOG2E)
SMALLEST_SUM = gl.constexpr(config.SMALLEST_SUM)
LARGEST_SUM = gl.constexpr(config.LARGEST_SUM)


# -- synchronization -------------------------------------------------------------------------------------------------
# mbarriers announce what TMA has loaded; warps tell each other everything else by named barriers (the table is named_barriers.py).

WARP_THREADS = gl.constexpr(named_barriers.WARP)
WARPGROUP_THREADS = gl.constexpr(named_barriers.WARPGROUP)
TWO_WARPGROUPS = gl.constexpr(2 * named_barriers.WARPGROUP)
WARPGROUP_AND_WARP = gl.constexpr(named_barriers.WARPGROUP + named_barriers.WARP)


@gluon.constexpr_function
def barrier_asm(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.b32 $0, 0;"  # inline assembly must have a result


@gluon.jit
def named_barrier_sync(barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(barrier_asm("sync", THREADS), "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(barrier_asm("arrive", THREADS), "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def phase(i, STAGES: gl.constexpr):
    """The parity to wait for on an mbarrier of a ring of stages, for the i-th use of the ring: uses 0 to STAGES - 1 complete phase 0."""
    return (i // STAGES) & 1


@gluon.jit
def uniform(number):
    """The same number, which the compiler then knows to be equal in all lanes of the warp: loop bounds and addresses made of it stay in uniform registers."""
    return gl.inline_asm_elementwise("redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=True, pack=1)


# -- mailbox ---------------------------------------------------------------------------------------------------------
# Only the producer (the load warp) walks the tile schedule. It tells the other warps what it sends them by a few int32 in shared memory,
# written before its own arrival on the mbarrier that they wait for.

WORD_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ONE_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def new_mailbox(SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [SLOTS, 1], WORD_LAYOUT)


@gluon.jit
def mailbox_write(mailbox, slot, value):
    mailbox.index(slot).store(gl.full([1], 0, gl.int32, ONE_WARP) + value)


@gluon.jit
def mailbox_read(mailbox, slot, READER: gl.constexpr = ONE_WARPGROUP):
    return uniform(gl.max(mailbox.index(slot).load(READER), 0))


# -- tile schedule ---------------------------------------------------------------------------------------------------

# Fields of `tiles`, the tensors of a HopperSchedule (tile_schedule.py). A row of the map is a query tile (forward) or a key tile (backward).
ORDER = gl.constexpr(0)  # rows, longest first
N_TILES = gl.constexpr(1)  # tiles to visit, by row
N_MASKED = gl.constexpr(2)  # how many of them are masked
OFFSETS = gl.constexpr(3)  # four per row: first run of full tiles, of tiles cut by the sequence's end, of partly masked tiles, and the end of its runs
START = gl.constexpr(4)  # first tile of a run
STOP = gl.constexpr(5)  # the tile after its last
FIRST_BITS = gl.constexpr(6)  # index of a row's first block of mask bits; its masked tiles' blocks follow one another
MASK_BITS = gl.constexpr(7)  # all blocks of mask bits, [blocks, rows, 4] int32


@gluon.jit
def runs_of(tiles, row):
    """Of a row of the map: the index of its first block of mask bits, its first full run, its first masked run, and the end of its runs."""
    i_bits = uniform(gl.load(tiles[FIRST_BITS] + row))
    full_run = uniform(gl.load(tiles[OFFSETS] + 4 * row))
    masked_run = uniform(gl.load(tiles[OFFSETS] + 4 * row + 1))
    end = uniform(gl.load(tiles[OFFSETS] + 4 * row + 3))
    return i_bits, full_run, masked_run, end


NEXT_ITEM_ASM = gl.constexpr(
    "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
    " @first atom.global.inc.u32 $0, [$1], $2; redux.sync.or.b32 $0, $0, 0xffffffff; }"
)


@gluon.jit
def next_item(p_counter, n_items):
    """Draws the next work item from the counter that all programs share; n_items or more when none is left. Every program draws exactly one item too many,
    and the last of these draws wraps the counter to 0 (atom.inc), so that it is ready for the next launch."""
    return gl.inline_asm_elementwise(NEXT_ITEM_ASM, "=&r,l,r", [p_counter, n_items + gl.num_programs(0) - 1], dtype=gl.int32, is_pure=False, pack=1)


# -- tensors ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def wgmma_layout(columns):
    """Registers of a warpgroup that hold a [64, columns] accumulator of wgmma."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def with_stages(stages, shape):
    return [stages, *shape]


@gluon.jit
def buffers_for(desc, STAGES: gl.constexpr):
    """Shared memory for so many TMA blocks of a tensor."""
    return gl.allocate_shared_memory(desc.dtype, with_stages(STAGES, desc.block_type.shape), desc.layout)


# PATCHED: tokens of a 2-D grid, `grid_width` columns wide, are in strip order (patches.py): HEIGHT rows of the grid at a time, column by column.

HEIGHT = gl.constexpr(HEIGHT_NUMBER)


@gluon.jit
def tma_coords(i_b, i_h, row, grid_width, PATCHED: gl.constexpr):
    """TMA coordinates of the tile whose first token is `row`."""
    if PATCHED:
        strip = row // (HEIGHT * grid_width)
        return i_b, i_h, (row - strip * (HEIGHT * grid_width)) // HEIGHT, strip * HEIGHT, 0
    else:
        return i_b, i_h, row, 0


@gluon.jit
def unpermuted_row(row, o_row, grid_width, PATCHED: gl.constexpr):
    """Rows of the tensors for tokens row + o_row in strip order, all of one strip."""
    if PATCHED:
        strip = row // (HEIGHT * grid_width)
        column = (row - strip * (HEIGHT * grid_width)) // HEIGHT
        return (strip * HEIGHT + o_row % HEIGHT) * grid_width + column + o_row // HEIGHT
    else:
        return row + o_row


# -- score functions -------------------------------------------------------------------------------------------------

# Score functions take q and kv as sums of two terms (split_index in gpu/mods.py). A thread holds columns 8 j + 2 c + e of an accumulator's row.
# Its own c goes into the first term, with the tile's start; j and e, in the second, are constants to the compiler. A float made of a column
# then costs one addition of a constant, instead of an integer addition and a conversion for each column (Writer._split_float in gpu/emit.py).


@gluon.jit
def row_index(o, in_bounds):
    """Indices along rows as (first term, second term, whether all of them are in bounds); also right for an index of any other layout."""
    return o, o & 0, in_bounds


@gluon.jit
def column_index(first, o_column, in_bounds):
    """Indices first + o_column along an accumulator's columns, as (first term, second term, whether all of them are in bounds)."""
    return first + (o_column & 6), o_column & ~6, in_bounds


@gluon.jit
def apply_score(b_s, scale, i_b, i_h, q_index, kv_index, score, SCORE: gl.constexpr):
    """score(scale * q.k), still to be multiplied by scale[1]; without a score function q.k as it is. q_index, kv_index: see row_index, column_index."""
    if SCORE is not None:
        b_s = SCORE(b_s * scale[0], i_b, i_h, q_index, kv_index, score[0], score[1], score[2], score[3])
    return b_s


# -- mask bits (packed by kernels/mask_bits.py) ----------------------------------------------------------------------


@gluon.constexpr_function
def fragment_shape(rows, columns):
    """A [rows, columns] accumulator as [rows, columns / 8, 4, 2]: axis 2 runs over the four lanes that share a row, a thread holds axes 1 and 3."""
    return [rows, columns // 8, 4, 2]


@gluon.jit
def load_mask_bits(p_bits, row, wanted, n_left, b_like, MAPPED: gl.constexpr):
    """Mask bits of a block shaped like b_like, one word per row and lane: [rows, 4] int32. `row`: the block's first row among all mask bits.
    All ones (nothing is masked) unless `wanted`; zeros from row n_left on."""
    FRAGMENTS: gl.constexpr = b_like.reshape(fragment_shape(b_like.shape[0], b_like.shape[1])).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, FRAGMENTS))
    o_row = gl.expand_dims(gl.arange(0, b_like.shape[0], gl.SliceLayout(1, WORDS)), 1)
    o_word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
    b_words = gl.full([b_like.shape[0], 4], -1, gl.int32, WORDS)
    if MAPPED:
        b_words = gl.load(p_bits + row.to(gl.int64) * 4 + (o_row * 4 + o_word), mask=(o_row + o_word >= 0) & wanted, other=-1)
    return gl.where(o_row < n_left, b_words, 0)


@gluon.jit
def apply_mask_bits(b_s, b_words, other: gl.constexpr = float("-inf")):
    """b_s where the mask bit is 1, `other` where it is 0. b_words: [rows, 4], of load_mask_bits."""
    b_x = b_s.reshape(fragment_shape(b_s.shape[0], b_s.shape[1]))
    FRAGMENTS: gl.constexpr = b_x.type.layout
    o_group = gl.arange(0, b_x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, FRAGMENTS))))  # j of column 8 j + 2 c + e
    o_pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, FRAGMENTS))))  # e
    b_bit = 1 << (along_axis(o_group, 1) * 2 + along_axis(o_pair, 3))
    b_x = gl.where((gl.expand_dims(gl.expand_dims(b_words, 1), 3) & b_bit) != 0, b_x, other)
    return gl.convert_layout(b_x.reshape(b_s.shape), b_s.type.layout, assert_trivial=True)


@gluon.jit
def along_axis(o_x, AXIS: gl.constexpr):
    """A vector as a 4-D tensor along one axis."""
    for i in gl.static_range(4):
        if i != AXIS:
            o_x = gl.expand_dims(o_x, i)
    return o_x


# -- results that are recomputed (fwd_fixup.py, bwd_pre_post.py) -----------------------------------------------------


@gluon.jit
def nonfinite_rows(b_x):
    """1 for rows with a NaN or infinite element, 0 for others."""
    return tl.max(gl.where(tl.abs(b_x) < float("inf"), 0, 1), 1)


@gluon.jit
def overflowed(b_m, b_l):
    """1 for rows that attend something and whose softmax sum is out of range: scores so large that their rounding errors exceed 60, or that have risen too far
    above an anchor."""
    return gl.where((b_m != float("-inf")) & ((b_l < SMALLEST_SUM) | (b_l > LARGEST_SUM)), 1, 0)
