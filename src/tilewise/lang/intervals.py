"""Interval arithmetic over many tiles at once.

An `Interval` holds two float64 tensors: every value of the expression on the tile lies between them. Booleans are 0
and 1, so [1, 1] is "true everywhere", [0, 0] "false everywhere", [0, 1] "undecided". A NaN end means that nothing is
known, NaN included; it spreads through arithmetic and makes every comparison undecided.

A float that may be infinite makes the result of arithmetic unknown (inf - inf, 0 * inf), which is always safe.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.lang.types import DIMENSIONED, DTYPE_OF, INTEGER_RANGE, NUMBER, Type

NAN = float("nan")
EXACT = 2.0**53  # integers up to here are exact in float64
SILU_LOWEST = (-1.2784645, -0.27846455)  # where silu is lowest, and its value there, rounded down
SILU_VANISHES = -80.0  # from here down, x / (1 + exp(-x)) overflows to -0 in float32 while the true value is still a float
GELU_LOWEST, GELU_TANH_LOWEST = (-0.751792, -0.16997121), (-0.752461, -0.17004076)  # likewise
ROOM = 2e-6  # more than float32's roundings where a small result is the difference of numbers of about 1
NEAR_POLE, MANY_BRANCHES = 1e-9, 1e5  # tan's branches are told apart up to there


class Interval(NamedTuple):
    lo: Tensor
    hi: Tensor


class Steps(Interval):
    """Whole steps of an axis: from cell * step up to the next cell's, cut at the axis' length. Captures indexed by it are read step by step."""

    cell: Tensor
    step: int
    length: int


def steps(cell: Tensor, step: int, length: int) -> Steps:
    found = Steps((cell * step).double(), ((cell + 1) * step - 1).clamp(max=length - 1).double())
    found.cell, found.step, found.length = cell, step, length
    return found


def point(value: Tensor) -> Interval:
    return Interval(value, value)


def around(lo: Tensor, hi: Tensor) -> Interval:
    """An interval of values read from tensors; integers that float64 rounds are given room."""
    return _with_room(Interval(lo.double(), hi.double())) if lo.dtype == torch.int64 else Interval(lo.double(), hi.double())


def _with_room(a: Interval) -> Interval:
    """Integers too large for float64 are known up to a rounding."""
    lo = torch.where(a.lo.abs() >= EXACT, a.lo - a.lo.abs() * 2**-52, a.lo)
    return Interval(lo, torch.where(a.hi.abs() >= EXACT, a.hi + a.hi.abs() * 2**-52, a.hi))


def unknown(like: Tensor) -> Interval:
    return point(torch.full_like(like, NAN))


def hull(a: Interval, b: Interval) -> Interval:
    return Interval(torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi))


def choose(condition: Tensor, a: Interval, b: Interval) -> Interval:
    return Interval(torch.where(condition, a.lo, b.lo), torch.where(condition, a.hi, b.hi))


def forget(where: Tensor, a: Interval) -> Interval:
    """The interval, unknown where the condition holds."""
    return Interval(torch.where(where, NAN, a.lo), torch.where(where, NAN, a.hi))


def contains(a: Interval, value: float) -> Tensor:
    return (a.lo <= value) & (a.hi >= value)


def is_point(a: Interval) -> Tensor:
    return a.lo == a.hi


def may_be_infinite(*intervals: Interval) -> Tensor:
    found = None
    for a in intervals:
        here = a.lo.isinf() | a.hi.isinf()
        found = here if found is None else found | here
    assert found is not None
    return found


def fit(a: Interval, type: Type) -> Interval:
    """What is left of an exact result once it is stored in its type: wrapped integers, rounded floats."""
    if type.is_bool:
        return a
    if type.is_integer:
        low, high = INTEGER_RANGE[type.dtype]
        if bool(((a.lo > max(low - 1, -EXACT)) & (a.hi < min(high + 1, EXACT))).all()):
            return a  # as nearly always, so the rest is worth one look ahead
        # NaN counts as wrapping, and so does an end that float64 may have rounded back to 2**63.
        wraps = ~((a.lo >= low) & (a.hi <= high)) | (a.lo <= -(2.0**63)) | (a.hi >= 2.0**63)
        return _with_room(Interval(torch.where(wraps, float(low), a.lo), torch.where(wraps, float(high), a.hi)))
    info = torch.finfo(DTYPE_OF[type.dtype])
    slack = 8 * info.eps
    lo = a.lo - a.lo.abs() * slack - info.tiny
    hi = a.hi + a.hi.abs() * slack + info.tiny
    lo = torch.where(a.lo.isinf(), a.lo, lo)
    hi = torch.where(a.hi.isinf(), a.hi, hi)
    return Interval(torch.where(lo < info.min, -torch.inf, lo), torch.where(hi > info.max, torch.inf, hi))


def cast(a: Interval, source: Type, target: Type) -> Interval:
    """Conversion rounds monotonically, so the ends can simply be converted, except where an integer would wrap.

    Numbers and 0-d tensors that do not fit the type are rounded to it by some of torch's operations, and by others only to
    float32 (beside 16-bit floats) or not at all (a number as exponent); all are kept.
    """
    if source.dtype == target.dtype and (source.level > 0 or not source.is_float):
        return a
    if target.is_bool:
        return Interval(((a.lo > 0) | (a.hi < 0)).double(), (~((a.lo == 0) & (a.hi == 0))).double())
    if target.is_integer:
        if source.is_float:
            a = Interval(a.lo.trunc(), a.hi.trunc())
        return fit(a, target)
    rounded = _rounded(a, DTYPE_OF[target.dtype])
    if source.level < DIMENSIONED and target.dtype in ("f16", "bf16"):
        rounded = hull(rounded, _rounded(a, torch.float32))
    return hull(rounded, a) if source.level == NUMBER else rounded


def _rounded(a: Interval, dtype: torch.dtype) -> Interval:
    return Interval(a.lo.to(dtype).double(), a.hi.to(dtype).double())


def corners(f: Callable[[Tensor, Tensor], Tensor], a: Interval, b: Interval) -> Interval:
    """Range of a function monotone in each argument: its extremes lie at the corners."""
    ll, lh, hl, hh = f(a.lo, b.lo), f(a.lo, b.hi), f(a.hi, b.lo), f(a.hi, b.hi)
    lo = torch.minimum(torch.minimum(ll, lh), torch.minimum(hl, hh))
    return Interval(lo, torch.maximum(torch.maximum(ll, lh), torch.maximum(hl, hh)))


def increasing(f: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    return lambda a: Interval(f(a.lo), f(a.hi))


def decreasing(f: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    return lambda a: Interval(f(a.hi), f(a.lo))


def inside(low: float, high: float, rule: Callable[[Interval], Interval]) -> Callable[[Interval], Interval]:
    """Of a function that is NaN outside."""
    return lambda a: forget(~((a.lo >= low) & (a.hi <= high)), rule(a))


def add(a: Interval, b: Interval) -> Interval:
    return forget(may_be_infinite(a, b), Interval(a.lo + b.lo, a.hi + b.hi))


def sub(a: Interval, b: Interval) -> Interval:
    return forget(may_be_infinite(a, b), Interval(a.lo - b.hi, a.hi - b.lo))


def mul(a: Interval, b: Interval) -> Interval:
    return forget(may_be_infinite(a, b), corners(torch.mul, a, b))


def div(a: Interval, b: Interval) -> Interval:
    return forget(may_be_infinite(a, b) | ~((b.lo > 0) | (b.hi < 0)), corners(torch.div, a, b))


def floor(x: Tensor) -> Tensor:
    """x.floor(), for which torch wakes its threads from 2048 elements on, by an operation that is done before they are awake. NaN where x is infinite."""
    return torch.div(x, 1, rounding_mode="floor")


def floordiv_integer(a: Interval, b: Interval) -> Interval:
    quotient = div(a, b)
    large = (a.lo.abs() >= EXACT) | (a.hi.abs() >= EXACT)
    return Interval(floor(quotient.lo) - large.double(), floor(quotient.hi) + large.double())


def floordiv_float(a: Interval, b: Interval) -> Interval:
    """Torch's floor is exact; a quotient of float64 operands (not of shorter ones) may round up to a whole number."""
    quotient = div(a, b)
    long = ~(_is_short(a.lo) & _is_short(a.hi) & _is_short(b.lo) & _is_short(b.hi))
    room = long * 2**-52
    return Interval(floor(quotient.lo - quotient.lo.abs() * room), floor(quotient.hi + quotient.hi.abs() * room))


