"""A traced function means what plain torch computes on real indices: the same values, the same dtype."""

import math
import operator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.programs import BATCH, HEADS, KEYS, QUERIES, assert_traces_as_torch, grid, trace_value, value_of
from tilewise.errors import TraceError
from tilewise.lang import evaluate, trace_mask, trace_score
from tilewise.lang.torch_functions import FUNCTIONS
from tilewise.lang.types import DTYPE_OF

OFFSET = torch.tensor(3)
SLOPE = torch.tensor(0.375)
FLAG = torch.tensor(True)

ARITHMETIC = {
    "add": lambda s, b, h, q, kv: q + kv + 2,
    "sub": lambda s, b, h, q, kv: q - kv - 2,
    "mul": lambda s, b, h, q, kv: q * kv * 3,
    "div": lambda s, b, h, q, kv: q / (kv + 1),
    "div by number": lambda s, b, h, q, kv: q / 4,
    "floordiv of negatives": lambda s, b, h, q, kv: (q - kv) // 3,
    "floordiv by negatives": lambda s, b, h, q, kv: (q - kv) // -3,
    "floordiv by a symbol": lambda s, b, h, q, kv: (q - 3) // (kv + 1),
    "floordiv of floats": lambda s, b, h, q, kv: s // 0.75,
    "mod of negatives": lambda s, b, h, q, kv: (q - kv) % 3,
    "mod by negatives": lambda s, b, h, q, kv: (q - kv) % -3,
    "mod of floats": lambda s, b, h, q, kv: s % 0.75,
    "pow": lambda s, b, h, q, kv: (q - kv) ** 3,
    "pow of float": lambda s, b, h, q, kv: s**2,
    "pow by float": lambda s, b, h, q, kv: q**0.5,
    "pow by symbol": lambda s, b, h, q, kv: (kv - 3) ** q,
    "pow of number": lambda s, b, h, q, kv: 2**q,
    "neg": lambda s, b, h, q, kv: -(q - kv),
    "pos": lambda s, b, h, q, kv: +s,
    "abs": lambda s, b, h, q, kv: abs(q - kv),
    "reversed add": lambda s, b, h, q, kv: 5 + q,
    "reversed sub": lambda s, b, h, q, kv: 5 - q,
    "reversed mul": lambda s, b, h, q, kv: 5 * q,
    "reversed div": lambda s, b, h, q, kv: 5 / (q + 1),
    "reversed floordiv": lambda s, b, h, q, kv: -5 // (q + 1),
    "reversed mod": lambda s, b, h, q, kv: -5 % (q + 1),
    "number and float": lambda s, b, h, q, kv: 0.1 * q + s,
    "augmented": lambda s, b, h, q, kv: operator.iadd(q + 0, 1),
    "0-d captures": lambda s, b, h, q, kv: s * SLOPE + OFFSET,
    "reversed 0-d add": lambda s, b, h, q, kv: OFFSET + q,
    "reversed 0-d sub": lambda s, b, h, q, kv: OFFSET - q,
    "reversed 0-d mul": lambda s, b, h, q, kv: SLOPE * q,
    "reversed 0-d div": lambda s, b, h, q, kv: OFFSET / (q + 1),
    "reversed 0-d floordiv": lambda s, b, h, q, kv: OFFSET // (q + 1),
    "reversed 0-d mod": lambda s, b, h, q, kv: OFFSET % (q + 1),
    "reversed 0-d pow": lambda s, b, h, q, kv: OFFSET**q,
    "arithmetic of booleans": lambda s, b, h, q, kv: (q > kv) + (q < kv) * 2,
}
LOGIC = {
    "lt": lambda s, b, h, q, kv: q < kv,
    "le": lambda s, b, h, q, kv: q <= kv,
    "gt": lambda s, b, h, q, kv: q > kv,
    "ge": lambda s, b, h, q, kv: q >= kv,
    "eq": lambda s, b, h, q, kv: q == kv,
    "ne": lambda s, b, h, q, kv: q != kv,
    "eq of number": lambda s, b, h, q, kv: s == 1.25,
    "reversed lt": lambda s, b, h, q, kv: 3 < q,
    "reversed ge": lambda s, b, h, q, kv: 3 >= q,
    "reversed 0-d lt": lambda s, b, h, q, kv: OFFSET < q,
    "reversed 0-d eq": lambda s, b, h, q, kv: OFFSET == q,
    "and": lambda s, b, h, q, kv: (q > 2) & (kv > 2),
    "or": lambda s, b, h, q, kv: (q > 2) | (kv > 2),
    "xor": lambda s, b, h, q, kv: (q > 2) ^ (kv > 2),
    "not": lambda s, b, h, q, kv: ~(q > kv),
    "and with number": lambda s, b, h, q, kv: True & (q > 2),
    "and with 0-d": lambda s, b, h, q, kv: FLAG & (q > 2),
    "bits": lambda s, b, h, q, kv: (q & kv) | (q ^ 5),
    "bits of negatives": lambda s, b, h, q, kv: ~(q - kv) & 6,
    "reversed bits": lambda s, b, h, q, kv: 6 & (5 | (3 ^ q)),
    "shifts": lambda s, b, h, q, kv: (q << 2) + (kv >> 1),
    "shifts of negatives": lambda s, b, h, q, kv: ((q - kv) >> 1) + ((q - kv) << 3),
    "shifts by symbols": lambda s, b, h, q, kv: (q << kv) + (100 >> kv) + (1 << q),
    "bool eq bool": lambda s, b, h, q, kv: (q > 2) == (kv > 2),
}
TORCH_FUNCTIONS = {
    "add": lambda s, b, h, q, kv: torch.add(q, kv),
    "add with alpha": lambda s, b, h, q, kv: torch.add(q, kv, alpha=2),
    "add by keyword": lambda s, b, h, q, kv: torch.add(input=q, other=kv),
    "sub": lambda s, b, h, q, kv: torch.sub(q, kv) + torch.subtract(q, kv, alpha=3),
    "rsub": lambda s, b, h, q, kv: torch.rsub(q, kv),
    "mul": lambda s, b, h, q, kv: torch.mul(q, kv) + torch.multiply(q, 3),
    "div": lambda s, b, h, q, kv: torch.div(q, kv + 1) + torch.divide(q, 3) + torch.true_divide(q, 5),
    "div floor": lambda s, b, h, q, kv: torch.div(q - kv, 3, rounding_mode="floor"),
    "div floor of floats": lambda s, b, h, q, kv: torch.div(s, 0.75, rounding_mode="floor"),
    "div trunc": lambda s, b, h, q, kv: torch.div(q - kv, 3, rounding_mode="trunc"),
    "div trunc by negatives": lambda s, b, h, q, kv: torch.div(q - kv, -2, rounding_mode="trunc"),
    "div trunc of floats": lambda s, b, h, q, kv: torch.div(s, 0.75, rounding_mode="trunc"),
    "div trunc of large": lambda s, b, h, q, kv: torch.div(q - 1_000_000_000_000_001, 3, rounding_mode="trunc"),
    "floor_divide": lambda s, b, h, q, kv: torch.floor_divide(q - kv, 3),
    "remainder": lambda s, b, h, q, kv: torch.remainder(q - kv, 3),
    "pow": lambda s, b, h, q, kv: torch.pow(q, 2) + torch.pow(2, q) + torch.pow(q, exponent=kv),
    "square": lambda s, b, h, q, kv: torch.square(s),
    "reciprocal": lambda s, b, h, q, kv: torch.reciprocal(s),
    "neg": lambda s, b, h, q, kv: torch.neg(q) + torch.negative(kv) + torch.positive(q),
    "abs": lambda s, b, h, q, kv: torch.abs(q - kv) + torch.absolute(kv - q),
    "comparisons": lambda s, b, h, q, kv: torch.lt(q, kv) | torch.ge(q, 3) & torch.ne(kv, 1),
    "long comparisons": lambda s, b, h, q, kv: torch.less(q, kv) ^ torch.greater_equal(q, 3) | torch.not_equal(kv, 1) & torch.greater(kv, 0),
    "eq": lambda s, b, h, q, kv: torch.eq(q, kv) | torch.le(q, 1) & torch.less_equal(kv, 2) | torch.gt(q, 3),
    "logical": lambda s, b, h, q, kv: torch.logical_and(q > 1, kv > 1) ^ torch.logical_or(q > 3, kv > 3),
    "logical of integers": lambda s, b, h, q, kv: torch.logical_and(q, kv) ^ torch.logical_xor(q, h) | torch.logical_not(b),
    "logical with 0-d": lambda s, b, h, q, kv: torch.logical_and(q > 1, OFFSET),
    "bitwise": lambda s, b, h, q, kv: torch.bitwise_and(q, 5) + torch.bitwise_or(q, kv) + torch.bitwise_xor(q, kv) + torch.bitwise_not(q),
    "bitwise shifts": lambda s, b, h, q, kv: torch.bitwise_left_shift(q, 2) + torch.bitwise_right_shift(kv, q),
    "where": lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")),
    "where of numbers": lambda s, b, h, q, kv: torch.where(q >= kv, 1, 2.5),
    "where of integers": lambda s, b, h, q, kv: torch.where(q >= kv, q, 7),
    "where of 0-d": lambda s, b, h, q, kv: torch.where(q >= kv, SLOPE, OFFSET),
    "minimum": lambda s, b, h, q, kv: torch.minimum(q, kv) + torch.maximum(q, OFFSET),
    "min and max of two": lambda s, b, h, q, kv: torch.min(q, kv) + torch.max(q, other=kv),
    "clamp": lambda s, b, h, q, kv: torch.clamp(q - kv, -2, 2),
    "clamp by keyword": lambda s, b, h, q, kv: torch.clamp(input=q - kv, min=-2, max=2),
    "clamp min": lambda s, b, h, q, kv: torch.clamp(q - kv, min=-2),
    "clamp max": lambda s, b, h, q, kv: torch.clamp(q - kv, max=2),
    "clamp to floats": lambda s, b, h, q, kv: torch.clamp(q, min=0.5),
    "clamp crossed": lambda s, b, h, q, kv: torch.clamp(q, min=3, max=1),
    "clamp to tensors": lambda s, b, h, q, kv: torch.clamp(q, min=OFFSET, max=kv),
    "clip": lambda s, b, h, q, kv: torch.clip(s, -1.0, 1.0),
    "clamp_min": lambda s, b, h, q, kv: torch.clamp_min(s, 0.5) + torch.clamp_max(s, max=0.5),
    "rounding": lambda s, b, h, q, kv: torch.floor(s) + torch.ceil(s) * 10 + torch.trunc(s) * 100 + torch.fix(s) * 1000,
    "round": lambda s, b, h, q, kv: torch.round(s),
    "rounding of integers": lambda s, b, h, q, kv: torch.floor(q) + torch.ceil(q) + torch.round(q) + torch.trunc(q),
    "sign": lambda s, b, h, q, kv: torch.sign(s) + torch.sgn(q - kv),
    "isnan": lambda s, b, h, q, kv: torch.isnan(torch.log(s)) | torch.isinf(1 / s),
    "special": lambda s, b, h, q, kv: torch.special.exp2(s) + torch.special.erf(s) + torch.special.expit(s),
    "ones_like": lambda s, b, h, q, kv: torch.ones_like(q) + torch.zeros_like(s) + torch.full_like(s, 2.5),
    "detach": lambda s, b, h, q, kv: torch.detach(s) + torch.clone(s),
    "functional": lambda s, b, h, q, kv: F.relu(s) + F.silu(s) + F.sigmoid(s) + F.tanh(s),
}
FLOAT_FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf")
METHODS = {
    "arithmetic": lambda s, b, h, q, kv: q.add(kv).sub(2).mul(3) + q.remainder(3) + q.floor_divide(2) + q.subtract(kv, alpha=2),
    "division": lambda s, b, h, q, kv: q.div(3) + q.true_divide(5) + (q - kv).div(3, rounding_mode="trunc") + (q - kv).div(3, rounding_mode="floor"),
    "pow": lambda s, b, h, q, kv: s.pow(2) + s.square() + s.neg() + s.abs() + s.reciprocal(),
    "comparisons": lambda s, b, h, q, kv: q.lt(kv) | q.ge(3) & kv.ne(1) | q.eq(2),
    "logical": lambda s, b, h, q, kv: q.lt(kv).logical_not().logical_or(q.eq(3)).logical_and(kv.gt(1)),
    "bitwise": lambda s, b, h, q, kv: q.bitwise_and(5) + q.bitwise_left_shift(2) + q.bitwise_not(),
    "where": lambda s, b, h, q, kv: s.where(q >= kv, 0.5),
    "minimum": lambda s, b, h, q, kv: q.minimum(kv) + q.maximum(kv),
    "clamp": lambda s, b, h, q, kv: q.clamp(1, 3) + q.clamp(min=2) + q.clamp(max=2) + q.clip(1, 3) + q.clamp_min(2) + q.clamp_max(2),
    "rounding": lambda s, b, h, q, kv: s.floor() + s.ceil() + s.round() + s.trunc() + s.sign(),
    "functions": lambda s, b, h, q, kv: s.exp() + s.exp2() + s.sin() + s.cos() + s.tanh() + s.sigmoid() + s.erf() + s.relu(),
    "roots": lambda s, b, h, q, kv: s.abs().sqrt() + (s.abs() + 1).rsqrt() + (s.abs() + 1).log() + (s.abs() + 1).log2(),
    "new constants beside 0-d": lambda s, b, h, q, kv: (q.new_full((), 3) + OFFSET.int()) * OFFSET.short(),
    "constants in full": lambda s, b, h, q, kv: (
        q.new_ones((), dtype=torch.int8, device="cpu", requires_grad=False, layout=torch.strided, pin_memory=False)
        + torch.full_like(q, 3, dtype=torch.int8, device="cpu", requires_grad=False, layout=torch.strided, memory_format=torch.preserve_format)
    ),
    "new constants": lambda s, b, h, q, kv: s.new_ones(()) + s.new_zeros(size=()) + s.new_full((), 2.5) + q.new_ones((), dtype=torch.int32),
}
CASTS = {
    "to dtype": lambda s, b, h, q, kv: q.to(torch.float64),
    "to dtype by keyword": lambda s, b, h, q, kv: q.to(dtype=torch.float16),
    "to device": lambda s, b, h, q, kv: q.to("cpu"),
    "to device by keyword": lambda s, b, h, q, kv: q.to(device=torch.device("cpu"), non_blocking=True),
    "to device by place": lambda s, b, h, q, kv: q.to("cpu", torch.int32, False, True) + q.to("cpu", None) + q.to(None) + q.to(None, torch.int32),
    "to dtype, blocking or not": lambda s, b, h, q, kv: q.to(torch.int8, True) + q.to(torch.int8, False, True) + q.to(torch.int8, copy=True),
    "to another, blocking or not": lambda s, b, h, q, kv: q.to(s, False, True) + q.to(s, non_blocking=True),
    "to nothing": lambda s, b, h, q, kv: q.to() + q.to(copy=True),
    "a capture to a symbol's dtype": lambda s, b, h, q, kv: OFFSET.to(s.dtype) + q,
    "in a memory format": lambda s, b, h, q, kv: (
        q.float(memory_format=torch.preserve_format) + q.clone(memory_format=torch.contiguous_format).contiguous(memory_format=torch.contiguous_format)
    ),
    "to its own device": lambda s, b, h, q, kv: q.to(s.device),
    "to device and dtype": lambda s, b, h, q, kv: q.to("cpu", torch.float32),
    "to device and dtype by keyword": lambda s, b, h, q, kv: q.to(device="cpu", dtype=torch.int32),
    "to another": lambda s, b, h, q, kv: q.to(s),
    "to a capture": lambda s, b, h, q, kv: q.to(SLOPE),
    "to another's dtype": lambda s, b, h, q, kv: q.to(s.dtype),
    "type": lambda s, b, h, q, kv: q.type(torch.int16),
    "type_as": lambda s, b, h, q, kv: q.type_as(s),
    "float": lambda s, b, h, q, kv: q.float(),
    "double": lambda s, b, h, q, kv: q.double(),
    "half": lambda s, b, h, q, kv: s.half(),
    "bfloat16": lambda s, b, h, q, kv: s.bfloat16(),
    "int truncates": lambda s, b, h, q, kv: s.int(),
    "long truncates": lambda s, b, h, q, kv: s.long(),
    "short": lambda s, b, h, q, kv: q.short(),
    "byte wraps": lambda s, b, h, q, kv: (q - kv).byte(),
    "char wraps": lambda s, b, h, q, kv: (q * 100).char(),
    "bool": lambda s, b, h, q, kv: s.bool(),
    "bool to int": lambda s, b, h, q, kv: (q > kv).int(),
    "int32 stays int32": lambda s, b, h, q, kv: q.int() + 1,
    "half with a number": lambda s, b, h, q, kv: s.half() * 0.1,
    "0-d cast": lambda s, b, h, q, kv: OFFSET.to(torch.int16) + q.int(),
}


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in (ARITHMETIC | LOGIC).items()])
def test_operators_are_torchs(function: Any) -> None:
    assert_traces_as_torch(function)


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in TORCH_FUNCTIONS.items()])
def test_torch_functions_are_torchs(function: Any) -> None:
    assert_traces_as_torch(function)


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in METHODS.items()])
def test_methods_are_torchs(function: Any) -> None:
    assert_traces_as_torch(function)


