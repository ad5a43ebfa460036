"""Builds the tile map of a mask: bounds on coarse cells, split where undecided, then exact evaluation of what is left.

1. The plane of tiles is cut into a coarse grid. The mask's interval on each cell says: empty, full or undecided.
2. Undecided cells are split in four until they are single tiles. A causal map costs its boundary, not its area.
3. The tiles still undecided are classified by evaluating the mask (a "look").

A band (causal, a window) needs none of this: bands.py. An engine may bring its own look. One that evaluates the mask in a compiled kernel classifies every
tile of a small map in less time than the bounds take, so small maps skip steps 1 and 2; so do larger ones if the kernel knows the mask's bounds itself.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.lang import BoundProgram, Bounds, Interval, band_of, point, steps
from tilewise.lang.bands import LONGEST
from tilewise.tiles.bands import of_band
from tilewise.tiles.geometry import FULL, PARTIAL, Cells, Geometry
from tilewise.tiles.look import Look, TorchLook
from tilewise.tiles.runs import Pile, Runs, from_dense, from_sets

# Most mask elements of a map that is classified without bounds, on a CPU and on a GPU: a kernel evaluates them in the time of some hundred operations.
SEEN_WHOLE_ON_CPU, SEEN_WHOLE = 2**22, 2**33
# Most tiles of one that is classified by a kernel that has bounds: it takes no longer than a few operations on as many numbers.
BOUNDED_WHOLE = 2**22


class Grain(NamedTuple):
    """Batch sizes."""

    grid: int  # cells of the first, coarse grid
    part: int  # cells that are split together
    looked: int  # tiles that are looked into together


# On a CPU, small enough for torch to stay on one thread: waking another takes longer than the work it would take over, and much
# longer on a busy machine. A GPU wants as much work as possible.
ON_CPU, ON_GPU = Grain(2**14, 2**12, 2**9), Grain(2**16, 2**16, 2**16)


def device_of(call: BoundProgram) -> torch.device:
    """Where a map is computed: on the device of the captured tensors, else on the CPU."""
    for capture in call.captures:
        if capture.dim() > 0:
            return capture.device
    return torch.device("cpu")


def build(call: BoundProgram, geometry: Geometry, device: torch.device, look: Look | None = None) -> tuple[Runs, Runs]:
    """The partial and the full tiles of a mask. `look`, if given, runs on `device`."""
    band = band_of(call) if max(geometry.q_len, geometry.kv_len) < LONGEST else None
    if band is not None and geometry.batch == geometry.heads == 1:
        return of_band(band, geometry)
    if look is not None and _is_seen_whole(geometry, device, look):
        states = look.classify(geometry, torch.arange(geometry.total, device=device)).view(geometry.rows, geometry.kv_tiles)
        partial, full = from_sets(torch.stack([states == PARTIAL, states == FULL]))
        return partial, full
    dense = dense_capture(call, (geometry.batch, geometry.heads, geometry.q_len, geometry.kv_len))
    if dense is not None:
        return of_dense(dense, geometry)
    return _Builder(call, geometry, device_of(call) if look is None else device, look).build()


def _is_seen_whole(geometry: Geometry, device: torch.device, look: Look) -> bool:
    """Whether every tile is looked into, without bounds on coarser cells."""
    most = SEEN_WHOLE_ON_CPU if device.type == "cpu" else SEEN_WHOLE
    return geometry.elements <= most or (look.has_bounds and geometry.total <= BOUNDED_WHOLE)


class _Builder:
    def __init__(self, call: BoundProgram, geometry: Geometry, device: torch.device, look: Look | None) -> None:
        self.geometry = geometry
        self.device = device
        self.grain = ON_CPU if device.type == "cpu" else ON_GPU
        call = replace(call, captures=tuple(t.to(device) for t in call.captures))
        self.bounds = Bounds(call, device)
        self.look = TorchLook(self.bounds, self.grain.looked) if look is None else look.classify
        self.partial, self.full = Pile(device), Pile(device)

    def build(self) -> tuple[Runs, Runs]:
        g = self.geometry
        size = 1
        while size < max(g.q_tiles, g.kv_tiles) and g.batch * g.heads * -(-g.q_tiles // size) * -(-g.kv_tiles // size) > self.grain.grid:
            size *= 2
        if g.total:
            self._refine(self._grid(size), size)
        return self.partial.runs(g.rows), self.full.runs(g.rows)

    def _refine(self, cells: Cells, size: int) -> None:
        """Resolves undecided cells chunk by chunk, depth first, so that few are in memory at a time."""
        for chunk in cells.chunks(self.grain.part):
            if size == 1:
                self._decide(chunk)
            else:
                self._refine(self._split(chunk, size // 2), size // 2)

    def _grid(self, size: int) -> Cells:
        """The coarse cells: records the full ones, returns the undecided.

        Bounds are evaluated by broadcasting, so that what depends on q alone is computed once per row.
        """
        g = self.geometry
        shape = (g.batch, g.heads, -(-g.q_tiles // size), -(-g.kv_tiles // size))
        b, h, q, kv = (torch.arange(n, device=self.device).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape))
        interval = self._interval(b, h, q, kv, size)
        full = (interval.lo == 1).expand(shape)
        undecided = (interval.lo != 1) & (interval.hi != 0)
        runs = from_dense(full.reshape(-1, shape[3]))
        coarse = runs.row_of_run()
        self._record_full(coarse // shape[2], coarse % shape[2], runs.start.long(), runs.count.long(), size)
        return Cells(*undecided.expand(shape).nonzero(as_tuple=True))

    def _split(self, cells: Cells, size: int) -> Cells:
        """Splits each cell in four: records the full ones, returns the undecided."""
        g = self.geometry
        q = torch.cat([cells.q * 2 + dq for dq in (0, 0, 1, 1)])
        kv = torch.cat([cells.kv * 2 + dk for dk in (0, 1, 0, 1)])
        quarters = Cells(cells.b.repeat(4), cells.h.repeat(4), q, kv)
        quarters = quarters.pick((q * size < g.q_tiles) & (kv * size < g.kv_tiles))
        interval = self._interval(quarters.b, quarters.h, quarters.q, quarters.kv, size)
        full = quarters.pick(interval.lo.expand(len(quarters)) == 1)
        self._record_full(full.b * g.heads + full.h, full.q, full.kv, torch.ones_like(full.kv), size)
        return quarters.pick(((interval.lo != 1) & (interval.hi != 0)).expand(len(quarters)))

    def _interval(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, size: int) -> Interval:
        g = self.geometry
        box = {"b": point(b.double()), "h": point(h.double()), "q": steps(q, g.tile[0] * size, g.q_len), "kv": steps(kv, g.tile[1] * size, g.kv_len)}
        return self.bounds.over(box)

    def _record_full(self, bh: Tensor, row: Tensor, start: Tensor, count: Tensor, size: int) -> None:
        """Records full stretches of coarse cells as stretches of tiles, one per row of tiles."""
        g = self.geometry
        step = torch.arange(size, device=self.device)
        tile_row = row[:, None] * size + step
        first = (start * size)[:, None].expand_as(tile_row)
        last = ((start + count) * size).clamp(max=g.kv_tiles)[:, None].expand_as(tile_row)
        inside = tile_row < g.q_tiles
        rows = bh[:, None] * g.q_tiles + tile_row
        self.full.add(rows.masked_select(inside), first.masked_select(inside), (last - first).masked_select(inside))

    def _decide(self, tiles: Cells) -> None:
        """Classifies single tiles that the bounds leave undecided."""
        states = self.look(self.geometry, tiles.numbers(self.geometry))
        for pile, state in ((self.partial, PARTIAL), (self.full, FULL)):
            found = tiles.pick(states == state)
            pile.add((found.b * self.geometry.heads + found.h) * self.geometry.q_tiles + found.q, found.kv, torch.ones_like(found.kv))


def dense_capture(call: BoundProgram, sizes: tuple[int, int, int, int]) -> Tensor | None:
    """The boolean tensor of a mask that is nothing but tensor[..., q, kv], as (1 or B, 1 or H, Sq, Skv).

    A tensor smaller than that does not count as a dense mask: loads past its end read its edge.
    """
    program = call.program
    result = program.instructions[program.results[0]]
    if result.op != "load" or len(result.args) < 2 or not result.type.is_bool:
        return None
    names = [program.instructions[a] for a in result.args]
    if [i.attr for i in names[-2:]] != ["q", "kv"] or any(i.op != "index" for i in names[-2:]):
        return None
    tensor = call.captures[int(result.attr)]
    lead = names[:-2]
    if len(lead) > 2 or any(i.op == "index" and i.attr != w for i, w in zip(lead, ("b", "h")[2 - len(lead) :], strict=True)):
        return None
    if any(i.op != "index" and size != 1 for i, size in zip(lead, tensor.shape, strict=False)):
        return None
    tensor = tensor[(None,) * (2 - len(lead))]
    if any(have < size and (have != 1 or d >= 2) for d, (have, size) in enumerate(zip(tensor.shape, sizes, strict=True))):
        return None
    return tensor[tuple(slice(size) for size in sizes)]


def of_dense(mask: Tensor, geometry: Geometry) -> tuple[Runs, Runs]:
    """The map of a dense mask: any() and all() over every tile, one row of tiles at a time."""
    g = geometry
    mask = mask.expand(g.batch, g.heads, -1, -1)
    some: list[Tensor] = []
    every: list[Tensor] = []
    pad = g.kv_tiles * g.tile[1] - g.kv_len
    for at in range(0, g.q_len, g.tile[0]):
        rows = mask[:, :, at : at + g.tile[0]]
        for found, answer, outside in ((some, rows.any(2), False), (every, rows.all(2), True)):
            padded = torch.nn.functional.pad(answer, (0, pad), value=outside).unflatten(-1, (g.kv_tiles, g.tile[1]))
            found.append(padded.all(-1) if outside else padded.any(-1))
    if not some:
        empty = torch.zeros((g.rows, g.kv_tiles), dtype=torch.bool, device=mask.device)
        return from_dense(empty), from_dense(empty)
    any_, all_ = (torch.stack(s, 2).reshape(g.rows, g.kv_tiles) for s in (some, every))
    partial, full = from_sets(torch.stack([any_ & ~all_, all_]))
    return partial, full
