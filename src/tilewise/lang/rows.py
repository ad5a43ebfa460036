"""Captured tensors that are not yet indexed in all their dimensions, and the dot products of two of them."""

from typing import Any

import torch

from tilewise.errors import TraceError
from tilewise.lang.refusals import refuse, undefined
from tilewise.lang.symbol import Symbol, Trace, Traced
from tilewise.lang.types import FLOATS, NAME_OF, PROMOTED

LONGEST_ROW = 512  # a dot product of captured rows is written out, element by element
ACCUMULATED = {"f16": "f32", "bf16": "f32"}  # what torch adds 16-bit floats in, before it rounds the sum


class Incomplete(Traced):
    """Something with dimensions: a mask or score computes with one element at a time."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.incomplete()

    def described(self) -> str:
        """What it is, and what can be done with it."""
        raise NotImplementedError

    def incomplete(self) -> TraceError:
        return refuse(self.described())


def _incomplete(self: Incomplete, *operands: Any) -> Any:
    raise self.incomplete()


for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Incomplete, f"__{_name}__", _incomplete)
    setattr(Incomplete, f"__r{_name}__", _incomplete)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "int", "float", "index", "round", "trunc"):
    setattr(Incomplete, f"__{_name}__", _incomplete)
for _name in ("iter", "len", "contains", "getitem", "setitem"):
    setattr(Incomplete, f"__{_name}__", _incomplete)


class Row(Incomplete):
    """A captured tensor indexed in only some of its dimensions, waiting for the rest or for a dot product."""

    def __init__(self, tracer: Trace, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        self.tracer = tracer
        self.tensor = tensor
        self.index = index

    def __getitem__(self, index: Any) -> "Symbol | Row":
        loaded: Symbol | Row = self.tracer.load(self.tensor, self.index + (index if isinstance(index, tuple) else (index,)))
        return loaded

    def __mul__(self, other: Any) -> "RowProduct":
        return RowProduct(self, other)

    def __matmul__(self, other: Any) -> Symbol:
        return RowProduct(self, other).dot()

    def described(self) -> str:
        rank, given = self.tensor.dim(), len(self.index)
        return f"a captured tensor of shape {tuple(self.tensor.shape)} indexed in {given} of its {rank} dimensions; index all of them, with b, h, q or kv"


class RowProduct(Incomplete):
    """The products of two captured rows, element by element; only their sum can be used."""

    def __init__(self, left: Any, right: Any) -> None:
        for operand in (left, right):
            if isinstance(operand, RowProduct):
                raise operand.incomplete()
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
        self.promoted = PROMOTED[NAME_OF[left.tensor.dtype], NAME_OF[right.tensor.dtype]]

    def described(self) -> str:
        return f"the {self.left.tensor.shape[-1]} products of two captured rows, which can only be summed: write (a * c).sum() or torch.dot(a, c)"

    def total(self) -> Symbol:
        """(a * c).sum(). As in torch every product is rounded to the rows' dtype, integers are added in int64, 16-bit floats in float32."""
        if self.promoted not in FLOATS:
            return self._added(self.promoted, "i64", "i64")
        return self._added(self.promoted, ACCUMULATED.get(self.promoted, self.promoted), self.promoted)

    def dot(self) -> Symbol:
        """torch.dot(a, c). As in torch the products of 16-bit floats are not rounded, only their sum is; integers stay in the rows' dtype."""
        if self.promoted == "bool":
            raise undefined("dot", [torch.bool, torch.bool])
        computed = ACCUMULATED.get(self.promoted, self.promoted)
        return self._added(computed, computed, self.promoted)

    def _added(self, multiplied: str, added: str, result: str) -> Symbol:
        """The sum, one product after the other, by the dtypes of its steps."""
        total = self.tracer.cast(Symbol(self.tracer, self.tracer.tape.literal(0)), added)
        for k in range(self.left.tensor.shape[-1]):
            product = self.tracer.cast(self._element(self.left, k, multiplied) * self._element(self.right, k, multiplied), added)
            total = product if k == 0 else total + product
        return self.tracer.cast(total, result)

    def _element(self, row: Row, k: int, dtype: str) -> Symbol:
        element = row[Symbol(self.tracer, self.tracer.tape.literal(k))]
        assert isinstance(element, Symbol)
        return self.tracer.cast(element, dtype)
