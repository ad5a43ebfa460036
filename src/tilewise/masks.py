"""Masks: who may attend to whom.

A mask is a function f(b, h, q, kv) that is true where query q may attend to key kv. The masks here carry a name and
combine with `&`, `|` and `~`, with each other and with plain functions:

    masks.causal & masks.sliding_window(1024)
    masks.document(ids) & (lambda b, h, q, kv: q >= kv)
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError, TraceError
from tilewise.lang import BoundProgram, name_of, trace_mask
from tilewise.memory import can_be_looked_at
from tilewise.named import Covers, Named, check_whole, counted, covers, is_whole, named
from tilewise.sizes import equal

__all__ = [
    "Grid",
    "Mask",
    "MaskFunction",
    "as_mask",
    "block_diffusion",
    "causal",
    "causal_lower_right",
    "cross",
    "dilated_window",
    "document",
    "full",
    "global_tokens",
    "ids_of_lengths",
    "neighborhood",
    "on_grid",
    "padding",
    "per_batch",
    "prefix_lm",
    "radial",
    "shared_prefix",
    "sliding_tile",
    "sliding_window",
    "spatial_temporal",
    "tree",
]

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""f(b, h, q, kv): whether query q of head h of batch element b may attend to key kv."""
Axis = tuple[int, int, int, int, bool]  # of a grid: size, window, stride, dilation, is_causal; a plain tuple, so that calls can be cached


class Grid(NamedTuple):
    """The row-major grid that a mask's tokens lie on, and how many of them a token sees along each axis."""

    shape: tuple[int, ...]
    window: tuple[int, ...]


class Mask(Named):
    """A mask function with a name.

    It is traced wherever a plain function would be: in every call, unless the call cache knows all that it reads. If it is `fixed`, once.
    """

    _trace: tuple[BoundProgram, list[tuple[torch.dtype, torch.Size]]] | None = None

    def __init__(
        self, function: MaskFunction, label: str, *parameters: Any, grid: Grid | None = None, covers: tuple[Covers, ...] = (), fixed: bool = False
    ) -> None:
        self.function = function
        self.covers = covers
        self.grid = grid  # changes the order in which tokens are computed, never the result
        self.fixed = fixed
        self._label = label
        self._parameters = parameters

    @property
    def name(self) -> str:
        """What the mask is, with its parameters: `causal & sliding_window(1024)`."""
        operands = [p._name_within(self._label) if isinstance(p, Mask) else str(p) for p in self._parameters]
        if self._label in ("&", "|"):
            return f" {self._label} ".join(operands)
        if self._label == "~":
            return "~" + operands[0]
        return f"{self._label}({', '.join(operands)})" if operands else self._label

    def _name_within(self, sign: str) -> str:
        """The name as an operand: in parentheses if it contains another operator."""
        return f"({self.name})" if self._label in ("&", "|") and self._label != sign else self.name

    @counted
    def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:  # torch's FlexAttention counts the parameters without a default
        return self.function(b, h, q, kv)

    def __and__(self, other: "Mask | MaskFunction") -> "Mask":
        return _combine(self, as_mask(other), "&")

    def __rand__(self, other: MaskFunction) -> "Mask":
        return _combine(as_mask(other), self, "&")

    def __or__(self, other: "Mask | MaskFunction") -> "Mask":
        return _combine(self, as_mask(other), "|")

    def __ror__(self, other: MaskFunction) -> "Mask":
        return _combine(as_mask(other), self, "|")

    def __invert__(self) -> "Mask":
        f = self.function
        inverse = Mask(lambda b, h, q, kv: logical_not(f(b, h, q, kv)), "~", self, covers=self.covers)
        inverse.record(operator.invert, (self,), {})
        return inverse

    def __bool__(self) -> bool:
        raise TraceError(f"the mask {self.name} has no truth value: combine masks with & | ~, not with and, or, not")

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    @property
    def is_traced(self) -> bool:
        """Whether it has been traced for good."""
        return self._trace is not None

    def traced(self) -> BoundProgram:
        """The mask as a program."""
        if torch.compiler.is_compiling() or not self.fixed:
            return trace_mask(self.function)
        kept = self._trace
        if kept is None or kept[1] != _forms(kept[0].captures):  # a captured tensor may have got another dtype or shape: tensor.data = ...
            trace = trace_mask(self.function)
            kept = self._trace = (trace, _forms(trace.captures))
        return kept[0]

    def assume(self, trace: BoundProgram) -> None:
        """Take this for the trace of a `fixed` mask: one like it was traced, with other tensors and numbers."""
        self._trace = (trace, _forms(trace.captures))


