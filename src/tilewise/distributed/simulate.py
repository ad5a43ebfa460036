"""What a layout of any number of ranks would cost, beside the usual ones; no process group is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.distributed.assign import Work, deal, one_thread, owners_of_tiles, work_of, work_of_all
from tilewise.distributed.report import text_table
from tilewise.distributed.strategy import Layout, Strategy, choose, head_splits, modelled
from tilewise.distributed.traffic import Machine, Shape
from tilewise.tiles import tile_map
from tilewise.tools import html

FINE = 16  # chunks of a rank, as MagiAttention cuts them
HEADER = ("the first: tilewise", "imbalance", "keys", "at most", "compute", "network", "node", "time")


@dataclass(frozen=True)
class SimulatedRow:
    """One way to share the work. Times are those of the rank that has the longest."""

    name: str
    imbalance: float  # the largest load over the mean
    received_mean: float  # keys from other ranks, over all keys
    received_max: float
    compute_ms: float
    network_ms: float
    node_ms: float
    time_ms: float

    @staticmethod
    def of(name: str, layout: Layout) -> "SimulatedRow":
        share = layout.received_share[0]
        milliseconds = [1e3 * seconds for seconds in (layout.compute_s, layout.network_s, layout.node_s, layout.time_s)]
        return SimulatedRow(name, layout.imbalance, float(share.mean()), float(share.max()), *milliseconds)

    def cells(self) -> list[str]:
        shares = [f"{100 * share:.2f} %" for share in (self.received_mean, self.received_max)]
        times = [f"{ms:,.1f}" for ms in (self.compute_ms, self.network_ms, self.node_ms, self.time_ms)]
        return [self.name, f"{self.imbalance:.3f}", *shares, *times]


@dataclass(frozen=True, eq=False)
class Simulation:
    """A table of ways to share one mask's work; the first row is what tilewise chooses, and `layout` all about it. `others` are the other rows' layouts."""

    title: str
    rows: tuple[SimulatedRow, ...]
    layout: Layout
    others: dict[str, Layout]

    def __str__(self) -> str:
        return "\n".join([self.title, text_table(HEADER, [row.cells() for row in self.rows]), f"chosen: {self.layout.reason}", NOTE])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html.table(HEADER, [row.cells() for row in self.rows])


NOTE = """imbalance: the largest work over the mean; keys: received from other row groups, of all keys, mean and largest
times: ms of a forward pass on the slowest rank, modelled from work and bytes, not measured"""


def simulate(
    mask: Any,
    *,
    ranks: int,
    length: int | None = None,
    tokens_per_rank: int = 8192,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int = 128,
    v_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine | None = None,
    strategy: Strategy = "auto",
) -> Simulation:
    """The layout that would be chosen for a mask (None: full attention) on so many ranks, beside contiguous, zigzag, fine chunks, gathered keys and heads.

    `length` is that of the sequence, `ranks * tokens_per_rank` unless given. Without `heads`, 64 heads on 8; with it, `kv_heads` is as many unless given.
    `machine` is a node of 8 Hopper GPUs with a network of 400 Gbit/s each.
    """
    length = ranks * tokens_per_rank if length is None else length
    if kv_heads is None:
        kv_heads = 8 if heads is None else heads
    heads = 64 if heads is None else heads
    machine = Machine.of("cuda") if machine is None else machine
    shape = Shape(batch, heads, kv_heads, head_dim, head_dim if v_dim is None else v_dim, dtype.itemsize)
    if mask is None:
        work, name = work_of_all(length), "full"
    else:
        found = tile_map(mask, q_len=length, kv_len=length, batch=batch, heads=heads)
        work, name = work_of(found), found.name
    chosen = choose([(work, 1)], ranks, shape, machine, strategy=strategy)
    with one_thread():
        others = dict(_others(work, ranks, shape, machine))
        rows = [SimulatedRow.of(chosen.name, chosen), *[SimulatedRow.of(way, layout) for way, layout in others.items()]]
    title = f"{name}: {length:,} tokens over {ranks:,} ranks, {heads} heads on {kv_heads}, head dim {head_dim}"
    return Simulation(title, tuple(rows), chosen, others)


def _others(work: Work, ranks: int, shape: Shape, machine: Machine) -> Iterator[tuple[str, Layout]]:
    """(name, layout) of the usual ways."""
    cost, tiles = work.cost.sum(0), work.tiles
    half = (torch.arange(1, tiles + 1) * 2 * ranks - 1) // max(tiles, 1)  # [tiles] of 2 * ranks chunks, as `deal` cuts them
    zigzag = torch.minimum(half, 2 * ranks - 1 - half)
    one_by_one = max(1, tiles // ranks)
    ways: Sequence[tuple[str, torch.Tensor, int, str]] = [
        ("contiguous, all keys (ring)", deal(cost, ranks, 1).owner, 1, "gather"),
        ("zigzag, all keys (ring)", zigzag, 2, "gather"),
        ("zigzag, needed keys", zigzag, 2, "needed"),
        (f"chunks of 1/{FINE}, needed keys (Magi)", deal(cost, ranks, min(FINE, one_by_one)).owner, FINE, "needed"),
        ("tiles dealt singly, all gathered (torch PTRR)", deal(cost, ranks, one_by_one).owner, one_by_one, "gather"),
    ]
    for name, owner, rounds, transport in ways:
        owners = owners_of_tiles(owner, ranks, 1, work.length)
        yield name, modelled([(work, 1)], owners, 1, shape, machine, rounds=rounds, bound=0.0, transport=transport)
    if ranks > 1 and ranks in head_splits(ranks, shape.heads, shape.kv_heads):
        yield "heads only (Ulysses)", choose([(work, 1)], ranks, shape, machine, strategy="heads")
