"""The demo: three masks and a learned score, from Python function to checked and timed attention."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import tilewise
from tilewise import masks, scores
from tilewise.attention import problem_of_call
from tilewise.core.problem import Options
from tilewise.engines.reference import dense_attention

HEADS, HEAD_DIM = 4, 64
REPEATS = 3
GRID_WIDTH = 32  # of the image in the neighborhood mask


TITLE = "ms forward + backward; error against the dense reference in float64"
NEXT = """\
Each mask and score above is a Python function. No N x N matrix was formed.

Try next:
  print(tilewise.explain(q, k, v, mask=masks.causal))   which engine, and why
  with tilewise.attention_backend("flex"): ...          choose one for a block
  from tilewise.flex import flex_attention              torch's interface
  docs/masks.md, docs/scores.md, docs/choosing.md       the whole library
"""


@dataclass(frozen=True)
class Example:
    title: str
    code: str
    mask: Any
    score: Any = None
    learned: tuple[Tensor, ...] = ()


def examples(length: int, device: str) -> list[Example]:
    ids = torch.arange(length, device=device) * 5 // length  # five packed documents
    grid = (length // GRID_WIDTH, GRID_WIDTH)
    table = torch.zeros(HEADS, 2 * 128 + 1, device=device).normal_(std=0.1).requires_grad_()
    return [
        Example("sliding window", "masks.causal & masks.sliding_window(256)", masks.causal & masks.sliding_window(256)),
        Example(
            "packed documents",
            "lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)",
            masks.Mask(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), "same document & causal"),
        ),
        Example(
            "2-D neighborhood, learned bias",
            f"masks.neighborhood({grid}, 7), score=scores.relative_bias(table)",
            masks.neighborhood(grid, min(7, *grid)),
            scores.relative_bias(table),
            (table,),
        ),
    ]


def tour(out: Path, length: int, where: str) -> int:
    """Run the tour; the exit code is 1 if a check failed."""
    console = Console()
    length = max(GRID_WIDTH, length // GRID_WIDTH * GRID_WIDTH)
    out.mkdir(parents=True, exist_ok=True)
    console.rule("[bold]tilewise")
    console.print(f"tilewise {tilewise.__version__}, torch {torch.__version__}, device {where}, {HEADS} heads of {HEAD_DIM}, {length} tokens\n")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    query, key, value = (torch.randn(1, HEADS, length, HEAD_DIM, device=where, dtype=dtype, requires_grad=True) for _ in range(3))

    table = Table("mask", "engine", "error", "tilewise", "torch SDPA", "flex, eager", title=TITLE)
    passed = True
    with Progress(console=console, transient=True) as progress:
        todo = examples(length, where)
        bar = progress.add_task("running", total=4 * len(todo))
        for example in todo:
            progress.update(bar, description=f"{example.title}: tile map")
            tile_map = tilewise.tile_map(example.mask, q_len=length, kv_len=length, tile=(64, 64))
            picture = drawn(tile_map, out / f"{example.title.replace(' ', '-').replace(',', '')}.png")
            progress.console.print(f"{example.title}:  mask={example.code}", style="bold", highlight=False, markup=False)
            progress.console.print(f"{tile_map}\n  picture: {picture}\n", highlight=False, markup=False, soft_wrap=True)
            progress.advance(bar)

            progress.update(bar, description=f"{example.title}: checking against the reference")
            error, budget = check(example, query, key, value)
            passed &= error <= budget
            progress.advance(bar)

            progress.update(bar, description=f"{example.title}: timing")
            ours = timed(ours_of(example, query, key, value), (query, key, value, *example.learned))
            progress.advance(bar)
            peers = [measure(peer, example, query, key, value) for peer in (sdpa, torch_flex)]
            progress.advance(bar)
            engine = tilewise.explain(query, key, value, mask=example.mask, score=example.score).engine
            verdict = f"[green]{error:.0e}" if error <= budget else f"[red]{error:.0e} > {budget:.0e}"
            table.add_row(example.title, engine, verdict, ours, *peers)
    console.print(table)
    console.print(NEXT, highlight=False, markup=False)
    if not passed:
        console.print("[red]a result differs from the reference by more than rounding explains; please report it with the output above")
    return 0 if passed else 1


def drawn(tile_map: tilewise.TileMap, path: Path) -> str:
    try:
        return str(tile_map.picture(path))
    except ImportError as error:
        return f"not drawn, {error}"


def check(example: Example, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Largest relative error of output and gradients against float64, and what rounding in this dtype explains."""
    inputs = (query, key, value, *example.learned)
    out = tilewise.attention(query, key, value, mask=example.mask, score=example.score)
    direction = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, inputs, direction))
    problem, _ = problem_of_call(query.double(), key.double(), value.double(), example.mask, example.score, Options(), "bhsd", None)
    exact_inputs = [t.detach().double().requires_grad_() for t in (query, key, value)]
    problem = replace(problem, query=exact_inputs[0], key=exact_inputs[1], value=exact_inputs[2])
    exact = dense_attention(problem).out
    wanted = (exact, *torch.autograd.grad(exact, (*exact_inputs, *example.learned), direction.double()))
    error = max(float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()) for a, b in zip(found, wanted, strict=True))
    return error, 16 * torch.finfo(query.dtype).eps


def timed(run: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> str:
    """Median forward and, where there are inputs to differentiate, backward time in ms."""
    passes = [_one_pass(run, inputs) for _ in range(REPEATS + 1)]
    return f"{_median(passes, 0):.0f} + {_median(passes, 1):.0f}" if inputs else f"{_median(passes, 0):.0f}, no backward"


def _one_pass(run: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    begin = clock()
    out = run()
    middle = clock()
    if inputs:
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    return middle - begin, clock() - middle


def _median(passes: list[tuple[float, float]], which: int) -> float:
    """In ms, the first pass left out as a warm-up."""
    return 1e3 * sorted(p[which] for p in passes[1:])[REPEATS // 2]


def clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(peer: Callable[..., Any], example: Example, query: Tensor, key: Tensor, value: Tensor) -> str:
    """A peer's time, forward alone if it refuses gradients, or why it cannot run."""
    for inputs in ((query, key, value), ()):
        try:
            run = peer(example, *(t if inputs else t.detach() for t in (query, key, value)))
            return timed(run, inputs)
        except Exception as error:  # a peer may fail in any way; the table says how
            reason = str(error).split("\n")[0][:40] or type(error).__name__
    return reason


def ours_of(example: Example, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    return lambda: tilewise.attention(query, key, value, mask=example.mask, score=example.score)


def sdpa(example: Example, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """SDPA takes a mask only as a dense tensor, and no score functions."""
    if example.score is not None:
        raise NotImplementedError("no scores")
    length = query.shape[2]
    dense = tilewise.flex.create_mask(example.mask, None, None, length, length, device=str(query.device))
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)


def torch_flex(example: Example, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """Uncompiled, as it runs in eager mode."""
    from torch.nn.attention import flex_attention as flex

    length = query.shape[2]
    block_mask = flex.create_block_mask(example.mask, None, None, length, length, device=str(query.device))
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # compared uncompiled, and the table says so
    return lambda: flex.flex_attention(query, key, value, score_mod=example.score, block_mask=block_mask)
