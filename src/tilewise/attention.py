"""attention(): the path of a call, from its arguments to an engine (docs/architecture.md)."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch._C import _get_tracing_state as jit_trace
from torch.autograd import forward_ad

from tilewise.core.pages import Pages, gathered
from tilewise.core.plan import Plan
from tilewise.core.problem import Options, Problem, from_bhsd, has_float8, kv_heads_of, make_problem, to_bhsd, widened
from tilewise.core.recording import unrecorded
from tilewise.engines import Engine, Output, Request, are_active, are_active_while_compiling, arguments, is_plain, run_eager, train, transformed
from tilewise.errors import BackendError, InputError
from tilewise.frontend import call_cache, packing
from tilewise.frontend.call_cache import CachedCall
from tilewise.frontend.call_key import CallKey, key_of
from tilewise.frontend.dispatch import check_name, is_logged, log, must_choose, observers, requested_backend, tell_observers
from tilewise.frontend.kv_scales import kv_scales
from tilewise.frontend.shared_sequence import scopes
from tilewise.frontend.token_order import token_permute, token_unpermute
from tilewise.scores import ScoreFunction

__all__ = ["attention"]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(score(scale * query @ key^T) where mask) @ value, fused, tile by tile.

    A query that may attend to nothing gives 0. The output has the query's layout and lies in memory as the query does, a head's numbers always side by side.

    Args:
        query: A tensor in `layout`, or (batch, sequence, heads * head dim) with `heads=`, or a nested tensor; float16, bfloat16, float32 or float64.
        key: Like the query. float8_e4m3fn and float8_e5m2 keys and values are converted to the query's dtype, which is exact.
        value: Like the key; its head dim may be another.
        mask: A function f(b, h, q, kv), a mask of tilewise.masks, a TileMap, a BlockMask, a boolean tensor (true: attend), an additive tensor, or a boolean
            (batch, keys) padding mask. Causal masks align upper-left.
        score: A function f(score, b, h, q, kv), one of tilewise.scores, or several, applied in order.
        scale: 1 / sqrt(head dim) unless given.
        k_scale: What keys were divided by before they were stored, one number or one for each key head: for float8.
        v_scale: The same for values.
        dropout_p: Dropout of the weights.
        is_causal: Adds masks.causal to whatever mask is given: query i attends to keys 0 to i.
        enable_gqa: Allow fewer key heads than query heads.
        layout: The order of dimensions: "bhsd", "bshd", "hbsd" or "sbhd", of batch, heads, sequence and head dim.
        heads: The number of query heads, for 3-D tensors.
        backend: An intent ("auto", "flex", "flash", "math") or an engine's name; see tilewise.backends().
        return_lse: Also return the logarithm of each row's sum of exponentials, (batch, heads, queries); differentiable.
        deterministic: Bitwise repeatable gradients; torch's own switch unless given.
        seed: For dropout: the same seed drops the same elements on every engine.

    Returns:
        The output; with `return_lse`, the output and the lse.
    """
    options = Options(scale, dropout_p, is_causal, enable_gqa, deterministic, seed)
    try:
        nested = query.is_nested or key.is_nested or value.is_nested
    except AttributeError:
        kinds = ", ".join([type(t).__name__ for t in (query, key, value)])
        raise InputError(f"query, key and value must be torch tensors, got {kinds}; torch.from_numpy makes one of a numpy array") from None
    scaled, shared = k_scale is not None or v_scale is not None, len(scopes) > 0 and scopes[-1].holds(query, key, layout, heads)
    if scaled and (nested or shared):
        raise InputError("k_scale and v_scale are not available for nested tensors and sequences that several ranks share; multiply keys and values instead")
    if shared:
        found: Tensor | tuple[Tensor, Tensor] = scopes[-1].attention(query, key, value, mask, score, options, layout, heads, backend, return_lse)
        return found
    if nested:
        return _nested(query, key, value, mask, score, options, layout, backend, return_lse)
    plain = layout == "bhsd" and heads is None and query.dim() == key.dim() == value.dim() == 4
    q, k, v = (query, key, value) if plain else _as_bhsd(query, key, value, layout, heads)
    if scaled:
        scales = kv_scales(k_scale, v_scale, k.shape[1], q.device)
        score, options = scales.applied(q, score, options)
    output = run(q, k, v, mask, score, options, backend, return_lse)
    out = scales.of_output(output.out) if scaled else output.out
    if not plain:
        out = from_bhsd(out, layout, flat=query.dim() == 3)
    return (out, output.lse) if return_lse else out