@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_float_functions_are_torchs(name: str, dtype: torch.dtype) -> None:
    assert_traces_as_torch(lambda s, b, h, q, kv: getattr(torch, name)(s), dtype=dtype)
    assert_traces_as_torch(lambda s, b, h, q, kv: getattr(torch, name)(q) + getattr(s, name)(), dtype=dtype)


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in CASTS.items()])
def test_casts_are_torchs(function: Any) -> None:
    assert_traces_as_torch(function)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_out_is_accepted_where_torch_accepts_it(name: str) -> None:
    """By functions of torch and of its modules; methods take no `out`."""
    functions = [f for f in (getattr(home, name, None) for home in (torch, F, torch.special)) if callable(f) and not isinstance(f, type)]
    special = {"dot": ["rows"], "inner": ["rows"], "matmul": ["rows"], "min": ["pair"], "max": ["pair"], "where": ["choice"]}
    kinds = special.get(name, ["one", "pair", "integers"])
    table = torch.ones(KEYS, 3)
    for f, kind in ((f, kind) for f in functions for kind in kinds):

        def function(s: Any, b: Any, h: Any, q: Any, kv: Any, f: Any = f, kind: str = kind) -> Any:
            operands = {"one": [s], "pair": [s, s], "integers": [q, kv], "choice": [q > kv, s, q], "rows": [table[q], table[kv]]}
            return f(*operands[kind], out=None)

        try:
            wanted = function(*(torch.tensor(x) for x in (1.5, 1, 2, 3, 2)))
        except (TypeError, RuntimeError, IndexError):  # takes no `out`, or other operands
            continue
        assert DTYPE_OF[trace_value(function).program.result_type.dtype] == wanted.dtype


