"""The interval of a program over tiles: what can be said of a mask without evaluating it everywhere."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewise.lang import intervals
from tilewise.lang.intervals import Interval, Steps
from tilewise.lang.ops import OPS
from tilewise.lang.program import BoundProgram, literal_value
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
        self._blocks: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def query(self, index: list[Interval]) -> Interval:
        stepped = [d for d, i in enumerate(index) if isinstance(i, Steps) and i.length <= self.tensor.shape[d]]
        if len(stepped) == 1 and all(i.lo is i.hi for d, i in enumerate(index) if d != stepped[0]):
            return self._by_steps(stepped[0], index)
        inside = [self._inside(interval, size) for interval, size in zip(index, self.tensor.shape, strict=True)]
        varying = [d for d, (lo, hi) in enumerate(inside) if bool((lo != hi).any())]
        if not varying:
            values = self.tensor[tuple(lo for lo, _ in inside)]
            return intervals.around(values, values)
        if len(varying) == 1:
            return self._along(varying[0], inside)
        return self._anywhere(inside)

    def _by_steps(self, dim: int, index: list[Interval]) -> Interval:
        """One look-up, where the index goes through the dimension in whole steps."""
        along = index[dim]
        assert isinstance(along, Steps)
        key = (dim, along.step, along.length)
        if key not in self._blocks:
            values = self.tensor.movedim(dim, -1)[..., : along.length]
            padding = -along.length % along.step
            if padding:
                values = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], padding)], -1)
            blocks = values.unflatten(-1, (-1, along.step))
            self._blocks[key] = blocks.amin(-1), blocks.amax(-1)
        lows, highs = self._blocks[key]
        at = along.cell
        stride = lows.shape[-1]
        for d in reversed([d for d in range(len(index)) if d != dim]):
            at = at + self._inside(index[d], self.tensor.shape[d])[0] * stride
            stride *= self.tensor.shape[d]
        return intervals.around(_taken(lows, at), _taken(highs, at))

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
        level = torch.frexp((last - first + 1).double()).exponent.long() - 1  # the floor of the binary logarithm
        second = last - (1 << level) + 1
        row = level
        for size, lo in zip(lows.shape[1:-1], [lo for d, (lo, _) in enumerate(index) if d != dim], strict=True):
            row = row * size + lo
        one, two = row * lows.shape[-1] + first, row * lows.shape[-1] + second
        lo = torch.minimum(_taken(lows, one), _taken(lows, two))
        hi = torch.maximum(_taken(highs, one), _taken(highs, two))
        return intervals.around(lo, hi)

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
        lows, highs = [blocks.amin(-1)], [blocks.amax(-1)]
        step = 1
        while 2 * step <= lows[0].shape[-1]:
            for levels, extreme in ((lows, torch.minimum), (highs, torch.maximum)):
                last = levels[-1]
                levels.append(torch.cat([extreme(last[..., :-step], last[..., step:]), last[..., -step:]], -1))
            step *= 2
        return torch.stack(lows), torch.stack(highs), block

    def _anywhere(self, index: list[tuple[Tensor, Tensor]]) -> Interval:
        if self._overall is None:
            self._overall = intervals.around(self.tensor.amin(), self.tensor.amax())
        like = index[0][0]
        for lo, _ in index[1:]:
            like = like + lo
        like = like.double() * 0
        return Interval(like + self._overall.lo, like + self._overall.hi)


def _taken(table: Tensor, at: Tensor) -> Tensor:
    """table.flatten()[at]; on a CPU, index_select leaves the other threads asleep where indexing wakes them."""
    return table.flatten().index_select(0, at.flatten()).view(at.shape)


class Bounds:
    """Intervals of one call's program; the tables of its captures are built once and serve every query."""

    def __init__(self, call: BoundProgram, device: torch.device) -> None:
        self.call = call
        self.device = device
        self._ranges = [CaptureRanges(t.to(device)) for t in call.captures]

    def over(self, box: Mapping[str, Interval]) -> Interval:
        """The interval of the program's result where every index lies in its interval of the box."""
        return self.every(box)[self.call.program.results[0]]

    def every(self, box: Mapping[str, Interval]) -> list[Interval]:
        """The interval of every instruction."""
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
                value = self._ranges[int(attr)].query([values[a] for a in args])
            else:
                types = tuple(program.instructions[a].type for a in args)
                value = self._apply(op, type, types, [values[a] for a in args])
            values.append(value)
        return values

    def _number(self, value: bool | int | float) -> Interval:
        number = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device=self.device)
        return intervals.around(number, number)

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
        if type.is_bool:  # a sum of booleans is their disjunction, a product their conjunction
            return Interval(result.lo.clamp(0, 1), result.hi.clamp(0, 1))
        return result if type.is_float and op.exact else intervals.fit(result, type)