def _is_short(x: Tensor) -> Tensor:
    return x == x.float().double()


def mod_integer(a: Interval, b: Interval) -> Interval:
    return _mod(a, b, 1.0)


def mod_float(a: Interval, b: Interval) -> Interval:
    # 0 is always possible: a quotient just below a whole number may round up to it. Of huge quotients torch's remainder is NaN.
    general = _mod(a, b, 0.0)
    quotient = corners(torch.div, a, b)
    huge = ~((quotient.lo > -EXACT) & (quotient.hi < EXACT))
    return forget(huge | general.lo.isnan(), hull(general, point(torch.zeros_like(general.lo))))


def _mod(a: Interval, b: Interval, gap: float) -> Interval:
    """The remainder has the divisor's sign; on a stretch within one period it is increasing."""
    zero = torch.zeros_like(a.lo + b.lo)
    anything = Interval(torch.where(b.lo > 0, zero, b.lo + gap), torch.where(b.hi < 0, zero, b.hi - gap))
    period = floor(a.lo / b.lo)
    same = is_point(b) & (period == floor(a.hi / b.hi)) & (a.lo.abs() < EXACT) & (a.hi.abs() < EXACT)
    inside = Interval(a.lo - period * b.lo, a.hi - period * b.lo)
    unsafe = may_be_infinite(a, b) | ~((b.lo > 0) | (b.hi < 0)) | a.lo.isnan() | a.hi.isnan()
    return forget(unsafe, choose(same & (gap > 0), inside, anything))