# -- loads -----------------------------------------------------------------------------------------------------------

BY_HEAD = torch.linspace(-1, 1, HEADS)
BY_KEY = torch.arange(KEYS) * 2 - 3
RELATIVE = torch.randn(BATCH, HEADS, QUERIES + KEYS, generator=torch.Generator().manual_seed(1))
TABLE = torch.arange(HEADS * KEYS, dtype=torch.int32).view(HEADS, KEYS)
WHERE_TO = torch.tensor([6, 0, 3, 2, 5, 1, 4])
LOADS = {
    "1-d": lambda s, b, h, q, kv: BY_HEAD[h],
    "several dimensions": lambda s, b, h, q, kv: RELATIVE[b, h, q - kv + KEYS],
    "negative indices wrap": lambda s, b, h, q, kv: BY_KEY[q - 7],
    "negative constant": lambda s, b, h, q, kv: BY_KEY[-1] + q,
    "constant beside a symbol": lambda s, b, h, q, kv: TABLE[-1, kv] + TABLE[h, 2],
    "indirect": lambda s, b, h, q, kv: BY_KEY[WHERE_TO[kv]],
    "indirect twice": lambda s, b, h, q, kv: TABLE[h, WHERE_TO[WHERE_TO[q]]],
    "by a 0-d capture": lambda s, b, h, q, kv: TABLE[h, OFFSET],
    "by int32": lambda s, b, h, q, kv: BY_KEY[q.int()],
    "of booleans": lambda s, b, h, q, kv: (BY_KEY > 0)[kv] & (TABLE[h, kv] > 3),
    "of a view": lambda s, b, h, q, kv: TABLE.T[kv, h] + RELATIVE[0, 1][q],
    "of an expression": lambda s, b, h, q, kv: (BY_KEY + 1)[kv],
}


