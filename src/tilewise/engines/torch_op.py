"""The torch operators that all engines run behind where torch has to see attention as one operation: torch.compile, torch.export, fake tensors, opcheck.

`tilewise::attention` is the one that graphs of Dynamo and torch.export hold. Its arguments are plain data (programs as text), so that a graph holds nothing but
tensors, numbers and strings. It is taken apart (transforms.py) into the operators of the passes, which compiled code calls. These have few arguments, because
every one costs host time, and no derivative, because another dispatch in Python would cost as much as all the rest: what never varies travels as one text.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise.core.map_cache import naming
from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine, like_query
from tilewise.engines.operator_plans import plan_of
from tilewise.engines.packed_call import PACKED, PACKED_COUNT, Frame, PackedCall, frame_of, packed, unpacked
from tilewise.errors import BackendError
from tilewise.lang import BoundProgram

ARGUMENTS = (
    "str engine, Tensor query, Tensor key, Tensor value, "
    "str mask, Tensor[] mask_captures, SymInt[] mask_ints, float[] mask_floats, Tensor[] tiles, SymInt[] geometry, "
    "str score, Tensor[] score_captures, SymInt[] score_ints, float[] score_floats, "
    "Tensor? sinks, float scale, float dropout_p, Tensor? seed, bool deterministic, bool max_scores, int passes=0"
)
MASK_CAPTURES, TILES, SCORE_CAPTURES, SINKS, PASSES_NUMBER = 5, 8, 11, 14, 20  # positions among the arguments
PASSES = 4  # to be raised whenever the operators of the passes change: torch keeps compiled code on disk, by the graph of `attention`, for later versions too

# There are two operators for each pass. Those with this tag inductor runs between the CUDA graphs it captures (torch 2.9 and newer): what they make and keep
# must not lie in the memory of a graph, and what follows the contents of tensors must not be frozen in one. The others it captures: Engine.is_capturable.
OUTSIDE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

UNNAMED = nullcontext()  # outside of graphs, whose values have names
library = torch.library.Library("tilewise", "FRAGMENT")
library.define(f"attention({ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def arguments(engine: str, problem: Problem) -> tuple[Any, ...]:
    """A problem as the arguments of `tilewise::attention`. Parts of problems, and pages, have no way through it."""
    assert problem.places is None and problem.pages is None and not problem.partial and not problem.busy_sms
    mask, score, tiles = problem.mask, problem.score, problem.tiles
    runs: list[Tensor] = []  # or the states of chosen tiles
    geometry: list[int] = []
    if tiles is not None:
        g = tiles.geometry
        runs = list(tiles.tensors)
        chosen = (0, 0) if tiles.chosen is None else (tiles.chosen.most, int(tiles.chosen.sharpens))
        geometry = [g.batch, g.heads, g.q_len, g.kv_len, *g.tile, int(tiles.given), *chosen]
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
        problem.max_scores,
        PASSES,
    )


def _call_arguments(call: BoundProgram | None) -> tuple[str, list[Tensor], list[int], list[float]]:
    if call is None:
        return "", [], [], []
    return call.program.text, list(call.captures), list(call.ints), list(call.floats)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Engines choose the precision of every product themselves: autocast applies once, to the inputs."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


Found = tuple[Tensor, Tensor, list[Tensor]]  # the output, lse, and the rows' largest scores where they were asked for


def forward(*args: Any) -> Found:
    _refuse_gradient(args)
    return _forward(PackedCall(args), None)


def forward_in_graphs(*args: Any) -> Any:
    _refuse_gradient(args)
    call = PackedCall(args)
    return call.frame.engine.run_in_graphs(args[0].device, lambda: call.problem, lambda plan: _forward(call, plan))


def _forward(call: PackedCall, plan: Plan | None) -> Found:
    with _names_of(call.frame):
        out, lse, max_score = _replayed_or_anew(call, plan_of(call) if plan is None else plan)
    return out, lse, [max_score] if call.frame.recipe.max_scores else []


def _replayed_or_anew(call: PackedCall, plan: Plan) -> Output:
    """A call like an earlier one needs no whole problem."""
    (query, key, value, others, *_), recipe = call.arguments, call.frame.recipe
    if not recipe.tiles:  # then the mask's captures are all that it depends on
        replayed = plan.replay(query, key, value, tuple(others[: recipe.mask_captures]))
        if replayed is not None:
            return replayed
    return forward_anew(call.frame.engine, call.problem, plan)


def _names_of(frame: Frame) -> AbstractContextManager[Any]:
    return naming(frame.recipe.names) if frame.recipe.names else UNNAMED


def _refuse_gradient(args: tuple[Any, ...]) -> None:
    """Compiled code and autograd functions call the operators of the passes with gradients off. Whoever else does so has a graph in which attention has lost
    its derivative."""
    if torch.is_grad_enabled() and any([t.requires_grad for t in (*args[:3], *args[3])]):
        raise BackendError(
            "this graph was decomposed into passes of attention that have no derivative of their own: trace it without decompositions "
            "(run_decompositions({}) after torch.export), or run it under torch.no_grad()"
        )


def forward_of(engine: Engine, problem: Problem, plan: Plan) -> Output:
    """The forward of an engine, laid out as the operator's is."""
    replayed = plan.replay(problem.query, problem.key, problem.value, problem.mask_sources)
    return forward_anew(engine, problem, plan) if replayed is None else replayed


