"""A short benchmark on the device at hand: masks and scores, forward and backward, beside torch, as a table and as bars."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise import scores
from tilewise.lang import evaluate, trace_mask

TURNS = 5  # peers take turns, so that noise on the machine affects all of them
STRIP = 1024  # queries whose allowed pairs are counted at a time
PEERS = ("tilewise", "torch SDPA", "torch flex")


@dataclass(frozen=True)
class Work:
    """One row: a mask and a score, and whether torch's SDPA can express it, causal or not."""

    title: str
    mask: Any = None
    score: Any = None
    sdpa_causal: bool | None = None


class Rate(NamedTuple):
    """TFLOP/s of unmasked work; the backward counts 2.5 times the forward. None if a peer cannot run it."""

    forward: float | None
    backward: float | None


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


def run(out: Path, length: int, heads: int, head_dim: int, where: torch.device) -> int:
    """Measure, print the table and draw the bars."""
    out.parent.mkdir(parents=True, exist_ok=True)  # an error now, not after minutes of measuring
    console = Console()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = f"tilewise {tilewise.__version__}, torch {torch.__version__}"
    title = f"{name}: {heads} heads of {head_dim}, {length} tokens, {str(dtype).removeprefix('torch.')}, {versions}"
    inputs = tuple(torch.randn(1, heads, length, head_dim, device=where, dtype=dtype, requires_grad=True) for _ in range(3))
    rates: dict[str, dict[str, Rate]] = {}
    with Progress(console=console, transient=True) as progress:
        todo = works(length, heads, where)
        bar = progress.add_task("measuring", total=len(todo))
        for work in todo:
            progress.update(bar, description=f"measuring {work.title}")
            rates[work.title] = measured(work, inputs)
            progress.advance(bar)
    table = Table("forward / backward TFLOP/s", *PEERS, title=title)
    for row, found in rates.items():
        table.add_row(row, *[shown(found[peer]) for peer in PEERS])
    console.print(table)
    console.print(f"bars: {draw(rates, title, out)}", highlight=False, markup=False)
    return 0


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
    rates = {peer: [weight * flops / statistics.median(t) / 1e12 for t, weight in zip(found, (1.0, 2.5), strict=False)] for peer, found in times.items()}
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


def shown(rate: Rate) -> str:
    numbers = ["-" if r is None else f"{r:.0f}" if r >= 100 else f"{r:.2g}" for r in rate]
    return "-" if rate.forward is None else " / ".join(numbers)


def draw(rates: dict[str, dict[str, Rate]], title: str, path: Path) -> str:
    """Forward and backward bars of every peer, as a picture."""
    try:
        import matplotlib
    except ImportError:
        return "not drawn, matplotlib is missing: pip install 'tilewise[viz]'"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(13, 4.5), sharey=True)
    for panel, which in zip(panels, ("forward", "backward"), strict=True):
        for k, peer in enumerate(PEERS):
            heights = [getattr(found[peer], which) or 0.0 for found in rates.values()]
            panel.bar([n + (k - 1) * 0.27 for n in range(len(rates))], heights, width=0.25, label=peer)
        panel.set_xticks(range(len(rates)), list(rates), rotation=20, ha="right")
        panel.set_title(f"{which}, TFLOP/s of unmasked work")
    panels[0].legend()
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
