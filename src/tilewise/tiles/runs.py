"""Runs: for every row, the stretches of consecutive columns that belong to a set.

A causal map of a million tokens has one stretch per row, so thousands of numbers stand for tens of millions of tiles.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOOSE = 2**14  # stretches that are collected before they are joined
Stretches = tuple[Tensor, Tensor, Tensor]  # the row, start and count of each


@dataclass(frozen=True)
class Runs:
    """Row r holds the runs offsets[r] .. offsets[r + 1]; run k covers columns start[k] .. start[k] + count[k].

    Runs of a row are sorted, disjoint and do not touch.
    """

    offsets: Tensor  # [rows + 1] int32
    start: Tensor  # [runs] int32
    count: Tensor  # [runs] int32

    @property
    def rows(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def leave_size_open(self) -> None:
        """Tell torch.compile that the number of runs is a matter of contents: another map, of none, one or many runs, is then the same graph.

        What torch._dynamo.mark_unbacked sets, without what it imports.
        """
        for runs in (self.start, self.count):
            runs._dynamo_unbacked_indices = {0}  # type: ignore[attr-defined]  # Dynamo's own marks
            runs._has_dynamo_dim_marking = True  # type: ignore[attr-defined]  # likewise

    def total(self) -> int:
        """How many cells are covered."""
        return int(self.count.sum(dtype=torch.int64))

    def row_of_run(self) -> Tensor:
        """[runs] the row of every run."""
        return owners(self.offsets, len(self.start))

    def to(self, device: torch.device | str) -> "Runs":
        return Runs(self.offsets.to(device), self.start.to(device), self.count.to(device))

    def cells(self) -> tuple[Tensor, Tensor]:
        """Every covered cell as (row, column), in order."""
        return expand(self.row_of_run(), self.start.long(), self.count.long())

    def select(self, rows: Tensor) -> "Runs":
        """The given rows, in the given order."""
        lengths = (self.offsets[1:] - self.offsets[:-1]).long()[rows]
        new_row, run = expand(torch.arange(len(rows), device=self.device), self.offsets[:-1].long()[rows], lengths)
        return from_entries(new_row, self.start.long()[run], self.count.long()[run], len(rows))

    def dense(self, columns: int) -> Tensor:
        """[rows, columns] whether a cell is covered: every end of a run toggles it, from there on."""
        first = self.row_of_run() * (columns + 1) + self.start
        # int32: on a GPU, torch's index_add_ of smaller integers works on 4-byte words and reads past the end of a tensor whose size is no multiple of 4.
        toggles = torch.zeros((self.rows, columns + 1), dtype=torch.int32, device=self.device)
        ends = torch.cat([first, first + self.count])
        toggles.view(-1).index_add_(0, ends, torch.ones_like(ends, dtype=torch.int32))
        return torch.cumsum(toggles, 1, dtype=torch.int32)[:, :columns] & 1 != 0

    def transpose(self, groups: int, columns: int) -> "Runs":
        """Rows become columns within each of `groups` equal blocks of rows.

        The cells in which two neighbouring rows differ are where a column's runs begin or end. They follow from the
        runs' own ends: an end that two neighbouring rows share cancels out. So the cost is that of the answer.
        """
        height = self.rows // groups
        row, start, end = self.row_of_run(), self.start.long(), (self.start + self.count).long()
        line = torch.cat([row, row])  # a row toggles at its runs' ends, and the line below toggles back
        group, place = line // height, line % height
        ends = torch.cat([start, end])
        lines = torch.cat([group * (height + 1) + place, group * (height + 1) + place + 1])
        keys = torch.cat([ends, ends]) + lines * (columns + 1)
        toggles, times = torch.unique(keys, return_counts=True)
        toggles = toggles[times % 2 == 1]
        first, last = toggles[0::2], toggles[1::2]
        at, column = expand(first // (columns + 1), first % (columns + 1), last - first)
        cell = torch.sort(((at // (height + 1)) * columns + column) * (height + 1) + at % (height + 1)).values
        begin, stop = cell[0::2], cell[1::2]
        return from_entries(begin // (height + 1), begin % (height + 1), stop - begin, groups * columns)


def expand(row: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Runs (row, start, count) as cells (row, column)."""
    zero = torch.zeros(1, dtype=torch.int64, device=count.device)
    before = torch.cat([zero, torch.cumsum(count, 0)])
    total = int(before[-1])
    which = owners(before, total)
    within = torch.arange(total, device=count.device) - before[which]
    return row[which], start[which] + within


def owners(offsets: Tensor, size: int) -> Tensor:
    """[size]: the row of each entry, where entries offsets[r] .. offsets[r + 1] belong to row r.

    Replaces repeat_interleave, which on a CPU wakes every thread even for a handful of numbers.
    """
    begins = torch.zeros(size + 1, dtype=torch.int64, device=offsets.device)
    begins.index_add_(0, offsets[1:-1].long(), torch.ones(len(offsets[1:-1]), dtype=torch.int64, device=offsets.device))
    return torch.cumsum(begins[:size], 0)


