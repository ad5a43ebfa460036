"""Decoding on a CPU over keys and values in pages, beside the same keys in order.

One token of each sequence, all keys attended. Pages lie in a random order; keys in order lie as pages have them, tokens before heads.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from common import arguments, machine, report, table

import tilewise as tw

BATCH, LENGTH, HEAD_DIM = 4, 8192, 128
HEADS = ((32, 8), (8, 8))
SIZES = (1, 16, 64, 256)
ROUNDS, CALLS = 5, 10


def measured(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each: medians of turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e3)
    return {name: median(found) for name, found in times.items()}


def row(dtype: torch.dtype, heads: int, kv_heads: int) -> list[str]:
    query = torch.randn(BATCH, heads, 1, HEAD_DIM).to(dtype)
    stored = [torch.randn(BATCH * LENGTH, kv_heads, HEAD_DIM).to(dtype) for _ in range(2)]
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32)
    in_order = [t.view(BATCH, LENGTH, kv_heads, HEAD_DIM).transpose(1, 2) for t in stored]
    calls: dict[str, Callable[[], Any]] = {"in order": partial(tw.attention, query, *in_order, enable_gqa=True, backend="cpp")}

    def paged(size: int, tensors: list[torch.Tensor]) -> Callable[[], Any]:
        numbers = torch.randperm(BATCH * LENGTH // size).to(torch.int32).view(BATCH, -1)
        return partial(tw.paged_attention, query, *[t.view(-1, size, kv_heads, HEAD_DIM) for t in tensors], numbers, lengths, backend="cpp")

    calls |= {f"page {size}": paged(size, stored) for size in SIZES}
    if dtype == torch.bfloat16:
        calls["float8, page 64"] = paged(64, [t.to(torch.float8_e4m3fn) for t in stored])
    found = measured(calls)
    cells = [f"{found['in order'] / found[name]:.2f}" if name in found else "-" for name in (*[f"page {size}" for size in SIZES], "float8, page 64")]
    return [f"{str(dtype).removeprefix('torch.')}, {heads} heads on {kv_heads}", f"{found['in order']:.2f}", *cells]


def main() -> None:
    options = arguments(__doc__)
    print(machine(options.threads))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = [row(dtype, *heads) for dtype in (torch.float32, torch.bfloat16) for heads in HEADS]
    how = (
        f"{BATCH} sequences of {LENGTH} keys, head dim {HEAD_DIM}. Milliseconds of a call on keys in order, and the others' rate beside it: 1 is as fast. "
        "float8 has half the bytes of bfloat16, and is converted."
    )
    header = ["decode", "in order, ms", *[f"page {size}" for size in SIZES], "float8, page 64"]
    report(__file__, options, "Keys and values in pages, on a CPU", [how, table(header, rows)])


if __name__ == "__main__":
    main()
