"""torch's block lists, and the blocks they stand for, as runs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.errors import IncompleteError, InputError, MisuseError
from tilewise.tiles import Geometry, Runs, TileMap, trimmed
from tilewise.tiles.runs import Stretches, from_stretches

FORWARD = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BACKWARD = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
SHADES = " ░█"


@dataclass(frozen=True)
class Blocks:
    """The blocks behind the lists: rows are batch x query blocks."""

    partial: Runs
    full: Runs | None  # None if full blocks are not listed separately
    batch: tuple[int, ...]
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        return torch.Size(self.batch).numel()

    @property
    def runs(self) -> tuple[Runs, ...]:
        return (self.partial,) if self.full is None else (self.partial, self.full)


def check_lists(counts: Tensor, indices: Tensor, full_counts: Tensor | None, full_indices: Tensor | None) -> None:
    if indices.dim() < 2:
        raise MisuseError(f"BlockMask must have at least 2 dimensions, got kv_indices of shape {tuple(indices.shape)}")
    check_both_or_neither("kv", full_counts, full_indices)
    for name, few, many in (("", counts, indices), ("full_", full_counts, full_indices)):
        if few is not None and many is not None and few.shape != many.shape[:-1]:
            raise InputError(f"{name}kv_num_blocks has shape {tuple(few.shape)}, {name}kv_indices {tuple(many.shape)}; the second has one dimension more")


def check_both_or_neither(side: str, counts: Tensor | None, indices: Tensor | None) -> None:
    if (counts is None) != (indices is None):
        raise IncompleteError(f"full_{side}_num_blocks and full_{side}_indices must be both provided or omitted")


def runs_of(columns: int, counts: Tensor | None, indices: Tensor | None) -> Runs:
    assert counts is not None and indices is not None
    return Runs(*torch.ops.tilewise.runs_of_blocks(counts, indices, columns))


def blocks_of_tiles(tiles: TileMap, separate: bool, bottom: Tensor, right: bool) -> Blocks:
    """A tile map's blocks as torch lists them.

    separate   full blocks apart from partial ones
    bottom     [query blocks] which rows reach past the end of the queries
    right      whether the last column reaches past the end of the keys

    A full block that reaches past an end is partial to torch. It is more than a name: whoever puts longer keys under the lists, as torch's PagedAttention
    does, has mask_mod decide there, and full blocks do not ask it.
    """
    g, partial, full = tiles.geometry, trimmed(tiles.partial), trimmed(tiles.full)
    if not separate:
        return Blocks(from_stretches([_stretches(partial), _stretches(full)], g.rows), None, (g.batch, g.heads), g.q_tiles, g.kv_tiles)
    if right or bool(bottom.any()):
        row, start, count = _stretches(full)
        below = bottom[row % max(g.q_tiles, 1)]
        last = ~below & (start + count == g.kv_tiles) & right
        inside = count - last.long()
        kept = ~below & (inside > 0)
        column = torch.full_like(row[last], g.kv_tiles - 1)
        over = [(row[below], start[below], count[below]), (row[last], column, torch.ones_like(column))]
        partial = from_stretches([_stretches(partial), *over], g.rows)
        full = from_stretches([(row[kept], start[kept], inside[kept])], g.rows)
    return Blocks(partial, full, (g.batch, g.heads), g.q_tiles, g.kv_tiles)


def _stretches(runs: Runs) -> Stretches:
    return runs.row_of_run(), runs.start.long(), runs.count.long()


def list_of(name: str, blocks: Blocks) -> Tensor | None:
    """One of torch's lists, (*batch, rows) or (*batch, rows, columns); the q lists go by key blocks."""
    runs = blocks.full if name.startswith("full_") else blocks.partial
    if runs is None:
        return None
    rows, columns = blocks.rows, blocks.columns
    if name in BACKWARD:
        runs, rows, columns = runs.transpose(blocks.groups, columns), columns, rows
    if name.endswith("num_blocks"):
        counts = torch.zeros(runs.rows, dtype=torch.int32, device=runs.device).index_add_(0, runs.row_of_run(), runs.count)
        return counts.view(*blocks.batch, rows)
    outside = torch.ones((runs.rows, columns), dtype=torch.bool, device=runs.device)
    outside[runs.cells()] = False
    return torch.argsort(outside, dim=1, stable=True).int().view(*blocks.batch, rows, columns)  # a row's blocks in ascending order, then the others


