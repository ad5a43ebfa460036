"""What one rank computes: its queries and the keys they attend to, as a problem for an engine in every stage."""

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines import Engine, Request
from tilewise.engines.base import attend_nothing, sinks_gradient
from tilewise.engines.torch_op import without_autocast
from tilewise.errors import BackendError
from tilewise.frontend.dispatch import choose, log, observers, refusal, tell_observers
from tilewise.memory import resolved


def engine_for(problem: Problem, backend: tuple[str, str], mask_name: str) -> Engine | None:
    """The engine that serves a problem; None where there is nothing to compute."""
    if problem.is_empty:
        return None
    request = Request(*backend, needs_lse=True, seeded=True)
    choice = choose(problem, request)
    if choice.engine is None:
        raise BackendError(refusal(choice, request, problem))
    log(choice, problem, mask_name)
    if observers:
        tell_observers(choice.engine, problem, mask_name)
    return choice.engine


def forward(engine: Engine | None, problem: Problem) -> Output:
    if engine is None:
        return attend_nothing(problem)
    with without_autocast(problem.device):
        return engine.forward(problem, engine.plan(problem))


def backward(engine: Engine | None, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    """`output` is that of whole rows."""
    p = problem
    if engine is None:
        delta = torch.zeros_like(output.lse) if grad_lse is None else -grad_lse
        return Gradients(torch.zeros_like(p.query), torch.zeros_like(p.key), torch.zeros_like(p.value), sinks_gradient(p, output, delta))
    unrounded = p.replaced(partial=True)  # gradients are not rounded before they are added to those of other ranks, where the engine can
    if not engine.rounds_key_gradients and engine.refuse(unrounded) is None:
        p = unrounded
    with without_autocast(p.device):
        return engine.backward(p, engine.plan(p), output, resolved(grad_out), None if grad_lse is None else resolved(grad_lse), wanted)


def merged(outputs: list[Output], dtype: torch.dtype) -> Output:
    """One output of several that attend to different keys: each weighs exp(lse). A row without keys stays 0, with lse -inf."""
    if len(outputs) == 1:
        return outputs[0]
    lse = torch.stack([o.lse for o in outputs])  # [stages, B, H, Sq]
    highest = lse.amax(0)
    base = torch.where(highest == -torch.inf, 0.0, highest)
    weights = torch.exp(lse - base)
    total = weights.sum(0)
    shares = weights / torch.where(total == 0, 1.0, total)
    out = sum([o.out * share.unsqueeze(3) for o, share in zip(outputs, shares, strict=True)], start=torch.zeros_like(outputs[0].out))
    return Output(out.to(dtype), torch.where(total == 0, -torch.inf, base + torch.log(total)), highest)


def added(gradients: list[Gradients]) -> Gradients:
    """The sum of what each stage gives to queries and captures; sinks are the first stage's. Keys and values are each stage's own, and not summed here."""
    first, *others = gradients
    for other in others:
        first.query = first.query + other.query
        for slot, gradient in other.captures.items():
            first.captures[slot] = first.captures[slot] + gradient if slot in first.captures else gradient
    return first