def _forms(captures: tuple[Tensor, ...]) -> list[tuple[torch.dtype, torch.Size]]:
    """What a program is made for. Of shapes the rank would do, but for rows, which are written out element by element."""
    return [(t.dtype, t.shape) for t in captures]


def logical_not(allowed: Any) -> Any:
    """~ of a traced value, or `not` of a plain bool, which a mask may also return (~True is -2)."""
    return not allowed if isinstance(allowed, bool) else ~allowed


def _combine(left: Mask, right: Mask, sign: str) -> Mask:
    f, g = left.function, right.function

    def both(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return f(b, h, q, kv) & g(b, h, q, kv)

    def either(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return f(b, h, q, kv) | g(b, h, q, kv)

    grid = _common_grid(left.grid, right.grid, sign)
    combined = Mask(both if sign == "&" else either, sign, left, right, grid=grid, covers=left.covers + right.covers)
    combined.record(operator.and_ if sign == "&" else operator.or_, (left, right), {})
    return combined


def _common_grid(left: Grid | None, right: Grid | None, sign: str) -> Grid | None:
    """For &, the grid of either mask; for |, a grid that both have. Windows combine accordingly."""
    if left is None or right is None:
        return None if sign == "|" else left if right is None else right
    if left.shape != right.shape:
        return None
    windows = zip(left.window, right.window, strict=True)
    return Grid(left.shape, tuple([min(pair) if sign == "&" else max(pair) for pair in windows]))


_FROM_TENSOR = "; a tensor becomes one by loading from it: lambda b, h, q, kv: tensor[q, kv]"


def as_mask(function: "Mask | MaskFunction") -> Mask:
    """A plain mask function as a Mask, to combine it and to give it a name."""
    if isinstance(function, Mask):
        return function
    if not callable(function):
        raise InputError(f"a mask is a function of (b, h, q, kv), got {type(function).__name__}{_FROM_TENSOR if isinstance(function, Tensor) else ''}")
    return Mask(function, name_of(function).strip("'"))


def broadcast_load(tensor: Tensor) -> MaskFunction:
    """f(b, h, q, kv) = tensor[b, h, q, kv], broadcast from the right as torch does: missing dimensions are left out, those of size 1 are indexed by 0.

    The closure holds a tensor and a tuple of bools, nothing mutable, so that calls with it can be cached.
    """
    is_one = tuple([equal(size, 1) for size in tensor.shape])

    def load(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b, h, q, kv)[4 - len(is_one) :]
        return tensor[tuple([0 if one else i for one, i in zip(is_one, at, strict=True)])]

    return load


def at_most(value: Any, limit: int) -> Any:
    """value <= limit, written as a comparison with 0: before torch 2.11, torch.compile cannot trace a comparison with an int that varies."""
    return value - limit <= 0


full = Mask(lambda b, h, q, kv: True, "full", fixed=True)
"""Every query sees every key."""

causal = Mask(lambda b, h, q, kv: q >= kv, "causal", fixed=True)
"""Query i sees keys 0 to i: aligned to the upper left, as in torch's SDPA. A decoder that continues a cache wants causal_lower_right."""

full.made_by, causal.made_by = "full", "causal"


@named
def causal_lower_right(q_len: int, kv_len: int) -> Mask:
    """Causal with the last query aligned to the last key, as for a decoder that continues a cache."""
    check_whole("causal_lower_right", q_len=q_len, kv_len=kv_len)
    offset = kv_len - q_len
    return Mask(lambda b, h, q, kv: q + offset >= kv, "causal_lower_right", q_len, kv_len, covers=covers("causal_lower_right", q=q_len, kv=kv_len))


@named
def sliding_window(left: int, right: int | None = None) -> Mask:
    """Keys from `left` before the query to `right` after it; `right` is `left` unless given."""
    reach = left if right is None else right
    check_whole("sliding_window", left=left, right=reach)
    if left < 0 or reach < 0:
        raise InputError(f"sliding_window takes non-negative reaches, got left={left}, right={right}")
    parameters = (left,) if right is None else (left, right)
    return Mask(lambda b, h, q, kv: at_most(q - kv, left) & at_most(kv - q, reach), "sliding_window", *parameters)


@named
def dilated_window(reach: int, dilation: int) -> Mask:
    """Every `dilation`-th key within `reach` on either side of the query."""
    check_whole("dilated_window", reach=reach, dilation=dilation)
    if reach < 0 or dilation < 1:
        raise InputError(f"dilated_window takes reach >= 0 and dilation >= 1, got {reach}, {dilation}")

    def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).abs()
        return at_most(distance, reach) & (distance % dilation == 0)

    return Mask(dilated, "dilated_window", reach, dilation)


@named
def prefix_lm(prefix: int | Tensor) -> Mask:
    """All queries see the first `prefix` keys (a number, or one per batch element); the rest is causal."""
    if isinstance(prefix, Tensor):
        lengths = _integers(prefix, 1, "prefix_lm")
        return Mask(lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv), "prefix_lm", "per batch", covers=covers("prefix_lm", b=lengths.shape[0]))
    check_whole("prefix_lm", prefix=prefix)
    if prefix < 0:
        raise InputError(f"prefix_lm takes a prefix of at least 0, got {prefix}")
    return Mask(lambda b, h, q, kv: at_most(kv + 1, prefix) | (q >= kv), "prefix_lm", prefix)


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
    q_ids = _integers(ids, (1, 2), "document")
    k_ids = q_ids if kv_ids is None else _integers(kv_ids, (1, 2), "document")
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
    counts = _lengths(lengths)
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


