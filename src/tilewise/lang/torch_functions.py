"""The functions of torch that a mask or score function can call, in terms of the language's operations.

Their parameters are named as torch names them; what else a caller passes is refused by name.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewise.lang import rows
from tilewise.lang.activations import ACTIVATIONS
from tilewise.lang.reductions import REDUCTIONS
from tilewise.lang.refusals import refuse, undefined
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.tracer import tracer_of
from tilewise.lang.types import NAME_OF

LN2 = math.log(2.0)


def unary(op: str) -> Callable[..., Any]:
    def apply(input: Any) -> Any:
        return tracer_of((input,)).emit(op, input)

    return apply


def binary(op: str) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Any:
        return tracer_of((input, other)).emit(op, input, other)

    return apply


def swapped(f: Callable[..., Any]) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Any:
        return f(other, input)

    return apply


def scaled_sum(op: str) -> Callable[..., Any]:
    def apply(input: Any, other: Any, *, alpha: Any = 1) -> Any:
        tracer = tracer_of((input, other, alpha))
        if isinstance(alpha, int) and alpha == 1:
            return tracer.emit(op, input, other)
        total = tracer.emit(op, input, tracer.emit("mul", other, alpha))
        if isinstance(alpha, float) and tracer.emit(op, input, other).dtype != total.dtype:
            raise refuse(f"alpha={alpha} of integers, as in torch, must be an integer")
        return total

    return apply


def power(input: Any, exponent: Any) -> Any:
    return tracer_of((input, exponent)).power(input, exponent)


def divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    tracer = tracer_of((input, other))
    if rounding_mode is None:
        return tracer.emit("div", input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise refuse(f"div takes rounding_mode None, 'floor' or 'trunc', got {rounding_mode!r}")
    input, other = tracer.value(input), tracer.value(other)  # each is used twice
    down = tracer.emit("floordiv", input, other)
    if rounding_mode == "floor":
        return down
    if down.dtype.is_floating_point:
        return tracer.emit("trunc", tracer.emit("div", input, other))
    inexact = tracer.emit("ne", tracer.emit("mod", input, other), 0)
    return where(inexact & (down < 0), down + 1, down)  # towards zero: up from below


def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    tracer = tracer_of((input, min, max))
    if min is None and max is None:
        raise refuse("clamp takes min, max or both")
    if min is not None:
        input = tracer.emit("clamp_min", input, min)
    return input if max is None else tracer.emit("clamp_max", input, max)


def clamp_min(input: Any, min: Any) -> Any:
    return clamp(input, min=min)


def clamp_max(input: Any, max: Any) -> Any:
    return clamp(input, max=max)


def where(condition: Any, input: Any, other: Any) -> Any:
    return tracer_of((condition, input, other)).emit("where", condition, input, other)


def where_method(input: Any, condition: Any, other: Any) -> Any:
    """x.where(condition, other): x comes first, unlike in torch.where."""
    return where(condition, input, other)


def truth(tracer: Trace, x: Any) -> Any:
    return tracer.cast(tracer.value(x), "bool")


def logical(op: str) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Any:
        tracer = tracer_of((input, other))
        return tracer.emit(op, truth(tracer, input), truth(tracer, other))

    return apply


def logical_not(input: Any) -> Any:
    tracer = tracer_of((input,))
    return tracer.emit("not", truth(tracer, input))


def square(input: Any) -> Any:
    return power(input, 2)


def reciprocal(input: Any) -> Any:
    return 1.0 / input


def isnan(input: Any) -> Any:
    return input != input


def isinf(input: Any) -> Any:
    return abs(input) == float("inf") if input.dtype.is_floating_point else input != input


def isfinite(input: Any) -> Any:
    return abs(input) < float("inf") if input.dtype.is_floating_point else input == input


def masked_fill(input: Any, mask: Any, value: Any) -> Any:
    tracer = tracer_of((input, mask, value))
    kept = tracer.value(input)
    return tracer.cast(where(mask, value, kept), NAME_OF[kept.dtype])


def isposinf(input: Any) -> Any:
    return input == float("inf")


def isneginf(input: Any) -> Any:
    return input == -float("inf")


def isclose(input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    input, other = _values(input, other)
    near = (input == other) | (isfinite(other) & (abs(input - other) <= atol + abs(rtol * other)))
    return near | (isnan(input) & isnan(other)) if equal_nan else near


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    elements, test_elements = _values(elements, test_elements)
    if isinstance(test_elements, Symbol):
        found = elements == test_elements
    elif len(test_elements.shape) == 1:
        found = (elements.unsqueeze(-1) == test_elements).any(-1)
    else:
        raise refuse(f"isin takes test_elements of one dimension here, got a value of shape {tuple(test_elements.shape)}; .flatten() the tensor before")
    return ~found if invert else found


def fmin(input: Any, other: Any) -> Any:
    input, other = _values(input, other)
    return where(isnan(other), input, where(isnan(input), other, clamp_max(input, other)))  # whose gradient at ties is fmin's in every version of torch


def fmax(input: Any, other: Any) -> Any:
    input, other = _values(input, other)
    return where(isnan(other), input, where(isnan(input), other, clamp_min(input, other)))


def _values(*given: Any) -> list[Traced]:
    """Operands that are used several times: a number among them shall be one argument of the program."""
    tracer = tracer_of(given)
    return [tracer.value(x) for x in given]


def frac(input: Any) -> Any:
    if not input.dtype.is_floating_point:
        raise undefined("frac", [input.dtype])
    return input - FUNCTIONS["trunc"](input)


def nan_to_num(input: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    if not input.dtype.is_floating_point:
        return input
    ends = torch.finfo(input.dtype)
    above = where(isposinf(input), ends.max if posinf is None else posinf, input)
    below = where(isneginf(input), ends.min if neginf is None else neginf, above)
    return where(isnan(input), 0.0 if nan is None else nan, below)


def lerp(input: Any, end: Any, weight: Any) -> Any:
    """From the nearer end, as torch computes it; a weight that is a number has chosen it already."""
    if isinstance(weight, (int, float)):
        return input + weight * (end - input) if abs(weight) < 0.5 else end - (end - input) * (1 - weight)
    input, end, weight = _values(input, end, weight)
    return where(abs(weight) < 0.5, input + weight * (end - input), end - (end - input) * (1 - weight))


def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    tracer = tracer_of((input, tensor1, tensor2, value))
    return tracer.emit("add", input, tracer.emit("mul", _times(tracer, tensor1, value), tensor2))


def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    tracer = tracer_of((input, tensor1, tensor2, value))
    return tracer.emit("add", input, tracer.emit("div", _times(tracer, tensor1, value), tensor2))


def _times(tracer: Trace, input: Any, value: Any) -> Any:
    return input if isinstance(value, int) and value == 1 else tracer.emit("mul", input, value)


def xlogy(input: Any, other: Any) -> Any:
    """x log(y); 0 at x = 0 whatever y is, but for NaN. Where the logarithm would not be finite it is of 1, and so is its derivative."""
    input, other = _values(input, other)
    nothing = (input == 0) & ((other <= 0) | isposinf(other))
    return where(nothing, 0.0, input * FUNCTIONS["log"](where(nothing, 1.0, other)))


def logaddexp2(input: Any, other: Any) -> Any:
    return FUNCTIONS["logaddexp"](input * LN2, other * LN2) / LN2


def scaled(factor: float) -> Callable[..., Any]:
    def apply(input: Any) -> Any:
        return input * factor

    return apply


def unsqueeze(input: Any, dim: int) -> Any:
    rank = len(input.shape)
    if not -rank - 1 <= dim <= rank:
        raise refuse(f"unsqueeze was given dim={dim}; a value of shape {tuple(input.shape)} takes {-rank - 1} to {rank}")
    return rows.part(input, (*[slice(None)] * (dim % (rank + 1)), None))


def squeeze(input: Any, dim: int) -> Any:
    rank = max(len(input.shape), 1)
    if not -rank <= dim < rank:
        raise refuse(f"squeeze was given dim={dim}; a value of shape {tuple(input.shape)} takes {-rank} to {rank - 1}")
    return input if isinstance(input, Symbol) or input.shape[dim] != 1 else rows.part(input, (*[slice(None)] * (dim % rank), 0))


def positive(input: Any) -> Any:
    return +input


def typed(input: Any, dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise refuse(f"a conversion takes a dtype such as torch.float32, got {dtype!r}")
    return converter(dtype)(input)


def type_as(input: Any, other: Any) -> Any:
    if not isinstance(other, (torch.Tensor, Traced)):
        raise refuse(f"type_as takes the value or tensor whose dtype is wanted, got {other!r}; a dtype goes to .to(dtype)")
    return converter(other.dtype)(input)


def convert(input: Any, device: Any = None, dtype: Any = None, non_blocking: Any = False, copy: bool = False, *, memory_format: Any = None) -> Any:
    """`.to(...)`: a dtype converts; a device changes nothing. A dtype, or a value to be like, may also stand in the device's place."""
    if isinstance(device, (torch.Tensor, Traced)):
        device = device.dtype
    if isinstance(device, torch.dtype):
        if not (dtype is None or isinstance(dtype, bool)):  # what follows is `non_blocking`
            raise refuse(f"to was given the dtype {device} and then {dtype!r}; write .to(dtype) or .to(device, dtype)")
        return converter(device)(input)
    if not (device is None or isinstance(device, (str, int, torch.device))):
        raise refuse(f"to takes a dtype, a device or another value, got {device!r}; write .to(dtype) or .to(device, dtype)")
    return input if dtype is None else typed(input, dtype)


