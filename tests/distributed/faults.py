"""Ranks that disagree or fail on purpose: every rank must raise the same error, and the group must work afterwards."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tilewise as tw
from tilewise import distributed as twd
from tilewise import masks, scores
from tilewise.engines.blocked import BlockedEngine

LENGTH, SIZES = 300, {"heads": 2, "kv_heads": 1, "head_dim": 8}


def check_faults() -> None:
    """The middle rank of three does something else than the others, at every stage."""
    is_odd = dist.get_rank() == 1
    plan = _plan()
    for name, (match, fault) in FAULTS.items():
        with pytest.raises(twd.DisagreementError, match=match) as raised:
            fault(is_odd, plan)
        _assert_same_everywhere(name, str(raised.value))
        _attend(plan)  # nobody waits for a collective of the failed call


def _plan(mask: Any = masks.causal, **other: Any) -> twd.Plan:
    return twd.plan(mask, **{"length": LENGTH, "strategy": "needed", "head_groups": 1, **SIZES, **other})


def _inputs(plan: twd.Plan, grad: bool = True) -> list[Tensor]:
    shapes = [(1, heads, plan.local_length, 8) for heads in (2, 1, 1)]
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def _attend(plan: twd.Plan | twd.MaskPlan, inputs: list[Tensor] | None = None, **options: Any) -> None:
    out = twd.attention(*(_inputs(plan if isinstance(plan, twd.Plan) else plan.whole) if inputs is None else inputs), plan=plan, backend="blocked", **options)
    if out.requires_grad:
        out.sum().backward()


def _other_mask(is_odd: bool, plan: twd.Plan) -> None:
    _plan(masks.causal if is_odd else masks.full)


def _other_window(is_odd: bool, plan: twd.Plan) -> None:
    _plan(masks.sliding_window(5 if is_odd else 6))


def _other_documents(is_odd: bool, plan: twd.Plan) -> None:
    ids = torch.arange(LENGTH) // (100 if is_odd else 50)
    _plan(lambda b, h, q, kv: ids[q] == ids[kv])


def _other_version(is_odd: bool, plan: twd.Plan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if is_odd:
            patch.setattr(sys.modules["tilewise.distributed.plan"], "__version__", "0.0.1")
        _plan()


def _mask_that_fails(is_odd: bool, plan: twd.Plan) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if is_odd:
            raise ValueError("this mask is broken")
        return q >= kv

    _plan(mask)


def _bad_shapes(is_odd: bool, plan: twd.Plan) -> None:
    q, k, v = _inputs(plan)
    _attend(plan, [q, k[:, :, 1:], v[:, :, 1:]] if is_odd else [q, k, v])


def _other_batch(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, [t.expand(2, -1, -1, -1) for t in _inputs(plan)] if is_odd else None)


def _other_dtype(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, [t.double() for t in _inputs(plan)] if is_odd else None)


def _other_score(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, score=scores.softcap(10.0) if is_odd else scores.softcap(20.0))


def _no_score(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, score=None if is_odd else scores.softcap(20.0))


def _frozen(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, _inputs(plan, grad=not is_odd))


def _other_call(is_odd: bool, plan: twd.Plan) -> None:
    """One rank makes a plan while the others attend."""
    if is_odd:
        _plan()
    else:
        _attend(plan)


def _kernel_fails(is_odd: bool, plan: twd.Plan) -> None:
    with _broken("forward") if is_odd else _fine():
        _attend(plan)


def _gradient_fails(is_odd: bool, plan: twd.Plan) -> None:
    with _broken("backward") if is_odd else _fine():
        _attend(plan)


def _second_stage_fails(is_odd: bool, plan: twd.Plan) -> None:
    """While nothing is on its way any more; the other ranks may still be waiting for keys."""
    with _broken("forward", after=1) if is_odd else _fine():
        _attend(_plan(stages=2))


def _gradient_of_a_stage_fails(is_odd: bool, plan: twd.Plan) -> None:
    with _broken("backward") if is_odd else _fine():
        _attend(_plan(stages=2))


def _end_of_a_plan_fails(is_odd: bool, plan: twd.Plan) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("no memory for the plan")

    with pytest.MonkeyPatch.context() as patch:
        if is_odd:
            patch.setattr(sys.modules["tilewise.distributed.plan"], "key_exchange", fail)
        _plan()


def _second_derivative(is_odd: bool, plan: twd.Plan) -> None:
    inputs = _inputs(plan)
    torch.autograd.grad(twd.attention(*inputs, plan=plan).sum(), inputs, create_graph=is_odd)


def _no_tensor_together(is_odd: bool, plan: twd.Plan) -> None:
    plan.unshard([1] if is_odd else torch.zeros(2, plan.local_length), 1)  # type: ignore[arg-type]  # on purpose


def _no_tensor(is_odd: bool, plan: twd.Plan) -> None:
    q, k, v = _inputs(plan)
    _attend(plan, [q, "k" if is_odd else k, v])  # type: ignore[list-item]  # on purpose


def _no_dropout(is_odd: bool, plan: twd.Plan) -> None:
    _attend(plan, dropout_p="a" if is_odd else 0.0)


def _no_dtype(is_odd: bool, plan: twd.Plan) -> None:
    _plan(dtype="bf16" if is_odd else None)


def _no_machine(is_odd: bool, plan: twd.Plan) -> None:
    _plan(machine=3 if is_odd else None)


def _no_sizes(is_odd: bool, plan: twd.Plan) -> None:
    _plan(shard_sizes="ab" if is_odd else [100, 100, 100])


def _no_layers(is_odd: bool, plan: twd.Plan) -> None:
    _plan({"a": (masks.causal,) if is_odd else masks.causal})


def _other_tokens_together(is_odd: bool, plan: twd.Plan) -> None:
    plan.unshard(torch.zeros(2, plan.local_length - is_odd), 1)


def _other_shape_together(is_odd: bool, plan: twd.Plan) -> None:
    plan.unshard(torch.zeros(2 + is_odd, plan.local_length), 1)


def _other_dtype_together(is_odd: bool, plan: twd.Plan) -> None:
    plan.unshard(torch.zeros(2, plan.local_length, dtype=torch.float64 if is_odd else torch.float32), 1)


def _unknown_backend(is_odd: bool, plan: twd.Plan) -> None:
    twd.attention(*_inputs(plan), plan=plan, backend="gluon" if is_odd else "blocked")


def _changed_documents(is_odd: bool, plan: twd.Plan) -> None:
    ids = torch.arange(LENGTH) // 100
    documents = _plan(lambda b, h, q, kv: ids[q] == ids[kv])
    _attend(documents)
    if is_odd:
        ids.add_(1)
    _attend(documents)


def _changed_before_the_backward(is_odd: bool, plan: twd.Plan) -> None:
    ids = torch.arange(LENGTH) // 100
    documents = _plan(lambda b, h, q, kv: ids[q] == ids[kv])
    out = twd.attention(*_inputs(documents), plan=documents, backend="blocked")
    if is_odd:
        ids.add_(1)
    out.sum().backward()


def _no_key_heads(is_odd: bool, plan: twd.Plan) -> None:
    _plan(kv_heads=0 if is_odd else 1)


def _no_mask_named(is_odd: bool, plan: twd.Plan) -> None:
    several = _plan({"one": masks.causal, "two": masks.full})
    _attend(several if is_odd else several["one"])


def _other_mask_inside(is_odd: bool, plan: twd.Plan) -> None:
    with twd.context(plan):
        tw.attention(*_inputs(plan), mask=masks.full if is_odd else masks.causal, enable_gqa=True)


@contextmanager
def _broken(what: str, after: int = 0) -> Iterator[None]:
    """An engine that fails in this pass, after so many that went well."""
    whole, calls = getattr(BlockedEngine, what), itertools.count()

    def fail(*given: Any) -> Any:
        if next(calls) < after:
            return whole(*given)
        raise MemoryError(f"no memory for the {what}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockedEngine, what, fail)
        yield


@contextmanager
def _fine() -> Iterator[None]:
    yield


def _query_changed_before_the_backward(is_odd: bool, plan: twd.Plan) -> None:
    inputs = _inputs(plan)
    out = twd.attention(*inputs, plan=plan, backend="blocked")
    if is_odd:
        with torch.no_grad():
            inputs[0].mul_(2)
    out.sum().backward()


FAULTS: dict[str, tuple[str, Callable[[bool, twd.Plan], None]]] = {
    "other mask": ("same thing. mask mask differs: ranks 0, 2 full, rank 1 causal$", _other_mask),
    "other window": (r"same thing. mask mask differs: ranks 0, 2 sliding_window\(6\), rank 1 sliding_window\(5\)$", _other_window),
    "other documents": ("same thing. details of mask mask differs: ranks 0, 2 ", _other_documents),
    "a query that is changed before the backward": ("rank 1: RuntimeError: .* modified by an inplace operation", _query_changed_before_the_backward),
    "no tensor together": ("rank 1: InputError: a tensor is needed, got list; ranks 0, 2: no error", _no_tensor_together),
    "no tensor": ("rank 1: InputError: query, key and value must be torch tensors, got Tensor, str, Tensor; ranks 0, 2: no error", _no_tensor),
    "no dropout": ("rank 1: InputError: dropout_p must be a number .*, got 'a'; ranks 0, 2: no error", _no_dropout),
    "no dtype": ("rank 1: InputError: dtype must be one of torch's, such as torch.bfloat16, got 'bf16'; ranks 0, 2: no error", _no_dtype),
    "no machine": ("rank 1: InputError: machine must be a tilewise.distributed.Machine, got 3; ranks 0, 2: no error", _no_machine),
    "no sizes": ("rank 1: InputError: shard_sizes must be 3 whole numbers, none of them negative, that sum to 300, got 'ab'; ranks 0, 2: no error", _no_sizes),
    "no layers": (r"rank 1: InputError: mask 'a' must be a mask, or a pair of a mask and its number of layers, got \(Mask\(causal\),\); ranks", _no_layers),
    "other version": ("tilewise differs: ranks 0, 2 .*, rank 1 0.0.1", _other_version),
    "broken mask": ("rank 1: .*this mask is broken.*; ranks 0, 2: no error", _mask_that_fails),
    "bad shapes": (r"rank 1: InputError: key has .* the plan is for .*; ranks 0, 2: no error", _bad_shapes),
    "other batch": ("batch size differs: ranks 0, 2 1, rank 1 2", _other_batch),
    "other dtype": ("dtype differs: ranks 0, 2 torch.float32, rank 1 torch.float64", _other_dtype),
    "other score": (r"same thing. score differs: ranks 0, 2 softcap\(20.0\), rank 1 softcap\(10.0\)$", _other_score),
    "no score": ("score differs: ranks 0, 2 .*, rank 1 none", _no_score),
    "frozen inputs": ("want a gradient differs: ranks 0, 2 .*, rank 1 ", _frozen),
    "other call": ("call differs: ranks 0, 2 attention under plan 1, mask mask, rank 1 plan;", _other_call),
    "changed documents": ("rank 1: InputError: a tensor that mask 'mask' loads from has changed", _changed_documents),
    "changed before the backward": ("rank 1: InputError: a tensor that mask 'mask' loads from has changed", _changed_before_the_backward),
    "no key heads": ("rank 1: InputError: kv_heads must be a whole number of at least 1, got 0", _no_key_heads),
    "no mask named": ("rank 1: InputError: the plan has several masks", _no_mask_named),
    "other mask inside": ("rank 1: InputError: inside tilewise.distributed.context", _other_mask_inside),
    "forward": ("rank 1: MemoryError: no memory for the forward; ranks 0, 2: no error", _kernel_fails),
    "backward": ("rank 1: MemoryError: no memory for the backward; ranks 0, 2: no error", _gradient_fails),
    "second stage": ("rank 1: MemoryError: no memory for the forward; ranks 0, 2: no error", _second_stage_fails),
    "backward of a stage": ("rank 1: MemoryError: no memory for the backward; ranks 0, 2: no error", _gradient_of_a_stage_fails),
    "end of a plan": ("rank 1: MemoryError: no memory for the plan; ranks 0, 2: no error", _end_of_a_plan_fails),
    "second derivative": ("rank 1: UnsupportedError: .* cannot be differentiated twice; ranks 0, 2: no error", _second_derivative),
    "other tokens together": ("rank 1: InputError: dimension 1 of shape .* this rank holds .*; ranks 0, 2: no error", _other_tokens_together),
    "other shape together": (r"shape differs: ranks 0, 2 \[2, 'tokens'\], rank 1 \[3, 'tokens'\]", _other_shape_together),
    "other dtype together": ("dtype differs: ranks 0, 2 torch.float32, rank 1 torch.float64", _other_dtype_together),
    "backend": ("backend differs: ranks 0, 2 blocked, rank 1 gluon", _unknown_backend),
}


def _assert_same_everywhere(name: str, text: str) -> None:
    texts = twd.agree.gather_texts((dist.group.WORLD,), text)
    assert len(set(texts)) == 1, f"{name}: {texts}"
