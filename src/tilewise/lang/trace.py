"""Tracing: a Python mask or score function, called once with symbols, becomes a program.

Written so that torch.compile can follow it too: under `fullgraph=True` the user's function, its closure and graph
intermediates it captures are all seen by the compiler, and only the finished program's text enters the graph.
"""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tilewise.errors import TraceError
from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import INDICES, Call, CaptureSpec, Tape, finish
from tilewise.lang.types import DTYPE_OF, NAME_OF

BRANCHING = (
    "Python cannot branch on a value that differs for every (b, h, q, kv): `if`, `and`, `or`, `not`, `in`, chained "
    "comparisons and min()/max() need one concrete value. Write torch.where(condition, a, b) instead of `if`, "
    "`&`, `|`, `~` (with parentheses) instead of `and`, `or`, `not`, `(a <= x) & (x < b)` instead of `a <= x < b`, and "
    "torch.minimum/torch.maximum instead of min/max"
)
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
            self.ints.append(value)  # type: ignore[arg-type]
            return self.tape.int_slot(len(self.ints) - 1)
        if isinstance(value, (float, torch.SymFloat)):
            self.floats.append(value)  # type: ignore[arg-type]
            return self.tape.float_slot(len(self.floats) - 1)
        if isinstance(value, torch.Tensor):
            return self._whole_tensor(value)
        if isinstance(value, Row):
            raise refuse(f"a captured tensor was indexed in {len(value.index)} of its {value.tensor.dim()} dimensions; index all of them")
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
        if hasattr(value, "__index__"):
            return self.operand(value.__index__())
        if hasattr(value, "__float__"):
            return self.operand(value.__float__())
        raise refuse(f"{type(value).__name__} {value!r} cannot be used with b, h, q, kv or score; use numbers or tensors")

    def emit(self, op: str, *values: Any) -> "Symbol":
        args = tuple([self.operand(v) for v in values])
        return Symbol(self, self.tape.put(op, args, "", infer(OPS[op], tuple([self.tape.type(a) for a in args]))))

    def cast(self, value: "Symbol", dtype: str) -> "Symbol":
        if self.tape.type(value.at).dtype == dtype and self.tape.type(value.at).level > 0:
            return value
        return Symbol(self, self.tape.put("cast", (value.at,), dtype, infer(OPS["cast"], (self.tape.type(value.at),), dtype)))

    def load(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> "Symbol | Row":
        if len(index) > tensor.dim():
            raise refuse(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}")
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return called(func, args, kwargs or {})


class RowProduct:
    """The products of two captured rows, element by element; only their sum can be used."""

    def __init__(self, left: Row, right: Any) -> None:
        if not isinstance(right, Row) or left.tensor.dim() - len(left.index) != 1 or right.tensor.dim() - len(right.index) != 1:
            raise refuse("only two captured rows, each with one dimension left, can be multiplied, as in torch.dot(a[b, h, q], c[b, h, kv])")
        if left.tensor.shape[-1] != right.tensor.shape[-1] or left.tensor.shape[-1] > LONGEST_ROW:
            raise refuse(
                f"captured rows of {left.tensor.shape[-1]} and {right.tensor.shape[-1]} elements are multiplied; they must be "
                f"equally long and at most {LONGEST_ROW}"
            )
        self.tracer = left.tracer
        self.left = left
        self.right = right

    def sum(self, dim: Any = None) -> Symbol:
        total: Any = None
        for k in range(self.left.tensor.shape[-1]):
            place = Symbol(self.tracer, self.tracer.tape.literal(k))
            product = self.left[place] * self.right[place]
            total = product if total is None else total + product
        return total

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return called(func, args, kwargs or {})


# -- the functions users call ----------------------------------------------------------------------------------------


def power(x: Any, exponent: Any) -> Symbol:
    """An exponent written as a number is part of the structure: x ** 2 is compiled as a product."""
    tracer = tracer_of((x, exponent))
    if not isinstance(exponent, (int, float)):
        return tracer.emit("pow", x, exponent)
    return tracer.emit("pow", x, Symbol(tracer, tracer.tape.literal(exponent)))


def divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Symbol:
    tracer = tracer_of((x, y))
    if rounding_mode == "floor":
        return tracer.emit("floordiv", x, y)
    quotient = tracer.emit("div", x, y)
    return quotient if rounding_mode is None else tracer.emit("trunc", quotient)


def clamp(x: Any, min: Any = None, max: Any = None) -> Symbol:
    tracer = tracer_of((x, min, max))
    if min is not None:
        x = tracer.emit("clamp_min", x, min)
    return x if max is None else tracer.emit("clamp_max", x, max)


def where(condition: Any, x: Any, y: Any) -> Symbol:
    return tracer_of((condition, x, y)).emit("where", condition, x, y)


def truth(x: Any) -> Any:
    return x if not isinstance(x, Symbol) else x.tracer.cast(x, "bool")


def logical(op: str) -> Callable[..., Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        return tracer_of((x, y)).emit(op, truth(x), truth(y))

    return apply


def logical_not(x: Symbol) -> Symbol:
    return ~truth(x)


def convert(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    """`.to(...)`: a dtype converts; a device or another tensor's device changes nothing."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            return converter(value)(x)
        if isinstance(value, (torch.Tensor, Symbol)):
            return converter(value.dtype)(x)
    return x


def converter(dtype: torch.dtype) -> Callable[[Symbol], Symbol]:
    def cast(x: Symbol) -> Symbol:
        if dtype not in NAME_OF:
            raise refuse(f"conversion to {dtype}; allowed are {', '.join(str(d) for d in NAME_OF)}")
        return x.tracer.cast(x, NAME_OF[dtype])

    return cast


def constant(value: float) -> Callable[..., Symbol]:
    """ones_like, new_zeros and so on: a 0-d constant."""

    def make(x: Symbol, size: Any = (), dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
        return filled(x, size, value, dtype=dtype)

    return make


def filled(x: Symbol, size: Any, value: Any, dtype: torch.dtype | None = None, **ignored: Any) -> Symbol:
    if len(tuple(size)) != 0:
        raise refuse(f"a tensor of shape {tuple(size)} is made; a mask or score sees one element at a time, so make it outside")
    number = Symbol(x.tracer, x.tracer.operand(value))
    return x.tracer.cast(number, NAME_OF[x.dtype if dtype is None else dtype])


def unchanged(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    return x


def simple(op: str) -> Callable[..., Symbol]:
    arity = OPS[op].arity

    def apply(*args: Any) -> Symbol:
        if len(args) != arity:
            raise refuse(f"{op} takes {arity} value(s) here, got {len(args)}")
        return tracer_of(args).emit(op, *args)

    return apply


def reversed_arguments(f: Callable[..., Symbol]) -> Callable[..., Symbol]:
    return lambda x, y: f(y, x)


FUNCTIONS: dict[str, Callable[..., Any]] = {name: simple(name) for name in OPS if name not in ("cast", "clamp_min", "clamp_max", "pow", "where")}
FUNCTIONS |= {
    "subtract": simple("sub"), "multiply": simple("mul"), "absolute": simple("abs"), "negative": simple("neg"),
    "div": divide, "divide": divide, "truediv": simple("div"), "true_divide": simple("div"),
    "floor_divide": simple("floordiv"), "remainder": simple("mod"), "pow": power,
    "less": simple("lt"), "less_equal": simple("le"), "greater": simple("gt"), "greater_equal": simple("ge"), "not_equal": simple("ne"),
    "bitwise_and": simple("and"), "bitwise_or": simple("or"), "bitwise_xor": simple("xor"), "bitwise_not": simple("not"), "invert": simple("not"),
    "lshift": simple("shl"), "rshift": simple("shr"), "bitwise_left_shift": simple("shl"), "bitwise_right_shift": simple("shr"),
    "logical_and": logical("and"), "logical_or": logical("or"), "logical_xor": logical("xor"), "logical_not": logical_not,
    "where": where, "clamp": clamp, "clip": clamp, "clamp_min": lambda x, min: clamp(x, min=min), "clamp_max": lambda x, max: clamp(x, max=max),
    "square": lambda x: x * x, "reciprocal": lambda x: 1.0 / x, "isnan": lambda x: x != x, "isinf": lambda x: abs(x) == float("inf"),
    "sub": lambda x, y: tracer_of((x, y)).emit("sub", x, y), "fix": simple("trunc"), "sgn": simple("sign"), "positive": unchanged,
    "to": convert, "type": convert, "type_as": lambda x, other: convert(x, other.dtype),
    "bool": converter(torch.bool), "byte": converter(torch.uint8), "short": converter(torch.int16), "int": converter(torch.int32),
    "long": converter(torch.int64), "half": converter(torch.float16), "bfloat16": converter(torch.bfloat16),
    "float": converter(torch.float32), "double": converter(torch.float64),
    "new_ones": constant(1), "new_zeros": constant(0), "ones_like": lambda x, **kw: constant(1)(x, **kw), "zeros_like": lambda x, **kw: constant(0)(x, **kw),
    "new_full": filled, "full_like": lambda x, value, **kw: filled(x, (), value, **kw),
    "clone": unchanged, "contiguous": unchanged, "cpu": unchanged, "cuda": unchanged,
    "dot": lambda x, y: RowProduct(x, y).sum(), "inner": lambda x, y: RowProduct(x, y).sum(), "matmul": lambda x, y: RowProduct(x, y).sum(),
    "sum": lambda x, dim=None: x.sum(dim) if isinstance(x, RowProduct) else x,
}  # fmt: skip
for _name in ("add", "mul", "mod", "floordiv", "truediv", "pow", "and", "or", "xor", "lshift", "rshift", "sub", "div"):
    FUNCTIONS["r" + _name] = reversed_arguments(FUNCTIONS[_name])
METHODS = [name for name in FUNCTIONS if name.isidentifier() and name not in ("and", "or", "not", "dot", "inner", "matmul")]


def _method(name: str) -> Callable[..., Any]:
    f = FUNCTIONS[name]

    def method(self: Symbol, *args: Any, **kwargs: Any) -> Any:
        return f(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(Symbol, _name, _method(_name))


def unknown(name: str) -> TraceError:
    if name.endswith("_") and not name.startswith("__"):
        return refuse(f"{name} changes a value in place; use {name[:-1]} and keep its result")
    known = sorted(n for n in FUNCTIONS if n.isidentifier())
    return refuse(f"the operation {name!r} is not part of the mask and score language; it has: {', '.join(known)}")


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function was called with a symbol among its arguments."""
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return tracer_of(index).load(args[0], index)
    if func is torch.Tensor.__setitem__ or "out" in kwargs:
        raise refuse("a mask or score function must not write to a tensor; return the new value instead")
    handler = BY_FUNCTION.get(func)
    if handler is None:
        raise unknown(func.__name__)
    return handler(*args, **kwargs)


def _by_function() -> dict[Any, Callable[..., Any]]:
    """The same table by torch's own function objects, under every name torch gives them."""
    found: dict[Any, Callable[..., Any]] = {}
    for name, f in FUNCTIONS.items():
        for home, spelling in ((torch, name), (torch.Tensor, name), (torch.Tensor, f"__{name}__"), (torch.nn.functional, name), (torch.special, name)):
            function = getattr(home, spelling, None)
            if callable(function) and not isinstance(function, type):
                found[function] = f
    return found


BY_FUNCTION = _by_function()


def tracer_of(args: tuple[Any, ...]) -> Tracer:
    for a in args:
        if isinstance(a, (Symbol, Row, RowProduct)):
            return a.tracer
    raise refuse("no symbol among the arguments")


def _has_symbol(args: Any) -> bool:
    for a in args:
        if isinstance(a, (Symbol, Row, RowProduct)) or (isinstance(a, tuple) and _has_symbol(a)):
            return True
    return False


class _Watch(TorchFunctionMode):
    """Sees `tensor[symbol]`, which torch would not hand to the symbol, and stops writes to captured tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _has_symbol(args) or _has_symbol(tuple(kwargs.values())):
            return called(func, args, kwargs)
        name = "" if torch.compiler.is_compiling() else getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("_")) or (name.startswith("__i") and name in _IN_PLACE):
            raise refuse(f"{name} changes a tensor in place; a mask or score function must not have side effects")
        return func(*args, **kwargs)


_IN_PLACE = {f"__i{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")}

# -- tracing ---------------------------------------------------------------------------------------------------------


def trace_mask(function: Callable[..., Any], device: Any = None) -> Call:
    """The program of a mask function f(b, h, q, kv)."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    result = _call(function, symbols, "mask", "(b, h, q, kv)")
    at = _operand_of_result(tracer, result, function)
    if not tracer.tape.type(at).is_bool:
        raise TraceError(
            f"mask function {name_of(function)} returned {tracer.tape.type(at).dtype} values; a mask returns a boolean, "
            "true where attention is allowed (a function that changes the score goes to score=)"
        )
    return _finish(tracer, at)


def trace_score(functions: tuple[Callable[..., Any], ...], dtype: torch.dtype = torch.float32, device: Any = None) -> Call:
    """The program of score functions f(score, b, h, q, kv), applied in order. `dtype` is the precision scores are kept in."""
    tracer = Tracer(torch.device("cpu") if device is None else device)
    symbols = [Symbol(tracer, tracer.tape.index(name)) for name in INDICES]
    score = Symbol(tracer, tracer.tape.score(NAME_OF[dtype]))
    for function in functions:
        result = _call(function, [score, *symbols], "score", "(score, b, h, q, kv)")
        found = Symbol(tracer, _operand_of_result(tracer, result, function))
        if tracer.tape.type(found.at).is_bool:
            raise TraceError(f"score function {name_of(function)} returned booleans; a function that allows or forbids goes to mask=")
        score = tracer.cast(found, NAME_OF[dtype])
    return _finish(tracer, score.at)


def name_of(function: Any) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))


def _call(function: Callable[..., Any], symbols: list[Symbol], kind: str, signature: str) -> Any:
    if not torch.compiler.is_compiling():
        _check_parameters(function, len(symbols), kind, signature)
    with _Watch():
        return function(*symbols)


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
        code = getattr(function, "__code__", None)
        at = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
        raise TraceError(
            f"a {kind} function takes {signature}, but {name_of(function)}{at} takes {given} parameters: {parameters}." + other.get((kind, given), "")
        ) from None


def _operand_of_result(tracer: Tracer, result: Any, function: Callable[..., Any]) -> int:
    if result is None:
        raise TraceError(f"{name_of(function)} returned None; a mask or score function must return its value")
    return tracer.operand(result)


def _finish(tracer: Tracer, result: int) -> Call:
    specs = tuple([CaptureSpec(NAME_OF[t.dtype], t.dim()) for t in tracer.captures])
    program = finish(tracer.tape, (result,), specs)
    return Call(program, tuple(tracer.captures), tuple(tracer.ints), tuple(tracer.floats))



