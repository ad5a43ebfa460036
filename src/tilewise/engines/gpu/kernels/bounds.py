"""Intervals of integers in kernels: what the functions of emit_bounds.py call.

An interval is a pair (lowest, highest) of int64, one for each of several tiles, or of numbers that all of them share.
"""

import triton
import triton.language as tl

LONGEST: tl.constexpr = tl.constexpr(256)  # stretch of a capture that is looked over: as many elements as a tile has queries or keys
STEP: tl.constexpr = tl.constexpr(32)


@triton.jit
def widened(x):
    """Of an index, which is an int32."""
    return x[0].to(tl.int64), x[1].to(tl.int64)


@triton.jit
def product_bounds(x, y):
    a, b, c, d = x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1]
    return tl.minimum(tl.minimum(a, b), tl.minimum(c, d)), tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def absolute_bounds(x):
    return tl.maximum(tl.maximum(x[0], -x[1]), 0), tl.maximum(-x[0], x[1])


@triton.jit
def remainder_bounds(x, y):
    """Of a number from 0 on and a divisor above 0: within one period it increases."""
    period = x[0] // y[0]
    same = (y[0] == y[1]) & (x[1] // y[0] == period)
    return tl.where(same, x[0] - period * y[0], 0), tl.where(same, x[1] - period * y[0], y[1] - 1)


@triton.jit
def offset(index, stride):
    return tl.cast(index, tl.int64) * stride


@triton.jit
def loaded_bounds(p, o, index, stride):
    """Of the elements of a capture from index[0] to index[1], one interval for each tile; that of its dtype where these are many, which is also what
    emit_bounds.py takes for granted. `o`: where they lie."""
    HIGHEST: tl.constexpr = 2**63 - 1 if p.dtype.element_ty.primitive_bitwidth == 64 else 2**31 - 1
    LOWEST: tl.constexpr = -HIGHEST - 1
    count = index[1] - index[0]
    lowest, highest = tl.full(count.shape, HIGHEST, tl.int64), tl.full(count.shape, LOWEST, tl.int64)
    for first in range(0, tl.minimum(tl.max(count, 0) + 1, LONGEST).to(tl.int32), STEP):
        o_element = tl.minimum((index[0] + first)[:, None] + tl.arange(0, STEP)[None, :], index[1][:, None])
        b_element = tl.load(p + (o + tl.zeros_like(count))[:, None] + o_element * stride).to(tl.int64)
        lowest, highest = tl.minimum(lowest, tl.min(b_element, 1)), tl.maximum(highest, tl.max(b_element, 1))
    known = count < LONGEST
    return tl.where(known, lowest, LOWEST), tl.where(known, highest, HIGHEST)


@triton.jit
def truth_bounds(x):
    return x[0] > 0, x[1] > 0
