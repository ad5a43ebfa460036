"""Tile maps as SVG: tiles and, where there are few enough, elements beside them, with axes and a legend.

Colors are chosen to be told apart on light and dark pages. Text takes the color of its surroundings, or the one given.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewise.lang import evaluate
from tilewise.tiles.draw import coverage, first_of, which_is_drawn
from tilewise.tiles.geometry import FULL, PARTIAL

if TYPE_CHECKING:
    from tilewise.tiles.tilemap import TileMap

LARGEST_MAP = 64  # cells a side; of larger maps, a cell stands for several tiles
LARGEST_ELEMENTS = 128  # tokens a side up to which elements are drawn, too

BLUE, ORANGE, GRAY = "#3b82d6", "#e8973a", "#8a8f98"
NOTHING = 0.13  # opacity of the ground, where nothing is computed
SHARES = (0.25, 0.5, 0.75, 1.0)  # of work in a cell that stands for several tiles, and its opacity

SIDE, LEAST = 260, 14  # pixels of the longer and, at least, of the shorter axis
LEFT, TOP, BELOW, GAP = 28, 24, 52, 28
SWATCH, LETTER = 11, 6.2  # pixels of a legend's square, and of a letter on average


@dataclass(frozen=True)
class Shade:
    """One color of a panel, and the cells that have it; without a label it is not in the legend."""

    label: str
    color: str
    opacity: float
    cells: Tensor  # (rows, columns) of bool


@dataclass(frozen=True)
class Panel:
    """A plane of queries x keys in cells; the last ones may reach beyond the lengths and are cut."""

    title: str
    lengths: tuple[int, int]  # queries, keys
    shades: Sequence[Shade]
    shown: tuple[float, float]  # the lengths in cells
    ground: str  # what a cell without a color means
    lines: tuple[float, float] | None = None  # distances of the lines of a grid, in cells

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in pixels: a token has the same size along both axes."""
        q, kv = self.lengths
        return max(LEAST, SIDE * kv / max(q, kv)), max(LEAST, SIDE * q / max(q, kv))

    @property
    def left(self) -> float:
        """Room for the axis of queries."""
        return max(LEFT, 6 + LETTER * len(f"{self.lengths[0]:,}"))

    @property
    def width(self) -> float:
        """With its axis, title and legend."""
        return self.left + max(self.size[0], LETTER * len(self.title), _legend_width(self))


def svg_of(tile_map: "TileMap", color: str = "currentColor") -> str:
    """The map as SVG; of several batch elements and heads, the first."""
    return figure(panels_of(tile_map), tile_map.name, color)


def html_of(tile_map: "TileMap") -> str:
    """The SVG below what the map's repr and drawing say."""
    lines = [repr(tile_map), which_is_drawn(tile_map)]
    return "".join(f"<div>{escape(line)}</div>" for line in lines if line) + (svg_of(tile_map) if tile_map.total_tiles else "")


def panels_of(tile_map: "TileMap") -> list[Panel]:
    first = first_of(tile_map)
    panels = [_tiles(first)]
    if max(first.shape[2:]) <= LARGEST_ELEMENTS:
        q, kv = first.shape[2:]
        allowed = Shade("allowed", BLUE, 1, elements_of(first))
        panels.append(Panel(f"elements: {q} x {kv}", (q, kv), [allowed], (q, kv), "forbidden", first.tile))
    return panels


def _tiles(first: "TileMap") -> Panel:
    g = first.geometry
    rows, columns = min(LARGEST_MAP, g.q_tiles), min(LARGEST_MAP, g.kv_tiles)
    exact = (rows, columns) == (g.q_tiles, g.kv_tiles)
    if exact:
        states = first.dense()[0, 0].cpu()
        shades = [Shade("partial", ORANGE, 1, states == PARTIAL), Shade("full", BLUE, 1, states == FULL)]
    else:
        share = coverage(first, LARGEST_MAP)
        steps = zip((0.0, *SHARES), SHARES, strict=False)
        shades = [Shade(f"{'' if above else 'work up to '}{to:.0%}", BLUE, to, (share > above) & (share <= to)) for above, to in steps]
    title = f"tile map: {g.q_tiles:,} x {g.kv_tiles:,} tiles of {g.tile[0]} x {g.tile[1]}"
    shown = rows * g.q_len / (g.q_tiles * g.tile[0]), columns * g.kv_len / (g.kv_tiles * g.tile[1])
    return Panel(title, (g.q_len, g.kv_len), shades, shown, "empty", (1, 1) if exact else None)


def elements_of(tile_map: "TileMap") -> Tensor:
    """(queries, keys) of bool: the pairs that a map of one batch element and head allows."""
    _, _, q_len, kv_len = tile_map.shape
    states = tile_map.dense()[0, 0].repeat_interleave(tile_map.tile[0], 0).repeat_interleave(tile_map.tile[1], 1)[:q_len, :kv_len]
    if tile_map.mask is None:
        return (states > 0).cpu()
    q, kv = torch.arange(q_len, device=tile_map.device), torch.arange(kv_len, device=tile_map.device)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=tile_map.device)
    inside = torch.as_tensor(evaluate(tile_map.mask, {"b": zero, "h": zero, "q": q[:, None], "kv": kv[None, :]}), device=tile_map.device)
    return ((states == FULL) | ((states == PARTIAL) & inside)).cpu()


