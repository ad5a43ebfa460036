"""What the C++ engine keeps for calls that are alike: both passes, with their arguments packed."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.core.map_cache import contents_key
from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan, layouts
from tilewise.core.problem import Problem
from tilewise.engines.base import NONE_WANTED, attend_nothing, scalar_seed, sinks_gradient
from tilewise.engines.cpp import run, splits
from tilewise.engines.dropout import places_key

FORWARD = "forward"
MAX_PASSES = 32  # of one plan: saved tensors that come back elsewhere every time must not pile them up
NOTHING_SUMMED: dict[int, Tensor] = {}
WHOLE = [False, None]  # a problem that is no part of another, as `_prepared` has it
Pass = TypeVar("Pass")


class CppPlan(Plan):
    """Passes by what their packed arguments depend on beyond the call's key: nothing for the forward, `backward_key` for a backward.

    A pass is made again when the contents of a tensor that the mask loads from, or of a given tile map, have changed: it holds the addresses of a tile
    schedule made from them. A forward that decodes has no schedule, because the mask is asked about every key: of the mask's tensors it depends on the places
    alone. A pass is also made again for another part of a larger problem, of which the call's key knows nothing. All else that is packed follows from that key,
    which covers the addresses of all captures. What it leaves open is handed over in every call: the addresses of query, key, value, sinks and outputs, the
    seed, the number of threads.
    """

    def __init__(self, problem: Problem) -> None:
        self._passes: dict[Hashable, tuple[Any, Any]] = {}
        self._replays = problem.sinks is None and problem.dropout_p == 0  # query, key and value are all that varies
        self._forward_state = _places if splits.is_decoding(problem) else contents_key

    def forward(self, p: Problem) -> Output:
        if p.query.numel() == 0 or p.key.numel() == 0:
            return attend_nothing(p)
        made = self._prepared(FORWARD, p, self._forward_state, lambda: run.Forward(p))
        sinks = None if p.sinks is None else p.sinks.to(p.inner_dtype).contiguous()
        return made.run(p.query, p.key, p.value, sinks, _seed(p))

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output | None:
        forward: run.Forward | None = self._replayable(FORWARD, mask_sources, self._forward_state)
        return None if forward is None else forward.run(query, key, value, None, 0, needs_lse)

    def backward(self, p: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        if wanted:
            assert p.score is not None
            p = p.replaced(score=replace(p.score, captures=tuple([t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures)])))
        dtype, result_dtype, out, lse = p.dtype, p.result_dtype, output.out, output.lse
        grads = _contiguous_like(p.query, result_dtype), _contiguous_like(p.key, result_dtype), _contiguous_like(p.value, result_dtype)
        grad_lse = None if grad_lse is None else grad_lse.to(p.inner_dtype).contiguous()
        capture_sums = splits.zeroed_capture_gradients(p, wanted) if wanted else {}
        delta = None if p.sinks is None else torch.zeros_like(lse)
        if p.query.numel() and p.key.numel():
            grad_out = grad_out if grad_out.dtype is dtype else grad_out.to(dtype)  # asked first, because `to` takes long even to find out
            out = out if out.dtype is result_dtype else out.to(result_dtype)
            made = self._prepared(backward_key(p, out, lse, grad_out, wanted), p, contents_key, lambda: run.Backward(p, out, grad_out, wanted))
            made.run(p.query, p.key, p.value, out, lse, grad_out, grad_lse, grads, delta, capture_sums, _seed(p))
        else:
            if delta is not None and grad_lse is not None:
                delta -= grad_lse
            for t in grads:
                t.zero_()
        if p.score is None and delta is None:
            return Gradients(*grads)
        captured = {} if p.score is None else {k: t.sum(0).to(p.score.captures[k].dtype) for k, t in capture_sums.items()}
        return Gradients(*grads, None if delta is None else sinks_gradient(p, output, delta), captured)

    def replay_backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, mask_sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        name = NONE_WANTED, layouts(query, key, value, out, lse, grad_out), ()
        backward: run.Backward | None = self._replayable(name, mask_sources, contents_key)
        if backward is None:
            return None
        dtype = query.dtype
        grads = _contiguous_like(query, dtype), _contiguous_like(key, dtype), _contiguous_like(value, dtype)
        backward.run(query, key, value, out, lse, grad_out, None, grads, None, NOTHING_SUMMED, 0)
        return grads

    def _replayable(self, name: Hashable, mask_sources: tuple[Tensor, ...], state_of: Callable[[tuple[Tensor, ...]], Any]) -> Any:
        """The pass of this name, if it holds what a whole problem with these tensors needs; else None."""
        found = self._passes.get(name) if self._replays else None
        if found is None:
            return None
        made, (contents, *part) = found
        if contents is None or part != WHOLE or (mask_sources and contents != state_of(mask_sources)):
            return None
        return made

    def _prepared(self, name: Hashable, p: Problem, state_of: Callable[[tuple[Tensor, ...]], Any], make: Callable[[], Pass]) -> Pass:
        """The pass of this name, made now or for an earlier call; `state_of` the mask's tensors is what else it depends on, None if that is never known."""
        sources, found = p.mask_sources, self._passes.get(name)
        contents = state_of(sources) if sources else ()
        state = contents, p.partial, places_key(p)
        if found is None or found[1] != state or contents is None:
            if name not in self._passes and len(self._passes) >= MAX_PASSES:
                self._passes.pop(next(oldest for oldest in list(self._passes) if oldest != FORWARD), None)  # a list: other threads may add to it meanwhile
            found = self._passes[name] = (make(), state)
        made: Pass = found[0]
        return made


def backward_key(p: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: frozenset[int]) -> Hashable:
    """What a backward's packed arguments depend on beyond the call's key: which gradients of captures are wanted; the layouts of what it is given; the places
    of the score's captures, some of which may be copies."""
    captures = () if p.score is None else tuple([(t.data_ptr(), t.stride()) for t in p.score.captures])
    return wanted, layouts(p.query, p.key, p.value, out, lse, grad_out), captures


def _places(tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])


def _seed(p: Problem) -> int:
    return scalar_seed(p) if p.dropout_p > 0 else 0


def _contiguous_like(t: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor, by the quickest way."""
    if t.dtype is dtype and t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)
