"""Tracing: a Python mask or score function, called once with symbols, becomes a program.

Written so that torch.compile can follow it too: under `fullgraph=True` the user's function, its closure and graph
intermediates it captures are all seen by the compiler, and only the finished program's text enters the graph.
"""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tilewise.errors import TraceError
from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import INDICES, Call, CaptureSpec, Instruction, Tape, finish, program_of
from tilewise.lang.types import DTYPE_OF, NAME_OF

BRANCHING = (
    "Python cannot branch on a value that differs for every (b, h, q, kv): `if`, `and`, `or`, `not`, `in`, chained "
    "comparisons and min()/max() need one concrete value. Write torch.where(condition, a, b) instead of `if`, "
    "`&`, `|`, `~` (with parentheses) instead of `and`, `or`, `not`, `(a <= x) & (x < b)` instead of `a <= x < b`, and "
    "torch.minimum/torch.maximum instead of min/max"
)
WRITING = "a mask or score function must not write to a tensor; return the new value instead"

# How users write the operations that do not take every dtype, and what to do about it.
WRITTEN = {
    "sub": "a difference (-)", "floordiv": "a quotient (//)", "mod": "a remainder (%)", "neg": "the negative (-)", "and": "the conjunction (&)",
    "or": "the disjunction (|)", "xor": "the exclusive or (^)", "not": "the inversion (~)", "shl": "a shift (<<)", "shr": "a shift (>>)",
    "where": "torch.where",
}  # fmt: skip
CONVERT = " is not defined, as in torch; convert first, for instance with .long(), .float() or .bool()"
ADVICE = {
    "sub": " is not defined for booleans, as in torch; use ~ or ^, or convert with .int()",
    "where": " is not defined: its condition must be boolean; compare, for instance x != 0",
}
LONGEST_ROW = 512  # a dot product of captured rows is written out, element by element


def location() -> str:
    """Where in the user's own code we are, as ' at file:line'."""
    if torch.compiler.is_compiling():
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module.startswith("tilewise.") or module == "torch" or module.startswith("torch.")):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def refuse(message: str) -> TraceError:
    return TraceError(f"{message} (in a mask or score function{location()})")


