"""Where a part of a problem lies in the whole, as in context parallelism: what dropout is drawn by."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SQUARE = 16  # dropout draws for aligned squares of so many queries and keys (engines/dropout.py)


@dataclass(frozen=True, eq=False)
class Places:
    """The positions of a part's tokens in the whole sequence, and how many batch elements and heads come before the part. Nobody writes to these tensors:
    what follows from them is kept, and one object may serve many problems."""

    query: Tensor  # [Sq] int64, on the problem's device
    key: Tensor  # [Skv] int64
    batch: int = 0
    head: int = 0

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor]:
        """Which square of the whole every SQUARE queries are, and every SQUARE keys: [Sq / SQUARE] and [Skv / SQUARE] int32, both rounded up. That says all
        unless tokens are `scattered`."""
        query, key = ((positions[::SQUARE] // SQUARE).to(torch.int32) for positions in (self.query, self.key))
        return query, key

    @cached_property
    def scattered(self) -> str | None:
        """The first token that does not stand where it would if every SQUARE of them were whole squares (the last may be shorter); None if all do. Looks at
        the positions, so on a GPU the host waits once."""
        return _first_astray("query", self.query) or _first_astray("key", self.key)


def _first_astray(name: str, positions: Tensor) -> str | None:
    place = torch.arange(len(positions), device=positions.device)
    aligned = positions[place // SQUARE * SQUARE] // SQUARE * SQUARE + place % SQUARE
    astray = (positions != aligned).nonzero()
    if not len(astray):
        return None
    at = int(astray[0])
    return f"{name} {at} at position {int(positions[at])} instead of {int(aligned[at])}"
