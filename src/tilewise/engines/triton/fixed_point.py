"""Gradients of captured tensors that are the same, bit by bit, in whatever order their shares are added.

Sums of integers do not depend on the order, sums of floats do. A first pass of the query programs finds the largest finite share
of each capture, which no order changes either; a second one adds the shares in whole units of a size that as many shares as there
are scores cannot overflow 64 bits with. A unit is at most 2^-24 of the largest share up to 2^38 scores (16 heads of 131072 tokens).
Shares that are Inf or NaN are added as floats, apart.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.lang import derive

BITS = 62  # of a total: one is the sign's, one is left over for roundings


class Gauges(NamedTuple):
    """What the first pass fills: sums of what is not finite, and the largest finite share of each capture, as the bits of a float32."""

    sums: tuple[Tensor, ...]
    limits: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return *self.sums, self.limits


class Totals(NamedTuple):
    """What the second pass fills: totals in units, and each capture's unit."""

    sums: tuple[Tensor, ...]
    units: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return *self.sums, self.units


def gauges(p: Problem, wanted: frozenset[int]) -> Gauges:
    return Gauges(zeros(p, wanted, torch.float32), torch.zeros(_count(p), dtype=torch.int32, device=p.device))


def totals(p: Problem, wanted: frozenset[int], limits: Tensor) -> Totals:
    assert p.score is not None
    sites = len(derive(p.score.program, wanted).sites)
    most = p.batch * p.heads * p.q_len * p.kv_len * sites
    units = limits.view(torch.float32).double() * 2.0 ** (most.bit_length() - BITS)
    return Totals(zeros(p, wanted, torch.int64), torch.where(units > 0, units, 1.0))


def gradient(slot: int, found: Totals, gauged: Gauges) -> Tensor:
    return found.sums[slot] * found.units[slot] + gauged.sums[slot]


def zeros(p: Problem, wanted: frozenset[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """One per capture; those whose gradient nobody wants stand in as they are."""
    assert p.score is not None
    return tuple([t.new_zeros(t.shape, dtype=dtype) if k in wanted else t for k, t in enumerate(p.score.captures)])


def _count(p: Problem) -> int:
    assert p.score is not None
    return len(p.score.captures)
