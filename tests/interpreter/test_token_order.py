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
    monkeypatch.setattr(Engine, "min_keys_spared", -(10**9))
    inputs, mask = [torch.randn((1, 2, prod(shape), 16), requires_grad=True) for _ in range(3)], masks.neighborhood(shape, window)
    assert tw.explain(*inputs, mask=mask, backend="triton").order.startswith("by patches")
    found: list[Any] = []
    for backend in ("triton", "reference"):
        out, lse = tw.attention(*inputs, mask=mask, score=scores.distance_decay(0.01), return_lse=True, backend=backend)
        found.append((out, lse, *torch.autograd.grad(out.sin().sum() + lse.sum(), inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_then_evaluation_of_keys_that_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients every head has its copy, without them one serves all: kernels made ready for one are not started for the other."""
    monkeypatch.setattr(Engine, "min_keys_spared", -(10**9))
    query, key, value = (torch.randn((2, heads, 96, 16), requires_grad=True) for heads in (2, 1, 1))
    inputs, mask = (query, key.expand(2, 2, -1, -1), value.expand(2, 2, -1, -1)), masks.neighborhood((8, 12), 5)
    wanted = tw.attention(*inputs, mask=mask, backend="reference")
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(tw.attention(*inputs, mask=mask, backend="triton"), wanted, rtol=1e-4, atol=1e-5)
