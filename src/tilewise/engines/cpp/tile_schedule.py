"""Tile schedules: in which order the C++ kernels take the rows of a tile map, and which tiles each row visits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.core.map_cache import remembered
from tilewise.core.problem import Problem
from tilewise.engines.cpp.tile_classifier import kernel_map
from tilewise.engines.cpp.tile_size import KEYS, LANES
from tilewise.memory import resolved
from tilewise.tiles import Geometry, Runs, TileMap


@dataclass(frozen=True)
class TileSchedule:
    """The kernel's `TileSchedule` (kernel/arguments.h) as numbers, and the tensors they point into."""

    values: tuple[int, ...]
    rows: int
    tile: int
    other_tile: int
    density: float = 1.0  # share of all tiles that are visited
    tensors: tuple[Tensor, ...] = ()


def query_schedule(p: Problem) -> TileSchedule:
    """One row per query tile, over key tiles."""
    tile_map = kernel_map(p, (LANES, KEYS))
    if tile_map is None:
        return _dense_schedule(p.q_len, LANES, KEYS)
    return remembered(
        tile_map, "cpp query schedule", lambda: _sparse_schedule(tile_map, tile_map.partial, tile_map.full, tile_map.geometry.q_tiles, tile_map.tile)
    )


def key_schedule(p: Problem) -> TileSchedule:
    """One row per key tile, over query tiles: the transposed map."""
    tile_map = kernel_map(p, (LANES, KEYS))
    if tile_map is None:
        return _dense_schedule(p.kv_len, KEYS, LANES)
    return remembered(tile_map, "cpp key schedule", lambda: _sparse_schedule(tile_map, *tile_map.transpose(), tile_map.geometry.kv_tiles, tile_map.tile[::-1]))


def _dense_schedule(length: int, tile: int, other_tile: int) -> TileSchedule:
    rows = -(-length // tile)
    return TileSchedule((0,) * 9 + (rows, tile, other_tile), rows, tile, other_tile)


def _sparse_schedule(tile_map: TileMap, partial: Runs, full: Runs, rows: int, tile: tuple[int, int]) -> TileSchedule:
    g: Geometry = tile_map.geometry
    work = torch.zeros(partial.rows, dtype=torch.int64, device=partial.device)
    for runs in (partial, full):
        work.index_add_(0, runs.row_of_run(), runs.count.long())
    order = torch.argsort(work.view(-1, rows), dim=1, descending=True, stable=True).int().flatten()
    tensors = tuple(resolved(t.contiguous()) for t in (order, partial.offsets, partial.start, partial.count, full.offsets, full.start, full.count))
    strides = (g.heads * rows if g.batch > 1 else 0, rows if g.heads > 1 else 0)
    columns = g.kv_tiles if rows == g.q_tiles else g.q_tiles
    density = float(work.sum()) / max(1, work.numel() * columns)
    return TileSchedule((*(t.data_ptr() for t in tensors), *strides, rows, *tile), rows, *tile, density, tensors)
