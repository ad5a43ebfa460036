"""Tile maps as SVG, read back: the rectangles are the tiles and the elements."""

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import elements_of
from tests.support.varied import given_map, random_states, varied_map
from tilewise import masks
from tilewise.tiles import TileMap, svg

SPACE = "{http://www.w3.org/2000/svg}"


def filled(cells: list[tuple[int, int, int, int]], shape: tuple[int, ...]) -> Tensor:
    """How often rectangles cover each cell."""
    count = torch.zeros(shape, dtype=torch.int64)
    for left, top, right, bottom in cells:
        count[top:bottom, left:right] += 1
    return count


def panels(text: str) -> list[dict[str, list[tuple[int, int, int, int]]]]:
    """The rectangles of each color, panel by panel."""
    found = []
    for panel in ElementTree.fromstring(text).iter(f"{SPACE}svg"):
        colors = {}
        for path in panel.findall(f"{SPACE}path[@fill-opacity]"):
            numbers = [[int(n) for n in move] for move in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path.get("d", ""))]
            colors[f"{path.get('fill')} {path.get('fill-opacity')}"] = [(x, y, x + w, y + h) for x, y, w, h in numbers]
        found.append(colors)
    return found[1:]  # the first is the whole picture


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rectangles_cover_every_cell_once(density: float) -> None:
    cells = torch.rand((23, 31), generator=torch.Generator().manual_seed(0)) < density
    assert torch.equal(filled(list(svg.rectangles(cells)), cells.shape), cells.long())


def test_equal_rows_share_their_rectangles() -> None:
    assert list(svg.rectangles(torch.ones((40, 50), dtype=torch.bool))) == [(0, 0, 50, 40)]


MAPS = {
    "causal": lambda: tw.tile_map(masks.causal, q_len=100, kv_len=120, tile=(16, 8)),
    "neighborhood": lambda: tw.tile_map(masks.neighborhood((8, 8), 3), q_len=64, kv_len=64, tile=(8, 8)),
    "varied": varied_map,
    "given": lambda: given_map(random_states(2, 2, 4, 3), 30, 20, (8, 8), masks.causal),
    "given, without a mask": lambda: given_map(random_states(1, 1, 4, 3), 30, 20, (8, 8)),
}


@pytest.mark.parametrize("name", MAPS)
def test_tiles_and_elements(name: str) -> None:
    found: TileMap = MAPS[name]()
    tiles, elements = panels(svg.svg_of(found))
    states = found.dense()[0, 0]
    assert torch.equal(filled(tiles.get(f"{svg.ORANGE} 1", []), states.shape), (states == 1).long())
    assert torch.equal(filled(tiles.get(f"{svg.BLUE} 1", []), states.shape), (states == 2).long())
    assert torch.equal(filled(elements.get(f"{svg.BLUE} 1", []), found.shape[2:]), elements_of(found)[0, 0].long())


def test_long_maps_are_drawn_as_shares_of_work_and_without_elements() -> None:
    (shares,) = panels(svg.svg_of(tw.tile_map(masks.sliding_window(4096), q_len=2**20, kv_len=2**20)))
    side = svg.LARGEST_MAP
    drawn = sum(filled(cells, (side, side)) for cells in shares.values())
    at = torch.arange(side)
    assert torch.equal(drawn, ((at[:, None] - at).abs() <= 1).long())


@pytest.mark.parametrize("lengths", [(100, 400), (400, 100), (1, 10_000)], ids=str)
def test_axes_have_one_scale(lengths: tuple[int, int]) -> None:
    (panel, *_) = svg.panels_of(tw.tile_map(masks.full, q_len=lengths[0], kv_len=lengths[1]))
    width, height = panel.size
    assert max(width, height) == svg.SIDE
    assert min(width, height) == max(svg.LEAST, svg.SIDE * min(lengths) / max(lengths))


def test_html_says_what_is_drawn() -> None:
    found = tw.tile_map(masks.padding(torch.tensor([5, 9])), batch=2, q_len=9, kv_len=9, tile=(4, 4))
    html = found._repr_html_()
    assert repr(found) in html and "drawn: batch element 0 of 2 (" in html and "<svg" in html
    empty = tw.tile_map(masks.causal, q_len=0, kv_len=9)
    assert empty._repr_html_() == f"<div>{empty!r}</div>"


def test_names_are_escaped() -> None:
    hostile = masks.Mask(lambda b, h, q, kv: q >= kv, "<script>alert('&')</script>")
    html = tw.tile_map(hostile, q_len=8, kv_len=8)._repr_html_()
    assert "<script" not in html and html.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)") == 2
