"""The reference engine: dense and written for clarity. It defines what every other engine must compute."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.dropout import keep_scale, kept
from tilewise.engines.masked_matmul import masked_matmul
from tilewise.lang import BoundProgram, evaluate, interpret
from tilewise.lang.interpret import load
from tilewise.lang.ops import OPS
from tilewise.lang.types import DTYPE_OF
from tilewise.tiles import FULL, PARTIAL, TileMap


def indices(problem: Problem) -> dict[str, Tensor]:
    """b, h, q and kv as tensors that broadcast to [B, H, Sq, Skv]."""
    sizes = {"b": problem.batch, "h": problem.heads, "q": problem.q_len, "kv": problem.kv_len}
    return {name: torch.arange(n, device=problem.device).view([-1 if d == axis else 1 for d in range(4)]) for axis, (name, n) in enumerate(sizes.items())}


def allowed(problem: Problem) -> Tensor | None:
    """Which pairs may attend, broadcastable to [B, H, Sq, Skv]; None if all may."""
    if problem.mask is None and problem.tiles is None:
        return None
    inside = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=problem.device)
    if problem.mask is not None:
        inside = torch.as_tensor(evaluate(problem.mask, indices(problem)), device=problem.device)
    return inside if problem.given_tiles is None else _in_tiles(problem.given_tiles, inside, problem)


def _in_tiles(tiles: TileMap, inside: Tensor, problem: Problem) -> Tensor:
    """Full tiles allow everything, partial ones what the mask allows, the others nothing."""
    states = tiles.dense().repeat_interleave(tiles.tile[0], 2).repeat_interleave(tiles.tile[1], 3)  # [1 or B, 1 or H, Sq, Skv], rounded up to tiles
    states = states[:, :, : problem.q_len, : problem.kv_len]
    return (states == FULL) | ((states == PARTIAL) & inside)


class _Finite(torch.autograd.Function):
    """Replaces NaN and Inf by 0; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.where(x.isfinite(), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def products(q: Tensor, k: Tensor) -> Tensor:
    """q @ k^T, whose gradient skips NaN and Inf in q and k: a masked one must not reach dq as 0 * NaN."""
    if bool(q.isfinite().all()) and bool(k.isfinite().all()):
        return q @ k.transpose(-1, -2)
    finite: Tensor = _Finite.apply(q) @ _Finite.apply(k).transpose(-1, -2)
    return finite + (q.detach() @ k.detach().transpose(-1, -2) - finite.detach())


def apply_score(score: BoundProgram, scores: Tensor, at: dict[str, Tensor], permitted: Tensor | None) -> Tensor:
    """The scores after the score functions, -inf where not permitted.

    Evaluated for autograd at attended positions only: elsewhere the derivative may be Inf or NaN, and 0 times that is NaN.
    """
    with torch.no_grad():
        everywhere = torch.as_tensor(evaluate(_stored(score), at | {"score": scores})).to(scores).expand_as(scores)
        attended = (everywhere > -torch.inf) | everywhere.isnan()
        place = (attended if permitted is None else attended & permitted).nonzero(as_tuple=True)
    found = evaluate_for_gradients(score, dict(zip(at, place, strict=True)) | {"score": scores[place]})
    return torch.full_like(scores, -torch.inf).index_put(place, found.to(scores).expand(len(place[0])))


def _stored(score: BoundProgram) -> BoundProgram:
    """The score with its captures in the types that its program loads."""
    return score.with_captures(tuple([t.to(DTYPE_OF[spec.dtype]) for t, spec in zip(score.captures, score.program.captures, strict=True)]))


class _Valued(torch.autograd.Function):
    """A value in the type of another, to which its gradient goes."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, value: Tensor) -> Tensor:
        return value.to(wide.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def evaluate_for_gradients(score: BoundProgram, inputs: dict[str, Tensor]) -> Tensor:
    """What `evaluate` gives, each step rounded as torch rounds it; but gradients pass from step to step in the scores' type at least, and to captures in
    that of `score.captures`. Left to itself, autograd would round each of them to the type of its step."""
    program, inner = score.program, inputs["score"].dtype
    with torch.no_grad():
        exact = interpret(replace(program, results=tuple(range(len(program.instructions)))), _stored(score), inputs)
    values: list[Any] = []
    for (op, args, attr, type), value in zip(program.instructions, exact, strict=True):
        if isinstance(value, Tensor) and type.is_float:
            if op == "score":
                found = inputs["score"]
            elif op == "load":
                found = load(score.captures[int(attr)], tuple(exact[a] for a in args))
            else:
                found = torch.as_tensor(values[args[0]]) if op == "cast" else OPS[op].meaning(*(values[a] for a in args))
            value = _Valued.apply(found.to(torch.promote_types(value.dtype, inner)), value)
        values.append(value)
    return torch.as_tensor(values[program.results[0]])


class _MaskedMatmul(torch.autograd.Function):
    """masked_matmul() with a gradient that also ignores masked positions instead of multiplying them by 0."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, attended: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values, attended)
        return masked_matmul(weights, values, attended)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values, attended = ctx.saved_tensors
        d_weights = torch.where(attended, grad @ values.transpose(-1, -2), 0)
        d_values = masked_matmul(torch.where(attended, weights, 0).transpose(-1, -2), grad, attended.transpose(-1, -2))
        return d_weights, d_values, None


def dense_attention(problem: Problem, inner: torch.dtype | None = None) -> Output:
    """Attention step by step, in plain differentiable torch; `inner` is the precision of all intermediate results."""
    inner = problem.inner_dtype if inner is None else inner
    ratio = problem.heads // problem.kv_heads if problem.kv_heads else 1
    q = problem.query.to(inner)  # [B, H, Sq, D]
    k = problem.key.to(inner).repeat_interleave(ratio, 1)  # [B, H, Skv, D]
    v = problem.value.to(inner).repeat_interleave(ratio, 1)  # [B, H, Skv, Dv]
    at = indices(problem)

    scores = problem.scale * products(q, k)  # [B, H, Sq, Skv]
    permitted = allowed(problem)
    if permitted is not None:
        scores = torch.where(permitted, scores, -torch.inf)
    if problem.score is not None:
        scores = apply_score(problem.score, scores, at, permitted)
    attended = (scores > -torch.inf) | scores.isnan()
    scores = torch.where(attended, scores, -torch.inf)  # no gradient passes here, not even a NaN

    # The max of a row with nothing to attend to is -inf; subtracting 0 instead makes its weights 0 and not NaN.
    max_score = scores.detach().amax(-1, keepdim=True) if problem.kv_len else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    ceiling, sink = max_score, None
    if problem.sinks is not None:
        sink = problem.sinks.to(inner).view(1, -1, 1, 1)  # [1, H, 1, 1]
        ceiling = torch.maximum(max_score, sink.detach())
    base = torch.where(ceiling == -torch.inf, 0.0, ceiling)
    weights = torch.exp(scores - base)
    total = weights.sum(-1, keepdim=True)  # [B, H, Sq, 1]
    if sink is not None:
        total = total + torch.exp(sink - base)
    nothing = total == 0
    lse = torch.where(nothing, -torch.inf, base + torch.log(torch.where(nothing, 1.0, total))).squeeze(-1)
    weights = weights / torch.where(nothing, 1.0, total)

    if problem.dropout_p > 0:
        weights = torch.where(kept(problem, at), weights * keep_scale(problem.dropout_p), 0.0)
    out = _MaskedMatmul.apply(weights, v, attended)
    return Output(out, lse, max_score.squeeze(-1))


def part_seeds(part: Output, whole: Output, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of a part's out and lse, from those of the whole, which is out = sum of w out_part, lse = log(sum of exp(lse_part)), where w is
    exp(lse_part - lse)."""
    weight = torch.where(part.lse == -torch.inf, 0.0, torch.exp(part.lse - whole.lse))
    grad_out = grad_out.to(part.out.dtype)
    d_lse = (grad_out * (part.out - whole.out)).sum(-1)
    return weight.unsqueeze(-1) * grad_out, weight * (d_lse if grad_lse is None else d_lse + grad_lse)


@contextmanager
def recorded() -> Iterator[None]:
    """Enables autograd even inside an operator that torch runs below the autograd key, as it does under a TorchDispatchMode."""
    keys, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with guard(keys.AutogradFunctionality, False), guard(keys.ADInplaceOrView, False), torch.enable_grad():
        yield


class ReferenceEngine(Engine):
    name = "reference"
    summary = "dense, the definition of right; used only when named"
    serves: ClassVar[Mapping[str, int]] = {"math": 0}
    is_fused = False
    takes_pages = True

    def refuse(self, problem: Problem) -> str | None:
        return None

    def forward(self, problem: Problem, plan: Plan) -> Output:
        out, lse, max_score = dense_attention(problem.without_pages())
        if problem.pages is not None:
            out = out * problem.pages.v_scale
        return Output(out.to(problem.result_dtype), lse, max_score)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        """Autograd through the dense computation, and through the merge of parts where it is one."""
        with recorded():
            leaves = [t.detach().to(problem.result_dtype).requires_grad_() for t in (problem.query, problem.key, problem.value)]
            sinks = None if problem.sinks is None else problem.sinks.detach().requires_grad_()
            score = problem.score
            captures: tuple[Tensor, ...] = ()
            if score is not None:  # gradients accumulate in float64
                wide = [t.detach().double() if t.is_floating_point() else t.detach() for t in score.captures]
                captures = tuple([t.requires_grad_(k in wanted) for k, t in enumerate(wide)])
                score = score.with_captures(captures)
            again = replace(problem, query=leaves[0], key=leaves[1], value=leaves[2], sinks=sinks, score=score)
            out, lse, max_score = dense_attention(again)
            roots, seeds = [out], [grad_out.to(out.dtype)]
            if problem.partial:
                roots, seeds = [out, lse], list(part_seeds(Output(out.detach(), lse.detach(), max_score), output, grad_out, grad_lse))
            elif grad_lse is not None:
                roots.append(lse)
                seeds.append(grad_lse.to(lse.dtype))
            sources = [*leaves, *([] if sinks is None else [sinks]), *(captures[k] for k in sorted(wanted))]
            found = list(torch.autograd.grad(roots, sources, seeds, allow_unused=True))
        found = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]
        query, key, value = found[:3]
        rest = found[3:]
        to_sinks = rest.pop(0) if sinks is not None else None
        to_captures = {} if problem.score is None else {k: g.to(problem.score.captures[k].dtype) for k, g in zip(sorted(wanted), rest, strict=True)}
        return Gradients(query, key, value, to_sinks, to_captures)
