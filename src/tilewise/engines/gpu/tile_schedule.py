"""Tile schedules: in which order programs take the rows of a tile map, and which tiles each row visits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.core.map_cache import publish, remembered
from tilewise.core.problem import Problem
from tilewise.engines.gpu.device_map import DeviceMap, Tables, device_map_of
from tilewise.engines.gpu.launch import Find
from tilewise.engines.gpu.tile_classifier import kernel_map
from tilewise.tiles import Geometry, Runs


@dataclass(frozen=True)
class TileSchedule:
    """A map as the kernels walk it: the row with most tiles first, and each row's runs of consecutive tiles (see kernels/primitives.py)."""

    count: int  # tiles along the axis that programs are given
    mapped: bool
    tensors: tuple[Any, ...] = (None,) * 4  # order of the rows; offsets [4 rows]; first tile of every run, and the one after its last
    strides: tuple[int, int] = (0, 0)  # from one batch, and from one head, to the next, in rows


def query_schedule(p: Problem, tile: tuple[int, int], find: Find = device_map_of) -> TileSchedule:
    """One row per query tile, over key tiles."""
    if p.device.type == "meta":
        return _stand_in(p)
    made = find(p)
    if made is not None:
        return schedule_from(made, made.rows(tile, by_keys=False), tile, by_keys=False)
    tile_map = kernel_map(p, tile)
    if tile_map is None:
        return TileSchedule(-(-p.q_len // tile[0]), False)

    def make() -> TileSchedule:
        g = tile_map.geometry
        cut = g.kv_len % g.tile[1] != 0
        return _kernel_tiles(*with_cut_tiles(tile_map.full, g.kv_tiles, cut), tile_map.partial, g.q_tiles, g)

    return remembered(tile_map, "query schedule", make)


def key_schedule(p: Problem, tile: tuple[int, int], find: Find = device_map_of) -> TileSchedule:
    """One row per key tile, over query tiles: the transposed map."""
    if p.device.type == "meta":
        return _stand_in(p)
    made = find(p)
    if made is not None:
        return schedule_from(made, made.rows(tile, by_keys=True), tile, by_keys=True)
    tile_map = kernel_map(p, tile)
    if tile_map is None:
        return TileSchedule(-(-p.kv_len // tile[1]), False)

    def make() -> TileSchedule:
        g = tile_map.geometry
        cut = g.q_len % g.tile[0] != 0
        partial, full = tile_map.transpose()
        return _kernel_tiles(*with_cut_tiles(full, g.q_tiles, cut), partial, g.kv_tiles, g)

    return remembered(tile_map, "key schedule", make)


def schedule_from(made: DeviceMap, tables: Tables, tile: tuple[int, int], by_keys: bool) -> TileSchedule:
    """Of a map that is made on the device."""
    form = made.recipe.form
    count = -(-form.kv_len // tile[1]) if by_keys else -(-form.q_len // tile[0])
    return TileSchedule(count, True, (tables.order, tables.offsets, tables.starts, tables.stops), _strides_in_rows(form.batch, form.heads, count))


def _strides_in_rows(batch: int, heads: int, count: int) -> tuple[int, int]:
    return heads * count if batch > 1 else 0, count if heads > 1 else 0


def _stand_in(p: Problem) -> TileSchedule:
    """For building ahead: what the arguments look like, without a map."""
    if p.mask is None and p.tiles is None:
        return TileSchedule(1, False)
    return TileSchedule(1, True, (torch.empty(1, dtype=torch.int32, device="meta"),) * 4)


def with_cut_tiles(full: Runs, columns: int, cut: bool) -> tuple[Runs, Runs]:
    """Full runs, and apart from them the tiles that the end of the sequence cuts: so full tiles need no bounds.

    Each full run is given a cut one, of one tile if it reaches the end and of none elsewhere.
    """
    if not cut:
        return full, Runs(torch.zeros_like(full.offsets), full.start[:0], full.count[:0])
    reaches = (full.start + full.count == columns).int()
    return Runs(full.offsets, full.start, full.count - reaches), Runs(full.offsets, torch.full_like(full.start, columns - 1), reaches)


def _kernel_tiles(full: Runs, cut: Runs, partial: Runs, count: int, g: Geometry) -> TileSchedule:
    offsets, start, size = interleaved((full, cut, partial))
    order = _longest_first(offsets[::3], size, count)
    begins_and_end = offsets.unfold(0, 4, 3).flatten()  # of each row
    tiles = TileSchedule(count, True, (order, begins_and_end, start, start + size), _strides_in_rows(g.batch, g.heads, count))
    publish(offsets.device)
    return tiles


def interleaved(kinds: tuple[Runs, Runs, Runs]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets [3 rows + 1], start and count of the runs of all kinds: those of a row together, one kind after the other."""
    begins = [0, len(kinds[0].start), len(kinds[0].start) + len(kinds[1].start)]  # of each kind, where they lie one after the other
    here = torch.stack([runs.offsets + begin for runs, begin in zip(kinds, begins, strict=True)], 1)  # [rows + 1, kinds]
    ends = torch.cumsum(here.diff(dim=0).flatten(), 0)  # [rows * kinds]
    offsets = torch.nn.functional.pad(ends, (1, 0))
    place = torch.arange(begins[-1] + len(kinds[-1].start), device=ends.device)
    group = torch.searchsorted(ends, place, right=True)
    source = place + (here[:-1].flatten() - offsets[:-1]).index_select(0, group)
    start, count = (torch.cat([getattr(runs, field) for runs in kinds]).index_select(0, source) for field in ("start", "count"))
    return offsets.int(), start, count


def _longest_first(offsets: Tensor, size: Tensor, count: int) -> Tensor:
    """The rows of each (batch, head), those with the most tiles first."""
    before = torch.nn.functional.pad(torch.cumsum(size, 0), (1, 0))  # [runs + 1] tiles before each run
    work = before.index_select(0, offsets).diff().view(-1, count)
    return torch.argsort(work, dim=1, descending=True, stable=True).int().flatten()
