"""Lists of key tiles, chosen from the data, as tiles of a map."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import BoundProgram
from tilewise.masks import Mask, MaskFunction, as_mask
from tilewise.memory import can_be_looked_at
from tilewise.tiles.build import build
from tilewise.tiles.chosen import MOST_TILES, MOST_TILES_ON_CPU, ChosenTiles, lazy_runs, mark, mask_geometry, nothing_chosen, tiles_of
from tilewise.tiles.geometry import FULL, PARTIAL, Geometry, check_cut
from tilewise.tiles.runs import Runs, trimmed


class Listed(NamedTuple):
    """What a map made of lists holds."""

    geometry: Geometry
    partial: Runs
    full: Runs
    mask: BoundProgram | None
    name: str
    chosen: ChosenTiles | None


def of_lists(
    indices: Tensor, counts: Tensor | None, q_len: int, kv_len: int, tile: tuple[int, int], always: Sequence[tuple[int, int]], mask: Mask | MaskFunction | None
) -> Listed:
    """The listed tiles are full; where a mask decides, those that it cuts are partial and those that it forbids are left out."""
    check_cut("from_lists", q_len, kv_len, tile)
    geometry = Geometry(*_lead(indices), q_len, kv_len, tile)
    _check(indices, counts, geometry)
    for first, end in always:
        if not 0 <= first <= end <= geometry.kv_tiles:
            raise InputError(f"from_lists: always holds ranges (first, end) of key tiles from 0 to {geometry.kv_tiles}, got ({first}, {end})")
    known = None if mask is None else as_mask(mask)
    if known is not None and 0 not in (q_len, kv_len):
        known.check_sizes({"q": q_len, "kv": kv_len})
    call, name = (None, "lists") if known is None else (known.traced(), f"lists & {known.name}")
    if geometry.total > (MOST_TILES_ON_CPU if indices.is_cpu else MOST_TILES):
        return Listed(geometry, *_runs_of_lists(indices, counts, always, call, geometry), call, name, None)
    chosen = _chosen(indices, counts, always, geometry, has_mask=call is not None)
    return Listed(geometry, *lazy_runs(geometry, chosen, call), call, name, chosen)


def _chosen(indices: Tensor, counts: Tensor | None, always: Sequence[tuple[int, int]], geometry: Geometry, has_mask: bool) -> ChosenTiles:
    """A copy of what the lists say now, on their device."""
    state = PARTIAL if has_mask else FULL
    states = nothing_chosen(geometry, indices.device)
    mark(states, indices, counts, state)
    tiles = tiles_of(states)
    for first, end in always:
        tiles[..., first:end] = state
    return ChosenTiles(tiles, min(geometry.kv_tiles, indices.shape[3] + sum([end - first for first, end in always])), sharpens=has_mask)


def _lead(indices: Tensor) -> tuple[int, int]:
    if not isinstance(indices, Tensor) or indices.dim() != 4 or indices.dtype not in (torch.int32, torch.int64):
        given = f"{indices.dtype} of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
        raise InputError(f"from_lists takes int32 or int64 indices of shape (batch or 1, heads or 1, query tiles, entries), got {given}")
    return indices.shape[0], indices.shape[1]


def _check(indices: Tensor, counts: Tensor | None, geometry: Geometry) -> None:
    """Raises where the lists are wrong and that can be known without waiting for a GPU."""
    g = geometry
    if indices.shape[2] != g.q_tiles:
        raise InputError(f"from_lists: {g.q_len} queries are {g.q_tiles} tiles of {g.tile[0]}, but the lists are of {indices.shape[2]}")
    counted = indices
    if counts is not None:
        if counts.shape != indices.shape[:3] or counts.is_floating_point():
            raise InputError(f"from_lists takes integer counts of shape {tuple(indices.shape[:3])}, got {counts.dtype} of shape {tuple(counts.shape)}")
        if counts.is_cpu and can_be_looked_at(counts):
            if bool(((counts < 0) | (counts > indices.shape[3])).any()):
                raise InputError(f"from_lists: counts are from 0 to {indices.shape[3]}, the entries of a list, got {int(counts.min())} to {int(counts.max())}")
            counted = indices.masked_fill(torch.arange(indices.shape[3]) >= counts[..., None], -1)
    if indices.is_cpu and can_be_looked_at(indices) and bool((counted >= g.kv_tiles).any()):
        raise InputError(f"from_lists: {g.kv_len} keys are tiles 0 to {g.kv_tiles - 1} of {g.tile[1]}, but tile {int(counted.max())} is listed")


# -- maps of very many tiles -------------------------------------------------------------------------------------------


def _runs_of_lists(
    indices: Tensor, counts: Tensor | None, always: Sequence[tuple[int, int]], call: BoundProgram | None, geometry: Geometry
) -> tuple[Runs, Runs]:
    """The partial and the full tiles, in memory by how many are listed; finding out how many runs that makes waits for a GPU."""
    if counts is not None:
        indices = indices.masked_fill(torch.arange(indices.shape[3], device=indices.device) >= counts[..., None], -1)
    for first, end in always:
        on = torch.arange(first, end, dtype=indices.dtype, device=indices.device)
        indices = torch.cat([indices, on.expand(*indices.shape[:3], -1)], 3)
    partial, full = (indices[..., :0], indices) if call is None else _sharpened(indices, call, geometry)
    return _runs(partial, geometry), _runs(full, geometry)


def _sharpened(indices: Tensor, call: BoundProgram, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The listed tiles that are partial and those that are full, by the mask's own map. What a captured tensor holds may change: then all stay partial."""
    own = None if call.captures else mask_geometry(call, geometry)
    if own is None or not can_be_looked_at(indices):
        return indices, indices[..., :0]
    partial, full = (runs.to(indices.device).dense(own.kv_tiles).to(torch.uint8) for runs in build(call, own, indices.device))
    states = (partial * PARTIAL + full * FULL).view(own.batch, own.heads, own.q_tiles, own.kv_tiles).expand(*indices.shape[:3], -1)
    found = states.gather(3, indices.clamp(0, own.kv_tiles - 1).long())
    return indices.masked_fill(found != PARTIAL, -1), indices.masked_fill(found != FULL, -1)


def _runs(indices: Tensor, geometry: Geometry) -> Runs:
    counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device=indices.device)
    runs = Runs(*torch.ops.tilewise.runs_of_blocks(counts, indices, geometry.kv_tiles))
    return runs if torch.compiler.is_compiling() else trimmed(runs)
