"""The torch operator that all engines run behind: it gives them autograd, torch.compile, opcheck and fake tensors.

Its arguments are plain data (programs as text), so that a graph holds nothing but tensors, numbers and strings.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine, like_query
from tilewise.engines.registry import engine_named
from tilewise.errors import BackendError
from tilewise.lang import BoundProgram, parse
from tilewise.tiles import Geometry, Runs, TileMap, trimmed

ARGUMENTS = (
    "str engine, Tensor query, Tensor key, Tensor value, "
    "str mask, Tensor[] mask_captures, SymInt[] mask_ints, float[] mask_floats, Tensor[] tiles, SymInt[] geometry, "
    "str score, Tensor[] score_captures, SymInt[] score_ints, float[] score_floats, "
    "Tensor? sinks, float scale, float dropout_p, Tensor? seed, bool deterministic"
)
COUNT = ARGUMENTS.count(",") + 1
SCORE_CAPTURES = 11  # position among the arguments
SINKS = 14
NOT_TWICE = "attention cannot be differentiated twice: its backward has no derivative of its own; torch's SDPA has one with SDPBackend.MATH"

# Inductor runs the operators between the CUDA graphs it captures, not inside (torch 2.9 and newer): what engines make once and keep, such as tile maps,
# must not lie in the memory of a graph, and what follows the contents of tensors must not be frozen in one.
TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

library = torch.library.Library("tilewise", "FRAGMENT")
library.define(f"attention({ARGUMENTS}) -> (Tensor, Tensor, Tensor)", tags=TAGS)
library.define(
    f"attention_backward({ARGUMENTS}, Tensor out, Tensor lse, Tensor max_score, Tensor grad_out, Tensor? grad_lse, int[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    tags=TAGS,
)


def arguments(engine: str, problem: Problem) -> tuple[Any, ...]:
    """A problem as the operator's arguments."""
    mask, score, tiles = problem.mask, problem.score, problem.tiles
    runs: list[Tensor] = []
    geometry: list[int] = []
    if tiles is not None:
        g = tiles.geometry
        runs = [t for r in (tiles.partial, tiles.full) for t in (r.offsets, r.start, r.count)]
        geometry = [g.batch, g.heads, g.q_len, g.kv_len, *g.tile, int(tiles.given)]
    return (
        engine,
        problem.query,
        problem.key,
        problem.value,
        *_call_arguments(mask),
        runs,
        geometry,
        *_call_arguments(score),
        problem.sinks,
        problem.scale,
        problem.dropout_p,
        problem.seed,
        problem.deterministic,
    )


def _call_arguments(call: BoundProgram | None) -> tuple[str, list[Tensor], list[int], list[float]]:
    if call is None:
        return "", [], [], []
    return call.program.text, list(call.captures), list(call.ints), list(call.floats)


def problem_of(args: tuple[Any, ...]) -> tuple[Engine, Problem]:
    """The inverse of `arguments`."""
    engine, query, key, value, mask, m_captures, m_ints, m_floats, runs, geometry, score, s_captures, s_ints, s_floats, *rest = args
    mask_call = BoundProgram(parse(mask), tuple(m_captures), tuple(m_ints), tuple(m_floats)) if mask else None
    score_call = BoundProgram(parse(score), tuple(s_captures), tuple(s_ints), tuple(s_floats)) if score else None
    tiles = None
    if runs:
        batch, heads, q_len, kv_len, tile_q, tile_kv, given = geometry
        shape = Geometry(batch, heads, q_len, kv_len, (tile_q, tile_kv))
        tiles = TileMap(shape, trimmed(Runs(*runs[:3])), trimmed(Runs(*runs[3:])), mask_call, given=bool(given))
    sinks, scale, dropout_p, seed, deterministic = rest
    return engine_named(engine), Problem(query, key, value, mask_call, tiles, score_call, sinks, scale, dropout_p, seed, deterministic)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Engines choose the precision of every product themselves: autocast applies once, to the inputs."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    engine, problem = problem_of(args)
    with without_autocast(problem.device):
        out, lse, max_score = engine.forward(problem, engine.plan(problem))
    return as_laid_out(out, problem), lse, max_score


