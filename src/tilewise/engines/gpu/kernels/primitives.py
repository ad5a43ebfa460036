"""Device functions that kernels share.

Names: p_ pointer, s_ stride, i_ index of a tile or head, o_ offsets of elements, b_ block in registers, n_ count. `bh` is (batch, query head).
`args` and `mods` are NamedTuples of kernel_args.py. Exponentials are in base 2: P = 2^(c s - c m), where c = mods.scale[1] is log2(e) times
whatever factor of the scores was not applied before (gpu/mods.scales). MASK(...) returns integers, negative where an element is masked: masks
combine by |, and & 0 switches one off.
"""

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from tilewise.engines.gpu import config

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
LOG2E: tl.constexpr = tl.constexpr(config.LOG2E)
SMALLEST_SUM: tl.constexpr = tl.constexpr(config.SMALLEST_SUM)
LARGEST_SUM: tl.constexpr = tl.constexpr(config.LARGEST_SUM)


@triton.jit
def load_rows(
    p_first, s, n_left, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_TRUE: tl.constexpr, BOUNDED: tl.constexpr = True, NARROW: tl.constexpr = False
):
    """Rows of a matrix as [ROWS, COLUMNS], 0 outside it. `s` are strides (batch, head, sequence, dim), p_first points to the first row.

    BOUNDED: fewer than ROWS rows may be left. Offsets within a tile fit 30 bits (limits.MAX_TILE_SPAN); NARROW tells the compiler so, which then keeps
    each in one register instead of two. Whether that pays can only be measured.
    """
    o_row = tl.arange(0, ROWS)
    o_column = tl.arange(0, COLUMNS)
    o = o_row[:, None] * tl.cast(s[2], tl.int32) + o_column[None, :] * s[3]
    if NARROW:
        o = o.to(tl.uint32) % 0x40000000
    p = p_first + o
    if COLUMNS == COLUMNS_TRUE:
        if BOUNDED:
            return tl.load(p, mask=o_row[:, None] < n_left, other=0.0)
        else:
            return tl.load(p)
    else:
        if BOUNDED:
            return tl.load(p, mask=(o_row[:, None] < n_left) & (o_column[None, :] < COLUMNS_TRUE), other=0.0)
        else:
            return tl.load(p, mask=o_column[None, :] < COLUMNS_TRUE, other=0.0)


@triton.jit
def kv_head(p, s, i_b, i_hk, PAGE: tl.constexpr):
    """Where the keys, or values, of a head begin: of batch element i_b, or in the first page."""
    if PAGE > 0:
        return p + i_hk * s[1]
    else:
        return p + (i_b * s[0] + i_hk * s[1])


