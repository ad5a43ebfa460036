"""What all code generators share: the layouts and facts they know, and how they find the type an operation is computed in."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tilewise.engines.facts import Facts
from tilewise.lang import Program
from tilewise.lang.ops import OPS
from tilewise.lang.types import FLOATS, NUMBER, ZERO_DIM, Type, promote

FLIPPED = {"+": "-", "-": "+"}
SUMS = ("add", "sub", "neg")


class Layout(NamedTuple):
    """What of a capture's place in memory is part of the code."""

    contiguous: bool  # the last dimension's stride is 1
    wide: bool  # offsets need 64 bits


def layouts_of(captures: Sequence[Tensor]) -> tuple[Layout, ...]:
    return tuple([Layout(t.dim() > 0 and t.stride(-1) == 1, _max_offset(t) >= 2**31) for t in captures])


def _max_offset(t: Tensor) -> int:
    """Of a view's last element: it may lie far out, however few there are."""
    return sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)]) if t.numel() else 0


class ProgramWriter:
    """Writes the instructions of one program, one after the other, as text of some language."""

    def __init__(self, program: Program, facts: Facts, layouts: tuple[Layout, ...]) -> None:
        self.program = program
        self.facts = facts
        self.layouts = layouts
        self.slots = _size_slots(program)
        self.types: list[str] = []  # of the values written so far

    def _is_wide(self, op: str, place: int, operand: int) -> bool:
        """Whether a Python number or 0-d tensor beside 16-bit floats is not rounded to 16 bits: torch computes with those of some operations in float32."""
        level = self.program.instructions[operand].type.level
        return place in OPS[op].wide and (level == NUMBER or (level == ZERO_DIM and place == 1))

    def _computed_in(self, args: tuple[int, ...], type: Type, dtype: str) -> str:
        """The type an operation's operands are converted to: torch's, or 32-bit integers where the operands and a result of type `dtype` fit them."""
        computed = promote(*[self.program.instructions[a].type for a in args]).dtype
        if type.is_float and computed not in FLOATS:
            computed = type.dtype
        if computed == "i64" and all([self.facts.fits32(a) for a in args]) and (type.is_bool or dtype == "i32"):
            computed = "i32"
        return computed

    def _is_positive_division(self, args: tuple[int, ...]) -> bool:
        return self.facts.is_at_least(args[0], 0) and self.facts.is_at_least(args[1], 1)

    def _terms(self, k: int, sign: str, dtype: str) -> list[tuple[str, int]]:
        """What is added up to an integer, with its sign."""
        is_sum = self.program.instructions[k].op in SUMS and self.types[k] == dtype
        return self._terms_of_sum(k, sign, dtype) if is_sum else [(sign, k)]

    def _terms_of_sum(self, k: int, sign: str, dtype: str) -> list[tuple[str, int]]:
        op, args, _, _ = self.program.instructions[k]
        signs = {"add": (sign, sign), "sub": (sign, FLIPPED[sign]), "neg": (FLIPPED[sign],)}[op]
        return [term for a, s in zip(args, signs, strict=True) for term in self._terms(a, s, dtype)]


def _size_slots(program: Program) -> list[tuple[int, int]]:
    """For every capture, where its sizes and its strides begin among those of all."""
    slots, at = [], 0
    for capture in program.captures:
        slots.append((at, at + capture.rank))
        at += 2 * capture.rank
    return slots
