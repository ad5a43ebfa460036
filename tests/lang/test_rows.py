"""Dot products and sums of captured rows, and sums of single elements, mean what torch makes of the real rows: the same values, the same dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.programs import assert_derives_as_autograd, assert_traces_as_torch, grid, scores, trace_value, value_of
from tilewise.lang import evaluate, trace_score
from tilewise.lang.types import DTYPE_OF

DTYPES = tuple(DTYPE_OF.values())
QUERIES, KEYS, LENGTH = 5, 7, 8
DOTS: dict[str, Callable[..., Any]] = {"dot": torch.dot, "@": lambda x, y: x @ y, "matmul": torch.matmul, "inner": torch.inner}
SUMS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, y: (x * y).sum(),
    "torch.sum": lambda x, y: torch.sum(x * y),
    "over the last dimension": lambda x, y: (x * y).sum(-1),
    "over the first dimension": lambda x, y: torch.sum(x * y, dim=0),
    "over a list of dimensions": lambda x, y: (x * y).sum([0]),
    "over all dimensions": lambda x, y: (x * y).sum(dim=()),
    "without keepdim": lambda x, y: (x * y).sum(-1, keepdim=False),
}


def rows(count: int, dtype: torch.dtype, length: int = LENGTH, seed: int = 0) -> Tensor:
    """Sixteenths, or whole numbers: their sums are exact in float32, their products not in 16 bits, nor in int8."""
    numbers = torch.randint(-255, 256, (count, length), generator=torch.Generator().manual_seed(seed))
    return (numbers / 16).to(dtype) if dtype.is_floating_point else (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def assert_rows_as_torch(f: Callable[..., Any], left: Tensor, right: Tensor) -> None:
    wanted = torch.stack([torch.stack([f(x, y) for y in right]) for x in left])
    found = value_of(trace_value(lambda s, b, h, q, kv: f(left[q], right[kv])), grid(1, 1, len(left), len(right)))
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.expand(1, 1, *wanted.shape)[0, 0], wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spelling", DOTS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_a_dot_product_is_torchs(spelling: str, dtype: torch.dtype) -> None:
    assert_rows_as_torch(DOTS[spelling], rows(QUERIES, dtype), rows(KEYS, dtype, seed=1))


@pytest.mark.parametrize("spelling", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_products_is_torchs(spelling: str, dtype: torch.dtype) -> None:
    assert_rows_as_torch(SUMS[spelling], rows(QUERIES, dtype), rows(KEYS, dtype, seed=1))


@pytest.mark.parametrize("left", DTYPES, ids=str)
def test_a_sum_of_products_of_two_dtypes_is_torchs(left: torch.dtype) -> None:
    for right in DTYPES:
        assert_rows_as_torch(SUMS["sum"], rows(QUERIES, left), rows(KEYS, right, seed=1))


def test_products_of_16_bits_are_rounded_before_a_sum_and_not_before_a_dot_product() -> None:
    left, right = torch.tensor([[300.0, 300.0]]).half(), torch.tensor([[300.0, -300.0]]).half()  # 90000 is infinite in float16
    for f, expected in ((DOTS["dot"], 0.0), (SUMS["sum"], float("nan"))):
        assert_rows_as_torch(f, left, right)
        torch.testing.assert_close(f(left[0], right[0]).item(), expected, equal_nan=True)


def test_sums_of_16_bits_are_accumulated_in_float32() -> None:
    left = torch.ones(1, 256, dtype=torch.bfloat16)
    left[0, 0] = 256.0  # adding ones to it one by one would be lost
    for f in (*DOTS.values(), *SUMS.values()):
        assert_rows_as_torch(f, left, torch.ones_like(left))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
def test_rows_of_no_elements_give_a_zero_to_compute_with(dtype: torch.dtype) -> None:
    left, right = rows(QUERIES, dtype, 0), rows(KEYS, dtype, 0)
    for f in (*DOTS.values(), *SUMS.values()):
        assert_rows_as_torch(f, left, right)
        assert_rows_as_torch(lambda x, y, f=f: f(x, y).sqrt(), left, right)


@pytest.mark.parametrize("f", [pytest.param(f, id=name) for name, f in (DOTS | SUMS).items()])
def test_rows_of_several_dimensions_derive_as_autograd(f: Callable[..., Any]) -> None:
    left, right = (torch.randn(2, 3, n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (QUERIES, KEYS))
    call = trace_score((lambda s, b, h, q, kv: s * f(left[b, h, q], right[b, h][kv]),), torch.float64)
    inputs = grid() | {"score": scores(torch.float64)}
    torch.testing.assert_close(evaluate(call, inputs), inputs["score"] * torch.einsum("bhqd,bhkd->bhqk", left, right))
    assert_derives_as_autograd(call, inputs)


# -- the sum of a single element -------------------------------------------------------------------------------------

ELEMENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "booleans are counted": (lambda s, b, h, q, kv: (q > kv).sum() + (q > 0).sum(), lambda s, b, h, q, kv: (q > kv).long() + (q > 0).long()),
    "small integers": (lambda s, b, h, q, kv: q.char().sum() * 100, lambda s, b, h, q, kv: q * 100),
    "floats": (lambda s, b, h, q, kv: s.half().sum(), lambda s, b, h, q, kv: s.half()),
    "function": (lambda s, b, h, q, kv: torch.sum(q > kv), lambda s, b, h, q, kv: (q > kv).long()),
    "dimension 0": (lambda s, b, h, q, kv: s.sum(0), lambda s, b, h, q, kv: s),
    "dimension -1": (lambda s, b, h, q, kv: torch.sum(s, dim=-1), lambda s, b, h, q, kv: s),
    "no dimension": (lambda s, b, h, q, kv: s.sum(None) + s.sum(()) + s.sum([]), lambda s, b, h, q, kv: s + s + s),
    "a list of dimensions": (lambda s, b, h, q, kv: s.sum([-1]) + s.sum((0,)), lambda s, b, h, q, kv: s + s),
    "keepdim": (lambda s, b, h, q, kv: s.sum(0, True) + s.sum(-1, keepdim=True), lambda s, b, h, q, kv: s + s),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_sum_of_an_element_is_torchs(name: str) -> None:
    function, expected = ELEMENTS[name]
    assert_traces_as_torch(function, expected)
    real = [torch.tensor(x) for x in (1.5, 1, 2, 3, 2)]
    assert torch.equal(function(*real), expected(*real))
    assert function(*real).dtype == expected(*real).dtype
