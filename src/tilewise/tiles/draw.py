"""Tile maps to look at: in the terminal, and as pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

LARGEST_DRAWING = 32  # cells a side in the terminal
SHADES = " ░▒▓█"


def coverage(tile_map: "TileMap", cells: int) -> Tensor:
    """(rows, columns) share of work, from 0 to 1, of the first batch element and head on at most `cells` cells a side.

    A partial tile counts a half. Large maps are summed from their runs, never expanded.
    """
    g = tile_map.geometry
    first = tile_map[0, 0] if g.batch * g.heads > 1 else tile_map
    rows, columns = min(cells, g.q_tiles), min(cells, g.kv_tiles)
    share = torch.zeros((rows, columns), dtype=torch.float64)
    edges = torch.arange(columns + 1, dtype=torch.float64) * (g.kv_tiles / columns)
    for runs, weight in ((first.partial, 0.5), (first.full, 1.0)):
        start, stop = runs.start.cpu().double(), (runs.start + runs.count).cpu().double()
        overlap = torch.minimum(stop[:, None], edges[1:]) - torch.maximum(start[:, None], edges[:-1])
        row = runs.row_of_run().cpu() * rows // g.q_tiles
        share.index_add_(0, row, overlap.clamp(min=0) * weight)
    heights = torch.bincount(torch.arange(g.q_tiles) * rows // g.q_tiles, minlength=rows)
    return share / (heights[:, None] * (g.kv_tiles / columns))


def drawing(tile_map: "TileMap") -> str:
    """The map in characters: blank where nothing is computed, darker where more is."""
    lines = [repr(tile_map)]
    if tile_map.total_tiles:
        shares = coverage(tile_map, LARGEST_DRAWING)
        for row in shares.tolist():
            lines.append("  " + "".join(2 * SHADES[_shade(value)] for value in row).rstrip())
    return "\n".join(lines)


def _shade(value: float) -> int:
    """No work is blank, any work at least the lightest shade, all of it the darkest."""
    return 0 if value <= 0 else min(len(SHADES) - 1, 1 + int(value * (len(SHADES) - 1.001)))


def picture(tile_map: "TileMap", path: Path) -> Path:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing tile maps needs matplotlib: pip install 'tilewise[viz]'") from error
    g = tile_map.geometry
    figure = Figure(figsize=(5, 5.4), layout="constrained")
    axes = figure.subplots()
    if tile_map.total_tiles:
        axes.imshow(coverage(tile_map, 512), cmap="Blues", vmin=0, vmax=1, extent=(0, g.kv_len, g.q_len, 0), interpolation="nearest", aspect="auto")
    axes.set_title(f"{tile_map.name}\n{tile_map.partial_tiles} partial, {tile_map.full_tiles} full, {100 * tile_map.sparsity:.1f}% skipped", fontsize=9)
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    figure.savefig(path, dpi=150)
    return path
