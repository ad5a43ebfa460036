"""Packed (varlen) batches: sequences of different lengths, end to end, without padding.

A packed batch is one long sequence in which tokens attend only within their own sequence. The user's mask and score see
positions inside each sequence, and the sequence's number as b. Tile maps skip everything between sequences, so engines need
not know about packing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import contents_key
from tilewise.core.recording import unrecorded
from tilewise.core.weak_cache import WeakCache
from tilewise.errors import InputError
from tilewise.masks import Mask
from tilewise.memory import can_be_looked_at, check_dense
from tilewise.named import AXES, Covers, Named
from tilewise.scores import Score, ScoreFunction, Sinks, as_scores


class Packed(NamedTuple):
    """(tokens, heads, head dim) tensors and where each sequence begins: offsets[n] .. offsets[n + 1]."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_offsets: Tensor
    kv_offsets: Tensor
    names: tuple[str, str] = ("the query's offsets", "the key's offsets")


def within_sequences(packed: Packed, mask: Any, score: ScoreFunction | Sequence[ScoreFunction] | None, is_causal: bool) -> tuple[Mask, list[Any]]:
    """The user's mask and scores, rewritten for the packed sequence."""
    if mask is not None and not callable(mask):
        raise InputError(
            f"packed sequences take a mask function or a mask of tilewise.masks, which see positions inside each sequence; got {type(mask).__name__}"
        )
    tokens = packed_tokens(packed)
    scores = as_scores(score)
    if mask is not None or scores:
        _check_sizes([mask, *scores], packed, tokens)
    if mask is None and not scores:
        return tokens.mask(is_causal), []
    within = tokens.mask(is_causal) if mask is None else _within(tokens, mask, is_causal)
    return within, [s if isinstance(s, Sinks) else _rebased(tokens, s) for s in scores]


# -- where each token is ---------------------------------------------------------------------------------------------


class PackedTokens:
    """For every token the number of its sequence (-1 after the last) and its position inside it, and the masks that follow from that alone.

    A model packs once per step and attends in every layer: layers that find the same tensors and masks here have the same call key, and so the same map.
    """

    def __init__(self, packed: Packed) -> None:
        device = packed.query.device
        self.q_sequence, self.q_position = sequence_and_position(packed.q_offsets.to(device), packed.query.shape[0])
        self.is_one = packed.q_offsets is packed.kv_offsets and packed.query.shape[0] == packed.key.shape[0]  # queries and keys are the same tokens
        if self.is_one:
            self.kv_sequence, self.kv_position = self.q_sequence, self.q_position
        else:
            self.kv_sequence, self.kv_position = sequence_and_position(packed.kv_offsets.to(device), packed.key.shape[0])
        self._offsets = [t.clone() for t in (packed.q_offsets, packed.kv_offsets)]
        self.sizes_checked: set[Covers] = set()
        self._masks: dict[bool, Mask] = {}

    def are_of(self, packed: Packed) -> bool:
        """Whether offsets still hold what this was made from. Some writers raise no version: collectives of torch.distributed, numpy, `.data`. Of offsets on a
        GPU that is only known later: an assertion there ends the program's use of CUDA."""
        for before, now in zip(self._offsets, (packed.q_offsets, packed.kv_offsets), strict=True):
            if now.device.type == "cuda":
                torch._assert_async((before == now).all(), "offsets of packed sequences were changed by a writer that torch's version counter does not see")
            elif not torch.equal(before, now):
                return False
        return True

    def mask(self, is_causal: bool) -> Mask:
        """Within each sequence, and nothing else."""
        if is_causal not in self._masks:
            self._masks[is_causal] = _within(self, None, True) if is_causal and not self.is_one else _apart(self, is_causal)
        return self._masks[is_causal]


MAX_PACKED = 64
_known: WeakCache[PackedTokens] = WeakCache(MAX_PACKED)


def packed_tokens(packed: Packed) -> PackedTokens:
    """Made once for the contents of the offsets, and checked then.

    The key is what the contents of both are known by, the numbers of tokens, their device, and the stream on which the tensors were made: another might read
    them too soon. Offsets without such a key are looked at in every call, and so are those in a CUDA graph: it makes their tensors itself, in its own memory.
    """
    if torch.compiler.is_compiling():  # contents are unknown there
        return PackedTokens(packed)
    offsets = (packed.q_offsets,) if packed.q_offsets is packed.kv_offsets else (packed.q_offsets, packed.kv_offsets)
    contents = contents_on_stream(offsets, packed.query.device)
    key = None if contents is None else (contents, packed.query.shape[0], packed.key.shape[0])
    found = None if key is None else _known.find(key, offsets)
    if found is not None and found.are_of(packed):
        return found
    with unrecorded(), torch.inference_mode(False):  # inference tensors could have no map that is kept
        check_contents(packed.q_offsets, packed.query.shape[0], packed.names[0])
        made = PackedTokens(packed)
        if not made.is_one:
            check_contents(packed.kv_offsets, packed.key.shape[0], packed.names[1])
    if key is not None:
        _known.keep(key, offsets, made)
    return made


