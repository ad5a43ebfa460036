"""A value that differs for every (b, h, q, kv), under Python's operators: those that are traced, and those that need one concrete value."""

from typing import Any, ClassVar, Protocol

import torch

from tilewise.lang.expression import expression
from tilewise.lang.program import Tape
from tilewise.lang.refusals import BRANCHING, LOOKED_UP, of_numpy, refuse, undefined
from tilewise.lang.types import DTYPE_OF


class Trace(Protocol):
    """What values need of the trace they belong to, which is a Tracer (tracer.py)."""

    tape: Tape
    device: Any
    ints: list[int]
    floats: list[float]

    def operand(self, value: Any) -> int: ...
    def value(self, value: Any) -> "Traced": ...

    # These give a Symbol, or a Row where one is among their operands.
    def emit(self, op: str, *values: Any) -> Any: ...
    def power(self, base: Any, exponent: Any) -> Any: ...
    def cast(self, value: "Traced", dtype: str) -> Any: ...
    def load(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Any: ...


# numpy's functions for its operators -> what a symbol on the right of the operator has for it.
REFLECTED = {
    "add": "__radd__",
    "subtract": "__rsub__",
    "multiply": "__rmul__",
    "divide": "__rtruediv__",
    "floor_divide": "__rfloordiv__",
    "remainder": "__rmod__",
    "power": "__rpow__",
    "divmod": "__rdivmod__",
    "matmul": "__rmatmul__",
    "bitwise_and": "__rand__",
    "bitwise_or": "__ror__",
    "bitwise_xor": "__rxor__",
    "left_shift": "__rlshift__",
    "right_shift": "__rrshift__",
    "less": "__gt__",
    "less_equal": "__ge__",
    "greater": "__lt__",
    "greater_equal": "__le__",
    "equal": "__eq__",
    "not_equal": "__ne__",
}


class Traced:
    """What a function computes with while it is traced: a Symbol, or a Row of several (rows.py)."""

    tracer: Trace
    __torch_function__: ClassVar[Any]  # set by torch_calls.py, as are torch's methods

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def device(self) -> Any:
        return self.tracer.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __hash__(self) -> int:
        raise refuse(LOOKED_UP)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        """numpy's numbers leave their operators to us; its functions are refused."""
        name = function.__name__
        if name in REFLECTED and method == "__call__" and not options and given[-1] is self:
            return getattr(self, REFLECTED[name])(given[0])
        raise of_numpy(name)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        raise of_numpy(function.__name__)

    def __bool__(self) -> bool:
        raise refuse(BRANCHING)

    def __int__(self) -> int:
        raise refuse("int() needs one concrete value; use .long() or .int() to convert every element")

    def __float__(self) -> float:
        raise refuse("float() and math.* need one concrete value; use .float() and torch.* functions")

    def __index__(self) -> int:
        raise refuse("a Python list, range() or slice needs one concrete index; put the values in a tensor and index that")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise refuse("a numpy array is indexed by, or computed with, a value that differs for every (b, h, q, kv); torch.from_numpy makes a tensor of it")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise refuse("a mask or score function must not change values in place; use torch.where")

    def __contains__(self, other: Any) -> bool:
        raise refuse(BRANCHING)

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

    def __add__(self, other: Any) -> Any:
        return self.tracer.emit("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self.tracer.emit("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self.tracer.emit("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.tracer.emit("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.tracer.emit("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.tracer.emit("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.tracer.emit("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.tracer.emit("div", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self.tracer.emit("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.tracer.emit("floordiv", other, self)

    def __mod__(self, other: Any) -> Any:
        return self.tracer.emit("mod", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.tracer.emit("mod", other, self)

    def __pow__(self, other: Any) -> Any:
        return self.tracer.power(self, other)

    def __rpow__(self, other: Any) -> Any:
        return self.tracer.emit("pow", other, self)

    def __and__(self, other: Any) -> Any:
        return self.tracer.emit("and", self, other)

    def __rand__(self, other: Any) -> Any:
        return self.tracer.emit("and", other, self)

    def __or__(self, other: Any) -> Any:
        return self.tracer.emit("or", self, other)

    def __ror__(self, other: Any) -> Any:
        return self.tracer.emit("or", other, self)

    def __xor__(self, other: Any) -> Any:
        return self.tracer.emit("xor", self, other)

    def __rxor__(self, other: Any) -> Any:
        return self.tracer.emit("xor", other, self)

    def __lshift__(self, other: Any) -> Any:
        return self.tracer.emit("shl", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self.tracer.emit("shl", other, self)

    def __rshift__(self, other: Any) -> Any:
        return self.tracer.emit("shr", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return self.tracer.emit("shr", other, self)

    def __lt__(self, other: Any) -> Any:
        return self.tracer.emit("lt", self, other)

    def __le__(self, other: Any) -> Any:
        return self.tracer.emit("le", self, other)

    def __gt__(self, other: Any) -> Any:
        return self.tracer.emit("gt", self, other)

    def __ge__(self, other: Any) -> Any:
        return self.tracer.emit("ge", self, other)

    def __eq__(self, other: Any) -> Any:  # a comparison is traced, not answered
        return self.tracer.emit("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return self.tracer.emit("ne", self, other)

    def __neg__(self) -> Any:
        return self.tracer.emit("neg", self)

    def __pos__(self) -> "Traced":
        if self.dtype == torch.bool:
            raise undefined("pos", [self.dtype])
        return self

    def __abs__(self) -> Any:
        return self.tracer.emit("abs", self)

    def __invert__(self) -> Any:
        return self.tracer.emit("not", self)


class Symbol(Traced):
    """A value that differs for every (b, h, q, kv); it behaves like a 0-d tensor."""

    def __init__(self, tracer: Trace, at: int) -> None:
        self.tracer = tracer
        self.at = at

    @property
    def dtype(self) -> torch.dtype:
        return DTYPE_OF[self.tracer.tape.type(self.at).dtype]

    @property
    def shape(self) -> torch.Size:
        return torch.Size([])

    def __repr__(self) -> str:
        return expression(self.tracer.tape, self.at, self.tracer.ints, self.tracer.floats)

    def __iter__(self) -> Any:
        raise refuse("b, h, q, kv and score are single values and cannot be iterated or unpacked")

    def __len__(self) -> int:
        raise refuse("b, h, q, kv and score are single values without a length")
