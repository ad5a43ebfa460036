"""What a tile map must be, computed the slow way: the dense mask by plain torch, then every tile looked at."""

from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.lang import INDICES, evaluate
from tilewise.tiles import EMPTY, FULL, PARTIAL


def grid(*sizes: int) -> list[Tensor]:
    """b, h, q, kv as index tensors that broadcast against each other."""
    return [torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(sizes)]


def dense_mask(mask: Any, *sizes: int) -> Tensor:
    """(batch, heads, queries, keys): the mask function called on real indices, without tilewise's tracing."""
    return torch.as_tensor(mask(*grid(*sizes))).expand(sizes)


def states_of(dense: Tensor, tile: tuple[int, int]) -> Tensor:
    """(batch, heads, query tiles, key tiles) of 0 empty, 1 partial, 2 full."""
    if dense.numel() == 0:
        return torch.zeros((*dense.shape[:2], -(-dense.shape[2] // tile[0]), -(-dense.shape[3] // tile[1])), dtype=torch.uint8)

    def tiles(outside: bool) -> Tensor:
        whole = torch.nn.functional.pad(dense, (0, -dense.shape[3] % tile[1], 0, -dense.shape[2] % tile[0]), value=outside)
        return whole.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0])).transpose(3, 4).flatten(4)

    return torch.where(tiles(True).all(4), FULL, torch.where(tiles(False).any(4), PARTIAL, EMPTY)).to(torch.uint8)


def elements_of(tile_map: tw.TileMap) -> Tensor:
    """(batch, heads, queries, keys) as the map means it: full tiles allow everything, partial ones what its mask allows."""
    shape = tile_map.shape
    states = tile_map.dense().repeat_interleave(tile_map.tile[0], 2).repeat_interleave(tile_map.tile[1], 3)[:, :, : shape[2], : shape[3]]
    inside = torch.ones((), dtype=torch.bool)
    if tile_map.mask is not None:
        inside = torch.as_tensor(evaluate(tile_map.mask, dict(zip(INDICES, grid(*shape), strict=True))))
    return (states == FULL) | ((states == PARTIAL) & inside)


def check_runs(tile_map: tw.TileMap) -> None:
    """Runs are int32, sorted, disjoint, not touching, inside the map, and no tile is both partial and full."""
    g = tile_map.geometry
    for runs in (tile_map.partial, tile_map.full):
        assert runs.offsets.dtype == runs.start.dtype == runs.count.dtype == torch.int32
        assert runs.rows == g.rows
        assert int(runs.offsets[0]) == 0
        assert int(runs.offsets[-1]) == len(runs.start) == len(runs.count)
        row, start, end = runs.row_of_run(), runs.start, runs.start + runs.count
        assert bool((runs.count > 0).all())
        assert bool((start >= 0).all()) and bool((end <= g.kv_tiles).all())
        assert bool(((row[1:] > row[:-1]) | (start[1:] > end[:-1])).all())
    assert tile_map.computed_tiles == int((tile_map.dense() != EMPTY).sum())


def check_map(tile_map: tw.TileMap, dense: Tensor) -> None:
    """The map is exactly that of the dense mask, which may have more batch elements and heads than the map needs."""
    check_runs(tile_map)
    wanted = states_of(dense, tile_map.tile)
    torch.testing.assert_close(tile_map.dense().expand_as(wanted), wanted, rtol=0, atol=0)
