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
from tilewise.engines.base import Engine
from tilewise.engines.torch_op import arguments, forward_of, without_autocast
from tilewise.engines.transforms import are_active, differentiated, is_batched
from tilewise.memory import resolved

NOTHING = torch.empty(0)


def run_eager(engine: Engine, problem: Problem, plan: Plan) -> Output:
    captures = () if problem.score is None else problem.score.captures
    differentiable = (problem.query, problem.key, problem.value, problem.sinks, *captures)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in differentiable]):
        return Output(*_Attention.apply(engine, problem, plan, *differentiable))
    return forward_of(engine, problem, plan)


class _Attention(torch.autograd.Function):
    """Every line here is passed in every layer of every training step, twice."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, plan: Plan, *differentiable: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        output = forward_of(engine, problem, plan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output.max_score)
        score, watched = problem.score, problem.mask_sources
        if problem.seed is not None:
            watched = (*watched, problem.seed)
        bare = problem.replaced(query=NOTHING, key=NOTHING, value=NOTHING, sinks=None, score=None)  # its tensors are saved below
        ctx.call = engine, plan, bare, None if score is None else score.with_captures(()), len(differentiable)
        ctx.save_for_backward(*differentiable, *output, *watched)  # the last, so that torch notices if they are changed in place
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_max_score: Tensor | None) -> tuple[Any, ...]:
        engine, plan, bare, score, count = ctx.call
        saved = ctx.saved_tensors
        query, key, value, sinks, *captures = saved[:count]
        output = Output(*saved[count : count + 3])
        wanted: frozenset[int] = frozenset()
        if score is not None:
            score = score.with_captures(tuple(captures))
            wanted = frozenset([k for k, needed in enumerate(ctx.needs_input_grad[7:]) if needed])
        problem = bare.replaced(query=query, key=key, value=value, sinks=sinks, score=score)
        if grad_out is None:
            grad_out = torch.zeros_like(output.out)
        if torch.is_grad_enabled() or is_batched(grad_out) or is_batched(grad_lse) or are_active():  # more than a first derivative
            found = differentiated(arguments(engine.name, problem), output, grad_out, grad_lse, sorted(wanted))
        else:
            grad_out, grad_lse = resolved(grad_out), None if grad_lse is None else resolved(grad_lse)
            with without_autocast(problem.device):
                found = engine.backward(problem, plan, output, grad_out, grad_lse, wanted)
        return (None, None, None, found.query, found.key, found.value, found.sinks, *[found.captures.get(k) for k in range(len(captures))])
