"""Masks: who may attend to whom.

A mask is a function f(b, h, q, kv) that is true where query q may attend to key kv. The masks here carry a name and
combine with `&`, `|` and `~`, with each other and with plain functions:

    masks.causal & masks.sliding_window(1024)
    masks.document(ids) & (lambda b, h, q, kv: q >= kv)
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError, TraceError
from tilewise.lang import BoundProgram, name_of, trace_mask
from tilewise.named import Covers, Named, covers, named
from tilewise.sizes import equal

MaskFunction = Callable[[Any, Any, Any, Any], Any]


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

    def traced(self) -> BoundProgram:
        if torch.compiler.is_compiling() or not self.fixed:
            return trace_mask(self.function)
        kept = self._trace
        if kept is None or kept[1] != _forms(kept[0].captures):  # a captured tensor may have got another dtype or shape: tensor.data = ...
            trace = trace_mask(self.function)
            kept = self._trace = (trace, _forms(trace.captures))
        return kept[0]


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
causal = Mask(lambda b, h, q, kv: q >= kv, "causal", fixed=True)
full.made_by, causal.made_by = "full", "causal"


@named
def causal_lower_right(q_len: int, kv_len: int) -> Mask:
    """Causal with the last query aligned to the last key, as for a decoder that continues a cache."""
    offset = kv_len - q_len
    return Mask(lambda b, h, q, kv: q + offset >= kv, "causal_lower_right", q_len, kv_len, covers=covers("causal_lower_right", q=q_len, kv=kv_len))


@named
def sliding_window(left: int, right: int | None = None) -> Mask:
    """Keys from `left` before the query to `right` after it; `right` is `left` unless given."""
    reach = left if right is None else right
    if left < 0 or reach < 0:
        raise InputError(f"sliding_window takes non-negative reaches, got left={left}, right={right}")
    parameters = (left,) if right is None else (left, right)
    return Mask(lambda b, h, q, kv: at_most(q - kv, left) & at_most(kv - q, reach), "sliding_window", *parameters)


@named
def dilated_window(reach: int, dilation: int) -> Mask:
    """Every `dilation`-th key within `reach` on either side of the query."""
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
        return Mask(lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv), "prefix_lm", "per batch", covers=covers("prefix_lm", b=len(lengths)))
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
        if len(q_ids) != len(k_ids):
            raise InputError(f"document ids of shape {tuple(q_ids.shape)} and kv_ids of shape {tuple(k_ids.shape)} must be of one batch size")
        known = covers("document", b=len(q_ids), q=q_ids.shape[1], kv=k_ids.shape[1])
        return Mask(lambda b, h, q, kv: q_ids[b, q] == k_ids[b, kv], "document", covers=known)
    return Mask(lambda b, h, q, kv: q_ids[q] == k_ids[kv], "document", covers=covers("document", q=len(q_ids), kv=len(k_ids)))


def ids_of_lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    """(n,) lengths -> (sum of lengths,) ids 0, 0, ..., 1, 1, ..."""
    counts = _lengths(lengths)
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


@named
def padding(lengths: Tensor) -> Mask:
    """Key kv of batch element b counts only if kv < lengths[b]."""
    valid = _integers(lengths, 1, "padding")
    return Mask(lambda b, h, q, kv: kv < valid[b], "padding", covers=covers("padding", b=len(valid)))


@named
def global_tokens(which: int | Tensor) -> Mask:
    """Marked tokens attend to all and are attended by all: the first `which`, or those true in a boolean (S,) tensor."""
    if isinstance(which, Tensor):
        if which.dtype != torch.bool or which.dim() != 1:
            raise InputError(f"global_tokens takes a number or a boolean (S,) tensor, got {which.dtype} of shape {tuple(which.shape)}")
        return Mask(lambda b, h, q, kv: which[q] | which[kv], "global_tokens", covers=covers("global_tokens", q=len(which), kv=len(which)))
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

    return Mask(shared, "shared_prefix", f"{documents} documents", covers=covers("shared_prefix", q=len(start), kv=len(start)))


@named
def block_diffusion(length: int, block: int) -> Mask:
    """Training mask of block diffusion over 2 * length tokens: noised copies first, clean tokens after.

    A noised token sees its own noised block and the clean blocks before; a clean token sees clean blocks up to its own.
    """
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
def neighborhood(shape: int | Sequence[int], window: int | Sequence[int]) -> Mask:
    """Each token of a 1-D, 2-D or 3-D grid (row-major) sees the `window` nearest along every axis.

    At the border the window is moved inwards, never cut: every token sees the same number of neighbours.
    """
    sizes, windows = _grid(shape, window, "neighborhood")

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return _inside_windows(_coordinates(q, sizes), _coordinates(kv, sizes), sizes, windows)

    points = _product(sizes)
    return Mask(near, "neighborhood", _by(sizes), _by(windows), grid=Grid(sizes, windows), covers=covers("neighborhood", q=points, kv=points))


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
    tiles = tuple(tile)
    if len(tiles) != len(sizes) or any(t < 1 or s % t or w % t for s, w, t in zip(sizes, windows, tiles, strict=True)):
        raise InputError(f"sliding_tile: shape {sizes} and window {windows} must be multiples of the tile {tiles}")
    counts = tuple(s // t for s, t in zip(sizes, tiles, strict=True))
    reaches = tuple(w // t for w, t in zip(windows, tiles, strict=True))
    per_tile, vision = _product(tiles), _product(sizes)

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_tile, kv_tile = _coordinates(q // per_tile, counts), _coordinates(kv // per_tile, counts)
        image = (q < vision) & (kv < vision) & _inside_windows(q_tile, kv_tile, counts, reaches)
        return image | (q >= vision) | (kv >= vision) if text else image

    return Mask(near, "sliding_tile", _by(sizes), _by(windows), _by(tiles), covers=covers("sliding_tile", q=vision + text, kv=vision + text))


@named
def cross(intervals: Tensor, tokens_per_image: int) -> Mask:
    """Text queries attend to images: image n is seen by queries from intervals[n, 0] up to before intervals[n, 1]."""
    spans = _integers(intervals, 2, "cross")
    count = spans.shape[0]
    if spans.shape[1] != 2 or tokens_per_image < 1:
        raise InputError(f"cross takes (images, 2) intervals and at least 1 token per image, got {tuple(spans.shape)} and {tokens_per_image}")

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        image = (kv // tokens_per_image).clamp(0, count - 1)
        return (q >= spans[image, 0]) & (q < spans[image, 1])

    return Mask(visible, "cross", f"{count} images", covers=covers("cross", kv=count * tokens_per_image))


@named
def per_batch(choices: Sequence["Mask | MaskFunction"], which: Tensor) -> Mask:
    """Batch element b uses choices[which[b]]."""
    options = tuple([as_mask(m) for m in choices])  # a list in a closure may change: calls with it would not be cached
    if not options:
        raise InputError("per_batch takes at least one mask")
    chosen = _integers(which, 1, "per_batch")

    def select(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed: Any = options[0](b, h, q, kv) & (chosen[b] == 0)
        for k in range(1, len(options)):
            allowed = allowed | (options[k](b, h, q, kv) & (chosen[b] == k))
        return allowed

    inner = tuple([c for m in options for c in m.covers])
    return Mask(select, "per_batch", *options, covers=covers("per_batch", b=len(chosen)) + inner)


def _integers(tensor: Tensor, dims: int | tuple[int, ...], who: str) -> Tensor:
    allowed = (dims,) if isinstance(dims, int) else dims
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.dim() not in allowed:
        given = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{who} takes an integer tensor with {' or '.join(map(str, allowed))} dimension(s), got {given}")
    return tensor


def _lengths(lengths: Sequence[int] | Tensor) -> Tensor:
    counts = _integers(torch.as_tensor(lengths), 1, "lengths of documents")
    if not torch.compiler.is_compiling() and bool((counts < 0).any()):
        raise InputError(f"lengths of documents are not negative, got {counts.tolist()}")
    return counts


def _grid(shape: int | Sequence[int], window: int | Sequence[int], who: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = (shape,) if isinstance(shape, int) else _numbers(shape, who)
    windows = (window,) * len(sizes) if isinstance(window, int) else _numbers(window, who)
    if not 1 <= len(sizes) <= 3 or len(windows) != len(sizes) or any(not 1 <= w <= s for s, w in zip(sizes, windows, strict=True)):
        raise InputError(f"{who}: shape {sizes} needs 1 to 3 axes and a window from 1 to its size along each, got {windows}")
    return sizes, windows


def _numbers(given: Any, who: str) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable) or any(isinstance(n, str | float) for n in given):
        raise InputError(f"{who}: shape and window are whole numbers, one for each axis of the grid, got {given!r}")
    return tuple(int(n) if isinstance(n, Tensor) else n for n in given)


def _coordinates(index: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Row-major coordinates of a flat index; the first axis is not wrapped."""
    found: list[Any] = []
    for size in sizes[:0:-1]:
        found.append(index % size)
        index = index // size
    found.append(index)
    return found[::-1]


def _inside_windows(query: list[Any], key: list[Any], sizes: tuple[int, ...], windows: tuple[int, ...]) -> Any:
    allowed: Any = None
    for i, j, size, window in zip(query, key, sizes, windows, strict=True):
        start = (i - window // 2).clamp(0, size - window)
        here = (j >= start) & (j < start + window)
        allowed = here if allowed is None else allowed & here
    return allowed


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