@triton.jit
def load_kv(
    p_head,
    s,
    first,
    n_kv,
    i_b,
    pages,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_TRUE: tl.constexpr,
    PAGE: tl.constexpr,
    BOUNDED: tl.constexpr = True,
    NARROW: tl.constexpr = False,
    PAIRED: tl.constexpr = False,
):
    """ROWS keys or values from `first` on, a multiple of ROWS, as load_rows gives them: of the first n_kv of a head, of batch element i_b. In pages (PAGE rows
    each), the table says where each is; an entry of it that is no page counts as the nearest. Those that no sequence has are 0 where BOUNDED.

    PAIRED: elements are bytes, and come two by two, as [ROWS, COLUMNS // 2] of 16 bits."""
    if PAGE == 0:
        return load_rows(p_head + first * s[2], s, n_kv - first, ROWS, COLUMNS, COLUMNS_TRUE, BOUNDED, NARROW)
    else:
        o_row = tl.arange(0, ROWS)
        o_kv = first + o_row
        ONE: tl.constexpr = PAGE // ROWS * ROWS == PAGE  # page has them all
        if ONE:
            i_page, o_within = first // PAGE, o_row
            p_head += first % PAGE * s[2]
        elif ROWS // PAGE * PAGE == ROWS:  # whole pages: rows of every tile lie at the same places in them
            i_page, o_within = first // PAGE + o_row // PAGE, o_row % PAGE
        else:  # rows may lie anywhere in large pages
            i_page, o_within = o_kv // PAGE, (o_kv % PAGE).to(tl.int64)
        if BOUNDED:
            i_page = tl.minimum(i_page, (n_kv - 1) // PAGE)
        p_page = p_head + nearest_page(tl.load(pages.table + i_b.to(tl.int64) * pages.stride + i_page), pages) * s[0]
        if ONE and not BOUNDED and not PAIRED:
            return load_rows(p_page, s, ROWS, ROWS, COLUMNS, COLUMNS_TRUE, False, NARROW)
        o_within = o_within * tl.cast(s[2], o_within.dtype)
        if ONE:  # one register each, as NARROW does in load_rows: with two, fewer programs fit a multiprocessor
            o_within = o_within.to(tl.uint32) % 0x40000000
        p_row = (p_page + o_within)[:, None]
        BYTES: tl.constexpr = 2 if PAIRED else 1
        o_column = tl.arange(0, COLUMNS // BYTES)[None, :]
        if PAIRED:
            p = p_row.to(tl.pointer_type(tl.int16)) + o_column
        else:
            p = p_row + o_column * s[3]
        inside = o_column < COLUMNS_TRUE // BYTES
        if BOUNDED:  # rows that are not written may hold NaN: to find that out from the results would cost far more
            o_sequence = tl.minimum(o_kv, n_kv - 1) // pages.span
            n_keys = tl.load(pages.lengths + (i_b * pages.n_sequences + o_sequence))  # [ROWS]
            inside = inside & ((o_kv < n_kv) & (o_kv - o_sequence * pages.span < n_keys))[:, None]
        return tl.load(p, mask=inside, other=0.0)


@triton.jit
def nearest_page(page, pages):
    return tl.maximum(tl.minimum(page, pages.n_pages - 1), 0)


@triton.jit
def store_rows(p_first, s, b_x, n_left, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_TRUE: tl.constexpr):
    """Stores x [ROWS, COLUMNS] into a matrix of n_left more rows and COLUMNS_TRUE columns."""
    o_row = tl.arange(0, ROWS)
    o_column = tl.arange(0, COLUMNS)
    p = p_first + (o_row[:, None] * s[2] + o_column[None, :] * s[3])
    tl.store(p, b_x.to(p_first.dtype.element_ty), mask=(o_row[:, None] < n_left) & (o_column[None, :] < COLUMNS_TRUE))


# A row of a tile schedule visits runs of consecutive tiles, in three groups: full tiles, full tiles that the end of the sequence cuts, partial tiles.
# offsets[4 row + g] is the first run of group g, offsets[4 row + 3] the end of the row's runs; starts and stops give each run's first tile and the one after
# its last.


@triton.jit
def full_runs(schedule, row):
    """The runs whose tiles need to check neither the end of the sequence nor the mask."""
    return tl.load(schedule.offsets + 4 * row), tl.load(schedule.offsets + 4 * row + 1)


@triton.jit
def masked_runs(schedule, row):
    """The other runs."""
    return tl.load(schedule.offsets + 4 * row + 1), tl.load(schedule.offsets + 4 * row + 3)


@triton.jit
def all_runs(schedule, row, MAPPED: tl.constexpr):
    """Without a tile map everything is one run."""
    if MAPPED:
        return tl.load(schedule.offsets + 4 * row), tl.load(schedule.offsets + 4 * row + 3)
    else:
        return 0, 1


@triton.jit
def run_of(schedule, run):
    """A run's first tile, and the one after its last."""
    return tl.load(schedule.starts + run), tl.load(schedule.stops + run)


@triton.jit
def mask_applies(schedule, row, run, GIVEN: tl.constexpr):
    """-1 if the mask applies inside a run's tiles, 0 if they are full regardless of it: `MASK(...) & this` is negative where an element is forbidden.

    Only a caller's own tiles (GIVEN) can be full where the mask forbids something. All others are full because the mask allows everything.
    """
    if GIVEN:
        return tl.where(run >= tl.load(schedule.offsets + 4 * row + 2), -1, 0)
    else:
        return -1


@triton.jit
def dot_rows(b_x, b_y, PRECISION: tl.constexpr):
    """x y^T. A float32 product's error grows with the length of its sums: a head dim longer than 128 is summed 128 at a time."""
    if (PRECISION == "tf32") or (b_x.dtype != tl.float32):
        return tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    elif b_x.shape[1] == 256:
        return dot_256(b_x, b_y, PRECISION)
    elif b_x.shape[1] == 512:
        b_x0, b_x1 = split_even_odd(b_x)
        b_y0, b_y1 = split_even_odd(b_y)
        return dot_256(b_x0, b_y0, PRECISION) + dot_256(b_x1, b_y1, PRECISION)
    else:
        return tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)


@triton.jit
def dot_256(b_x, b_y, PRECISION: tl.constexpr):
    """x y^T over a head dim of 256, as two sums over 128."""
    b_x0, b_x1 = split_even_odd(b_x)
    b_y0, b_y1 = split_even_odd(b_y)
    return add_unfused(tl.dot(b_x0, tl.trans(b_y0), input_precision=PRECISION), 1.0, tl.dot(b_x1, tl.trans(b_y1), input_precision=PRECISION))


@triton.jit
def dot_rows_bwd(b_x, b_y, PRECISION: tl.constexpr):
    """dot_rows for the backward: with bf16x6, a sum over 256 is accurate enough for gradients, and a third faster than two over 128."""
    if (PRECISION == "bf16x6") and (b_x.shape[1] == 256):
        return tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION)
    else:
        return dot_rows(b_x, b_y, PRECISION)


