"""Parts of a block mask: slices and other lengths, by an operator whose sizes do not depend on contents, so that torch.compile traces it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.tiles import Geometry, Runs, TileMap, trimmed
from tilewise.tiles.runs import from_stretches


def _restricted(offsets: Tensor, start: Tensor, count: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The given rows within the first columns, padded with zeros to a size that does not depend on the contents."""
    picked = trimmed(Runs(offsets, start, count)).select(rows)
    row, first = picked.row_of_run(), picked.start.long()
    stop = (first + picked.count.long()).clamp(max=columns)
    inside = first < stop
    runs = from_stretches([(row[inside], first[inside], (stop - first)[inside])], len(rows))
    padding = torch.zeros(_most_runs(len(rows), columns) - len(runs.start), dtype=torch.int32, device=start.device)
    return runs.offsets, torch.cat([runs.start, padding]), torch.cat([runs.count, padding])


def _most_runs(rows: int, columns: int) -> int:
    return rows * ((columns + 1) // 2)


_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("restricted_runs(Tensor offsets, Tensor start, Tensor count, Tensor rows, SymInt columns) -> (Tensor, Tensor, Tensor)")
_library.impl("restricted_runs", _restricted, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::restricted_runs", lib=_library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _restricted_sizes(offsets: Tensor, start: Tensor, count: Tensor, rows: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    most = _most_runs(rows.shape[0], columns)
    return offsets.new_empty((rows.shape[0] + 1,)), start.new_empty((most,)), count.new_empty((most,))


def restrict(tiles: TileMap, b: Tensor, h: Tensor, q: Tensor, geometry: Geometry) -> TileMap:
    """The tiles of these batch elements, heads and query tiles, within the new geometry's keys, as bare tiles."""
    g = tiles.geometry
    rows = ((b[:, None, None] * g.heads + h[None, :, None]) * g.q_tiles + q[None, None, :]).flatten()
    partial, full = (Runs(*torch.ops.tilewise.restricted_runs(r.offsets, r.start, r.count, rows, geometry.kv_tiles)) for r in (tiles.partial, tiles.full))
    if not torch.compiler.is_compiling():
        partial, full = trimmed(partial), trimmed(full)
    return TileMap(geometry, partial, full, tiles.mask, tiles.name, given=True)


def cropped(tiles: TileMap, q_len: int, kv_len: int) -> TileMap:
    """The same tiles under other lengths."""
    g = tiles.geometry
    geometry = replace(g, q_len=q_len, kv_len=kv_len)
    if geometry.q_tiles > g.q_tiles:
        raise InputError(f"a BlockMask with {g.q_tiles} query blocks of {g.tile[0]} cannot be used for {q_len} queries")
    b, h, q = (torch.arange(n, device=tiles.device) for n in (g.batch, g.heads, geometry.q_tiles))
    return restrict(tiles, b, h, q, geometry)


def sliced(tiles: TileMap, picks: list[Any]) -> TileMap:
    """tiles[picks] for torch.compile, where an index tensor's contents are unknown; the mask no longer fits the positions."""
    g = tiles.geometry
    b, h, q = (chosen(p, n).to(tiles.device) for p, n in zip(picks, (g.batch, g.heads, g.q_tiles), strict=True))
    geometry = replace(g, batch=len(b), heads=len(h), q_len=min(len(q) * g.tile[0], g.q_len))
    return replace(restrict(tiles, b, h, q, geometry), mask=None)


def chosen(pick: Any, size: int) -> Tensor:
    return torch.arange(size, device=pick.device if isinstance(pick, Tensor) else None)[_without_integers(pick)]


def queries_of(pick: Any, blocks: int, block: int, q_len: int) -> int:
    """How many queries the chosen blocks hold. An index tensor's blocks count whole, as in torch: what it holds is not read."""
    pick = _without_integers(pick)
    if not isinstance(pick, slice):
        return len(chosen(pick, blocks)) * block
    picked = range(blocks)[pick]
    over_the_end = blocks * block - q_len if blocks - 1 in picked else 0
    return len(picked) * block - over_the_end


def _without_integers(pick: Any) -> Any:
    return slice(pick, pick + 1 if pick != -1 else None) if isinstance(pick, int) else pick