def as_laid_out(out: Tensor, problem: Problem) -> Tensor:
    """The output, laid out as like_query does."""
    strides = out.stride()
    if strides[3] == 1 and problem.v_dim == problem.head_dim and strides == problem.query.stride():
        return out
    wanted = like_query(problem.query, problem.v_dim)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)


def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    engine, problem = problem_of(args[:COUNT])
    out, lse, max_score, grad_out, grad_lse, wanted = args[COUNT:]
    with without_autocast(problem.device):
        found = engine.backward(problem, engine.plan(problem), Output(out, lse, max_score), grad_out, grad_lse, frozenset(wanted))
    sinks = found.sinks if found.sinks is not None else problem.query.new_empty((0,))
    return found.query.contiguous(), found.key.contiguous(), found.value.contiguous(), sinks, [found.captures[k].contiguous() for k in wanted]


library.impl("attention", forward, "CompositeExplicitAutograd")
library.impl("attention_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("tilewise::attention", lib=library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, value = args[1], args[3]
    inner = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = query.new_empty(query.shape[:3], dtype=inner)
    return like_query(query, value.shape[3]), rows, torch.empty_like(rows)


@torch.library.register_fake("tilewise::attention_backward", lib=library)  # type: ignore[untyped-decorator]  # torch has no type for it
def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    query, key, value, captures, sinks, wanted = args[1], args[2], args[3], args[SCORE_CAPTURES], args[SINKS], args[-1]

    def fresh(t: Tensor) -> Tensor:
        return t.new_empty(t.shape)

    return fresh(query), fresh(key), fresh(value), query.new_empty((0,)) if sinks is None else fresh(sinks), [fresh(captures[k]) for k in wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Saves tensors with save_for_backward and everything else on ctx."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    flat: list[Any] = []
    ctx.form = []
    for value in inputs:
        values = value if isinstance(value, (list, tuple)) else [value]
        ctx.form.append(("list", len(values)) if isinstance(value, (list, tuple)) else ("one", 1))
        flat += values
    tensors = [v for v in flat if isinstance(v, Tensor)]
    ctx.non_tensors = [None if isinstance(v, Tensor) else v for v in flat]
    ctx.is_tensor = [isinstance(v, Tensor) for v in flat]
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _saved(ctx: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    tensors = list(ctx.saved_tensors)
    output = tuple(tensors[ctx.count :])
    saved = iter(tensors[: ctx.count])
    flat = iter([next(saved) if is_tensor else rest for is_tensor, rest in zip(ctx.is_tensor, ctx.non_tensors, strict=True)])
    inputs = [[next(flat) for _ in range(size)] if kind == "list" else next(flat) for kind, size in ctx.form]
    return inputs, output


def _gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_max_score: Tensor | None) -> tuple[Any, ...]:
    inputs, output = _saved(ctx)
    if grad_out is None:
        grad_out = torch.zeros_like(output[0])
    wanted = [k for k, needed in enumerate(ctx.needs_input_grad[SCORE_CAPTURES]) if needed]
    query, key, value, sinks, captures = torch.ops.tilewise.attention_backward(*inputs, *output, grad_out, grad_lse, wanted)
    found: list[Any] = [None] * COUNT
    found[1:4] = query, key, value
    found[SCORE_CAPTURES] = [captures[wanted.index(k)] if k in wanted else None for k in range(len(inputs[SCORE_CAPTURES]))]
    found[SINKS] = sinks if inputs[SINKS] is not None else None
    for position, given in enumerate(inputs):  # torch expects a list of gradients for every list of tensors, empty lists included
        if isinstance(given, list) and position != SCORE_CAPTURES and all(isinstance(v, Tensor) for v in given):
            found[position] = [None] * len(given)
    return tuple(found)


def _not_twice(ctx: Any, *gradients: Any) -> Any:
    """Gradients under create_graph can be used, but differentiating them again raises instead of silently giving 0."""
    raise BackendError(NOT_TWICE)


torch.library.register_autograd("tilewise::attention", _gradients, setup_context=_save, lib=library)
torch.library.register_autograd("tilewise::attention_backward", _not_twice, lib=library)