@named
def padding(lengths: Tensor) -> Mask:
    """Key kv of batch element b counts only if kv < lengths[b]."""
    valid = _integers(lengths, 1, "padding")
    return Mask(lambda b, h, q, kv: kv < valid[b], "padding", covers=covers("padding", b=valid.shape[0]))


@named
def global_tokens(which: int | Tensor) -> Mask:
    """Marked tokens attend to all and are attended by all: the first `which`, or those true in a boolean (S,) tensor."""
    if isinstance(which, Tensor):
        if which.dtype != torch.bool or which.dim() != 1:
            raise InputError(f"global_tokens takes a number or a boolean (S,) tensor, got {which.dtype} of shape {tuple(which.shape)}")
        return Mask(lambda b, h, q, kv: which[q] | which[kv], "global_tokens", covers=covers("global_tokens", q=which.shape[0], kv=which.shape[0]))
    check_whole("global_tokens", which=which)
    if which < 0:
        raise InputError(f"global_tokens takes a number of at least 0, got {which}")
    return Mask(lambda b, h, q, kv: at_most(q + 1, which) | at_most(kv + 1, which), "global_tokens", which)


@named
def shared_prefix(lengths: Sequence[int] | Tensor, prefix_of: Sequence[int] | Tensor) -> Mask:
    """Packed documents of which several continue one prompt: each is causal and also sees the whole of its prefix.

    `prefix_of[d]` is the document that document d continues; a prompt names itself.
    """
    counts, prefix = _lengths(lengths), _integers(torch.as_tensor(prefix_of), 1, "shared_prefix")
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


@named
def neighborhood(
    shape: int | Sequence[int],
    window: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
) -> Mask:
    """Each token of a 1-D, 2-D or 3-D grid (row-major) sees the `window` nearest along every axis: NATTEN's neighborhood attention.

    At the border the window is moved inwards, never cut: every token sees the same number of neighbours.

    stride      so many tokens side by side share the window of the one in their middle
    dilation    only every `dilation`-th token counts, starting from the query's own
    is_causal   along this axis the window ends at the query, and is cut at the border

    Each is one value for all axes, or one for each.
    """
    sizes, windows = _grid(shape, window, "neighborhood")
    strides, dilations = _per_axis(stride, len(sizes), "stride"), _per_axis(dilation, len(sizes), "dilation")
    causals = (is_causal,) * len(sizes) if isinstance(is_causal, bool) else tuple(is_causal)
    if len(causals) != len(sizes) or not all(isinstance(c, bool) for c in causals):
        raise InputError(f"neighborhood: is_causal is True or False, or one of them for each of {len(sizes)} axes, got {is_causal!r}")
    for size, w, s, d in zip(sizes, windows, strides, dilations, strict=True):
        if not 1 <= s <= w or d < 1 or w * d > size:
            raise InputError(f"neighborhood: a stride is from 1 to the window, window * dilation at most the size, got {s}, {d} for {w} of {size}")
    axes = tuple(zip(sizes, windows, strides, dilations, causals, strict=True))

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return _inside_windows(_coordinates(q, sizes), _coordinates(kv, sizes), axes)

    points = _product(sizes)
    said = [f"stride {_by(strides)}"] if max(strides) > 1 else []
    said += [f"dilation {_by(dilations)}"] if max(dilations) > 1 else []
    said += [f"causal along axis {axis}" for axis, causal_here in enumerate(causals) if causal_here]
    grid = Grid(sizes, tuple([w * d for w, d in zip(windows, dilations, strict=True)]))
    return Mask(near, "neighborhood", _by(sizes), _by(windows), *said, grid=grid, covers=covers("neighborhood", q=points, kv=points))


