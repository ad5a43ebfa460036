"""The order of tokens: points of a grid are computed patch by patch where that leaves fewer tiles to compute.

Row by row, a tile of 64 tokens is a piece of one row, and its neighborhood of 13 x 13 touches two tiles in each of 13 rows. Patch by
patch, a tile is 8 x 8 points, and it touches about 3 x 3 tiles. So query, key and value are copied into that order, the mask and the
score are rewritten to see every token's own place, and the output is put back. Engines and tile maps know nothing of it.

The order is one of strips (lang.rewrite.in_patches): rows are taken 8 at a time and walked column by column, so that any tile of
consecutive tokens is a patch, whatever its size and whether the sizes divide the grid or not.
"""

from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines import Engine, Output, is_plain
from tilewise.lang import BoundProgram, Program, in_patches
from tilewise.masks import Grid

# Widths of the strips that are tried, by axes of the grid. They stand in the kernels as numbers, so there are few of them.
STRIPS: dict[int, tuple[tuple[int, ...], ...]] = {2: ((8,), (4,), (16,)), 3: ((4, 4), (2, 4), (2, 8), (1, 8), (8, 4))}
COUNTED, LEAST_COUNTED, GOLDEN = 64, 8, 0.6180339887  # rows of tiles that are counted; steps that meet every part of a grid
LINES = 2**16  # of neighborhoods, looked at in one count: where windows are large, fewer rows are counted


class TokenPermutation(NamedTuple):
    """The points of a grid in the order of strips."""

    shape: tuple[int, ...]
    strips: tuple[int, ...]

    def permute(self, tensor: Tensor, dim: int) -> Tensor:
        """A copy with the tokens along `dim`, which are in row-major order, in the order of strips; dimensions lie in memory as they did."""
        in_memory = memory_order(tensor)
        at = in_memory.index(dim)
        points = tensor.permute(in_memory).unflatten(at, self.shape)
        return _back(_permuted(points, at, self.strips, 0), in_memory)

    def unpermute(self, tensor: Tensor, dim: int) -> Tensor:
        """The way back of `permute`."""
        in_memory = memory_order(tensor)
        at = in_memory.index(dim)
        points = _unpermuted(tensor.permute(in_memory), at, self.shape, self.strips, ())
        return _back(points.flatten(at, at + len(self.shape) - 1), in_memory)

    def rewritten(self, call: BoundProgram | None) -> BoundProgram | None:
        """The program of tokens in this order."""
        if call is None:
            return None
        rewrite = _rewritten.__wrapped__ if torch.compiler.is_compiling() else _rewritten
        program, ints = rewrite(self, call.program, call.ints)
        return BoundProgram(program, call.captures, ints, call.floats, call.repeatable)


class Ordering(NamedTuple):
    """The order a problem is computed in, None where tokens stay as they are, and why."""

    permutation: TokenPermutation | None
    reason: str
    copied: bool = True  # else the engine reads tensors in that order itself


# -- the way of one call -----------------------------------------------------------------------------------------------


def best_permutation(engine: Engine, problem: Problem) -> TokenPermutation | None:
    """The order into which a problem is copied for an engine; None if tokens stay as they are."""
    found = ordering(engine, problem)
    return found.permutation if found.copied else None


def token_permute(permutation: TokenPermutation, problem: Problem) -> Problem:
    """The problem with its tokens in another order: tensors copied, mask and score rewritten."""
    p = problem
    return p.replaced(
        query=permutation.permute(p.query, 2),
        key=_permute_keys(permutation, p.key),
        value=_permute_keys(permutation, p.value),
        mask=permutation.rewritten(p.mask),
        score=permutation.rewritten(p.score),
        grid=None,
    )


def token_unpermute(permutation: TokenPermutation, output: Output, needs_lse: bool) -> Output:
    """The output with its tokens where they were; lse is empty where nobody needs it."""
    lse, max_score = [permutation.unpermute(t, 2) if needs_lse and t.numel() else t.new_empty(0) for t in (output.lse, output.max_score)]
    return Output(permutation.unpermute(output.out, 2), lse, max_score)


