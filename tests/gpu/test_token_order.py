"""Tokens in patches on a GPU."""

from math import prod
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.gpu.test_fused import fused
from tilewise import masks
from tilewise.core.map_cache import maps
from tilewise.engines.base import Engine
from tilewise.engines.gluon import GluonEngine
from tilewise.engines.gpu.kernel_cache import Counts


@pytest.fixture(autouse=True)
def eager_for_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GluonEngine, "min_keys_spared", Engine.min_keys_spared)


def both_passes(engine: str, shape: tuple[int, ...], mask: Any, dtype: torch.dtype, heads: int = 2, dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn((1, heads, prod(shape), dim), device="cuda", generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    out, lse = tw.attention(*inputs, mask=mask, backend=engine, return_lse=True)
    return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)]


@fused
@pytest.mark.parametrize(("shape", "window"), [((128, 128), 13), ((120, 130), 13), ((16, 32, 32), 7), ((9, 30, 44), 7)], ids=str)
def test_patches_equal_rows(shape: tuple[int, ...], window: int, engine: str) -> None:
    near = masks.neighborhood(shape, window)
    q = torch.empty((1, 2, prod(shape), 64), device="cuda", dtype=torch.bfloat16)
    assert tw.explain(q, q, q, mask=near, backend=engine).order.startswith("by patches")
    found, rows = (both_passes(engine, shape, mask, torch.bfloat16) for mask in (near, masks.as_mask(near.function)))
    for a, b in zip(found, rows, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@fused
def test_other_grids_and_windows_compile_nothing(engine: str) -> None:
    both_passes(engine, (128, 128), masks.neighborhood((128, 128), 13), torch.bfloat16)
    before = Counts.built + Counts.loaded
    for shape, window in (((128, 128), 15), ((96, 160), 13)):
        both_passes(engine, shape, masks.neighborhood(shape, window), torch.bfloat16)
    assert Counts.built + Counts.loaded == before
    built = maps.built
    both_passes(engine, (128, 128), masks.neighborhood((128, 128), 13), torch.bfloat16)
    assert maps.built == built
