"""Tiles chosen from data."""

import argparse
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import tilewise
from gpu_rows.maps import SCHEDULES
from gpu_rows.peers import markdown, tensors, without_gradients
from gpu_rows.timing import both_passes_ms, gpu_ms, handed_over
from tilewise.core.problem import Options, make_problem


def sparse(args: argparse.Namespace) -> list[list[str]]:
    """The video of a large model, with a quarter and a tenth of its tiles chosen at random by every head, beside all of them. Lists are new in every layer and
    step: how long the GPU takes from lists to both passes' schedules, transposed ones included, and the host for a whole forward with new lists. torch flex
    gets the same lists as full blocks; its transposed lists are made by torch's operations."""
    heads, length, dim, tile = 40, 75600, 128, 128
    tiles, engine = -(-length // tile), args.engines[0]
    peers = ["forward ms", "of dense", "backward ms", "of dense", "lists: GPU ms", "host ms of a call"]
    flex = [] if args.no_flex else ["flex forward ms", "flex backward ms", "flex lists: GPU ms"]
    table = [[f"{heads} heads of {dim}, {length} tokens, tiles of {tile}, {engine}", *peers, *flex]]
    inputs = tensors(1, heads, length, dim)
    compiled = torch.compile(flex_attention, dynamic=False)
    whole: list[float] = []
    for keep in (1.0, 0.25, 0.1):
        entries = math.ceil(keep * tiles)
        indices = torch.rand(1, heads, tiles, tiles, device="cuda").topk(entries, -1).indices.int() if keep < 1 else None

        def ours(q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None = indices) -> Tensor:
            chosen = None if indices is None else tilewise.TileMap.from_lists(indices, q_len=length, kv_len=length, tile=(tile, tile))
            return tilewise.attention(q, k, v, mask=chosen, backend=engine)

        times = both_passes_ms(ours, inputs)
        whole = whole or times
        shares = [f"{ms / all_tiles:.3f}" for ms, all_tiles in zip(times, whole, strict=True)]
        cells = [f"{100 * keep:.0f} %", f"{times[0]:.1f}", shares[0], f"{times[1]:.1f}", shares[1]]
        cells.append("-" if indices is None else f"{lists_ms(indices, inputs, length, tile, engine):.3f}")
        cells.append(f"{handed_over(partial(without_gradients, ours, *inputs), 3) / 1e3:.3f}")
        if flex and indices is None:
            cells += ["-"] * len(flex)
        elif flex:
            blocks = flex_blocks(indices, length, tile, tiles)
            theirs = both_passes_ms(lambda q, k, v, blocks=blocks: compiled(q, k, v, block_mask=blocks), inputs)
            cells += [f"{ms:.1f}" for ms in theirs] + [f"{gpu_ms(partial(flex_blocks, indices, length, tile, tiles)):.3f}"]
        print("  ".join(f"{c:>10s}" for c in cells), flush=True)
        table.append(cells)
    print(markdown(table))
    return table


def flex_blocks(indices: Tensor, length: int, tile: int, tiles: int) -> BlockMask:
    """As many columns whatever is kept, so that torch compiles one kernel."""
    counts = torch.full(indices.shape[:3], indices.shape[3], dtype=torch.int32, device="cuda")
    padded = functional.pad(indices, (0, tiles - indices.shape[3]))
    nothing = torch.zeros_like(counts), torch.zeros_like(padded)
    return BlockMask.from_kv_blocks(*nothing, counts, padded, BLOCK_SIZE=tile, seq_lengths=(length, length))


def lists_ms(indices: Tensor, inputs: tuple[Tensor, ...], length: int, tile: int, engine: str) -> float:
    def schedules() -> None:
        chosen = tilewise.TileMap.from_lists(indices, q_len=length, kv_len=length, tile=(tile, tile))
        SCHEDULES[engine](make_problem(*inputs, chosen, None, Options())[0])

    return gpu_ms(schedules)