def fmod_integer(a: Interval, b: Interval) -> Interval:
    return _fmod(a, b, 1.0)


def fmod_float(a: Interval, b: Interval) -> Interval:
    """Of huge quotients torch's is NaN."""
    huge = ~(absolute(a).hi / absolute(b).lo < EXACT)
    return forget(huge, _fmod(a, b, 0.0))


def _fmod(a: Interval, b: Interval, gap: float) -> Interval:
    """The remainder has the dividend's sign; what is smaller than the divisor stays."""
    dividend, divisor = absolute(a), absolute(b)
    largest = torch.minimum(dividend.hi, divisor.hi - gap)
    zero = torch.zeros_like(largest)
    anything = Interval(torch.where(a.lo >= 0, zero, -largest), torch.where(a.hi <= 0, zero, largest))
    return forget(may_be_infinite(a, b) | ~(divisor.lo > 0) | largest.isnan(), choose(dividend.hi < divisor.lo, a, anything))


def power(a: Interval, b: Interval) -> Interval:
    n = b.lo
    whole = is_point(b) & (n == n.floor()) & (n >= 0) & (n < 2**24)  # beyond, rounding to float32 decides whether it is even
    even = whole & (n % 2 == 0)
    ends = corners(torch.pow, a, point(n))
    low = torch.where(even & contains(a, 0.0), torch.where(n == 0, 1.0, 0.0), ends.lo)
    positive = corners(torch.pow, a, b)
    result = choose(whole, Interval(low, ends.hi), positive)
    return forget(may_be_infinite(a, b) | ~(whole | (a.lo > 0)), result)


