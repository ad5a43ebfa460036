"""Tile maps as the C++ kernels walk them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.core.problem import Problem
from tilewise.tiles import Geometry, Runs, TileMap

LANES = KEYS = 64  # as in kernel/tiles.h


@dataclass(frozen=True)
class Walk:
    """The kernel's `Walk` as numbers, and the tensors they point into."""

    values: tuple[int, ...]
    rows: int
    tile: int
    other_tile: int
    share: float = 1.0  # of all tiles, those that are walked
    kept: tuple[Tensor, ...] = ()


def row_walk(p: Problem) -> Walk:
    """One row per tile of queries."""
    tile_map = map_of(p, (LANES, KEYS))
    if tile_map is None:
        return _everything(p.q_len, LANES, KEYS)
    return tile_map.remember("cpp rows", lambda: _mapped(tile_map, tile_map.partial, tile_map.full, tile_map.geometry.q_tiles, tile_map.tile))


def column_walk(p: Problem) -> Walk:
    """One row per tile of keys: the transposed map."""
    tile_map = map_of(p, (LANES, KEYS))
    if tile_map is None:
        return _everything(p.kv_len, KEYS, LANES)
    return tile_map.remember("cpp columns", lambda: _mapped(tile_map, *tile_map.transpose(), tile_map.geometry.kv_tiles, tile_map.tile[::-1]))


def _everything(length: int, tile: int, other_tile: int) -> Walk:
    rows = -(-length // tile)
    return Walk((0,) * 9 + (rows, tile, other_tile), rows, tile, other_tile)


def _mapped(tile_map: TileMap, partial: Runs, full: Runs, rows: int, tile: tuple[int, int]) -> Walk:
    g: Geometry = tile_map.geometry
    work = torch.zeros(partial.rows, dtype=torch.int64)
    for runs in (partial, full):
        work.index_add_(0, runs.row_of_run(), runs.count.long())
    order = torch.argsort(work.view(-1, rows), dim=1, descending=True, stable=True).int().flatten()
    tensors = tuple(t.contiguous() for t in (order, partial.offsets, partial.start, partial.count, full.offsets, full.start, full.count))
    strides = (g.heads * rows if g.batch > 1 else 0, rows if g.heads > 1 else 0)
    columns = g.kv_tiles if rows == g.q_tiles else g.q_tiles
    share = float(work.sum()) / max(1, work.numel() * columns)
    return Walk((*(t.data_ptr() for t in tensors), *strides, rows, *tile), rows, *tile, share, tensors)
