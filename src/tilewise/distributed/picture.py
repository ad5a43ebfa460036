"""A layout as a picture: the sequence coloured by who holds it, and the map of work coloured by who computes it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilewise.distributed.assign import Owners, Work
from tilewise.distributed.strategy import Layout

CELLS = 512  # of a side, at most
NAMED = 16  # row groups that a legend names


def picture(layout: Layout, works: Sequence[Work], path: str | Path, names: Sequence[str] = ()) -> Path:
    """Write a strip of the sequence by rank above the work of every mask by row group; the name's ending (.png, .svg, .pdf) chooses the format."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("drawing layouts needs matplotlib: pip install 'tilewise[viz]'") from error
    groups = layout.groups
    colours = torch.tensor([colormaps["turbo"](0.05 + 0.9 * g / max(groups - 1, 1))[:3] for g in range(groups)])  # [groups, 3]
    length = max(layout.owners.length, 1)
    figure = Figure(figsize=(4.6 * len(works) + 1.2, 5.8), layout="constrained")
    axes = figure.subplots(2, len(works), squeeze=False, height_ratios=[1, 14])
    for column, work in enumerate(works):
        strip, square = axes[:, column]
        cells = max(1, min(CELLS, work.tiles))
        group = _held_by(layout.owners, cells) // layout.head_groups  # [cells]
        part = _held_by(layout.owners, cells) % layout.head_groups
        shade = 1 - 0.45 * part / layout.head_groups  # the ranks of a row group are shades of its colour
        strip.imshow((colours[group] * shade[:, None])[None].numpy(), extent=(0, length, 0, 1), aspect="auto", interpolation="nearest")
        strip.set(yticks=[], xticks=[], title=names[column] if names else "")
        amount = coarse(work, cells)[..., None]  # [cells, cells, 1]
        ink = torch.where(amount > 0, 0.25 + 0.75 * amount, 0)
        image = 1 - ink * (1 - colours[group][:, None])
        square.imshow(image.numpy(), extent=(0, length, length, 0), interpolation="nearest")
        square.set(xlabel="key", ylabel="query")
        for axis in (square.xaxis, square.yaxis):
            axis.set_major_formatter("{x:,.0f}")
            axis.get_major_locator().set_params(nbins=5)
    shown = range(groups) if groups <= NAMED else [*range(NAMED // 2), *range(groups - NAMED // 2, groups)]
    patches = [Patch(color=tuple(colours[g].tolist()), label=_named(g, layout.head_groups)) for g in shown]
    figure.legend(handles=patches, loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(layout.name, fontsize=9)
    figure.savefig(path, dpi=150)
    return Path(path)


def _named(group: int, head_groups: int) -> str:
    first = group * head_groups
    return f"rank {first}" if head_groups == 1 else f"ranks {first}-{first + head_groups - 1}"


def _held_by(owners: Owners, cells: int) -> Tensor:
    """[cells] the rank that holds the token in the middle of each cell."""
    middle = (2 * torch.arange(cells) + 1) * owners.length // (2 * cells)
    piece = torch.searchsorted(owners.begin, middle, right=True) - 1
    return owners.rank[piece] if owners.length else torch.zeros(cells, dtype=torch.int64)


def coarse(work: Work, cells: int) -> Tensor:
    """[cells, cells] the share of each cell's tiles that is computed, of all heads, from 0 to 1."""
    tiles, wide = max(work.tiles, 1), cells + 1
    row = work.row % tiles * cells // tiles
    steps, begun = torch.zeros(2, cells * wide, dtype=torch.float64)  # a run adds from its start on, and takes away from its end on
    for end, sign in ((work.start, 1.0), (work.start + work.count, -1.0)):
        place = end.double() * cells / tiles  # in cells
        cell = place.long()
        steps.index_add_(0, row * wide + cell, torch.full_like(place, sign))
        begun.index_add_(0, row * wide + cell, sign * (cell - place))  # the part of the cell before the end
    whole = (steps.view(cells, wide).cumsum(1) + begun.view(cells, wide))[:, :cells]
    heights = torch.bincount(torch.arange(tiles) * cells // tiles, minlength=cells)
    share: Tensor = whole / (heights[:, None] * work.heads)
    return share.clamp(0, 1)
