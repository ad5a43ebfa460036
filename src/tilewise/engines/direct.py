"""The short way: plain tensors in eager mode reach the engine without the operator's schema, for a fraction of the host time.

Everything that needs the operator goes through it: torch.compile, fake tensors, tensor subclasses, torch.func transforms.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.engines.base import Engine, Output
from tilewise.engines.operator import Once, as_laid_out, as_written
from tilewise.problem import Problem

PLAIN = (Tensor, Parameter)
NOTHING = torch.empty(0)


def is_plain(problem: Problem) -> bool:
    """Whether nothing but eager autograd watches these tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all([type(t) in PLAIN for t in problem.tensors])


def run_directly(engine: Engine, problem: Problem) -> Output:
    captures = () if problem.score is None else problem.score.captures
    differentiable = (problem.query, problem.key, problem.value, problem.sinks, *captures)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in differentiable]):
        return Output(*_Attention.apply(engine, problem, *differentiable))
    return _forward(engine, problem)


def _forward(engine: Engine, problem: Problem) -> Output:
    if torch.is_autocast_enabled(problem.device.type):
        with as_written(problem.device):
            output = engine.forward(problem)
    else:
        output = engine.forward(problem)
    out = as_laid_out(output.out, problem)
    return output if out is output.out else Output(out, output.lse, output.highest)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, *differentiable: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        output = _forward(engine, problem)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output.highest)
        ctx.engine = engine
        ctx.problem = problem.with_tensors(query=NOTHING, key=NOTHING, value=NOTHING, sinks=None, score=None)  # its tensors are saved below
        ctx.score = None if problem.score is None else replace(problem.score, captures=())
        watched = [*([] if problem.mask is None else problem.mask.captures), *([] if problem.seed is None else [problem.seed])]
        ctx.count = len(differentiable)
        ctx.save_for_backward(*differentiable, *output, *watched)  # the last, so that torch notices if they are changed in place
        return output.out, output.lse, output.highest

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_highest: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        differentiable, (out, lse, highest) = saved[: ctx.count], saved[ctx.count : ctx.count + 3]
        query, key, value, sinks, *captures = differentiable
        score = None if ctx.score is None else replace(ctx.score, captures=tuple(captures))
        problem = ctx.problem.with_tensors(query=query, key=key, value=value, sinks=sinks, score=score)
        wanted = frozenset(k for k, needed in enumerate(ctx.needs_input_grad[6:]) if needed)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        with torch.no_grad(), as_written(problem.device):
            found = ctx.engine.backward(problem, Output(out, lse, highest), grad_out, grad_lse, wanted)
        gradients = [found.query, found.key, found.value, found.sinks, *(found.captures.get(k) for k in range(len(captures)))]
        if torch.is_grad_enabled():
            there = [k for k, g in enumerate(gradients) if g is not None]
            marked = Once.apply([gradients[k] for k in there], *differentiable, grad_out, grad_lse)
            for k, g in zip(there, marked, strict=True):
                gradients[k] = g
        return (None, None, *gradients)
