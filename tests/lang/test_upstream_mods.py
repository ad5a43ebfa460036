"""Functions as users of torch's FlexAttention write them trace unchanged and mean what torch makes of them.

The reference is torch's own: the function under vmap on real index tensors.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from tests.support.programs import assert_derives_as_autograd, grid
from tests.support.upstream_mods import LEARNED, MASKS, SCORES, B, H, S, softcap_approx
from tilewise.lang import evaluate, trace_mask, trace_score


def dense_mask(mask: Callable[..., Any]) -> Tensor:
    return create_mask(mask, B, H, S, S, device="cpu")


def dense_scores(score_mod: Callable[..., Any], scores: Tensor) -> Tensor:
    """vmap over kv, q, h and b, as torch does it."""
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, None, None)):
        score_mod = torch.vmap(score_mod, in_dims=dims)
    return score_mod(scores, *(torch.arange(n) for n in (B, H, S, S)))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_create_mask_gives(name: str) -> None:
    expected = dense_mask(MASKS[name])
    found = torch.as_tensor(evaluate(trace_mask(MASKS[name]), grid(B, H, S, S)))
    assert torch.equal(found.expand_as(expected), expected)
    assert name == "noop" or 0 < expected.sum() < expected.numel()


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_what_vmap_gives(name: str) -> None:
    scores = torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(1)) * 3
    expected = dense_scores(SCORES[name], scores)
    found = evaluate(trace_score((SCORES[name],)), grid(B, H, S, S) | {"score": scores})
    torch.testing.assert_close(torch.as_tensor(found).expand_as(expected), expected)


@pytest.mark.parametrize("name", LEARNED)
def test_a_learned_score_is_what_vmap_gives_and_derives_as_autograd(name: str) -> None:
    scores = torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    call = trace_score((LEARNED[name],), torch.float64)
    inputs = grid(B, H, S, S) | {"score": scores}
    expected = dense_scores(LEARNED[name], scores)
    found = torch.as_tensor(evaluate(call, inputs))
    torch.testing.assert_close(found.expand_as(expected), expected, check_dtype=True)
    assert all(t.requires_grad for t in call.captures if t.is_floating_point())
    assert_derives_as_autograd(call, inputs)


def test_the_approximate_soft_cap_derives_as_the_exact_one() -> None:
    call = trace_score((softcap_approx,))
    assert call.program == trace_score((lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),)).program
