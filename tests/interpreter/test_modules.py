"""Masks and scores whose tensors are replaced, in Triton's interpreter: prepared launches hold addresses, and tile schedules made from contents."""

from typing import Any

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise import masks

TOKENS = 40
X = torch.randn(1, 1, TOKENS, 16, generator=torch.Generator().manual_seed(0))


def check(mask: Any, score: Any = None) -> None:
    found, wanted = (tw.attention(X, X, X, mask=mask, score=score, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def documents(length: int) -> Tensor:
    return torch.arange(1 << 15) // length  # large enough for the allocator to give the same address soon


def test_a_mask_reads_again_what_it_read() -> None:
    class Holder:
        doc = documents(TOKENS)

        def same(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return self.doc[q] == self.doc[kv]

    holder = Holder()
    mask = masks.causal & holder.same
    for length in (TOKENS, 7):
        holder.doc = documents(length)
        check(mask)


def test_memory_that_is_used_again_is_looked_at_again() -> None:
    ids, held = documents(3), nn.Parameter(documents(3), requires_grad=False)
    for length in (8, 13, 20):
        ids.data = documents(length)
        check(lambda b, h, q, kv: ids[q] == ids[kv])
    for length in (8, 13):
        torch.utils.swap_tensors(held, nn.Parameter(documents(length), requires_grad=False))
        check(lambda b, h, q, kv: held[q] == held[kv])


def test_a_table_that_is_swapped() -> None:
    bias = tw.nn.RelativeBias(1, 4)
    for _ in range(2):
        torch.utils.swap_tensors(bias.table, nn.Parameter(torch.randn(1, 9)))
        check(None, bias())
