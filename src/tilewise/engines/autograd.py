"""Eager mode: plain tensors reach the engine through one autograd function, for a fraction of the host time of the torch operator.

Everything that needs the operator (torch_op.py) goes through it: torch.compile, fake tensors, tensor subclasses; torch.func's transforms have functions of
their own (transforms.py).
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import NOTHING, Engine
from tilewise.engines.torch_op import arguments, forward_of, without_autocast
from tilewise.engines.transforms import are_active, differentiated, is_batched
from tilewise.memory import resolved

NO_TENSOR = torch.empty(0, device="cpu")  # whatever the default device is when this is imported


def run_eager(engine: Engine, problem: Problem, plan: Plan, needs_lse: bool = True) -> Output:
    """lse and max_score may be empty where they are not needed."""
    p = problem
    if torch.is_grad_enabled():
        differentiable: tuple[Tensor | None, ...] = (p.query, p.key, p.value)
        if p.score is not None or p.sinks is not None:
            differentiable = (*differentiable, p.sinks, *(() if p.score is None else p.score.captures))
        if any([t is not None and t.requires_grad for t in differentiable]):
            found = _Attention.apply((engine, problem, plan, needs_lse), *differentiable)
            return Output(*found) if needs_lse else Output(found, *NOTHING)
    return forward_of(engine, problem, plan)


class _Attention(torch.autograd.Function):
    """Every line here is passed in every layer of every training step, twice. Every output takes torch time, in both passes."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Engine, Problem, Plan, bool], *differentiable: Tensor | None) -> Any:
        engine, problem, plan, needs_lse = call
        output = forward_of(engine, problem, plan)
        ctx.set_materialize_grads(False)
        score, watched = problem.score, problem.mask_sources
        if problem.seed is not None:
            watched = (*watched, problem.seed)
        if watched:
            watched = tuple([t for t in watched if not t.is_inference()])  # these have no version to watch, and cannot be saved
        bare = problem.replaced(query=NO_TENSOR, key=NO_TENSOR, value=NO_TENSOR, sinks=None, score=None)  # its tensors are saved below
        ctx.call = engine, plan, bare, None if score is None else score.with_captures(()), len(differentiable)
        ctx.save_for_backward(*differentiable, output.out, output.lse, *watched)  # the last, so that torch notices if they are changed in place
        if not needs_lse:
            return output.out
        ctx.mark_non_differentiable(output.max_score)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, grad_max_score: Tensor | None = None) -> tuple[Any, ...]:
        engine, plan, bare, score, count = ctx.call
        saved = ctx.saved_tensors
        query, key, value, *others = saved[:count]  # nothing, or sinks and the score's captures
        output = Output(saved[count], saved[count + 1], saved[count + 1])  # no backward looks at the largest scores: anything on the device will do
        wanted: frozenset[int] = frozenset()
        if score is not None:
            score = score.with_captures(tuple(others[1:]))
            wanted = frozenset([k for k, needed in enumerate(ctx.needs_input_grad[5:]) if needed])
        problem = bare.replaced(query=query, key=key, value=value, sinks=others[0] if others else None, score=score)
        if grad_out is None:
            grad_out = torch.zeros_like(output.out)
        if torch.is_grad_enabled() or is_batched(grad_out) or is_batched(grad_lse) or are_active():  # more than a first derivative
            found = differentiated(arguments(engine.name, problem), output, grad_out, grad_lse, sorted(wanted))
        else:
            grad_out, grad_lse = resolved(grad_out), None if grad_lse is None else resolved(grad_lse)
            if torch.is_autocast_enabled(problem.device.type):
                with without_autocast(problem.device):
                    found = engine.backward(problem, plan, output, grad_out, grad_lse, wanted)
            else:
                found = engine.backward(problem, plan, output, grad_out, grad_lse, wanted)
        if not others:
            return None, found.query, found.key, found.value
        return (None, found.query, found.key, found.value, found.sinks, *[found.captures.get(k) for k in range(len(others) - 1)])
