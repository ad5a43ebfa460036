"""Neighborhoods on a CPU: tokens row by row, as they are given, beside tokens in patches, as tilewise puts them where that pays.

Both are the C++ engine's, in one process, taking turns; the copies into patches and back count. Times are medians once warm.
"""

import time
from math import prod
from statistics import median
from typing import Any

import torch
from common import Watch, arguments, progress, report, table

import tilewise as tw
from tilewise import masks
from tilewise.engines.base import Engine
from tilewise.frontend.token_order import best

HEADS, HEAD_DIM = 4, 64
ROUNDS = 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = (((64, 64), 7), ((64, 64), 13), ((96, 96), 13), ((128, 128), 7), ((128, 128), 13), ((100, 100), 13), ((16, 32, 32), 7))
TILE = (64, 64)  # the C++ engine's


def measure(shape: list[int], window: int, dtype: str, threads: int) -> list[list[float]]:
    """Run in a process of its own: milliseconds of the forward and of the backward, as given and in the best order."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    size = (1, HEADS, prod(shape), HEAD_DIM)
    query, key, value, grad = (torch.randn(size, generator=generator).to(DTYPES[dtype]) for _ in range(4))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    near = masks.neighborhood(shape, window)
    times: list[list[list[float]]] = [[[], []], [[], []]]
    for turn in range(ROUNDS + 1):
        for mask, kept in zip((masks.as_mask(near.function), near), times, strict=True):  # a bare function is on no grid
            begin = time.perf_counter()
            out = tw.attention(*inputs, mask=mask, backend="cpp")
            between = time.perf_counter()
            torch.autograd.grad(out, inputs, grad)
            end = time.perf_counter()
            if turn:
                kept[0].append(between - begin)
                kept[1].append(end - between)
    return [[1e3 * median(passes) for passes in order] for order in times]


def main() -> None:
    options = arguments(__doc__)
    watch = Watch(__file__)
    rows: list[list[str]] = []
    for shape, window in CASES:
        strips, counts = best(shape, (window,) * len(shape), TILE, Engine.copies_worth)
        for dtype in DTYPES:
            name = f"{' x '.join(map(str, shape))}, window {window}, {dtype}"
            progress(name)
            given, found = watch.measure("measure", list(shape), window, dtype, options.threads)
            rows.append([name, counts.split(":")[0].replace("of 64 x 64 ", ""), *_compared(given, found, bool(strips))])
    header = ["grid", "tiles of 64 x 64", "row by row, ms", "in patches, ms", "faster"]
    notes = f"Batch 1, {HEADS} heads, head dim {HEAD_DIM}. Forward / backward. Where too few tiles are saved for the copies, tokens stay as they are given."
    report(__file__, options, "Neighborhoods in patches on a CPU", [notes, table(header, rows), watch.note()])


def _compared(given: list[float], found: list[float], ordered: bool) -> list[Any]:
    shown = [" / ".join(f"{ms:.1f}" for ms in times) for times in (given, found)]
    return [*shown, " / ".join(f"{a / b:.2f}x" for a, b in zip(given, found, strict=True))] if ordered else [shown[0], "not taken", ""]


if __name__ == "__main__":
    main()
