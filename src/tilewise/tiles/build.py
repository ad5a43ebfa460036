"""Building the map of a mask: bounds on coarse cells, split where undecided, then an exact look at what is left.

1. The plane of tiles is cut into a coarse grid. The mask's interval on each cell says: empty, full or undecided.
2. Undecided cells are split in four until they are single tiles. A causal map costs its boundary, not its area.
3. Of the tiles still undecided, a few points show most to be partial (one allowed, one not). The rest are evaluated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.lang import Bounds, Call, Interval, evaluate, point, steps
from tilewise.tiles.runs import Pile, Runs, from_dense

CHUNK_ELEMENTS = 2**22  # mask elements evaluated at a time
SAMPLES = (4, 16)  # points per axis that are tried before a tile is evaluated whole


class Grain(NamedTuple):
    """How much is done at a time."""

    grid: int  # cells of the first, coarse grid
    part: int  # cells that are split together
    looked: int  # tiles that are looked into together


# On a CPU, little enough for torch to stay on one thread: waking another takes longer than the work it could take over,
# and much longer on a busy machine. A GPU wants as much as it can get.
ON_CPU, ON_GPU = Grain(2**14, 2**12, 2**9), Grain(2**16, 2**16, 2**16)


@dataclass(frozen=True)
class Geometry:
    """What a map covers: batch and heads are 1 where the mask does not depend on them."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    tile: tuple[int, int]

    @property
    def q_tiles(self) -> int:
        return -(-self.q_len // self.tile[0])

    @property
    def kv_tiles(self) -> int:
        return -(-self.kv_len // self.tile[1])

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.q_tiles

    @property
    def total(self) -> int:
        return self.rows * self.kv_tiles


@dataclass(frozen=True)
class Cells:
    """Squares of 2^k x 2^k tiles, by batch, head and position in units of their own size."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor

    def __len__(self) -> int:
        return len(self.b)

    def pick(self, which: Tensor) -> "Cells":
        """Those where the condition holds."""
        at = which.nonzero().squeeze(1)
        return Cells(*(t.index_select(0, at) for t in (self.b, self.h, self.q, self.kv)))

    def parts(self, size: int) -> "Iterator[Cells]":
        """The cells in parts of at most this size."""
        for at in range(0, len(self), size):
            yield Cells(*(t[at : at + size] for t in (self.b, self.h, self.q, self.kv)))


def device_of(call: Call) -> torch.device:
    """Where a map is computed: with the captured tensors, else on the CPU."""
    for capture in call.captures:
        if capture.dim() > 0:
            return capture.device
    return torch.device("cpu")


def build(call: Call, geometry: Geometry) -> tuple[Runs, Runs]:
    """The partial and the full tiles of a mask."""
    dense = dense_capture(call, (geometry.batch, geometry.heads, geometry.q_len, geometry.kv_len))
    if dense is not None:
        return of_dense(dense, geometry)
    return _Builder(call, geometry).build()


class _Builder:
    def __init__(self, call: Call, geometry: Geometry) -> None:
        self.geometry = geometry
        self.device = device_of(call)
        self.call = replace(call, captures=tuple(t.to(self.device) for t in call.captures))
        self.grain = ON_CPU if self.device.type == "cpu" else ON_GPU
        self.bounds = Bounds(call, self.device)
        self.partial, self.full = Pile(self.device), Pile(self.device)

    def build(self) -> tuple[Runs, Runs]:
        g = self.geometry
        size = 1
        while size < max(g.q_tiles, g.kv_tiles) and g.batch * g.heads * -(-g.q_tiles // size) * -(-g.kv_tiles // size) > self.grain.grid:
            size *= 2
        if g.total:
            self._refine(self._grid(size), size)
        return self.partial.runs(g.rows), self.full.runs(g.rows)

    def _refine(self, cells: Cells, size: int) -> None:
        """Sort out undecided cells, in parts and depth first: few are held at a time, however many there are."""
        for part in cells.parts(self.grain.part):
            if size == 1:
                self._decide(part)
            else:
                self._refine(self._split(part, size // 2), size // 2)

    def _grid(self, size: int) -> Cells:
        """The coarse cells: keep what is full, return what is undecided.

        Bounds on every cell by broadcasting, so that what depends on q alone is computed once per row.
        """
        g = self.geometry
        shape = (g.batch, g.heads, -(-g.q_tiles // size), -(-g.kv_tiles // size))
        b, h, q, kv = (torch.arange(n, device=self.device).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape))
        interval = self._interval(b, h, q, kv, size)
        full = (interval.lo == 1).expand(shape)
        undecided = (interval.lo != 1) & (interval.hi != 0)
        runs = from_dense(full.reshape(-1, shape[3]))
        coarse = runs.row_of_run()
        self._keep(coarse // shape[2], coarse % shape[2], runs.start.long(), runs.count.long(), size)
        return Cells(*undecided.expand(shape).nonzero(as_tuple=True))

    def _split(self, cells: Cells, size: int) -> Cells:
        """Quarter the cells: keep what is full, return what is undecided."""
        g = self.geometry
        q = torch.cat([cells.q * 2 + dq for dq in (0, 0, 1, 1)])
        kv = torch.cat([cells.kv * 2 + dk for dk in (0, 1, 0, 1)])
        quarters = Cells(cells.b.repeat(4), cells.h.repeat(4), q, kv)
        quarters = quarters.pick((q * size < g.q_tiles) & (kv * size < g.kv_tiles))
        interval = self._interval(quarters.b, quarters.h, quarters.q, quarters.kv, size)
        full = quarters.pick(interval.lo.expand(len(quarters)) == 1)
        self._keep(full.b * g.heads + full.h, full.q, full.kv, torch.ones_like(full.kv), size)
        return quarters.pick(((interval.lo != 1) & (interval.hi != 0)).expand(len(quarters)))

    def _interval(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, size: int) -> Interval:
        g = self.geometry
        box = {
            "b": point(b.double()), "h": point(h.double()),
            "q": steps(q, g.tile[0] * size, g.q_len), "kv": steps(kv, g.tile[1] * size, g.kv_len),
        }  # fmt: skip
        return self.bounds.over(box)

    def _keep(self, bh: Tensor, row: Tensor, start: Tensor, count: Tensor, size: int) -> None:
        """Remember full stretches of coarse cells as stretches of tiles, one per row of tiles."""
        g = self.geometry
        step = torch.arange(size, device=self.device)
        tile_row = row[:, None] * size + step
        first = (start * size)[:, None].expand_as(tile_row)
        last = ((start + count) * size).clamp(max=g.kv_tiles)[:, None].expand_as(tile_row)
        inside = tile_row < g.q_tiles
        rows = bh[:, None] * g.q_tiles + tile_row
        self.full.add(rows.masked_select(inside), first.masked_select(inside), (last - first).masked_select(inside))

    def _decide(self, tiles: Cells) -> None:
        """Look into tiles that bounds leave open: at some points, which mostly show that a tile is partial, then at all."""
        for points in (*SAMPLES, max(self.geometry.tile)):
            places = (torch.linspace(0, n - 1, min(points, n), dtype=torch.float64, device=self.device).round().long() for n in self.geometry.tile)
            some, every = self._look(tiles, *places)
            self._add(self.partial, tiles.pick(some & ~every))
            tiles, allowed = tiles.pick(some == every), every[some == every]
            if len(tiles) == 0:
                return
        self._add(self.full, tiles.pick(allowed))

    def _add(self, pile: Pile, tiles: Cells) -> None:
        g = self.geometry
        pile.add((tiles.b * g.heads + tiles.h) * g.q_tiles + tiles.q, tiles.kv, torch.ones_like(tiles.kv))

    def _look(self, tiles: Cells, q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any, and whether every, of the given places within each tile is allowed; some tiles at a time."""
        together = max(1, min(self.grain.looked, CHUNK_ELEMENTS // (len(q_places) * len(kv_places))))
        some, every = zip(*(self._evaluate(part, q_places, kv_places) for part in tiles.parts(together)), strict=True)
        return torch.cat(some), torch.cat(every)

    def _evaluate(self, tiles: Cells, q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Places past the end count as the last one, which changes neither answer."""
        g = self.geometry
        q = (tiles.q[:, None] * g.tile[0] + q_places).clamp(max=g.q_len - 1)
        kv = (tiles.kv[:, None] * g.tile[1] + kv_places).clamp(max=g.kv_len - 1)
        inputs = {"b": tiles.b[:, None, None], "h": tiles.h[:, None, None], "q": q[:, :, None], "kv": kv[:, None, :]}
        allowed = torch.as_tensor(evaluate(self.call, inputs), device=self.device)
        allowed = allowed.expand(len(tiles.b), len(q_places), len(kv_places))
        return allowed.flatten(1).any(1), allowed.flatten(1).all(1)


def dense_capture(call: Call, sizes: tuple[int, int, int, int]) -> Tensor | None:
    """The boolean tensor of a mask that is nothing but tensor[..., q, kv], as (1 or B, 1 or H, Sq, Skv).

    A tensor shorter than that is no dense mask: loads past its end read its edge.
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
    """The map of a dense mask: any and all of every tile, a row of tiles at a time."""
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
    return from_dense(any_ & ~all_), from_dense(all_)