def converter(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(input: Any, *, memory_format: Any = None) -> Any:
        if isinstance(input, torch.Tensor):
            raise refuse("a captured tensor is converted to be like a value that differs for every (b, h, q, kv); write tensor.to(value.dtype)")
        if dtype not in NAME_OF:
            raise refuse(f"conversion to {dtype}; allowed are {', '.join(str(d) for d in NAME_OF)}")
        return input.tracer.cast(input, NAME_OF[dtype])

    return cast


# Where and how a value is stored (`layout`, `device`, `memory_format` and so on) changes nothing about it.


def filled(
    input: Traced,
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> Any:
    """A 0-d constant."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    if len(shape) != 0:
        raise refuse(f"a tensor of shape {shape} is made; a mask or score sees one element at a time, so make it outside")
    number = Symbol(input.tracer, input.tracer.operand(fill_value))
    converted: Symbol = converter(input.dtype if dtype is None else dtype)(number)
    return converted


def filled_like(
    input: Traced,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Any:
    return rows.filled(input, filled(input, (), fill_value, dtype=dtype))


def new_constant(value: int) -> Callable[..., Any]:
    def make(
        input: Traced,
        size: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
    ) -> Any:
        return filled(input, size, Symbol(input.tracer, input.tracer.tape.literal(value)), dtype=dtype)

    return make


def constant_like(value: int) -> Callable[..., Any]:
    def make(
        input: Traced,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
        memory_format: Any = None,
    ) -> Any:
        return filled_like(input, Symbol(input.tracer, input.tracer.tape.literal(value)), dtype=dtype)

    return make


def unchanged(input: Any, *, memory_format: Any = None) -> Any:
    return input


def to_cuda(input: Any, device: Any = None, non_blocking: bool = False, *, memory_format: Any = None) -> Any:
    return input


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": scaled_sum("add"),
    "sub": scaled_sum("sub"),
    "subtract": scaled_sum("sub"),
    "rsub": swapped(binary("sub")),
    "mul": binary("mul"),
    "multiply": binary("mul"),
    "div": divide,
    "divide": divide,
    "true_divide": binary("div"),
    "floor_divide": binary("floordiv"),
    "remainder": binary("mod"),
    "fmod": binary("fmod"),
    "pow": power,
    "square": square,
    "reciprocal": reciprocal,
    "neg": unary("neg"),
    "negative": unary("neg"),
    "positive": positive,
    "abs": unary("abs"),
    "absolute": unary("abs"),
    "lt": binary("lt"),
    "le": binary("le"),
    "gt": binary("gt"),
    "ge": binary("ge"),
    "eq": binary("eq"),
    "ne": binary("ne"),
    "less": binary("lt"),
    "less_equal": binary("le"),
    "greater": binary("gt"),
    "greater_equal": binary("ge"),
    "not_equal": binary("ne"),
    "bitwise_and": binary("and"),
    "bitwise_or": binary("or"),
    "bitwise_xor": binary("xor"),
    "bitwise_not": unary("not"),
    "bitwise_left_shift": binary("shl"),
    "bitwise_right_shift": binary("shr"),
    "logical_and": logical("and"),
    "logical_or": logical("or"),
    "logical_xor": logical("xor"),
    "logical_not": logical_not,
    "where": where,
    "masked_fill": masked_fill,
    "minimum": binary("minimum"),
    "maximum": binary("maximum"),
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": clamp_min,
    "clamp_max": clamp_max,
    "floor": unary("floor"),
    "ceil": unary("ceil"),
    "round": unary("round"),
    "trunc": unary("trunc"),
    "fix": unary("trunc"),
    "sign": unary("sign"),
    "sgn": unary("sign"),
    "isnan": isnan,
    "isinf": isinf,
    "isfinite": isfinite,
    "isposinf": isposinf,
    "isneginf": isneginf,
    "isclose": isclose,
    "isin": isin,
    "fmin": fmin,
    "fmax": fmax,
    "frac": frac,
    "nan_to_num": nan_to_num,
    "lerp": lerp,
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "xlogy": xlogy,
    "logaddexp2": logaddexp2,
    "deg2rad": scaled(math.pi / 180),
    "rad2deg": scaled(180 / math.pi),
    "exp": unary("exp"),
    "exp2": unary("exp2"),
    "log": unary("log"),
    "log2": unary("log2"),
    "log10": unary("log10"),
    "log1p": unary("log1p"),
    "expm1": unary("expm1"),
    "logaddexp": binary("logaddexp"),
    "sqrt": unary("sqrt"),
    "rsqrt": unary("rsqrt"),
    "sin": unary("sin"),
    "cos": unary("cos"),
    "tan": unary("tan"),
    "asin": unary("asin"),
    "arcsin": unary("asin"),
    "acos": unary("acos"),
    "arccos": unary("acos"),
    "atan": unary("atan"),
    "arctan": unary("atan"),
    "atan2": binary("atan2"),
    "arctan2": binary("atan2"),
    "sinh": unary("sinh"),
    "cosh": unary("cosh"),
    "tanh": unary("tanh"),
    "asinh": unary("asinh"),
    "arcsinh": unary("asinh"),
    "acosh": unary("acosh"),
    "arccosh": unary("acosh"),
    "atanh": unary("atanh"),
    "arctanh": unary("atanh"),
    "sigmoid": unary("sigmoid"),
    "expit": unary("sigmoid"),
    "erf": unary("erf"),
    "erfc": unary("erfc"),
    "to": convert,
    "type": typed,
    "type_as": type_as,
    "bool": converter(torch.bool),
    "byte": converter(torch.uint8),
    "char": converter(torch.int8),
    "short": converter(torch.int16),
    "int": converter(torch.int32),
    "long": converter(torch.int64),
    "half": converter(torch.float16),
    "bfloat16": converter(torch.bfloat16),
    "float": converter(torch.float32),
    "double": converter(torch.float64),
    "new_ones": new_constant(1),
    "new_zeros": new_constant(0),
    "new_full": filled,
    "ones_like": constant_like(1),
    "zeros_like": constant_like(0),
    "full_like": filled_like,
    "detach": unary("detach"),
    "clone": unchanged,
    "contiguous": unchanged,
    "cpu": unchanged,
    "cuda": to_cuda,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **ACTIVATIONS,
    **REDUCTIONS,
    "inner": REDUCTIONS["dot"],
    "matmul": REDUCTIONS["dot"],
}

# What Python's operators call on a real tensor that meets a symbol.
OPERATORS: dict[str, Callable[..., Any]] = {
    "__pow__": power,
    "__rpow__": swapped(power),
    "__matmul__": REDUCTIONS["dot"],
    "__rmatmul__": swapped(REDUCTIONS["dot"]),
    "__invert__": unary("not"),
    "__pos__": positive,
}
for _name, _op in (
    ("add", "add"),
    ("sub", "sub"),
    ("mul", "mul"),
    ("truediv", "div"),
    ("div", "div"),
    ("floordiv", "floordiv"),
    ("mod", "mod"),
    ("and", "and"),
    ("or", "or"),
    ("xor", "xor"),
    ("lshift", "shl"),
    ("rshift", "shr"),
):
    OPERATORS[f"__{_name}__"] = binary(_op)
    OPERATORS[f"__r{_name}__"] = swapped(binary(_op))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    OPERATORS[f"__{_name}__"] = binary(_name)
