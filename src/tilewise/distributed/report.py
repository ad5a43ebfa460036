"""A layout in words and a table of its ranks."""

from collections.abc import Sequence

import torch

from tilewise.distributed.strategy import Layout, milliseconds
from tilewise.tools.words import counted

ALL_RANKS = 16  # up to so many ranks have a line each
FIRST, LAST = 4, 2  # of more ranks, these have one, and the extremes


def describe(layout: Layout, names: Sequence[str]) -> str:
    """What `print(plan)` shows: the strategy and why, each mask's exchange, a table of ranks, the imbalance. `names` are those of the masks."""
    shape, spread = layout.shape, float(layout.loads.max() - layout.loads.min())
    share = layout.received_share
    heads = f"{counted(shape.heads, 'head')} on {shape.kv_heads}"
    lines = [
        f"context parallelism of {layout.owners.length:,} tokens over {counted(layout.ranks, 'rank')}: {layout.name}",
        f"  {heads}, batch {shape.batch}, head dim {shape.head_dim}; {counted(layout.groups, 'row group')} of {counted(layout.head_groups, 'rank')}",
        f"  why: {layout.reason}",
    ]
    for name, transport, hot, received in zip(names, layout.transport, layout.hot, share, strict=True):
        lines.append(
            f"  {name}: {_exchange(transport, int(hot.sum()))}" + (f"; {_percent(received.mean())} of all keys received" if transport != "none" else "")
        )
    header = ("rank", "tokens", "work", "of mean", "keys received", "network MB", "node MB", "compute ms", "network ms", "node ms")
    mean = max(float(layout.loads.mean()), 1e-300)  # no work at all: every share is 0
    tokens = layout.owners.held()
    rows = []
    for rank in _shown(layout):
        load, times = float(layout.loads[rank]), [1e3 * float(seconds[rank]) for seconds in (layout.compute, layout.network, layout.node)]
        megabytes = [f"{float(moved[rank]) / 1e6:,.1f}" for moved in (layout.bytes_network, layout.bytes_node)]
        row = [str(rank), f"{int(tokens[rank]):,}", f"{load:,.0f}", f"{load / mean:.3f}", _percent(share[:, rank].mean()), *megabytes]
        rows.append([*row, *[f"{ms:.2f}" for ms in times]])
    left_out = layout.ranks - len(rows)
    return "\n".join(
        [
            *lines,
            text_table(header, rows),
            *([f"  ({left_out:,} more ranks; shown are those with the most and the least work, tokens and bytes)"] if left_out else []),
            f"imbalance: the most loaded rank has {layout.imbalance:.3f} of the mean work; ranks are {spread:,.0f} tiles apart, "
            f"row groups by design at most {layout.bound:,.0f} per rank",
            f"time: {milliseconds(layout.time_s)} forward. Times are modelled from work and bytes, not measured; work is in full tiles of one head.",
        ]
    )


def _exchange(transport: str, hot: int) -> str:
    if transport == "needed":
        return "needed keys travel" + (f", {counted(hot, 'hot tile')} to all" if hot else "")
    return {"none": "no keys travel", "gather": "all keys are gathered"}[transport]


def _shown(layout: Layout) -> list[int]:
    """The ranks that have a line."""
    if layout.ranks <= ALL_RANKS:
        return list(range(layout.ranks))
    extremes = [layout.loads, layout.owners.held(), layout.bytes_network, layout.bytes_node]
    told = {int(pick(values)) for values in extremes for pick in (torch.argmin, torch.argmax)}
    return sorted(told | set(range(FIRST)) | set(range(layout.ranks - LAST, layout.ranks)))


def _percent(share: torch.Tensor) -> str:
    return f"{100 * float(share):.2f} %"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that line up: the first to the left, the others to the right."""
    widths = [max(len(line[c]) for line in (header, *rows)) for c in range(len(header))]
    lines = [[cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True))] for line in (header, *rows)]
    return "\n".join("  " + "  ".join(line).rstrip() for line in lines)