def list_of_tiles(name: str, tiles: TileMap, separate: bool, bottom: Tensor, right: bool) -> Tensor | None:
    """list_of(name, blocks_of_tiles(...)), by an operator whose sizes do not depend on contents, so that torch.compile traces it."""
    if name.startswith("full_") and not separate:
        return None
    g = tiles.geometry
    runs = [t for r in (tiles.partial, tiles.full) for t in (r.offsets, r.start, r.count)]
    found: Tensor = torch.ops.tilewise.block_list(name, runs, [g.batch, g.heads, g.q_len, g.kv_len, *g.tile], separate, bottom, right)
    return found


def _block_list(name: str, runs: list[Tensor], geometry: list[int], separate: bool, bottom: Tensor, right: bool) -> Tensor:
    batch, heads, q_len, kv_len, *tile = geometry
    tiles = TileMap(Geometry(batch, heads, q_len, kv_len, (tile[0], tile[1])), Runs(*runs[:3]), Runs(*runs[3:]), None)
    found = list_of(name, blocks_of_tiles(tiles, separate, bottom, right))
    assert found is not None
    return found


_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("block_list(str name, Tensor[] runs, SymInt[] geometry, bool separate, Tensor bottom, bool right) -> Tensor")
_library.impl("block_list", _block_list, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::block_list", lib=_library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _block_list_sizes(name: str, runs: list[Tensor], geometry: list[int], separate: bool, bottom: Tensor, right: bool) -> Tensor:
    batch, heads, q_len, kv_len, *tile = geometry
    g = Geometry(batch, heads, q_len, kv_len, (tile[0], tile[1]))
    rows, columns = (g.kv_tiles, g.q_tiles) if name in BACKWARD else (g.q_tiles, g.kv_tiles)
    return runs[0].new_empty((batch, heads, rows) if name.endswith("num_blocks") else (batch, heads, rows, columns))


def write_order(computed: Tensor, q_indices: Tensor, descending: bool) -> Tensor:
    """torch's dq_write_order: for every entry of q_indices, (..., key blocks, places), its key block's rank among those its query block computes.

    computed   (..., query blocks, key blocks), 1 where a block is computed
    """
    rank = computed.cumsum(-1) - computed
    if descending:
        rank = computed.sum(-1, keepdim=True) - 1 - rank
    return rank.transpose(-1, -2).gather(-1, q_indices.long()).int()


def drawn(blocks: Blocks, place: tuple[int, ...], row_step: int, column_step: int) -> Iterator[str]:
    """The lines of a drawing: a cell is blank if none of its blocks are computed, black if all are."""
    group = 0
    for at, size in zip(place, blocks.batch, strict=True):
        group = group * size + (at if size > 1 else 0)
    edges = torch.tensor([*range(0, blocks.columns, column_step), blocks.columns])
    heights = torch.tensor([min(row_step, blocks.rows - r) for r in range(0, blocks.rows, row_step)])
    covered = torch.zeros((len(heights), len(edges) - 1), dtype=torch.int64)
    for runs in blocks.runs:
        rows = runs.select(torch.arange(group * blocks.rows, (group + 1) * blocks.rows, device=runs.device)).to("cpu")
        start, stop = rows.start.long()[:, None], (rows.start + rows.count).long()[:, None]
        overlap = (torch.minimum(stop, edges[1:]) - torch.maximum(start, edges[:-1])).clamp(min=0)
        covered.index_add_(0, rows.row_of_run() // row_step, overlap)
    whole = heights[:, None] * (edges[1:] - edges[:-1])
    shades = (covered > 0).long() + (covered == whole).long()
    for line in shades.tolist():
        yield "".join(2 * SHADES[shade] for shade in line)
