"""Rows and float8 on a GPU: what the interpreter cannot tell."""

import pytest
import torch

import tilewise as tw
from tests.support.row_mods import MODS, Mod

ENGINES = ["triton", "flex"]


def computed(mod: Mod, engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn((2, 2, 40, 64), generator=random).bfloat16().to("cuda", dtype).requires_grad_() for _ in range(3)]
    out = tw.attention(*inputs, mask=mod.mask, score=mod.score, backend=engine)
    return out.detach(), *torch.autograd.grad(out, [*inputs, *mod.learned], torch.randn(out.shape, generator=random).bfloat16().to("cuda", dtype))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODS)
def test_rows_agree_with_the_reference(name: str, engine: str) -> None:
    """What is captured stays on the CPU, and follows the query."""
    exact = computed(MODS[name](torch.float64), "reference", torch.float64)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for found, wanted in zip(computed(MODS[name](dtype), engine, dtype), exact, strict=True):
            assert float((found.double() - wanted).norm() / wanted.norm()) < close


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_keys_and_values(narrow: torch.dtype, engine: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 256, 64, generator=torch.Generator().manual_seed(0)).cuda()
    for dtype in (torch.bfloat16, torch.float16):
        keys, values = k.to(narrow), v.to(narrow)
        found = tw.attention(q.to(dtype), keys, values, is_causal=True, backend=engine)
        assert found.dtype == dtype
        assert torch.equal(found, tw.attention(q.to(dtype), keys.to(dtype), values.to(dtype), is_causal=True, backend=engine))
