"""Classifies tiles by evaluating the mask, where bounds leave them undecided."""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.lang import BoundProgram, evaluate
from tilewise.tiles.geometry import EMPTY, FULL, PARTIAL, Geometry

CHUNK_ELEMENTS = 2**22  # mask elements evaluated at a time
SAMPLES = (4, 16)  # points per axis that are tried before the whole tile is evaluated

# Classifies tiles, given by their flat index (Cells.numbers), as EMPTY, PARTIAL or FULL.
Look = Callable[[Geometry, Tensor], Tensor]


class TorchLook:
    """In plain torch: first at a few sample points, which usually show that a tile is partial, then at all points."""

    def __init__(self, call: BoundProgram, together: int) -> None:
        self.call = call
        self.together = together  # tiles evaluated at a time

    def __call__(self, geometry: Geometry, numbers: Tensor) -> Tensor:
        states = torch.full_like(numbers, PARTIAL)
        undecided = torch.arange(len(numbers), device=numbers.device)
        for points in (*SAMPLES, max(geometry.tile)):
            places = (torch.linspace(0, n - 1, min(points, n), dtype=torch.float64, device=numbers.device).round().long() for n in geometry.tile)
            some, every = self._look(geometry, numbers.index_select(0, undecided), *places)
            alike = (some == every).nonzero().squeeze(1)
            undecided, every = undecided.index_select(0, alike), every.index_select(0, alike)
            if len(undecided) == 0:
                return states
        return states.index_copy_(0, undecided, torch.where(every, FULL, EMPTY))

    def _look(self, geometry: Geometry, numbers: Tensor, q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any, and whether all, of the given positions within each tile are allowed."""
        together = max(1, min(self.together, CHUNK_ELEMENTS // (len(q_places) * len(kv_places))))
        some, every = zip(*(self._evaluate(geometry, chunk, q_places, kv_places) for chunk in numbers.split(together)), strict=True)
        return torch.cat(some), torch.cat(every)

    def _evaluate(self, geometry: Geometry, numbers: Tensor, q_places: Tensor, kv_places: Tensor) -> tuple[Tensor, Tensor]:
        """Positions past the end are clamped to the last one, which changes neither answer."""
        g = geometry
        row, tile_kv = numbers // g.kv_tiles, numbers % g.kv_tiles
        bh, tile_q = row // g.q_tiles, row % g.q_tiles
        q = (tile_q[:, None] * g.tile[0] + q_places).clamp(max=g.q_len - 1)
        kv = (tile_kv[:, None] * g.tile[1] + kv_places).clamp(max=g.kv_len - 1)
        b, h = bh // g.heads, bh % g.heads
        inputs = {"b": b[:, None, None], "h": h[:, None, None], "q": q[:, :, None], "kv": kv[:, None, :]}
        allowed = torch.as_tensor(evaluate(self.call, inputs), device=numbers.device)
        allowed = allowed.expand(len(numbers), len(q_places), len(kv_places))
        return allowed.flatten(1).any(1), allowed.flatten(1).all(1)
