"""Functions of floats: exponentials, logarithms, roots, angles. Integers become float32, as in torch."""

import math

import torch

from tilewise.lang import intervals
from tilewise.lang.ops.entry import Gradients, define, emit, times
from tilewise.lang.ops.rules import as_tensors, float_of, floats
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

define(
    "log10",
    1,
    meaning=torch.log10,
    result=float_of,
    bounds=intervals.logarithm(torch.log10),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "mul", a[0], t.literal(math.log(10.0)))),),
    triton="log10({0})",
    triton_in_float32=True,
    cpp="log10({0})",
)
define(
    "expm1",
    1,
    meaning=torch.expm1,
    result=float_of,
    bounds=intervals.increasing(torch.expm1),
    derive=times(lambda t, x, out: emit(t, "add", out, t.literal(1.0))),
    triton="expm1({0})",
    triton_in_float32=True,
    cpp="expm1({0})",
)
define(
    "log1p",
    1,
    meaning=torch.log1p,
    result=float_of,
    bounds=intervals.logarithm(torch.log1p, start=-1.0),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "add", a[0], t.literal(1.0))),),
    triton="log1p({0})",
    triton_in_float32=True,
    cpp="log1p({0})",
)


def _derive_logaddexp(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    """The softmax of both operands."""
    x, y = a
    return emit(t, "mul", g, emit(t, "sigmoid", emit(t, "sub", x, y))), emit(t, "mul", g, emit(t, "sigmoid", emit(t, "sub", y, x)))


define(
    "logaddexp",
    2,
    meaning=as_tensors(torch.logaddexp),
    result=float_of,
    bounds=intervals.logaddexp,
    takes=floats,
    derive=_derive_logaddexp,
    triton="logaddexp({0}, {1})",
    triton_in_float32=True,
    cpp="logaddexp({0}, {1})",
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

define(
    "tan",
    1,
    meaning=torch.tan,
    result=float_of,
    bounds=intervals.tangent,
    derive=times(lambda t, x, out: emit(t, "add", emit(t, "mul", out, out), t.literal(1.0))),
    triton="tan({0})",
    triton_in_float32=True,
    cpp="tan({0})",
)
define(
    "atan",
    1,
    meaning=torch.atan,
    result=float_of,
    bounds=intervals.increasing(torch.atan),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "add", emit(t, "mul", a[0], a[0]), t.literal(1.0))),),
    triton="atan({0})",
    triton_in_float32=True,
    cpp="atan({0})",
)


