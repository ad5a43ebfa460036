"""What can be said of a program's values over a whole problem, without looking into captured tensors or floats."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from tilewise.lang.bounds import Bounds, CaptureRanges
from tilewise.lang.intervals import Interval
from tilewise.lang.program import BoundProgram, Program
from tilewise.lang.types import INTEGER_RANGE, NAME_OF


class Range(NamedTuple):
    """Every value lies between these; infinite where nothing is known."""

    lowest: float
    highest: float

    def within(self, low: int, high: int) -> bool:
        return self.lowest >= low and self.highest <= high


class _Opaque(CaptureRanges):
    """A capture of which only the dtype is known."""

    def query(self, index: list[Interval]) -> Interval:
        name = NAME_OF[self.tensor.dtype]
        low, high = (0, 1) if name == "bool" else INTEGER_RANGE.get(name, (math.nan, math.nan))
        (like,) = _numbers([0.0])
        for i in index:
            like = like + i.lo * 0
        return Interval(like + low, like + high)


class _StaticBounds(Bounds):
    def __init__(self, call: BoundProgram) -> None:
        super().__init__(replace(call, captures=(), floats=(math.nan,) * len(call.floats)), torch.device("cpu"))
        self._ranges = [_Opaque(torch.zeros((), dtype=t.dtype, device="cpu")) for t in call.captures]


class Ranges:
    """What `ranges` finds, one by one: of indices, integers and their sums, which is all that most masks compute with, in Python's own numbers."""

    def __init__(self, program: Program, call: BoundProgram, extents: dict[str, int]) -> None:
        self._program, self._call, self._extents = program, call, extents
        self._sums: dict[int, Range | None] = {}
        self._all: list[Range] | None = None

    def __getitem__(self, k: int) -> Range:
        found = self._sum(k)
        if found is not None:
            return found
        if self._all is None:
            self._all = ranges(self._program, self._call, self._extents)
        return self._all[k]

    def _sum(self, k: int) -> Range | None:
        """None of anything else, and of what float64 might round."""
        if k not in self._sums:
            found = self._leaf_or_sum(k)
            self._sums[k] = found if found is not None and found.within(-EXACT, EXACT) else None
        return self._sums[k]

    def _leaf_or_sum(self, k: int) -> Range | None:
        op, args, attr, type = self._program.instructions[k]
        if type.dtype != "i64":
            return None
        if op == "index":
            return Range(0, max(self._extents[attr] - 1, 0))
        if op in ("int", "literal"):
            number = self._call.ints[int(attr)] if op == "int" else int(attr)
            return Range(number, number)
        rule, operands = SUMS.get(op), [self._sum(a) for a in args]
        return None if rule is None or None in operands else rule(*operands)


SUMS: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: Range(a.lowest + b.lowest, a.highest + b.highest),
    "sub": lambda a, b: Range(a.lowest - b.highest, a.highest - b.lowest),
    "neg": lambda a: Range(-a.highest, -a.lowest),
}
EXACT = 2**53 - 1  # integers that float64 holds, as all up to them


def ranges(program: Program, call: BoundProgram, extents: dict[str, int]) -> list[Range]:
    """The range of every instruction of `program`, which runs with `call`'s arguments, for indices from 0 up to the extents."""
    first, unknown, *last = _numbers([0.0, math.nan, *[float(max(n - 1, 0)) for n in extents.values()]])
    box = {name: Interval(first, n) for name, n in zip(extents, last, strict=True)}
    found = _StaticBounds(replace(call, program=program)).every(box | {"score": Interval(unknown, unknown)})
    return [_range(interval) for interval in found]


def _numbers(values: list[float]) -> tuple[torch.Tensor, ...]:
    """On the CPU, whatever the default device is; in one tensor, because each takes its time."""
    return torch.tensor(values, dtype=torch.float64, device="cpu").unbind()


def _range(interval: Interval) -> Range:
    lowest, highest = float(interval.lo), float(interval.hi)
    return Range(-math.inf if math.isnan(lowest) else lowest, math.inf if math.isnan(highest) else highest)
