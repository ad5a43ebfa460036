"""The README's pictures: charts from benchmarks/results, and tile maps of a few masks. A test fails when they are out of date.

python docs/charts.py           # draws them anew
python docs/charts.py --check   # fails if they are out of date
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch

import tilewise as tw
from tilewise import masks, sparse
from tilewise.distributed import simulate
from tilewise.tiles import FULL, PARTIAL

ROOT = Path(__file__).parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
MACHINE = "NVIDIA H200"
MODELS = {  # rows of benchmarks/results/models.json: what the README calls them
    ("llama-packed", "step"): "Llama, 8 packed documents, 16k tokens, training",
    ("llama-packed", "inference"): "Llama, 8 packed documents, 16k tokens, forward",
    ("mistral", "step"): "Mistral, window 4096, 32k tokens, training",
    ("hunyuanvideo", "step"): "HunyuanVideo, padded text, training",
    ("wan", "step"): "Wan, 32,760 tokens, training",
    ("flux", "step"): "Flux, 1024 px, training",
    ("flux", "inference"): "Flux, 1024 px, forward",
    ("llama", "step"): "Llama, causal, 16k tokens, training",
}
BASELINES = {"sdpa": "torch SDPA", "native": "torch SDPA", "cudnn": "cuDNN", "flash": "FA2, by torch", "flex": "torch FlexAttention", "fa3": "FA3"}
COLORS = {"tilewise": "#2f6fdb", "torch FlexAttention": "#d0843c"}
OTHER = "#8c959f"
SHARED_TILE, RANKS = 128, ("#2f6fdb", "#d0843c", "#3c9a5f", "#8250c4")
SHARED = {
    "causal": masks.causal,
    "causal window of 512": masks.causal & masks.sliding_window(512),
    "packed documents, causal": masks.causal & masks.document(lengths=[2500, 300, 700, 3100, 400, 150, 1042]),
}
VIDEO, CUBE, VIDEO_TILE = (8, 16, 16), (2, 4, 4), 32  # frames, height and width of the video whose tiles are drawn, and of a cube
LABELS, BARS, ROW, GAP, TOP = 330, 380, 17, 12, 58  # pixels


TOKENS, TILE, CELL = 512, 16, 5  # tokens of a mask, tokens and pixels of a tile
DRAWN = {  # as one would write them
    "causal": masks.causal,
    "causal & sliding_window(96)": masks.causal & masks.sliding_window(96),
    "document(lengths) & causal": masks.document(lengths=[90, 160, 60, 130, 72]) & masks.causal,
    "prefix_lm(160)": masks.prefix_lm(160),
    "sliding_window(40) | global_tokens(32)": masks.sliding_window(40) | masks.global_tokens(32),
    "neighborhood((16, 32), 7)": masks.neighborhood((16, 32), 7),
    "shared_prefix([160, 120, 120, 112], ...)": masks.shared_prefix([160, 120, 120, 112], [0, 0, 0, 0]),
    "block_diffusion(256, 32)": masks.block_diffusion(256, 32),
}
WHOLE, EVALUATED, SKIPPED = "#2f6fdb", "#e8973a", "#eef1f4"


class Bar(NamedTuple):
    name: str
    value: float
    text: str


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def models() -> list[Group]:
    """Milliseconds of whole models: tilewise beside everything that ran."""
    stored = json.loads((RESULTS / "models.json").read_text())[MACHINE]["results"]
    groups = []
    for (row, mode), title in MODELS.items():
        bars: dict[str, Bar] = {}
        for implementation, found in stored[row][mode].items():
            name = BASELINES.get(implementation, implementation)
            if found["failed"] is not None:
                bars[name] = Bar(name, 0.0, "crashes with a CUDA error:")
            else:
                milliseconds = sorted(found["times"])[len(found["times"]) // 2]
                bars[name] = Bar(name, milliseconds, f"{milliseconds:.1f} ms")
        groups.append(Group(title, sorted(bars.values(), key=lambda bar: bar.name != "tilewise")))
    return groups


def kernels() -> list[Group]:
    """TFLOP/s of the backward and the forward together: twice and a half the forward's work in the backward."""
    lines = [line for line in (RESULTS / "gpu" / "masks.md").read_text().splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    groups = []
    for line in lines[2:]:
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rates = {name: [float(rate) for rate in cell.split("/")] for name, cell in zip(header[1:], cells, strict=True) if cell != "-"}
        bars = []
        for name, called in (("tilewise gluon", "tilewise"), ("torch flex", "torch FlexAttention"), ("FA3", "FA3"), ("FA4", "FA4")):
            if name in rates:
                forward, backward = rates[name]
                both = 3.5 / (1 / forward + 2.5 / backward)
                bars.append(Bar(called, both, f"{both:.0f}"))
        groups.append(Group(re.sub(r" \([\d.]+\)$", "", title), bars))
    return groups


def drawn(title: str, about: str, groups: list[Group], one_scale: bool) -> str:
    """Horizontal bars, all on one scale or each group on its own."""
    height = TOP + sum(ROW * len(group.bars) + GAP for group in groups)
    overall = max(bar.value for group in groups for bar in group.bars)
    width = LABELS + BARS + 160
    parts = _sheet(width, height, title, about)
    y = TOP
    for group in groups:
        parts.append(f'<text x="16" y="{y + 12}" fill="#1f2328">{escape(group.title)}</text>')
        most = overall if one_scale else max(bar.value for bar in group.bars)
        for bar in group.bars:
            length = round(BARS * bar.value / most, 1)
            parts.append(f'<rect x="{LABELS}" y="{y + 2}" width="{length}" height="{ROW - 4}" fill="{COLORS.get(bar.name, OTHER)}"/>')
            parts.append(f'<text x="{LABELS + length + 6}" y="{y + 13}" fill="#1f2328">{escape(f"{bar.text}  {bar.name}")}</text>')
            y += ROW
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def tile_maps() -> str:
    """Small tile maps, four in a row."""
    side, left, top, across = TOKENS // TILE * CELL, 24, 64, 260
    width, height = left + 4 * across, top + 2 * (side + 52)
    parts = _sheet(width, height, "A mask is a function, and becomes a map of tiles", f"{TOKENS} queries down, {TOKENS} keys across, tiles of {TILE} x {TILE}")
    parts += _legend(width)
    for k, (name, mask) in enumerate(DRAWN.items()):
        tile_map = tw.tile_map(mask, q_len=TOKENS, kv_len=TOKENS, tile=(TILE, TILE))
        x, y = left + k % 4 * across, top + k // 4 * (side + 52)
        parts += _panel(tile_map, x, y, CELL)
        skipped = f"{100 * tile_map.sparsity:.0f} % skipped"
        parts.append(f'<text x="{x}" y="{y + side + 16}" fill="#1f2328">{escape(name)}</text><text x="{x}" y="{y + side + 31}" fill="#59636e">{skipped}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def shared_sequences() -> str:
    """Who computes which tiles of a few masks on four ranks, and the share of keys that each fetches from others."""
    tokens, ranks, cell = 8192, 4, 3
    side, left, top, across = tokens // SHARED_TILE * cell, 24, 64, 260
    width, height = left + len(SHARED) * across, top + side + 60
    parts = [*_sheet(width, height, "One sequence on four ranks", f"{tokens} tokens; rows are colored by the rank that computes them, grey tiles are skipped")]
    for rank, color in enumerate(RANKS):
        x = width - 260 + 62 * rank
        parts.append(f'<rect x="{x}" y="14" width="11" height="11" fill="{color}"/><text x="{x + 16}" y="24" fill="#59636e">rank {rank}</text>')
    for k, (name, mask) in enumerate(SHARED.items()):
        layout = simulate(mask, ranks=ranks, length=tokens, heads=61, kv_heads=1, strategy="needed").layout
        tile_map = tw.tile_map(mask, q_len=tokens, kv_len=tokens, tile=(SHARED_TILE, SHARED_TILE))
        x, y = left + k * across, top
        parts.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{SKIPPED}"/>')
        owner = {
            start // SHARED_TILE + t: rank for rank, held in enumerate(layout.holdings) for start, stop in held for t in range((stop - start) // SHARED_TILE)
        }
        for row, states in enumerate(tile_map.dense()[0, 0].bool().int().tolist()):
            parts += [
                f'<rect x="{x + cell * first}" y="{y + cell * row}" width="{cell * count}" height="{cell}" fill="{RANKS[owner[row]]}"/>'
                for state, first, count in _runs(states)
                if state
            ]
        lines = (name, f"largest work {layout.imbalance:.2f} of the mean", f"{100 * float(layout.received_share.mean()):.0f} % of keys come from other ranks")
        for line, text in enumerate(lines):
            parts.append(f'<text x="{x}" y="{y + side + 16 + 15 * line}" fill="{"#59636e" if line else "#1f2328"}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def video_tiles() -> str:
    """Which tiles of a small video four methods compute."""
    frames, height, width = VIDEO
    per_frame, tokens, cell = height * width, frames * height * width, 3
    one = torch.tensor([False]), torch.tensor([True])
    drawn_maps = {
        "radial": _by_rule(masks.radial(frames, per_frame, decay=0.25, least=32)),
        "spatial_temporal, around": _by_rule(masks.spatial_temporal(frames, per_frame, one[0], frame_reach=1)),
        "spatial_temporal, through time": _by_rule(masks.spatial_temporal(frames, per_frame, one[1], token_reach=20)),
        "top_k, cubes of 2 x 4 x 4": _chosen(),
    }
    side, left, top, across = tokens // VIDEO_TILE * cell, 24, 64, 240
    sheet_width = left + 4 * across
    parts = _sheet(sheet_width, top + side + 52, "A video of 8 x 16 x 16 tokens", f"{tokens} queries down, {tokens} keys across, tiles of {VIDEO_TILE}")
    parts += _legend(sheet_width)
    for k, (name, tile_map) in enumerate(drawn_maps.items()):
        parts += _panel(tile_map, left + k * across, top, cell)
        skipped = f"{100 * tile_map.sparsity:.0f} % skipped"
        x, y = left + k * across, top + side
        parts.append(f'<text x="{x}" y="{y + 16}" fill="#1f2328">{escape(name)}</text><text x="{x}" y="{y + 31}" fill="#59636e">{skipped}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _by_rule(mask: masks.Mask) -> tw.TileMap:
    tokens = math.prod(VIDEO)
    return tw.tile_map(mask, q_len=tokens, kv_len=tokens, heads=1, tile=(VIDEO_TILE, VIDEO_TILE))


def _chosen() -> tw.TileMap:
    """A quarter of the cubes, chosen for tokens that know their place and, weakly, their time, and for something that moves through the picture."""
    time, row, column = (axis.flatten().double() for axis in torch.meshgrid(*(torch.arange(n) for n in VIDEO), indexing="ij"))
    thing = torch.exp(-((row - 9.3) ** 2 + (column - 0.9 * time - 1.1) ** 2) / 6)
    angles = (0.19 * row, 0.17 * column, 0.07 * time)
    features = torch.stack([f(angle) for angle in angles for f in (torch.sin, torch.cos)] + [4 * thing], -1)[None, None]
    order = sparse.cubes(VIDEO, CUBE)
    means = order.means(order.permute(features))
    chosen = sparse.top_k(means @ means.transpose(-1, -2), order.count // 4)
    return tw.TileMap.from_lists(chosen, q_len=len(order.order), kv_len=len(order.order), tile=(VIDEO_TILE, VIDEO_TILE))


def _legend(width: int) -> list[str]:
    parts = []
    for k, (color, label) in enumerate(((WHOLE, "computed whole"), (EVALUATED, "mask evaluated inside"), (SKIPPED, "skipped"))):
        x = width - 470 + 165 * k
        parts.append(f'<rect x="{x}" y="14" width="11" height="11" fill="{color}"/><text x="{x + 16}" y="24" fill="#59636e">{label}</text>')
    return parts


def _panel(tile_map: tw.TileMap, x: int, y: int, cell: int) -> list[str]:
    """The tiles of a map: one path of strokes for each color."""
    rows = tile_map.dense()[0, 0].tolist()
    parts = [f'<rect x="{x}" y="{y}" width="{cell * len(rows[0])}" height="{cell * len(rows)}" fill="{SKIPPED}"/>']
    for wanted, color in ((FULL, WHOLE), (PARTIAL, EVALUATED)):
        runs = [(row, first, count) for row, states in enumerate(rows) for state, first, count in _runs(states) if state == wanted]
        strokes = "".join([f"M{x + cell * first} {y + cell * row + cell / 2:g}h{cell * count}" for row, first, count in runs])
        parts += [f'<path d="{strokes}" stroke="{color}" stroke-width="{cell}"/>'] if strokes else []
    return parts


def _runs(states: list[int]) -> list[tuple[int, int, int]]:
    """(state, first, how many) of equal states side by side."""
    found: list[tuple[int, int, int]] = []
    for k, state in enumerate(states):
        if found and found[-1][0] == state:
            found[-1] = (state, found[-1][1], found[-1][2] + 1)
        else:
            found.append((state, k, 1))
    return found


def _sheet(width: int, height: int, title: str, about: str) -> list[str]:
    """White, so that it can be read on a light and on a dark page."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="bold" fill="#1f2328">{escape(title)}</text>',
        f'<text x="16" y="42" fill="#59636e">{escape(about)}</text>',
    ]


def charts() -> dict[str, str]:
    """File names and what is in them."""
    return {
        "masks.svg": tile_maps(),
        "shared_sequences.svg": shared_sequences(),
        "video_tiles.svg": video_tiles(),
        "models.svg": drawn(
            "Whole models on an H200",
            "Milliseconds, less is better, each model on its own scale; random weights, real widths, 4 to 6 layers, bf16",
            models(),
            False,
        ),
        "kernels.svg": drawn(
            "Masks and scores on an H200", "TFLOP/s, forward and backward, more is better; 16 heads of 128, 16,384 tokens, bf16", kernels(), True
        ),
    }


def main() -> None:
    stale = [name for name, text in charts().items() if not (PICTURES / name).exists() or (PICTURES / name).read_text() != text]
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python docs/charts.py")
    PICTURES.mkdir(exist_ok=True)
    for name, text in charts().items():
        (PICTURES / name).write_text(text)


if __name__ == "__main__":
    main()
