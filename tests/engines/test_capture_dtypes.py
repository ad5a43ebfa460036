"""Captures of other dtypes than the problem's: values as torch computes them, derivatives in the scores' type, each gradient rounded once."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.engines.test_faults import DEVICE, engines
from tilewise.lang import derive, trace_score
from tilewise.lang.types import PROMOTED

HALF = (torch.float16, torch.bfloat16)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")


def computed(engine: str, dtype: torch.dtype, captured: torch.dtype, size: float, exactly: bool = False) -> list[Tensor]:
    """Output and gradients of s * a[h] * c[kv]; the same numbers in float64 for the truth."""
    stored = [numbers(1, 2, 20, 16, seed=n).to(dtype) for n in range(4)] + [(numbers(n, seed=n).abs() * size + size / 2).to(captured) for n in (2, 20)]
    wide = [(t.double() if exactly else t).to(DEVICE) for t in stored]
    query, key, value, gain, power = leaves = [t.requires_grad_() for n, t in enumerate(wide) if n != 3]
    out = tw.attention(query, key, value, score=lambda s, b, h, i, j: s * gain[h] * power[j], scale=0.25 / size**2, backend=engine)
    return [out.detach(), *torch.autograd.grad(out, leaves, wide[3])]


@engines
@pytest.mark.parametrize("size", [1, 300])
@pytest.mark.parametrize("captured", [*HALF, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_have_the_scores_digits_and_range(engine: str, dtype: torch.dtype, captured: torch.dtype, size: int) -> None:
    """300 * 300 is beyond float16: a slope of that size is not."""
    if engine == "triton" and dtype == torch.float64:
        pytest.skip("the Triton engine has no float64")
    truth = computed("reference", dtype, captured, size, exactly=True)
    for found, exact in zip(computed(engine, dtype, captured, size), truth, strict=True):
        narrower = max(torch.finfo(found.dtype).eps, torch.finfo(dtype).eps)
        error = float((found.double() - exact).norm() / exact.norm())
        assert error < (narrower if found.dtype in HALF else 50 * narrower), f"{error:.3g}"


@engines
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_float64_captures_in_narrower_problems(engine: str, dtype: torch.dtype) -> None:
    query, key, value = (numbers(1, 2, 20, 16, seed=n).to(DEVICE, dtype).requires_grad_() for n in range(3))
    bias, gain = numbers(20, seed=4).to(DEVICE).requires_grad_(), numbers(2, seed=5).to(DEVICE).requires_grad_()
    out = tw.attention(query, key, value, score=lambda s, b, h, i, j: torch.sin(s * gain[h]) + bias[j] * gain[h], backend=engine)
    found = torch.autograd.grad(out.sum() + (out * out).sum(), [query, key, value, bias, gain])
    assert [t.dtype for t in found] == [dtype] * 3 + [torch.float64] * 2 and all(t.isfinite().all() for t in found)


STEPS: dict[str, Any] = {
    "a product": lambda a, c: lambda s, b, h, i, j: s * a[i] * c[j],
    "of captures alone": lambda a, c: lambda s, b, h, i, j: s + a[i] * c[j],
    "a power": lambda a, c: lambda s, b, h, i, j: s * 2 ** a[i] + a[j] ** c[i],
    "functions": lambda a, c: lambda s, b, h, i, j: s + torch.exp(a[i]) * torch.tanh(c[j]) / torch.sqrt(a[j].abs() + 1),
    "a cast": lambda a, c: lambda s, b, h, i, j: (s.half() * a[i]).float() * c[j].double(),
    "extremes": lambda a, c: lambda s, b, h, i, j: torch.maximum(a[i], c[j]) * s + a[i].clamp(-1, 1),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("captured", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_derivative_is_narrower_than_the_score(step: str, dtype: torch.dtype, captured: torch.dtype) -> None:
    call = trace_score((STEPS[step](torch.ones(5, dtype=captured), torch.ones(5, dtype=captured)),), dtype)
    derivative = derive(call.program, frozenset({0, 1}))
    inner = call.program.result_type.dtype
    for at in (derivative.program.results[k] for k in (0, *[site.gradient for site in derivative.sites])):
        found = derivative.program.instructions[at].type
        assert found.level == 0 or PROMOTED[found.dtype, inner] == found.dtype
