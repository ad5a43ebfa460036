"""The operations of the language. All rules of one operation stand together; adding an operation is adding one entry.

meaning   what it does to torch tensors (this defines the language)
result    its type, from its operands' types
bounds    its interval, from its operands' intervals
derive    the gradients of its operands: (tape, g, operands, itself) -> one instruction or None for each
takes     the operand types torch accepts; anything unless given
computes  whether operands are first converted to the promoted type, as torch does
exact     a float result needs no rounding: it is one of the operands, or whole
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.lang import intervals
from tilewise.lang.intervals import Interval
from tilewise.lang.program import Tape, literal_value
from tilewise.lang.types import ZERO_DIM, Type, as_float, promote

Gradients = tuple[int | None, ...]


@dataclass(frozen=True)
class Op:
    name: str
    arity: int
    meaning: Callable[..., Any]
    result: Callable[..., Type]
    bounds: Callable[..., Interval]
    derive: Callable[[Tape, int, tuple[int, ...], int], Gradients] | None = None
    takes: Callable[..., bool] = lambda *types: True
    computes: bool = True
    exact: bool = False
    bounds_of_floats: Callable[..., Interval] | None = None  # where floats differ from integers
    bounds_of_bools: Callable[..., Interval] | None = None


OPS: dict[str, Op] = {}


def define(name: str, arity: int, meaning: Callable[..., Any], result: Callable[..., Type], bounds: Callable[..., Interval], **rules: Any) -> None:
    OPS[name] = Op(name, arity, meaning, result, bounds, **rules)


def infer(op: Op, types: tuple[Type, ...], attr: str = "") -> Type:
    if op.name == "cast":
        return Type(attr, max(ZERO_DIM, types[0].level))  # a cast number is a 0-d tensor
    return op.result(*types)


def emit(tape: Tape, name: str, *args: int) -> int:
    """Write an operation; times one is written only where it changes the type."""
    type = infer(OPS[name], tuple([tape.type(a) for a in args]))
    if name == "mul":
        for one, other in (args, args[::-1]):
            if _is_one(tape, one) and tape.type(other) == type:
                return other
    return tape.put(name, args, "", type)


def _is_one(tape: Tape, k: int) -> bool:
    op, args, attr, _ = tape.instructions[k]
    return (op == "literal" and attr == "1.0") or (op == "cast" and _is_one(tape, args[0]))


def as_tensors(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch functions that take no Python numbers: give them tensors of the promoted type instead."""

    def on_tensors(*args: Any) -> torch.Tensor:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        dtype = _promoted(args)
        device = tensors[0].device
        return f(*(a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=dtype, device=device) for a in args))

    return on_tensors


def by_first(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch functions that cannot be derived, or called at all, with a Python number as first operand."""
    with_number = as_tensors(f)
    return lambda x, y: f(x, y) if isinstance(x, torch.Tensor) else with_number(x, y)


def floor_quotient(x: torch.Tensor, y: Any) -> torch.Tensor:
    """x // y, which torch refuses to derive when written so; its derivative is zero."""
    return torch.div(x, y, rounding_mode="floor")


def _promoted(args: tuple[Any, ...]) -> torch.dtype:
    dtype = args[0]
    for a in args[1:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype) if isinstance(dtype, torch.dtype) else dtype, a)
    return dtype if isinstance(dtype, torch.dtype) else torch.result_type(dtype, dtype)


def truth(*types: Type) -> Type:
    return Type("bool", max([t.level for t in types]))


def same(t: Type) -> Type:
    return t


def float_of(*types: Type) -> Type:
    return as_float(promote(*types))


def branches(_: Type, a: Type, b: Type) -> Type:
    chosen = promote(a, b)
    return Type(chosen.dtype, max(chosen.level, _.level))


def numbers(*types: Type) -> bool:
    return not promote(*types).is_bool


def no_boolean(*types: Type) -> bool:
    return not any(t.is_bool for t in types)


def bits(*types: Type) -> bool:
    return not promote(*types).is_float


def integers(*types: Type) -> bool:
    return promote(*types).is_integer


def floats(t: Type) -> bool:
    return t.is_float


def choices(condition: Type, a: Type, b: Type) -> bool:
    return condition.is_bool and condition.level > 0


# -- arithmetic ------------------------------------------------------------------------------------------------------