def power_integer(a: Interval, b: Interval) -> Interval:
    """Whole, although float64's pow may miss by a rounding, and a negative exponent gives 0 or 1."""
    exact = power(a, b)
    lo, hi = exact.lo.round(), exact.hi.round()
    near = 2**-40
    return Interval(
        torch.where((lo - exact.lo).abs() <= lo.abs() * near, lo, exact.lo.floor()), torch.where((hi - exact.hi).abs() <= hi.abs() * near, hi, exact.hi.ceil())
    )


def shift_left(a: Interval, b: Interval) -> Interval:
    return forget((b.lo < 0) | (b.hi > 62), corners(lambda x, n: x * torch.exp2(n), a, b))


def shift_right(a: Interval, b: Interval) -> Interval:
    return forget((b.lo < 0) | (b.hi > 62), corners(lambda x, n: floor(x / torch.exp2(n)), a, b))


def negate(a: Interval) -> Interval:
    return Interval(-a.hi, -a.lo)


def absolute(a: Interval) -> Interval:
    largest = torch.maximum(a.lo.abs(), a.hi.abs())
    smallest = torch.minimum(a.lo.abs(), a.hi.abs())
    return Interval(torch.where(contains(a, 0.0), 0.0, smallest), largest)


def sign(a: Interval) -> Interval:
    """torch's sign of NaN is 0, so of the unknown it is anything from -1 to 1."""
    return Interval(torch.where(a.lo.isnan(), -1.0, a.lo.sign()), torch.where(a.hi.isnan(), 1.0, a.hi.sign()))


def minimum(a: Interval, b: Interval) -> Interval:
    return Interval(torch.minimum(a.lo, b.lo), torch.minimum(a.hi, b.hi))


def maximum(a: Interval, b: Interval) -> Interval:
    return Interval(torch.maximum(a.lo, b.lo), torch.maximum(a.hi, b.hi))


def three_valued(yes: Tensor, no: Tensor) -> Interval:
    return Interval(yes.double(), 1.0 - no.double())


def less(a: Interval, b: Interval) -> Interval:
    return three_valued(a.hi < b.lo, a.lo >= b.hi)


def less_equal(a: Interval, b: Interval) -> Interval:
    return three_valued(a.hi <= b.lo, a.lo > b.hi)


def equal(a: Interval, b: Interval) -> Interval:
    return three_valued(is_point(a) & is_point(b) & (a.lo == b.lo), (a.hi < b.lo) | (a.lo > b.hi))


def logical_not(a: Interval) -> Interval:
    return Interval(1.0 - a.hi, 1.0 - a.lo)


def logical_xor(a: Interval, b: Interval) -> Interval:
    known = is_point(a) & is_point(b)
    return three_valued(known & (a.lo != b.lo), known & (a.lo == b.lo))


def bit_and(a: Interval, b: Interval) -> Interval:
    """x & y with y >= 0 lies in [0, y]."""
    upper_a = torch.where(a.lo >= 0, a.hi, torch.inf)
    upper_b = torch.where(b.lo >= 0, b.hi, torch.inf)
    upper = torch.minimum(upper_a, upper_b)
    return forget(upper.isinf(), Interval(torch.zeros_like(upper), upper))


def bit_or(a: Interval, b: Interval) -> Interval:
    return _below_power_of_two(a, b, torch.maximum(a.lo, b.lo))


def bit_xor(a: Interval, b: Interval) -> Interval:
    return _below_power_of_two(a, b, torch.zeros_like(a.lo + b.lo))


def _below_power_of_two(a: Interval, b: Interval, low: Tensor) -> Interval:
    """Non-negative operands set no bit above the highest one of either."""
    bits = torch.frexp(torch.maximum(a.hi, b.hi)).exponent
    return forget(~((a.lo >= 0) & (b.lo >= 0)), Interval(low, torch.exp2(bits.double()) - 1))


