"""The tile map of a band (lang/bands.py) by arithmetic: no tile is looked at, and no kernel runs."""

import torch
from torch import Tensor

from tilewise.lang import Band
from tilewise.tiles.geometry import Geometry
from tilewise.tiles.runs import Runs


def of_band(band: Band, geometry: Geometry) -> tuple[Runs, Runs]:
    """The partial and the full tiles, on the CPU, of one batch element and head.

    Queries first .. last of a row of tiles see between them the keys first + low .. last + high, without gaps; all of them see last + low .. first + high.
    """
    g, (low, high) = geometry, band.clamped
    first = torch.arange(0, g.q_len, g.tile[0], device="cpu")  # [query tiles], whatever the default device is
    last = (first + g.tile[0]).clamp(max=g.q_len) - 1
    seen, seen_end = (first + low).clamp(min=0), (last + high + 1).clamp(max=g.kv_len)
    begin, end = seen // g.tile[1], -(-seen_end // g.tile[1])
    end = torch.where(seen < seen_end, end, begin) if low <= high else begin
    full_begin = -(-(last + low).clamp(min=0) // g.tile[1])
    full_end = torch.where(first + high >= g.kv_len - 1, g.kv_tiles, (first + high + 1) // g.tile[1])  # the last tile may be cut by the end
    some_full = full_begin < full_end
    full_begin, full_end = torch.where(some_full, full_begin, end), torch.where(some_full, full_end, end)
    return _runs([(begin, full_begin), (full_end, end)]), _runs([(full_begin, full_end)])


def _runs(ends: list[tuple[Tensor, Tensor]]) -> Runs:
    """A row's runs, given by their first tile and the one behind their last, without empty ones."""
    start, stop = (torch.stack(tensors, 1) for tensors in zip(*ends, strict=True))  # [rows, runs of a row]
    there = start < stop
    offsets = torch.nn.functional.pad(torch.cumsum(there.sum(1), 0), (1, 0))
    return Runs(offsets.int(), start.masked_select(there).int(), (stop - start).masked_select(there).int())
