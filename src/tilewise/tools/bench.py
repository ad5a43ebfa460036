"""A short benchmark on the device at hand: masks and scores, forward and backward, beside torch, as a table and as bars."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise import scores
from tilewise.lang import evaluate, trace_mask
from tilewise.tools.words import counted

TURNS = 5  # peers take turns, so that noise on the machine affects all of them
STRIP = 1024  # queries whose allowed pairs are counted at a time
PEERS = ("tilewise", "torch SDPA", "torch flex")
UNITS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6))


@dataclass(frozen=True)
class Work:
    """One row: a mask and a score, and whether torch's SDPA can express it, causal or not."""

    title: str
    mask: Any = None
    score: Any = None
    sdpa_causal: bool | None = None


class Rate(NamedTuple):
    """FLOP/s of unmasked work; the backward counts 2.5 times the forward. None if a peer cannot run it."""

    forward: float | None
    backward: float | None


@dataclass(frozen=True)
class Measured:
    """The rates of every peer, by the row's title, and where they were measured."""

    where: str
    dtype: str
    length: int
    heads: int
    head_dim: int
    rates: dict[str, dict[str, Rate]]

    @property
    def title(self) -> str:
        versions = f"tilewise {tilewise.__version__}, torch {torch.__version__}"
        return f"{self.where}: {counted(self.heads, 'head')} of {self.head_dim}, {self.length} tokens, {self.dtype}, {versions}"

    @property
    def peers(self) -> list[str]:
        """Those that ran at least one row."""
        return [peer for peer in PEERS if any(found[peer].forward is not None for found in self.rates.values())]

    @property
    def unit(self) -> tuple[str, float]:
        """The largest unit of which the fastest rate is at least one."""
        best = max(rate for found in self.rates.values() for rates in found.values() for rate in rates if rate is not None)
        return next((unit for unit in UNITS if best >= unit[1]), UNITS[-1])


def works(length: int, heads: int, device: torch.device) -> list[Work]:
    ids = torch.arange(length, device=device) * 8 // length
    slopes = scores.alibi_slopes(heads).to(device)
    causal: Callable[..., Any] = lambda b, h, q, kv: q >= kv
    return [
        Work("full", sdpa_causal=False),
        Work("causal", causal, sdpa_causal=True),
        Work(f"causal window {length // 16}", lambda b, h, q, kv: (q >= kv) & (q - kv < length // 16)),
        Work("8 documents, causal", lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)),
        Work("ALiBi, causal", causal, lambda s, b, h, q, kv: s + slopes[h] * (kv - q)),
        Work("softcap 30, causal", causal, lambda s, b, h, q, kv: 30.0 * torch.tanh(s / 30.0)),
    ]


def measure(length: int, heads: int, head_dim: int, where: torch.device, tell: Callable[[int, int, str], None]) -> Measured:
    """Every row, one after the other; tell(done, total, what is measured now)."""
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    inputs = tuple(torch.randn(1, heads, length, head_dim, device=where, dtype=dtype, requires_grad=True) for _ in range(3))
    rates: dict[str, dict[str, Rate]] = {}
    todo = works(length, heads, where)
    for done, work in enumerate(todo):
        tell(done, len(todo), f"measuring {work.title}")
        rates[work.title] = measured(work, inputs)
    return Measured(name, str(dtype).removeprefix("torch."), length, heads, head_dim, rates)


def measured(work: Work, inputs: tuple[Tensor, ...]) -> dict[str, Rate]:
    """Every peer's rates on one row."""
    jobs: dict[str, list[Callable[[], Any]]] = {}
    for peer, attend in peers(work, inputs[0]):
        try:
            jobs[peer] = _jobs(attend, inputs)
        except Exception:  # a peer may fail in any way, and its cell stays empty; tilewise must not fail
            if peer == "tilewise":
                raise
    times: dict[str, list[list[float]]] = {peer: [[] for _ in found] for peer, found in jobs.items()}
    for _ in range(TURNS):
        for peer, found in jobs.items():
            for k, job in enumerate(found):
                times[peer][k].append(seconds(job, inputs[0].device))
    query = inputs[0]
    flops = 4 * query.shape[1] * query.shape[3] * allowed_pairs(work.mask, query.shape[2], query.device)
    rates = {peer: [weight * flops / statistics.median(t) for t, weight in zip(found, (1.0, 2.5), strict=False)] for peer, found in times.items()}
    return {peer: Rate(*([*rates.get(peer, []), None, None][:2])) for peer in PEERS}


def peers(work: Work, query: Tensor) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    yield "tilewise", lambda q, k, v: tilewise.attention(q, k, v, mask=work.mask, score=work.score, backend="flex")
    if work.sdpa_causal is not None:
        yield "torch SDPA", lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=bool(work.sdpa_causal))
    if query.device.type == "cuda":  # compiled, as it is meant to be used; on a CPU, compiling takes longer than all the rest
        from torch.nn.attention import flex_attention as flex

        torch._dynamo.reset()
        compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
        length = query.shape[2]
        block_mask = None if work.mask is None else flex.create_block_mask(work.mask, None, None, length, length, device="cuda")
        yield "torch flex", lambda q, k, v: compiled(q, k, v, score_mod=work.score, block_mask=block_mask)