@named
def on_grid(mask: "Mask | MaskFunction", shape: Sequence[int], window: int | Sequence[int]) -> Mask:
    """The same mask, with the hint that its tokens lie on a row-major 2-D or 3-D grid and see about `window` tokens along each axis.

    tilewise may then reorder the tokens into small patches, if that leaves less to compute. The result is the same.
    """
    known = as_mask(mask)
    return Mask(known.function, known._label, *known._parameters, grid=Grid(*_grid(shape, window, "on_grid")), covers=known.covers)


@named
def sliding_tile(shape: Sequence[int], window: Sequence[int], tile: Sequence[int], text: int = 0) -> Mask:
    """Sliding tile attention: the neighborhood of whole tiles, on tokens stored tile after tile, then `text` tokens.

    Text tokens see everything and are seen by everyone.
    """
    sizes, windows = _grid(shape, window, "sliding_tile")
    tiles = _numbers(tile, 1, "sliding_tile", "tile")
    check_whole("sliding_tile", text=text)
    if len(tiles) != len(sizes) or any(t < 1 or s % t or w % t for s, w, t in zip(sizes, windows, tiles, strict=True)):
        raise InputError(f"sliding_tile: shape {sizes} and window {windows} must be multiples of the tile {tiles}")
    counts = tuple(s // t for s, t in zip(sizes, tiles, strict=True))
    axes = tuple([(count, w // t, 1, 1, False) for count, w, t in zip(counts, windows, tiles, strict=True)])
    per_tile, vision = _product(tiles), _product(sizes)

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_tile, kv_tile = _coordinates(q // per_tile, counts), _coordinates(kv // per_tile, counts)
        image = (q < vision) & (kv < vision) & _inside_windows(q_tile, kv_tile, axes)
        return image | (q >= vision) | (kv >= vision) if text else image

    return Mask(near, "sliding_tile", _by(sizes), _by(windows), _by(tiles), covers=covers("sliding_tile", q=vision + text, kv=vision + text))


@named
def radial(frames: int, tokens_per_frame: int, *, decay: float = 1.0, least: int = 128, text: int = 0, device: torch.device | str | None = None) -> Mask:
    """Radial attention: a token of a video sees the tokens around its own place in every frame, half as many for every doubling of the distance in frames.

    Its own frame and the first one it sees whole. Tokens come frame after frame, then `text` tokens, which see everything and are seen by everyone.

    decay   the reach within the next frame, as a share of the tokens of a frame
    least   the reach never falls below this; where it would, every so many frames are left out instead. With 1 it is the formula of the paper, with the size
            of a tile hardly any tile is computed for a few pairs
    device  where a small table of reaches lies: made where the tokens are, it is not copied there in every call
    """
    check_whole("radial", frames=frames, tokens_per_frame=tokens_per_frame, least=least, text=text)
    if frames < 1 or tokens_per_frame < 1 or decay <= 0 or least < 1 or text < 0:
        raise InputError(
            "radial takes at least 1 frame, 1 token per frame, a decay above 0, a least reach of at least 1 and text of at least 0, "
            f"got {frames}, {tokens_per_frame}, {decay}, {least}, {text}"
        )
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"radial: device={str(device)!r}, but torch finds no GPU here; leave it out, and the mask's table is made on the CPU")
    reach = torch.tensor([tokens_per_frame, *(radial_reach(distance, tokens_per_frame * decay, least) for distance in range(1, frames))], device=device)
    video = frames * tokens_per_frame

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        apart = (q // tokens_per_frame - kv // tokens_per_frame).abs()
        seen = ((q % tokens_per_frame - kv % tokens_per_frame).abs() < reach[apart.clamp(max=frames - 1)]) | (kv < tokens_per_frame)
        return seen | (q >= video) | (kv >= video) if text else seen

    said = [f"decay {decay:g}"] if decay != 1.0 else []
    return Mask(near, "radial", frames, tokens_per_frame, *said, f"least {least}", covers=covers("radial", q=video + text, kv=video + text))


def radial_reach(distance: int, first: float, least: int) -> int:
    """How many places on either side are seen in a frame so far away, the own one included; 0 where the frame is left out."""
    reach = first / (1 << (distance.bit_length() - 1))
    if reach >= least:
        return math.floor(reach)
    return 0 if distance % math.ceil(least / reach) else least


@named
def spatial_temporal(frames: int, tokens_per_frame: int, temporal: Tensor, *, frame_reach: int = 0, token_reach: int = 0, text: int = 0) -> Mask:
    """Heads of a video model that look around, and heads that look through time (Sparse VideoGen).

    Head h sees the whole of all frames up to `frame_reach` away from its own; where `temporal[h]` is true, the places up to `token_reach` from its own in every
    frame. The tokens of a video come frame after frame, then `text` tokens, which see everything and are seen by everyone.
    """
    check_whole("spatial_temporal", frames=frames, tokens_per_frame=tokens_per_frame, frame_reach=frame_reach, token_reach=token_reach, text=text)
    if frames < 1 or tokens_per_frame < 1 or min(frame_reach, token_reach, text) < 0:
        raise InputError(
            "spatial_temporal takes at least 1 frame, 1 token per frame, and reaches and text of at least 0, "
            f"got {frames}, {tokens_per_frame}, {frame_reach}, {token_reach}, {text}"
        )
    if not isinstance(temporal, Tensor) or temporal.dtype != torch.bool or temporal.dim() != 1:
        raise InputError("spatial_temporal takes a boolean (heads,) tensor, true for the heads that look through time")
    video = frames * tokens_per_frame

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        around = at_most((q // tokens_per_frame - kv // tokens_per_frame).abs(), frame_reach)
        through = at_most((q % tokens_per_frame - kv % tokens_per_frame).abs(), token_reach)
        seen = (around & ~temporal[h]) | (through & temporal[h])
        return seen | (q >= video) | (kv >= video) if text else seen

    known = covers("spatial_temporal", h=temporal.shape[0], q=video + text, kv=video + text)
    return Mask(near, "spatial_temporal", frames, tokens_per_frame, f"{temporal.shape[0]} heads", covers=known)


@named
def cross(intervals: Tensor, tokens_per_image: int) -> Mask:
    """Text queries attend to images: image n is seen by queries from intervals[n, 0] up to before intervals[n, 1]."""
    spans = _integers(intervals, 2, "cross")
    count = spans.shape[0]
    check_whole("cross", tokens_per_image=tokens_per_image)
    if spans.shape[1] != 2 or tokens_per_image < 1:
        raise InputError(f"cross takes (images, 2) intervals and at least 1 token per image, got {tuple(spans.shape)} and {tokens_per_image}")

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        image = (kv // tokens_per_image).clamp(0, count - 1)
        return (q >= spans[image, 0]) & (q < spans[image, 1])

    return Mask(visible, "cross", f"{count} images", covers=covers("cross", kv=count * tokens_per_image))


@named
def per_batch(choices: Sequence["Mask | MaskFunction"], which: Tensor) -> Mask:
    """Batch element b uses choices[which[b]].

    Where `which` lies on the CPU, numbers without a choice are refused. On a GPU it is not looked at, which would wait for the GPU: there, a batch element
    without a choice attends to nothing.
    """
    options = tuple([as_mask(m) for m in choices])  # a list in a closure may change: calls with it would not be cached
    if not options:
        raise InputError("per_batch takes at least one mask")
    chosen = _integers(which, 1, "per_batch")
    if chosen.device.type == "cpu" and can_be_looked_at(chosen) and bool(((chosen < 0) | (chosen >= len(options))).any()):
        raise InputError(f"per_batch: which holds numbers of choices, from 0 to {len(options) - 1}, got {chosen.tolist()}")

    def select(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed: Any = options[0](b, h, q, kv) & (chosen[b] == 0)
        for k in range(1, len(options)):
            allowed = allowed | (options[k](b, h, q, kv) & (chosen[b] == k))
        return allowed

    inner = tuple([c for m in options for c in m.covers])
    return Mask(select, "per_batch", *options, covers=covers("per_batch", b=chosen.shape[0]) + inner)


def _integers(tensor: Tensor, dims: int | tuple[int, ...], who: str) -> Tensor:
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() not in allowed:
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"{type(tensor).__name__}; torch.tensor makes one of a list"
        raise InputError(f"{who} takes an integer tensor with {' or '.join(map(str, allowed))} dimension(s), got {given}")
    return tensor


def _lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    counts = _integers(torch.as_tensor(lengths), 1, "lengths of documents")
    if not torch.compiler.is_compiling() and bool((counts < 0).any()):
        raise InputError(f"lengths of documents are not negative, got {counts.tolist()}")
    return counts


def _grid(shape: int | Sequence[int], window: int | Sequence[int], who: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = _numbers(shape, 1, who, "shape")
    windows = _numbers(window, len(sizes), who, "window")
    if not 1 <= len(sizes) <= 3 or len(windows) != len(sizes) or any(not 1 <= w <= s for s, w in zip(sizes, windows, strict=True)):
        raise InputError(f"{who}: shape {sizes} needs 1 to 3 axes and a window from 1 to its size along each, got {windows}")
    return sizes, windows


def _numbers(given: Any, count: int, who: str, what: str) -> tuple[int, ...]:
    """Of the axes of a grid: one for each, or one for `count` of them."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable) or (isinstance(given, Tensor) and given.dim() == 0)
    found = (given,) * count if is_one else tuple(given)
    if not all([is_whole(n) for n in found]):
        raise InputError(f"{who}: {what} takes whole numbers, one for each axis of the grid (or one for all), got {given!r}")
    return tuple(int(n) if isinstance(n, Tensor) else n for n in found)


def _coordinates(index: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Row-major coordinates of a flat index; the first axis is not wrapped."""
    found: list[Any] = []
    for size in sizes[:0:-1]:
        found.append(index % size)
        index = index // size
    found.append(index)
    return found[::-1]


def _inside_windows(query: list[Any], key: list[Any], axes: tuple[Axis, ...]) -> Any:
    allowed: Any = None
    for i, j, axis in zip(query, key, axes, strict=True):
        here = _inside_window(i, j, axis) if axis[3] == 1 else _inside_dilated_window(i, j, axis)
        allowed = here if allowed is None else allowed & here
    return allowed


def _inside_window(i: Any, j: Any, axis: Axis) -> Any:
    size, window, stride, _, is_causal = axis
    if is_causal:
        last = i if stride == 1 else (i // stride * stride + stride - 1).clamp(max=size - 1)
        return (j > last - window) & (j <= i)
    middle = i if stride == 1 else (i // stride * stride + stride // 2).clamp(max=size - 1)
    start = (middle - window // 2).clamp(0, size - window)
    return (j >= start) & (j < start + window)


def _inside_dilated_window(i: Any, j: Any, axis: Axis) -> Any:
    """The tokens i, i + d, i - d, ... are a line of their own, of `count` tokens, in which the window is looked for."""
    size, window, stride, d, is_causal = axis
    at, other, count = i // d, j // d, (size - 1 - i % d) // d + 1
    same = i % d == j % d
    if is_causal:
        last = torch.minimum(at // stride * stride + stride - 1, count - 1)
        return same & (other > last - window) & (other <= at)
    middle = torch.minimum(at // stride * stride + stride // 2, count - 1)
    start = torch.minimum((middle - window // 2).clamp(min=0), count - window)
    return same & (other >= start) & (other < start + window)


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _per_axis(given: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    found = _numbers(given, count, "neighborhood", what)
    if len(found) != count:
        raise InputError(f"neighborhood: {what} is one number, or one for each of {count} axes, got {given!r}")
    return found


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