def ordering(engine: Engine, problem: Problem) -> Ordering:
    """In which order an engine should compute a problem, and why."""
    p, grid, tile = problem, problem.grid, engine.tile(problem)
    if grid is None:
        return Ordering(None, "the mask is on no grid")
    if tile is None:
        return Ordering(None, f"{engine.name} skips no tiles")
    if len(grid.shape) not in STRIPS:
        return Ordering(None, "the grid has one axis")
    if not p.q_len == p.kv_len == prod(grid.shape):
        return Ordering(None, f"the grid has {prod(grid.shape)} points, the call {p.q_len} queries and {p.kv_len} keys")
    own = engine.own_strips(p) if is_plain(p.tensors) else None  # the operator knows nothing of grids
    if own is not None:
        return Ordering(TokenPermutation(grid.shape, own), f"strips of {'x'.join(map(str, own))} are read from where they lie", copied=False)
    if p.dropout_p > 0:
        return Ordering(None, "dropout is by place")
    if torch.compiler.is_compiling():
        places = [n for t in (p.query, p.key, p.value) for n in (*t.shape, *t.stride())]
        if not _static((*grid.shape, *grid.window, *places)):
            return Ordering(None, "torch.compile compiles for sizes that vary")
    strips, counts = best(grid.shape, grid.window, tile, engine.min_keys_spared)
    return Ordering(TokenPermutation(grid.shape, strips) if strips else None, counts)


def _static(numbers: tuple[int, ...]) -> bool:
    """Whether torch.compile takes these numbers for constants."""
    from torch.fx.experimental import symbolic_shapes

    return hasattr(symbolic_shapes, "has_static_value") and all([symbolic_shapes.has_static_value(n) for n in numbers])


def _permute_keys(permutation: TokenPermutation, tensor: Tensor) -> Tensor:
    """Keys and values of one batch or head that stands for all are copied once, where each does not want a gradient of its own."""
    once = tensor
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        for dim in (0, 1):
            if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
                once = once.narrow(dim, 0, 1)
    return permutation.permute(once, 2).expand(tensor.shape)


@lru_cache(maxsize=256)
def _rewritten(permutation: TokenPermutation, program: Program, ints: tuple[int, ...]) -> tuple[Program, tuple[int, ...]]:
    call = BoundProgram(program, (), ints)
    for name in ("q", "kv"):
        call = in_patches(call, name, *permutation)
    return call.program, call.ints


# -- which order -------------------------------------------------------------------------------------------------------


def best(shape: tuple[int, ...], window: tuple[int, ...], tile: tuple[int, int], worth: int) -> tuple[tuple[int, ...], str]:
    """The strips that leave the fewest tiles, or none if every query saves fewer keys than copies are `worth`; and the counts, in words."""
    return _best(Grid(tuple(shape), tuple(window)), tile, worth)


best._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without what it imports


