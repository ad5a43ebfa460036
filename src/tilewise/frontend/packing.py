"""Packed (varlen) batches: sequences of different lengths, end to end, without padding.

A packed batch is one long sequence in which tokens attend only within their own sequence. The user's mask and score see
positions inside each sequence, and the sequence's number as b. Tile maps skip everything between sequences, so engines need
not know about packing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks import Mask
from tilewise.memory import check_dense
from tilewise.named import AXES, Named
from tilewise.scores import Score, ScoreFunction, Sinks, as_scores


@dataclass(frozen=True, eq=False)
class Packed:
    """(tokens, heads, head dim) tensors and where each sequence begins: offsets[n] .. offsets[n + 1]."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor


def sequence_and_position(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For every token, the number of its sequence (-1 after the last) and its position inside it."""
    at = torch.arange(tokens, device=offsets.device)
    number = torch.searchsorted(offsets.long(), at, right=True) - 1
    inside = number < offsets.shape[0] - 1
    start = offsets.long()[number.clamp(min=0)]
    return torch.where(inside, number, -1), at - start


def check_offsets(offsets: Tensor, tokens: int, name: str) -> None:
    """Raises unless offsets start at 0, never decrease and end within the tokens; others would read tokens of other sequences."""
    if not isinstance(offsets, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(offsets).__name__}; torch.tensor({name}, dtype=torch.int32) makes one of a list")
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} must be a 1-D int32 or int64 tensor with one more entry than sequences, got {offsets.dtype} of shape {tuple(offsets.shape)}")
    check_dense(offsets, name)
    if offsets.is_meta:
        raise InputError(f"{name} is on the meta device, so it has no contents; the lengths of sequences must be known")
    if torch.compiler.is_compiling():
        return  # contents are unknown while compiling; sequence_and_position stays within the tokens in any case
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last > tokens or bool((offsets[1:] < offsets[:-1]).any()):
        raise InputError(f"{name} must start at 0, never decrease and end at most at the {tokens} tokens given, got {_shown(offsets)}")


def _shown(offsets: Tensor) -> str:
    listed = offsets.tolist()
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, ..., {', '.join(map(str, listed[-3:]))}]"


def within_sequences(packed: Packed, mask: Any, score: ScoreFunction | Sequence[ScoreFunction] | None, is_causal: bool) -> tuple[Mask, list[Any]]:
    """The user's mask and scores, rewritten for the packed sequence."""
    q_sequence, q_position = sequence_and_position(packed.q_offsets, packed.query.shape[0])
    kv_sequence, kv_position = sequence_and_position(packed.kv_offsets, packed.key.shape[0])
    if mask is not None and not callable(mask):
        raise InputError(
            f"packed sequences take a mask function or a mask of tilewise.masks, which see positions inside each sequence; got {type(mask).__name__}"
        )

    _check_sizes([mask, *as_scores(score)], packed)

    def same_sequence(b: Any, h: Any, q: Any, kv: Any) -> Any:
        number, i, j = q_sequence[q], q_position[q], kv_position[kv]
        allowed = (number == kv_sequence[kv]) & (number >= 0)
        if is_causal:
            allowed = allowed & (i >= j)
        return allowed if mask is None else allowed & mask(number.clamp(min=0), h, i, j)

    def within_sequence(function: ScoreFunction) -> Score:
        def rebased(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return function(s, q_sequence[q].clamp(min=0), h, q_position[q], kv_position[kv])

        return Score(rebased, getattr(function, "name", "score"))

    label = "packed" if mask is None else f"packed {getattr(mask, 'name', 'mask')}"
    return Mask(same_sequence, label), [s if isinstance(s, Sinks) else within_sequence(s) for s in as_scores(score)]


def _check_sizes(functions: list[Any], packed: Packed) -> None:
    """What is made for certain sizes has as many heads and sequences, and covers the longest of them: shorter ones are packed with it, that is the point."""
    for function in functions:
        if not isinstance(function, Named):
            continue
        function.check_sizes({"h": packed.query.shape[1], "b": packed.q_offsets.shape[0] - 1})
        for what, axis, size in function.covers:
            offsets = {"q": packed.q_offsets, "kv": packed.kv_offsets}.get(axis)
            if offsets is None or len(offsets) < 2 or torch.compiler.is_compiling():  # contents are unknown while compiling
                continue
            longest = int(offsets.diff().max())
            if longest > size:
                raise InputError(f"{what} is made for sequences of up to {size} {AXES[axis]}, the longest here has {longest}: make it for as many")


def unnest(query: Tensor, key: Tensor, value: Tensor, layout: str) -> Packed:
    """Nested tensors (batch, sequence, heads, D) ["bshd"] or (batch, heads, sequence, D) ["bhsd"], packed."""
    if layout not in ("bhsd", "bshd"):
        raise InputError(f"nested tensors take layout 'bhsd' or 'bshd', got {layout!r}")
    token_major: list[Any] = []  # Any: nested tensors have methods that Tensor's type does not declare
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_nested or tensor.layout != query.layout or tensor.dim() != 4:
            found = f"{tensor.dim()}-D, {'nested' if tensor.is_nested else 'not nested'}, layout {tensor.layout}"
            raise InputError(f"query, key and value must all be 4-D nested tensors with one layout (torch.jagged or torch.strided), got {name}: {found}")
        if tensor.layout == torch.strided:
            token_major.append(_jagged(tensor, name, layout))
            continue
        ragged: Any = getattr(tensor, "_ragged_idx", None)
        if ragged is not None and ragged != layout.index("s"):
            other = "bshd" if layout == "bhsd" else "bhsd"
            raise InputError(f"{name} varies in length along dimension {ragged}, where layout {layout!r} has heads; pass layout={other!r} or transpose(1, 2)")
        tokens_first = tensor.transpose(1, 2) if layout == "bhsd" else tensor
        token_major.append(tokens_first)
    q, k, v = token_major
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise InputError("key and value must have the same sequence lengths")
    if q.shape[0] != k.shape[0]:
        raise InputError(f"query has {q.shape[0]} sequences, key and value have {k.shape[0]}")
    return Packed(q.values(), k.values(), v.values(), q.offsets(), k.offsets())


def _jagged(tensor: Tensor, name: str, layout: str) -> Tensor:
    """A strided nested tensor as a jagged one, (batch, sequence, heads, D)."""
    parts = [part.transpose(0, 1) if layout == "bhsd" else part for part in tensor.unbind()]
    if len({tuple(part.shape[1:]) for part in parts}) != 1:
        raise InputError(f"the sequences of {name} must have the same heads and head dims, got (sequence, heads, head dim) {[tuple(p.shape) for p in parts]}")
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def nest(out: Tensor, packed: Packed, layout: str, strided: bool) -> Tensor:
    """The packed (1, heads, tokens, D) output as a nested tensor in the layout the query came in."""
    tokens = out.squeeze(0).transpose(0, 1)
    if strided:
        parts = tokens.split((packed.q_offsets[1:] - packed.q_offsets[:-1]).tolist())
        return torch.nested.as_nested_tensor([part.transpose(0, 1) if layout == "bhsd" else part for part in parts])
    nested = torch.nested.nested_tensor_from_jagged(tokens, packed.q_offsets)
    return nested.transpose(1, 2) if layout == "bhsd" else nested
