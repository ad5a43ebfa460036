"""The gallery: docs/gallery.md and its pictures, made from docs/gallery_entries.py.

python -m docs.gallery             # fails if the page, a picture or the notebook is out of date
python -m docs.gallery --write     # writes them
python -m docs.gallery --measure   # measures the times anew (minutes), then writes all
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import machine
from torch import Tensor

import tilewise as tw
from docs import gallery_notebook
from docs.gallery_entries import MASKS, SCORES, MaskEntry, ScoreEntry
from tilewise import masks, scores
from tilewise.tiles import svg

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "pictures" / "gallery"
TIMES = ROOT / "benchmarks" / "results" / "gallery.json"
NOTEBOOK = ROOT / "examples" / "gallery.ipynb"

DRAWN, DRAWN_TILE = 128, (8, 8)  # tokens and tiles of the pictures
COUNTED, COUNTED_TILE = 2048, (128, 128)  # of tiles skipped and times
HEADS, HEAD_DIM = 2, 64
ROUNDS, THREADS = 15, 2
LEVELS = 8  # shades on either side of 0
TEXT = "#7d8590"  # legible on light and dark pages

Entry = MaskEntry | ScoreEntry


# -- entries as objects ----------------------------------------------------------------------------------------------


def names_of(entry: Entry, n: int) -> dict[str, Any]:
    """What the sources of an entry may use, for sequences of n tokens."""
    names: dict[str, Any] = {"torch": torch, "masks": masks, "scores": scores, "n": n, "heads": HEADS}
    exec(entry.given, names)
    return names


def mask_of(entry: Entry, n: int) -> masks.Mask:
    found: masks.Mask = eval(entry.call if isinstance(entry, MaskEntry) else entry.mask, names_of(entry, n))
    return found


def score_of(entry: ScoreEntry, n: int) -> scores.Score:
    found: scores.Score = eval(entry.call, names_of(entry, n))
    return found


def sizes_of(entry: Entry, n: int) -> tuple[int, int, int]:
    """Batch elements, queries and keys."""
    if isinstance(entry, ScoreEntry):
        return 1, n, n
    return entry.batch, eval(entry.queries, {"n": n}), eval(entry.keys, {"n": n})


def map_of(entry: Entry, n: int, tile: tuple[int, int]) -> tw.TileMap:
    batch, queries, keys = sizes_of(entry, n)
    return tw.tile_map(mask_of(entry, n), batch=batch, heads=HEADS, q_len=queries, kv_len=keys, tile=tile)


# -- pictures --------------------------------------------------------------------------------------------------------


def picture_of(entry: Entry) -> str:
    """SVG: tiles beside elements, which for a score are what it does to them."""
    panels = svg.panels_of(map_of(entry, DRAWN, DRAWN_TILE))
    if isinstance(entry, ScoreEntry):
        panels[1] = _score_panel(entry, svg.elements_of(map_of(entry, DRAWN, DRAWN_TILE)))
    return svg.figure(panels, entry.call, TEXT) + "\n"


def _score_panel(entry: ScoreEntry, allowed: Tensor) -> svg.Panel:
    at = torch.arange(DRAWN)
    names = names_of(entry, DRAWN) | {"b": 0, "h": 0, "q": at[:, None], "kv": at[None, :], "score": score_of(entry, DRAWN)}
    values = torch.where(allowed, eval(entry.drawn, names).double(), 0.0)
    largest = float(values.abs().max())
    level = torch.round(values / largest * LEVELS)
    shades = []
    for k in (*range(-LEVELS, 0), *range(1, LEVELS + 1)):
        label = f"{k / LEVELS * largest:.3g}" if abs(k) == LEVELS and bool((level == k).any()) else ""
        shades.append(svg.Shade(label, svg.BLUE if k > 0 else svg.ORANGE, abs(k) / LEVELS, level == k))
    ground = "0" if bool(allowed.all()) else "0, or forbidden"
    return svg.Panel(f"elements: {entry.caption}", (DRAWN, DRAWN), shades, (DRAWN, DRAWN), ground, DRAWN_TILE)


def file_of(entry: Entry) -> str:
    return f"{anchor(entry)}.svg"


def anchor(entry: Entry) -> str:
    return re.sub(r"\W+", "-", entry.name.lower())


# -- times -----------------------------------------------------------------------------------------------------------


def measured(n: int = COUNTED, rounds: int = ROUNDS, backend: str = "flex") -> dict[str, Any]:
    """For every entry, and for full attention of the same shape, the shortest forward pass and the shortest with its backward pass, in ms.

    A round times everything once, so that no entry is measured in a busy minute alone. All go to one engine: `auto` may leave full attention to torch.
    """
    calls: dict[Any, Callable[[], tuple[float, float]]] = {}
    engines: set[str | None] = set()
    for entry in (*MASKS, *SCORES):
        shape = batch, queries, keys = sizes_of(entry, n)
        q, k, v = (torch.randn(batch, HEADS, tokens, HEAD_DIM, requires_grad=True) for tokens in (queries, keys, keys))
        calls.setdefault(shape, _pass(q, k, v, backend=backend))
        arguments = {"mask": mask_of(entry, n), "score": score_of(entry, n) if isinstance(entry, ScoreEntry) else None, "backend": backend}
        calls[entry.name] = _pass(q, k, v, **arguments)
        engines |= {tw.explain(q, k, v, **arguments).engine, tw.explain(q, k, v, backend=backend).engine}
    (engine,) = engines
    found: list[dict[Any, tuple[float, float]]] = []
    for turn in range(rounds + 1):
        found.append({name: call() for name, call in calls.items()})
        print(f"  round {turn} of {rounds}: full attention {1e3 * found[-1][1, n, n][0]:.1f} ms", file=sys.stderr, flush=True)
    best = {name: [round(1e3 * min(turn[name][k] for turn in found[1:]), 2) for k in range(2)] for name in calls}  # the first round warms up
    times = {entry.name: {"own": best[entry.name], "full": best[sizes_of(entry, n)]} for entry in (*MASKS, *SCORES)}
    return {"machine": machine(torch.get_num_threads()), "engine": engine, "rounds": rounds, "times": times}


def _pass(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        """Seconds of the forward pass, and of both."""
        begin = time.perf_counter()
        out = tw.attention(q, k, v, **arguments)
        middle = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return middle - begin, time.perf_counter() - begin

    return run


# -- the page --------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Gallery

<!-- written by python -m docs.gallery --write, from docs/gallery_entries.py -->

Every mask and score of the library: what it is, when to use it, and what it saves. On the left of each picture the tile map, on the right
the elements. Only partial tiles evaluate the mask, and empty ones cost nothing. The same as a notebook: [examples/gallery.ipynb](../examples/gallery.ipynb).

`n` is the number of tokens, {drawn} in the pictures ({heads} heads; of several batch elements and heads, the first is drawn).
Tiles skipped and times are those of {counted:,} tokens, tiles of {tile[0]} x {tile[1]}, {heads} heads of {head_dim}, float32, **on two CPU cores**:
the shortest of {rounds} rounds, each over all entries and over full attention of the same shapes, with the engine `{engine}`
({machine}; repeat with `python -m docs.gallery --measure`).
The mask `full` and full attention are the same work, and took {same[0]:.1f} and {same[1]:.1f} ms forward: trust no ratio further than that.

Code is shown after these imports; `q`, `k` and `v` are (batch, heads, tokens, head dim) tensors:

```python
import torch
import tilewise as tw
from tilewise import masks, scores
```
"""


