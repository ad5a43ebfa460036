"""The tile map: which tiles of the score matrix are empty, partial (the mask decides inside) or full."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.lang import BoundProgram, gathered, shifted
from tilewise.masks import Mask, MaskFunction
from tilewise.tiles.build import build
from tilewise.tiles.chosen import ChosenTiles, lazy_runs
from tilewise.tiles.geometry import FULL, PARTIAL, Geometry, check_tile
from tilewise.tiles.lists import of_lists
from tilewise.tiles.look import Look
from tilewise.tiles.runs import Runs, from_entries, from_sets

# Up to so many tiles, transposing a dense matrix (few operations) is faster than transposing runs (little work). On a CPU: as many as
# torch handles on one thread.
DENSE_ON_CPU, DENSE_ON_GPU = 2**14, 2**22


@dataclass(frozen=True, eq=False, repr=False)
class TileMap:
    """For every (b, h, query tile), the runs of partial and of full key tiles.

    `mask` decides inside partial tiles. A map built from a mask can be recut to any tile size. A map that was `given` as tiles is
    part of the mask itself (empty tiles are masked), and can only be cut smaller; a map without a mask is always given.
    """

    geometry: Geometry
    partial: Runs
    full: Runs
    mask: BoundProgram | None = None
    name: str = "mask"
    given: bool = False
    derived: dict[str, Any] = field(default_factory=dict)  # what engines made from this map (core/map_cache.remembered)
    chosen: ChosenTiles | None = None  # of a map that was chosen from data: its runs are found when they are first read

    def __post_init__(self) -> None:
        if self.mask is None:
            object.__setattr__(self, "given", True)
        if not torch.compiler.is_compiling():
            self.partial.leave_size_open()
            self.full.leave_size_open()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle of the map holds: all but what engines made of it."""
        return vars(self) | {"derived": {}}

    # -- what it covers ----------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those the tiles are written in."""
        if self.chosen is not None:
            return (self.chosen.states,)
        return tuple([getattr(runs, field) for runs in (self.partial, self.full) for field in ("offsets", "start", "count")])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, query length, key length); batch and heads are 1 where the mask does not depend on them."""
        g = self.geometry
        return g.batch, g.heads, g.q_len, g.kv_len

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.geometry.tile

    @property
    def device(self) -> torch.device:
        """Where the map lies."""
        return self.partial.device

    @property
    def partial_tiles(self) -> int:
        """Tiles in which the mask decides."""
        return self.partial.total()

    @property
    def full_tiles(self) -> int:
        """Tiles that are allowed throughout."""
        return self.full.total()

    @property
    def computed_tiles(self) -> int:
        """Partial and full tiles."""
        return self.partial_tiles + self.full_tiles

    @property
    def total_tiles(self) -> int:
        """All tiles, the skipped ones included."""
        return self.geometry.total

    @property
    def sparsity(self) -> float:
        """The share of tiles that need no work, from 0 to 1."""
        return 1.0 - self.computed_tiles / self.total_tiles if self.total_tiles else 0.0

    def flops(self, head_dim: int, v_dim: int | None = None, *, batch: int | None = None, heads: int | None = None) -> int:
        """Multiply-adds, counted twice, of a forward pass over the computed tiles (a backward costs 2.5 times that)."""
        g = self.geometry
        repeats = (batch or g.batch) * (heads or g.heads) // (g.batch * g.heads)
        return 2 * (head_dim + (head_dim if v_dim is None else v_dim)) * self.computed_pairs() * repeats

    def computed_pairs(self) -> int:
        """(q, kv) pairs inside computed tiles; a tile cut by the end of a sequence counts only the pairs it has."""
        g = self.geometry
        pairs = 0
        for runs in (self.partial, self.full):
            last = (runs.start + runs.count).long()
            columns = runs.count.long() * g.tile[1] - torch.where(last == g.kv_tiles, g.kv_tiles * g.tile[1] - g.kv_len, 0)
            row = runs.row_of_run() % max(g.q_tiles, 1)
            height = torch.where(row == g.q_tiles - 1, g.q_len - (g.q_tiles - 1) * g.tile[0], g.tile[0])
            pairs += int((columns * height).sum())
        return pairs

    def dense(self) -> Tensor:
        """(batch, heads, query tiles, key tiles) of 0 empty, 1 partial, 2 full; for drawing and small maps."""
        g = self.geometry
        partial, full = (runs.dense(g.kv_tiles).to(torch.uint8) for runs in (self.partial, self.full))
        return (partial * PARTIAL + full * FULL).view(g.batch, g.heads, g.q_tiles, g.kv_tiles)

    # -- other maps from it ------------------------------------------------------------------------------------------

    def transpose(self) -> tuple[Runs, Runs]:
        """For every (b, h, key tile) its partial and full query tiles, as the backward needs them."""
        g = self.geometry
        groups = g.batch * g.heads
        if g.total <= (DENSE_ON_CPU if self.device.type == "cpu" else DENSE_ON_GPU):
            cells = torch.stack([runs.dense(g.kv_tiles) for runs in (self.partial, self.full)])
            cells = cells.unflatten(1, (groups, g.q_tiles)).transpose(2, 3).reshape(2, groups * g.kv_tiles, g.q_tiles)
            partial, full = from_sets(cells)
            return partial, full
        return self.partial.transpose(groups, g.kv_tiles), self.full.transpose(groups, g.kv_tiles)

    def to(self, device: torch.device | str) -> "TileMap":
        """The same map, with the tensors its mask captures, on another device."""
        mask = self.mask
        if mask is not None:
            mask = replace(mask, captures=tuple(t.to(device) for t in mask.captures))
        if self.chosen is not None:
            return from_chosen(self.geometry, self.chosen.to(device), mask, self.name)
        return replace(self, partial=self.partial.to(device), full=self.full.to(device), mask=mask, derived={})

    def recut(self, tile: tuple[int, int]) -> "TileMap":
        """The same mask on other tiles."""
        g = self.geometry
        if tile == g.tile:
            return self
        check_tile("recut", tile)
        if not self.given:
            assert self.mask is not None
            return from_call(self.mask, replace(g, tile=tile), self.name, self.device)
        if g.tile[0] % tile[0] or g.tile[1] % tile[1]:
            raise InputError(f"a map given as tiles of {g.tile} can only be cut into tiles that divide them, not {tile}")
        finer = replace(g, tile=tile)
        ratio = g.tile[0] // tile[0], g.tile[1] // tile[1]
        return replace(self, geometry=finer, partial=_cut(self.partial, g, finer, ratio), full=_cut(self.full, g, finer, ratio), derived={}, chosen=None)

    def __getitem__(self, index: Any) -> "TileMap":
        """map[batch, head, query tile]: integers, slices or index tensors; dimensions are kept."""
        picks = index if isinstance(index, tuple) else (index,)
        if len(picks) > 3:
            raise InputError(f"a tile map is indexed by batch, head and query tile, got {len(picks)} indices")
        g = self.geometry
        sizes = (g.batch, g.heads, g.q_tiles)
        chosen = [_positions(picks[d] if d < len(picks) else slice(None), sizes[d], self.device) for d in range(3)]
        b, h, q = chosen
        rows = ((b[:, None, None] * g.heads + h[None, :, None]) * g.q_tiles + q[None, None, :]).flatten()
        tokens = (q[:, None] * g.tile[0] + torch.arange(g.tile[0], device=self.device)).flatten()
        tail = g.q_tiles * g.tile[0] - g.q_len if len(q) and int(q[-1]) == g.q_tiles - 1 else 0
        tokens = tokens[: len(tokens) - tail].clamp(max=g.q_len - 1)  # a short tile that is not last is padded with its last query
        mask = self.mask
        if mask is not None:
            for name, positions in (("b", b), ("h", h), ("q", tokens)):
                mask = shifted(mask, name, int(positions[0])) if _consecutive(positions) else gathered(mask, name, positions)
        geometry = replace(g, batch=len(b), heads=len(h), q_len=len(tokens))
        return TileMap(geometry, self.partial.select(rows), self.full.select(rows), mask, self.name, self.given)

    # -- looking at it -----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TileMap):
            return NotImplemented
        if self.geometry != other.geometry or self.given != other.given or (self.mask is None) != (other.mask is None):
            return False
        tensors = [(getattr(a, f), getattr(b, f)) for a, b in ((self.partial, other.partial), (self.full, other.full)) for f in ("offsets", "start", "count")]
        if self.mask is not None and other.mask is not None:
            if (self.mask.program.text, self.mask.ints, self.mask.floats) != (other.mask.program.text, other.mask.ints, other.mask.floats):
                return False
            tensors += list(zip(self.mask.captures, other.mask.captures, strict=True))
        return all(_same(a, b) for a, b in tensors)

    __hash__ = None  # type: ignore[assignment]  # not hashable

    def __repr__(self) -> str:
        return (
            f"TileMap({self.name}: {self.shape[2]} x {self.shape[3]} tokens, tiles of {self.tile[0]} x {self.tile[1]}, "
            f"{self.partial_tiles} partial, {self.full_tiles} full of {self.total_tiles}, {100 * self.sparsity:.1f}% skipped)"
        )

    def __str__(self) -> str:
        from tilewise.tiles.draw import drawing

        return drawing(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from tilewise.tiles.svg import html_of

        return html_of(self)

    def picture(self, path: str | Path) -> Path:
        """Write the map as a picture; the name's ending (.png, .svg, .pdf) chooses the format."""
        from tilewise.tiles.draw import picture

        return picture(self, Path(path))

    @staticmethod
    def from_lists(
        indices: Tensor,
        counts: Tensor | None = None,
        *,
        q_len: int,
        kv_len: int,
        tile: tuple[int, int] = (64, 64),
        always: Sequence[tuple[int, int]] = (),
        mask: Mask | MaskFunction | None = None,
    ) -> "TileMap":
        """A map given as lists of key tiles, chosen from the data: what is not listed is masked, and a query without any gives 0.

        Tiles of 64 or 128 suit every engine; larger multiples are cut. The map holds a copy of what the lists say now. On a GPU nothing waits for it, so
        that entries that name tiles past the end, an error on a CPU, are ignored there; inside a CUDA graph, replays follow the lists.

        Args:
            indices: (batch, heads, query tiles, entries) the key tiles that each query tile computes, int32 or int64, in any order and any number of times.
                Batch and heads may be 1: shared by all. Negative entries are ignored.
            counts: (batch, heads, query tiles) how many entries of each list count; all unless given.
            q_len: Queries.
            kv_len: Keys.
            tile: Queries and keys of a tile.
            always: Ranges (first, end) of key tiles that every query tile computes, too.
            mask: A mask that decides within the listed tiles; a function or one of tilewise.masks.
        """
        listed = of_lists(indices, counts, q_len, kv_len, tile, always, mask)
        return TileMap(listed.geometry, listed.partial, listed.full, listed.mask, listed.name, given=True, chosen=listed.chosen)

    def save(self, path: str | Path) -> None:
        """Write the map, its mask and captured tensors to one file (a zip of JSON and raw numbers, no pickle)."""
        from tilewise.tiles.storage import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> "TileMap":
        """Read a map that `save` wrote."""
        from tilewise.tiles.storage import load

        return TileMap(*load(Path(path)))


