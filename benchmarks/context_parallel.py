"""Context parallelism, simulated: how evenly work is shared, which keys travel and how long that takes, for 8, 64 and 1024 ranks.

Work and bytes are counted from tile maps; times follow from them by a model (tilewise.distributed.Machine), and nothing is sent anywhere.
What is measured is the time to plan a million tokens for 64 ranks, the tile map included.
"""

import time
from random import Random
from statistics import median
from typing import Any

import torch
from common import Watch, arguments, machine, progress, report, table, time_text

from tilewise import masks, tile_map
from tilewise.distributed.assign import TILE, work_of
from tilewise.distributed.simulate import SimulatedRow, simulate
from tilewise.distributed.strategy import STAGED, choose
from tilewise.distributed.traffic import Machine, Shape

RANKS = (8, 64, 1024)
TOKENS = 8192  # of a rank
MASKS = ("causal", "window 4096", "documents", "frames", "global + window", "prefix")
FRAME = 1560  # tokens of a video frame
PLANNED, PLANNED_RANKS, PLANNED_LIMIT = 1_000_000, 64, 2000  # tokens, ranks, milliseconds
LARGEST_IMBALANCE = 1.05
LARGEST_SHARE = {"window 4096": 0.01, "documents": 0.05}  # of all keys, at 64 ranks
SHAPE = Shape(batch=1, heads=64, kv_heads=8, head_dim=128, v_dim=128, element_size=2)

# How long documents are in a pretraining corpus (the distribution MagiAttention publishes with its benchmarks): up to so many tokens, percent.
DOCUMENT_LENGTHS = (
    (10, 0.22),
    (50, 2.91),
    (100, 5.20),
    (200, 10.23),
    (500, 28.19),
    (1024, 24.64),
    (2048, 15.65),
    (4096, 7.34),
    (8192, 3.05),
    (16384, 1.29),
    (32768, 0.85),
    (65536, 0.14),
    (131072, 0.17),
    (196608, 0.14),
)


def document_lengths(length: int) -> list[int]:
    """Documents drawn from the distribution until the sequence is full; none longer than a quarter of it."""
    draw, lengths, left = Random(0), [], length
    bounds = [(least + 1, most) for (least, _), (most, _) in zip([(0, 0.0), *DOCUMENT_LENGTHS], DOCUMENT_LENGTHS, strict=False)]
    while left:
        least, most = draw.choices(bounds, [percent for _, percent in DOCUMENT_LENGTHS])[0]
        lengths.append(min(draw.randint(least, most), length // 4, left))
        left -= lengths[-1]
    return lengths


def make(name: str, length: int) -> Any:
    window = masks.causal & masks.sliding_window(4096)
    made: dict[str, Any] = {
        "causal": lambda: masks.causal,
        "window 4096": lambda: window,
        "documents": lambda: masks.causal & masks.document(lengths=document_lengths(length)),
        "frames": lambda: lambda b, h, q, kv: q // FRAME >= kv // FRAME,
        "global + window": lambda: window | (masks.causal & masks.global_tokens(256)),
        "prefix": lambda: masks.prefix_lm(length // 4),
    }
    return made[name]()


def plan(mask: Any) -> None:
    found = tile_map(mask, q_len=PLANNED, kv_len=PLANNED, tile=(TILE, TILE))
    choose([(work_of(found), 1)], PLANNED_RANKS, SHAPE, Machine.of("cuda"))


def measure(name: str, threads: int) -> list[float]:
    """Milliseconds of the first plan of a process, and of those after it."""
    torch.set_num_threads(threads)
    mask = make(name, PLANNED)
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        plan(mask)
        times.append(1e3 * (time.perf_counter() - begin))
    return [times[0], median(times[1:])]


def cells(row: SimulatedRow, first: bool) -> list[str]:
    shares = [f"{100 * share:.2f}%" for share in (row.received_mean, row.received_max)]
    times = [f"{ms:,.1f}" for ms in (row.compute_ms, row.network_ms, row.node_ms, row.time_ms)]
    return [f"**{row.name}**" if first else row.name, f"{row.imbalance:.3f}", *shares, *times]


def main() -> None:
    options = arguments(__doc__)
    print(machine(options.threads))
    torch.set_num_threads(options.threads)
    sections, missed = [], []
    header = ["assignment", "imbalance", "keys", "at most", "compute ms", "network ms", "node ms", "time ms"]
    for ranks in RANKS:
        for name in MASKS:
            progress(f"{ranks} ranks, {name}")
            found = simulate(make(name, ranks * TOKENS), ranks=ranks, tokens_per_rank=TOKENS)
            sections += [f"## {name}, {ranks:,} ranks, {ranks * TOKENS:,} tokens", table(header, [cells(row, at == 0) for at, row in enumerate(found.rows)])]
            chosen = found.rows[0]
            if chosen.imbalance > LARGEST_IMBALANCE or (ranks == 64 and chosen.received_max > LARGEST_SHARE.get(name, 1.0)):
                missed.append(f"{name} at {ranks} ranks")
    watch, planned = Watch(__file__), []
    for name in MASKS[:3]:
        progress(f"planning {name}")
        first, later = watch.measure("measure", name, options.threads)
        planned.append([name, time_text(first), time_text(later)])
        if first > PLANNED_LIMIT:
            missed.append(f"planning {name}")
    hardware = Machine.of("cuda")
    notes = (
        f"{TOKENS:,} tokens on every rank, 64 query heads on 8 key heads, head dim 128, bfloat16, one forward pass. The first row is what tilewise chooses. "
        "Imbalance: the largest work of a rank over the mean. Keys: what a rank receives from ranks that hold other rows, as a share of all keys of all "
        "heads, mean and largest. **All times are modelled, not measured**, of the slowest rank: compute from its tiles at "
        f"{hardware.flops / 1e12:.0f} TFLOP/s; network from the bytes it sends or receives at {hardware.network / 1e9:.0f} GB/s between nodes of "
        f"{hardware.ranks_per_node}, and {hardware.node / 1e9:.0f} GB/s inside one. All of it is waited for, but keys may cross the "
        f"network behind a computation in two stages, which takes {STAGED} times as long; each row has the smaller time. Documents: lengths of a "
        "pretraining corpus, packed, causal. Frames: video, causal between "
        f"frames of {FRAME} tokens. Global: 256 tokens that all see. Prefix: a quarter, seen by all."
    )
    goals = (
        f"Targets: imbalance at most {LARGEST_IMBALANCE} everywhere; at 64 ranks at most 1 % of all keys for a window of 4096 and 5 % for documents; "
        f"a plan of {PLANNED:,} tokens for {PLANNED_RANKS} ranks under {time_text(PLANNED_LIMIT)}. "
    ) + ("All met." if not missed else "Missed: " + ", ".join(missed) + ".")
    timing = table([f"planning {PLANNED:,} tokens for {PLANNED_RANKS} ranks", "first in a process", "later"], planned)
    measured = ["## Planning", f"Measured, with the tile map. {watch.note()}", timing]
    report(__file__, options, "Context parallelism, simulated", [notes, goals, *sections, *measured])


if __name__ == "__main__":
    main()
