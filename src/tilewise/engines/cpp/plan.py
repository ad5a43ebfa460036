"""What the C++ engine keeps for calls that are alike: both passes, with their arguments packed."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from tilewise.core.map_cache import contents_key
from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.cpp.splits import is_decoding
from tilewise.engines.dropout import places_key


class ForwardPass(Protocol):
    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: int) -> Output: ...


FORWARD = "forward"
MAX_PASSES = 32  # of one plan: saved tensors that come back elsewhere every time must not pile them up
Pass = TypeVar("Pass")


class CppPlan(Plan):
    """Passes by what their packed arguments depend on beyond the call's key: nothing for the forward, `run.backward_key` for a backward.

    A pass is made again when the contents of a tensor that the mask loads from, or of a given tile map, have changed: it holds the addresses of a tile
    schedule made from them. A forward that decodes has no schedule, because the mask is asked about every key: of the mask's tensors it depends on the places
    alone. A pass is also made again for another part of a larger problem, of which the call's key knows nothing. All else that is packed follows from that key,
    which covers the addresses of all captures. What it leaves open is handed over in every call: the addresses of query, key, value, sinks and outputs, the
    seed, the number of threads.
    """

    def __init__(self, problem: Problem) -> None:
        self._passes: dict[Hashable, tuple[Any, Any]] = {}
        self._replays = problem.sinks is None and problem.dropout_p == 0  # query, key and value are all that varies
        self._forward_state = _places if is_decoding(problem) else contents_key

    def prepared(self, name: Hashable, problem: Problem, make: Callable[[], Pass]) -> Pass:
        """The pass of this name, made now or for an earlier call."""
        contents = (self._forward_state if name == FORWARD else contents_key)(problem.mask_sources)
        state, found = (contents, problem.partial, places_key(problem)), self._passes.get(name)
        if found is None or found[1] != state or contents is None:
            if name not in self._passes and len(self._passes) >= MAX_PASSES:
                del self._passes[next(oldest for oldest in self._passes if oldest != FORWARD)]
            found = self._passes[name] = (make(), state)
        made: Pass = found[0]
        return made

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output | None:
        found = self._passes.get(FORWARD)
        if found is None or not self._replays:
            return None
        forward: ForwardPass
        forward, (contents, *_) = found
        if contents is None or (mask_sources and contents != self._forward_state(mask_sources)):
            return None
        return forward.run(query, key, value, None, 0)


def _places(tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    return tuple([(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors])
