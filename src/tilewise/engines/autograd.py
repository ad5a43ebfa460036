"""Eager mode: plain tensors reach the engine through one autograd function, for a fraction of the host time of the torch operator.

Everything that needs the operator (torch_op.py) goes through it: torch.compile, fake tensors, tensor subclasses; torch.func's transforms have functions of
their own (transforms.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import NONE_WANTED, NOTHING, PLAIN, Engine
from tilewise.engines.torch_op import arguments, forward_of, without_autocast
from tilewise.engines.transforms import are_active, differentiated, is_batched
from tilewise.errors import InputError
from tilewise.memory import resolved


def run_eager(engine: Engine, problem: Problem, plan: Plan, needs_lse: bool = True) -> Output:
    """lse and max_score may be empty where they are not needed."""
    if torch.is_grad_enabled():
        tensors = problem.tensors
        if any([t.requires_grad for t in tensors]):
            return _as_output(_Attention.apply((engine, problem.bare, plan, needs_lse, False), *tensors))
    return forward_of(engine, problem, plan)


def train(engine: Engine, bare: Problem, tensors: Sequence[Tensor], plan: Plan, needs_lse: bool) -> Output:
    """A call like an earlier one, of which a gradient is wanted, as Problem.bare and Problem.tensors."""
    return _as_output(_apply((engine, bare, plan, needs_lse, True), *tensors))


def _as_output(found: Any) -> Output:
    return Output(found, *NOTHING) if isinstance(found, Tensor) else Output(*found, *NOTHING[len(found) - 1 :])


class _Attention(torch.autograd.Function):
    """Every line here is passed in every layer of every training step, twice. Every output takes torch time, in both passes."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Engine, Problem, Plan, bool, bool], *tensors: Tensor) -> Any:
        engine, bare, plan, needs_lse, is_known = call
        watched = bare.mask_sources
        output = plan.replay(tensors[0], tensors[1], tensors[2], watched) if is_known else None
        if output is None:
            output = forward_of(engine, bare.of(tensors), plan)
        ctx.set_materialize_grads(False)
        if bare.seed is not None:
            watched = (*watched, bare.seed)
        if watched:
            watched = tuple([t for t in watched if not t.is_inference()])  # these have no version to watch, and cannot be saved
        ctx.call = engine, plan, bare, len(tensors)
        ctx.save_for_backward(*tensors, output.out, output.lse, *watched)  # the last, so that torch notices if they are changed in place
        if not needs_lse:
            return output.out
        if not bare.max_scores:
            return output.out, output.lse
        ctx.mark_non_differentiable(output.max_score)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None, grad_max_score: Tensor | None = None) -> tuple[Any, ...]:
        engine, plan, bare, count = ctx.call
        saved = ctx.saved_tensors
        out, lse = saved[count], saved[count + 1]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        # A derivative of this one is wanted, or gradients are no tensors that kernels can read.
        needs_operator = torch.is_grad_enabled() or are_active() or not (_is_plain_gradient(grad_out) and _is_plain_gradient(grad_lse))
        if count == 3 and grad_lse is None and not needs_operator:
            query, key, value = saved[0], saved[1], saved[2]
            if _is_readable(query) and _is_readable(key) and _is_readable(value) and _is_readable(out) and lse.is_contiguous():
                replayed = plan.replay_backward(query, key, value, out, lse, resolved(grad_out), bare.mask_sources)
                if replayed is not None:
                    return None, *replayed
        problem = bare.of([resolved(t) for t in saved[:count]])
        out, lse = resolved(out), lse.contiguous()
        _check_saved(problem, out, lse)
        captures = bare.capture_count
        wanted = frozenset([k for k in range(captures) if ctx.needs_input_grad[4 + k]]) if captures else NONE_WANTED
        if needs_operator:
            found = differentiated(arguments(engine.name, problem), out, lse, grad_out, grad_lse, sorted(wanted))
        else:
            output = Output(out, lse, lse)  # no backward looks at the largest scores: anything on the device will do
            grad_out, grad_lse = resolved(grad_out), None if grad_lse is None else resolved(grad_lse)
            if torch.is_autocast_enabled(problem.device.type):
                with without_autocast(problem.device):
                    found = engine.backward(problem, plan, output, grad_out, grad_lse, wanted)
            else:
                found = engine.backward(problem, plan, output, grad_out, grad_lse, wanted)
        if count == 3:
            return None, found.query, found.key, found.value
        sinks = (found.sinks,) if count > 3 + captures else ()
        return (None, found.query, found.key, found.value, *[found.captures.get(k) for k in range(captures)], *sinks)


def _is_plain_gradient(gradient: Tensor | None) -> bool:
    """Whether kernels can read it: a subclass (of a collective under way, say) may have no memory of its own, and batched gradients are several."""
    return gradient is None or (type(gradient) in PLAIN and not is_batched(gradient))


def _is_readable(saved: Tensor) -> bool:
    """Whether its memory is there and holds its values."""
    return saved.data_ptr() != 0 and not saved.is_neg()


def _check_saved(p: Problem, out: Tensor, lse: Tensor) -> None:
    """Hooks of saved tensors may return anything, and nobody sees it when `.data` or memory is taken away between the passes: kernels would read what is not
    there. Other strides are fine."""
    query, key, value = p.query, p.key, p.value
    rows, expected = query.shape[:3], p.result_dtype
    dtypes_fit = query.dtype is key.dtype is value.dtype and out.dtype is expected and lse.dtype is p.inner_dtype
    keys_fit = key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3]
    if not (dtypes_fit and keys_fit and out.shape == (*rows, value.shape[3]) and lse.shape == rows):
        found = ", ".join([f"{t.dtype} {tuple(t.shape)}" for t in (query, key, value, out, lse)])
        raise InputError(
            f"query, key, value, output and lse were saved for the backward and came back as {found}: hooks of saved tensors must return what they got"
        )
    if not query.is_meta and any([t.numel() > 0 and t.data_ptr() == 0 for t in (query, key, value, out, lse)]):
        raise InputError(
            "a tensor that was saved for the backward has lost its memory since; free what a call was given (untyped_storage().resize_(0)) after its backward"
        )


# What Function.apply comes to outside of torch.func's transforms, but for its search for tensors that have outlived one. These have no address, so that their
# calls are never like an earlier one (call_key.py).
_apply = super(torch.autograd.Function, _Attention).apply