class Tracer:
    """One trace under way: the tape and the arguments found so far."""

    def __init__(self, device: Any) -> None:
        self.tape = Tape()
        self.device = device
        self.captures: list[torch.Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []
        self.repeatable = True

    def capture(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.captures):
            if known is tensor:
                return slot
        if tensor.dtype not in NAME_OF:
            raise refuse(f"a captured tensor has dtype {tensor.dtype}; allowed are {', '.join(str(d) for d in NAME_OF)}")
        self.captures.append(tensor)
        return len(self.captures) - 1

    def operand(self, value: Any) -> int:
        """The instruction of a symbol, a number or a 0-d tensor."""
        if isinstance(value, Symbol):
            return value.at
        if isinstance(value, bool):
            return self.tape.literal(value)
        if isinstance(value, (int, torch.SymInt)):
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise refuse(f"the number {value} does not fit in 64 bits")
            self.ints.append(value)  # type: ignore[arg-type]
            return self.tape.int_slot(len(self.ints) - 1)
        if isinstance(value, (float, torch.SymFloat)):
            self.floats.append(float(value) if isinstance(value, float) else value)  # type: ignore[arg-type]
            return self.tape.float_slot(len(self.floats) - 1)
        if isinstance(value, torch.Tensor):
            return self._whole_tensor(value)
        if isinstance(value, Row):
            raise value.incomplete()
        return self._foreign(value)

    def _whole_tensor(self, tensor: torch.Tensor) -> int:
        if tensor.dim() != 0:
            raise refuse(
                f"a captured tensor of shape {tuple(tensor.shape)} is used whole; a mask or score sees one element at a "
                "time, so index it with b, h, q or kv, for instance tensor[h] or tensor[q - kv + offset]"
            )
        return self.tape.load(self.capture(tensor), NAME_OF[tensor.dtype], ())

    def _foreign(self, value: Any) -> int:
        """Numbers of other libraries (numpy's, say)."""
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return self.operand(value.item())
        if hasattr(value, "__index__"):
            return self.operand(value.__index__())
        if hasattr(value, "__float__"):
            return self.operand(value.__float__())
        raise refuse(f"{type(value).__name__} {value!r} cannot be used with b, h, q, kv or score; use numbers or tensors")

    def emit(self, op: str, *values: Any) -> "Symbol":
        args = tuple([self.operand(v) for v in values])
        types = tuple([self.tape.type(a) for a in args])
        if not OPS[op].takes(*types):
            raise refuse(f"{WRITTEN.get(op, op)} of {' and '.join([str(DTYPE_OF[t.dtype]) for t in types])} values{ADVICE.get(op, CONVERT)}")
        return Symbol(self, self.tape.put(op, args, "", infer(OPS[op], types)))

    def cast(self, value: "Symbol", dtype: str) -> "Symbol":
        if self.tape.type(value.at).dtype == dtype and self.tape.type(value.at).level > 0:
            return value
        return Symbol(self, self.tape.put("cast", (value.at,), dtype, infer(OPS["cast"], (self.tape.type(value.at),), dtype)))

    def load(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> "Symbol | Row":
        if len(index) > tensor.dim():
            raise refuse(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}")
        for i, size in zip(index, tensor.shape, strict=False):
            if isinstance(i, int) and not -size <= i < size:
                raise refuse(f"index {i} is outside a dimension of size {size} of a captured tensor of shape {tuple(tensor.shape)}")
        at = [self.operand(i) for i in index]
        for a in at:
            if self.tape.type(a).is_float or self.tape.type(a).is_bool:
                raise refuse(f"a captured tensor is indexed with a {self.tape.type(a).dtype} value; indices must be integers (use .long())")
        if len(index) < tensor.dim():
            return Row(self, tensor, index)
        if tensor.numel() == 0:
            raise refuse(f"a captured tensor of shape {tuple(tensor.shape)} has no element to load")
        return Symbol(self, self.tape.load(self.capture(tensor), NAME_OF[tensor.dtype], tuple(at)))


class Symbol:
    """A value that differs for every (b, h, q, kv); it behaves like a 0-d tensor."""

    def __init__(self, tracer: Tracer, at: int) -> None:
        self.tracer = tracer
        self.at = at

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE_OF[self.tracer.tape.type(self.at).dtype]

    @property
    def device(self) -> Any:
        return self.tracer.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size([])

    @property
    def ndim(self) -> int:
        return 0

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise refuse(BRANCHING)

    def __int__(self) -> int:
        raise refuse("int() needs one concrete value; use .long() or .int() to convert every element")

    def __float__(self) -> float:
        raise refuse("float() and math.* need one concrete value; use .float() and torch.* functions")

    def __index__(self) -> int:
        raise refuse("a Python list, range() or slice needs one concrete index; put the values in a tensor and index that")

    def __iter__(self) -> Any:
        raise refuse("b, h, q, kv and score are single values and cannot be iterated or unpacked")

    def __getitem__(self, index: Any) -> Any:
        raise refuse("b, h, q, kv and score are single values and cannot be indexed")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refuse("a mask or score function must not change values in place; use torch.where")

    def __contains__(self, other: Any) -> bool:
        raise refuse(BRANCHING)

    def __len__(self) -> int:
        raise refuse("b, h, q, kv and score are single values without a length")

    def __round__(self, digits: Any = None) -> Any:
        raise refuse("round() needs one concrete value; use torch.round")

    def __trunc__(self) -> Any:
        raise refuse("math.trunc needs one concrete value; use torch.trunc or .long()")

    def item(self) -> Any:
        raise refuse("item() needs one concrete value; leave it out and compute with the value itself")

    tolist = item

    def __divmod__(self, other: Any) -> Any:
        raise refuse("divmod() is not part of the mask and score language; use // and %")

    __rdivmod__ = __divmod__

    def __matmul__(self, other: Any) -> Any:
        raise refuse("@ multiplies captured rows only, as in a[b, h, q] @ c[b, h, kv]; use * for single values")

    __rmatmul__ = __matmul__
    __array_ufunc__ = None  # numpy's numbers leave their operators to us

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that Python or a library asks for
            raise AttributeError(name)
        raise unknown(name)

    def __add__(self, other: Any) -> "Symbol":
        return self.tracer.emit("add", self, other)

    def __radd__(self, other: Any) -> "Symbol":
        return self.tracer.emit("add", other, self)

    def __sub__(self, other: Any) -> "Symbol":
        return self.tracer.emit("sub", self, other)

    def __rsub__(self, other: Any) -> "Symbol":
        return self.tracer.emit("sub", other, self)

    def __mul__(self, other: Any) -> "Symbol":
        return self.tracer.emit("mul", self, other)

    def __rmul__(self, other: Any) -> "Symbol":
        return self.tracer.emit("mul", other, self)

    def __truediv__(self, other: Any) -> "Symbol":
        return self.tracer.emit("div", self, other)

    def __rtruediv__(self, other: Any) -> "Symbol":
        return self.tracer.emit("div", other, self)

    def __floordiv__(self, other: Any) -> "Symbol":
        return self.tracer.emit("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> "Symbol":
        return self.tracer.emit("floordiv", other, self)

    def __mod__(self, other: Any) -> "Symbol":
        return self.tracer.emit("mod", self, other)

    def __rmod__(self, other: Any) -> "Symbol":
        return self.tracer.emit("mod", other, self)

    def __pow__(self, other: Any) -> "Symbol":
        return power(self, other)

    def __rpow__(self, other: Any) -> "Symbol":
        return self.tracer.emit("pow", other, self)

    def __and__(self, other: Any) -> "Symbol":
        return self.tracer.emit("and", self, other)

    def __rand__(self, other: Any) -> "Symbol":
        return self.tracer.emit("and", other, self)

    def __or__(self, other: Any) -> "Symbol":
        return self.tracer.emit("or", self, other)

    def __ror__(self, other: Any) -> "Symbol":
        return self.tracer.emit("or", other, self)

    def __xor__(self, other: Any) -> "Symbol":
        return self.tracer.emit("xor", self, other)

    def __rxor__(self, other: Any) -> "Symbol":
        return self.tracer.emit("xor", other, self)

    def __lshift__(self, other: Any) -> "Symbol":
        return self.tracer.emit("shl", self, other)

    def __rlshift__(self, other: Any) -> "Symbol":
        return self.tracer.emit("shl", other, self)

    def __rshift__(self, other: Any) -> "Symbol":
        return self.tracer.emit("shr", self, other)

    def __rrshift__(self, other: Any) -> "Symbol":
        return self.tracer.emit("shr", other, self)

    def __lt__(self, other: Any) -> "Symbol":
        return self.tracer.emit("lt", self, other)

    def __le__(self, other: Any) -> "Symbol":
        return self.tracer.emit("le", self, other)

    def __gt__(self, other: Any) -> "Symbol":
        return self.tracer.emit("gt", self, other)

    def __ge__(self, other: Any) -> "Symbol":
        return self.tracer.emit("ge", self, other)

    def __eq__(self, other: Any) -> "Symbol":  # type: ignore[override]
        return self.tracer.emit("eq", self, other)

    def __ne__(self, other: Any) -> "Symbol":  # type: ignore[override]
        return self.tracer.emit("ne", self, other)

    def __neg__(self) -> "Symbol":
        return self.tracer.emit("neg", self)

    def __pos__(self) -> "Symbol":
        return self

    def __abs__(self) -> "Symbol":
        return self.tracer.emit("abs", self)

    def __invert__(self) -> "Symbol":
        return self.tracer.emit("not", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return called(func, args, kwargs or {})


class Row:
    """A captured tensor indexed in only some of its dimensions, waiting for the rest or for a dot product."""

    def __init__(self, tracer: Tracer, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        self.tracer = tracer
        self.tensor = tensor
        self.index = index

    def __getitem__(self, index: Any) -> "Symbol | Row":
        return self.tracer.load(self.tensor, self.index + (index if isinstance(index, tuple) else (index,)))

    def __mul__(self, other: Any) -> "RowProduct":
        return RowProduct(self, other)

    def __matmul__(self, other: Any) -> Symbol:
        return RowProduct(self, other).sum()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.incomplete()

    def described(self) -> str:
        rank, given = self.tensor.dim(), len(self.index)
        return f"a captured tensor of shape {tuple(self.tensor.shape)} indexed in {given} of its {rank} dimensions; index all of them, with b, h, q or kv"

    def incomplete(self) -> TraceError:
        return refuse(self.described())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return called(func, args, kwargs or {})


def _incomplete(self: Row, *operands: Any) -> Any:
    raise self.incomplete()


for _name in ("add", "sub", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Row, f"__{_name}__", _incomplete)
    setattr(Row, f"__r{_name}__", _incomplete)
for _name in ("rmul", "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "int", "float", "index", "iter", "len", "contains"):
    setattr(Row, f"__{_name}__", _incomplete)


class RowProduct:
    """The products of two captured rows, element by element; only their sum can be used."""

    def __init__(self, left: Row, right: Any) -> None:
        if not isinstance(left, Row) or not isinstance(right, Row):
            raise left.incomplete() if isinstance(left, Row) else right.incomplete()
        if left.tensor.dim() - len(left.index) != 1 or right.tensor.dim() - len(right.index) != 1:
            raise refuse("only two captured rows, each with one dimension left, can be multiplied, as in torch.dot(a[b, h, q], c[b, h, kv])")
        if left.tensor.shape[-1] != right.tensor.shape[-1] or left.tensor.shape[-1] > LONGEST_ROW:
            raise refuse(
                f"captured rows of {left.tensor.shape[-1]} and {right.tensor.shape[-1]} elements are multiplied; they must be "
                f"equally long and at most {LONGEST_ROW}"
            )
        self.tracer = left.tracer
        self.left = left
        self.right = right

    def sum(self, dim: Any = None) -> Any:
        """16-bit rows are summed in float32 and rounded once, as torch does."""
        total: Any = 0
        for k in range(self.left.tensor.shape[-1]):
            place = Symbol(self.tracer, self.tracer.tape.literal(k))
            product = self._wide(self.left[place]) * self._wide(self.right[place])
            total = product if k == 0 else total + product
        narrow = torch.promote_types(self.left.tensor.dtype, self.right.tensor.dtype)
        return self.tracer.cast(total, NAME_OF[narrow]) if narrow in (torch.float16, torch.bfloat16) and isinstance(total, Symbol) else total

    def _wide(self, x: Any) -> Any:
        return self.tracer.cast(x, "f32") if x.dtype in (torch.float16, torch.bfloat16) else x

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return called(func, args, kwargs or {})


# -- the functions users call ----------------------------------------------------------------------------------------
# Their parameters are named as torch names them; what else a caller passes is refused by name.


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
        if inplace:
            raise refuse(f"{op} with inplace=True changes a value in place; leave inplace out")
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
    """An exponent written as a number is part of the structure: x ** 2 is compiled as a product."""
    tracer = tracer_of((input, exponent))
    if not isinstance(exponent, (int, float)):
        return tracer.emit("pow", input, exponent)
    return tracer.emit("pow", input, Symbol(tracer, tracer.tape.literal(exponent)))


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


def truth(tracer: Tracer, x: Any) -> Symbol:
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
    return abs(input) == float("inf")


def product_of_rows(input: Any, other: Any) -> Any:
    if not isinstance(input, Row) and not isinstance(other, Row):
        raise refuse("a product of single values is written x * y; rows are indexed in all dimensions but the last, as in torch.dot(a[b, h, q], c[b, h, kv])")
    return RowProduct(input, other).sum()


def dot(input: Any, tensor: Any) -> Any:
    return product_of_rows(input, tensor)


def summed(input: Any, dim: Any = None) -> Any:
    return input.sum(dim) if isinstance(input, RowProduct) else input


def typed(input: Any, dtype: Any) -> Symbol:
    if not isinstance(dtype, torch.dtype):
        raise refuse(f"type takes a dtype such as torch.float32 here, got {dtype!r}")
    return converter(dtype)(input)


def type_as(input: Any, other: Any) -> Symbol:
    return converter(other.dtype)(input)


def convert(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    """`.to(...)`: a dtype converts; a device or another tensor's device changes nothing."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            return converter(value)(x)
        if isinstance(value, (torch.Tensor, Symbol)):
            return converter(value.dtype)(x)
    return x


def converter(dtype: torch.dtype) -> Callable[..., Symbol]:
    def cast(input: Symbol, **ignored: Any) -> Symbol:
        if dtype not in NAME_OF:
            raise refuse(f"conversion to {dtype}; allowed are {', '.join(str(d) for d in NAME_OF)}")
        return input.tracer.cast(input, NAME_OF[dtype])

    return cast


def filled(input: Symbol, size: Any, fill_value: Any, dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
    """A 0-d constant."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    if len(shape) != 0:
        raise refuse(f"a tensor of shape {shape} is made; a mask or score sees one element at a time, so make it outside")
    number = Symbol(input.tracer, input.tracer.operand(fill_value))
    return converter(input.dtype if dtype is None else dtype)(number)


def filled_like(input: Symbol, fill_value: Any, dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
    return filled(input, (), fill_value, dtype)


def new_constant(value: int) -> Callable[..., Symbol]:
    def make(input: Symbol, size: Any, dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
        return filled(input, size, Symbol(input.tracer, input.tracer.tape.literal(value)), dtype)

    return make


def constant_like(value: int) -> Callable[..., Symbol]:
    def make(input: Symbol, dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
        return filled(input, (), Symbol(input.tracer, input.tracer.tape.literal(value)), dtype)

    return make


def unchanged(input: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    return input


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": scaled_sum("add"), "sub": scaled_sum("sub"), "subtract": scaled_sum("sub"), "rsub": swapped(binary("sub")),
    "mul": binary("mul"), "multiply": binary("mul"), "div": divide, "divide": divide, "true_divide": binary("div"),
    "floor_divide": binary("floordiv"), "remainder": binary("mod"), "pow": power, "square": square, "reciprocal": reciprocal,
    "neg": unary("neg"), "negative": unary("neg"), "positive": unchanged, "abs": unary("abs"), "absolute": unary("abs"),
    "lt": binary("lt"), "le": binary("le"), "gt": binary("gt"), "ge": binary("ge"), "eq": binary("eq"), "ne": binary("ne"),
    "less": binary("lt"), "less_equal": binary("le"), "greater": binary("gt"), "greater_equal": binary("ge"), "not_equal": binary("ne"),
    "bitwise_and": binary("and"), "bitwise_or": binary("or"), "bitwise_xor": binary("xor"), "bitwise_not": unary("not"),
    "bitwise_left_shift": binary("shl"), "bitwise_right_shift": binary("shr"),
    "logical_and": logical("and"), "logical_or": logical("or"), "logical_xor": logical("xor"), "logical_not": logical_not,
    "where": where, "minimum": binary("minimum"), "maximum": binary("maximum"), "min": binary("minimum"), "max": binary("maximum"),
    "clamp": clamp, "clip": clamp, "clamp_min": clamp_min, "clamp_max": clamp_max,
    "floor": unary("floor"), "ceil": unary("ceil"), "round": unary("round"), "trunc": unary("trunc"), "fix": unary("trunc"),
    "sign": unary("sign"), "sgn": unary("sign"), "isnan": isnan, "isinf": isinf,
    "exp": unary("exp"), "exp2": unary("exp2"), "log": unary("log"), "log2": unary("log2"), "sqrt": unary("sqrt"), "rsqrt": unary("rsqrt"),
    "sin": unary("sin"), "cos": unary("cos"), "tanh": unary("tanh"), "sigmoid": unary("sigmoid"), "expit": unary("sigmoid"), "erf": unary("erf"),
    "silu": activation("silu"), "relu": activation("relu"),
    "to": convert, "type": typed, "type_as": type_as,
    "bool": converter(torch.bool), "byte": converter(torch.uint8), "char": converter(torch.int8), "short": converter(torch.int16),
    "int": converter(torch.int32), "long": converter(torch.int64), "half": converter(torch.float16), "bfloat16": converter(torch.bfloat16),
    "float": converter(torch.float32), "double": converter(torch.float64),
    "new_ones": new_constant(1), "new_zeros": new_constant(0), "new_full": filled,
    "ones_like": constant_like(1), "zeros_like": constant_like(0), "full_like": filled_like,
    "detach": unary("detach"), "clone": unchanged, "contiguous": unchanged, "cpu": unchanged, "cuda": unchanged,
    "dot": dot, "inner": product_of_rows, "matmul": product_of_rows, "sum": summed,
}  # fmt: skip

# What Python's operators call on a real tensor that meets a symbol.
OPERATORS: dict[str, Callable[..., Any]] = {"__pow__": power, "__rpow__": swapped(power), "__matmul__": product_of_rows}
for _name, _op in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("div", "div"), ("floordiv", "floordiv"), ("mod", "mod"),
    ("and", "and"), ("or", "or"), ("xor", "xor"), ("lshift", "shl"), ("rshift", "shr"),
):  # fmt: skip
    OPERATORS[f"__{_name}__"] = binary(_op)
    OPERATORS[f"__r{_name}__"] = swapped(binary(_op))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    OPERATORS[f"__{_name}__"] = binary(_name)


class Handler(NamedTuple):
    """One of the functions above, with what torch's callers may pass to it."""

    name: str
    apply: Callable[..., Any]
    names: tuple[str, ...]  # parameters, the positional ones first
    positional: int
    required: int
    open: bool  # takes other keywords too

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.fits(args, kwargs):
            given = ", ".join([*[str(type(a).__name__) for a in args], *[f"{k}={v!r}" for k, v in kwargs.items()]])
            raise refuse(f"{self.name} was called with ({given}); a mask or score function can use it as {self.name}({', '.join(self.names)})")
        return self.apply(*args, **kwargs)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > self.positional and not self.open:
            return False
        unexpected = [k for k in kwargs if k in self.names[: len(args)] or (k not in self.names and not self.open)]
        missing = [name for name in self.names[len(args) : self.required] if name not in kwargs]
        return not unexpected and not missing


def handler(name: str, f: Callable[..., Any]) -> Handler:
    parameters = inspect.signature(f).parameters.values()
    open = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in (*positional, *(p for p in parameters if p.kind == p.KEYWORD_ONLY))]
    return Handler(name, f, tuple(names), len(positional), sum(p.default is p.empty for p in positional), open)


def _method(h: Handler) -> Callable[..., Any]:
    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        return h((self, *args), kwargs)

    method.__name__ = h.name
    return method


def _by_function() -> dict[Any, Handler]:
    """The tables by torch's own function objects, under every name torch gives them."""
    found: dict[Any, Handler] = {}
    for name, f in (FUNCTIONS | OPERATORS).items():
        h = handler(name, f)
        for home, spelling in ((torch, name), (torch.Tensor, name), (torch.nn.functional, name), (torch.special, name)):
            function = getattr(home, spelling, None)
            if callable(function) and not isinstance(function, type):
                found[function] = h
    found[torch.Tensor.where] = handler("where", where_method)
    return found


BY_FUNCTION = _by_function()
CUSTOM_OPERATORS = {"approx.tanh": BY_FUNCTION[torch.tanh]}  # the name users know a hardware tanh by; here it is exact
for _name in FUNCTIONS:
    if hasattr(torch.Tensor, _name) and _name not in ("dot", "inner", "matmul"):
        setattr(Symbol, _name, _method(BY_FUNCTION[getattr(torch.Tensor, _name)]))


def unknown(name: str) -> TraceError:
    if name.endswith("_") and not name.startswith("__"):
        return refuse(f"{name} changes a value in place; use {name[:-1]} and keep its result")
    return refuse(
        f"the operation {name!r} is not part of the mask and score language; it has Python's operators and {', '.join(sorted(FUNCTIONS))}"
    )


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function was called with a symbol among its arguments."""
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return tracer_of(index).load(args[0], index)
    if func is torch.Tensor.__setitem__ or "out" in kwargs:
        raise refuse(WRITING)
    if func is torch.Tensor.__contains__:
        raise refuse(BRANCHING)
    found = BY_FUNCTION.get(func)
    if found is None and isinstance(func, torch._ops.OpOverloadPacket):
        found = CUSTOM_OPERATORS.get(str(func))
        if found is None:
            raise unknown(f"torch.ops.{func}")
    if found is None:
        raise unknown(func.__name__)
    return found(args, kwargs)


def tracer_of(args: tuple[Any, ...]) -> Tracer:
    for a in args:
        if isinstance(a, (Symbol, Row, RowProduct)):
            return a.tracer
        if isinstance(a, list) and _has_symbol(a):
            raise refuse("a list of values that differ for every (b, h, q, kv) is used; use one at a time")
    raise refuse("no symbol among the arguments")


def _has_symbol(args: Any) -> bool:
    return any(isinstance(a, (Symbol, Row, RowProduct)) or (isinstance(a, (tuple, list)) and _has_symbol(a)) for a in args)


class _Watch(TorchFunctionMode):
    """Sees `tensor[symbol]`, which torch would not hand to the symbol, and stops writes to captured tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = False  # whether the function computed with tensors of its own

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _has_symbol(args) or _has_symbol(tuple(kwargs.values())):
            return called(func, args, kwargs)
        name = "" if torch.compiler.is_compiling() else getattr(func, "__name__", "")
        if name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.startswith("_")) or kwargs.get("inplace"):
            raise refuse(f"{name} changes a tensor in place; a mask or score function must not have side effects")
        if kwargs.get("out") is not None:
            raise refuse(WRITING)
        if name not in _METADATA:
            self.computed = True
        return func(*args, **kwargs)


_IN_PLACE = {f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")}

_METADATA = {"__get__", "dim", "size", "stride", "numel", "__len__", "is_floating_point"}

# -- tracing ---------------------------------------------------------------------------------------------------------


def trace_mask(function: Callable[..., Any], device: Any = None) -> Call:
    """The program of a mask function f(b, h, q, kv)."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    result = _call(tracer, function, symbols, "mask", "(b, h, q, kv)")
    at = _operand_of_result(tracer, result, function)
    if not tracer.tape.type(at).is_bool:
        raise TraceError(
            f"mask function {name_of(function)}{defined_at(function)} returned {DTYPE_OF[tracer.tape.type(at).dtype]} values; a mask returns a "
            "boolean, true where attention is allowed, for instance q >= kv (a function that changes the score goes to score=)"
        )
    return _finish(tracer, at)


def trace_score(functions: tuple[Callable[..., Any], ...], dtype: torch.dtype = torch.float32, device: Any = None) -> Call:
    """The program of score functions f(score, b, h, q, kv), applied in order. `dtype` is the precision scores are kept in."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    score = Symbol(tracer, tracer.tape.score(NAME_OF[dtype]))
    for function in functions:
        result = _call(tracer, function, [score, *symbols], "score", "(score, b, h, q, kv)")
        found = Symbol(tracer, _operand_of_result(tracer, result, function))
        if tracer.tape.type(found.at).is_bool:
            raise TraceError(
                f"score function {name_of(function)}{defined_at(function)} returned booleans; a function that allows or forbids goes to mask="
            )
        score = tracer.cast(found, NAME_OF[dtype])
    return _finish(tracer, score.at)


def name_of(function: Any) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def defined_at(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def _call(tracer: Tracer, function: Callable[..., Any], symbols: list[Symbol], kind: str, signature: str) -> Any:
    if torch.compiler.is_compiling():
        with _Watch():
            return function(*symbols)
    _check_parameters(function, len(symbols), kind, signature)
    watch = _Watch()
    with watch:
        result = function(*symbols)
    tracer.repeatable = tracer.repeatable and not watch.computed
    return result


def _check_parameters(function: Callable[..., Any], count: int, kind: str, signature: str) -> None:
    if not callable(function):
        raise TraceError(f"a {kind} must be a function of {signature}, got {type(function).__name__}")
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # builtins without a signature: calling them will tell
        return
    try:
        parameters.bind(*range(count))
    except TypeError:
        given = len(parameters.parameters)
        other = {("mask", 5): " It looks like a score function: pass it as score=.", ("score", 4): " It looks like a mask function: pass it as mask=."}
        found = f"{name_of(function)}{defined_at(function)} takes {given} parameters: {parameters}."
        raise TraceError(f"a {kind} function takes {signature}, but {found}" + other.get((kind, given), "")) from None


def _operand_of_result(tracer: Tracer, result: Any, function: Callable[..., Any]) -> int:
    problem = None
    if result is None:
        problem = "None; a mask or score function must return its value"
    elif isinstance(result, torch.Tensor) and result.dim() != 0:
        problem = f"a captured tensor of shape {tuple(result.shape)} whole; index it with b, h, q or kv, for instance tensor[h] or tensor[q, kv]"
    elif isinstance(result, Row):
        problem = result.described()
    if problem is not None:
        raise TraceError(f"{name_of(function)}{defined_at(function)} returned {problem}")
    return tracer.operand(result)


def _finish(tracer: Tracer, result: int) -> Call:
    """The program of the result, and the arguments it uses: what was met on the way but not needed is forgotten."""
    specs = tuple([CaptureSpec(NAME_OF[t.dtype], t.dim()) for t in tracer.captures])
    program = finish(tracer.tape, (result,), specs)
    used: dict[str, list[int]] = {"load": [], "int": [], "float": []}
    for op, _, attr, _ in program.instructions:
        if op in used and int(attr) not in used[op]:
            used[op].append(int(attr))
    kept = [
        Instruction(op, args, str(used[op].index(int(attr))), type) if op in used else Instruction(op, args, attr, type)
        for op, args, attr, type in program.instructions
    ]
    program = program_of(kept, program.results, tuple([specs[k] for k in used["load"]]))
    captures = tuple([tracer.captures[k] for k in used["load"]])
    return Call(program, captures, tuple([tracer.ints[k] for k in used["int"]]), tuple([tracer.floats[k] for k in used["float"]]), tracer.repeatable)
