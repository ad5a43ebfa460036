"""attention(): normalise the arguments, describe the problem, choose an engine, run it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import calls, order, packing
from tilewise.dispatch import Request, check_name, is_logged, log, must_choose, observers, requested_backend, tell_observers
from tilewise.engines import AGAIN, Output, arguments, engine_named, is_plain, run_directly
from tilewise.engines.native import NativeEngine
from tilewise.errors import BackendError, InputError
from tilewise.problem import Options, Problem, from_bhsd, kv_heads_of, make_problem, to_bhsd
from tilewise.scores import ScoreFunction


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    layout: str = "bhsd",
    heads: int | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Any:
    """softmax(score(scale * query @ key^T) where mask) @ value, fused, tile by tile.

    query, key, value   tensors in `layout` ("bhsd", "bshd", "hbsd", "sbhd"), or (batch, sequence, heads * head dim) with
                        `heads=`, or jagged nested tensors. float16, bfloat16, float32 or float64.
    mask                a function f(b, h, q, kv), a mask of tilewise.masks, a TileMap, a BlockMask, a boolean tensor (true:
                        attend), an additive tensor, or a boolean (batch, keys) padding mask. Causal masks align upper-left.
    score               a function f(score, b, h, q, kv), one of tilewise.scores, or several, applied in order.
    scale               1 / sqrt(head dim) unless given.
    dropout_p, seed     dropout of the weights; the same seed drops the same elements on every engine.
    enable_gqa          allow fewer key heads than query heads.
    backend             "auto", "flex", "flash", "native", "math", or an engine's name; see tilewise.backends().
    return_lse          also return the logarithm of each row's sum of exponentials, (batch, heads, queries); differentiable.
    deterministic       bitwise repeatable gradients; torch's own switch unless given.

    A query that may attend to nothing gives 0. The output has the query's layout and strides.
    """
    options = Options(scale, dropout_p, is_causal, enable_gqa, deterministic, seed)
    try:
        nested = query.is_nested or key.is_nested or value.is_nested
    except AttributeError:
        kinds = ", ".join([type(t).__name__ for t in (query, key, value)])
        raise InputError(f"query, key and value must be torch tensors, got {kinds}; torch.from_numpy makes one of a numpy array") from None
    if nested:
        return _nested(query, key, value, mask, score, options, layout, backend, return_lse)
    output = run(*_as_bhsd(query, key, value, layout, heads), mask, score, options, backend, return_lse)
    out = from_bhsd(output.out, layout, flat=query.dim() == 3)
    return (out, output.lse) if return_lse else out


def problem_of_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, layout: str, heads: int | None
) -> tuple[Problem, str]:
    """The problem attention() would make of these arguments, and its mask's name."""
    if query.is_nested:
        packed = packing.unnest(query, key, value, layout)
        return make_problem(*_packed_arguments(packed, mask, score, options))
    return make_problem(*_as_bhsd(query, key, value, layout, heads), mask, score, options)


def _as_bhsd(query: Tensor, key: Tensor, value: Tensor, layout: str, heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = kv_heads_of(query, key, heads)
    return to_bhsd(query, layout, heads, "query"), to_bhsd(key, layout, kv_heads, "key"), to_bhsd(value, layout, kv_heads, "value")


def run(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str | None, needs_lse: bool
) -> Output:
    """The whole way of one call on (batch, heads, sequence, head dim) tensors. lse is empty where native served it, and may be where it is not needed."""
    name, source = requested_backend(backend)
    seen = calls.sight(query, key, value, mask, score, options, name, needs_lse)
    known = None if seen is None else calls.find(seen)
    if seen is not None and known is not None:
        again = known.problem.memory.get(AGAIN)
        if again is not None and not observers and not is_logged() and not calls.trains(known, seen, query, key, value):
            output = again(query, key, value)
            if output is not None:
                return output
        problem, engine, choice, mask_name = calls.restored(known, seen, query, key, value, options), known.engine, known.choice, known.mask_name
    else:
        check_name(name, source)
        problem, mask_name = make_problem(query, key, value, mask, score, options)
        engine, choice = must_choose(problem, Request(name, source, needs_lse, options.seed is not None))
        if seen is not None and not (isinstance(engine, NativeEngine) and problem.mask is not None):  # contents of its tensors may have decided that
            calls.remember(seen, engine, problem, choice, mask_name)
    log(choice, problem, mask_name)
    patches = None
    if problem.grid is not None:
        patches, problem = order.in_best_order(engine, problem)
    if not torch.compiler.is_compiling() and observers:  # in this order: torch.compile puts no guard on the list
        tell_observers(engine, problem, mask_name)
    if isinstance(engine, NativeEngine):
        return Output(engine.call(problem), *NOTHING)
    output = run_directly(engine, problem) if seen is not None else operate(engine.name, problem)
    return output if patches is None else order.in_given_order(patches, output, needs_lse)


NOTHING = torch.empty(0), torch.empty(0)


def operate(engine: str, problem: Problem) -> Output:
    """Run an engine: directly where only eager autograd watches, else behind the torch operator."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in problem.tensors):
        raise BackendError(f"{engine} has no forward-mode derivative (jvp); torch's SDPA has one with SDPBackend.MATH")
    if is_plain(problem):
        return run_directly(engine_named(engine), problem)
    return Output(*torch.ops.tilewise.attention(*arguments(engine, problem)))


def _nested(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, layout: str, backend: str | None, return_lse: bool
) -> Any:
    """Jagged nested tensors: packed, computed without padding, and put back."""
    if return_lse:
        raise InputError("return_lse is not available for nested tensors; use tilewise.varlen_attention, which returns it packed")
    packed = packing.unnest(query, key, value, layout)
    output = packed_attention(packed, mask, score, options, backend, needs_lse=False)
    return packing.nest(output.out, packed, layout)


def packed_attention(packed: packing.Packed, mask: Any, score: Any, options: Options, backend: str | None, needs_lse: bool) -> Output:
    """Attention of packed sequences, each to itself, as one sequence with a mask."""
    return run(*_packed_arguments(packed, mask, score, options), backend, needs_lse)


def _packed_arguments(packed: packing.Packed, mask: Any, score: Any, options: Options) -> tuple[Tensor, Tensor, Tensor, Any, Any, Options]:
    within, scores = packing.within_sequences(packed, mask, score, options.is_causal)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (packed.query, packed.key, packed.value))
    return q, k, v, within, scores, options.without_causal()
