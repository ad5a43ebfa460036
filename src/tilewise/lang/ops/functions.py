"""Functions of a float: exponentials, logarithms, roots and waves. Integers become float32, as in torch."""

import math

import torch

from tilewise.lang import intervals
from tilewise.lang.ops.entry import define, emit, times
from tilewise.lang.ops.rules import float_of
from tilewise.lang.program import Tape

# -- exponentials and logarithms -------------------------------------------------------------------------------------

define(
    "exp",
    1,
    meaning=torch.exp,
    result=float_of,
    bounds=intervals.increasing(torch.exp),
    derive=times(lambda t, x, out: out),
    triton="tl.exp({0})",
    triton_in_float32=True,
    cpp="exp_of({0})",
)
define(
    "exp2",
    1,
    meaning=torch.exp2,
    result=float_of,
    bounds=intervals.increasing(torch.exp2),
    derive=times(lambda t, x, out: emit(t, "mul", out, t.literal(intervals.LN2))),
    triton="tl.exp2({0})",
    triton_in_float32=True,
    cpp="exp2({0})",
)
define(
    "log",
    1,
    meaning=torch.log,
    result=float_of,
    bounds=intervals.logarithm(torch.log),
    derive=lambda t, g, a, out: (emit(t, "div", g, a[0]),),
    triton="tl.log({0})",
    triton_in_float32=True,
    cpp="log({0})",
)
define(
    "log2",
    1,
    meaning=torch.log2,
    result=float_of,
    bounds=intervals.logarithm(torch.log2),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "mul", a[0], t.literal(intervals.LN2))),),
    triton="tl.log2({0})",
    triton_in_float32=True,
    cpp="log2({0})",
)

# -- roots -----------------------------------------------------------------------------------------------------------


def _slope_of_rsqrt(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", t.literal(-0.5), emit(t, "mul", out, emit(t, "mul", out, out)))


define(
    "sqrt",
    1,
    meaning=torch.sqrt,
    result=float_of,
    bounds=intervals.square_root,
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "mul", out, t.literal(2.0))),),
    triton="tl.sqrt({0})",
    triton_precise="tl.sqrt_rn({0})",
    triton_in_float32=True,
    cpp="sqrt({0})",
)
define(
    "rsqrt",
    1,
    meaning=torch.rsqrt,
    result=float_of,
    bounds=intervals.reciprocal_square_root,
    derive=times(_slope_of_rsqrt),
    triton="tl.rsqrt({0})",
    triton_in_float32=True,
    cpp="reciprocal_root({0})",
)

# -- angles ----------------------------------------------------------------------------------------------------------

define(
    "sin",
    1,
    meaning=torch.sin,
    result=float_of,
    bounds=intervals.wave,
    derive=times(lambda t, x, out: emit(t, "cos", x)),
    triton="tl.sin({0})",
    triton_in_float32=True,
    cpp="sin({0})",
)
define(
    "cos",
    1,
    meaning=torch.cos,
    result=float_of,
    bounds=intervals.wave,
    derive=times(lambda t, x, out: emit(t, "neg", emit(t, "sin", x))),
    triton="tl.cos({0})",
    triton_in_float32=True,
    cpp="cos({0})",
)

# -- the error function ----------------------------------------------------------------------------------------------


def _slope_of_erf(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", t.literal(2.0 / math.sqrt(math.pi)), emit(t, "exp", emit(t, "neg", emit(t, "mul", x, x))))


define(
    "erf",
    1,
    meaning=torch.erf,
    result=float_of,
    bounds=intervals.increasing(torch.erf),
    derive=times(_slope_of_erf),
    triton="tl.erf({0})",
    triton_in_float32=True,
    cpp="erf({0})",
)
