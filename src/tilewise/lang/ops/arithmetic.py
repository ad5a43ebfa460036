"""Sums, products, quotients, remainders, powers and extremes."""

import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise.lang import intervals
from tilewise.lang.ops.entry import OPS, Derive, Gradients, define, emit, infer
from tilewise.lang.ops.rules import as_tensors, by_first, float_of, no_boolean, numbers, same
from tilewise.lang.program import Tape, literal_value
from tilewise.lang.types import NUMBER, promote

define(
    "add",
    2,
    meaning=operator.add,
    result=promote,
    bounds=intervals.add,
    derive=lambda t, g, a, out: (g, g),
    triton="({0} + {1})",
    triton_of_bools="({0} | {1})",
    triton_bounds="({0}[0] + {1}[0], {0}[1] + {1}[1])",
    cpp="{0} + {1}",
    cpp_of_bools="{0} | {1}",
    special=True,
)
define(
    "sub",
    2,
    meaning=operator.sub,
    result=promote,
    bounds=intervals.sub,
    takes=no_boolean,
    derive=lambda t, g, a, out: (g, emit(t, "neg", g)),
    triton="({0} - {1})",
    triton_bounds="({0}[0] - {1}[1], {0}[1] - {1}[0])",
    cpp="{0} - {1}",
    special=True,
)
define(
    "mul",
    2,
    meaning=operator.mul,
    result=promote,
    bounds=intervals.mul,
    derive=lambda t, g, a, out: (emit(t, "mul", g, a[1]), emit(t, "mul", g, a[0])),
    triton="({0} * {1})",
    triton_of_bools="({0} & {1})",
    triton_bounds="product_bounds({0}, {1})",
    cpp="{0} * {1}",
    cpp_of_bools="{0} & {1}",
    wide=(0, 1),
    special=True,
)
define(
    "div",
    2,
    meaning=operator.truediv,
    result=float_of,
    bounds=intervals.div,
    derive=lambda t, g, a, out: (emit(t, "div", g, a[1]), emit(t, "neg", emit(t, "div", emit(t, "mul", g, out), a[1]))),
    triton="({0} / {1})",
    triton_precise="tl.div_rn({0}, {1})",
    triton_in_float32=True,
    cpp="{0} / {1}",
    wide=(0, 1),
    special=True,
)


def floor_quotient(x: torch.Tensor, y: Any) -> torch.Tensor:
    """x // y, which torch refuses to derive when written so; its derivative is zero."""
    return torch.div(x, y, rounding_mode="floor")


