"""How a problem becomes launches of the Hopper kernels: a pass prepares them once, and runs them for every call like the first."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines.base import EmptyOutputs, sinks_gradient
from tilewise.engines.gluon import launches
from tilewise.engines.gluon.config import backward_config
from tilewise.engines.gluon.launches import Work, backward_workspace
from tilewise.engines.gluon.refusals import refuse_backward, tma_can_load
from tilewise.engines.gluon.tile_schedule import too_many_mask_bits
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.bwd_chunks import chunking, chunks
from tilewise.engines.gpu.driver import current_stream, is_capturing
from tilewise.engines.gpu.launch import Launch, prepare
from tilewise.engines.gpu.plan import FORWARD, GpuPlan, backward_name
from tilewise.engines.gpu.structure import Pass
from tilewise.engines.triton import run as triton_run
from tilewise.engines.triton.run import BackwardTensors

FwdLaunch = Callable[[Problem, Output, Tensor], Launch]  # of a problem, what it fills, and the work counter
_counters: dict[tuple[int, int], Tensor] = {}


def forward(p: Problem, plan: GpuPlan) -> Output:
    if not serves_forward(p):
        return triton_run.forward(p, plan)
    ready = plan.prepared(FORWARD, p, "hopper", lambda: Forward(p))
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))


def serves_forward(p: Problem) -> bool:
    """What is known when a call runs, and not before: addresses, of which a compiled graph knows nothing, and how many tiles have mask bits."""
    return is_aligned(p) and not too_many_mask_bits(p)


def is_aligned(p: Problem) -> bool:
    return (p.query.data_ptr() | p.key.data_ptr() | p.value.data_ptr()) % 16 == 0


class Forward(Pass):
    """Two launches: the forward, and its fix-up, which computes again the rows that the first found not finite; none where the first does that itself."""

    def __init__(self, p: Problem, fwd_launch: FwdLaunch = launches.fwd_launch, needs_fixup: bool = True) -> None:
        self._outputs = EmptyOutputs(p)
        output, _ = self._outputs(p.query)
        self._fwd = prepare(fwd_launch(p, output, counter(p.device)), p.device)
        self._fixup = prepare(launches.fwd_fixup_launch(p, launches.fwd_fixup_tensors(p, output)), p.device) if needs_fixup else None
        self.device = self._fwd.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output:
        output, filled = self._outputs(query, needs_lse)
        self._fwd.launch([query, key, value, *filled, counter(query.device), sinks, seed])
        if self._fixup is not None:
            self._fixup.launch([query, key, value, *filled, sinks, seed])
        return output


def counter(device: torch.device) -> Tensor:
    """The work counter of the persistent forward, 0 before and after every launch. One for each device and stream; a CUDA graph's capture gets its own,
    zeroed inside the graph."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    stream = current_stream(index)
    if is_capturing(stream):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (index, stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def backward(p: Problem, plan: GpuPlan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    if wanted or p.deterministic or too_many_mask_bits(p, by_keys=True):  # what is known at once (refuse_backward)
        return triton_run.backward(p, plan, output, grad_out, grad_lse, wanted)
    dlse = None if grad_lse is None else grad_lse.float().contiguous()
    name = backward_name(p, output.out, output.lse, grad_out, dlse)
    ready = plan.prepared(name, p, "hopper", lambda: _prepared_backward(p, output, grad_out, dlse))
    if ready is not None:
        return ready.run(p, output, grad_out, dlse)
    if _can_train(p) and not tma_can_load(grad_out):
        aligned = grad_out.clone(memory_format=torch.contiguous_format)  # a copy even of a contiguous one, which may begin anywhere
        return backward(p, plan, output, aligned, grad_lse, wanted)
    return triton_run.backward(p, plan, output, grad_out, grad_lse, wanted)


def _prepared_backward(p: Problem, output: Output, grad_out: Tensor, dlse: Tensor | None) -> "Backward | None":
    return Backward(p, output, grad_out, dlse) if _can_train(p) and tma_can_load(grad_out) else None


def _can_train(p: Problem) -> bool:
    """Saved tensors may come back elsewhere and otherwise laid out than they went (offloading does that)."""
    return refuse_backward(p, learns=False) is None and all([tma_can_load(t) for t in (p.query, p.key, p.value)])


class Backward(Pass):
    """Three launches for each chunk: delta, lse and cleared sums of dQ; dK, dV and the sums; dQ from its sums, and again what was found not finite."""

    def __init__(self, p: Problem, output: Output, grad_out: Tensor, dlse: Tensor | None) -> None:
        self._axis, self._count = chunking(p, backward_config(p).d)
        self._workspace = backward_workspace(p, self._count)
        work = Work(*self._workspace.tensors(self._workspace.allocate()))
        given = BackwardTensors(output.out, output.lse, grad_out, dlse, work.delta, *_empty_gradients(p.query, p.key, p.value, p.result_dtype))
        q, t = list(self._chunks(p, given))[min(1, self._count - 1)]  # where rows of lse begin on fewer bytes than 16 in some chunk, they do in the second
        before = launches.bwd_preprocess_tensors(t.out, t.lse, t.grad_out, t.dlse, t.delta, work)
        after = launches.bwd_postprocess_tensors(q, t.lse, t.grad_out, t.delta, (t.dq, t.dk, t.dv), work)
        self._preprocess = prepare(launches.bwd_preprocess_launch(q, before), p.device)
        self._bwd = prepare(launches.bwd_launch(q, launches.bwd_tensors(q, t.grad_out, t.dk, t.dv, work)), p.device)
        self._postprocess = prepare(launches.bwd_postprocess_launch(q, after), p.device)
        self.device = self._bwd.device

    def run(self, p: Problem, output: Output, grad_out: Tensor, dlse: Tensor | None) -> Gradients:
        memory, seed = self._workspace.allocate(), seed_of(p)
        grads = _empty_gradients(p.query, p.key, p.value, p.result_dtype)
        work = Work(*self._workspace.parts(memory))
        delta = work.delta if self._count == 1 and p.sinks is None else self._workspace.tensors(memory)[0]
        for q, t in self._chunks(p, BackwardTensors(output.out, output.lse, grad_out, dlse, delta, *grads)):
            self._launch(q.query, q.key, q.value, t, work, seed)
        return Gradients(*grads, None if p.sinks is None else sinks_gradient(p, output, delta))

    def replay(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        if self._count > 1:
            return None
        memory = self._workspace.allocate()
        work = Work(*self._workspace.parts(memory))
        grads = _empty_gradients(query, key, value, query.dtype)
        self._launch(query, key, value, BackwardTensors(out, lse, grad_out, None, work.delta, *grads), work, None)
        return grads

    def _launch(self, query: Tensor, key: Tensor, value: Tensor, t: BackwardTensors, work: Work, seed: Tensor | None) -> None:
        inputs = (query, key, value, t.grad_out)
        self._preprocess.launch([t.out, t.grad_out, t.lse, t.dlse, work.lse_padded, work.delta_padded, t.delta, work.dq_sums])
        self._bwd.launch([*inputs, t.dk, t.dv, work.dq_sums, work.lse_padded, work.delta_padded, work.nonfinite, seed])
        self._postprocess.launch([*inputs, t.lse, t.delta, t.dq, t.dk, t.dv, work.dq_sums, work.nonfinite, seed])

    def _chunks(self, p: Problem, t: BackwardTensors) -> Iterable[tuple[Problem, BackwardTensors]]:
        if self._count == 1:
            return [(p, t)]
        return [(chunk, BackwardTensors(*tensors)) for chunk, tensors in chunks(p, self._axis, self._count, *t)]


def _empty_gradients(query: Tensor, key: Tensor, value: Tensor, dq_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Laid out as the inputs are: what made those need not copy their gradients. dQ is made of sums in fp32; dK and dV leave the kernel in 16 bits."""
    return torch.empty_like(query, dtype=dq_dtype), torch.empty_like(key), torch.empty_like(value)
