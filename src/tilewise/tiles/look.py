"""Classifies tiles by evaluating the mask, where bounds leave them undecided."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.lang import Bounds, Interval, evaluate, point
from tilewise.tiles.geometry import EMPTY, FULL, PARTIAL, Geometry

CHUNK_ELEMENTS = 2**22  # mask elements evaluated at a time
SAMPLES = 4  # points per axis that are tried first
PARTS = 8  # per axis, into which a tile is cut


class Look(NamedTuple):
    """An engine's own way to look into tiles."""

    classify: Callable[[Geometry, Tensor], Tensor]  # tiles, given by their flat index (Cells.numbers), as EMPTY, PARTIAL or FULL
    has_bounds: bool = False  # it evaluates the mask only where the mask's bounds leave a tile undecided


class TorchLook:
    """In plain torch: first at a few sample points, which usually show that a tile is partial, then at the bounds of parts of the tile, then at the corners and
    at last at all elements of the parts that these leave undecided."""

    def __init__(self, bounds: Bounds, together: int) -> None:
        self.bounds = bounds
        self.together = together  # tiles, or parts, evaluated at a time

    def __call__(self, geometry: Geometry, numbers: Tensor) -> Tensor:
        tiles = _boxes(geometry, numbers)
        places = (torch.linspace(0, n - 1, min(SAMPLES, n), dtype=torch.float64, device=numbers.device).round().long() for n in geometry.tile)
        some, every = self._look(tiles, *places)
        undecided = (some == every).nonzero().squeeze(1)
        for at in undecided.split(self.together):
            some[at], every[at] = self._look_into(tiles.pick(at), geometry.tile)
        return torch.where(every, FULL, torch.where(some, PARTIAL, EMPTY))

    def _look(self, boxes: "_Boxes", q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any, and whether all, of the given positions within each box are allowed."""
        together = max(1, min(self.together, CHUNK_ELEMENTS // (len(q_places) * len(kv_places))))
        some, every = zip(*(self._evaluate(chunk, q_places, kv_places) for chunk in boxes.chunks(together)), strict=True)
        return torch.cat(some), torch.cat(every)

    def _evaluate(self, boxes: "_Boxes", q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Positions past the end are clamped to the last one, which changes neither answer."""
        q = torch.minimum(boxes.q[:, None] + q_places, boxes.q_last[:, None])
        kv = torch.minimum(boxes.kv[:, None] + kv_places, boxes.kv_last[:, None])
        inputs = {"b": boxes.b[:, None, None], "h": boxes.h[:, None, None], "q": q[:, :, None], "kv": kv[:, None, :]}
        allowed = torch.as_tensor(evaluate(self.bounds.call, inputs), device=q.device)
        allowed = allowed.expand(len(q), len(q_places), len(kv_places))
        return allowed.flatten(1).any(1), allowed.flatten(1).all(1)

    def _look_into(self, tiles: "_Boxes", size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Whether any, and whether all, elements of each tile are allowed."""
        steps = [-(-n // PARTS) for n in size]
        (q, q_last), (kv, kv_last) = (_parts(*ends, *sizes) for ends, sizes in zip((tiles[2:4], tiles[4:]), zip(size, steps, strict=True), strict=True))
        box = {"b": point(tiles.b[:, None, None].double()), "h": point(tiles.h[:, None, None].double())}
        box |= {"q": Interval(q[:, :, None].double(), q_last[:, :, None].double()), "kv": Interval(kv[:, None, :].double(), kv_last[:, None, :].double())}
        interval = self.bounds.over(box)
        full, empty = (known.expand(len(q), q.shape[1], kv.shape[1]) for known in (interval.lo == 1, interval.hi == 0))
        allows, forbids = full.flatten(1).any(1), empty.flatten(1).any(1)
        tile, i, j = (~full & ~empty).nonzero(as_tuple=True)
        for corners in (True, False):
            left = ~(allows & forbids)[tile]
            tile, i, j = (t.masked_select(left) for t in (tile, i, j))
            if len(tile) == 0:
                break
            places = (torch.arange(0, step, max(step - 1, 1) if corners else 1, device=q.device) for step in steps)
            some, every = self._look(_Boxes(tiles.b[tile], tiles.h[tile], q[tile, i], q_last[tile, i], kv[tile, j], kv_last[tile, j]), *places)
            allows[tile.masked_select(some)] = True
            forbids[tile.masked_select(~every)] = True
        return allows, ~forbids


class _Boxes(NamedTuple):
    """Stretches of queries and of keys, by their first and last."""

    b: Tensor
    h: Tensor
    q: Tensor
    q_last: Tensor
    kv: Tensor
    kv_last: Tensor

    def pick(self, at: Tensor) -> "_Boxes":
        return _Boxes(*(t.index_select(0, at) for t in self))

    def chunks(self, size: int) -> Iterator["_Boxes"]:
        for fields in zip(*(t.split(size) for t in self), strict=True):
            yield _Boxes(*fields)


def _boxes(geometry: Geometry, numbers: Tensor) -> _Boxes:
    """Tiles, given by their flat index."""
    g = geometry
    row, tile_kv = numbers // g.kv_tiles, numbers % g.kv_tiles
    bh, tile_q = row // g.q_tiles, row % g.q_tiles
    q, kv = tile_q * g.tile[0], tile_kv * g.tile[1]
    return _Boxes(bh // g.heads, bh % g.heads, q, (q + g.tile[0]).clamp(max=g.q_len) - 1, kv, (kv + g.tile[1]).clamp(max=g.kv_len) - 1)


def _parts(first: Tensor, last: Tensor, size: int, step: int) -> tuple[Tensor, Tensor]:
    """[n, parts] the first and last of each stretch, of up to `size`, in parts of `step`; parts past the end repeat the last element."""
    begin = torch.minimum(first[:, None] + torch.arange(0, size, step, device=first.device), last[:, None])
    return begin, torch.minimum(begin + step - 1, last[:, None])
