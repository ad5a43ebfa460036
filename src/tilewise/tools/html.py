"""Tables for notebooks. Whatever is put into a cell is text, unless it says that it is HTML."""

from collections.abc import Iterable, Sequence
from html import escape

from tilewise.tiles.svg import BLUE, GRAY, NOTHING


class Html(str):
    """Text that is HTML already."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row("th", header), *[_row("td", row) for row in rows]]
    return '<table style="color: inherit">' + "".join(lines) + "</table>"


def _row(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{kind} style="text-align: left">{cell if isinstance(cell, Html) else escape(cell)}</{kind}>' for cell in cells) + "</tr>"


def bar(share: float) -> Html:
    """A share from 0 to 1 as a bar, and as a number."""
    ground = f'<rect width="100" height="9" fill="{GRAY}" fill-opacity="{NOTHING}" stroke="{GRAY}"/>'
    filled = f'<rect width="{100 * share:.1f}" height="9" fill="{BLUE}"/>'
    return Html(f'<svg xmlns="http://www.w3.org/2000/svg" width="100" height="9" role="img">{ground}{filled}</svg> {100 * share:.1f}%')
