"""The interval of a program over tiles: what can be said of a mask without evaluating it everywhere."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.lang import intervals
from tilewise.lang.intervals import Interval
from tilewise.lang.ops import OPS
from tilewise.lang.program import Call, literal_value
from tilewise.lang.types import Type, promote

# A capture of up to this many elements along a dimension is searched exactly; a longer one by blocks of neighbours,
# rounded outward, which keeps the table small. Blocks no larger than a tile's half lose next to nothing.
EXACT_LENGTH, LARGEST_BLOCK = 1024, 64


class CaptureRanges:
    """Minimum and maximum of a captured tensor over any range of one of its dimensions, in two look-ups.

    Level k of a table holds the extremes of 2**k neighbouring blocks, so that two overlapping entries cover any range.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self._tables: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._overall: Interval | None = None

    def query(self, index: list[Interval]) -> Interval:
        inside = [self._inside(interval, size) for interval, size in zip(index, self.tensor.shape, strict=True)]
        varying = [d for d, (lo, hi) in enumerate(inside) if bool((lo != hi).any())]
        if not varying:
            return intervals.point(self.tensor[tuple(lo for lo, _ in inside)].double())
        if len(varying) == 1:
            return self._along(varying[0], inside)
        return self._anywhere(inside)

    @staticmethod
    def _inside(interval: Interval, size: int) -> tuple[Tensor, Tensor]:
        """The elements an index interval can reach, wrapped and clamped as loads are."""
        lo, hi = interval.lo.nan_to_num(-float(size)), interval.hi.nan_to_num(float(size))
        negative = hi < 0
        lo, hi = torch.where(negative, lo + size, lo), torch.where(negative, hi + size, hi)
        crosses = lo < 0
        crosses = crosses & ~negative
        lo, hi = torch.where(crosses, 0.0, lo), torch.where(crosses, float(size), hi)
        return lo.clamp(0, size - 1).long(), hi.clamp(0, size - 1).long()

    def _along(self, dim: int, index: list[tuple[Tensor, Tensor]]) -> Interval:
        if dim not in self._tables:
            self._tables[dim] = self._table(dim)
        lows, highs, block = self._tables[dim]
        first, last = index[dim][0] // block, index[dim][1] // block
        level = (last - first + 1).double().log2().floor().long()
        second = last - (1 << level) + 1
        rows = tuple(lo for d, (lo, _) in enumerate(index) if d != dim)
        lo = torch.minimum(lows[(level, *rows, first)], lows[(level, *rows, second)])
        hi = torch.maximum(highs[(level, *rows, first)], highs[(level, *rows, second)])
        return Interval(lo, hi)

    def _table(self, dim: int) -> tuple[Tensor, Tensor, int]:
        values = self.tensor.movedim(dim, -1)
        length = values.shape[-1]
        block = 1
        while length > EXACT_LENGTH * block and block < LARGEST_BLOCK:
            block *= 2
        padding = -length % block
        if padding:
            values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], padding)], -1)
        blocks = values.unflatten(-1, (-1, block))
        lows, highs = [blocks.amin(-1).double()], [blocks.amax(-1).double()]
        step = 1
        while 2 * step <= lows[0].shape[-1]:
            for levels, extreme in ((lows, torch.minimum), (highs, torch.maximum)):
                last = levels[-1]
                levels.append(torch.cat([extreme(last[..., :-step], last[..., step:]), last[..., -step:]], -1))
            step *= 2
        return torch.stack(lows), torch.stack(highs), block

    def _anywhere(self, index: list[tuple[Tensor, Tensor]]) -> Interval:
        if self._overall is None:
            self._overall = Interval(self.tensor.amin().double(), self.tensor.amax().double())
        like = index[0][0]
        for lo, _ in index[1:]:
            like = like + lo
        like = like.double() * 0
        return Interval(like + self._overall.lo, like + self._overall.hi)


class Bounds:
    """Intervals of one call's program; the tables of its captures are built once and serve every query."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.call = call
        self.device = device
        self._ranges = [CaptureRanges(t.to(device)) for t in call.captures]

    def over(self, box: Mapping[str, Interval]) -> Interval:
        """The interval of the program's result where every index lies in its interval of the box."""
        program = self.call.program
        values: list[Interval] = []
        for op, args, attr, type in program.instructions:
            if op == "index" or op == "score":
                value = box[attr if op == "index" else "score"]
            elif op == "int":
                value = self._number(self.call.ints[int(attr)])
            elif op == "float":
                value = self._number(self.call.floats[int(attr)])
            elif op == "literal":
                value = self._number(literal_value(attr))
            elif op == "load":
                capture = self._ranges[int(attr)]
                value = capture.query([values[a] for a in args]) if args else intervals.point(capture.tensor.double())
            else:
                types = tuple(program.instructions[a].type for a in args)
                value = self._apply(op, type, types, [values[a] for a in args])
            values.append(value)
        return values[program.results[0]]

    def _number(self, value: bool | int | float) -> Interval:
        return intervals.point(torch.tensor(float(value), dtype=torch.float64, device=self.device))

    @staticmethod
    def _apply(name: str, type: Type, types: tuple[Type, ...], operands: list[Interval]) -> Interval:
        op = OPS[name]
        if name == "cast":
            return intervals.cast(operands[0], types[0], type)
        if name == "where":
            chosen = [intervals.cast(a, t, type) for a, t in zip(operands[1:], types[1:], strict=True)]
            return op.bounds(intervals.cast(operands[0], types[0], Type("bool", 0)), *chosen)
        computed = promote(*types)
        if type.is_float and not computed.is_float:
            computed = type
        operands = [intervals.cast(a, t, computed) for a, t in zip(operands, types, strict=True)]
        rule = op.bounds
        if computed.is_float and op.bounds_of_floats is not None:
            rule = op.bounds_of_floats
        if computed.is_bool and op.bounds_of_bools is not None:
            rule = op.bounds_of_bools
        result = rule(*operands)
        return result if type.is_bool else intervals.fit(result, type)
