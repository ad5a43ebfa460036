"""What both Hopper kernels are made of: named barriers, mailbox between warps, and what a mask or score makes of a block.

Triton 3.9 knows only the short names of TMA operations (and of reinterpret), 3.6 only the long ones.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilewise.engines.gluon.patches import HEIGHT as HEIGHT_NUMBER
from tilewise.engines.gpu.config import LOG2E as LOG2E_NUMBER

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

LOG2E = gl.constexpr(LOG2E_NUMBER)
LN2 = gl.constexpr(1.0 / LOG2E_NUMBER)


# -- named barriers --------------------------------------------------------------------------------------------------
# A barrier is complete when all its threads have arrived or synced; who only arrives does not wait. Consumers hand stages back
# this way: an mbarrier's arrive costs a row_index bar.sync of the warpgroup. Triton itself uses the barriers 0 to 4.


@gluon.constexpr_function
def bar_text(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.b32 $0, 0;"  # inline assembly must have a result


@gluon.jit
def named_barrier_sync(barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(bar_text("sync", THREADS), "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(barrier, THREADS: gl.constexpr):
    gl.inline_asm_elementwise(bar_text("arrive", THREADS), "=r,r", [gl.to_tensor(barrier)], dtype=gl.int32, is_pure=False, pack=1)


# -- mailbox -----------------------------------------------------------------------------------------------------------
# The producer warp walks the tile map and tells the consumers what it sends them: one integer in shared memory, written before
# the arrival on the barrier that the consumers wait for.

WORD_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def new_mailbox(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], WORD_LAYOUT)


@gluon.jit
def mailbox_write(mailbox, tma_coords, value):
    mailbox.index(tma_coords).store(gl.full([1], 0, gl.int32, ONE_WARP) + value)


@gluon.jit
def mailbox_read(mailbox, tma_coords, WHO: gl.constexpr = WARPGROUP):
    return uniform(gl.max(mailbox.index(tma_coords).load(WHO), 0))


@gluon.jit
def uniform(number):
    """The same number, known to be the same in the row_index warp: loops and addresses made of it need no vector registers."""
    return gl.inline_asm_elementwise("redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=True, pack=1)


NEXT = gl.constexpr(
    "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
    " @first atom.global.inc.u32 $0, [$1], $2; redux.sync.or.b32 $0, $0, 0xffffffff; }"
)


@gluon.jit
def next_item(p_counter, n_items):
    """The next piece of work of all programs', for this warp: n_items or more when there is none. Every program asks exactly once in
    vain, and the counter wraps round to 0 with the last of these, ready for the next launch."""
    return gl.inline_asm_elementwise(NEXT, "=&r,l,r", [p_counter, n_items + gl.num_programs(0) - 1], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def runs_of(tiles, row):
    """Of a row of a map (a Walk's tensors): its first bits, and where its full runs begin, its masked ones, and the next row's."""
    bits = uniform(gl.load(tiles[6] + row))
    full_run = uniform(gl.load(tiles[3] + 3 * row))
    masked_run = uniform(gl.load(tiles[3] + 3 * row + 1))
    end = uniform(gl.load(tiles[3] + 3 * row + 3))
    return bits, full_run, masked_run, end


# -- tensors ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def several(count, shape):
    return [count, *shape]


@gluon.jit
def buffers_for(desc, COUNT: gl.constexpr):
    """Shared memory for so many blocks of a tensor."""
    return gl.allocate_shared_memory(desc.dtype, several(COUNT, desc.block_type.shape), desc.layout)


# PATCHED: tokens are in the order of strips (patches.py) of a grid that is `grid_width`.

HEIGHT = gl.constexpr(HEIGHT_NUMBER)


@gluon.jit
def tma_coords(i_b, i_h, row, grid_width, PATCHED: gl.constexpr):
    """Where the tile begins whose first token is `row`."""
    if PATCHED:
        strip = row // (HEIGHT * grid_width)
        return i_b, i_h, (row - strip * (HEIGHT * grid_width)) // HEIGHT, strip * HEIGHT, 0
    else:
        return i_b, i_h, row, 0


@gluon.jit
def unpermuted_row(row, o_row, grid_width, PATCHED: gl.constexpr):
    """Where tokens row + o_row, all of one strip, are in the order they are unpermuted in."""
    if PATCHED:
        strip = row // (HEIGHT * grid_width)
        column = (row - strip * (HEIGHT * grid_width)) // HEIGHT
        return (strip * HEIGHT + o_row % HEIGHT) * grid_width + column + o_row // HEIGHT
    else:
        return row + o_row


# -- scores ----------------------------------------------------------------------------------------------------------


# Score functions take places in two parts, to be added. Of the columns of a product's result a thread has 8 j + 2 c + e: what it knows of c comes
# in the first part, with where the tile begins; j and e, in the second, are constants to the compiler. So a float made of each part is an
# addition of a constant where it would be an addition and a conversion for every column (emit.Writer._apart).


@gluon.jit
def row_index(o, inside):
    """Places along rows, or of no known layout; whether all of them lie before the end."""
    return o, o & 0, inside


@gluon.jit
def column_index(first, o_column, inside):
    """Places first + o_column along columns."""
    return first + (o_column & 6), o_column & ~6, inside


@gluon.jit
def scored(b_s, scale, i_b, i_h, q, kv, score, SCORE: gl.constexpr):
    """What a score function makes of q.k. Places are in two parts (row_index, column_index)."""
    if SCORE is not None:
        b_s = SCORE(b_s * scale[0], i_b, i_h, q, kv, score[0], score[1], score[2], score[3])
    return b_s


# -- mask_bits (see mask_bits.py) --------------------------------------------------------------------------------------


@gluon.constexpr_function
def by_thread(rows, columns):
    """A block of scores with axes 1 and 3 apart, which a thread holds of a row."""
    return [rows, columns // 8, 4, 2]


@gluon.jit
def load_mask_bits(p_bits, row, wanted, n_left, b_like, MAPPED: gl.constexpr):
    """The words of a block like this one whose first row is `row` of all mask_bits; no bits from row n_left on, all others where no bits is `wanted`."""
    BY_THREAD: gl.constexpr = b_like.reshape(by_thread(b_like.shape[0], b_like.shape[1])).type.layout
    WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, BY_THREAD))
    o_row = gl.expand_dims(gl.arange(0, b_like.shape[0], gl.SliceLayout(1, WORDS)), 1)
    o_word = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, WORDS)), 0)
    b_words = gl.full([b_like.shape[0], 4], -1, gl.int32, WORDS)
    if MAPPED:
        b_words = gl.load(p_bits + row.to(gl.int64) * 4 + (o_row * 4 + o_word), mask=(o_row + o_word >= 0) & wanted, other=-1)
    return gl.where(o_row < n_left, b_words, 0)


@gluon.jit
def apply_mask_bits(b_s, b_words, other: gl.constexpr = float("-inf")):
    """`other` where a bits's bit is 0."""
    b_x = b_s.reshape(by_thread(b_s.shape[0], b_s.shape[1]))
    BY_THREAD: gl.constexpr = b_x.type.layout
    o_pair = gl.arange(0, b_x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, BY_THREAD))))
    o_one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, BY_THREAD))))
    b_bit = 1 << (axis(o_pair, 1) * 2 + axis(o_one, 3))
    b_x = gl.where((gl.expand_dims(gl.expand_dims(b_words, 1), 3) & b_bit) != 0, b_x, other)
    return gl.convert_layout(b_x.reshape(b_s.shape), b_s.type.layout, assert_trivial=True)


@gluon.jit
def axis(o_x, AT: gl.constexpr):
    """A vector along one axis of four."""
    for i in gl.static_range(4):
        if i != AT:
            o_x = gl.expand_dims(o_x, i)
    return o_x


@gluon.jit
def nonfinite_rows(b_x):
    """1 for rows with an element that is NaN or infinite, 0 for others."""
    return tl.max(gl.where(tl.abs(b_x) < float("inf"), 0, 1), 1)


@gluon.jit
def overflowed(b_m, b_l):
    """1 for rows whose sum overflowed or vanished though something was attended: scores so large that their own roundings exceed 100."""
    return gl.where((b_l == float("inf")) | ((b_l == 0.0) & (b_m != float("-inf"))), 1, 0)