def ordered(stretches: list[Stretches]) -> Stretches:
    """Stretches sorted by row and start."""
    row, start, count = (torch.cat(column) for column in zip(*stretches, strict=True))
    width = int((start + count).max()) + 1 if len(row) else 1
    order = torch.argsort(row * width + start)
    return row.index_select(0, order), start.index_select(0, order), count.index_select(0, order)


def joined(stretches: list[Stretches]) -> Stretches:
    """Disjoint stretches in any order, sorted; touching ones become one."""
    row, start, count = ordered(stretches)
    if len(row) == 0:
        return row, start, count
    touch = (row[1:] == row[:-1]) & (start[1:] == start[:-1] + count[:-1])
    first = torch.cat([torch.ones(1, dtype=torch.bool, device=row.device), ~touch])
    group = torch.cumsum(first, 0) - 1
    row, start = row.masked_select(first), start.masked_select(first)
    return row, start, torch.zeros_like(start).index_add_(0, group, count)


def from_stretches(stretches: list[Stretches], rows: int) -> Runs:
    """Runs from disjoint stretches in any order; touching ones are joined."""
    row, start, count = joined(stretches)
    return Runs(offsets_of(row, rows), start.int(), count.int())


def from_entries(row: Tensor, start: Tensor, count: Tensor, rows: int) -> Runs:
    return from_stretches([(row, start, count)], rows)


class Pile:
    """Collects stretches, and joins them whenever many have accumulated, to bound memory."""

    def __init__(self, device: torch.device) -> None:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._stretches: list[Stretches] = [(nothing, nothing, nothing)]
        self._loose = 0  # stretches since the last join

    def add(self, row: Tensor, start: Tensor, count: Tensor) -> None:
        self._stretches.append((row, start, count))
        self._loose += len(row)
        if self._loose > max(LOOSE, len(self._stretches[0][0])):
            self._stretches, self._loose = [joined(self._stretches)], 0

    def runs(self, rows: int) -> Runs:
        return from_stretches(self._stretches, rows)


def from_dense(cells: Tensor) -> Runs:
    """Runs of a boolean [rows, columns] matrix."""
    return from_sets(cells[None])[0]


def from_sets(cells: Tensor) -> tuple[Runs, ...]:
    """Runs of several sets of cells, boolean [sets, rows, columns], found together in few operations."""
    padded = torch.nn.functional.pad(cells, (1, 1))
    ends = padded[..., 1:] != padded[..., :-1]  # where runs begin and, one past their last cell, end
    found = ends.nonzero()[:, 2].view(-1, 2).t().to(torch.int32, memory_format=torch.contiguous_format)
    start, count = found[0], found[1] - found[0]
    offsets = torch.nn.functional.pad(torch.cumsum(ends.sum(2) // 2, 1), (1, 0)).int()
    sizes = offsets[:, -1].tolist()
    return tuple(Runs(*fields) for fields in zip(offsets.unbind(), start.split(sizes), count.split(sizes), strict=True))


def offsets_of(row: Tensor, rows: int) -> Tensor:
    """[rows + 1] where each row's entries begin, given the sorted row of every entry."""
    counts = torch.bincount(row, minlength=rows)
    zero = torch.zeros(1, dtype=torch.int64, device=row.device)
    return torch.cat([zero, torch.cumsum(counts, 0)]).int()


def of_blocks(counts: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, start, count) of block lists: row r holds the first counts[r] entries of indices[r], in any order, those outside the columns left out.

    Padded with zeros to the size of `indices`, so that the sizes do not depend on the contents, and a GPU is not waited for.
    """
    rows = counts.numel()
    listed = indices.reshape(rows, indices.shape[-1]).long()
    size = listed.numel()
    inside = (torch.arange(listed.shape[1], device=listed.device) < counts.reshape(rows, 1)) & (listed >= 0) & (listed < columns)
    column = torch.sort(torch.where(inside, listed, columns), 1).values  # what is left out comes last
    before = torch.nn.functional.pad(column, (1, 0), value=-2)[:, :-1]
    fresh = (column < columns) & (column != before)
    begins = fresh & (column != before + 1)
    offsets = torch.nn.functional.pad(torch.cumsum(begins.sum(1), 0), (1, 0)).int()
    run = torch.cumsum(begins.flatten(), 0) - 1
    start, count = (torch.zeros(size + 1, dtype=torch.int32, device=listed.device) for _ in range(2))  # the last place takes what belongs to no run
    start.scatter_(0, torch.where(begins.flatten(), run, size), column.flatten().int())
    count.index_add_(0, torch.where(fresh.flatten(), run, size), fresh.flatten().int())
    return offsets, start[:size], count[:size]


def trimmed(runs: Runs) -> Runs:
    """Runs without the padding that fixed-size lists carry."""
    used = int(runs.offsets[-1])
    return runs if used == len(runs.start) else Runs(runs.offsets, runs.start[:used], runs.count[:used])


_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("runs_of_blocks(Tensor counts, Tensor indices, SymInt columns) -> (Tensor, Tensor, Tensor)")
_library.impl("runs_of_blocks", of_blocks, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::runs_of_blocks", lib=_library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _sizes_of_blocks(counts: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    def integers(size: int) -> Tensor:
        return indices.new_empty((size,), dtype=torch.int32)

    return integers(counts.numel() + 1), integers(indices.numel()), integers(indices.numel())