def exactly(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A remainder by `f`. Of float32 on a CPU it is taken in float64: where x / y passes float32's range, torch's own is NaN there on processors with AVX2, and
    right on others."""

    def of_tensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.result_type(x, y) is not torch.float32 or x.device.type != "cpu":
            return f(x, y)
        return f(x.float().double(), y.float().double()).float()

    return as_tensors(of_tensors)


define(
    "floordiv",
    2,
    meaning=by_first(floor_quotient),
    result=promote,
    bounds=intervals.floordiv_integer,
    bounds_of_floats=intervals.floordiv_float,
    takes=numbers,
    triton=None,
    triton_in_float32=True,
    triton_bounds="({0}[0] // {1}[1], {0}[1] // {1}[0])",
    cpp=None,
    wide=(1,),
    special=True,
)
define(
    "mod",
    2,
    meaning=exactly(torch.remainder),
    result=promote,
    bounds=intervals.mod_integer,
    bounds_of_floats=intervals.mod_float,
    takes=numbers,
    derive=lambda t, g, a, out: (g, emit(t, "neg", emit(t, "mul", g, emit(t, "floordiv", a[0], a[1])))),
    triton=None,
    triton_in_float32=True,
    triton_bounds="remainder_bounds({0}, {1})",
    cpp=None,
    special=True,
)
define(
    "fmod",
    2,
    meaning=exactly(torch.fmod),
    result=promote,
    bounds=intervals.fmod_integer,
    bounds_of_floats=intervals.fmod_float,
    takes=numbers,
    derive=lambda t, g, a, out: (g, emit(t, "neg", emit(t, "mul", g, emit(t, "trunc", emit(t, "div", a[0], a[1]))))),
    triton="fmod({0}, {1})",
    triton_of_integers="({0} % {1})",
    triton_in_float32=True,
    cpp="fmod({0}, {1})",
    cpp_of_integers="truncated_remainder({0}, {1})",
)


def _derive_pow(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    base, exponent = a
    return _gradient_of_base(t, g, base, exponent), _gradient_of_exponent(t, g, base, exponent, out)


def _gradient_of_base(t: Tape, g: int, base: int, exponent: int) -> int | None:
    """exponent * base ** (exponent - 1), and 0 at exponent 0 whatever the base; a literal exponent stays one."""
    if t.instructions[exponent].op == "literal":
        n = literal_value(t.instructions[exponent].attr)
        return None if n == 0 else emit(t, "mul", g, emit(t, "mul", emit(t, "pow", base, t.literal(n - 1)), exponent))
    gradient = emit(t, "mul", g, emit(t, "mul", exponent, emit(t, "pow", base, emit(t, "sub", exponent, t.literal(1)))))
    return emit(t, "where", emit(t, "eq", exponent, t.literal(0)), t.literal(0.0), gradient)


def _gradient_of_exponent(t: Tape, g: int, base: int, exponent: int, out: int) -> int | None:
    """out * log(base), and 0 where the base is 0 and the exponent not negative."""
    if t.type(exponent).level == 0 or not t.type(exponent).is_float:
        return None
    if t.type(base).level == 0 or not t.type(base).is_float:
        dtype = t.type(t.widened(out)).dtype
        base = t.put("cast", (base,), dtype, infer(OPS["cast"], (t.type(base),), dtype))
    flat = emit(t, "and", emit(t, "eq", base, t.literal(0)), emit(t, "ge", exponent, t.literal(0)))
    return emit(t, "where", flat, t.literal(0.0), emit(t, "mul", g, emit(t, "mul", out, emit(t, "log", base))))


define(
    "pow",
    2,
    meaning=operator.pow,
    result=promote,
    bounds=intervals.power_integer,
    bounds_of_floats=intervals.power,
    takes=numbers,
    derive=_derive_pow,
    triton=None,
    triton_in_float32=True,
    cpp=None,
    special=True,
)
define(
    "neg",
    1,
    meaning=operator.neg,
    result=same,
    bounds=intervals.negate,
    takes=numbers,
    exact=True,
    derive=lambda t, g, a, out: (emit(t, "neg", g),),
    triton="(-{0})",
    triton_bounds="(-{0}[1], -{0}[0])",
    cpp="-{0}",
)
define(
    "abs",
    1,
    meaning=torch.abs,
    result=same,
    bounds=intervals.absolute,
    takes=numbers,
    exact=True,
    derive=lambda t, g, a, out: (emit(t, "mul", g, emit(t, "sign", a[0])),),
    triton="tl.abs({0})",
    triton_bounds="absolute_bounds({0})",
    cpp="absolute({0})",
)


def _derive_extreme(loses: str) -> Derive:
    """The gradient goes to the operand that does not lose; a tie shares it, and beside NaN nobody loses, as in torch."""

    def derive(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
        half = emit(t, "mul", g, t.literal(0.5))
        tie = emit(t, "eq", a[0], a[1])

        def part(x: int, y: int) -> int:
            return emit(t, "where", tie, half, emit(t, "where", emit(t, loses, x, y), t.literal(0.0), g))

        return part(a[0], a[1]), part(a[1], a[0])

    return derive


SHARES_AT_BOUNDS = torch.__version__ >= (2, 14)  # type: ignore[operator]  # the installed torch's rule for clamp, see _derive_clamp


def _derive_clamp(cut: str, kept: str, inside: str) -> Derive:
    """The installed torch's rule; versions differ only where a value equals its bound, or is NaN.

    Before torch 2.14, a value at its bound had the whole gradient. Since then, clamp to a tensor is derived as minimum and maximum are, so both have half
    of it; of clamp to a Python number, nobody has any. Clamp to two tensors is two steps here: where these are equal, torch divides the gradient otherwise.
    """
    of_tensors = _derive_extreme(cut)

    def derive(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
        is_number = t.type(a[1]).level == NUMBER
        if SHARES_AT_BOUNDS and not is_number:
            return of_tensors(t, g, a, out)
        zero = t.literal(0.0)
        to_value = emit(t, "where", emit(t, inside if SHARES_AT_BOUNDS else kept, *a), g, zero)
        return to_value, None if is_number else emit(t, "where", emit(t, cut, *a), g, zero)

    return derive


def _clamp(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Of what has a derivative, a number stays a number: torch derives clamp of numbers and of tensors differently."""
    of_tensors = as_tensors(f)
    return lambda x, bound: f(x, bound) if isinstance(x, torch.Tensor) and x.is_floating_point() else of_tensors(x, bound)


define(
    "minimum",
    2,
    meaning=as_tensors(torch.minimum),
    result=promote,
    bounds=intervals.minimum,
    exact=True,
    derive=_derive_extreme("gt"),
    triton="tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    triton_bounds="(tl.minimum({0}[0], {1}[0]), tl.minimum({0}[1], {1}[1]))",
    cpp="lesser({0}, {1})",
    cpp_of_bools="{0} & {1}",
)
define(
    "maximum",
    2,
    meaning=as_tensors(torch.maximum),
    result=promote,
    bounds=intervals.maximum,
    exact=True,
    derive=_derive_extreme("lt"),
    triton="tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    triton_bounds="(tl.maximum({0}[0], {1}[0]), tl.maximum({0}[1], {1}[1]))",
    cpp="greater({0}, {1})",
    cpp_of_bools="{0} | {1}",
)
define(
    "clamp_min",
    2,
    meaning=_clamp(torch.clamp_min),
    result=promote,
    bounds=intervals.maximum,
    exact=True,
    derive=_derive_clamp("lt", "ge", "gt"),
    triton="tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    triton_bounds="(tl.maximum({0}[0], {1}[0]), tl.maximum({0}[1], {1}[1]))",
    cpp="greater({0}, {1})",
    cpp_of_bools="{0} | {1}",
)
define(
    "clamp_max",
    2,
    meaning=_clamp(torch.clamp_max),
    result=promote,
    bounds=intervals.minimum,
    exact=True,
    derive=_derive_clamp("gt", "le", "lt"),
    triton="tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    triton_bounds="(tl.minimum({0}[0], {1}[0]), tl.minimum({0}[1], {1}[1]))",
    cpp="lesser({0}, {1})",
    cpp_of_bools="{0} & {1}",
)