@lru_cache(maxsize=256)
def _best(grid: Grid, tile: tuple[int, int], worth: int) -> tuple[tuple[int, ...], str]:
    axes = len(grid.shape)
    before = tiles_touched(grid, (1,) * (axes - 1), tile)
    about = "" if ceil(prod(grid.shape) / tile[0]) <= _most_counted(grid) else "about "
    if before * tile[0] * tile[1] / prod(grid.shape) - prod(grid.window) < worth:  # not even patches without a margin would spare so much
        return (), f"{about}{before} tiles of {tile[0]} x {tile[1]} row by row, few more than the windows need: too little for the copies it takes"
    after, strips = min([(tiles_touched(grid, strips, tile), strips) for strips in STRIPS[axes]], key=lambda found: found[0])
    patch = "x".join([str(n) for n in (*strips, max(1, tile[1] // prod(strips)))])
    said = f"{about}{after} tiles of {tile[0]} x {tile[1]} in patches of {patch}, {before} row by row"
    saved = (before - after) * tile[0] * tile[1] / prod(grid.shape)
    return (strips, said) if saved >= worth else ((), f"{said}: too little for the copies it takes")


def tiles_touched(grid: Grid, strips: tuple[int, ...], tile: tuple[int, int]) -> int:
    """How many tiles the neighborhoods of a grid touch in the order of strips, from those of at most _most_counted of its rows of tiles.

    Columns that two tiles share count for both, so that where patches do not divide the strips it may be a few more than it is.
    """
    tokens = prod(grid.shape)
    rows = ceil(tokens / tile[0])
    most = _most_counted(grid)
    counted = range(rows) if rows <= most else [int(k * GOLDEN * rows) % rows for k in range(most)]
    touched = [len(_touched_by(grid, strips, row * tile[0], min((row + 1) * tile[0], tokens), tile[1])) for row in counted]
    return round(sum(touched) * rows / len(touched))


def _most_counted(grid: Grid) -> int:
    return max(LEAST_COUNTED, min(COUNTED, LINES // prod(grid.window[:-1])))


def _touched_by(grid: Grid, strips: tuple[int, ...], first: int, end: int, tile: int) -> set[int]:
    """The tiles of keys that the queries from `first` up to before `end` see."""
    seen: set[int] = set()
    while first < end:
        starts, heights, within = _place(grid.shape, strips, first)
        per = prod(heights)  # tokens of a column
        last = min(end, first - within + per * grid.shape[-1]) - 1  # still in the same strip
        patch = [*[(s, s + h - 1) for s, h in zip(starts, heights, strict=True)], (within // per, (last - first + within) // per)]
        *across, along = [_seen_along(*span, size, window) for span, size, window in zip(patch, *grid, strict=True)]
        for lines in product(*[_strips_of(*span, strip) for span, strip in zip(across, strips, strict=True)]):  # one strip of keys after the other
            low, high = (_index(grid.shape, strips, (*[line[end] for line in lines], along[end])) for end in (0, 1))
            seen.update(range(low // tile, high // tile + 1))
        first = last + 1
    return seen


def _seen_along(first: int, last: int, size: int, window: int) -> tuple[int, int]:
    """What the points from first to last see along an axis: windows are moved inwards at the border."""
    return min(max(first - window // 2, 0), size - window), min(max(last - window // 2, 0), size - window) + window - 1


def _strips_of(first: int, last: int, strip: int) -> list[tuple[int, int]]:
    """The points from first to last, cut where strips begin."""
    return [(max(first, at), min(last, at + strip - 1)) for at in range(first // strip * strip, last + 1, strip)]


def _place(shape: tuple[int, ...], strips: tuple[int, ...], index: int) -> tuple[list[int], list[int], int]:
    """The strip of a token: where it begins and how much it holds along every axis but the last; and the token's number within it."""
    starts: list[int] = []
    heights: list[int] = []
    for axis, strip in enumerate(strips):
        which, index = divmod(index, prod(heights) * strip * prod(shape[axis + 1 :]))
        starts.append(which * strip)
        heights.append(min(strip, shape[axis] - which * strip))
    return starts, heights, index


def _index(shape: tuple[int, ...], strips: tuple[int, ...], point: tuple[int, ...]) -> int:
    """The place of a point in the order of strips."""
    index, per, across = 0, 1, 0
    for axis, strip in enumerate(strips):
        start = point[axis] // strip * strip
        height = min(strip, shape[axis] - start)
        index += per * start * prod(shape[axis + 1 :])
        across = across * height + point[axis] - start
        per *= height
    return index + point[-1] * per + across


# -- tensors -----------------------------------------------------------------------------------------------------------


def memory_order(tensor: Tensor) -> list[int]:
    """The dimensions from the one with the longest steps to the one with the shortest; first those along which one element stands for all."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda d: (strides[d] != 0, -strides[d], d))


def _back(tensor: Tensor, permuted: list[int]) -> Tensor:
    return tensor.permute([permuted.index(d) for d in range(len(permuted))])


def _permuted(points: Tensor, dim: int, strips: tuple[int, ...], across: int) -> Tensor:
    """(..., axes of the grid from `dim` on, `across` axes that lie across the strip, ...) -> (..., tokens, ...)"""
    if not strips:
        return points.flatten(dim, dim + across)
    parts: list[Tensor] = []
    for part, height in _cut(points, dim, points.shape[dim], strips[0], 1):
        cut = part.unflatten(dim, (-1, height)).movedim(dim + 1, dim + 1 + len(strips) + across)
        parts.append(_permuted(cut, dim + 1, strips[1:], across + 1).flatten(dim, dim + 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _unpermuted(tokens: Tensor, dim: int, shape: tuple[int, ...], strips: tuple[int, ...], heights: tuple[int, ...]) -> Tensor:
    """(..., tokens, ...) -> (..., axes of the grid, then as many as `heights` that lie across the strip, ...)"""
    if not strips:
        points: Tensor = tokens.unflatten(dim, (shape[0], *heights))
        return points
    parts: list[Tensor] = []
    each = prod(shape[1:]) * prod(heights)
    for part, height in _cut(tokens, dim, shape[0], strips[0], each):
        points = _unpermuted(part.unflatten(dim, (-1, height * each)), dim + 1, shape[1:], strips[1:], (*heights, height))
        parts.append(points.movedim(dim + len(strips) + 1 + len(heights), dim + 1).flatten(dim, dim + 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _cut(tensor: Tensor, dim: int, size: int, strip: int, each: int) -> list[tuple[Tensor, int]]:
    """The whole strips along a dimension, and the narrower one that may be left, with their widths; `each` elements to a point."""
    left = size % strip
    if left == 0:
        return [(tensor, strip)]
    if left == size:
        return [(tensor, left)]
    whole, rest = tensor.split([(size - left) * each, left * each], dim)
    return [(whole, strip), (rest, left)]