def _derive_atan2(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    """g x / (x^2 + y^2) and -g y / (x^2 + y^2); 0 at the origin."""
    y, x = a
    norm = emit(t, "add", emit(t, "mul", y, y), emit(t, "mul", x, x))

    def part(numerator: int) -> int:
        return emit(t, "where", emit(t, "eq", norm, t.literal(0)), t.literal(0.0), emit(t, "mul", g, emit(t, "div", numerator, norm)))

    return part(x), part(emit(t, "neg", y))


define(
    "atan2",
    2,
    meaning=as_tensors(torch.atan2),
    result=float_of,
    bounds=intervals.angle,
    derive=_derive_atan2,
    triton="atan2({0}, {1})",
    triton_in_float32=True,
    cpp="atan2({0}, {1})",
)

define(
    "asin",
    1,
    meaning=torch.asin,
    result=float_of,
    bounds=intervals.inside(-1.0, 1.0, intervals.increasing(torch.asin)),
    derive=times(lambda t, x, out: emit(t, "rsqrt", emit(t, "sub", t.literal(1.0), emit(t, "mul", x, x)))),
    triton="atan2({0}, tl.sqrt((1.0 - {0}) * (1.0 + {0})))",
    triton_in_float32=True,
    cpp="atan2({0}, sqrt((1 - {0}) * (1 + {0})))",
)
define(
    "acos",
    1,
    meaning=torch.acos,
    result=float_of,
    bounds=intervals.inside(-1.0, 1.0, intervals.decreasing(torch.acos)),
    derive=times(lambda t, x, out: emit(t, "neg", emit(t, "rsqrt", emit(t, "sub", t.literal(1.0), emit(t, "mul", x, x))))),
    triton="atan2(tl.sqrt((1.0 - {0}) * (1.0 + {0})), {0})",
    triton_in_float32=True,
    cpp="atan2(sqrt((1 - {0}) * (1 + {0})), {0})",
)

# -- hyperbolic functions; tanh is among the activations -------------------------------------------------------------

define(
    "sinh",
    1,
    meaning=torch.sinh,
    result=float_of,
    bounds=intervals.increasing(torch.sinh),
    derive=times(lambda t, x, out: emit(t, "cosh", x)),
    triton="sinh({0})",
    triton_in_float32=True,
    cpp="sinh({0})",
)
define(
    "cosh",
    1,
    meaning=torch.cosh,
    result=float_of,
    bounds=lambda a: intervals.increasing(torch.cosh)(intervals.absolute(a)),
    derive=times(lambda t, x, out: emit(t, "sinh", x)),
    triton="cosh({0})",
    triton_in_float32=True,
    cpp="cosh({0})",
)

# Their inverses by log1p, which loses nothing near 0 (acosh: near 1); of numbers whose square would overflow, log(2 x).

define(
    "asinh",
    1,
    meaning=torch.asinh,
    result=float_of,
    bounds=intervals.increasing(torch.asinh),
    derive=times(lambda t, x, out: emit(t, "rsqrt", emit(t, "add", emit(t, "mul", x, x), t.literal(1.0)))),
    triton="(tl.where({0} < 0, -1.0, 1.0) * tl.where(tl.abs({0}) > 1e9, tl.log(tl.abs({0})) + 0.6931471805599453, "
    "log1p(tl.abs({0}) + {0} * {0} / (1.0 + tl.sqrt({0} * {0} + 1.0)))))",
    triton_in_float32=True,
    cpp="sign({0}) * (absolute({0}) > 1e9 ? log(absolute({0})) + 0.6931471805599453 : log1p(absolute({0}) + {0} * {0} / (1 + sqrt({0} * {0} + 1))))",
)
define(
    "acosh",
    1,
    meaning=torch.acosh,
    result=float_of,
    bounds=intervals.logarithm(torch.acosh, start=1.0),
    derive=times(lambda t, x, out: emit(t, "rsqrt", emit(t, "sub", emit(t, "mul", x, x), t.literal(1.0)))),
    triton="tl.where({0} > 1e9, tl.log({0}) + 0.6931471805599453, log1p({0} - 1.0 + tl.sqrt({0} - 1.0) * tl.sqrt({0} + 1.0)))",
    triton_in_float32=True,
    cpp="{0} > 1e9 ? log({0}) + 0.6931471805599453 : log1p({0} - 1 + sqrt({0} - 1) * sqrt({0} + 1))",
)
define(
    "atanh",
    1,
    meaning=torch.atanh,
    result=float_of,
    bounds=intervals.inside(-1.0, 1.0, intervals.increasing(torch.atanh)),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "sub", t.literal(1.0), emit(t, "mul", a[0], a[0]))),),
    triton="(tl.where({0} < 0, -0.5, 0.5) * log1p(2.0 * tl.abs({0}) / (1.0 - tl.abs({0}))))",
    triton_in_float32=True,
    cpp="sign({0}) * log1p(2 * absolute({0}) / (1 - absolute({0}))) / 2",
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
define(
    "erfc",
    1,
    meaning=torch.erfc,
    result=float_of,
    bounds=intervals.decreasing(torch.erfc),
    derive=times(lambda t, x, out: emit(t, "neg", _slope_of_erf(t, x, out))),
    triton="erfc({0})",
    triton_in_float32=True,
    cpp="erfc({0})",
)
