"""The state of a trace: every operation, number and captured tensor that a function uses becomes an instruction."""

from typing import Any

import torch

from tilewise.lang.ops import OPS, infer
from tilewise.lang.program import Tape
from tilewise.lang.refusals import refuse, undefined
from tilewise.lang.rows import Incomplete, Row
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.types import DTYPE_OF, NAME_OF
from tilewise.sizes import equal

VIEWS = {slice: "a slice", type(None): "None", type(...): "an ellipsis"}  # what may index a tensor but not one element


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
            self.ints.append(value)  # type: ignore[arg-type]  # torch's symbols count as numbers
            return self.tape.int_slot(len(self.ints) - 1)
        if isinstance(value, (float, torch.SymFloat)):
            self.floats.append(float(value) if isinstance(value, float) else value)  # type: ignore[arg-type]  # likewise
            return self.tape.float_slot(len(self.floats) - 1)
        if isinstance(value, torch.Tensor):
            return self._whole_tensor(value)
        if isinstance(value, Incomplete):
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

    def emit(self, op: str, *values: Any) -> Symbol:
        args = tuple([self.operand(v) for v in values])
        types = tuple([self.tape.type(a) for a in args])
        if not OPS[op].takes(*types):
            raise undefined(op, [DTYPE_OF[t.dtype] for t in types])
        return Symbol(self, self.tape.put(op, args, "", infer(OPS[op], types)))

    def power(self, base: Any, exponent: Any) -> Symbol:
        """An exponent written as a number is part of the structure: x ** 2 is compiled as a product."""
        if not isinstance(exponent, (int, float)):
            return self.emit("pow", base, exponent)
        return self.emit("pow", base, Symbol(self, self.tape.literal(exponent)))

    def cast(self, value: Symbol, dtype: str) -> Symbol:
        if self.tape.type(value.at).dtype == dtype and self.tape.type(value.at).level > 0:
            return value
        return Symbol(self, self.tape.put("cast", (value.at,), dtype, infer(OPS["cast"], (self.tape.type(value.at),), dtype)))

    def load(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Symbol | Row:
        for i in index:
            if type(i) in VIEWS:
                raise refuse(
                    f"a captured tensor of shape {tuple(tensor.shape)} is indexed with {VIEWS[type(i)]}; a mask or score sees one element at a time, "
                    "so give one index for each dimension, and take parts of tensors outside the function"
                )
        if len(index) > tensor.dim():
            raise refuse(f"{len(index)} indices for a captured tensor of shape {tuple(tensor.shape)}")
        for i, size in zip(index, tensor.shape, strict=False):
            if isinstance(i, int) and not -size <= i < size:
                raise refuse(f"index {i} is outside a dimension of size {size} of a captured tensor of shape {tuple(tensor.shape)}")
        at = [self.operand(i) for i in index]
        for a in at:
            if self.tape.type(a).is_float or self.tape.type(a).is_bool:
                raise refuse(f"a captured tensor is indexed with a {self.tape.type(a).dtype} value; indices must be integers (use .long())")
        slot = self.capture(tensor)
        if len(index) < tensor.dim():
            return Row(self, tensor, index)
        if equal(tensor.numel(), 0):
            raise refuse(f"a captured tensor of shape {tuple(tensor.shape)} has no element to load")
        return Symbol(self, self.tape.load(slot, NAME_OF[tensor.dtype], tuple(at)))


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