@pytest.mark.parametrize("function", [pytest.param(f, id=name) for name, f in LOADS.items()])
def test_loads_are_torchs(function: Any) -> None:
    assert_traces_as_torch(function)


def test_an_index_at_a_time_is_all_indices_at_once() -> None:
    assert_traces_as_torch(lambda s, b, h, q, kv: RELATIVE[b][h][q + kv], lambda s, b, h, q, kv: RELATIVE[b, h, q + kv])
    assert_traces_as_torch(lambda s, b, h, q, kv: RELATIVE[b, h][q + kv], lambda s, b, h, q, kv: RELATIVE[b, h, q + kv])
    assert_traces_as_torch(lambda s, b, h, q, kv: TABLE[-1][kv], lambda s, b, h, q, kv: TABLE[-1, kv])


def test_one_tensor_loaded_at_several_places_is_one_capture() -> None:
    call = assert_traces_as_torch(lambda s, b, h, q, kv: BY_KEY[q] == BY_KEY[kv] + BY_KEY[WHERE_TO[q]])
    assert len(call.captures) == 2
    assert call.captures[0] is BY_KEY


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_numpy_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    three, half, two = numpy.int64(3), numpy.float32(0.5), numpy.float64(2.0)
    pairs = [
        (lambda s, b, h, q, kv: q + three, lambda s, b, h, q, kv: q + 3),
        (lambda s, b, h, q, kv: three - q, lambda s, b, h, q, kv: 3 - q),
        (lambda s, b, h, q, kv: half * s, lambda s, b, h, q, kv: 0.5 * s),
        (lambda s, b, h, q, kv: s**two, lambda s, b, h, q, kv: s**2.0),
        (lambda s, b, h, q, kv: two * s, lambda s, b, h, q, kv: 2.0 * s),
        (lambda s, b, h, q, kv: (q > 1) & numpy.bool_(True), lambda s, b, h, q, kv: q > 1),
    ]
    for function, expected in pairs:
        call = assert_traces_as_torch(function, expected)
        assert all(type(number) is int for number in call.ints)
        assert all(type(number) is float for number in call.floats)


