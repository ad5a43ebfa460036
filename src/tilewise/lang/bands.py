"""Masks that are a band along the diagonal: causal ones, windows, both shifted by any number.

A kernel that knows the band finds its key tiles by arithmetic, and compares indices where the band's edge cuts a tile: it reads neither a tile schedule
nor mask bits. Whoever needs a tile map has it by arithmetic, too (tiles/bands.py).
"""

from typing import NamedTuple

from tilewise.lang.program import BoundProgram, literal_value

FAR = 2**29  # stands for no limit, where sequences are shorter than LONGEST
LONGEST = 2**28
# Sums that stay within these do not wrap around in int64, whatever the indices below LONGEST; of others nothing is known.
MOST_INDICES, LARGEST_NUMBER = 2**16, 2**62


class Band(NamedTuple):
    """Query q sees key kv if low <= kv - q <= high."""

    low: int = -FAR
    high: int = FAR

    def __and__(self, other: "Band") -> "Band":
        return Band(max(self.low, other.low), min(self.high, other.high))

    @property
    def clamped(self) -> "Band":
        """The same for sequences shorter than LONGEST, in numbers whose sums with indices are 32-bit integers. Where nothing is seen, far from all keys."""
        if self.low > self.high:
            return Band(FAR, -FAR)
        return Band(*[max(-FAR, min(FAR, limit)) for limit in self])


class _Sum(NamedTuple):
    """q * (query index) + kv * (key index) + number."""

    q: int = 0
    kv: int = 0
    number: int = 0

    def plus(self, other: "_Sum", sign: int = 1) -> "_Sum":
        return _Sum(*[a + sign * b for a, b in zip(self, other, strict=True)])

    @property
    def is_exact(self) -> bool:
        return max(abs(self.q), abs(self.kv)) <= MOST_INDICES and abs(self.number) <= LARGEST_NUMBER


class _Size(NamedTuple):
    """The size of a sum, without its sign."""

    inside: _Sum


def band_of(call: BoundProgram) -> Band | None:
    """The band that a mask is; None for any other mask."""
    values: list[_Sum | _Size | Band | None] = []
    for op, args, attr, _ in call.program.instructions:
        operands = [values[a] for a in args]
        if op == "index":
            values.append(_Sum(q=1) if attr == "q" else _Sum(kv=1) if attr == "kv" else None)
        elif op == "int":
            values.append(_Sum(number=call.ints[int(attr)]))
        elif op == "literal":
            number = literal_value(attr)
            values.append(_Sum(number=number) if type(number) is int else None)
        elif len(operands) in (1, 2) and all([isinstance(x, _Sum) for x in operands]):
            values.append(_of_sums(op, *operands))  # type: ignore[arg-type]  # they are
        elif len(operands) == 2:
            values.append(_of_two(op, *operands))
        else:
            values.append(None)
        made = values[-1]
        if isinstance(made, _Sum) and not made.is_exact:
            values[-1] = None
    found = values[call.program.results[0]]
    return found if isinstance(found, Band) else None


def _of_sums(op: str, x: _Sum, y: _Sum | None = None) -> _Sum | _Size | Band | None:
    if y is None:
        return _Sum().plus(x, -1) if op == "neg" else _Size(x) if op == "abs" else None
    if op in ("add", "sub"):
        return x.plus(y, 1 if op == "add" else -1)
    return _compared(op, x.plus(y, -1))


def _of_two(op: str, x: _Sum | _Size | Band | None, y: _Sum | _Size | Band | None) -> Band | None:
    if op == "and" and isinstance(x, Band) and isinstance(y, Band):
        return x & y
    if isinstance(x, _Size) and isinstance(y, _Sum) and op in ("le", "lt"):  # |x| <= y is x <= y and -x <= y
        sides = [_compared(op, _Sum().plus(x.inside, sign).plus(y, -1)) for sign in (1, -1)]
        return None if sides[0] is None or sides[1] is None else sides[0] & sides[1]
    return None


def _compared(op: str, difference: _Sum) -> Band | None:
    """Where a difference is >= 0, > 0, <= 0, < 0 or 0: a band, if it is kv - q or q - kv plus a number."""
    if op in ("le", "lt"):
        op, difference = {"le": "ge", "lt": "gt"}[op], _Sum().plus(difference, -1)
    q, kv, number = difference
    if (q, kv) not in ((1, -1), (-1, 1)) or op not in ("ge", "gt", "eq"):
        return None
    if op == "eq":
        return Band(-number * kv, -number * kv)
    number -= op == "gt"
    return Band(high=number) if q == 1 else Band(low=-number)
