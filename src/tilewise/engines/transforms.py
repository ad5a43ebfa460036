"""The operator `tilewise::attention` with its derivative; torch.func (grad, vjp, vmap, jacrev) and batched gradients, which see autograd functions.

Both functions below are the torch operators of the passes (torch_op.py) with the arguments of `tilewise::attention`, flattened, so that every tensor is an
argument of its own. A batch is computed one element after the other.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.graph_values import names_of
from tilewise.engines.torch_op import MASK_CAPTURES, PASSES_NUMBER, SCORE_CAPTURES, SINKS, TILES, arguments, library, run_backward, run_forward
from tilewise.errors import BackendError

NOT_TWICE = "attention cannot be differentiated twice: its backward has no derivative of its own; torch's SDPA has one with SDPBackend.MATH"
NO_JVP = "attention has no forward-mode derivative (jvp, jacfwd, hessian); torch's SDPA has one with SDPBackend.MATH"
ABSENT = 2**40  # a batch's size where there is none
MAX_LEVELS = 64  # of nested vmaps, in torch


def are_active() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def are_active_while_compiling() -> bool:
    return are_active()


are_active_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo asks while it traces, and goes on with the answer


def transformed(engine: Engine, problem: Problem) -> Output:
    """A call inside torch.func's transforms."""
    return Output(*_attention(*arguments(engine.name, problem)))


def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat, form = tree_flatten((*args[:PASSES_NUMBER], names_of([*args[MASK_CAPTURES], *args[TILES]])))
    found: tuple[Tensor, Tensor, Tensor] = _Forward.apply(form, *flat)
    return found


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(form: TreeSpec, *flat: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = run_forward(tree_unflatten(flat, form))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[2])
        ctx.form, *flat = inputs
        ctx.others = [None if isinstance(v, Tensor) else v for v in flat]
        ctx.places = [k for k, v in enumerate(flat) if isinstance(v, Tensor)]
        ctx.save_for_backward(*[flat[k] for k in ctx.places], *output[:2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_max_score: Tensor | None) -> tuple[Any, ...]:
        flat, saved = list(ctx.others), ctx.saved_tensors  # once: activation checkpointing allows no more
        out, lse = saved[-2:]
        for k, tensor in zip(ctx.places, saved, strict=False):
            flat[k] = tensor
        inputs, needed = (tree_unflatten(values, ctx.form) for values in (flat, ctx.needs_input_grad[1:]))
        wanted = [k for k, need in enumerate(needed[SCORE_CAPTURES]) if need]
        found = differentiated(tuple(inputs), out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, wanted)
        gradients: list[Any] = [[None] * len(value) if isinstance(value, (list, tuple)) else None for value in inputs]
        gradients[1:4] = found.query, found.key, found.value
        gradients[SCORE_CAPTURES] = [found.captures.get(k) for k in range(len(inputs[SCORE_CAPTURES]))]
        gradients[SINKS] = found.sinks
        return (None, *tree_flatten(gradients)[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise BackendError(NO_JVP)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: TreeSpec, *flat: Any) -> tuple[Any, Any]:
        return _one_by_one(_Forward, info.batch_size, in_dims[1:], form, flat)


class _Backward(torch.autograd.Function):
    """The gradients of query, key, value, the wanted captures, and of sinks where there are some."""

    @staticmethod
    def forward(form: TreeSpec, *flat: Any) -> tuple[Tensor, ...]:
        query, key, value, others = run_backward(*tree_unflatten(flat, form))
        return query, key, value, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise BackendError(NOT_TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise BackendError(NO_JVP)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], form: TreeSpec, *flat: Any) -> tuple[Any, Any]:
        return _one_by_one(_Backward, info.batch_size, in_dims[1:], form, flat)


def differentiated(inputs: tuple[Any, ...], out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: list[int]) -> Gradients:
    """The backward of a call with these arguments of the operator, which may be transformed itself, but not differentiated."""
    flat, form = tree_flatten((inputs, (out, lse, grad_out, grad_lse, wanted)))
    level = max([_batch_level(t) for t in (grad_out, grad_lse) if t is not None])
    query, key, value, *others = _Backward.apply(form, *flat) if level == 0 else _batched(form, flat, level)
    sinks = None if inputs[SINKS] is None else others.pop()
    return Gradients(query, key, value, sinks, dict(zip(wanted, others, strict=True)))


def _one_by_one(function: Any, count: int, dims: tuple[Any, ...], form: TreeSpec, flat: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The results of all elements of a batch, stacked, and the dimension in which they are. `dims` says in which the arguments are, None in none."""
    calls = [function.apply(form, *[v if d is None else v.select(d, n) for v, d in zip(flat, dims, strict=True)]) for n in range(count)]
    stacked = tuple([torch.stack(each) for each in zip(*calls, strict=True)])
    return stacked, (0,) * len(stacked)


# -- torch.autograd.grad(..., is_grads_batched=True): torch's older vmap, which is not told of by the above ------------------


def is_batched(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(_functorch.is_legacy_batchedtensor(gradient))


def _batch_level(gradient: Tensor) -> int:
    """The outermost level at which a gradient is batched; 0 if at none. The level that is current is unknown on autograd's other threads."""
    if not is_batched(gradient):
        return 0
    return next(level for level in range(1, MAX_LEVELS + 1) if torch._remove_batch_dim(gradient, level, ABSENT, 0).shape[0] != ABSENT)


def _batched(form: TreeSpec, flat: list[Any], level: int) -> tuple[Tensor, ...]:
    size = max([torch._remove_batch_dim(t, level, 1, 0).shape[0] for t in flat if isinstance(t, Tensor) and is_batched(t)])
    whole = [torch._remove_batch_dim(v, level, size, 0) if isinstance(v, Tensor) and is_batched(v) else v for v in flat]
    dims = tuple([0 if isinstance(v, Tensor) and is_batched(v) else None for v in flat])
    stacked, _ = _one_by_one(_Backward, size, dims, form, tuple(whole))
    return tuple([torch._add_batch_dim(t, 0, level) for t in stacked])


library.impl("attention", _attention, "CompositeImplicitAutograd")