LEFT = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", LEFT)
def test_numpy_numbers_stand_on_the_left_of_every_operator(name: str) -> None:
    apply = getattr(operator, name)
    for three in (np.int64(3), np.array(3)):
        assert_traces_as_torch(lambda s, b, h, q, kv, three=three: apply(three, q + 1), lambda s, b, h, q, kv: apply(3, q + 1))


def test_infinities_keep_their_value() -> None:
    assert_traces_as_torch(lambda s, b, h, q, kv: torch.where(q > kv, -math.inf, s) + 1e30)


def test_a_float_in_a_float64_score_keeps_all_its_digits() -> None:
    assert_traces_as_torch(lambda s, b, h, q, kv: s * 0.1 + s.new_full((), 0.1), dtype=torch.float64)


def test_positions_are_64_bit() -> None:
    call = trace_mask(lambda b, h, q, kv: q * q > kv * kv)
    at = {name: torch.tensor([100_000]) for name in ("b", "h")} | {"q": torch.tensor([100_000]), "kv": torch.tensor([99_999])}
    assert bool(evaluate(call, at))
    square = trace_value(lambda s, b, h, q, kv: q * q * q)
    assert value_of(square, at).item() == 100_000**3


def test_functions_apply_in_order() -> None:
    call = trace_score((lambda s, b, h, q, kv: s + 1, lambda s, b, h, q, kv: s * 2))
    assert evaluate(call, grid() | {"score": torch.tensor(3.0)}).item() == 8.0


