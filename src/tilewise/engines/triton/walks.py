"""Tile maps as the kernels walk them."""

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.engines.triton.config import Config
from tilewise.engines.triton.looking import kernel_map
from tilewise.problem import Problem
from tilewise.tiles import Geometry, Runs
from tilewise.tiles.runs import from_entries


@dataclass(frozen=True)
class KernelTiles:
    """A map as the kernels walk it: which row first, and each row's partial and full runs."""

    count: int  # tiles along the axis that programs are given
    mapped: bool
    tensors: tuple[Any, ...] = (None,) * 7  # order; offsets, start, count of the partial runs; the same of the full ones
    strides: tuple[int, int] = (0, 0)  # from one batch, and from one head, to the next, in rows


def row_tiles(p: Problem, config: Config) -> KernelTiles:
    """One row of the map per query tile."""
    if p.device.type == "meta":
        return _stand_in(p)
    tile_map = kernel_map(p, (config.m, config.n))
    if tile_map is None:
        return KernelTiles(-(-p.q_len // config.m), False)

    def make() -> KernelTiles:
        g = tile_map.geometry
        cut = g.kv_len % g.tile[1] != 0
        return _kernel_tiles(*with_tail_partial(tile_map.partial, tile_map.full, g.kv_tiles, cut), g.q_tiles, g)

    return tile_map.remember("kernel rows", make)


def column_tiles(p: Problem, config: Config) -> KernelTiles:
    """One row per key tile: the transposed map."""
    if p.device.type == "meta":
        return _stand_in(p)
    tile_map = kernel_map(p, (config.m, config.n))
    if tile_map is None:
        return KernelTiles(-(-p.kv_len // config.n), False)

    def make() -> KernelTiles:
        g = tile_map.geometry
        cut = g.q_len % g.tile[0] != 0
        return _kernel_tiles(*with_tail_partial(*tile_map.transpose(), g.q_tiles, cut), g.kv_tiles, g)

    return tile_map.remember("kernel columns", make)


def _stand_in(p: Problem) -> KernelTiles:
    """For building ahead: what the arguments look like, without a map."""
    if p.mask is None and p.tiles is None:
        return KernelTiles(1, False)
    return KernelTiles(1, True, (torch.empty(1, dtype=torch.int32, device="meta"),) * 7)


def _kernel_tiles(partial: Runs, full: Runs, count: int, g: Geometry) -> KernelTiles:
    work = torch.zeros(partial.rows, dtype=torch.int64, device=partial.device)
    for runs in (partial, full):
        work.index_add_(0, runs.row_of_run(), runs.count.long())
    order = torch.argsort(work.view(-1, count), dim=1, descending=True, stable=True).int().flatten()
    strides_in_rows = (g.heads * count if g.batch > 1 else 0, count if g.heads > 1 else 0)
    tensors = (order, partial.offsets, partial.start, partial.count, full.offsets, full.start, full.count)
    return KernelTiles(count, True, tensors, strides_in_rows)


def with_tail_partial(partial: Runs, full: Runs, columns: int, cut: bool) -> tuple[Runs, Runs]:
    """Where the end cuts the last column of tiles, its full tiles become partial, so that full tiles need no bounds."""
    if not cut:
        return partial, full
    row, start, count = full.row_of_run(), full.start.long(), full.count.long()
    reaches = start + count == columns
    shorter = count - reaches.long()
    rows = torch.cat([partial.row_of_run(), row[reaches]])
    starts = torch.cat([partial.start.long(), torch.full_like(row[reaches], columns - 1)])
    counts = torch.cat([partial.count.long(), torch.ones_like(row[reaches])])
    left = shorter > 0
    return from_entries(rows, starts, counts, full.rows), from_entries(row[left], start[left], shorter[left], full.rows)
