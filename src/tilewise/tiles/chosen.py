"""Tiles chosen from data: their states lie in memory whose size follows from shapes, so that writing them waits for no GPU.

Lists that a model makes anew in every layer and step go from here to the kernels of GPU engines (engines/gpu/device_map.py). Whoever wants runs, as engines
on a CPU do and all that looks at a map, has them found when it first reads one.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilewise.lang import BoundProgram
from tilewise.memory import can_be_looked_at
from tilewise.tiles.build import build
from tilewise.tiles.geometry import FULL, PARTIAL, Geometry
from tilewise.tiles.runs import Runs, from_sets

MOST_TILES = 2**27  # of a map: a byte each, and in schedules up to eight. Larger maps are made of runs
MOST_TILES_ON_CPU = 2**22  # where nothing waits, and runs of a sparse map are smaller


@dataclass(frozen=True)
class ChosenTiles:
    """A map's tiles, written on the device they lie on."""

    states: Tensor  # (batch, heads, query tiles, key tiles) uint8: EMPTY, PARTIAL or FULL
    most: int  # key tiles of a row that are not empty, at most
    sharpens: bool = False  # partial tiles are those in which the mask may decide: it may turn out to forbid or allow all of one
    in_graph: bool = field(init=False)  # made while a CUDA graph is captured, in memory of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_graph", self.states.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing())

    def to(self, device: torch.device | str) -> "ChosenTiles":
        return ChosenTiles(self.states.to(device), self.most, self.sharpens)


def nothing_chosen(geometry: Geometry, device: torch.device) -> Tensor:
    """(batch, heads, query tiles, key tiles + 2) of EMPTY. The first column and the last are for entries of lists that name no tile: see `tiles_of`."""
    with _versioned():
        return torch.zeros((geometry.batch, geometry.heads, geometry.q_tiles, geometry.kv_tiles + 2), dtype=torch.uint8, device=device)


def tiles_of(states: Tensor) -> Tensor:
    """The states without the two columns that stand for no tile."""
    with _versioned():
        return states[..., 1:-1]


def mark(states: Tensor, indices: Tensor, counts: Tensor | None, state: int) -> None:
    """Write a state into the listed tiles: of each row, the first `counts` entries; those that name no tile go into the outer columns."""
    if counts is not None:
        indices = indices.masked_fill(torch.arange(indices.shape[3], device=indices.device) >= counts[..., None], -1)
    with _versioned():
        states.scatter_(3, indices.clamp(-1, states.shape[3] - 2).long() + 1, state)


def _versioned() -> AbstractContextManager[Any]:
    """Where tensors count their changes in place, as inference tensors do not: engines know a map by its tensors' versions."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def mask_geometry(mask: BoundProgram, geometry: Geometry) -> Geometry | None:
    """The tiles of a mask that stand for those of a map in which it decides; None if the map is one for all batch elements or heads, whose masks differ."""
    g, uses = geometry, mask.program.uses
    if ("b" in uses and g.batch == 1) or ("h" in uses and g.heads == 1):
        return None
    q_len = g.q_len if "q" in uses else min(g.q_len, g.tile[0])  # padding of keys is the same for every query
    return Geometry(g.batch if "b" in uses else 1, g.heads if "h" in uses else 1, q_len, g.kv_len, g.tile)


def sharpened(states: Tensor, own: Geometry, found: Tensor) -> Tensor:
    """What the partial tiles turn out to be, where the mask's own tiles are found to be of these states."""
    return torch.where(states == PARTIAL, found.view(own.batch, own.heads, own.q_tiles, own.kv_tiles).to(states.dtype), states)


class FoundRuns:
    """The runs of chosen tiles, found when they are first asked for, which waits for a GPU."""

    def __init__(self, geometry: Geometry, chosen: ChosenTiles, mask: BoundProgram | None) -> None:
        self.geometry, self._chosen, self._mask = geometry, chosen, mask

    @property
    def device(self) -> torch.device:
        return self._chosen.states.device

    @cached_property
    def runs(self) -> tuple[Runs, ...]:
        """Of partial and of full tiles."""
        g, states = self.geometry, self._chosen.states
        mask = self._mask if self._chosen.sharpens else None
        own = None if mask is None or mask.captures else mask_geometry(mask, g)  # what a captured tensor holds may change; partial stays right
        if own is not None and g.total > 0 and can_be_looked_at(states):
            assert mask is not None
            partial, full = (runs.to(states.device).dense(own.kv_tiles).to(torch.uint8) for runs in build(mask, own, states.device))
            states = sharpened(states, own, partial * PARTIAL + full * FULL)
        rows = states.reshape(g.rows, g.kv_tiles)
        return from_sets(torch.stack([rows == PARTIAL, rows == FULL]))


class LazyRuns(Runs):
    """The partial (0) or the full (1) of runs that are yet to be found."""

    _found: FoundRuns
    _kind: int

    def __init__(self, found: FoundRuns, kind: int) -> None:
        object.__setattr__(self, "_found", found)  # runs are frozen
        object.__setattr__(self, "_kind", kind)

    @property
    def offsets(self) -> Tensor:
        return self._found.runs[self._kind].offsets

    @property
    def start(self) -> Tensor:
        return self._found.runs[self._kind].start

    @property
    def count(self) -> Tensor:
        return self._found.runs[self._kind].count

    @property
    def rows(self) -> int:
        return self._found.geometry.rows

    @property
    def device(self) -> torch.device:
        return self._found.device

    def leave_size_open(self) -> None:
        """torch.compile is given the tiles, not their runs."""


def lazy_runs(geometry: Geometry, chosen: ChosenTiles, mask: BoundProgram | None) -> tuple[LazyRuns, LazyRuns]:
    """The partial and the full runs of chosen tiles."""
    found = FoundRuns(geometry, chosen, mask)
    return LazyRuns(found, 0), LazyRuns(found, 1)
