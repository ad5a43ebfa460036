"""A score by each function of torch, and masks and scores with rows, in Triton's interpreter, gradients included."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.contributing import check_example
from tests.support.operation_scores import SCORES
from tests.support.row_mods import MODS


def computed(name: str, engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn((1, 1, 24, 16), generator=generator).half().to(dtype).requires_grad_() for _ in range(3)]
    out = tw.attention(*inputs, score=SCORES[name], backend=engine)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.randn(out.shape, generator=generator).half().to(dtype))


@pytest.mark.parametrize("name", SCORES)
def test_agrees_with_the_reference(name: str) -> None:
    wanted = computed(name, "reference", torch.float64)
    for dtype, close in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
        for found, exact in zip(computed(name, "triton", dtype), wanted, strict=True):
            assert float((found.double() - exact).norm() / exact.norm()) < close


def with_rows(name: str, engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    mod, generator = MODS[name](dtype), torch.Generator().manual_seed(0)
    inputs = [torch.randn((2, 2, 40, 16), generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    out = tw.attention(*inputs, mask=mod.mask, score=mod.score, backend=engine)
    return out.detach(), *torch.autograd.grad(out, [*inputs, *mod.learned], torch.randn(out.shape, generator=generator).to(dtype))


@pytest.mark.parametrize("name", MODS)
def test_rows_agree_with_the_reference(name: str) -> None:
    for found, exact in zip(with_rows(name, "triton", torch.float32), with_rows(name, "reference", torch.float64), strict=True):
        assert float((found.double() - exact).norm() / exact.norm()) < 2e-5


def test_numbers_beside_16_bits_are_rounded_where_torch_rounds_them() -> None:
    table = (torch.arange(40) * 0.3).half()
    tenth = torch.tensor([0.1] * 40).half()

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (table[kv] % 0.3).float() + torch.fmod(table[q], 0.7).float() + (tenth[kv] == 0.1).float() * q

    q, k, v = torch.randn(3, 1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(tw.attention(q, k, v, score=score, backend="triton"), tw.attention(q, k, v, score=score, backend="reference"))


def test_the_example_of_contributing() -> None:
    check_example("triton")
