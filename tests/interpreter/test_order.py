"""Tokens in patches on the Triton engine."""

from math import prod
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines.base import Engine


@pytest.mark.parametrize(("shape", "window"), [((8, 20), 5), ((11, 9), 5), ((4, 5, 6), 3)], ids=str)
def test_equals_the_reference(shape: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "copies_worth", -(10**9))
    inputs, mask = [torch.randn((1, 2, prod(shape), 16), requires_grad=True) for _ in range(3)], masks.neighborhood(shape, window)
    assert tw.explain(*inputs, mask=mask, backend="triton").order.startswith("by patches")
    found: list[Any] = []
    for backend in ("triton", "reference"):
        out, lse = tw.attention(*inputs, mask=mask, score=scores.distance_decay(0.01), return_lse=True, backend=backend)
        found.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
