"""Building the map of a mask: bounds on coarse cells, split where undecided, then an exact look at what is left.

1. The plane of tiles is cut into a coarse grid. The mask's interval on each cell says: empty, full or undecided.
2. Undecided cells are split in four until they are single tiles. A causal map costs its boundary, not its area.
3. Of the tiles still undecided, a few points show most to be partial (one allowed, one not). The rest are evaluated.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.lang import Bounds, Call, Interval, evaluate
from tilewise.tiles.runs import Runs, from_dense, from_entries

GRID_CELLS = 2**18  # cells of the first, coarse grid
CHUNK_ELEMENTS = 2**22  # mask elements evaluated at a time in the exact pass
SAMPLES = 4  # points per axis that are tried before a tile is evaluated whole


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

    def pick(self, which: Tensor) -> "Cells":
        return Cells(self.b[which], self.h[which], self.q[which], self.kv[which])


def device_of(call: Call) -> torch.device:
    """Where a map is computed: with the captured tensors, else on the CPU."""
    for capture in call.captures:
        if capture.dim() > 0:
            return capture.device
    return torch.device("cpu")


def build(call: Call, geometry: Geometry) -> tuple[Runs, Runs]:
    """The partial and the full tiles of a mask."""
    dense = dense_capture(call)
    if dense is not None:
        return of_dense(dense, geometry)
    return _Builder(call, geometry).build()


class _Builder:
    def __init__(self, call: Call, geometry: Geometry) -> None:
        self.call = call
        self.geometry = geometry
        self.device = device_of(call)
        self.bounds = Bounds(call, self.device)
        self.full: list[tuple[Tensor, Tensor, Tensor]] = []  # (row, start, count) of full stretches

    def build(self) -> tuple[Runs, Runs]:
        g = self.geometry
        if g.total == 0:
            nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
            return from_entries(nothing, nothing, nothing, g.rows), from_entries(nothing, nothing, nothing, g.rows)
        size = 1
        while g.batch * g.heads * -(-g.q_tiles // size) * -(-g.kv_tiles // size) > GRID_CELLS:
            size *= 2
        cells = self._grid(size)
        while size > 1 and len(cells.b):
            size //= 2
            cells = self._split(cells, size)
        return self._decide(cells)

    def _grid(self, size: int) -> Cells:
        """Bounds on every coarse cell by broadcasting, so that what depends on q alone is computed once per row."""
        g = self.geometry
        shape = (g.batch, g.heads, -(-g.q_tiles // size), -(-g.kv_tiles // size))
        b, h, q, kv = (torch.arange(n, device=self.device).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape))
        interval = self._interval(b, h, q, kv, size)
        full = (interval.lo == 1).expand(shape)
        undecided = (interval.lo != 1) & (interval.hi != 0)
        runs = from_dense(full.reshape(-1, shape[3]))
        coarse = runs.row_of_run()
        bh, row = coarse // shape[2], coarse % shape[2]
        self._keep(bh, row, runs.start.long(), runs.count.long(), size)
        return Cells(*undecided.expand(shape).nonzero(as_tuple=True))

    def _split(self, cells: Cells, size: int) -> Cells:
        """Quarter the cells; keep what is full, return what is undecided."""
        g = self.geometry
        q = torch.cat([cells.q * 2 + dq for dq in (0, 0, 1, 1)])
        kv = torch.cat([cells.kv * 2 + dk for dk in (0, 1, 0, 1)])
        quarters = Cells(cells.b.repeat(4), cells.h.repeat(4), q, kv)
        quarters = quarters.pick((q * size < g.q_tiles) & (kv * size < g.kv_tiles))
        interval = self._interval(quarters.b, quarters.h, quarters.q, quarters.kv, size)
        full = quarters.pick(interval.lo.expand(len(quarters.b)) == 1)
        self._keep(full.b * g.heads + full.h, full.q, full.kv, torch.ones_like(full.kv), size)
        return quarters.pick(((interval.lo != 1) & (interval.hi != 0)).expand(len(quarters.b)))

    def _interval(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, size: int) -> Interval:
        g = self.geometry

        def positions(cell: Tensor, tile: int, length: int) -> Interval:
            step = tile * size
            return Interval((cell * step).double(), ((cell + 1) * step - 1).clamp(max=length - 1).double())

        points = {"b": Interval(b.double(), b.double()), "h": Interval(h.double(), h.double())}
        box = points | {"q": positions(q, g.tile[0], g.q_len), "kv": positions(kv, g.tile[1], g.kv_len)}
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
        self.full.append((rows[inside], first[inside], (last - first)[inside]))

    def _decide(self, tiles: Cells) -> tuple[Runs, Runs]:
        """Look into the tiles that bounds leave open."""
        g = self.geometry
        some, every = self._sample(tiles)
        partial = some & ~every
        open_tiles = (~partial).nonzero().squeeze(1)
        full = torch.zeros_like(partial)
        chunk = max(1, CHUNK_ELEMENTS // (g.tile[0] * g.tile[1]))
        for at in range(0, len(open_tiles), chunk):
            which = open_tiles[at : at + chunk]
            some, every = self._evaluate(tiles.pick(which), *(torch.arange(n, device=self.device) for n in g.tile))
            partial[which], full[which] = some & ~every, every
        rows = (tiles.b * g.heads + tiles.h) * g.q_tiles + tiles.q
        one = torch.ones_like(rows)
        self.full.append((rows[full], tiles.kv[full], one[full]))
        entries = (torch.cat(parts) for parts in zip(*self.full, strict=True))
        return from_entries(rows[partial], tiles.kv[partial], one[partial], g.rows), from_entries(*entries, g.rows)

    def _sample(self, tiles: Cells) -> tuple[Tensor, Tensor]:
        places = (torch.linspace(0, n - 1, SAMPLES, device=self.device).long() for n in self.geometry.tile)
        return self._evaluate(tiles, *places)

    def _evaluate(self, tiles: Cells, q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any, and whether every, of the given places within each tile is allowed.

        Places past the end count as the last one, which changes neither answer.
        """
        g = self.geometry
        q = (tiles.q[:, None] * g.tile[0] + q_places).clamp(max=g.q_len - 1)
        kv = (tiles.kv[:, None] * g.tile[1] + kv_places).clamp(max=g.kv_len - 1)
        inputs = {"b": tiles.b[:, None, None], "h": tiles.h[:, None, None], "q": q[:, :, None], "kv": kv[:, None, :]}
        allowed = torch.as_tensor(evaluate(self.call, inputs), device=self.device)
        allowed = allowed.expand(len(tiles.b), len(q_places), len(kv_places))
        return allowed.flatten(1).any(1), allowed.flatten(1).all(1)


def dense_capture(call: Call) -> Tensor | None:
    """The boolean tensor of a mask that is nothing but tensor[..., q, kv], as (1 or B, 1 or H, Sq, Skv)."""
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
    return tensor[(None,) * (2 - len(lead))]


def of_dense(mask: Tensor, geometry: Geometry) -> tuple[Runs, Runs]:
    """The map of a dense mask: any and all of every tile, a row of tiles at a time."""
    g = geometry
    mask = mask[:, :, : g.q_len, : g.kv_len].expand(g.batch, g.heads, -1, -1)
    some, every = [], []
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
