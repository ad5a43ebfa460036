"""Tile maps as the Hopper kernels walk them: rows counted, and a stencil for every tile where the mask decides."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engines.gluon.config import backward_cut, backward_tile, forward_cut, forward_tile
from tilewise.engines.gluon.patches import in_strips
from tilewise.engines.triton.config import Config
from tilewise.engines.triton.launch import Launch, prepare
from tilewise.engines.triton.looking import kernel_map
from tilewise.engines.triton.mods import mask_of, mod_arguments
from tilewise.engines.triton.run import mask_is_inside
from tilewise.engines.triton.walks import KernelTiles, column_tiles, row_tiles
from tilewise.plan import finish, maps
from tilewise.problem import Problem
from tilewise.tiles import TileMap

PART = 32  # rows of a stencil that one program cuts
WORDS_BYTES = 16  # of a row of a stencil
LARGEST = 128 * 2**20  # bytes of stencils; a mask that decides in more tiles than that is evaluated where it is used, by the Triton engine


@dataclass(frozen=True)
class Walk:
    """A map for the kernels."""

    tiles: KernelTiles
    tensors: tuple[Any, ...] = (None,) * 8  # order, tiles and masked tiles of each row, offsets, start, count, first stencils, stencils
    density: float = 1.0  # share of the tiles that are visited

    @property
    def count(self) -> int:
        return self.tiles.count

    @property
    def mapped(self) -> bool:
        return self.tiles.mapped

    @property
    def strides(self) -> tuple[int, int]:
        return self.tiles.strides


class Side(NamedTuple):
    """Along what a map is walked: rows are query tiles, or key tiles."""

    rows: int  # of a tile
    columns: int
    by_keys: bool
    across: bool  # a stencil's rows are the map's columns

    def tiles(self, p: Problem) -> KernelTiles:
        return column_tiles(p, Config(self.columns, self.rows, 4, 1)) if self.by_keys else row_tiles(p, Config(self.rows, self.columns, 4, 1))

    def tile_map(self, p: Problem) -> TileMap | None:
        return kernel_map(p, (self.columns, self.rows) if self.by_keys else (self.rows, self.columns))


def forward_side(p: Problem) -> Side:
    return Side(*forward_tile(forward_cut(p)), by_keys=False, across=False)


def backward_side(p: Problem) -> Side:
    cut = backward_cut(p)
    return Side(*backward_tile(cut)[::-1], by_keys=True, across=cut.wide)


def too_many_stencils(p: Problem) -> bool:
    """Whether a mask decides in so many tiles that its bits would be large. Those of the backward take up to twice as much."""
    p = in_strips(p)
    if p.mask is None:
        return False
    uses = p.mask.program.uses
    most = (p.batch if "b" in uses else 1) * (p.heads if "h" in uses else 1) * p.q_len * p.kv_len // 4
    if most <= LARGEST or p.device.type == "meta":
        return False
    side = forward_side(p)
    tile_map = side.tile_map(p)
    return tile_map is not None and tile_map.remember("partial tiles", tile_map.partial.total) * side.rows * WORDS_BYTES > LARGEST


def walk(p: Problem, side: Side) -> Walk:
    tiles = side.tiles(p)
    if not tiles.mapped:
        return Walk(tiles)
    if p.device.type == "meta":
        return Walk(tiles, (*tiles.tensors[:1] * 3, *tiles.tensors[1:], *tiles.tensors[:1] * 2))
    tile_map = side.tile_map(p)
    if tile_map is None or mask_is_inside(p):  # given tiles are not remembered together with what their mask's tensors hold
        return _walk(p, side, tiles)
    return tile_map.remember(f"hopper {side}", lambda: _walk(p, side, tiles))


def _walk(p: Problem, side: Side, tiles: KernelTiles) -> Walk:
    order, offsets, start, count = tiles.tensors
    before = torch.nn.functional.pad(torch.cumsum(count, 0), (1, 0)).int()  # tiles before each run
    at = before.index_select(0, offsets)  # tiles before each kind of runs of each row: full, cut, partial
    masked = at[3::3] - at[1::3]
    ends = torch.cumsum(masked, 0)
    total, visited = torch.stack([ends[-1], before[-1]]).tolist()
    first = (ends - masked).int()
    stencils = torch.empty((max(total, 1), side.columns if side.across else side.rows, 4), dtype=torch.int32, device=p.device)
    if total > 0:
        own = {"p_stencils": stencils}
        prepare(stencils_launch(p, side, own, tiles, first), p.device).start(own)
    maps.weigh(stencils.nbytes)
    finish(p.device)
    all_tiles = len(masked) * -(-(p.q_len if side.by_keys else p.kv_len) // side.columns)
    return Walk(tiles, (order, at[::3].diff(), masked, offsets, start, count, first, stencils), visited / all_tiles)


def stencils_launch(p: Problem, side: Side, own: dict[str, Any], tiles: KernelTiles, first: Tensor) -> Launch:
    rows, columns = (side.columns, side.rows) if side.across else (side.rows, side.columns)
    parts = rows // PART
    return Launch(
        "cut_stencils",
        len(first) * parts,
        own,
        {
            "tiles": tiles.tensors, "first": first, "n_rows": tiles.count, "n_heads": p.heads if tiles.strides[1] > 0 else 1, "n_parts": parts,
            "m": rows, "n_q": p.q_len, "n_kv": p.kv_len, "mask": mod_arguments(p)["mask"],
        },
        {"MASK": mask_of(p), "BY_KEYS": side.by_keys, "ACROSS": side.across, "PART": PART, "COLUMNS": columns},
        4, 1,
    )  # fmt: skip
