"""A few queries over many keys: decoding, keys and values in pages, splits."""

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from gpu_rows.peers import TURNS, tensors
from gpu_rows.timing import graphed
from tilewise.core.problem import Options, make_problem
from tilewise.engines.triton import run

DECODED = [(heads, batch, length) for heads in (16, 32) for batch in (1, 8, 64) for length in (2048, 8192, 32768)]  # query heads on 8 key heads, D128


def decode(args: argparse.Namespace) -> list[list[str]]:
    """One token: all keys attended; an eighth of them padding, on the left; the first half of a buffer written. SDPA gets a mask tensor for the last two."""
    kinds = ["tilewise", "flash", "ratio", "cuDNN", "ratio", "tilewise, padded", "SDPA", "ratio", "tilewise, static", "SDPA", "ratio"]
    table = [["decode on 8 key heads, D128 (TB/s of keys and values attended)", *kinds]]
    for heads, batch, length in [(32, 1, 32768), (32, 16, 8192), (32, 64, 4096)] if args.quick else DECODED:
        sets, turns = _caches(heads, batch, length)
        visible = torch.ones(batch, length, dtype=torch.bool, device="cuda")
        visible[:, : length // 8] = False
        position = torch.tensor(length // 2 - 1, device="cuda")
        written = (torch.arange(length, device="cuda") <= position)[None, None, None]

        def times(forward: Callable[..., Tensor], sets: Any = sets, turns: Any = turns) -> float:
            return statistics.median(graphed(lambda: forward(*sets[next(turns) % len(sets)])) for _ in range(TURNS))

        def mine(mask: Any) -> Callable[..., Tensor]:
            return partial(tilewise.attention, mask=mask, enable_gqa=True, backend="flex")

        def torch_by(kernel: SDPBackend) -> Callable[..., Tensor]:
            def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(kernel):
                    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

            return forward

        def theirs(mask: Tensor) -> Callable[..., Tensor]:
            return partial(functional.scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)

        bytes_read = 2 * batch * 8 * length * 128 * 2
        cells = [f"B{batch} H{heads} KV {length}"]
        for share, one, *others in (
            (1.0, mine(None), torch_by(SDPBackend.FLASH_ATTENTION), torch_by(SDPBackend.CUDNN_ATTENTION)),
            (7 / 8, mine(lambda b, h, q, kv, visible=visible: visible[b, kv]), theirs(visible[:, None, None])),
            (1 / 2, mine(lambda b, h, q, kv, position=position: q + position >= kv), theirs(written)),
        ):
            ours, *rates = [share * bytes_read / times(f) / 1e9 for f in (one, *others)]
            cells += [f"{ours:.2f}", *[cell for rate in rates for cell in (f"{rate:.2f}", f"{ours / rate:.2f}")]]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def _caches(heads: int, batch: int, length: int) -> tuple[list[tuple[Tensor, ...]], Any]:
    """Queries, keys and values, several times where they would fit a cache of the GPU, and a counter."""
    count = max(1, 2**28 // (batch * 8 * length * 128 * 4))
    return [tuple(t.detach() for t in tensors(batch, heads, 1, 128, 8, length)) for _ in range(count)], iter(range(10**9))


PAGED = [(1, 131072), *[(batch, length) for batch in (1, 16, 64) for length in (4096, 8192, 32768) if batch * length <= 2**20]]


def paged(args: argparse.Namespace) -> list[list[str]]:
    """One token over all keys, which lie in pages in a random order, beside the same keys in order (tokens before heads, as pages have them) and torch's own
    paged attention, where this version has one."""
    sizes = (1, 16, 64, 256)
    columns = [f"page {size}, ratio" for size in sizes]
    table = [["decode, 32 query heads on 8, D128 (TB/s)", "in order", *columns, "float8, page 64", "of bf16, page 64", "torch, page 256"]]
    for batch, length in [(1, 32768), (1, 131072), (16, 8192), (64, 4096)] if args.quick else PAGED:
        query = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        bytes_read = 2 * batch * 8 * length * 128 * 2
        count = max(1, 2**28 // bytes_read)  # of caches, several where one would fit the GPU's cache

        def rate(calls: list[Callable[[], Any]], size: float = bytes_read) -> float:
            turns = itertools.cycle(calls)

            def one() -> None:
                next(turns)()

            return size / statistics.median(graphed(one) for _ in range(TURNS)) / 1e9

        caches = [[torch.randn(batch * length, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(count)]
        in_order = rate(
            [partial(tilewise.attention, query, *[t.view(batch, length, 8, 128).transpose(1, 2) for t in kv], enable_gqa=True, backend="flex") for kv in caches]
        )
        cells, rates = [f"B{batch} KV {length}", f"{in_order:.2f}"], {}
        for size in sizes:
            numbers = torch.randperm(batch * length // size, device="cuda").to(torch.int32).view(batch, -1)
            rates[size] = rate([partial(tilewise.paged_attention, query, *[t.view(-1, size, 8, 128) for t in kv], numbers, lengths) for kv in caches])
            cells.append(f"{rates[size] / in_order:.2f}")
        numbers = torch.randperm(batch * length // 64, device="cuda").to(torch.int32).view(batch, -1)
        narrow = [[t.view(-1, 64, 8, 128).to(torch.float8_e4m3fn) for t in kv] for kv in caches]
        half = rate([partial(tilewise.paged_attention, query, *kv, numbers, lengths, k_scale=0.5, v_scale=2.0) for kv in narrow], bytes_read / 2)
        cells += [f"{half:.2f}", f"{2 * half / rates[64]:.2f}", _torch_paged(query, caches, batch, length, rate)]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def _torch_paged(query: Tensor, caches: list[list[Tensor]], batch: int, length: int, rate: Callable[..., float]) -> str:
    """torch's varlen_attn with a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "-"
    numbers = torch.randperm(batch * length // 256, device="cuda").to(torch.int32).view(batch, -1)
    offsets = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used, tokens = torch.full((batch,), length, device="cuda", dtype=torch.int32), query.squeeze(2)
    try:
        calls = [
            partial(varlen_attn, tokens, *[t.view(-1, 256, 8, 128) for t in kv], offsets, None, 1, length, seqused_k=used, block_table=numbers) for kv in caches
        ]
        return f"{rate(calls):.2f}"
    except (TypeError, RuntimeError) as error:  # this version takes no pages
        return f"- ({type(error).__name__})"


def splits(args: argparse.Namespace) -> list[list[str]]:
    """How long decoding takes by the number of splits of the keys, beside the number that is chosen: what triton/run.best_split_count goes by."""

    tried = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
    table = [["decode on 8 key heads, D128 (us by splits)", "chosen", *map(str, tried)]]
    for _, batch, length in [d for d in DECODED if d[0] == 32]:
        sets, turns = _caches(32, batch, length)
        p = make_problem(*sets[0], None, None, Options(enable_gqa=True))[0]
        cells = [f"B{batch} KV {length}", str(run.split_count(p))]
        for count in [n for n in tried if 64 * n <= length]:
            ready = (run.DecodeWhole(p) if count == 1 else run.Decode(p, count)).bind(p)

            def call(ready: Any = ready, sets: Any = sets, turns: Any = turns) -> Any:
                return ready.run(*sets[next(turns) % len(sets)], None, None)

            cells.append(f"{1000 * statistics.median(graphed(call) for _ in range(TURNS)):.1f}")
        cells += [""] * (len(table[0]) - len(cells))
        print("  ".join(f"{c:>10s}" for c in cells), flush=True)
        table.append(cells)
    return table