def from_chosen(geometry: Geometry, chosen: ChosenTiles, mask: BoundProgram | None, name: str) -> TileMap:
    """A given map of tiles that were chosen from data."""
    partial, full = lazy_runs(geometry, chosen, mask)
    return TileMap(geometry, partial, full, mask, name, given=True, chosen=chosen)


def from_call(call: BoundProgram, geometry: Geometry, name: str, device: torch.device | str, look: Look | None = None) -> TileMap:
    """The map of a traced mask; the batch and head dimensions exist only if the mask uses them."""
    uses = call.program.uses
    g = replace(geometry, batch=geometry.batch if "b" in uses else 1, heads=geometry.heads if "h" in uses else 1)
    partial, full = build(call, g, torch.device(device), look)
    return TileMap(g, partial.to(device), full.to(device), call, name)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal tensors; a NaN equals a NaN."""
    if a.device != b.device or a.shape != b.shape:
        return False
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


def _positions(pick: Any, size: int, device: torch.device) -> Tensor:
    if isinstance(pick, int):
        if not -size <= pick < size:
            raise InputError(f"index {pick} is outside a tile map dimension of {size}")
        pick = slice(pick % size, pick % size + 1)
    try:
        found = torch.arange(size, device=device)[pick if isinstance(pick, slice) else torch.as_tensor(pick, device=device)]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"index {pick!r} does not fit a tile map dimension of {size}: {error}") from error
    if found.dim() != 1:
        raise InputError(f"a tile map dimension is indexed by an integer, a slice or a 1-D tensor, got {pick!r}")
    return found


def _consecutive(positions: Tensor) -> bool:
    return len(positions) > 0 and bool((positions[1:] == positions[:-1] + 1).all())


def _cut(runs: Runs, old: Geometry, new: Geometry, ratio: tuple[int, int]) -> Runs:
    """Each run of tiles as a run of smaller tiles, on each of the smaller rows, within the lengths."""
    row, start = runs.row_of_run(), runs.start.long() * ratio[1]
    count = (start + runs.count.long() * ratio[1]).clamp(max=new.kv_tiles) - start
    group, place = row // old.q_tiles, row % old.q_tiles
    finer = place[:, None] * ratio[0] + torch.arange(ratio[0], device=runs.device)
    inside = finer < new.q_tiles
    rows = group[:, None] * new.q_tiles + finer
    return from_entries(rows[inside], start[:, None].expand_as(rows)[inside], count[:, None].expand_as(rows)[inside], new.rows)
