"""Masks of tokens on a grid of one to three axes: neighborhoods of tokens or of tiles, and the hint that there is a grid."""

from collections.abc import Sequence
from typing import Any

from tilewise.errors import InputError
from tilewise.masks.checks import axis_numbers, one_per_axis, shape_and_window
from tilewise.masks.grid_windows import coordinates, inside_windows
from tilewise.masks.mask import Grid, Mask, MaskFunction, as_mask
from tilewise.named import check_whole, covers, named


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
    sizes, windows = shape_and_window(shape, window, "neighborhood")
    strides, dilations = one_per_axis(stride, len(sizes), "stride"), one_per_axis(dilation, len(sizes), "dilation")
    causals = (is_causal,) * len(sizes) if isinstance(is_causal, bool) else tuple(is_causal)
    if len(causals) != len(sizes) or not all(isinstance(c, bool) for c in causals):
        raise InputError(f"neighborhood: is_causal is True or False, or one of them for each of {len(sizes)} axes, got {is_causal!r}")
    for size, w, s, d in zip(sizes, windows, strides, dilations, strict=True):
        if not 1 <= s <= w or d < 1 or w * d > size:
            raise InputError(f"neighborhood: a stride is from 1 to the window, window * dilation at most the size, got {s}, {d} for {w} of {size}")
    axes = tuple(zip(sizes, windows, strides, dilations, causals, strict=True))

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return inside_windows(coordinates(q, sizes), coordinates(kv, sizes), axes)

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
    return Mask(known.function, known._label, *known._parameters, grid=Grid(*shape_and_window(shape, window, "on_grid")), covers=known.covers)


@named
def sliding_tile(shape: Sequence[int], window: Sequence[int], tile: Sequence[int], text: int = 0) -> Mask:
    """Sliding tile attention: the neighborhood of whole tiles, on tokens stored tile after tile, then `text` tokens.

    Text tokens see everything and are seen by everyone.
    """
    sizes, windows = shape_and_window(shape, window, "sliding_tile")
    tiles = axis_numbers(tile, 1, "sliding_tile", "tile")
    check_whole("sliding_tile", text=text)
    if len(tiles) != len(sizes) or any(t < 1 or s % t or w % t for s, w, t in zip(sizes, windows, tiles, strict=True)):
        raise InputError(f"sliding_tile: shape {sizes} and window {windows} must be multiples of the tile {tiles}")
    counts = tuple(s // t for s, t in zip(sizes, tiles, strict=True))
    axes = tuple([(count, w // t, 1, 1, False) for count, w, t in zip(counts, windows, tiles, strict=True)])
    per_tile, vision = _product(tiles), _product(sizes)

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        q_tile, kv_tile = coordinates(q // per_tile, counts), coordinates(kv // per_tile, counts)
        image = (q < vision) & (kv < vision) & inside_windows(q_tile, kv_tile, axes)
        return image | (q >= vision) | (kv >= vision) if text else image

    return Mask(near, "sliding_tile", _by(sizes), _by(windows), _by(tiles), covers=covers("sliding_tile", q=vision + text, kv=vision + text))


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
