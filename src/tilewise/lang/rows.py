"""Captured tensors that are not yet indexed in all their dimensions, and the dot products of two of them."""

from typing import TYPE_CHECKING, Any

import torch

from tilewise.errors import TraceError
from tilewise.lang.refusals import refuse
from tilewise.lang.symbol import Symbol, Traced
from tilewise.lang.types import NAME_OF

if TYPE_CHECKING:
    from tilewise.lang.tracer import Tracer

LONGEST_ROW = 512  # a dot product of captured rows is written out, element by element


class Row(Traced):
    """A captured tensor indexed in only some of its dimensions, waiting for the rest or for a dot product."""

    def __init__(self, tracer: "Tracer", tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
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


def _incomplete(self: Row, *operands: Any) -> Any:
    raise self.incomplete()


for _name in ("add", "sub", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Row, f"__{_name}__", _incomplete)
    setattr(Row, f"__r{_name}__", _incomplete)
for _name in ("rmul", "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "bool", "int", "float", "index", "iter", "len", "contains"):
    setattr(Row, f"__{_name}__", _incomplete)


class RowProduct(Traced):
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
