"""A score by each function of torch: the C++ engine and the blocked one against the reference, gradients included."""

import pytest
import torch

import tilewise as tw
from tests.support.operation_scores import SCORES
from tilewise.engines.cpp import missing

ENGINES = ["blocked", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]


def computed(name: str, engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, 2, 40, 16), generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    out = tw.attention(*inputs, score=SCORES[name], backend=engine)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).to(dtype))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCORES)
def test_agrees_with_the_reference(name: str, engine: str) -> None:
    wanted = computed(name, "reference", torch.float64)
    for dtype, close in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        for found, exact in zip(computed(name, engine, dtype), wanted, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=close, atol=close)
