"""Who computes what: the work that a mask asks of every query tile, dealt to ranks, and the keys that each of them then needs.

A problem is square: `length` tokens are queries and keys, in tiles of TILE. Ranks come in row groups of `head_groups` neighbours: rank
p = r * head_groups + u computes the u-th part of the heads for the queries that all ranks of row group r hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.tiles import Runs, TileMap, trimmed
from tilewise.tiles.runs import expand, offsets_of

TILE = 128  # tokens: every engine's tiles divide it
PARTIAL_COST = 1.3  # of a tile in which the mask decides, where one without a decision costs 1
ROW_COST = 0.5  # of a query tile that has any work: loading its queries, writing its output

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, none empty: (begin, end) in tokens
Holdings = tuple[Ranges, ...]  # of every rank


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread: many small steps, and all ranks of a node take them at once. Waiting for threads would take up to 50 times as long as the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Work:
    """What a mask asks of every query tile: which key tiles, as runs, and what they cost.

    Run i covers the key tiles start[i] .. start[i] + count[i] for row[i] = head * tiles + query tile. Runs may overlap: batch elements are put together.
    """

    length: int  # tokens
    heads: int  # 1 where all heads are alike
    row: Tensor  # [runs] int64
    start: Tensor  # [runs] int64
    count: Tensor  # [runs] int64
    cost: Tensor  # [heads, tiles] float64: in full tiles of one head, the mean over the batch

    @property
    def tiles(self) -> int:
        """Query tiles, and as many key tiles."""
        return tiles_of(self.length)


def tiles_of(length: int) -> int:
    return -(-length // TILE)


def work_of(tile_map: TileMap) -> Work:
    """The work of a mask's map."""
    batch, heads, q_len, kv_len = tile_map.shape
    if q_len != kv_len:
        raise InputError(f"context parallelism is for attention of a sequence to itself: got {q_len} queries and {kv_len} keys; give a map of equal lengths")
    fitting = tile_map.recut((TILE, TILE)).to("cpu")
    rows = heads * tiles_of(q_len)
    cost = torch.zeros(rows, dtype=torch.float64)
    parts = []
    for runs, of_tile in ((trimmed(fitting.partial), PARTIAL_COST), (trimmed(fitting.full), 1.0)):
        row, start, count = runs.row_of_run() % max(rows, 1), runs.start.long(), runs.count.long()
        cost.index_add_(0, row, count.double() * of_tile)
        parts.append((row, start, count))
    row, start, count = (torch.cat(column) for column in zip(*parts, strict=True))
    cost = cost / batch + ROW_COST * (cost > 0)
    return Work(q_len, heads, row, start, count, cost.view(heads, tiles_of(q_len)))


def work_of_all(length: int) -> Work:
    """The work of attention without a mask: every query tile has one run of all key tiles."""
    tiles = tiles_of(length)
    rows = torch.arange(tiles)
    return Work(length, 1, rows, torch.zeros_like(rows), torch.full_like(rows, tiles), torch.full((1, tiles), tiles + ROW_COST, dtype=torch.float64))


# -- dealing ---------------------------------------------------------------------------------------------------------


class Dealt(NamedTuple):
    owner: Tensor  # [tiles] int64: the group of each tile
    bound: float  # the loads of two groups differ by no more, in the unit of the costs


def deal(cost: Tensor, groups: int, rounds: int) -> Dealt:
    """Deal contiguous chunks of tiles, `rounds` to every group: by falling cost [tiles], in each round the heaviest chunk to the least loaded group.

    Chunks are as equal in size as can be, so groups are at most `rounds` tiles apart; where tiles are fewer than chunks, some are empty. In the first
    round nobody has anything yet, and chunks stay in their order: one round leaves the sequence as it is, two make a causal mask a zigzag.

    Of two groups with loads a <= b, the first gets a chunk at least as heavy: a + x and b + y with 0 <= x - y <= d, the round's spread. So they then
    differ by (b - a) - (x - y), which lies between -d and b - a: by induction, no two loads are ever further apart than the largest spread of a round.
    """
    tiles, chunks = len(cost), groups * rounds
    chunk_of = (torch.arange(1, tiles + 1) * chunks - 1) // max(tiles, 1)  # [tiles]: chunk i begins at tile i * tiles // chunks
    weight = torch.zeros(chunks, dtype=cost.dtype).index_add_(0, chunk_of, cost)
    falling = torch.sort(weight, descending=True, stable=True).indices.view(rounds, groups)
    falling[0] = falling[0].sort().values
    group_of, load = torch.empty(chunks, dtype=torch.int64), torch.zeros(groups, dtype=cost.dtype)
    for chunk in falling:
        lightest_first = torch.sort(load, stable=True).indices
        group_of[chunk] = lightest_first
        load[lightest_first] += weight[chunk]
    by_round = weight[falling]
    return Dealt(group_of[chunk_of], float((by_round.amax(1) - by_round.amin(1)).max()))


