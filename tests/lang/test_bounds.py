"""The interval rule of every operation, on every interval between awkward values, holds what torch computes there."""

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.lang import Bounds, Interval, intervals, trace_mask
from tilewise.lang.bounds import CaptureRanges
from tilewise.lang.ops import OPS, infer
from tilewise.lang.ranges import Ranges, ranges
from tilewise.lang.types import DIMENSIONED, DTYPE_OF, INTEGER_RANGE, NUMBER, ZERO_DIM, Type

WHOLE = [-(2**53) - 1, -(2**31) - 1, -1000, -8, -1, 0, 1, 2, 3, 7, 64, 255, 2**13, 2**31, 2**50, 2**53 + 1]
REAL = [-float("inf"), -3e38, -88.9, -3.5, -2.0, -1.2784645, -0.1, -1e-40, 0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 70000.5, 16777217.0, 3e38, float("inf")]


def points(dtype: str) -> Tensor:
    """Awkward values of a dtype, ascending."""
    if dtype == "bool":
        return torch.tensor([False, True])
    if dtype in INTEGER_RANGE:
        low, high = INTEGER_RANGE[dtype]
        return torch.tensor(sorted({low, high, *(n for n in WHOLE if low <= n <= high)}), dtype=DTYPE_OF[dtype])
    return torch.tensor(REAL, dtype=torch.float64).to(DTYPE_OF[dtype]).unique()


def ends_of(values: Tensor) -> list[tuple[int, int]]:
    return list(combinations_with_replacement(range(len(values)), 2))


def interval_of(values: Tensor, ends: list[tuple[int, int]]) -> Interval:
    first, last = torch.tensor(ends).unbind(1)
    return intervals.around(values[first], values[last])


def holds(found: Interval, table: Tensor) -> Tensor:
    """Whether each interval holds its entry of the table; a NaN end holds anything, and only it holds NaN."""
    if table.is_floating_point():
        inside = (found.lo <= table.double()) & (table.double() <= found.hi)
    else:  # exactly, although float64 cannot hold every integer: round the ends inwards and compare integers
        lo, hi = found.lo.ceil(), found.hi.floor()
        above = (lo < -(2.0**63)) | ((lo < 2.0**63) & (lo.clamp(-(2.0**63), 2.0**63 - 1024).long() <= table.long()))
        inside = above & ((hi >= 2.0**63) | ((hi >= -(2.0**63)) & (hi.clamp(-(2.0**63), 2.0**63 - 1024).long() >= table.long())))
    return inside | found.lo.isnan() | found.hi.isnan()


def assert_holds(op: str, found: Interval, least: Tensor, greatest: Tensor, described: str) -> None:
    shape = least.shape
    found = Interval(found.lo.expand(shape), found.hi.expand(shape))
    wrong = ~(holds(found, least) & holds(found, greatest))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        values = f"{least[at].item()} .. {greatest[at].item()}"
        bounds = f"[{found.lo[at].item()}, {found.hi[at].item()}]"
        raise AssertionError(f"{op} of {described}, case {at}: {bounds} does not hold {values}; {int(wrong.sum())} like it")


UNARY = [name for name, op in OPS.items() if op.arity == 1 and name != "cast"]
BINARY = [name for name, op in OPS.items() if op.arity == 2]
PAIRS = [("i64", "i64"), ("f32", "f32"), ("bool", "bool"), ("u8", "u8"), ("i32", "i64"), ("i64", "f32"), ("bf16", "bf16"), ("f64", "f64")]
TYPES = ("bool", "u8", "i32", "i64", "bf16", "f32", "f64")


@pytest.mark.parametrize("op", UNARY)
def test_unary_bounds_hold(op: str) -> None:
    for dtype in TYPES:
        type = Type(dtype, DIMENSIONED)
        if not OPS[op].takes(type):
            continue
        values = points(dtype)
        ends = ends_of(values)
        results = OPS[op].meaning(values)
        found = Bounds._apply(op, infer(OPS[op], (type,)), (type,), [interval_of(values, ends)])
        least, greatest = (t[:, 0] for t in extremes(results[:, None], ends, [(0, 0)]))
        assert_holds(op, found, least, greatest, f"{dtype} {values.tolist()}")
        unknown = Bounds._apply(op, infer(OPS[op], (type,)), (type,), [intervals.unknown(torch.zeros(1, dtype=torch.float64))])
        with_nan = torch.cat([results, OPS[op].meaning(torch.tensor([float("nan")], dtype=values.dtype))]) if type.is_float else results
        assert_holds(op, unknown, with_nan.amin()[None], with_nan.amax()[None], f"unknown {dtype}")


