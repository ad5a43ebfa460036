"""Masks and scores with rows that are reduced, on every engine of the CPU, against plain torch and torch's own flex_attention."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import tilewise as tw
from tests.support.brute import check_map
from tests.support.row_mods import MODS, Mod
from tilewise.engines.cpp import missing

ENGINES = ["reference", "blocked", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]


def inputs() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 40, 16, generator=random, dtype=torch.float64).requires_grad_() for _ in range(3)]


def computed(attend: Callable[..., Tensor], learned: list[Tensor]) -> tuple[Tensor, ...]:
    given = inputs()
    out = attend(*given)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return out.detach(), *torch.autograd.grad(out, [*given, *learned], weights)


def plainly(mod: Mod) -> Callable[..., Tensor]:
    """Plain torch, the mods called with single indices by vmap."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        at = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
        if mod.score is not None:
            scores = torch.vmap(mod.score)(scores.flatten(), *(i.flatten() for i in at)).view(scores.shape)
        if mod.mask is not None:
            scores = scores.masked_fill(~torch.vmap(mod.mask)(*(i.flatten() for i in at)).view(scores.shape), -float("inf"))
        return scores.softmax(-1) @ v

    return attend


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODS)
def test_agrees_with_plain_torch(name: str, engine: str) -> None:
    mod = MODS[name](torch.float64)
    wanted = computed(plainly(mod), mod.learned)
    found = computed(lambda q, k, v: tw.attention(q, k, v, mask=mod.mask, score=mod.score, backend=engine), mod.learned)
    for x, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["lists of keys", "lists of blocks", "named keys"])
def test_maps_are_exact(name: str) -> None:
    mask = MODS[name](torch.float64).mask
    assert mask is not None
    dense = torch.vmap(mask)(*(i.flatten() for i in torch.meshgrid(*(torch.arange(n) for n in (2, 2, 40, 40)), indexing="ij"))).view(2, 2, 40, 40)
    check_map(tw.tile_map(mask, batch=2, heads=2, q_len=40, kv_len=40, tile=(8, 8)), dense)


def test_as_torchs_drop_in_and_compiled() -> None:
    score = MODS["distances"](torch.float32).score
    q, k, v = (t.detach().float() for t in inputs())
    wanted = torchs.flex_attention(q, k, v, score)
    torch.testing.assert_close(tw.flex.flex_attention(q, k, v, score), wanted, rtol=1e-4, atol=1e-5)
    compiled = torch.compile(lambda q, k, v: tw.flex.flex_attention(q, k, v, score), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), wanted, rtol=1e-4, atol=1e-5)


def test_every_form_of_a_row_also_compiled() -> None:
    """Under torch.compile a tensor stands for the row: its shape, its parts and both results of max(dim) must be the row's."""
    table = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = table[i] - table[j]
        largest, at = row.abs().max(-1)
        return s - largest / (row.size(-1) + row.dim()) + 0.1 * at + row[0] * row[1:].mean(-1)

    q, k, v = (t.detach().float() for t in inputs())
    wanted = plainly(Mod(None, score, []))(q, k, v)
    for attend in (tw.attention, torch.compile(tw.attention, backend="eager", fullgraph=True)):
        torch.testing.assert_close(attend(q, k, v, score=score), wanted, rtol=1e-4, atol=1e-5)
