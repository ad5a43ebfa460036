"""What an operation's entry says.

meaning   what it does to torch tensors (this defines the language)
result    its type, from its operands' types
bounds    its interval, from its operands' intervals
triton    how a GPU kernel writes it, {0}, {1}, ... being its operands, all of one type
cpp       how C++ writes it, likewise
triton_bounds  how a GPU kernel writes its interval, {0}, {1}, ... being those of its operands: pairs of integers that no type wraps. None: nothing is known
derive    the gradients of its operands: (tape, g, operands, itself) -> one instruction or None for each; None where it has none
takes     the operand types torch accepts; anything unless given
exact     a float result needs no rounding: it is one of the operands, or whole
special   the emitters' SPECIAL tables may write it in another way, by what is known of its operands; its text is None where they always do

A rule that differs for some types stands beside the general one: bounds_of_floats, triton_of_integers, cpp_of_bools, and so on.

Functions that a text calls are those of engines/gpu/kernels/primitives.py and bounds.py (imported by the header in engines/gpu/generated.py) and of
engines/cxx/operations.h.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.lang.intervals import Interval
from tilewise.lang.program import Tape
from tilewise.lang.types import ZERO_DIM, Type

Gradients = tuple[int | None, ...]
Derive = Callable[[Tape, int, tuple[int, ...], int], Gradients]


@dataclass(frozen=True)
class Op:
    name: str
    arity: int
    meaning: Callable[..., Any]
    result: Callable[..., Type]
    bounds: Callable[..., Interval]
    triton: str | None
    cpp: str | None
    derive: Derive | None = None
    takes: Callable[..., bool] = lambda *types: True
    exact: bool = False
    special: bool = False
    bounds_of_floats: Callable[..., Interval] | None = None
    bounds_of_bools: Callable[..., Interval] | None = None
    triton_of_integers: str | None = None
    triton_of_bools: str | None = None
    triton_bounds: str | None = None
    triton_bounds_of_bools: str | None = None
    triton_fast: str | None = None  # of float32: good enough for scores of 16-bit inputs
    triton_precise: str | None = None  # of float32, where every rounding counts: some of Triton's own are off by a bit or two
    triton_in_float32: bool = False  # 16-bit floats are computed in float32, as torch does: Triton's function takes no others, or rounds on the way
    wide: tuple[int, ...] = ()  # which operands, as numbers beside 16-bit floats, torch takes in float32; others it rounds to 16 bits before
    cpp_of_integers: str | None = None
    cpp_of_bools: str | None = None


OPS: dict[str, Op] = {}


def define(
    name: str,
    arity: int,
    meaning: Callable[..., Any],
    result: Callable[..., Type],
    bounds: Callable[..., Interval],
    triton: str | None,
    cpp: str | None,
    **rules: Any,
) -> None:
    OPS[name] = Op(name, arity, meaning, result, bounds, triton, cpp, **rules)


def infer(op: Op, types: tuple[Type, ...], attr: str = "") -> Type:
    if op.name == "cast":
        return Type(attr, max(ZERO_DIM, types[0].level))  # a cast number is a 0-d tensor
    return op.result(*types)


def emit(tape: Tape, name: str, *args: int) -> int:
    """Write an operation; times one is written only where it changes the type. A comparison sees its operands as they are: rounding decides ties."""
    type = infer(OPS[name], tuple([tape.type(a) for a in args]))
    if tape.narrowest and not type.is_bool:
        args = tuple([tape.widened(a) for a in args])
        type = infer(OPS[name], tuple([tape.type(a) for a in args]))
    if name == "mul":
        for one, other in (args, args[::-1]):
            if _is_one(tape, one) and tape.type(other) == type:
                return other
    return tape.put(name, args, "", type)


def _is_one(tape: Tape, k: int) -> bool:
    op, args, attr, _ = tape.instructions[k]
    return (op == "literal" and attr == "1.0") or (op == "cast" and _is_one(tape, args[0]))


def times(slope: Callable[[Tape, int, int], int]) -> Derive:
    """d f(x) = g * slope, where the slope is written from x and f(x)."""
    return lambda t, g, a, out: (emit(t, "mul", g, slope(t, a[0], out)),)
