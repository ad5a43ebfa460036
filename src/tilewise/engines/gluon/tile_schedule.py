"""Tile schedules for the Hopper kernels: how many tiles each row has, and the bits of the mask in every tile where it decides."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import maps, publish, remembered
from tilewise.core.problem import Problem
from tilewise.engines.gluon.config import BackwardConfig, ForwardConfig, backward_config, forward_config
from tilewise.engines.gluon.mask_bits import pack_mask_bits_launch
from tilewise.engines.gluon.patches import in_strips
from tilewise.engines.gpu.arguments import mask_within_given_tiles
from tilewise.engines.gpu.device_map import MAX_ELEMENTS, DeviceMap, Tables, bits_blocks, captures_of, device_map_of, form_of_given, is_made_on_device
from tilewise.engines.gpu.launch import AnyTensor, Find, Launch, flat, prepare
from tilewise.engines.gpu.tile_classifier import kernel_map
from tilewise.engines.gpu.tile_schedule import TileSchedule, key_schedule, query_schedule, schedule_from
from tilewise.tiles import TileMap

ROW_BYTES = 16  # of a tile's mask bits
MAX_BYTES = 128 * 2**20  # of all mask bits; a mask that decides in more tiles than that is evaluated where it is used, by the Triton engine
UNKNOWN_DENSITY = 0.5  # of maps that are made on the device, which tell nobody how dense they are: that of a causal one


@dataclass(frozen=True)
class HopperSchedule:
    """A tile schedule with mask bits."""

    tiles: TileSchedule
    tensors: tuple[Any, ...] = (None,) * 8  # order, tiles and masked tiles of each row, offsets, starts, stops, each row's first mask bits, all mask bits
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


class MapAxis(NamedTuple):
    """Along what a map is walked: its rows are query tiles, or key tiles."""

    rows: int  # of a tile
    columns: int
    by_keys: bool
    transposed: bool  # the rows of a tile's mask bits are the map's columns

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys."""
        return (self.columns, self.rows) if self.by_keys else (self.rows, self.columns)

    @property
    def bits_shape(self) -> tuple[int, int]:
        """Rows and columns of a tile's mask bits."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def schedule(self, p: Problem, find: Find = device_map_of) -> TileSchedule:
        return key_schedule(p, self.tile, find) if self.by_keys else query_schedule(p, self.tile, find)

    def tile_map(self, p: Problem) -> TileMap | None:
        return kernel_map(p, self.tile)


def query_axis(config: ForwardConfig) -> MapAxis:
    return MapAxis(*config.tile, by_keys=False, transposed=False)


def key_axis(config: BackwardConfig) -> MapAxis:
    return MapAxis(*config.tile[::-1], by_keys=True, transposed=config.is_wide)


def too_many_mask_bits(p: Problem, by_keys: bool = False) -> bool:
    """Whether a mask decides in so many tiles that the bits of a pass, along queries or along keys, would be large."""
    if p.mask is None:
        return False
    if is_made_on_device(p):  # there is room for the bits of every tile, or of as many as can be chosen
        return p.given_tiles is not None and p.device.type != "meta" and _most_bytes(p, by_keys) > MAX_ELEMENTS // 8
    uses = p.mask.program.uses
    most = (p.batch if "b" in uses else 1) * (p.heads if "h" in uses else 1) * p.q_len * p.kv_len // 4
    if most <= MAX_BYTES or p.device.type == "meta":
        return False
    axis = query_axis(forward_config(p))  # those of a backward take up to twice as much
    tile_map = axis.tile_map(in_strips(p))
    return tile_map is not None and remembered(tile_map, "partial tiles", tile_map.partial.total) * axis.rows * ROW_BYTES > MAX_BYTES


def _most_bytes(p: Problem, by_keys: bool) -> int:
    """Of the mask bits of chosen tiles, for which there is room."""
    axis = key_axis(backward_config(p)) if by_keys else query_axis(forward_config(p))
    return bits_blocks(form_of_given(p), axis.tile, by_keys) * axis.bits_shape[0] * ROW_BYTES


def hopper_schedule(p: Problem, axis: MapAxis, find: Find = device_map_of) -> HopperSchedule:
    """Of a problem whose mask sees tokens in the order in which they are computed."""
    made = None if p.device.type == "meta" else find(p)
    if made is not None:
        return _made_on_device(p, axis, made)
    tiles = axis.schedule(p)
    if not tiles.mapped:
        return HopperSchedule(tiles)
    if p.device.type == "meta":
        return HopperSchedule(tiles, (*tiles.tensors[:1] * 3, *tiles.tensors[1:], *tiles.tensors[:1] * 2))
    tile_map = axis.tile_map(p)
    if tile_map is None or mask_within_given_tiles(p):  # given tiles are not remembered together with what their mask's tensors hold
        return _with_mask_bits(p, axis, tiles)
    return remembered(tile_map, f"hopper {axis}", lambda: _with_mask_bits(p, axis, tiles))


def _with_mask_bits(p: Problem, axis: MapAxis, tiles: TileSchedule) -> HopperSchedule:
    order, offsets, starts, stops = tiles.tensors
    before = torch.nn.functional.pad(torch.cumsum(stops - starts, 0), (1, 0)).int()  # tiles before each run
    at = before.index_select(0, offsets).view(-1, 4)  # tiles before each kind of runs of each row: full, cut, partial; and before its end
    visited, masked = (at[:, 3] - at[:, begin] for begin in (0, 1))
    ends = torch.cumsum(masked, 0)
    total, all_visited = torch.stack([ends[-1], before[-1]]).tolist()
    first = (ends - masked).int()
    bits = torch.empty((max(total, 1), axis.bits_shape[0], 4), dtype=torch.int32, device=p.device)
    if total > 0:
        launch = bits_launch(p, axis, bits, tiles, first)
        prepare(launch, p.device).launch(flat(launch.tensors))
    maps.weigh(bits.nbytes)
    publish(p.device)
    return HopperSchedule(tiles, (order, visited, masked, offsets, starts, stops, first, bits), all_visited / (len(masked) * columns_of(p, axis)))


def _made_on_device(p: Problem, axis: MapAxis, made: DeviceMap) -> HopperSchedule:
    form = made.recipe.form

    def pack(tables: Tables, bits: Tensor) -> HopperSchedule:
        tiles = schedule_from(made, tables, axis.tile, axis.by_keys)
        launch = made.recipe.launch(("pack_mask_bits", axis), lambda: bits_launch(p, axis, bits, tiles, tables.first_bits, tables.n_tiles))
        launch.launch([bits, *tiles.tensors[1:], tables.first_bits, tables.order, tables.n_tiles, *captures_of(p)])
        density = UNKNOWN_DENSITY if form.most is None else form.most / max(-(-form.kv_len // form.size[1]), 1)
        return HopperSchedule(tiles, (*tables, bits), density)

    return made.rows_with(axis, axis.tile, axis.by_keys, (axis.bits_shape[0], 4), pack)


def columns_of(p: Problem, axis: MapAxis) -> int:
    """Tiles of a row."""
    return -(-(p.q_len if axis.by_keys else p.kv_len) // axis.columns)


def bits_launch(p: Problem, axis: MapAxis, bits: Tensor, tiles: TileSchedule, first: AnyTensor, visited: AnyTensor | None = None) -> Launch:
    return pack_mask_bits_launch(p, axis.bits_shape, axis.by_keys, axis.transposed, bits, tiles, first, visited)
