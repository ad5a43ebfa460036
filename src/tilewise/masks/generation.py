"""Masks of models that write several tokens at once: block diffusion, and trees of speculative decoding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks.mask import Mask
from tilewise.named import check_whole, covers, named


@named
def block_diffusion(length: int, block: int) -> Mask:
    """Training mask of block diffusion over 2 * length tokens: noised copies first, clean tokens after.

    A noised token sees its own noised block and the clean blocks before; a clean token sees clean blocks up to its own.
    """
    check_whole("block_diffusion", length=length, block=block)
    if length < 1 or block < 1:
        raise InputError(f"block_diffusion takes a length and a block of at least 1, got {length}, {block}")

    def diffusion(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_noised, kv_noised = q < length, kv < length
        q_block, kv_block = (q % length) // block, (kv % length) // block
        own = (q_block == kv_block) & (q_noised == kv_noised)
        before = (q_block > kv_block) & q_noised & ~kv_noised
        clean = (q_block >= kv_block) & ~q_noised & ~kv_noised
        return own | before | clean

    return Mask(diffusion, "block_diffusion", length, block, covers=covers("block_diffusion", q=2 * length, kv=2 * length))


@named
def tree(parents: Sequence[int] | Tensor, prefix: int = 0) -> Mask:
    """Speculative decoding: node q of a tree sees the first `prefix` keys, its ancestors and itself.

    `parents[n]` is node n's parent, which comes before it; a root names -1.
    """
    if isinstance(parents, Tensor):
        return tree(parents.tolist(), prefix)
    count = len(parents)
    check_whole("tree", prefix=prefix, **{f"parents[{node}]": parent for node, parent in enumerate(parents)})
    if prefix < 0:
        raise InputError(f"tree takes a prefix of at least 0, got {prefix}")
    ancestors = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InputError(f"tree: node {node} has parent {parent}; a parent comes before its children, and a root names -1")
        if parent >= 0:
            ancestors[node] |= ancestors[parent]

    def within(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv < prefix) | ((kv >= prefix) & ancestors[q, (kv - prefix).clamp(0, count - 1)])

    return Mask(within, "tree", f"{count} nodes", f"prefix {prefix}", covers=covers("tree", q=count, kv=prefix + count))
