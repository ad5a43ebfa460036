"""Deterministic gradients of captured tensors: the same cases, the same error rule. That they repeat bit by bit only a GPU can tell."""

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from tests.support.cases import CASES, Case
from tests.support.error_rule import check

LEARNED = ("several loads of one tensor", "indexed by a load", "0-d capture", "learned, rows with nothing", "learned, gqa, dropout")
REPEATABLE = [
    replace(case, name=f"{case.name}, deterministic", options={**case.options, "deterministic": True}, q_len=40, heads=2, kv_heads=1)
    for case in CASES
    if case.name in LEARNED
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", REPEATABLE, ids=str)
def test_the_error_rule_holds(case: Case, dtype: torch.dtype) -> None:
    check(case, "triton", "cpu", dtype)


def gradient(bias: torch.Tensor, weights: torch.Tensor, deterministic: bool) -> torch.Tensor:
    """Of a table that every distance reads from; `weights` are the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 10, 16, generator=generator).unbind()
    out = tw.attention(query, key, value, score=lambda s, b, h, q, kv: s + bias[h, (q - kv) % 7], deterministic=deterministic, backend="triton")
    return torch.autograd.grad(out, bias, weights)[0]


@pytest.mark.parametrize("size", [1e-38, 1e30, 0.0])
def test_shares_of_any_size_are_added_to_the_last_digits(size: float) -> None:
    bias = torch.randn(2, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weights = torch.randn(1, 2, 10, 16, generator=torch.Generator().manual_seed(2)) * size
    wanted = gradient(bias, weights, deterministic=False)
    torch.testing.assert_close(gradient(bias, weights, deterministic=True), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))


def test_inf_and_nan_stay_where_they_are() -> None:
    bias = torch.zeros(2, 7, requires_grad=True)
    weights = torch.ones(1, 2, 10, 16)
    weights[0, 0, 3] = torch.inf
    weights[0, 1, 5] = torch.nan
    found, wanted = (gradient(bias, weights, deterministic) for deterministic in (True, False))
    assert not wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
