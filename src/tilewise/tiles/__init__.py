"""Tile maps: which tiles of the score matrix are empty, partial or full, without N x N anything."""

from tilewise.tiles.build import dense_capture
from tilewise.tiles.chosen import ChosenTiles, mask_geometry, sharpened
from tilewise.tiles.geometry import EMPTY, FULL, PARTIAL, Geometry, check_tile
from tilewise.tiles.look import Look
from tilewise.tiles.runs import Runs, trimmed
from tilewise.tiles.sources import Extent, MaskReading, from_block_mask, read_mask, tile_map
from tilewise.tiles.tilemap import TileMap, from_call, from_chosen

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "ChosenTiles",
    "Extent",
    "Geometry",
    "Look",
    "MaskReading",
    "Runs",
    "TileMap",
    "check_tile",
    "dense_capture",
    "from_block_mask",
    "from_call",
    "from_chosen",
    "mask_geometry",
    "read_mask",
    "sharpened",
    "tile_map",
    "trimmed",
]
