"""What each rank of a shared sequence computes, one rank after the other on one GPU: balance, and speed beside the whole sequence.

    python benchmarks/shards.py [--ranks 8 64] [--tokens 8192] [--sample 8] [--save shards.md] [--flex]

Every rank's queries and the keys it would fetch are made on the GPU and attended to, forward and backward, as in tilewise.distributed; nothing travels.
`mean / max` is over the measured ranks: the share of time that ranks compute if all wait for the slowest. `of N/P` is the time of the whole sequence on one
GPU, divided by the ranks, over that of the slowest rank. Where the whole sequence would take too long (more than 8 ranks), its time follows from
that of 8 ranks by computed tiles. Beside tilewise's layout: one stretch for each rank, zigzag, and with --flex torch's FlexAttention on tilewise's shards.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
from common import progress, table

import tilewise
from tilewise import masks
from tilewise.core.problem import Problem, default_scale
from tilewise.distributed import shard
from tilewise.distributed.plan import MaskPlan, Sizes, plan_of_rank
from tilewise.distributed.simulate import simulate
from tilewise.distributed.strategy import Layout

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
SIZES = Sizes(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
WHOLE = 8  # ranks up to whose sequence the whole is measured
RESULTS = Path(__file__).parent / "results" / "gpu"
Pass = Callable[[], Any]


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float


def mask_named(name: str, length: int) -> masks.Mask:
    if name == "causal":
        return masks.causal
    if name == "window 4096":
        return masks.causal & masks.sliding_window(4096)
    return masks.causal & masks.document(lengths=documents(length))


def documents(length: int) -> list[int]:
    """Many short ones, few long, none longer than a quarter of the sequence."""
    g, lengths, left = torch.Generator().manual_seed(0), [], length
    while left:
        drawn = int(2 ** (9 + 7 * torch.rand((), generator=g).item() ** 1.5))
        lengths.append(min(drawn, length // 4, left))
        left -= lengths[-1]
    return lengths


def tensors_of(part: MaskPlan, device: str) -> tuple[Tensor, Tensor, Tensor]:
    groups = part.whole.team.head_groups
    keys = part.whole.length if part.keys is None else len(part.keys.stages[0].positions)
    shapes = [(HEADS // groups, len(part.whole.row_positions)), *[(max(1, KV_HEADS // groups), keys)] * 2]
    q, k, v = [torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16) for heads, tokens in shapes]
    return q, k, v


def passes(part: MaskPlan, device: str) -> tuple[Pass, Pass]:
    """The forward and the backward of what a rank computes."""
    q, k, v = tensors_of(part, device)
    problem = Problem(q, k, v, part.masks[0], None, None, None, default_scale(HEAD_DIM), 0.0, None, False)
    engine = shard.engine_for(problem, ("auto", "the benchmark"), part.name)
    if engine is None:
        return lambda: None, lambda: None
    plan = engine.plan(problem)
    output, grad = engine.forward(problem, plan), torch.randn_like(q)
    return lambda: engine.forward(problem, plan), lambda: engine.backward(problem, plan, output, grad, None, frozenset())


def flex_passes(part: MaskPlan, mask: masks.Mask, device: str) -> tuple[Pass, Pass]:
    q, k, v = [t.requires_grad_() for t in tensors_of(part, device)]
    rows, keys = part.whole.row_positions, torch.arange(part.whole.length, device=device) if part.keys is None else part.keys.stages[0].positions
    block_mask = create_block_mask(lambda b, h, i, j: mask.function(b, h, rows[i], keys[j]), None, None, len(rows), len(keys), device=device)
    run = torch.compile(flex_attention, dynamic=False)
    out = run(q, k, v, block_mask=block_mask, enable_gqa=True)
    grad = torch.randn_like(out)
    return lambda: run(q, k, v, block_mask=block_mask, enable_gqa=True), lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def timed(both: tuple[Pass, Pass]) -> Times:
    return Times(*[milliseconds(each) for each in both])


def milliseconds(function: Pass) -> float:
    """The median of a few runs."""
    found = []
    for run in range(7):
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        function()
        end.record()
        end.synchronize()
        if run > 1:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def sampled(layout: Layout, count: int) -> list[int]:
    """The most and the least loaded rank, and others spread evenly over the loads between them."""
    order = torch.argsort(layout.loads).tolist()
    return sorted({order[round(k * (len(order) - 1) / max(count - 1, 1))] for k in range(count)})


class Row(NamedTuple):
    layout: str
    times: list[Times]

    def text(self, mask: str, ranks: int, whole: Times) -> list[str]:
        cells = [mask, str(ranks), self.layout]
        for k in range(2):
            each = [t[k] for t in self.times]
            cells += [f"{max(each):.2f}", f"{statistics.mean(each) / max(each):.2f}", f"{whole[k] / ranks / max(each):.2f}"]
        return cells


def rows_of(name: str, ranks: int, options: argparse.Namespace) -> tuple[list[Row], float]:
    """The rows of a mask, and its computed tiles."""
    length, device = ranks * options.tokens, options.device
    mask = mask_named(name, length)
    simulation = simulate(mask, ranks=ranks, tokens_per_rank=options.tokens, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    ways = {"tilewise": simulation.layout} | {other: found for other, found in simulation.others.items() if other.startswith(("contiguous", "zigzag, needed"))}
    rows = []
    for way, layout in ways.items():
        found, by_flex = [], []
        for rank in sampled(layout, options.sample):
            progress(f"{name}, {ranks} ranks, {way}, rank {rank}")
            part = plan_of_rank(mask, rank, ranks, length, SIZES, device, layout=layout).only
            found.append(timed(passes(part, device)))
            if options.flex and way == "tilewise":
                by_flex.append(timed(flex_passes(part, mask, device)))
        rows.append(Row(f"{way}: {layout.name}" if way == "tilewise" else way, found))
        if by_flex:
            rows.append(Row("torch flex on the same shards", by_flex))
    return rows, float(simulation.layout.loads.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--sample", type=int, default=8, help="ranks that are measured: the most and the least loaded, and others between them")
    parser.add_argument("--flex", action="store_true", help="also torch's FlexAttention, on tilewise's shards")
    parser.add_argument("--save", metavar="FILE", help=f"write the table to this file of {RESULTS.name}")
    options = parser.parse_args()
    options.device = "cuda"
    lines = []
    for name in ("causal", "window 4096", "documents"):
        per_tile: Times | None = None
        for ranks in sorted(options.ranks):
            rows, tiles = rows_of(name, ranks, options)
            if ranks <= WHOLE or per_tile is None:
                length = ranks * options.tokens
                alone = plan_of_rank(mask_named(name, length), 0, 1, length, SIZES, options.device).only
                per_tile = Times(*[t / tiles for t in timed(passes(alone, options.device))])
            whole = Times(*[t * tiles for t in per_tile])
            lines += [row.text(name, ranks, whole) for row in rows]
    header = ["mask", "ranks", "layout", "fwd ms, slowest", "mean / max", "of N/P", "bwd ms, slowest", "mean / max", "of N/P"]
    text = "\n".join(
        [
            "# What each rank of a shared sequence computes",
            "",
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tilewise {tilewise.__version__}; {options.tokens} tokens a rank, "
            f"{HEADS} heads on {KV_HEADS}, head dim {HEAD_DIM}, bfloat16; {options.sample} ranks measured one after the other, nothing travels.",
            "",
            f"Repeat it: `{shlex.join(['python', 'benchmarks/shards.py', *sys.argv[1:]])}`",
            "",
            table(header, lines),
        ]
    )
    print(text)
    if options.save:
        (RESULTS / options.save).write_text(text + "\n")


if __name__ == "__main__":
    main()
