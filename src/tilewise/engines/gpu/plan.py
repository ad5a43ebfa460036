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
from tilewise.engines.gpu.decoding import is_decoding


class ForwardPass(Protocol):
    """The launches of a forward, ready for tensors laid out like the first call's."""

    @property
    def device(self) -> int | None:
        """The device its kernels are loaded on; None where they are interpreted."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Output: ...


FORWARD = "forward"
MAX_PASSES = 32  # of one plan: saved tensors that come back elsewhere every time must not pile them up
Pass = TypeVar("Pass")


def schedule_sources(name: Hashable, p: Problem) -> tuple[Tensor, ...]:
    """The tensors whose contents decide which tiles a pass computes. A forward that decodes has no tile schedule: its kernel asks the mask itself. Its
    backward has one."""
    return () if name == FORWARD and is_decoding(p) else p.mask_sources


class GpuPlan(Plan):
    """Passes by what their launches depend on beyond the call's key: nothing for the forward, the layouts of the saved tensors for a backward.

    A pass is prepared again when the contents of a tensor that the mask loads from, or of a given tile map, have changed, because its launches hold the
    addresses of a tile schedule made from them, and when tuning may have found a better configuration. Nothing else can change under an equal call key, which
    covers the addresses of all captures too.
    """

    def __init__(self, problem: Problem) -> None:
        self._passes: dict[Hashable, tuple[Any, Any]] = {}
        self._replays = problem.sinks is None and problem.dropout_p == 0  # query, key and value are all that varies

    def prepared(self, name: Hashable, problem: Problem, make: Callable[[], Pass]) -> Pass:
        """The pass of this name, prepared now or for an earlier call."""
        contents = contents_key(schedule_sources(name, problem))
        state = contents, tuning.state()
        found = self._passes.get(name)
        if found is None or found[1] != state or contents is None:
            if name not in self._passes and len(self._passes) >= MAX_PASSES:
                del self._passes[next(oldest for oldest in self._passes if oldest != FORWARD)]
            found = self._passes[name] = (make(), state)
        made: Pass = found[0]
        return made

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...]) -> Output | None:
        found = self._passes.get(FORWARD)
        if found is None or not self._replays:
            return None
        forward: ForwardPass
        forward, (contents, tuned) = found
        if contents is None or tuned != tuning.state() or (contents and contents != contents_key(mask_sources)):
            return None
        if forward.device is None or forward.device != torch.cuda.current_device():
            return None
        return forward.run(query, key, value, None, None)


def backward_key(p: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    """What the launches of a backward depend on beyond the call's key, because saved tensors may come back elsewhere and otherwise laid out than they
    went (offloading does that), and the gradient of the output is anybody's: strides and alignment of every tensor, the addresses of the score's captures,
    which are packed once, and the size of a chunk."""
    saved = (p.query, p.key, p.value, out, lse, grad_out)
    captures = () if p.score is None else p.score.captures
    return (
        p.query.shape[:2],
        tuple([(t.stride(), t.data_ptr() % 16) for t in saved]),
        None if dlse is None else dlse.data_ptr() % 16,
        tuple([(t.data_ptr(), t.stride()) for t in captures]),
    )
