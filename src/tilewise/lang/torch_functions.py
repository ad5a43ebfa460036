"""The functions of torch that a mask or score function can call, in terms of the language's operations.

Their parameters are named as torch names them; what else a caller passes is refused by name.
"""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.lang.refusals import refuse
from tilewise.lang.rows import Incomplete, Row, RowProduct
from tilewise.lang.symbol import Symbol, Trace
from tilewise.lang.tracer import tracer_of
from tilewise.lang.types import NAME_OF


def unary(op: str) -> Callable[..., Any]:
    def apply(input: Any) -> Symbol:
        return tracer_of((input,)).emit(op, input)

    return apply


def binary(op: str) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Symbol:
        return tracer_of((input, other)).emit(op, input, other)

    return apply


def swapped(f: Callable[..., Any]) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Any:
        return f(other, input)

    return apply


def activation(op: str) -> Callable[..., Any]:
    """torch.nn.functional passes `inplace` along."""

    def apply(input: Any, inplace: bool = False) -> Symbol:
        _refuse_in_place(op, inplace)
        return tracer_of((input,)).emit(op, input)

    return apply


def scaled_sum(op: str) -> Callable[..., Any]:
    def apply(input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
        tracer = tracer_of((input, other, alpha))
        if isinstance(alpha, int) and alpha == 1:
            return tracer.emit(op, input, other)
        total = tracer.emit(op, input, tracer.emit("mul", other, alpha))
        if isinstance(alpha, float) and tracer.emit(op, input, other).dtype != total.dtype:
            raise refuse(f"alpha={alpha} of integers, as in torch, must be an integer")
        return total

    return apply


def power(input: Any, exponent: Any) -> Symbol:
    return tracer_of((input, exponent)).power(input, exponent)


def divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Symbol:
    tracer = tracer_of((input, other))
    if rounding_mode is None:
        return tracer.emit("div", input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise refuse(f"div takes rounding_mode None, 'floor' or 'trunc', got {rounding_mode!r}")
    input, other = Symbol(tracer, tracer.operand(input)), Symbol(tracer, tracer.operand(other))  # each is used twice
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


def where(condition: Any, input: Any, other: Any) -> Symbol:
    return tracer_of((condition, input, other)).emit("where", condition, input, other)


def where_method(input: Any, condition: Any, other: Any) -> Symbol:
    """x.where(condition, other): x comes first, unlike in torch.where."""
    return where(condition, input, other)


def truth(tracer: Trace, x: Any) -> Symbol:
    return tracer.cast(Symbol(tracer, tracer.operand(x)), "bool")


def logical(op: str) -> Callable[..., Symbol]:
    def apply(input: Any, other: Any) -> Symbol:
        tracer = tracer_of((input, other))
        return tracer.emit(op, truth(tracer, input), truth(tracer, other))

    return apply


def logical_not(input: Any) -> Symbol:
    tracer = tracer_of((input,))
    return tracer.emit("not", truth(tracer, input))


def square(input: Any) -> Symbol:
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
    kept = Symbol(tracer, tracer.operand(input))
    return tracer.cast(where(mask, value, kept), NAME_OF[kept.dtype])


# -- activations -----------------------------------------------------------------------------------------------------


def softplus(input: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    if not isinstance(beta, Symbol) and not isinstance(threshold, Symbol) and (beta, threshold) == (1.0, 20.0):
        return tracer_of((input,)).emit("softplus", input)
    scaled = input * beta
    return where(scaled > threshold, input, FUNCTIONS["logaddexp"](scaled, 0.0) / beta)


def logsigmoid(input: Any) -> Any:
    return -softplus(-input, threshold=50.0)


def gelu(input: Any, *, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        raise refuse(f"gelu takes approximate='none' or 'tanh', got {approximate!r}")
    return tracer_of((input,)).emit("gelu" if approximate == "none" else "gelu_tanh", input)


def elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    """Where the exponential is not chosen its argument is bounded too: its derivative is multiplied by 0, which of infinity would be NaN."""
    _refuse_in_place("elu", inplace)
    return where(input > 0, input, alpha * FUNCTIONS["expm1"](clamp(input, max=0.0)))


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _refuse_in_place("leaky_relu", inplace)
    return where(input > 0, input, input * negative_slope)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    _refuse_in_place("hardtanh", inplace)
    return where(input <= min_val, min_val, where(input >= max_val, max_val, input))  # unlike clamp, flat where it begins to cut


def _refuse_in_place(name: str, inplace: bool) -> None:
    if inplace:
        raise refuse(f"{name} with inplace=True changes a value in place; leave inplace out")


def multiply(input: Any, other: Any) -> Any:
    return input * other if isinstance(input, Row) else tracer_of((input, other)).emit("mul", input, other)


def product_of_rows(input: Any, other: Any) -> Any:
    if not isinstance(input, Row) and not isinstance(other, Row):
        raise refuse("a product of single values is written x * y; rows are indexed in all dimensions but the last, as in torch.dot(a[b, h, q], c[b, h, kv])")
    return RowProduct(input, other).dot()


def dot(input: Any, tensor: Any) -> Any:
    return product_of_rows(input, tensor)


def summed(input: Any, dim: Any = None, keepdim: bool = False) -> Symbol:
    """Of the products of two rows, or of a single element, which torch sums as if it were a row of one."""
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    if len(dims) > 1 or any([type(d) is not int or d not in (0, -1) for d in dims]):
        raise refuse(f"sum was given dim={dim!r}; rows and, as in torch, single values have one dimension, 0 or -1; leave dim out")
    if isinstance(input, RowProduct):
        if keepdim:
            raise refuse("sum of a row with keepdim=True would be a row of one element; leave keepdim out")
        return input.total()
    tracer = tracer_of((input,))
    element = Symbol(tracer, tracer.operand(input))
    return element if element.dtype.is_floating_point else tracer.cast(element, "i64")  # integers and booleans are counted in 64 bits


def positive(input: Any) -> Any:
    return +input


def typed(input: Any, dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise refuse(f"a conversion takes a dtype such as torch.float32, got {dtype!r}")
    return converter(dtype)(input)


def type_as(input: Any, other: Any) -> Any:
    if not isinstance(other, (torch.Tensor, Symbol, Incomplete)):
        raise refuse(f"type_as takes the value or tensor whose dtype is wanted, got {other!r}; a dtype goes to .to(dtype)")
    return converter(other.dtype)(input)


def convert(input: Any, device: Any = None, dtype: Any = None, non_blocking: Any = False, copy: bool = False, *, memory_format: Any = None) -> Any:
    """`.to(...)`: a dtype converts; a device changes nothing. A dtype, or a value to be like, may also stand in the device's place."""
    if isinstance(device, (torch.Tensor, Symbol, Incomplete)):
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
    input: Symbol,
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
) -> Symbol:
    """A 0-d constant."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    if len(shape) != 0:
        raise refuse(f"a tensor of shape {shape} is made; a mask or score sees one element at a time, so make it outside")
    number = Symbol(input.tracer, input.tracer.operand(fill_value))
    converted: Symbol = converter(input.dtype if dtype is None else dtype)(number)
    return converted


def filled_like(
    input: Symbol,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool = False,
    requires_grad: bool = False,
    memory_format: Any = None,
) -> Symbol:
    return filled(input, (), fill_value, dtype=dtype)


def new_constant(value: int) -> Callable[..., Symbol]:
    def make(
        input: Symbol,
        size: Any,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
    ) -> Symbol:
        return filled(input, size, Symbol(input.tracer, input.tracer.tape.literal(value)), dtype=dtype)

    return make


def constant_like(value: int) -> Callable[..., Symbol]:
    def make(
        input: Symbol,
        *,
        dtype: torch.dtype | None = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: bool = False,
        requires_grad: bool = False,
        memory_format: Any = None,
    ) -> Symbol:
        return filled(input, (), Symbol(input.tracer, input.tracer.tape.literal(value)), dtype=dtype)

    return make


def unchanged(input: Symbol, *, memory_format: Any = None) -> Symbol:
    return input


def to_cuda(input: Symbol, device: Any = None, non_blocking: bool = False, *, memory_format: Any = None) -> Symbol:
    return input


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": scaled_sum("add"),
    "sub": scaled_sum("sub"),
    "subtract": scaled_sum("sub"),
    "rsub": swapped(binary("sub")),
    "mul": multiply,
    "multiply": multiply,
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
    "min": binary("minimum"),
    "max": binary("maximum"),
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
    "atan": unary("atan"),
    "arctan": unary("atan"),
    "atan2": binary("atan2"),
    "arctan2": binary("atan2"),
    "sinh": unary("sinh"),
    "cosh": unary("cosh"),
    "tanh": unary("tanh"),
    "sigmoid": unary("sigmoid"),
    "expit": unary("sigmoid"),
    "erf": unary("erf"),
    "erfc": unary("erfc"),
    "silu": activation("silu"),
    "relu": activation("relu"),
    "softplus": softplus,
    "logsigmoid": logsigmoid,
    "gelu": gelu,
    "elu": elu,
    "leaky_relu": leaky_relu,
    "hardtanh": hardtanh,
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
    "dot": dot,
    "inner": product_of_rows,
    "matmul": product_of_rows,
    "sum": summed,
}

# What Python's operators call on a real tensor that meets a symbol.
OPERATORS: dict[str, Callable[..., Any]] = {
    "__pow__": power,
    "__rpow__": swapped(power),
    "__matmul__": product_of_rows,
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
