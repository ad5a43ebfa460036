"""Masks of documents that are packed into one sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks.checks import document_lengths, integers
from tilewise.masks.mask import Mask
from tilewise.named import covers, named


@named
def document(ids: Tensor | None = None, kv_ids: Tensor | None = None, *, lengths: Sequence[int] | Tensor | None = None) -> Mask:
    """Tokens attend only within their own document.

    `ids` has one id per token, (S,) or (B, S); `kv_ids` those of the keys where they differ. Or give the documents'
    `lengths`, in the order in which they are packed.
    """
    if (ids is None) == (lengths is None):
        raise InputError("document takes either ids or lengths")
    if ids is None:
        assert lengths is not None
        return document(ids_of_lengths(lengths), kv_ids)
    q_ids = integers(ids, (1, 2), "document")
    k_ids = q_ids if kv_ids is None else integers(kv_ids, (1, 2), "document")
    if q_ids.dim() != k_ids.dim():
        raise InputError(f"document ids of shape {tuple(q_ids.shape)} and kv_ids of shape {tuple(k_ids.shape)} must have the same number of dimensions")
    if q_ids.dim() == 2:
        if q_ids.shape[0] != k_ids.shape[0]:
            raise InputError(f"document ids of shape {tuple(q_ids.shape)} and kv_ids of shape {tuple(k_ids.shape)} must be of one batch size")
        known = covers("document", b=q_ids.shape[0], q=q_ids.shape[1], kv=k_ids.shape[1])
        return Mask(lambda b, h, q, kv: q_ids[b, q] == k_ids[b, kv], "document", covers=known)
    return Mask(lambda b, h, q, kv: q_ids[q] == k_ids[kv], "document", covers=covers("document", q=q_ids.shape[0], kv=k_ids.shape[0]))


def ids_of_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """(n,) lengths -> (sum of lengths,) ids 0, 0, ..., 1, 1, ..."""
    counts = document_lengths(lengths)
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


@named
def shared_prefix(lengths: Sequence[int] | Tensor, prefix_of: Sequence[int] | Tensor) -> Mask:
    """Packed documents of which several continue one prompt: each is causal and also sees the whole of its prefix.

    `prefix_of[d]` is the document that document d continues; a prompt names itself.
    """
    counts, prefix = document_lengths(lengths), integers(torch.as_tensor(prefix_of), 1, "shared_prefix")
    if counts.shape != prefix.shape:
        raise InputError(f"shared_prefix takes one prefix per document, got {len(counts)} lengths and {len(prefix)} prefixes")
    if bool(((prefix < 0) | (prefix >= len(counts))).any()):
        raise InputError(f"shared_prefix: prefixes are documents from 0 to {len(counts) - 1}, got {prefix.tolist()}")
    ids = ids_of_lengths(counts)
    starts = torch.cumsum(counts, 0) - counts
    prefix_start = starts[prefix[ids]]
    return _after_prefix(len(counts), starts[ids], prefix_start, prefix_start + counts[prefix[ids]])


@named
def _after_prefix(documents: int, start: Tensor, prefix_start: Tensor, prefix_end: Tensor) -> Mask:
    """shared_prefix by where each token's document starts, and where its prefix starts and ends."""

    def shared(b: Any, h: Any, q: Any, kv: Any) -> Any:
        own = (kv >= start[q]) & (q >= kv)
        prompt = (kv >= prefix_start[q]) & (kv < prefix_end[q]) & (prefix_start[q] != start[q])
        return own | prompt

    return Mask(shared, "shared_prefix", f"{documents} documents", covers=covers("shared_prefix", q=start.shape[0], kv=start.shape[0]))
