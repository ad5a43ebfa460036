"""What a GPU engine keeps for calls that are alike: the launches of both passes, ready to run again."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from tilewise.core.map_cache import contents_key
from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.gpu import tuning


class ForwardPass(Protocol):
    """The launches of a forward, ready for tensors laid out like the first call's."""

    @property
    def device(self) -> int | None:
        """The device its kernels are loaded on; None where they are interpreted."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Output: ...


FORWARD = "forward"
Pass = TypeVar("Pass")


class GpuPlan(Plan):
    """Passes by what their launches depend on beyond the call's key: nothing for the forward, the layouts of the saved tensors for a backward.

    A pass is prepared again when the contents of a tensor that the mask loads from have changed, because its launches hold the addresses of a tile
    schedule made from them, and when tuning may have found a better configuration. Nothing else can change under an equal call key.
    """

    def __init__(self, problem: Problem) -> None:
        self._passes: dict[Hashable, tuple[Any, Any]] = {}
        self._replays = problem.sinks is None and problem.dropout_p == 0  # query, key and value are all that varies

    def prepared(self, name: Hashable, problem: Problem, make: Callable[[], Pass]) -> Pass:
        """The pass of this name, prepared now or for an earlier call."""
        contents = contents_key(() if problem.mask is None else problem.mask.captures)
        state = contents, tuning.state()
        found = self._passes.get(name)
        if found is None or found[1] != state or contents is None:
            found = self._passes[name] = (make(), state)
        made: Pass = found[0]
        return made

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_captures: tuple[Tensor, ...]) -> Output | None:
        found = self._passes.get(FORWARD)
        if found is None or not self._replays:
            return None
        forward: ForwardPass
        forward, (contents, tuned) = found
        if contents is None or tuned != tuning.state() or (contents and contents != contents_key(mask_captures)):
            return None
        if forward.device is None or forward.device != torch.cuda.current_device():
            return None
        return forward.run(query, key, value, None, None)


def layout_key(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """What launches depend on of where tensors lie. Saved ones may come back elsewhere and otherwise laid out than they went: offloading does that."""
    return tuple([(t.stride(), t.data_ptr() % 16) for t in tensors])