def problem_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    score: Any,
    options: Options,
    layout: str,
    heads: int | None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> tuple[Problem, str]:
    """The problem attention() would make of these arguments, and its mask's name."""
    if k_scale is not None or v_scale is not None:
        q, k, _ = _as_bhsd(query, key, value, layout, heads)
        score, options = kv_scales(k_scale, v_scale, k.shape[1], q.device).applied(q, score, options)
    if query.is_nested:
        packed = packing.unnest(query, key, value, layout)
        return make_problem(*_packed_arguments(packed, mask, score, options))
    return make_problem(*_as_bhsd(query, key, value, layout, heads), mask, score, options)


def _as_bhsd(query: Tensor, key: Tensor, value: Tensor, layout: str, heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = kv_heads_of(query, key, heads)
    return to_bhsd(query, layout, heads, "query"), to_bhsd(key, layout, kv_heads, "key"), to_bhsd(value, layout, kv_heads, "value")


def run(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str | None, needs_lse: bool, pages: Pages | None = None
) -> Output:
    """One call on (batch, heads, sequence, head dim) tensors: look up -> Problem -> choose -> plan -> execute.

    With `pages`, keys and values are (pages, kv heads, page size, head dim). A call like an earlier one skips Problem, choose and plan, or is replayed. lse is
    empty where the engine returns none, and may be where it is not needed.
    """
    if jit_trace() is not None:
        raise BackendError(
            "attention cannot be recorded by torch.jit.trace (nor by torch.onnx.export with dynamo=False): the trace would keep one call's numbers and none "
            "of its kernels. torch.export.export and torch.compile take models with tilewise in them"
        )
    if pages is not None and (not is_plain((query, key, value)) or query.is_meta):
        return _in_order(query, key, value, pages, mask, score, options, backend, needs_lse)
    options = options.of_plain_values()
    name, source = requested_backend(backend)
    call_key = key_of(query, key, value, mask, score, options, name, needs_lse, pages)
    cached = call_cache.find(call_key)
    if cached is not None:
        assert call_key is not None
        return _again(cached, call_key, query, key, value, options, needs_lse, pages)
    if call_key is None and pages is None and has_float8(query, key, value):  # converted, the call can have a key
        return run(query, *widened(query, key, value), mask, score, options, backend, needs_lse)
    check_name(name, source)
    request = Request(name, source, needs_lse, options.seed is not None)
    with unrecorded():
        problem, mask_name = make_problem(query, key, value, mask, score, options, pages)
    if pages is not None and torch.is_grad_enabled() and any([t.requires_grad for t in problem.tensors]):
        return _in_order(query, key, value, pages, mask, score, options, backend, needs_lse)
    with unrecorded():
        engine, choice = must_choose(problem, request)
        by_contents = engine.looks_at_contents and engine.name != name and problem.mask is not None  # the next call's may differ
        cached = call_cache.keep(None if by_contents else call_key, problem, engine, choice, mask_name)
        cached.plan.by_name = engine.name == name
    return execute(cached, problem, needs_lse)


def _in_order(query: Tensor, k_pages: Tensor, v_pages: Tensor, pages: Pages, *others: Any) -> Output:
    """With keys and values out of their pages: torch's own operations, for what kernels that read pages leave to others (gradients, torch.compile,
    torch.func)."""
    output = run(query, gathered(k_pages, pages, query.dtype), gathered(v_pages, pages, query.dtype), *others)
    return output if pages.v_scale == 1.0 else output._replace(out=output.out * pages.v_scale)


def _again(cached: CachedCall, call_key: CallKey, query: Tensor, key: Tensor, value: Tensor, options: Options, needs_lse: bool, pages: Pages | None) -> Output:
    """A call like an earlier one."""
    if observers or is_logged():
        return execute(cached, cached.bind(call_key, query, key, value, options, pages), needs_lse)
    replayed = cached.replay(call_key, query, key, value, needs_lse)
    if replayed is not None:
        return replayed
    if cached.trains:
        bare, tensors = cached.bare(call_key, options, query.device), cached.tensors(call_key, query, key, value)
        return train(cached.engine, bare, tensors, cached.plan, needs_lse)
    problem = cached.bind(call_key, query, key, value, options, pages)
    if cached.permutation is not None or cached.engine.is_torch_function:
        return execute(cached, problem, needs_lse)
    return run_eager(cached.engine, problem, cached.plan, needs_lse)  # a call that has a key is watched by nothing but eager autograd (call_key.py)


def execute(cached: CachedCall, problem: Problem, needs_lse: bool) -> Output:
    """Run a planned call, in the order of tokens that its plan says."""
    engine, plan, permutation = cached.engine, cached.plan, cached.permutation
    log(cached.choice, problem, cached.mask_name)
    if permutation is not None:
        problem = token_permute(permutation, problem)
        plan = cached.plan_for(problem)
    if not torch.compiler.is_compiling() and observers:  # in this order: torch.compile puts no guard on the list
        tell_observers(engine, problem, cached.mask_name)
    output = run_engine(engine, problem, plan, needs_lse)
    return output if permutation is None else token_unpermute(permutation, output, needs_lse)


def run_engine(engine: Engine, problem: Problem, plan: Plan, needs_lse: bool = True) -> Output:
    """Directly where only eager autograd watches or torch sees through the engine, else behind the torch operator."""
    if engine.is_torch_function:
        return engine.forward(problem, plan)
    if torch.compiler.is_dynamo_compiling() and are_active_while_compiling():
        torch._dynamo.graph_break(msg="tilewise's kernels inside torch.func (vmap, grad, vjp, ...): call torch.func outside of compiled code")
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in problem.tensors):
        raise BackendError(f"{engine.name} has no forward-mode derivative (jvp); torch's SDPA has one with SDPBackend.MATH")
    if is_plain(problem.tensors) and not problem.query.is_meta:
        return run_eager(engine, problem, plan, needs_lse)
    if not torch.compiler.is_compiling() and are_active():
        return transformed(engine, problem)
    return Output(*torch.ops.tilewise.attention(*arguments(engine.name, problem)))


def _nested(query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, layout: str, backend: str | None, return_lse: bool) -> Tensor:
    """Nested tensors: packed, computed without padding, and put back."""
    if return_lse:
        raise InputError("return_lse is not available for nested tensors; use tilewise.varlen_attention, which returns it packed")
    packed = packing.unnest(query, key, value, layout)
    output = packed_attention(packed, mask, score, options, backend, needs_lse=False)
    return packing.nest(output.out, packed, layout, strided=query.layout == torch.strided)


def packed_attention(packed: packing.Packed, mask: Any, score: Any, options: Options, backend: str | None, needs_lse: bool) -> Output:
    """Attention of packed sequences, each to itself, as one sequence with a mask."""
    return run(*_packed_arguments(packed, mask, score, options), backend, needs_lse)


def _packed_arguments(packed: packing.Packed, mask: Any, score: Any, options: Options) -> tuple[Tensor, Tensor, Tensor, Any, Any, Options]:
    within, scores = packing.within_sequences(packed, mask, score, options.is_causal)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (packed.query, packed.key, packed.value))
    return q, k, v, within, scores, options.without_causal()
