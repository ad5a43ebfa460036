"""Draws tile maps: in the terminal, and as pictures."""

from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

LARGEST_DRAWING = 24  # cells a side in the terminal
COLUMNS = 80  # of a terminal: the lines above a drawing are broken between words
LARGEST_PICTURE = 512  # cells a side in a picture
SHADES = " ░▒▓█"
FAINTEST = 0.2  # shade of the least work in a picture, from 0 to 1


def first_of(tile_map: "TileMap") -> "TileMap":
    """The map of the first batch element and head, which is the one that is drawn."""
    return tile_map[0, 0] if tile_map.geometry.batch * tile_map.geometry.heads > 1 else tile_map


def which_is_drawn(tile_map: "TileMap") -> str:
    """Which batch element and head the drawing of a map shows; empty where there is but one."""
    g = tile_map.geometry
    parts = [f"{what} 0 of {count}" for what, count in (("batch element", g.batch), ("head", g.heads)) if count > 1]
    return f"drawn: {', '.join(parts)} (tile_map[b, h] is the map of another)" if parts and tile_map.total_tiles else ""


def coverage(tile_map: "TileMap", cells: int) -> Tensor:
    """(rows, columns) share of work, from 0 to 1, of the first batch element and head on at most `cells` cells a side.

    A partial tile counts a half. Large maps are summed from their runs, never expanded.
    """
    g = tile_map.geometry
    first = first_of(tile_map)
    rows, columns = min(cells, g.q_tiles), min(cells, g.kv_tiles)
    # In units of 1 / columns of a tile, every cell is kv_tiles wide and all numbers are integers. A run adds a step at its start and
    # subtracts one at its end: a fraction of the cell it falls in, and the whole of every cell after.
    fraction, steps = torch.zeros((2, rows, columns + 1), dtype=torch.int64)
    for runs, weight in ((first.partial.to("cpu"), 1), (first.full.to("cpu"), 2)):
        row = runs.row_of_run() * rows // g.q_tiles
        for end, sign in ((runs.start, weight), (runs.start + runs.count, -weight)):
            at = end.long() * columns
            cell = at // g.kv_tiles
            fraction.index_put_((row, cell), sign * ((cell + 1) * g.kv_tiles - at), accumulate=True)
            steps.index_put_((row, cell), torch.tensor(sign * g.kv_tiles), accumulate=True)
    share: Tensor = (fraction + torch.cumsum(steps, 1) - steps)[:, :columns]
    heights = torch.bincount(torch.arange(g.q_tiles) * rows // g.q_tiles, minlength=rows)
    return share.double() / (2 * heights[:, None] * g.kv_tiles)


def drawing(tile_map: "TileMap") -> str:
    """The map in characters: blank where nothing is computed, darker where more is."""
    lines = [line for text in (repr(tile_map), which_is_drawn(tile_map)) for line in _wrapped(text)]
    if tile_map.total_tiles:
        shares = coverage(tile_map, LARGEST_DRAWING)
        for row in shares.tolist():
            lines.append(("  " + "".join(2 * SHADES[_shade(value)] for value in row)).rstrip())
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return wrap(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _shade(value: float) -> int:
    """No work is blank, any work at least the lightest shade, all of it the darkest."""
    return 0 if value <= 0 else min(len(SHADES) - 1, 1 + int(value * (len(SHADES) - 1.001)))


def picture(tile_map: "TileMap", path: Path) -> Path:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("drawing tile maps needs matplotlib: pip install 'tilewise[viz]'") from error
    g = tile_map.geometry
    figure = Figure(figsize=(5, 5.4), layout="constrained")
    axes = figure.subplots()
    if tile_map.total_tiles:
        share = coverage(tile_map, LARGEST_PICTURE)
        shade = torch.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0)  # so that a little work is still visible
        extent = (0, g.kv_tiles * g.tile[1], g.q_tiles * g.tile[0], 0)
        axes.imshow(shade.numpy(), cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest", aspect="auto")
        axes.set(xlim=(0, g.kv_len), ylim=(g.q_len, 0))
    counts = f"{tile_map.partial_tiles:,} partial and {tile_map.full_tiles:,} full tiles of {g.tile[0]} x {g.tile[1]}, {100 * tile_map.sparsity:.1f}% skipped"
    axes.set_title(f"{shorten(tile_map.name, 70)}\n{counts}", fontsize=9)
    for axis, label in ((axes.xaxis, "key"), (axes.yaxis, "query")):
        axis.set_label_text(label)
        axis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_major_formatter("{x:,.0f}")
    figure.savefig(path, dpi=150)
    return path