def test_a_score_is_kept_in_its_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        call = trace_score((lambda s, b, h, q, kv: q - kv,), dtype)
        assert evaluate(call, grid()).dtype == dtype


def test_a_mask_may_be_constant() -> None:
    for function in (lambda b, h, q, kv: True, lambda b, h, q, kv: torch.tensor(True), lambda b, h, q, kv: b.new_ones((), dtype=torch.bool)):
        assert bool(evaluate(trace_mask(function), grid()))


# -- every operation on every pair of dtypes -------------------------------------------------------------------------

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "lt": operator.lt,
    "eq": operator.eq,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "minimum": torch.minimum,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "where": lambda x, y: torch.where(FLAG, x, y),
    "logical_and": torch.logical_and,
}
UNARY = {name: getattr(torch, name) for name in (*FLOAT_FUNCTIONS, "neg", "abs", "floor", "ceil", "round", "trunc", "sign", "relu", "square", "reciprocal")}
UNARY |= {"pos": operator.pos, "positive": torch.positive, "sum": torch.sum}
UNARY |= {"not": operator.invert, "silu": F.silu, "bool": lambda x: x.bool(), "logical_not": torch.logical_not}


def outcome(function: Any, *values: Any) -> torch.dtype | None:
    """The dtype torch gives, or None where it refuses."""
    try:
        return function(*values).dtype
    except (RuntimeError, TypeError):
        return None