def forward_anew(engine: Engine, problem: Problem, plan: Plan) -> Output:
    """The same without asking the plan for a replay."""
    if torch.is_autocast_enabled(problem.device.type):
        with without_autocast(problem.device):
            output = engine.forward(problem, plan)
    else:
        output = engine.forward(problem, plan)
    out = as_laid_out(output.out, problem)
    return output if out is output.out else Output(out, output.lse, output.max_score)


def as_laid_out(out: Tensor, problem: Problem) -> Tensor:
    """The output, laid out as like_query does."""
    strides = out.stride()
    if strides[3] == 1 and problem.v_dim == problem.head_dim and strides == problem.query.stride():
        return out
    wanted = like_query(problem.query, problem.v_dim)
    return out if out.stride() == wanted.stride() else wanted.copy_(out)


Gradient = tuple[Tensor, Tensor, Tensor, list[Tensor]]  # of query, key and value; of the wanted captures and then of sinks


def backward(*args: Any) -> Gradient:
    return _backward(PackedCall(args[:PACKED_COUNT]), None, *args[PACKED_COUNT:])


def backward_in_graphs(*args: Any) -> Any:
    call, others = PackedCall(args[:PACKED_COUNT]), args[PACKED_COUNT:]
    return call.frame.engine.run_in_graphs(args[0].device, lambda: call.problem, lambda plan: _backward(call, plan, *others))


def _backward(call: PackedCall, plan: Plan | None, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: list[int]) -> Gradient:
    with _names_of(call.frame):
        plan = plan_of(call) if plan is None else plan
        found = None if grad_lse is not None else _replayed_backward(call, plan, out, lse, grad_out)
        if found is None:
            problem = call.problem
            with without_autocast(problem.device):
                found = call.frame.engine.backward(problem, plan, Output(out, lse, lse), grad_out, grad_lse, frozenset(wanted))
    query, key, value, *_ = call.arguments
    others = [found.captures[k].contiguous() for k in wanted]
    if found.sinks is not None:
        others.append(found.sinks)
    return _like(found.query, query), _like(found.key, key), _like(found.value, value), others


def _replayed_backward(call: PackedCall, plan: Plan, out: Tensor, lse: Tensor, grad_out: Tensor) -> Gradients | None:
    (query, key, value, others, *_), recipe = call.arguments, call.frame.recipe
    if recipe.tiles or recipe.score_captures or recipe.has_sinks:  # a mask's own captures are all that the pass may depend on
        return None
    replayed = plan.replay_backward(query, key, value, out, lse, grad_out, tuple(others[: recipe.mask_captures]))
    return None if replayed is None else Gradients(*replayed)


def _like(gradient: Tensor, t: Tensor) -> Tensor:
    """A gradient, laid out as torch.empty_like makes it: as its tensor is, unless that has gaps."""
    if gradient.stride() == t.stride() or gradient.stride() == torch.empty_like(t, device="meta").stride():
        return gradient
    return torch.empty_like(t).copy_(gradient)


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], recipe: str, ints: list[int]) -> Found:
    inner = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty(query.shape[:3], dtype=inner)
    return like_query(query, value.shape[3]), lse, [torch.empty_like(lse)] if frame_of(recipe).recipe.max_scores else []


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], recipe: str, *rest: Any) -> Gradient:
    r, wanted = frame_of(recipe).recipe, rest[-1]
    first = r.mask_captures + r.tiles  # of the score's captures; sinks come after them
    learned = [others[first + k] for k in (*wanted, *([r.score_captures] if r.has_sinks else []))]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), [t.new_empty(t.shape) for t in learned]


FORWARD = f"({PACKED}) -> (Tensor, Tensor, Tensor[])"
BACKWARD = f"({PACKED}, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, int[] wanted) -> (Tensor, Tensor, Tensor, Tensor[])"
for _name, _schema, _pass, _fake, _tags in (
    ("attention_forward", FORWARD, forward, _fake_forward, OUTSIDE),
    ("attention_backward", BACKWARD, backward, _fake_backward, OUTSIDE),
    ("attention_forward_in_graphs", FORWARD, forward_in_graphs, _fake_forward, ()),
    ("attention_backward_in_graphs", BACKWARD, backward_in_graphs, _fake_backward, ()),
):
    library.define(_name + _schema, tags=_tags)
    library.impl(_name, _pass, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=library)


def run_forward(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The forward of a call with these arguments of `tilewise::attention`; largest scores that were not asked for are empty."""
    given, ops = packed(args), torch.ops.tilewise
    out, lse, largest = (ops.attention_forward_in_graphs if _is_capturable(given) else ops.attention_forward)(*given)
    return out, lse, largest[0] if largest else lse.new_empty(0)


def run_backward(args: tuple[Any, ...], others: tuple[Any, ...]) -> Gradient:
    given, ops = packed(args), torch.ops.tilewise
    found: Gradient = (ops.attention_backward_in_graphs if _is_capturable(given) else ops.attention_backward)(*given, *others)
    return found


def _is_capturable(given: tuple[Any, ...]) -> bool:
    if frame_of(given[4]).recipe.tiles:  # to unpack runs waits for the device
        return False
    engine, problem = unpacked(*given)
    return engine.is_capturable(problem)
