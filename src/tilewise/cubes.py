"""Tokens of a grid (frames, height, width) cube after cube: every cube is one tile, and a tile is a place in the video.

Cubes at the border of a grid that they do not divide have empty places, so that all are of one size. Text tokens, before or after the grid's in the
sequence, come after all cubes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.engines.base import is_plain
from tilewise.errors import InputError


@dataclass(frozen=True, eq=False)
class Cubes:
    """An order of tokens by cubes, made by `cubes`."""

    grid: tuple[int, ...]
    cube: tuple[int, ...]
    order: Tensor
    """(places,): the token at every place, -1 where a cube at the border has none. The cubes, then text."""
    place: Tensor
    """(tokens,): the place of every token."""

    @property
    def size(self) -> int:
        """Places of a cube."""
        return math.prod(self.cube)

    @property
    def count(self) -> int:
        """How many cubes there are."""
        return math.prod([-(-n // c) for n, c in zip(self.grid, self.cube, strict=True)])

    @property
    def text(self) -> int:
        """How many tokens are in no cube."""
        return len(self.order) - self.count * self.size

    @property
    def is_ragged(self) -> bool:
        """Whether some cubes have empty places."""
        return any(n % c for n, c in zip(self.grid, self.cube, strict=True))

    @property
    def inside(self) -> Tensor:
        """(places,): whether there is a token at a place."""
        return self.order >= 0

    def permute(self, tensor: Tensor, dim: int = 2) -> Tensor:
        """A copy with tokens in this order along a dimension; at empty places there is some token, for a mask to hide."""
        return tensor.index_select(dim, self.order.clamp(min=0))

    def unpermute(self, tensor: Tensor, dim: int = 2) -> Tensor:
        """The way back of `permute`: empty places are dropped."""
        return tensor.index_select(dim, self.place)

    def means(self, tensor: Tensor, visible: Tensor | None = None) -> Tensor:
        """(..., places, width), in this order -> (..., cubes, width): the mean token of every cube, in float32 or float64. With `visible`, (..., places)
        booleans, the mean of those; 0 where there is none."""
        tokens = self.in_cubes(tensor, -2)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        if visible is None and not self.is_ragged:
            return tokens.mean(-2, dtype=dtype)
        counted = self.in_cubes(self.inside if visible is None else visible, -1).unsqueeze(-1)
        total: Tensor = torch.where(counted, tokens, 0).sum(-2, dtype=dtype)
        return total / counted.sum(-2).clamp(min=1)

    def in_cubes(self, tensor: Tensor, dim: int) -> Tensor:
        """Places in this order, without text, as cubes and the places of each."""
        cut: Tensor = tensor.narrow(dim, 0, self.count * self.size).unflatten(dim, (self.count, self.size))
        return cut


def cubes(grid: Sequence[int], cube: Sequence[int] = (4, 4, 4), *, before: int = 0, after: int = 0, device: torch.device | str | None = None) -> Cubes:
    """The order of tokens by cubes.

    Args:
        grid: Frames, height and width, of tokens in row-major order; or a grid of fewer axes.
        cube: As many points along each axis. Cubes of 64 or 128 points, as 4 x 4 x 4 or 1 x 8 x 16, suit every engine. Those at the border may hold fewer.
        before: Text tokens before those of the grid.
        after: Text tokens after them.
        device: Where the order is used.
    """
    sizes, edges = tuple(grid), tuple(cube)
    if not len(sizes) == len(edges) > 0 or min(*sizes, *edges) < 1 or min(before, after) < 0:
        raise InputError(
            "cubes takes a grid, a cube with as many axes, both of at least 1 point along each, and text tokens of at least 0, "
            f"got {sizes}, {edges}, {before} and {after}"
        )
    points = math.prod(sizes)
    text = torch.cat([torch.arange(before), torch.arange(before + points, before + points + after)])
    inner = _in_cubes(sizes, edges)
    order = torch.cat([torch.where(inner >= 0, inner + before, inner), text])
    place = torch.empty(before + points + after, dtype=torch.int64)
    place[order[order >= 0]] = torch.arange(len(order))[order >= 0]
    return Cubes(sizes, edges, order.to(device), place.to(device))


def cubes_for(tensor: Tensor, grid: Sequence[int], cube: Sequence[int], after: int = 0) -> Cubes:
    """The order of a call's tokens, kept for the next call: making it waits for a GPU. Nothing is kept of calls that torch traces."""
    make = _kept if is_plain((tensor,)) else _kept.__wrapped__
    return make(tuple(grid), tuple(cube), after, tensor.device)


@lru_cache(maxsize=8)
def _kept(grid: tuple[int, ...], cube: tuple[int, ...], after: int, device: torch.device) -> Cubes:
    with torch.inference_mode(False):  # else a model that sampled in inference mode could not be trained after
        return cubes(grid, cube, after=after, device=device)


def _in_cubes(sizes: tuple[int, ...], edges: tuple[int, ...]) -> Tensor:
    """The points of a row-major grid cube after cube; -1 where a cube at the border has none."""
    points = torch.arange(math.prod(sizes)).view(sizes)
    counts = [-(-n // c) for n, c in zip(sizes, edges, strict=True)]
    room = [0 if side == 0 else counts[axis] * edges[axis] - sizes[axis] for axis in reversed(range(len(sizes))) for side in (0, 1)]
    split = functional.pad(points, room, value=-1).view([n for pair in zip(counts, edges, strict=True) for n in pair])
    return split.permute([*range(0, split.dim(), 2), *range(1, split.dim(), 2)]).flatten()