def contents_on_stream(tensors: tuple[Tensor, ...], device: torch.device) -> Any:
    """What tensors made from the contents of these are known by: their contents, the device, and the stream that makes them. None where contents have no key,
    and in a capture of a CUDA graph."""
    if not all([can_be_looked_at(t) for t in tensors]):
        return None
    contents = contents_key(tensors)
    if contents is None:
        return None
    stream = 0
    if device.type == "cuda":
        from tilewise.engines.gpu.driver import is_capturing, stream_of

        stream = stream_of(device)
        if is_capturing(stream):
            return None
    return contents, device, stream


def sequence_and_position(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For every token, the number of its sequence (-1 after the last) and its position inside it. Neither leaves its range, whatever the offsets hold."""
    at = torch.arange(tokens, device=offsets.device)
    number = torch.searchsorted(offsets.long(), at, right=True) - 1
    inside = number < offsets.shape[0] - 1
    start = offsets.long()[number.clamp(min=0)]
    return torch.where(inside, number, -1), (at - start).clamp(min=0)


def check_offsets(offsets: Tensor, name: str) -> None:
    """Raises unless a tensor can hold offsets; what it holds is checked once (`packed_tokens`)."""
    if not isinstance(offsets, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(offsets).__name__}; torch.tensor({name}, dtype=torch.int32) makes one of a list")
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} must be a 1-D int32 or int64 tensor with one more entry than sequences, got {offsets.dtype} of shape {tuple(offsets.shape)}")
    check_dense(offsets, name)
    if offsets.is_meta:
        raise InputError(f"{name} is on the meta device, so it has no contents; the lengths of sequences must be known")


def check_contents(offsets: Tensor, tokens: int, name: str) -> None:
    """Raises unless offsets start at 0, never decrease and end within the tokens; others would read tokens of other sequences."""
    rule = f"{name} must start at 0, never decrease and end at most at the {tokens} tokens given"
    right = (offsets[0] == 0) & (offsets[-1] <= tokens) & (offsets[1:] >= offsets[:-1]).all()
    if not _holds(right, rule):
        raise InputError(f"{rule}, got {_shown(offsets)}")


def _holds(condition: Tensor, message: str) -> bool:
    """Whether a condition holds. On a GPU that would wait for all the work before, and compiled code cannot look. There, the condition is asserted on the
    device, which ends what follows with torch's error for such asserts, and prints the message: in stream order, so before any kernel reads what was checked.
    """
    if not condition.is_cuda and not torch.compiler.is_compiling():
        return bool(condition)
    torch._assert_async(condition, message)
    return True


def _shown(offsets: Tensor) -> str:
    listed = offsets.tolist()
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, ..., {', '.join(map(str, listed[-3:]))}]"


# -- masks and scores ------------------------------------------------------------------------------------------------


def _apart(tokens: PackedTokens, is_causal: bool) -> Mask:
    """Within each sequence; causal where queries and keys are the same tokens, which lie in the order of their positions."""
    q_sequence, kv_sequence = tokens.q_sequence, tokens.kv_sequence

    def same_sequence(b: Any, h: Any, q: Any, kv: Any) -> Any:
        number = q_sequence[q]
        allowed = (number == kv_sequence[kv]) & (number >= 0)
        return allowed & (q >= kv) if is_causal else allowed

    return Mask(same_sequence, "packed", fixed=True)


def _within(tokens: PackedTokens, mask: Any, is_causal: bool) -> Mask:
    """The same with a mask that sees positions, or causal by positions."""
    q_sequence, q_position, kv_sequence, kv_position = tokens.q_sequence, tokens.q_position, tokens.kv_sequence, tokens.kv_position

    def same_sequence(b: Any, h: Any, q: Any, kv: Any) -> Any:
        number, i, j = q_sequence[q], q_position[q], kv_position[kv]
        allowed = (number == kv_sequence[kv]) & (number >= 0)
        if is_causal:
            allowed = allowed & (i >= j)
        return allowed if mask is None else allowed & mask(number.clamp(min=0), h, i, j)

    label = "packed" if mask is None else f"packed {getattr(mask, 'name', 'mask')}"
    return Mask(same_sequence, label, fixed=mask is None)


def _rebased(tokens: PackedTokens, function: ScoreFunction) -> Score:
    q_sequence, q_position, kv_position = tokens.q_sequence, tokens.q_position, tokens.kv_position

    def rebased(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(s, q_sequence[q].clamp(min=0), h, q_position[q], kv_position[kv])

    return Score(rebased, getattr(function, "name", "score"))


def _check_sizes(functions: list[Any], packed: Packed, tokens: PackedTokens) -> None:
    """What is made for certain sizes has as many heads and sequences, and covers the longest of them: shorter ones are packed with it, that is the point."""
    for function in functions:
        if not isinstance(function, Named):
            continue
        function.check_sizes({"h": packed.query.shape[1], "b": packed.q_offsets.shape[0] - 1})
        for covered in function.covers:
            what, axis, size = covered
            offsets = {"q": packed.q_offsets, "kv": packed.kv_offsets}.get(axis)
            if offsets is None or len(offsets) < 2 or covered in tokens.sizes_checked or torch.compiler.is_compiling():  # contents are unknown while compiling
                continue
            lengths, rule = offsets.diff(), f"{what} is made for sequences of up to {size} {AXES[axis]}"
            if not _holds((lengths <= size).all(), rule):
                raise InputError(f"{rule}, the longest here has {int(lengths.max())}: make it for as many")
            tokens.sizes_checked.add(covered)


# -- nested tensors --------------------------------------------------------------------------------------------------


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
