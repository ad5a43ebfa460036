"""What a GPU engine keeps for calls that are alike: the launches of both passes, bound to the mask's and the score's tensors, ready to run again."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from torch import Tensor

from tilewise.core.map_cache import contents_key
from tilewise.core.output import Output
from tilewise.core.plan import Plan, layouts
from tilewise.core.problem import Problem
from tilewise.engines.dropout import places_key
from tilewise.engines.gpu import structure, tuning
from tilewise.engines.gpu.decoding import is_decoding
from tilewise.engines.gpu.device_map import is_made_on_device
from tilewise.engines.gpu.driver import capture_id, current_device, stream_of
from tilewise.engines.gpu.structure import MaybePass


class ForwardPass(Protocol):
    """The launches of a forward, ready for tensors laid out like the first call's."""

    @property
    def device(self) -> int | None:
        """The device its kernels are loaded on; None where they are interpreted."""

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output: ...


class BackwardPass(Protocol):
    """The launches of a backward, ready for tensors laid out like the first call's."""

    @property
    def device(self) -> int | None: ...

    def replay(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradients of query, key and value; None where a problem is needed."""


FORWARD = "forward"
BACKWARD = "backward"  # and the rest of its name: see backward_name
WHOLE = False, 0, None  # a problem that is no part of another, as `_state` has it
MAX_PASSES = 32  # of one plan: saved tensors that come back elsewhere every time must not pile them up


def schedule_sources(name: Hashable, p: Problem) -> tuple[Tensor, ...]:
    """The tensors whose contents decide which tiles a pass computes. A forward that decodes has no tile schedule: its kernel asks the mask itself. Its
    backward has one."""
    return () if name == FORWARD and is_decoding(p) else p.mask_sources


class GpuPlan(Plan):
    """Passes by what they depend on beyond the call's key: nothing for the forward, the layouts of the saved tensors for a backward.

    A pass is bound again when the contents of a tensor that the mask loads from, or of a given tile map, have changed, because it holds the addresses of a
    tile schedule made from them; when a score's capture has another address (saved tensors may come back elsewhere); for another part of a larger problem, of
    which the call's key knows nothing; and when tuning may have found a better configuration. Nothing else can change under an equal call key, which covers
    the addresses of all captures too.
    """

    def __init__(self, problem: Problem) -> None:
        self._passes: dict[Hashable, tuple[Any, Any]] = {}
        self._replays = problem.sinks is None and problem.dropout_p == 0  # query, key and value are all that varies
        self.given_up: set[str] = set()  # kinds of passes whose kernels did not compile: they would not the next time
        self._made_on_device: bool | None = None  # found out when a pass is first wanted: while torch.compile traces, sizes are symbols

    def prepared(self, name: Hashable, problem: Problem, kind: str, make: Callable[[], MaybePass]) -> MaybePass:
        """The pass of this name, bound now or for an earlier call; prepared by `make`, now or for an earlier problem of the same structure and kind. None
        if `make` has none for that structure."""
        state, found = self._state(name, problem), self._passes.get(name)
        if found is not None and state[0] is not None and found[1] == state:
            known: MaybePass = found[0]
            return known
        unbound = structure.prepared((kind, name), problem, make)
        if unbound is None:
            return unbound
        if name not in self._passes and len(self._passes) >= MAX_PASSES:
            self._passes.pop(next(oldest for oldest in list(self._passes) if oldest != FORWARD), None)
        ready = unbound.bind(problem)
        self._passes[name] = ready, state
        return ready

    def _state(self, name: Hashable, p: Problem) -> tuple[Any, ...]:
        """What may change under one name."""
        if self._made_on_device is None:
            self._made_on_device = is_made_on_device(p)
        sources, captures = schedule_sources(name, p), () if p.score is None else p.score.captures
        part = p.partial, p.busy_sms, places_key(p)
        return self._contents(sources) if sources else (), tuple([t.data_ptr() for t in captures]) if captures else (), part, tuning.state()

    def _contents(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
        """`contents_key`, and where schedules are made on the device, the current stream and the capture of a CUDA graph that is under way. A schedule may just
        be in the making on another stream, and whoever binds a launch to it waits for that (device_map.py). One that is made within a capture is of no use
        outside."""
        contents = contents_key(tensors)
        if not contents or not self._made_on_device:
            return contents
        stream = stream_of(tensors[0].device)
        return (*contents, stream, capture_id(stream))

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output | None:
        forward: ForwardPass | None = self._replayable(FORWARD, mask_sources)
        return None if forward is None else forward.run(query, key, value, None, None, needs_lse)

    def replay_backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, mask_sources: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        name = BACKWARD, layouts(query, key, value, out, lse, grad_out), _alignments(query, key, value, out, lse, grad_out), (), None
        backward: BackwardPass | None = self._replayable(name, mask_sources)
        return None if backward is None else backward.replay(query, key, value, out, lse, grad_out)

    def _replayable(self, name: Hashable, mask_sources: tuple[Tensor, ...]) -> Any:
        """The pass of this name, if it can run as it is bound, for a whole problem on the current device; else None."""
        found = self._passes.get(name) if self._replays else None
        if found is None:
            return None
        ready, (contents, _, part, tuned) = found
        if contents is None or part != WHOLE or tuned != tuning.state() or (contents and contents != self._contents(mask_sources)):
            return None
        return None if ready.device is None or ready.device != current_device() else ready


def backward_name(p: Problem, out: Tensor, lse: Tensor, grad_out: Tensor, dlse: Tensor | None, *more: Hashable) -> tuple[Hashable, ...]:
    """What the launches of a backward depend on beyond the call's key: layouts and alignment of every tensor, by which chunks, and outputs in the dtype of the
    whole to which a part belongs, have names of their own. `more` is what else an engine's passes differ in; none of these is replayed."""
    captures = () if p.score is None else tuple([t.stride() for t in p.score.captures])
    given = p.query, p.key, p.value, out, lse, grad_out
    return BACKWARD, layouts(*given), _alignments(*given), captures, None if dlse is None else dlse.data_ptr() & 15, *more


def _alignments(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([t.data_ptr() & 15 for t in tensors])
