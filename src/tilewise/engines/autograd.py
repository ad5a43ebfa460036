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
from tilewise.engines.torch_op import arguments, as_laid_out, without_autocast
from tilewise.engines.transforms import are_active, differentiated, is_batched
from tilewise.memory import resolved

NOTHING = torch.empty(0)


def run_eager(engine: Engine, problem: Problem, plan: Plan) -> Output:
    captures = () if problem.score is None else problem.score.captures
    differentiable = (problem.query, problem.key, problem.value, problem.sinks, *captures)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in differentiable]):
        return Output(*_Attention.apply(engine, problem, plan, *differentiable))
    return _forward(engine, problem, plan)


def _forward(engine: Engine, problem: Problem, plan: Plan) -> Output:
    if torch.is_autocast_enabled(problem.device.type):
        with without_autocast(problem.device):
            output = engine.forward(problem, plan)
    else:
        output = engine.forward(problem, plan)
    out = as_laid_out(output.out, problem)
    return output if out is output.out else Output(out, output.lse, output.max_score)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, plan: Plan, *differentiable: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(engine, problem, plan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output.max_score)
        ctx.engine, ctx.plan = engine, plan
        ctx.problem = problem.replaced(query=NOTHING, key=NOTHING, value=NOTHING, sinks=None, score=None)  # its tensors are saved below
        ctx.score = None if problem.score is None else problem.score.with_captures(())
        watched = [*problem.mask_sources, *([] if problem.seed is None else [problem.seed])]
        ctx.count = len(differentiable)
        ctx.save_for_backward(*differentiable, *output, *watched)  # the last, so that torch notices if they are changed in place
        return output.out, output.lse, output.max_score

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_max_score: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        differentiable, output = saved[: ctx.count], Output(*saved[ctx.count : ctx.count + 3])
        query, key, value, sinks, *captures = differentiable
        score = None if ctx.score is None else ctx.score.with_captures(tuple(captures))
        problem = ctx.problem.replaced(query=query, key=key, value=value, sinks=sinks, score=score)
        wanted = frozenset(k for k, needed in enumerate(ctx.needs_input_grad[7:]) if needed)
        if grad_out is None:
            grad_out = torch.zeros_like(output.out)
        if torch.is_grad_enabled() or is_batched(grad_out) or is_batched(grad_lse) or are_active():  # more than a first derivative
            found = differentiated(arguments(ctx.engine.name, problem), output, grad_out, grad_lse, sorted(wanted))
        else:
            grad_out, grad_lse = resolved(grad_out), None if grad_lse is None else resolved(grad_lse)
            with without_autocast(problem.device):
                found = ctx.engine.backward(problem, ctx.plan, output, grad_out, grad_lse, wanted)
        return (None, None, None, found.query, found.key, found.value, found.sinks, *(found.captures.get(k) for k in range(len(captures))))
