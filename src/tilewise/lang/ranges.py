"""What can be said of a program's values over a whole problem, without looking into captured tensors or floats."""

import math
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
