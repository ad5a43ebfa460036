"""Building tile maps: tilewise.tile_map against torch's create_block_mask, and alone at lengths torch cannot reach.

torch's create_block_mask forms the whole matrix of the mask (and more while reducing it), so its memory grows with the
square of the length. Every measurement of memory runs in a process of its own: the peak above what it had when the
masks were ready. Times are medians on warm processes.
"""

import gc
from typing import Any

import torch
from common import MIB, Watch, arguments, machine, memory_text, milliseconds, peak_growth, progress, report, table, time_text

import tilewise as tw
from tilewise import masks

TILE = 128
BOTH = (4096, 16384)  # lengths for torch and tilewise
ALONE = (131_072, 1_048_576)
MASKS = ("causal", "window", "document", "neighborhood")
TORCH_BYTES_PER_PAIR = 10  # create_block_mask at its largest: the mask as bytes and an int64 of it; composed masks need more
TORCH_LIMIT = 4 * 2**30
LIMITS = {16384: (10, 512 * MIB), 1_048_576: (1000, 512 * MIB)}  # milliseconds, bytes


def make(name: str, length: int) -> Any:
    """The mask, as both libraries take it: a function of (b, h, q, kv)."""
    if name == "causal":
        return masks.causal
    if name == "window":
        return masks.causal & masks.sliding_window(4096 if length > 4096 else 1024)
    if name == "document":
        return masks.causal & masks.document(documents(length, max(4, round(length / 1048.576))))
    side = {4096: 64, 16384: 128}[length]
    return masks.neighborhood((side, side), 13)


def documents(length: int, count: int) -> torch.Tensor:
    """Ids of `count` documents of random lengths; 1000 of them at a million tokens."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    return torch.searchsorted(cuts.sort().values, torch.arange(length), right=True)


def describe(name: str, length: int) -> str:
    return {
        "causal": "causal",
        "window": f"causal, window {4096 if length > 4096 else 1024}",
        "document": f"causal, {max(4, round(length / 1048.576))} documents",
        "neighborhood": "2-D neighborhood 13 x 13",
    }[name]


def build(library: str, mask: Any, length: int) -> Any:
    if library == "tilewise":
        return tw.tile_map(mask, q_len=length, kv_len=length, tile=(TILE, TILE))
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask, None, None, length, length, device="cpu", BLOCK_SIZE=TILE)


def measure(library: str, name: str, length: int, threads: int) -> dict[str, Any]:
    """Run in a process of its own: peak memory of the first map at this length, then the time."""
    torch.set_num_threads(threads)
    mask = make(name, length)
    build(library, make(name, 4096), 4096)  # what is loaded once is not the map's
    gc.collect()
    memory = peak_growth(lambda: build(library, mask, length))
    found = tw.tile_map(mask, q_len=length, kv_len=length, tile=(TILE, TILE))
    slow = library == "torch" and length > 4096
    ms = milliseconds(lambda: build(library, mask, length), seconds=1.0, least=3 if slow else 9)
    return {"ms": ms, "memory": memory, "computed": found.computed_tiles, "total": found.total_tiles}


def main() -> None:
    options = arguments(__doc__)
    print(machine(options.threads))
    watch = Watch(__file__)
    rows, missed = [], []
    for length in (*BOTH, *ALONE):
        for name in MASKS:
            if name == "neighborhood" and length not in BOTH:
                continue
            progress(f"{length} {name}: tilewise")
            ours = watch.measure("measure", "tilewise", name, length, options.threads)
            limit = LIMITS.get(length)
            if limit is not None and (ours["ms"] >= limit[0] or ours["memory"] >= limit[1]):
                missed.append(f"{length} {name}")
            torch_time, torch_memory, ratio = "", "", ""
            needed = length**2 * TORCH_BYTES_PER_PAIR
            if needed > TORCH_LIMIT:
                torch_time = f"needs {needed / 2**30:,.0f} GiB or more"
            else:
                progress(f"{length} {name}: torch")
                theirs = watch.measure("measure", "torch", name, length, options.threads)
                torch_time, torch_memory = time_text(theirs["ms"]), memory_text(theirs["memory"])
                ratio = f"{theirs['ms'] / ours['ms']:,.0f}x"
            skipped = f"{100 * (1 - ours['computed'] / ours['total']):.1f}%"
            rows.append([f"{length:,} {describe(name, length)}", skipped, time_text(ours["ms"]), memory_text(ours["memory"]), torch_time, torch_memory, ratio])
    header = ["tokens and mask", "skipped", "tilewise", "peak", "torch create_block_mask", "peak", "speedup"]
    goals = "; ".join(f"{length:,} tokens under {time_text(ms)} and {memory_text(size)}" for length, (ms, size) in LIMITS.items())
    verdict = f"Targets: {goals}. " + ("All met." if not missed else "Missed: " + ", ".join(missed) + ".")
    notes = (
        f"Tiles of {TILE} x {TILE}. Skipped: the share of tiles that need no work. Peak: resident memory above the start of the call. "
        "tilewise finds full and empty tiles exactly; torch is called eagerly, as its documentation does for a mask built once."
    )
    report(__file__, options, "Building tile maps on a CPU", [notes, table(header, rows), verdict, watch.note()])


if __name__ == "__main__":
    main()