# -- who holds which tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Owners:
    """Who holds each token: begin[i] .. end[i], all of one tile, belong to rank[i]. Sorted, from 0 to the length without a gap."""

    ranks: int
    begin: Tensor  # [pieces] int64
    end: Tensor  # [pieces] int64
    rank: Tensor  # [pieces] int64

    @property
    def length(self) -> int:
        return int(self.end[-1]) if len(self.end) else 0

    @cached_property
    def tile(self) -> Tensor:
        """[pieces] the tile of every piece."""
        return self.begin // TILE

    @cached_property
    def tokens(self) -> Tensor:
        """[pieces] the size of every piece."""
        return self.end - self.begin

    def held(self) -> Tensor:
        """[ranks] how many tokens each holds."""
        return torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, self.rank, self.tokens)

    def row_groups(self, head_groups: int) -> "Owners":
        """The same tokens, held by row groups of so many neighbours."""
        return Owners(self.ranks // head_groups, self.begin, self.end, self.rank // head_groups)

    def holdings(self) -> Holdings:
        """The tokens of every rank as ranges."""
        order = torch.sort(self.rank, stable=True).indices
        rank, begin, end = self.rank[order], self.begin[order], self.end[order]
        apart = (rank[1:] != rank[:-1]) | (begin[1:] != end[:-1])
        first, last = torch.ones(len(rank), dtype=torch.bool), torch.ones(len(rank), dtype=torch.bool)
        first[1:], last[:-1] = apart, apart
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        for at, *bounds in zip(rank[first].tolist(), begin[first].tolist(), end[last].tolist(), strict=True):
            held[at].append((bounds[0], bounds[1]))
        return tuple(tuple(ranges) for ranges in held)


def owners_of_tiles(owner: Tensor, groups: int, head_groups: int, length: int) -> Owners:
    """Tiles dealt to row groups: the tiles of a group, in order, are cut into `head_groups` parts, as equal as can be."""
    sizes = torch.bincount(owner, minlength=groups)
    order = torch.sort(owner, stable=True).indices
    place = torch.empty_like(owner)  # of every tile among those of its group
    place[order] = torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner[order]]
    begin = torch.arange(len(owner)) * TILE
    return Owners(groups * head_groups, begin, (begin + TILE).clamp(max=length), owner * head_groups + place * head_groups // sizes[owner])


def owners_in_order(sizes: Sequence[int]) -> Owners:
    """Rank 0 holds the first sizes[0] tokens, and so on; a tile may then belong to several ranks."""
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
    cuts = torch.unique(torch.cat([torch.arange(0, int(ends[-1]), TILE), ends, torch.zeros(1, dtype=torch.int64)]))
    return Owners(len(sizes), cuts[:-1], cuts[1:], torch.searchsorted(ends, cuts[:-1], right=True))


# -- what follows ----------------------------------------------------------------------------------------------------


def loads(work: Work, owners: Owners, head_groups: int) -> Tensor:
    """[ranks] the cost of every rank's part of `work.cost`; a piece of a query tile has its share of the tile's tokens."""
    row_groups = owners.row_groups(head_groups)
    parts = head_groups if work.heads > 1 else 1  # alike heads need not be told apart
    by_part = work.cost.view(parts, work.heads // parts, work.tiles).sum(1)
    of_tile = (work.length - torch.arange(work.tiles) * TILE).clamp(max=TILE)  # tokens; the last tile may be short
    pieces = by_part[:, owners.tile] * owners.tokens / of_tile[owners.tile]
    load = torch.zeros(row_groups.ranks, parts, dtype=torch.float64).index_add_(0, row_groups.rank, pieces.T)
    return (load / (head_groups // parts)).expand(-1, head_groups).flatten()


def needed_tiles(work: Work, row_groups: Owners) -> Runs:
    """For every row group, the key tiles that some of its query tiles attend to, in some head and batch element."""
    pieces = torch.bincount(row_groups.tile, minlength=work.tiles)
    query_tile = work.row % max(work.tiles, 1)
    run, piece = expand(torch.arange(len(work.row)), (pieces.cumsum(0) - pieces)[query_tile], pieces[query_tile])
    return _union(row_groups.rank[piece], work.start[run], work.count[run], row_groups.ranks, work.tiles)


def _union(row: Tensor, start: Tensor, count: Tensor, rows: int, columns: int) -> Runs:
    """Runs of stretches that may overlap. Sorted, one begins a run if it begins after all before it have ended."""
    wide = columns + 1  # cells are numbered through all rows; one more per row, so that runs of two rows do not touch
    begin, order = torch.sort(row * wide + start)
    if len(begin) == 0:
        return Runs(torch.zeros(rows + 1, dtype=torch.int32), begin.int(), begin.int())
    reach = torch.cummax(begin + count[order], 0).values
    apart = torch.ones(len(begin) + 1, dtype=torch.bool)
    apart[1:-1] = begin[1:] > reach[:-1]
    first, last = begin[apart[:-1]], reach[apart[1:]]
    return Runs(offsets_of(first // wide, rows), (first % wide).int(), (last - first).int())


def is_needed(needed: Runs, group: Tensor, tile: Tensor, tiles: int) -> Tensor:
    """Whether row groups need key tiles: `needed.dense(tiles)[group, tile]`, without the matrix."""
    if len(needed.start) == 0:
        return torch.zeros(torch.broadcast_shapes(group.shape, tile.shape), dtype=torch.bool)
    begin = needed.row_of_run() * (tiles + 1) + needed.start
    cell = group * (tiles + 1) + tile
    run = torch.searchsorted(begin, cell, right=True) - 1
    return (run >= 0) & (cell < (begin + needed.count)[run])
