"""What each rank of a shared sequence computes, one rank after the other on one GPU: balance, and speed beside the whole sequence.

    python benchmarks/shards.py [--masks causal documents] [--ranks 8 64] [--tokens 8192] [--sample 8] [--save shards.md] [--flex] [--stages] [--minutes 10]

Every rank's queries and the keys it would fetch are made on the GPU and attended to, forward and backward, as in tilewise.distributed; nothing travels.
`mean / max` is over the measured ranks: the share of time that ranks compute if all wait for the slowest. `of N/P` is the time of the whole sequence on one
GPU, divided by the ranks, over that of the slowest rank. Where the whole sequence would take too long (more than 8 ranks), its time follows from
that of 8 ranks by computed tiles. Beside tilewise's layout: one stretch for each rank, zigzag; with --stages the same shards in two stages, the own keys
before the others, merged; with --flex torch's FlexAttention on tilewise's most loaded shard (its compiler takes some 20 seconds for each). The table is
written anew with every row, and no rank is begun after --minutes.
"""

import argparse
import shlex
import statistics
import sys
import time
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
from tilewise.core.output import Output
from tilewise.core.problem import Problem, default_scale
from tilewise.distributed import shard
from tilewise.distributed.plan import MaskPlan, Sizes, plan_of_rank
from tilewise.distributed.run import Call, problem_of
from tilewise.distributed.simulate import simulate
from tilewise.distributed.strategy import Layout
from tilewise.engines import Engine

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
SIZES = Sizes(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM)
MASKS = ("causal", "window 4096", "documents")
WHOLE = 8  # ranks up to whose sequence the whole is measured
FLEX_ELEMENTS = 2**34  # of a shard's mask: torch writes it out before it finds its blocks
RESULTS = Path(__file__).parent / "results" / "gpu"
Pass = Callable[[], Any]


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float


def mask_named(name: str, length: int, device: str = "cpu") -> masks.Mask:
    if name == "causal":
        return masks.causal
    if name == "window 4096":
        return masks.causal & masks.sliding_window(4096)
    return masks.causal & masks.document(masks.ids_of_lengths(documents(length)).to(device))