@triton.jit
def accumulate_pv(b_acc, b_decay, b_p, b_v, PRECISION: tl.constexpr):
    """acc * decay + P V: acc [M, DV], decay [M], P [M, N], V [N, DV]. In IEEE float32, P V gets an accumulator of its own, because every error of
    the output enters the backward's delta."""
    if (PRECISION != "ieee") or (b_v.dtype != tl.float32):
        return tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision=PRECISION)
    else:
        return add_unfused(b_acc, b_decay[:, None], tl.dot(b_p, b_v, input_precision="ieee"))


@triton.jit
def add_unfused(b_x, factor, b_y):
    """x factor + y as an fma, so that Triton cannot fold x into the accumulator of the tl.dot that made y."""
    return tl.fma(b_x, factor, b_y)


@triton.jit
def split_even_odd(b_x):
    """The even columns and the odd ones."""
    return tl.split(b_x.reshape(b_x.shape[0], b_x.shape[1] // 2, 2))


@triton.jit
def join_even_odd(b_even, b_odd):
    """One block of even columns and odd ones."""
    return tl.join(b_even, b_odd).reshape(b_even.shape[0], 2 * b_even.shape[1])


@triton.jit
def as_float16(b_x):
    """Rows of bfloat16 as float16, each times a power of two that takes its largest element near the end of float16's range, and one over those powers [M].
    What is lost is less than 2^-39 of the largest element."""
    exponent = tl.max(tl.abs(b_x.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(127 + 14 + 127 - exponent, 253)  # also biased
    b_scaled = b_x.to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)[:, None]
    return b_scaled.to(tl.float16), ((254 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit
def final_scores(b_s, bh, i_q, o_kv, n_kv, applies, mods, MASK: tl.constexpr, SCORE: tl.constexpr, MASKED: tl.constexpr):
    """From q.k to the final score [M, N]: the score function, then -inf where the mask (see mask_applies) or the end of the sequence forbids.
    Still to be multiplied by mods.scale[1]."""
    i_kv = tl.minimum(o_kv, n_kv - 1)[None, :]
    if SCORE is not None:
        b_s = SCORE(b_s * mods.scale[0], bh[0], bh[1], i_q, i_kv, mods.score[0], mods.score[1], mods.score[2], mods.score[3])
    if MASKED:
        allowed = (n_kv - 1 - o_kv)[None, :]  # negative: forbidden
        if MASK is not None:
            allowed = allowed | (MASK(bh[0], bh[1], i_q, i_kv, mods.mask[0], mods.mask[1], mods.mask[2], mods.mask[3]) & applies)
        b_s = tl.where(allowed >= 0, b_s, float("-inf"))
    return b_s


@triton.jit
def has_nonfinite(b_x):
    """Whether any element of a block is NaN or infinite."""
    return tl.max(tl.max(tl.where(tl.abs(b_x) < float("inf"), 0, 1), 1), 0) > 0


@triton.jit
def overflowed(b_m, b_l):
    """Whether the sum of any row that attends to something is out of range: scores so large that their own rounding errors exceed 60, or that have risen too
    far above an anchor."""
    return tl.max(tl.where((b_m != float("-inf")) & ((b_l < SMALLEST_SUM) | (b_l > LARGEST_SUM)), 1, 0), 0) > 0


@triton.jit
def dropout_keep(p_seed, threshold, i_b, i_h, o_q, o_kv):
    """Whether dropout keeps each element. tilewise.engines.dropout says which elements share a Philox counter."""
    seed = tl.load(p_seed)
    row = o_q // 16 * 8 + o_q % 8
    column = o_kv // 16 * 4 + o_kv % 8 // 2
    c_column, c_row = tl.broadcast(column, row)
    zero = c_column * 0
    w0, w1, w2, w3 = tl.philox(seed, c_column.to(tl.uint32), c_row.to(tl.uint32), (zero + i_h).to(tl.uint32), (zero + i_b).to(tl.uint32))
    low = tl.where(o_kv // 8 % 2 == 0, w0, w1)
    high = tl.where(o_kv // 8 % 2 == 0, w2, w3)
    word = tl.where(o_q // 8 % 2 == 0, low, high)
    half = tl.where(o_kv % 2 == 0, word & 0xFFFF, word >> 16)
    return half.to(tl.int32) >= threshold


@triton.jit
def dropout_keep_of(p_seed, args, bh, o_q, o_kv, C: tl.constexpr):
    """dropout_keep of a problem's elements; where it is a part of another, by their places in the whole."""
    if C.value.placed:
        o_q = in_whole(o_q, args.mods.places.query_squares, args.shape.n_q)
        o_kv = in_whole(o_kv, args.mods.places.key_squares, args.shape.n_kv)
        return dropout_keep(p_seed, args.mods.threshold, args.mods.places.batch + bh[0], args.mods.places.head + bh[1], o_q, o_kv)
    else:
        return dropout_keep(p_seed, args.mods.threshold, bh[0], bh[1], o_q, o_kv)


@triton.jit
def in_whole(o, p_squares, n):
    """The positions in the whole of a part's tokens o, of which there are n. 16 of them share a square (core/places.py). Unsigned, so that the compiler sees
    which of them share a Philox counter."""
    o = o.to(tl.uint32)
    last = ((n - 1) // 16).to(tl.uint32)
    return load_unpipelined(p_squares + tl.minimum(o // 16, last)).to(tl.uint32) * 16 + o % 16


@triton.jit
def apply_dropout(b_p, p_seed, args, bh, o_q, o_kv, C: tl.constexpr):
    """P with its dropped elements 0; the kept ones are scaled later, with the output."""
    return tl.where(dropout_keep_of(p_seed, args, bh, o_q, o_kv, C), b_p, 0.0)


# -- contributions to captures' gradients -----------------------------------------------------------------------------------


@triton.jit
def add_share(p, b_x):
    """Adds a block of contributions [M or 1, N or 1] atomically, in no particular order. Masked elements contribute 0, which is skipped."""
    tl.atomic_add(p + tl.zeros(b_x.shape, tl.int32), b_x.to(p.dtype.element_ty), mask=b_x != 0.0, sem="relaxed")


@triton.jit
def gauge_share(p, b_x, p_limit):
    """Records the largest finite contribution. Infinite and NaN ones are added right away: their sum is the same in any order."""
    finite = tl.abs(b_x) < float("inf")
    tl.atomic_add(p + tl.zeros(b_x.shape, tl.int32), b_x, mask=finite == 0, sem="relaxed")
    largest = tl.max(tl.max(tl.where(finite, tl.abs(b_x), 0.0), 1), 0)
    tl.atomic_max(p_limit, largest.to(tl.int32, bitcast=True), sem="relaxed")  # the bits of positive floats are in the floats' order


@triton.jit
def add_fixed(p, b_x, p_unit):
    """Adds finite contributions as integers (multiples of *p_unit), whose sum is the same in any order."""
    finite = tl.abs(b_x) < float("inf")
    b_whole = tl.floor(tl.where(finite, b_x, 0.0).to(tl.float64) / tl.load(p_unit) + 0.5).to(tl.int64)
    tl.atomic_add(p + tl.zeros(b_x.shape, tl.int32), b_whole, mask=b_whole != 0, sem="relaxed")


# -- functions that generated masks and scores call ------------------------------------------------------------------


@triton.jit
def quotient(a, b):
    """a // b for 0 <= a, 1 < b and a b < 2^32, as floor(a ceil(2^32 / b) / 2^32), which is exact there."""
    inverse = 0xFFFFFFFF // b.to(tl.uint32) + 1
    return tl.umulhi(a.to(tl.uint32), inverse.to(tl.uint32)).to(tl.int32)


if INTERPRETED:

    @triton.jit
    def tanh(x):
        return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)

    @triton.jit
    def round_even(x):
        near = tl.floor(x + 0.5)
        return tl.where((near - x == 0.5) & (near % 2 != 0), near - 1, near)

    @triton.jit
    def power(x, y):
        return tl.exp2(y * tl.log2(x))

    fast_tanh = tanh

    @triton.jit
    def load_unpipelined(p):
        return tl.load(p)

    @triton.jit
    def rounded_product(a, b):
        return a * b

    @triton.jit
    def red_add(p, b_x):
        tl.atomic_add(p, b_x, sem="relaxed")

    @triton.jit
    def unpacked_float8(b_x, KIND: tl.constexpr):
        b_even, b_odd = (b_x & 0xFF).to(tl.uint8), ((b_x >> 8) & 0xFF).to(tl.uint8)
        return b_even.to(KIND, bitcast=True).to(tl.float16), b_odd.to(KIND, bitcast=True).to(tl.float16)
else:

    @triton.jit
    def tanh(x):
        return libdevice.tanh(x)

    @triton.jit
    def round_even(x):
        return libdevice.rint(x)

    @triton.jit
    def power(x, y):
        return libdevice.pow(x, y)

    @triton.jit
    def fast_tanh(x):
        """The hardware's tanh, accurate to 11 bits: enough for scores of 16-bit inputs."""
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def load_unpipelined(p):
        """A load that Triton's pipeliner cannot see. Elements have 16, 32 or 64 bits."""
        bits: tl.constexpr = p.dtype.element_ty.primitive_bitwidth
        if bits == 16:
            return tl.inline_asm_elementwise("ld.global.nc.b16 $0, [$1];", "=h,l", [p], dtype=p.dtype.element_ty, is_pure=True, pack=1)
        elif bits == 32:
            return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [p], dtype=p.dtype.element_ty, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [p], dtype=p.dtype.element_ty, is_pure=True, pack=1)

    @triton.jit
    def rounded_product(a, b):
        """a b, rounded, even where a sum follows: never part of an fma."""
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b + tl.zeros_like(a)], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def red_add(p, b_x):
        """*p += x: every thread adds the elements it holds. tl.atomic_add would first change x's layout through shared memory."""
        address = p.to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(  # compiler.RED_ADD is part of this text
            "{ red.relaxed.gpu.global.add.f32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r", [address, b_x], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def unpacked_float8(b_x, KIND: tl.constexpr):
        """The low bytes and the high bytes of 16-bit elements as float16, which holds all numbers of either KIND of float8. Two neighbours, bytes 0 1 and 2 3
        of a register, become 0 2 and 1 3 with as few instructions as there can be."""
        if KIND.is_fp8e5():  # the upper half of a float16
            return tl.inline_asm_elementwise(
                "{ prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00; }", "=r,=r,r", [b_x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 sorted; .reg .b16 even, odd;
                prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {even, odd}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }""",
                "=r,=r,r",
                [b_x],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )


if INTERPRETED:

    @triton.jit
    def log10(x):
        return tl.log2(x) * 0.30102999566398120

    @triton.jit
    def log1p(x):
        """log(1 + x), corrected for what 1 + x has lost of x."""
        y = 1.0 + x
        return tl.where((y == 1.0) | (y == float("inf")), x, tl.log(y) * (x / (y - 1.0)))

    @triton.jit
    def expm1(x):
        """exp(x) - 1, corrected for what exp(x) has lost of x."""
        y = tl.exp(x)
        far = (tl.abs(x) > 1.0) | (x != x)
        return tl.where(far, y - 1.0, tl.where(y == 1.0, x, (y - 1.0) * (x / tl.log(y))))

    @triton.jit
    def sinh(x):
        """Far from 0 by the exponential of half of x, which does not overflow before the result does."""
        b_half = tl.exp(0.5 * tl.abs(x))
        far = 0.5 * b_half * b_half - 0.5 / (b_half * b_half)
        return tl.where(tl.abs(x) < 1.0, 0.5 * (expm1(x) - expm1(-x)), tl.where(x < 0, -far, far))

    @triton.jit
    def cosh(x):
        b_half = tl.exp(0.5 * tl.abs(x))
        return 0.5 * b_half * b_half + 0.5 / (b_half * b_half)

    @triton.jit
    def tan(x):
        return tl.sin(x) / tl.cos(x)

    @triton.jit
    def atan(x):
        """Good to float32: Cephes' polynomial between -tan(pi/8) and tan(pi/8), to which other numbers are brought."""
        far = tl.abs(x) > 2.414213562373095
        between = tl.abs(x) > 0.4142135623730950
        y = tl.where(far, -1.0 / tl.abs(x), tl.where(between, (tl.abs(x) - 1.0) / (tl.abs(x) + 1.0), tl.abs(x)))
        z = y * y
        polynomial = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
        angle = polynomial * z * y + y + tl.where(far, 1.5707963267948966, tl.where(between, 0.7853981633974483, 0.0))
        return tl.where(x < 0, -angle, tl.where(x == 0, x, angle))

    @triton.jit
    def atan2(y, x):
        larger = tl.maximum(tl.abs(y), tl.abs(x), tl.PropagateNan.ALL)
        smaller = tl.minimum(tl.abs(y), tl.abs(x), tl.PropagateNan.ALL)
        angle = atan(tl.where(larger == 0, 0.0, tl.where(smaller == float("inf"), 1.0, smaller / larger)))
        angle = tl.where(tl.abs(y) > tl.abs(x), 1.5707963267948966 - angle, angle)
        angle = tl.where(x < 0, 3.141592653589793 - angle, angle)
        return tl.where(y < 0, -angle, angle)

    @triton.jit
    def erfc(x):
        return 1.0 - tl.erf(x)

    @triton.jit
    def fmod(x, y):
        return x % y
else:

    @triton.jit
    def log10(x):
        return libdevice.log10(x)

    @triton.jit
    def log1p(x):
        return libdevice.log1p(x)

    @triton.jit
    def expm1(x):
        return libdevice.expm1(x)

    @triton.jit
    def sinh(x):
        return libdevice.sinh(x)

    @triton.jit
    def cosh(x):
        return libdevice.cosh(x)

    @triton.jit
    def tan(x):
        return libdevice.tan(x)

    @triton.jit
    def atan(x):
        return libdevice.atan(x)

    @triton.jit
    def atan2(y, x):
        return libdevice.atan2(y, x)

    @triton.jit
    def erfc(x):
        return libdevice.erfc(x)

    @triton.jit
    def fmod(x, y):
        """Exact; Triton's own % of floats is not."""
        return libdevice.fmod(x, y)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself from where torch takes it."""
    return tl.where(x > 20.0, x, log1p(tl.exp(x)))


@triton.jit
def logaddexp(x, y):
    """log(exp(x) + exp(y)); equal ones may be infinite."""
    largest = tl.maximum(x, y, tl.PropagateNan.ALL)
    return largest + tl.where(x == y, 0.6931471805599453, log1p(tl.exp(-tl.abs(x - y))))