# -- writing it ------------------------------------------------------------------------------------------------------


def figure(panels: Sequence[Panel], title: str, color: str = "currentColor") -> str:
    """Panels side by side."""
    width = sum(panel.width for panel in panels) + GAP * len(panels)
    height = TOP + max(panel.size[1] for panel in panels) + BELOW
    parts: list[str] = []
    left = 0.0
    for panel in panels:
        parts += _panel(panel, left + panel.left)
        left += panel.width + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor" color="{escape(color)}" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def _panel(panel: Panel, x: float) -> Iterator[str]:
    width, height = panel.size
    rows, columns = panel.shown
    yield _text(panel.title, x, TOP - 9)
    yield f'<svg x="{x:.6g}" y="{TOP}" width="{width:.6g}" height="{height:.6g}" viewBox="0 0 {columns:.6g} {rows:.6g}" preserveAspectRatio="none">'
    yield f'<rect width="{columns:.6g}" height="{rows:.6g}" fill="{GRAY}" fill-opacity="{NOTHING}"/>'
    for shade in panel.shades:
        outline = "".join(f"M{left} {top}h{right - left}v{bottom - top}h{left - right}z" for left, top, right, bottom in rectangles(shade.cells))
        if outline:
            yield f'<path d="{outline}" fill="{shade.color}" fill-opacity="{shade.opacity:.6g}" shape-rendering="crispEdges"/>'
    if panel.lines is not None:
        yield _lines(panel.lines, rows, columns)
    yield "</svg>"
    yield f'<rect x="{x:.6g}" y="{TOP}" width="{width:.6g}" height="{height:.6g}" fill="none" stroke="{GRAY}"/>'
    (queries, keys), bottom = panel.lengths, TOP + height
    yield _text("0", x, bottom + 13)
    yield _text("key", x + width / 2, bottom + 13, "middle")
    yield _text(f"{keys:,}", x + width, bottom + 13, "end")
    yield _text("0", x - 4, TOP + 9, "end")
    yield f'<text transform="translate({x - 6:.6g} {TOP + height / 2:.6g}) rotate(-90)" text-anchor="middle">query</text>'
    yield _text(f"{queries:,}", x - 4, bottom, "end")
    yield from _legend(panel, x, bottom + 28)


def _lines(distances: tuple[float, float], rows: float, columns: float) -> str:
    across = "".join(f"M0 {k * distances[0]:.6g}h{columns:.6g}" for k in range(1, -int(-rows // distances[0])))
    down = "".join(f"M{k * distances[1]:.6g} 0v{rows:.6g}" for k in range(1, -int(-columns // distances[1])))
    return f'<path d="{across}{down}" stroke="{GRAY}" stroke-opacity="0.35" fill="none" vector-effect="non-scaling-stroke"/>'


def _legend(panel: Panel, x: float, y: float) -> Iterator[str]:
    for label, color, opacity in _swatches(panel):
        yield f'<rect x="{x:.6g}" y="{y:.6g}" width="{SWATCH}" height="{SWATCH}" fill="{color}" fill-opacity="{opacity:.6g}" stroke="{GRAY}"/>'
        yield _text(label, x + SWATCH + 4, y + SWATCH - 2)
        x += _swatch_width(label)


def _swatches(panel: Panel) -> list[tuple[str, str, float]]:
    return [(panel.ground, GRAY, NOTHING), *[(shade.label, shade.color, shade.opacity) for shade in panel.shades if shade.label]]


def _swatch_width(label: str) -> float:
    return SWATCH + 16 + LETTER * len(label)


def _legend_width(panel: Panel) -> float:
    return sum(_swatch_width(label) for label, _, _ in _swatches(panel))


def _text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return f'<text x="{x:.6g}" y="{y:.6g}" text-anchor="{anchor}">{escape(text)}</text>'


def rectangles(cells: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(left, top, right, bottom) of rectangles that cover the true cells, each once: runs within a row, as far down as they stay the same."""
    growing: dict[tuple[int, int], int] = {}
    edge = torch.zeros((len(cells), 1), dtype=torch.bool)
    changes = torch.cat([edge, cells, edge], 1).int().diff(dim=1)
    for y in range(len(cells) + 1):
        runs = set(zip(_places(changes[y], 1), _places(changes[y], -1), strict=True)) if y < len(cells) else set()
        for run in [run for run in growing if run not in runs]:
            yield run[0], growing.pop(run), run[1], y
        for run in sorted(runs):
            growing.setdefault(run, y)


def _places(row: Tensor, value: int) -> list[int]:
    found: list[int] = (row == value).nonzero().flatten().tolist()
    return found
