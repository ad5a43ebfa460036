"""Tile maps: which tiles of the score matrix are empty, partial or full, without N x N anything."""

from tilewise.tiles.build import Geometry, dense_capture
from tilewise.tiles.runs import Runs, trimmed
from tilewise.tiles.sources import Extent, MaskReading, from_block_mask, read_mask, tile_map
from tilewise.tiles.tilemap import EMPTY, FULL, PARTIAL, TileMap, from_call

__all__ = [
    "EMPTY", "FULL", "PARTIAL", "Extent", "Geometry", "MaskReading", "Runs", "TileMap",
    "dense_capture", "from_block_mask", "from_call", "read_mask", "tile_map", "trimmed",
]  # fmt: skip