def where(c: Interval, a: Interval, b: Interval) -> Interval:
    return choose(c.lo == 1, a, choose(c.hi == 0, b, hull(a, b)))


def square_root(a: Interval) -> Interval:
    return forget(~(a.lo >= 0), increasing(torch.sqrt)(a))


def reciprocal_square_root(a: Interval) -> Interval:
    return forget(~(a.lo > 0), Interval(torch.rsqrt(a.hi), torch.rsqrt(a.lo)))


def logarithm(f: Callable[[Tensor], Tensor], start: float = 0.0) -> Callable[[Interval], Interval]:
    """Of an increasing function that is NaN before its start."""
    return lambda a: forget(~(a.lo >= start), increasing(f)(a))


def wave(a: Interval) -> Interval:
    """sin and cos of anything finite."""
    return forget(may_be_infinite(a) | a.lo.isnan() | a.hi.isnan(), Interval(-torch.ones_like(a.lo), torch.ones_like(a.lo)))


def tangent(a: Interval) -> Interval:
    """Increasing between two poles. A branch is known where its number is exact, and not too near to a pole."""
    branch = ((a.lo / math.pi + 0.5 - NEAR_POLE).floor(), (a.hi / math.pi + 0.5 + NEAR_POLE).floor())
    known = (branch[0] == branch[1]) & (a.lo.abs() < MANY_BRANCHES) & (a.hi.abs() < MANY_BRANCHES)
    return forget(~known, increasing(torch.tan)(a))


def angle(y: Interval, x: Interval) -> Interval:
    """atan2(y, x). To the right of the origin it is monotone in each of them."""
    missing = y.lo.isnan() | y.hi.isnan() | x.lo.isnan() | x.hi.isnan()
    anything = torch.full_like(y.lo + x.lo, math.pi)
    return forget(missing, choose(x.lo > 0, corners(torch.atan2, y, x), Interval(-anything, anything)))


def logaddexp(a: Interval, b: Interval) -> Interval:
    """Computed as the larger one and up to log(2) more, which may cancel."""
    return Interval(torch.logaddexp(a.lo, b.lo) - ROOM, torch.logaddexp(a.hi, b.hi) + ROOM)


def softplus(a: Interval) -> Interval:
    """torch returns x itself beyond 20, which is a step down of 2e-9."""
    lo = torch.where(a.lo > 19.0, a.lo, torch.nn.functional.softplus(a.lo))
    return Interval(lo, torch.logaddexp(a.hi, torch.zeros_like(a.hi)))


def gelu(a: Interval) -> Interval:
    return _gelu(a, "none", GELU_LOWEST)


def gelu_tanh(a: Interval) -> Interval:
    return _gelu(a, "tanh", GELU_TANH_LOWEST)


def _gelu(a: Interval, approximate: str, lowest: tuple[float, float]) -> Interval:
    """Falls to its lowest point, then rises; computed as x (1 + ...), its small negative values are a difference of larger ones."""
    lo, hi = (torch.nn.functional.gelu(end, approximate=approximate) for end in a)
    low = torch.where(contains(a, lowest[0]), torch.full_like(lo, lowest[1]), torch.minimum(lo, hi))
    return forget(may_be_infinite(a), Interval(low - ROOM, torch.maximum(lo, hi) + ROOM))


def silu(a: Interval) -> Interval:
    f = torch.nn.functional.silu
    lo, hi = f(a.lo), f(a.hi)
    at, lowest = SILU_LOWEST
    low = torch.where(contains(a, at), torch.full_like(lo, lowest), torch.minimum(lo, hi))
    high = torch.where(a.lo < SILU_VANISHES, torch.maximum(hi, torch.zeros_like(hi)), torch.maximum(lo, hi))
    return forget(may_be_infinite(a), Interval(low, high))


LN2 = math.log(2.0)