@pytest.mark.parametrize("name", BINARY)
def test_dtypes_of_a_binary_operation_are_torchs(name: str) -> None:
    f = BINARY[name]
    dimensioned = [torch.ones(KEYS, dtype=d) for d in DTYPES]
    others: list[Any] = [*dimensioned, *(torch.ones((), dtype=d) for d in DTYPES), True, 2, 2.0]
    for x in dimensioned:
        for y in others:
            if isinstance(y, bool) and name in ("pow", "clamp_min", "clamp_max"):
                continue  # torch's own rules differ by spelling
            for swap in (False, True):
                check_dtype(f, x, y, swap)


def check_dtype(f: Any, x: Tensor, y: Any, swap: bool) -> None:
    wanted = outcome(f, y, x) if swap else outcome(f, x, y)

    def function(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        other = y[kv] if isinstance(y, Tensor) and y.dim() else y
        return f(other, x[kv]) if swap else f(x[kv], other)

    try:
        found = value_of(trace_value(function), grid()).dtype
    except TypeError:  # a TraceError, or torch's own where a number is given for a tensor
        found = None
    if isinstance(y, (int, float)) and wanted is None and f in (torch.minimum, torch.clamp_min, torch.clamp_max, torch.logical_and):
        return  # numbers where torch wants tensors are allowed here
    described = f"{y.dtype}, {y.dim()}-d" if isinstance(y, Tensor) else repr(y)
    assert found == wanted, f"of {x.dtype} and {described}, swapped: {swap}"


@pytest.mark.parametrize("name", UNARY)
def test_dtypes_of_a_unary_operation_are_torchs(name: str) -> None:
    f = UNARY[name]
    for dtype in DTYPES:
        x = torch.ones(KEYS, dtype=dtype)
        try:
            found = value_of(trace_value(lambda s, b, h, q, kv, x=x: f(x[kv])), grid()).dtype
        except TraceError:
            found = None
        assert found == outcome(f, x), f"of {dtype}"
