"""What a tile map covers, and cells in it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.errors import InputError
from tilewise.named import is_whole

EMPTY, PARTIAL, FULL = 0, 1, 2  # states of a tile: nothing allowed, some, everything


def check_tile(who: str, tile: Any) -> None:
    if not isinstance(tile, (tuple, list)) or len(tile) != 2 or not all([is_whole(size) for size in tile]):
        advice = f"; write tile=({tile}, {tile})" if is_whole(tile) else ""
        raise InputError(f"{who}: tile is a pair of whole numbers, the queries and keys of a tile, got {tile!r}{advice}")


def check_cut(who: str, q_len: int, kv_len: int, tile: Any) -> None:
    """Raises unless a map of these lengths can be cut into such tiles."""
    check_tile(who, tile)
    if min(q_len, kv_len) < 0 or min(tile) < 1:
        raise InputError(f"{who} takes lengths >= 0 and tiles >= 1, got q_len={q_len}, kv_len={kv_len}, tile={tile}")


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

    @property
    def elements(self) -> int:
        return self.batch * self.heads * self.q_len * self.kv_len


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

    def numbers(self, geometry: Geometry) -> Tensor:
        """The flat index of single tiles among all tiles, row-major."""
        g = geometry
        return ((self.b * g.heads + self.h) * g.q_tiles + self.q) * g.kv_tiles + self.kv

    def chunks(self, size: int) -> "Iterator[Cells]":
        """The cells in chunks of at most this size."""
        for at in range(0, len(self), size):
            yield Cells(*(t[at : at + size] for t in (self.b, self.h, self.q, self.kv)))