def _jobs(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Callable[[], Any]]:
    """The forward and the backward, each run once."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    out = attend(*inputs)
    direction = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, direction, retain_graph=True)

    forward()
    backward()
    return [forward, backward]


def seconds(job: Callable[[], Any], device: torch.device) -> float:
    """The time of one call, averaged over as many as take a few hundredths of a second."""
    _wait(device)
    begin = time.perf_counter()
    job()
    _wait(device)
    count = max(1, min(50, int(0.03 / max(time.perf_counter() - begin, 1e-6))))
    begin = time.perf_counter()
    for _ in range(count):
        job()
    _wait(device)
    return (time.perf_counter() - begin) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allowed_pairs(mask: Any, length: int, device: torch.device) -> int:
    """How many (q, kv) pairs a mask allows, counted in strips."""
    if mask is None:
        return length * length
    call = trace_mask(mask, device)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    keys = torch.arange(length, device=device)[None, :]
    total = 0
    for first in range(0, length, STRIP):
        queries = torch.arange(first, min(first + STRIP, length), device=device)[:, None]
        total += int(torch.as_tensor(evaluate(call, {"b": zero, "h": zero, "q": queries, "kv": keys})).sum())
    return total


def table(found: Measured) -> Table:
    unit, size = found.unit
    drawn = Table(f"forward / backward {unit}", *found.peers, title=found.title)
    for row, rates in found.rates.items():
        drawn.add_row(row, *[shown(rates[peer], size) for peer in found.peers])
    return drawn


def shown(rate: Rate, unit: float) -> str:
    numbers = ["-" if r is None else f"{r / unit:.0f}" if r / unit >= 10 else f"{r / unit:.2g}" for r in rate]
    return "-" if rate.forward is None else " / ".join(numbers)


def as_json(found: Measured) -> dict[str, Any]:
    """Rates in FLOP/s; null where a peer cannot run a row."""
    return {
        "tilewise": tilewise.__version__,
        "torch": str(torch.__version__),
        "device": found.where,
        "dtype": found.dtype,
        "length": found.length,
        "heads": found.heads,
        "head_dim": found.head_dim,
        "flop_per_s": {row: {peer: rates[peer]._asdict() for peer in found.peers} for row, rates in found.rates.items()},
    }


def draw(found: Measured, path: Path) -> str:
    """Forward and backward bars of every peer, as a picture."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn; matplotlib is not installed (pip install 'tilewise[viz]')"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    unit, size = found.unit
    width = 0.8 / len(found.peers)
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.5), sharey=True)
    for panel, which in zip(panels, ("forward", "backward"), strict=True):
        for k, peer in enumerate(found.peers):
            heights = [(getattr(rates[peer], which) or 0.0) / size for rates in found.rates.values()]
            offset = (k - (len(found.peers) - 1) / 2) * width
            panel.bar([n + offset for n in range(len(heights))], heights, width=0.93 * width, label=peer)
        panel.set_xticks(range(len(found.rates)), list(found.rates), rotation=20, ha="right")
        panel.set_title(f"{which}, {unit} of unmasked work")
    panels[0].legend()
    figure.suptitle(found.title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