def page() -> str:
    known = json.loads(TIMES.read_text())
    numbers = {"drawn": DRAWN, "counted": COUNTED, "tile": COUNTED_TILE, "heads": HEADS, "head_dim": HEAD_DIM}
    same = [known["times"]["full"][name][0] for name in ("own", "full")]
    parts = [INTRODUCTION.format(**numbers, same=same, rounds=known["rounds"], engine=known["engine"], machine=known["machine"])]
    for title, entries in (("Masks", MASKS), ("Scores", SCORES)):
        skipped = {entry.name: 100 * map_of(entry, COUNTED, COUNTED_TILE).sparsity for entry in entries}
        parts += [f"## {title}\n", _overview(entries, skipped, known["times"])]
        parts += [_section(entry, skipped[entry.name], known["times"][entry.name]) for entry in entries]
    return "\n".join(parts)


def _overview(entries: tuple[Entry, ...], skipped: dict[str, float], times: dict[str, Any]) -> str:
    lines = ["| | tiles skipped | forward, ms | full attention | with backward, ms | full attention |", "|---|---:|---:|---:|---:|---:|"]
    for entry in entries:
        own, full = times[entry.name]["own"], times[entry.name]["full"]
        lines.append(f"| [{entry.name}](#{anchor(entry)}) | {skipped[entry.name]:.1f} % | {own[0]:.1f} | {full[0]:.1f} | {own[1]:.1f} | {full[1]:.1f} |")
    return "\n".join([*lines, ""])


def _section(entry: Entry, skipped: float, times: dict[str, list[float]]) -> str:
    own, full = times["own"], times["full"]
    mask = f", mask={entry.mask}" if isinstance(entry, ScoreEntry) and entry.mask != "masks.full" else ""
    arguments = ", mask=mask" if isinstance(entry, MaskEntry) else f"{mask}, score=score"
    saved = f"{skipped:.1f} % of tiles skipped" if skipped else "no tile skipped"
    return f"""\
### {entry.name}

{entry.text}

```python
{entry.code}
out = tw.attention(q, k, v{arguments})
```

![{entry.name}: tiles and elements](pictures/gallery/{file_of(entry)})

**When to use it:** {entry.use}

**Cost:** {saved}; forward {own[0]:.1f} ms (full attention {full[0]:.1f}), with backward {own[1]:.1f} ms ({full[1]:.1f}).
"""


# -- what is written -------------------------------------------------------------------------------------------------


def files() -> Iterator[tuple[Path, str]]:
    """Every file of the gallery, and what it should hold."""
    yield PAGE, page()
    yield NOTEBOOK, gallery_notebook.notebook(DRAWN, DRAWN_TILE, HEADS)
    for entry in (*MASKS, *SCORES):
        yield PICTURES / file_of(entry), picture_of(entry)


def stale() -> list[str]:
    """What is missing, out of date, or no longer part of the gallery."""
    wanted = dict(files())
    found = [str(path.relative_to(ROOT)) for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return found + [str(path.relative_to(ROOT)) for path in sorted(PICTURES.glob("*")) if path not in wanted]


def write() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    wanted = dict(files())
    for path, text in wanted.items():
        path.write_text(text)
    for path in set(PICTURES.glob("*")) - set(wanted):
        path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    if options.measure:
        torch.set_num_threads(THREADS)
        TIMES.write_text(json.dumps(measured(), indent=1) + "\n")
    if options.write or options.measure:
        write()
    sys.exit(f"out of date: {', '.join(stale())}; run python -m docs.gallery --write" if stale() else 0)
