"""Comparisons, bits and choices."""

import operator

import torch

from tilewise.lang import intervals
from tilewise.lang.intervals import Interval
from tilewise.lang.ops.entry import Gradients, define, emit
from tilewise.lang.ops.rules import bits, integers, same, truth
from tilewise.lang.program import Tape
from tilewise.lang.types import Type, promote

define("lt", 2, operator.lt, truth, intervals.less, triton="({0} < {1})", triton_bounds="({0}[1] < {1}[0], {0}[0] < {1}[1])", cpp="{0} < {1}")
define("le", 2, operator.le, truth, intervals.less_equal, triton="({0} <= {1})", triton_bounds="({0}[1] <= {1}[0], {0}[0] <= {1}[1])", cpp="{0} <= {1}")
define(
    "gt", 2, operator.gt, truth, lambda a, b: intervals.less(b, a), triton="({0} > {1})", triton_bounds="({0}[0] > {1}[1], {0}[1] > {1}[0])", cpp="{0} > {1}"
)
define(
    "ge",
    2,
    operator.ge,
    truth,
    lambda a, b: intervals.less_equal(b, a),
    triton="({0} >= {1})",
    triton_bounds="({0}[0] >= {1}[1], {0}[1] >= {1}[0])",
    cpp="{0} >= {1}",
)
define(
    "eq",
    2,
    operator.eq,
    truth,
    intervals.equal,
    triton="({0} == {1})",
    triton_bounds="(({0}[0] == {1}[1]) & ({0}[1] == {1}[0]), ({0}[0] <= {1}[1]) & ({0}[1] >= {1}[0]))",
    triton_bounds_of_bools="(({0}[0] == {1}[1]) & ({0}[1] == {1}[0]), (({0}[0] == 0) | {1}[1]) & (({1}[0] == 0) | {0}[1]))",
    cpp="{0} == {1}",
)
define(
    "ne",
    2,
    operator.ne,
    truth,
    lambda a, b: intervals.logical_not(intervals.equal(a, b)),
    triton="({0} != {1})",
    triton_bounds="(({0}[0] > {1}[1]) | ({0}[1] < {1}[0]), ({0}[0] != {1}[1]) | ({0}[1] != {1}[0]))",
    triton_bounds_of_bools="(({0}[0] & ({1}[1] == 0)) | ({1}[0] & ({0}[1] == 0)), ({0}[0] != {1}[1]) | ({0}[1] != {1}[0]))",
    cpp="{0} != {1}",
)

define(
    "and",
    2,
    meaning=operator.and_,
    result=promote,
    bounds=intervals.bit_and,
    bounds_of_bools=intervals.minimum,
    takes=bits,
    triton="({0} & {1})",
    triton_bounds_of_bools="({0}[0] & {1}[0], {0}[1] & {1}[1])",
    cpp="{0} & {1}",
)
define(
    "or",
    2,
    meaning=operator.or_,
    result=promote,
    bounds=intervals.bit_or,
    bounds_of_bools=intervals.maximum,
    takes=bits,
    triton="({0} | {1})",
    triton_bounds_of_bools="({0}[0] | {1}[0], {0}[1] | {1}[1])",
    cpp="{0} | {1}",
)
define(
    "xor",
    2,
    meaning=operator.xor,
    result=promote,
    bounds=intervals.bit_xor,
    bounds_of_bools=intervals.logical_xor,
    takes=bits,
    triton="({0} ^ {1})",
    cpp="{0} ^ {1}",
)
define(
    "not",
    1,
    meaning=operator.invert,
    result=same,
    bounds=lambda a: Interval(-a.hi - 1, -a.lo - 1),
    bounds_of_bools=intervals.logical_not,
    takes=bits,
    triton="(~{0})",
    triton_of_bools="({0} == 0)",
    triton_bounds_of_bools="({0}[1] == 0, {0}[0] == 0)",
    cpp="~{0}",
    cpp_of_bools="!{0}",
)
define("shl", 2, meaning=operator.lshift, result=promote, bounds=intervals.shift_left, takes=integers, triton="({0} << {1})", cpp="shift_left({0}, {1})")
define("shr", 2, meaning=operator.rshift, result=promote, bounds=intervals.shift_right, takes=integers, triton="({0} >> {1})", cpp="shift_right({0}, {1})")


def _branches(condition: Type, a: Type, b: Type) -> Type:
    chosen = promote(a, b)
    return Type(chosen.dtype, max(chosen.level, condition.level))


def _choices(condition: Type, a: Type, b: Type) -> bool:
    return condition.is_bool and condition.level > 0


def _derive_where(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    zero = t.literal(0.0)
    return None, emit(t, "where", a[0], g, zero), emit(t, "where", a[0], zero, g)


define("where", 3, torch.where, _branches, intervals.where, takes=_choices, derive=_derive_where, triton=None, cpp=None, special=True)
