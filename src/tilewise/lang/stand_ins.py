"""What a function sees in place of symbols while torch.compile follows it: tensors that stand for them.

Dynamo answers some operators itself before it asks an object: where n is a number that varies between calls, `kv == n` would simply be false.
Tensors take the usual way, to the mode that watches the trace (trace.py), and the mode puts the symbols back. Nothing is ever computed with a
stand-in, and the compiler removes them all.
"""

import operator
from typing import Any

import torch
from torch import Tensor

from tilewise.lang.refusals import refuse
from tilewise.lang.symbol import Traced

STANDS_IN = torch.__version__ >= (2, 11)  # type: ignore[operator]  # what dynamo can follow of it; before, functions get the symbols themselves

# Python's `x += y` is `x.add_(y)` to dynamo. Symbols are values, as numbers are: the name x then means a new one.
AUGMENTED = {
    "__iadd__": ("add_", "add"),
    "__isub__": ("sub_", "sub"),
    "__imul__": ("mul_", "mul"),
    "__itruediv__": ("div_", "div"),
    "__ifloordiv__": ("floor_divide_", "floor_divide"),
    "__imod__": ("remainder_", "remainder"),
    "__ipow__": ("__ipow__", "pow"),
    "__iand__": ("__iand__", "__and__"),
    "__ior__": ("__ior__", "__or__"),
    "__ixor__": ("__ixor__", "__xor__"),
    "__ilshift__": ("__ilshift__", "__lshift__"),
    "__irshift__": ("__irshift__", "__rshift__"),
}
OUT_OF_PLACE = {getattr(Tensor, in_place): getattr(Tensor, plain) for in_place, plain in AUGMENTED.values()}
OUT_OF_PLACE |= {getattr(operator, name): getattr(Tensor, plain) for name, (_, plain) in AUGMENTED.items()}  # torch.export

EMPTY = (1, 0)  # how the shape of every stand-in begins: no program can load from it, so what is made of one past the mode is refused
PARTS = "an attribute or a part of a value that differs for every (b, h, q, kv) is used; compute with the value itself"


class StandIn(Tensor):
    """A tensor that stands for a symbol. Functions and operators reach the mode first; what reaches the class are attributes (`x.T`)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            raise refuse(PARTS)
        return super().__torch_function__(func, types, args, kwargs or {})  # dynamo itself, after a graph break inside the function

    @property
    def dtype(self) -> Any:  # type: ignore[override]  # a tensor's can be assigned to
        return symbol_of(self).dtype

    @property
    def device(self) -> Any:  # type: ignore[override]  # a tensor's can be assigned to
        return symbol_of(self).device

    @property
    def shape(self) -> Any:  # type: ignore[override]  # a tensor's can be assigned to
        return symbol_of(self).shape

    @property
    def ndim(self) -> Any:  # type: ignore[override]  # a tensor's can be assigned to
        return symbol_of(self).ndim


def symbol_of(stand_in: StandIn) -> Any:
    """What it stands for: the mode knows, and answers this call."""
    return stand_in.as_subclass(Tensor)


class StandIns:
    """The stand-ins of one trace, and what they stand for."""

    def __init__(self) -> None:
        self._values: dict[StandIn, Any] = {}  # None: it was changed in place
        self._hidden: list[Any] = []

    def hide(self, value: Any) -> Any:
        """A stand-in for a traced value, also inside a named tuple (what torch.max(x, dim) gives); anything else unchanged."""
        if isinstance(value, tuple):
            return type(value)(*[self.hide(v) for v in value])
        if not isinstance(value, Traced):
            return value
        stand_in = torch.empty((*EMPTY, len(self._hidden)), dtype=torch.complex64, device=value.tracer.device).as_subclass(StandIn)
        self._hidden.append(value)
        self._values[stand_in] = value
        return stand_in

    def reveal(self, value: Any) -> Any:
        """What a stand-in stands for, also inside tuples and lists; anything else unchanged."""
        if isinstance(value, StandIn):
            if value not in self._values:
                raise refuse(PARTS)
            if self._values[value] is None:
                raise refuse("a value is used after it was changed in place; under torch.compile, write x = x + y instead of x += y or x.add_(y)")
            return self._values[value]
        if isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() == 3 and value.shape[:2] == EMPTY:
            return abs(self._hidden[value.shape[2]])  # Python's abs(), which dynamo applies to the stand-in: nothing else makes real numbers of it
        if isinstance(value, (tuple, list)):
            return type(value)([self.reveal(v) for v in value])
        return value

    def opened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """A call with the symbols put back.

        A stand-in that would be changed in place cannot be used again: its old name would mean the old value for Python's numbers, and the new
        one for torch's tensors.
        """
        symbols, named = self.reveal(args), {name: self.reveal(value) for name, value in kwargs.items()}
        if args and isinstance(args[0], StandIn):
            plain = Tensor.pow if func is Tensor.__ipow__ else OUT_OF_PLACE.get(func)  # a function that is written in Python: no dictionary finds it here
            if plain is not None:
                self._values[args[0]] = None
                return plain, symbols, named
        return func, symbols, named
