"""The state of a trace: every operation, number and captured tensor that a function uses becomes an instruction."""

from typing import Any

import torch

from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import Tape
from tilewise.lang.refusals import refuse, undefined
from tilewise.lang.rows import CapturedRow, Row, broadcast, constant, element_of, elementwise, made
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.types import DTYPE_OF, NAME_OF
from tilewise.sizes import equal


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
        if tensor.layout != torch.strided:
            raise refuse(f"a captured tensor has layout {tensor.layout}; mask and score functions load from dense tensors: .to_dense() makes one")
        self.captures.append(tensor)
        return len(self.captures) - 1

    def operand(self, value: Any) -> int:
        """The instruction of a symbol, a number or a 0-d tensor."""
        if isinstance(value, Symbol):
            return value.at
        if isinstance(value, bool):
            return self.tape.literal(value)
        if isinstance(value, (int, torch.SymInt)):
            _check_fits(value)
            self.ints.append(value)  # type: ignore[arg-type]  # torch's symbols count as numbers
            return self.tape.int_slot(len(self.ints) - 1)
        if isinstance(value, (float, torch.SymFloat)):
            self.floats.append(float(value) if isinstance(value, float) else value)  # type: ignore[arg-type]  # likewise
            return self.tape.float_slot(len(self.floats) - 1)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return self.tape.load(self.capture(value), NAME_OF[value.dtype], ())
        if isinstance(value, (torch.Tensor, Row)):
            row = self.value(value)
            assert isinstance(row, Row)
            raise row.incomplete()
        return self._foreign(value)

    def value(self, value: Any) -> Traced:
        """What a function computes with as a symbol, or as a row: a captured tensor with dimensions is one."""
        if isinstance(value, Traced):
            return value
        if isinstance(value, torch.Tensor) and value.dim() != 0:
            self.capture(value)
            return CapturedRow(self, value, [slice(None)] * value.dim(), list(range(value.dim())))
        return Symbol(self, self.operand(value))

    def _foreign(self, value: Any) -> int:
        """Numbers of other libraries (numpy's, say)."""
        is_number = getattr(value, "shape", ()) == ()
        if is_number and hasattr(value, "item"):
            return self.operand(value.item())
        if is_number and hasattr(value, "__index__"):
            return self.operand(value.__index__())
        if is_number and hasattr(value, "__float__"):
            return self.operand(value.__float__())
        raise refuse(f"{type(value).__name__} {value!r} cannot be used with b, h, q, kv or score; use numbers or tensors")

    def emit(self, op: str, *values: Any) -> Any:
        if op in ("add", "mul") and isinstance(values[0], (int, float)) and not isinstance(values[1], (int, float)):
            values = (values[1], values[0])  # 2 * x is x * 2: so torch.compile gives it, and programs that differ in nothing else are one
        operands = [self.value(v) for v in values]
        if any([isinstance(x, Row) for x in operands]):
            return elementwise(self, lambda *elements: self.emit(op, *elements), operands)
        args = tuple([self.operand(x) for x in operands])
        types = tuple([self.tape.type(a) for a in args])
        if not OPS[op].takes(*types):
            raise undefined(op, [DTYPE_OF[t.dtype] for t in types])
        return Symbol(self, self.tape.put(op, args, "", infer(OPS[op], types)))

    def power(self, base: Any, exponent: Any) -> Any:
        """An exponent written as a number is part of the structure: x ** 2 is compiled as a product."""
        if not isinstance(exponent, (int, float)):
            return self.emit("pow", base, exponent)
        _check_fits(exponent)
        return self.emit("pow", base, Symbol(self, self.tape.literal(exponent)))

    def cast(self, value: Traced, dtype: str) -> Any:
        if isinstance(value, Row):
            return elementwise(self, lambda element: self.cast(element, dtype), [value])
        at = self.operand(value)
        if self.tape.type(at).dtype == dtype and self.tape.type(at).level > 0:
            return value
        return Symbol(self, self.tape.put("cast", (at,), dtype, infer(OPS["cast"], (self.tape.type(at),), dtype)))

    def load(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Any:
        """tensor[index]: a symbol, or a row where dimensions are left."""
        if len(index) != tensor.dim() or any([_is_view(i) for i in index]):
            self.capture(tensor)
            if any([_is_row(i) for i in index]):
                return self._gathered(tensor, index)
            whole = self.value(tensor)
            assert isinstance(whole, Row)
            return whole.part(tuple([i if i is None or i is ... or isinstance(i, (slice, int)) else self.value(i) for i in index]))
        for i, size in zip(index, tensor.shape, strict=True):
            if isinstance(i, int) and not -size <= i < size:
                raise refuse(f"index {i} is outside a dimension of size {size} of a captured tensor of shape {tuple(tensor.shape)}")
        at = [self._index(i) for i in index]
        slot = self.capture(tensor)
        if equal(tensor.numel(), 0):
            raise refuse(f"a captured tensor of shape {tuple(tensor.shape)} has no element to load")
        return Symbol(self, self.tape.load(slot, NAME_OF[tensor.dtype], tuple(at)))

    def _index(self, value: Any) -> int:
        at = self.operand(value)
        if self.tape.type(at).is_float or self.tape.type(at).is_bool:
            raise refuse(f"a captured tensor is indexed with a {self.tape.type(at).dtype} value; indices must be integers (use .long())")
        return at

    def _gathered(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Row:
        """A captured tensor indexed by rows: the shape they broadcast to, and then what is left of the tensor's dimensions."""
        if any([i is None or i is ... or isinstance(i, slice) for i in index]) or len(index) > tensor.dim():
            raise refuse(f"a captured tensor of shape {tuple(tensor.shape)} is indexed with rows and with slices; take parts of tensors outside the function")
        operands = [self.value(i) for i in index]
        shape = broadcast([tuple(x.shape) for x in operands])
        n = len(shape)

        def make(position: tuple[int, ...]) -> Symbol:
            at = [element_of(x, position[:n]) for x in operands]
            loaded: Symbol = self.load(tensor, (*at, *[constant(self, k) for k in position[n:]]))
            return loaded

        return made(self, shape + tuple(tensor.shape)[len(index) :], make, lambda: self.cast(constant(self, 0), NAME_OF[tensor.dtype]))


def _is_row(index: Any) -> bool:
    return isinstance(index, Row) or (isinstance(index, torch.Tensor) and index.dim() != 0)


def _is_view(index: Any) -> bool:
    """What may index a tensor, but not one element of it."""
    return index is None or index is ... or isinstance(index, slice) or _is_row(index)


def _check_fits(value: Any) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise refuse(f"the number {value} does not fit in 64 bits")


def tracer_of(args: tuple[Any, ...]) -> Trace:
    for a in args:
        if isinstance(a, Traced):
            return a.tracer
        if isinstance(a, list) and has_symbol(a):
            raise refuse("a list of values that differ for every (b, h, q, kv) is used; use one at a time")
    raise refuse("no symbol among the arguments")


def has_symbol(args: Any) -> bool:
    """Written as a list: older versions of torch.compile cannot follow generators."""
    return any([isinstance(a, Traced) or (isinstance(a, (tuple, list)) and has_symbol(a)) for a in args])