define("add", 2, operator.add, promote, intervals.add, derive=lambda t, g, a, out: (g, g))
define("sub", 2, operator.sub, promote, intervals.sub, takes=no_boolean, derive=lambda t, g, a, out: (g, emit(t, "neg", g)))
define("mul", 2, operator.mul, promote, intervals.mul, derive=lambda t, g, a, out: (emit(t, "mul", g, a[1]), emit(t, "mul", g, a[0])))
define(
    "div",
    2,
    operator.truediv,
    float_of,
    intervals.div,
    derive=lambda t, g, a, out: (emit(t, "div", g, a[1]), emit(t, "neg", emit(t, "div", emit(t, "mul", g, out), a[1]))),
)
define("floordiv", 2, by_first(floor_quotient), promote, intervals.floordiv_integer, bounds_of_floats=intervals.floordiv_float, takes=numbers)
define(
    "mod",
    2,
    by_first(torch.remainder),
    promote,
    intervals.mod_integer,
    bounds_of_floats=intervals.mod_float,
    takes=numbers,
    derive=lambda t, g, a, out: (g, emit(t, "neg", emit(t, "mul", g, emit(t, "floordiv", a[0], a[1])))),
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
        base = t.put("cast", (base,), t.type(out).dtype, infer(OPS["cast"], (t.type(base),), t.type(out).dtype))
    flat = emit(t, "and", emit(t, "eq", base, t.literal(0)), emit(t, "ge", exponent, t.literal(0)))
    return emit(t, "where", flat, t.literal(0.0), emit(t, "mul", g, emit(t, "mul", out, emit(t, "log", base))))


define("pow", 2, operator.pow, promote, intervals.power_integer, bounds_of_floats=intervals.power, takes=numbers, derive=_derive_pow)
define("neg", 1, operator.neg, same, intervals.negate, takes=numbers, exact=True, derive=lambda t, g, a, out: (emit(t, "neg", g),))
define("abs", 1, torch.abs, same, intervals.absolute, takes=numbers, exact=True, derive=lambda t, g, a, out: (emit(t, "mul", g, emit(t, "sign", a[0])),))


def _derive_extreme(loses: str) -> Callable[[Tape, int, tuple[int, ...], int], Gradients]:
    """The gradient goes to the operand that does not lose; a tie shares it, and beside NaN nobody loses, as in torch."""

    def derive(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
        half = emit(t, "mul", g, t.literal(0.5))
        tie = emit(t, "eq", a[0], a[1])

        def part(x: int, y: int) -> int:
            return emit(t, "where", tie, half, emit(t, "where", emit(t, loses, x, y), t.literal(0.0), g))

        return part(a[0], a[1]), part(a[1], a[0])

    return derive


def _derive_clamp(kept: str, cut: str) -> Callable[[Tape, int, tuple[int, ...], int], Gradients]:
    def derive(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
        zero = t.literal(0.0)
        return emit(t, "where", emit(t, kept, *a), g, zero), emit(t, "where", emit(t, cut, *a), g, zero)

    return derive


define("minimum", 2, as_tensors(torch.minimum), promote, intervals.minimum, exact=True, derive=_derive_extreme("gt"))
define("maximum", 2, as_tensors(torch.maximum), promote, intervals.maximum, exact=True, derive=_derive_extreme("lt"))
define("clamp_min", 2, as_tensors(torch.clamp_min), promote, intervals.maximum, exact=True, derive=_derive_clamp("ge", "lt"))
define("clamp_max", 2, as_tensors(torch.clamp_max), promote, intervals.minimum, exact=True, derive=_derive_clamp("le", "gt"))

# -- comparisons and logic -------------------------------------------------------------------------------------------

define("lt", 2, operator.lt, truth, intervals.less)
define("le", 2, operator.le, truth, intervals.less_equal)
define("gt", 2, operator.gt, truth, lambda a, b: intervals.less(b, a))
define("ge", 2, operator.ge, truth, lambda a, b: intervals.less_equal(b, a))
define("eq", 2, operator.eq, truth, intervals.equal)
define("ne", 2, operator.ne, truth, lambda a, b: intervals.logical_not(intervals.equal(a, b)))
define("and", 2, operator.and_, promote, intervals.bit_and, takes=bits, bounds_of_bools=intervals.minimum)
define("or", 2, operator.or_, promote, intervals.bit_or, takes=bits, bounds_of_bools=intervals.maximum)
define("xor", 2, operator.xor, promote, intervals.bit_xor, takes=bits, bounds_of_bools=intervals.logical_xor)
define("not", 1, operator.invert, same, lambda a: Interval(-a.hi - 1, -a.lo - 1), takes=bits, bounds_of_bools=intervals.logical_not)
define("shl", 2, operator.lshift, promote, intervals.shift_left, takes=integers)
define("shr", 2, operator.rshift, promote, intervals.shift_right, takes=integers)


def _derive_where(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    zero = t.literal(0.0)
    return None, emit(t, "where", a[0], g, zero), emit(t, "where", a[0], zero, g)


define("where", 3, torch.where, branches, intervals.where, takes=choices, derive=_derive_where, computes=False)

# -- rounding --------------------------------------------------------------------------------------------------------

define("floor", 1, torch.floor, same, intervals.increasing(torch.floor), takes=numbers, exact=True)
define("ceil", 1, torch.ceil, same, intervals.increasing(torch.ceil), takes=numbers, exact=True)
define("round", 1, torch.round, same, intervals.increasing(torch.round), takes=numbers, exact=True)
define("trunc", 1, torch.trunc, same, intervals.increasing(torch.trunc), takes=numbers, exact=True)
define("sign", 1, torch.sign, same, intervals.sign, exact=True)
define("cast", 1, lambda x: x, same, lambda a: a, derive=lambda t, g, a, out: (g,), computes=False)

define("detach", 1, torch.Tensor.detach, same, lambda a: a, exact=True)

# -- functions of a float --------------------------------------------------------------------------------------------


def _times(f: Callable[[Tape, int, int], int]) -> Callable[[Tape, int, tuple[int, ...], int], Gradients]:
    """d f(x) = g * slope, where the slope is written from x and f(x)."""
    return lambda t, g, a, out: (emit(t, "mul", g, f(t, a[0], out)),)


def _slope_of_sigmoid(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", out, emit(t, "sub", t.literal(1.0), out))


def _slope_of_tanh(t: Tape, x: int, out: int) -> int:
    return emit(t, "sub", t.literal(1.0), emit(t, "mul", out, out))


def _slope_of_silu(t: Tape, x: int, out: int) -> int:
    s = emit(t, "sigmoid", x)
    return emit(t, "mul", s, emit(t, "add", t.literal(1.0), emit(t, "mul", x, emit(t, "sub", t.literal(1.0), s))))


def _slope_of_erf(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", t.literal(2.0 / math.sqrt(math.pi)), emit(t, "exp", emit(t, "neg", emit(t, "mul", x, x))))


def _slope_of_rsqrt(t: Tape, x: int, out: int) -> int:
    return emit(t, "mul", t.literal(-0.5), emit(t, "mul", out, emit(t, "mul", out, out)))


def _derive_relu(t: Tape, g: int, a: tuple[int, ...], out: int) -> Gradients:
    """A choice, not a product: what is cut stays cut where the gradient is infinite."""
    return (emit(t, "where", emit(t, "le", a[0], t.literal(0)), t.literal(0.0), g),)


define("exp", 1, torch.exp, float_of, intervals.increasing(torch.exp), derive=_times(lambda t, x, out: out))
define("exp2", 1, torch.exp2, float_of, intervals.increasing(torch.exp2), derive=_times(lambda t, x, out: emit(t, "mul", out, t.literal(intervals.LN2))))
define("log", 1, torch.log, float_of, intervals.logarithm(torch.log), derive=lambda t, g, a, out: (emit(t, "div", g, a[0]),))
define(
    "log2",
    1,
    torch.log2,
    float_of,
    intervals.logarithm(torch.log2),
    derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "mul", a[0], t.literal(intervals.LN2))),),
)
define("sqrt", 1, torch.sqrt, float_of, intervals.square_root, derive=lambda t, g, a, out: (emit(t, "div", g, emit(t, "mul", out, t.literal(2.0))),))
define("rsqrt", 1, torch.rsqrt, float_of, intervals.reciprocal_square_root, derive=_times(_slope_of_rsqrt))
define("sin", 1, torch.sin, float_of, intervals.wave, derive=_times(lambda t, x, out: emit(t, "cos", x)))
define("cos", 1, torch.cos, float_of, intervals.wave, derive=_times(lambda t, x, out: emit(t, "neg", emit(t, "sin", x))))
define("tanh", 1, torch.tanh, float_of, intervals.increasing(torch.tanh), derive=_times(_slope_of_tanh))
define("sigmoid", 1, torch.sigmoid, float_of, intervals.increasing(torch.sigmoid), derive=_times(_slope_of_sigmoid))
define("erf", 1, torch.erf, float_of, intervals.increasing(torch.erf), derive=_times(_slope_of_erf))
define("silu", 1, torch.nn.functional.silu, float_of, intervals.silu, takes=floats, derive=_times(_slope_of_silu))
define("relu", 1, torch.relu, same, intervals.increasing(torch.relu), takes=numbers, exact=True, derive=_derive_relu)
