"""The gallery as a notebook, without outputs: examples/gallery.ipynb, made from docs/gallery_entries.py."""

import json
from typing import Any

from docs.gallery_entries import MASKS, SCORES, MaskEntry, ScoreEntry

SETUP = """\
import matplotlib.pyplot as plt
import torch

import tilewise as tw
from tilewise import masks, scores

n, heads, tile = {n}, {heads}, {tile}
b, h, q, kv = 0, 0, torch.arange(n)[:, None], torch.arange(n)[None, :]


def draw(values, allowed, caption):
    figure, axes = plt.subplots(figsize=(4, 3.4), layout="constrained")
    figure.colorbar(axes.imshow(torch.where(torch.as_tensor(allowed), values, torch.nan)))
    axes.set_title(caption, fontsize=9)
    axes.set(xlabel="key", ylabel="query")"""

INTRODUCTION = """\
# Gallery

Every mask of tilewise, its tile map on the left and its elements on the right, and every score, as what it does to the elements.
Change a number and run the cell again.
The page with the times: [docs/gallery.md](../docs/gallery.md)."""

LAST = """\
query, key, value = (torch.randn(1, heads, n, 64) for _ in range(3))
tw.explain(query, key, value, mask=masks.causal & masks.sliding_window(16), score=scores.softcap(30.0))"""


def notebook(n: int, tile: tuple[int, int], heads: int) -> str:
    cells = [_markdown(INTRODUCTION), _code(SETUP.format(n=n, heads=heads, tile=tile)), _markdown("## Masks")]
    for mask in MASKS:
        cells += [_markdown(_text(mask)), _code(_mask_code(mask))]
    cells.append(_markdown("## Scores"))
    for score in SCORES:
        cells += [_markdown(_text(score)), _code(_score_code(score))]
    cells += [_markdown("## Together\n\nWhich engine serves a call, and why."), _code(LAST)]
    for k, cell in enumerate(cells):
        cell["id"] = f"cell-{k}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _text(entry: MaskEntry | ScoreEntry) -> str:
    return f"### {entry.name}\n\n{entry.text}\n\n{entry.use}"


def _mask_code(entry: MaskEntry) -> str:
    batch = f"batch={entry.batch}, " if entry.batch > 1 else ""
    heads = "heads=heads, " if "heads" in entry.given else ""
    return f"{entry.code}\ntw.tile_map(mask, {batch}{heads}q_len={entry.queries}, kv_len={entry.keys}, tile=tile)"


def _score_code(entry: ScoreEntry) -> str:
    return f'{entry.code}\ndraw({entry.drawn}, {entry.mask}(b, h, q, kv), "{entry.caption}")'


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text.splitlines(keepends=True)}
