"""Masks and scores that use captured rows, with what they learn: torch's own tests and block-sparse attention have such."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 40


class Mod(NamedTuple):
    mask: Callable[..., Any] | None
    score: Callable[..., Any] | None
    learned: list[Tensor]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers that every dtype holds: the largest of a row is the same one in all."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).bfloat16().to(dtype)


def lists_of_keys(dtype: torch.dtype) -> Mod:
    lists = torch.randint(0, LENGTH, (2, 2, LENGTH, 5), generator=torch.Generator().manual_seed(2))
    return Mod(lambda b, h, q, kv: (lists[b, h, q] == kv.unsqueeze(-1)).any(-1), None, [])


def lists_of_blocks(dtype: torch.dtype) -> Mod:
    lists = torch.randint(0, 5, (2, 2, 5, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    return Mod(lambda b, h, q, kv: ((lists[b, h, q // 8] == kv // 8).any() & (q >= kv)) | (q == kv), None, [])


def named_keys(dtype: torch.dtype) -> Mod:
    """A captured tensor that is not indexed at all."""
    seen = torch.tensor([0, 7, 33])
    return Mod(lambda b, h, q, kv: ((kv - seen).abs().amin(-1) < 2) | (q == kv), None, [])


def distances(dtype: torch.dtype) -> Mod:
    means, scale = drawn(LENGTH, 3, dtype=dtype), torch.tensor([1.5, 0.5], dtype=dtype)
    return Mod(None, lambda s, b, h, q, kv: torch.exp(-((means[q] - means[kv]).pow(2).sum(-1) + 0.1).sqrt() / scale[h]) * s, [])


def learned_rows(dtype: torch.dtype) -> Mod:
    left, right = drawn(LENGTH, 4, dtype=dtype).requires_grad_(), drawn(2, LENGTH, 4, dtype=dtype).requires_grad_()
    return Mod(None, lambda s, b, h, q, kv: s + torch.tanh(left[q] * s.unsqueeze(-1) - right[h, kv]).mean(-1) + left[kv].amax(-1), [left, right])


MODS: dict[str, Callable[[torch.dtype], Mod]] = {
    "lists of keys": lists_of_keys,
    "lists of blocks": lists_of_blocks,
    "named keys": named_keys,
    "distances": distances,
    "learned rows": learned_rows,
}