def documents(length: int) -> list[int]:
    """Many short ones, few long, none longer than a quarter of the sequence."""
    g, lengths, left = torch.Generator().manual_seed(0), [], length
    while left:
        drawn = int(2 ** (9 + 7 * torch.rand((), generator=g).item() ** 1.5))
        lengths.append(min(drawn, length // 4, left))
        left -= lengths[-1]
    return lengths


def keys_of(part: MaskPlan, device: str) -> list[Tensor]:
    """The positions of each stage's keys."""
    return [torch.arange(part.whole.length, device=device)] if part.keys is None else [stage.positions for stage in part.keys.stages]


def drawn(heads: int, tokens: int, device: str) -> Tensor:
    return torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)


def passes(part: MaskPlan, device: str) -> tuple[Pass, Pass]:
    """The forward and the backward of what a rank computes."""
    groups = part.whole.team.head_groups
    call = Call(part, None, default_scale(HEAD_DIM), 0.0, 0, False, ("auto", "the benchmark"), True, {})
    q = drawn(HEADS // groups, len(part.whole.row_positions), device)
    keys = [[drawn(max(1, KV_HEADS // groups), len(at), device) for _ in range(2)] for at in keys_of(part, device)]
    problems = [problem_of(call, stage, q, *kv, None, ()) for stage, kv in enumerate(keys)]
    served = [_Served(shard.engine_for(p, call.backend, part.name), p) for p in problems]

    def forward() -> Output:
        return shard.merged([each.forward() for each in served], q.dtype)

    output, grad = forward(), torch.randn_like(q)
    return forward, lambda: [each.backward(output, grad) for each in served]


class _Served:
    """A stage with the engine that serves it, and its plan, which is made once: the GPU's time is measured, not the host's."""

    def __init__(self, engine: Engine | None, problem: Problem) -> None:
        self.engine, self.problem = engine, problem
        self.plan = None if engine is None else engine.plan(problem)

    def forward(self) -> Output:
        return shard.forward(None, self.problem) if self.engine is None else self.engine.forward(self.problem, self.plan)

    def backward(self, output: Output, grad: Tensor) -> Any:
        return None if self.engine is None else self.engine.backward(self.problem, self.plan, output, grad, None, frozenset())


def flex_passes(part: MaskPlan, mask: masks.Mask, device: str) -> tuple[Pass, Pass]:
    groups, rows, (keys,) = part.whole.team.head_groups, part.whole.row_positions, keys_of(part, device)
    if len(rows) * len(keys) > FLEX_ELEMENTS:
        raise MemoryError(f"a mask of {len(rows)} x {len(keys)} elements")
    torch.compiler.reset()  # or the ninth shape runs uncompiled
    q, k, v = (drawn(n, len(at), device).requires_grad_() for n, at in ((HEADS // groups, rows), *[(max(1, KV_HEADS // groups), keys)] * 2))
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
            balance = f"{statistics.mean(each) / max(each):.2f}" if len(each) > 1 else "-"
            cells += [f"{max(each):.2f}", balance, f"{whole[k] / ranks / max(each):.2f}"]
        return cells


class Bench:
    """One run. Rows are written as they come."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, "cuda"
        self.until = time.monotonic() + 60 * options.minutes
        self.lines: list[list[str]] = []

    def run(self) -> None:
        for name in self.options.masks:
            per_tile: Times | None = None
            for ranks in sorted(self.options.ranks):
                if self.is_over():
                    return
                length = ranks * self.options.tokens
                mask = mask_named(name, length)
                simulation = simulate(mask, ranks=ranks, tokens_per_rank=self.options.tokens, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
                tiles = float(simulation.layout.loads.sum())
                if ranks <= WHOLE or per_tile is None:
                    progress(f"{name}, the whole of {length} tokens")
                    alone = plan_of_rank(mask, 0, 1, length, SIZES, self.device).only
                    per_tile = Times(*[t / tiles for t in timed(passes(alone, self.device))])
                whole = Times(*[t * tiles for t in per_tile])
                others = {way: found for way, found in simulation.others.items() if way.startswith(("contiguous", "zigzag, needed"))}
                for way, layout in {"tilewise": simulation.layout, **others}.items():
                    self.way(name, mask, ranks, way, layout, whole)

    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def way(self, name: str, mask: masks.Mask, ranks: int, way: str, layout: Layout, whole: Times) -> None:
        """The rows of one way to share a mask's work."""
        found, staged = [], []
        chosen = sampled(layout, self.options.sample)
        for rank in chosen:
            if self.is_over():
                return
            progress(f"{name}, {ranks} ranks, {way}, rank {rank}")
            found.append(timed(passes(self.part(mask, rank, ranks, layout, 1), self.device)))
            if self.options.stages and way == "tilewise":
                staged.append(timed(passes(self.part(mask, rank, ranks, layout, 2), self.device)))
        self.add(Row(f"{way}: {layout.name}" if way == "tilewise" else way, found), name, ranks, whole)
        if staged:
            self.add(Row("the same in two stages", staged), name, ranks, whole)
        if self.options.flex and way == "tilewise" and not self.is_over():
            most = max(chosen, key=lambda rank: float(layout.loads[rank]))
            progress(f"{name}, {ranks} ranks, torch flex, rank {most}")
            try:
                there = mask_named(name, ranks * self.options.tokens, self.device)  # torch's flex loads from tensors on the GPU
                by_flex = timed(flex_passes(self.part(mask, most, ranks, layout, 1), there, self.device))
            except Exception as error:  # the others go on
                progress(f"torch flex: {type(error).__name__}: {str(error).splitlines()[0]}")
                return
            self.add(Row("torch flex on its most loaded shard", [by_flex]), name, ranks, whole)

    def part(self, mask: masks.Mask, rank: int, ranks: int, layout: Layout, stages: int) -> MaskPlan:
        return plan_of_rank(mask, rank, ranks, ranks * self.options.tokens, SIZES, self.device, layout=layout, stages=stages).only

    def add(self, row: Row, name: str, ranks: int, whole: Times) -> None:
        self.lines.append(row.text(name, ranks, whole))
        if self.options.save:
            (RESULTS / self.options.save).write_text(self.text() + "\n")

    def text(self) -> str:
        header = ["mask", "ranks", "layout", "fwd ms, slowest", "mean / max", "of N/P", "bwd ms, slowest", "mean / max", "of N/P"]
        return "\n".join(
            [
                "# What each rank of a shared sequence computes",
                "",
                f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tilewise {tilewise.__version__}; {self.options.tokens} tokens a rank, "
                f"{HEADS} heads on {KV_HEADS}, head dim {HEAD_DIM}, bfloat16; {self.options.sample} ranks measured one after the other, nothing travels.",
                "",
                f"Repeat it: `{shlex.join(['python', 'benchmarks/shards.py', *sys.argv[1:]])}`",
                "",
                table(header, self.lines),
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--sample", type=int, default=8, help="ranks that are measured: the most and the least loaded, and others between them")
    parser.add_argument("--flex", action="store_true", help="also torch's FlexAttention, on tilewise's most loaded shard")
    parser.add_argument("--stages", action="store_true", help="also tilewise's shards in two stages")
    parser.add_argument("--minutes", type=float, default=10, help="after which no further rank is begun")
    parser.add_argument("--save", metavar="FILE", help=f"write the table to this file of {RESULTS.name}, anew with every row")
    bench = Bench(parser.parse_args())
    bench.run()
    print(bench.text())
    if bench.is_over():
        print(f"the time was up after {bench.options.minutes:g} minutes; not everything was measured")


if __name__ == "__main__":
    main()
