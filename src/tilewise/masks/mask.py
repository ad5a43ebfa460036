"""What a mask is: a function with a name, how masks combine by `&`, `|` and `~`, and how one is traced."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError, TraceError
from tilewise.lang import BoundProgram, name_of, trace_mask
from tilewise.named import Covers, Named, counted

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""f(b, h, q, kv): whether query q of head h of batch element b may attend to key kv."""


class Grid(NamedTuple):
    """The row-major grid that a mask's tokens lie on, and how many of them a token sees along each axis."""

    shape: tuple[int, ...]
    window: tuple[int, ...]


class Mask(Named):
    """A mask function with a name.

    It is traced wherever a plain function would be: in every call, unless the call cache knows all that it reads. If it is `fixed`, once.
    """

    _trace: tuple[BoundProgram, list[tuple[torch.dtype, torch.Size]]] | None = None

    def __init__(
        self, function: MaskFunction, label: str, *parameters: Any, grid: Grid | None = None, covers: tuple[Covers, ...] = (), fixed: bool = False
    ) -> None:
        self.function = function
        self.covers = covers
        self.grid = grid  # changes the order in which tokens are computed, never the result
        self.fixed = fixed
        self._label = label
        self._parameters = parameters

    @property
    def name(self) -> str:
        """What the mask is, with its parameters: `causal & sliding_window(1024)`."""
        operands = [p._name_within(self._label) if isinstance(p, Mask) else str(p) for p in self._parameters]
        if self._label in ("&", "|"):
            return f" {self._label} ".join(operands)
        if self._label == "~":
            return "~" + operands[0]
        return f"{self._label}({', '.join(operands)})" if operands else self._label

    def _name_within(self, sign: str) -> str:
        """The name as an operand: in parentheses if it contains another operator."""
        return f"({self.name})" if self._label in ("&", "|") and self._label != sign else self.name

    @counted
    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:  # torch's FlexAttention counts the parameters without a default
        return self.function(b, h, q, kv)

    def __and__(self, other: "Mask | MaskFunction") -> "Mask":
        return _combine(self, as_mask(other), "&")

    def __rand__(self, other: MaskFunction) -> "Mask":
        return _combine(as_mask(other), self, "&")

    def __or__(self, other: "Mask | MaskFunction") -> "Mask":
        return _combine(self, as_mask(other), "|")

    def __ror__(self, other: MaskFunction) -> "Mask":
        return _combine(as_mask(other), self, "|")

    def __invert__(self) -> "Mask":
        f = self.function
        inverse = Mask(lambda b, h, q, kv: logical_not(f(b, h, q, kv)), "~", self, covers=self.covers)
        inverse.record(operator.invert, (self,), {})
        return inverse

    def __bool__(self) -> bool:
        raise TraceError(f"the mask {self.name} has no truth value: combine masks with & | ~, not with and, or, not")

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    @property
    def is_traced(self) -> bool:
        """Whether it has been traced for good."""
        return self._trace is not None

    def traced(self) -> BoundProgram:
        """The mask as a program."""
        if torch.compiler.is_compiling() or not self.fixed:
            return trace_mask(self.function)
        kept = self._trace
        if kept is None or kept[1] != _forms(kept[0].captures):  # a captured tensor may have got another dtype or shape: tensor.data = ...
            trace = trace_mask(self.function)
            kept = self._trace = (trace, _forms(trace.captures))
        return kept[0]

    def assume(self, trace: BoundProgram) -> None:
        """Take this for the trace of a `fixed` mask: one like it was traced, with other tensors and numbers."""
        self._trace = (trace, _forms(trace.captures))


def _forms(captures: tuple[Tensor, ...]) -> list[tuple[torch.dtype, torch.Size]]:
    """What a program is made for. Of shapes the rank would do, but for rows, which are written out element by element."""
    return [(t.dtype, t.shape) for t in captures]


def logical_not(allowed: Any) -> Any:
    """~ of a traced value, or `not` of a plain bool, which a mask may also return (~True is -2)."""
    return not allowed if isinstance(allowed, bool) else ~allowed


def _combine(left: Mask, right: Mask, sign: str) -> Mask:
    f, g = left.function, right.function

    def both(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return f(b, h, q, kv) & g(b, h, q, kv)

    def either(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return f(b, h, q, kv) | g(b, h, q, kv)

    grid = _common_grid(left.grid, right.grid, sign)
    combined = Mask(both if sign == "&" else either, sign, left, right, grid=grid, covers=left.covers + right.covers)
    combined.record(operator.and_ if sign == "&" else operator.or_, (left, right), {})
    return combined


def _common_grid(left: Grid | None, right: Grid | None, sign: str) -> Grid | None:
    """For &, the grid of either mask; for |, a grid that both have. Windows combine accordingly."""
    if left is None or right is None:
        return None if sign == "|" else left if right is None else right
    if left.shape != right.shape:
        return None
    windows = zip(left.window, right.window, strict=True)
    return Grid(left.shape, tuple([min(pair) if sign == "&" else max(pair) for pair in windows]))


def is_causal_bias(mask: Any) -> bool:
    """Whether it is a torch.nn.attention.bias.CausalBias: a tensor without contents, which says to which corner it aligns."""
    return isinstance(mask, Tensor) and hasattr(mask, "variant")


_FROM_TENSOR = "; a tensor becomes one by loading from it: lambda b, h, q, kv: tensor[q, kv]"


def as_mask(function: "Mask | MaskFunction") -> Mask:
    """A plain mask function as a Mask, to combine it and to give it a name."""
    if isinstance(function, Mask):
        return function
    if is_causal_bias(function):
        raise InputError("torch's CausalBias is a mask by itself alone; combine masks.causal or masks.causal_lower_right(q_len, kv_len)")
    if not callable(function):
        raise InputError(f"a mask is a function of (b, h, q, kv), got {type(function).__name__}{_FROM_TENSOR if isinstance(function, Tensor) else ''}")
    return Mask(function, name_of(function).strip("'"))