def table_of(op: str, left: Any, right: Any) -> Tensor:
    """The operation on every pair; an integer divided by zero, which torch does not compute, counts as divided by one."""
    if op in ("floordiv", "mod", "fmod") and not torch.result_type(torch.as_tensor(left), torch.as_tensor(right)).is_floating_point:
        right = torch.where(right == 0, 1, right) if isinstance(right, Tensor) else right or 1
    return OPS[op].meaning(left, right)


def extremes(table: Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> list[Tensor]:
    """The least and the greatest entry (NaN if there is one) of the table's part between every two rows and two columns."""
    table = table.int() if table.dtype == torch.bool else table
    found = []
    for pick in (torch.amin, torch.amax):
        by_rows = torch.stack([pick(table[i : j + 1], 0) for i, j in rows])
        found.append(torch.stack([pick(by_rows[:, k : m + 1], 1) for k, m in columns], 1))
    return found


@pytest.mark.parametrize("op", BINARY)
def test_binary_bounds_hold(op: str) -> None:
    for dtypes in PAIRS:
        types = tuple(Type(d, DIMENSIONED) for d in dtypes)
        if not OPS[op].takes(*types):
            continue
        left, right = (points(d) for d in dtypes)
        rows, columns = ends_of(left), ends_of(right)
        operands = [Interval(*(end[:, None] for end in interval_of(left, rows))), interval_of(right, columns)]
        found = Bounds._apply(op, infer(OPS[op], types), types, operands)
        assert_holds(op, found, *extremes(table_of(op, left[:, None], right), rows, columns), f"{dtypes}")


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("level", [NUMBER, ZERO_DIM], ids=["number", "0-d"])
def test_bounds_beside_a_single_value_hold(op: str, level: int) -> None:
    for dtype in ("i64", "u8", "bf16", "f16", "f32", "f64"):
        values = points(dtype)
        rows = ends_of(values)
        for number in (0, 1, 3, -2, 300, 16777217, 0.1, -0.3, 2.0, 1e30):
            single = Type("f32" if isinstance(number, float) else "i64", level)
            value = number if level == NUMBER else torch.tensor(number)
            types = (Type(dtype, DIMENSIONED), single)
            if not OPS[op].takes(*types):
                continue
            exact = intervals.point(torch.tensor(number, dtype=torch.float64) if level == NUMBER else torch.tensor(number).double())
            try:
                table = table_of(op, values, value)
            except RuntimeError:  # a power with a negative exponent, a number that does not fit
                continue
            found = Bounds._apply(op, infer(OPS[op], types), types, [interval_of(values, rows), exact])
            least, greatest = (t[:, 0] for t in extremes(table[:, None], rows, [(0, 0)]))
            assert_holds(op, found, least, greatest, f"{dtype} and {number}")


@pytest.mark.parametrize("target", ["bool", "u8", "i32", "i64", "f16", "bf16", "f32", "f64"])
def test_bounds_of_casts_hold(target: str) -> None:
    for dtype in TYPES:
        values = points(dtype)
        rows = ends_of(values)
        found = Bounds._apply("cast", Type(target, DIMENSIONED), (Type(dtype, DIMENSIONED),), [interval_of(values, rows)])
        least, greatest = (t[:, 0] for t in extremes(values.to(DTYPE_OF[target])[:, None], rows, [(0, 0)]))
        assert_holds("cast", found, least, greatest, f"{dtype} to {target}")


def test_bounds_of_where_hold() -> None:
    a, b, type = interval_of(points("f32"), [(2, 4)]), interval_of(points("f32"), [(7, 9)]), Type("f32", DIMENSIONED)
    types = (Type("bool", DIMENSIONED), type, type)
    for condition, expected in (((0, 0), b), ((1, 1), a), ((0, 1), intervals.hull(a, b))):
        c = Interval(*(torch.tensor([float(end)]) for end in condition))
        assert Bounds._apply("where", type, types, [c, a, b]) == expected


# -- captures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000, 1024, 1025, 3000, 10_001])
def test_the_range_of_a_capture_holds_every_element(length: int) -> None:
    random = torch.Generator().manual_seed(length)
    tensor = torch.randint(-1000, 1000, (length,), generator=random).cumsum(0)
    first = torch.randint(-length - 2, length + 2, (100,), generator=random)
    last = first + torch.randint(0, max(1, length // 2), (100,), generator=random)
    found = CaptureRanges(tensor).query([Interval(first.double(), last.double())])
    for k in range(100):
        at = torch.arange(first[k].item(), last[k].item() + 1)
        reached = tensor[torch.where(at < 0, at + length, at).clamp(0, length - 1)]
        assert found.lo[k] <= reached.min() and reached.max() <= found.hi[k]
        if length <= 1024 and (first[k] >= 0 or last[k] < 0):  # exact where it is searched exactly
            assert (found.lo[k], found.hi[k]) == (reached.min(), reached.max())


def test_the_range_of_a_row_holds_its_elements_only() -> None:
    tensor = torch.tensor([[1.0, 5.0, 2.0], [100.0, float("nan"), 300.0]])
    ranges = CaptureRanges(tensor)

    def ends(*values: float) -> Interval:
        return Interval(*(torch.tensor([v], dtype=torch.float64) for v in values))

    assert ranges.query([ends(0, 0), ends(0, 2)]) == (1.0, 5.0)
    assert ranges.query([ends(0, 0), ends(-3, -2)]) == (1.0, 5.0)
    assert ranges.query([ends(1, 1), ends(2, 2)]) == (300.0, 300.0)
    assert ranges.query([ends(1, 1), ends(0, 2)]).lo.isnan().all()
    assert ranges.query([ends(0, 1), ends(0, 1)]).lo.isnan().all()
    assert ranges.query([intervals.unknown(torch.zeros(1)), ends(0, 0)]) == (1.0, 100.0)


def test_bounds_of_many_boxes_are_those_of_each() -> None:
    documents = torch.arange(64) // 10
    call = trace_mask(lambda b, h, q, kv: (documents[q] == documents[kv]) & (q - kv <= 5))
    bounds = Bounds(call, torch.device("cpu"))
    starts = torch.arange(0, 64, 8).double()
    zero = Interval(torch.zeros(1), torch.zeros(1))
    grid = bounds.over({"b": zero, "h": zero, "q": Interval(starts[:, None], starts[:, None] + 7), "kv": Interval(starts, starts + 7)})
    for i, j in ((0, 0), (3, 2), (7, 0), (2, 6)):
        q, kv = (Interval(starts[k][None], starts[k][None] + 7) for k in (i, j))
        assert bounds.over({"b": zero, "h": zero, "q": q, "kv": kv}) == (grid.lo[i, j], grid.hi[i, j])


def test_ranges_over_a_whole_problem_look_into_no_capture() -> None:
    table = torch.tensor([1, 2, 3], dtype=torch.int32)
    call = trace_mask(lambda b, h, q, kv: (q * kv + 5 > table[h]) | (q.float() > 0.5))
    found = ranges(call.program, call, {"b": 1, "h": 3, "q": 100_000, "kv": 70_000})
    by_op = {i.op: r for i, r in zip(call.program.instructions, found, strict=True)}
    assert by_op["mul"] == (0, 99_999 * 69_999)
    assert by_op["add"].highest == 99_999 * 69_999 + 5
    assert not by_op["mul"].within(*INTEGER_RANGE["i32"])
    assert by_op["load"] == INTEGER_RANGE["i32"]
    assert by_op["float"] == (-float("inf"), float("inf"))
    assert by_op["or"] == (0, 1)


NUMBER_OF_ITS_OWN = 2**40
SUMMED: dict[str, Any] = {
    "causal with an offset": lambda b, h, q, kv: q + 17 >= kv,
    "negative": lambda b, h, q, kv: -(q - kv) + (b - h) >= -3,
    "past float64": lambda b, h, q, kv: q + 2**53 - 1 >= kv + 2**53,
    "past int64": lambda b, h, q, kv: (q + NUMBER_OF_ITS_OWN) * (kv + NUMBER_OF_ITS_OWN) - q >= 0,
    "loads": lambda b, h, q, kv: IDS[q] + q >= IDS[kv] - 1,
}
IDS = torch.arange(50, dtype=torch.int32)


@pytest.mark.parametrize("name", SUMMED)
def test_ranges_of_sums_are_those_of_intervals(name: str) -> None:
    """Indices, integers and their sums have a way of their own."""
    call = trace_mask(SUMMED[name])
    for lengths in ((1, 1), (0, 5), (100, 70_000), (2**31, 2**33), (2**53, 2**54)):
        extents = {"b": 2, "h": 3, "q": lengths[0], "kv": lengths[1]}
        one_by_one = Ranges(call.program, call, extents)
        assert [one_by_one[k] for k in range(len(call.program.instructions))] == ranges(call.program, call, extents)
