"""Selective activation checkpointing hands out the forward's results by the order of operations: what we remember between calls must not be among them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tilewise as tw
from tilewise import flex, functional, masks

N = 64


def read_lists(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return flex.flex_attention(q, k, v, block_mask=mask) * (mask.kv_num_blocks.sum() > 0)


NEW: dict[str, Callable[[], Callable[..., Tensor]]] = {  # what no call has seen yet
    "boolean": lambda: partial(functional.scaled_dot_product_attention, attn_mask=torch.rand(N, N) < 0.8),
    "padding": lambda: partial(functional.scaled_dot_product_attention, attn_mask=(torch.arange(N) < 40)[None, None, None]),
    "additive": lambda: partial(functional.scaled_dot_product_attention, attn_mask=torch.randn(N, N)),
    "forbidding": lambda: partial(functional.scaled_dot_product_attention, attn_mask=torch.zeros(N, N).masked_fill(torch.rand(N, N) < 0.3, -torch.inf)),
    "document": lambda: partial(tw.attention, mask=masks.document(torch.randint(0, 3, (N,)))),
    "grid": lambda: partial(tw.attention, mask=masks.neighborhood((8, 8), 3)),
    "lists": lambda: partial(read_lists, mask=flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, N, N, device="cpu", BLOCK_SIZE=16)),
}


@pytest.mark.parametrize("engine", ["auto", "reference", "blocked", "cpp"])
@pytest.mark.parametrize("name", NEW)
def test_everything_saved(name: str, engine: str) -> None:
    torch.manual_seed(0)
    attend = NEW[name]()
    inputs = [torch.randn(1, 2, N, 16, requires_grad=True) for _ in range(3)]

    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # with the operations that reading a mask takes, too
        out = attend(q * 1.5, k, v)
        keep = torch.where((out > 0).any(-1, keepdim=True), 2.0, 3.0) * (out.sum(-1, keepdim=True) == 0).logical_not()
        return (out * keep * (out.detach() <= 1)).exp()

    save = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    with tw.attention_backend(engine):
        found = torch.autograd.grad(checkpoint(region, *inputs, use_reentrant=False, context_fn=save).sum(), inputs)
        expected = torch.autograd.grad(region(*inputs).sum(), inputs)
    torch.testing.assert_close(found, expected)
