"""How a problem becomes launches of the Hopper kernels: a pass prepares them once, and runs them for every call like the first."""

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines.base import EmptyOutputs, sinks_gradient
from tilewise.engines.gluon import launches
from tilewise.engines.gluon.config import backward_config
from tilewise.engines.gluon.launches import Workspace
from tilewise.engines.gluon.refusals import refuse_backward, tma_can_load
from tilewise.engines.gluon.tile_schedule import too_many_mask_bits
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.bwd_chunks import chunking, chunks
from tilewise.engines.gpu.driver import current_stream, is_capturing
from tilewise.engines.gpu.launch import prepare
from tilewise.engines.gpu.plan import FORWARD, ForwardPass, GpuPlan, backward_key
from tilewise.engines.triton import run as triton_run
from tilewise.engines.triton.run import BackwardTensors

_counters: dict[tuple[int, int], Tensor] = {}


def forward(p: Problem, plan: GpuPlan) -> Output:
    misaligned = (p.query.data_ptr() | p.key.data_ptr() | p.value.data_ptr()) % 16  # a compiled graph did not know
    if misaligned or too_many_mask_bits(p):
        return triton_run.forward(p, plan)
    ready: ForwardPass = plan.prepared(FORWARD, p, lambda: Forward(p))
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))


class Forward:
    """Two launches: the forward, and its fix-up, which computes again the rows that the first found not finite."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        output = self._outputs(p.query)
        self._fwd = prepare(launches.fwd_launch(p, launches.fwd_tensors(p, output, counter(p.device))), p.device)
        self._fixup = prepare(launches.fwd_fixup_launch(p, launches.fwd_fixup_tensors(p, output)), p.device)
        self.device = self._fwd.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Output:
        output = self._outputs(query)
        self._fwd.launch([query, key, value, *output, counter(query.device), sinks, seed])
        self._fixup.launch([query, key, value, *output, sinks, seed])
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
    # Saved tensors may come back elsewhere and otherwise laid out than they went (offloading does that).
    if refuse_backward(p, bool(wanted)) is not None or not all([tma_can_load(t) for t in (p.query, p.key, p.value)]) or too_many_mask_bits(p):
        return triton_run.backward(p, plan, output, grad_out, grad_lse, wanted)
    if not tma_can_load(grad_out):
        grad_out = grad_out.contiguous()
    dlse = None if grad_lse is None else grad_lse.float().contiguous()
    axis, count = chunking(p, backward_config(p).d)
    work = Workspace(p, count)
    for chunk, tensors in chunks(p, axis, count, output.out, output.lse, grad_out, dlse, work.delta, work.dq, work.dk, work.dv):
        run_backward(chunk, plan, work, BackwardTensors(*tensors))
    return Gradients(work.dq, work.dk, work.dv, sinks_gradient(p, output, work.delta))


def run_backward(p: Problem, plan: GpuPlan, work: Workspace, t: BackwardTensors) -> None:
    """One chunk: dQ, dK, dV and delta into their tensors."""
    name = ("hopper backward", backward_key(p, t.out, t.lse, t.grad_out, t.dlse))
    plan.prepared(name, p, lambda: Backward(p, work, t)).run(p, work, t)


class Backward:
    """Three launches: delta, lse and cleared sums of dQ; dK, dV and the sums; dQ from its sums, and again what was found not finite."""

    def __init__(self, p: Problem, work: Workspace, t: BackwardTensors) -> None:
        before = launches.bwd_preprocess_tensors(t.out, t.lse, t.grad_out, t.dlse, t.delta, work)
        after = launches.bwd_postprocess_tensors(p, t.lse, t.grad_out, t.delta, (t.dq, t.dk, t.dv), work)
        self._preprocess = prepare(launches.bwd_preprocess_launch(p, before), p.device)
        self._bwd = prepare(launches.bwd_launch(p, launches.bwd_tensors(p, t.grad_out, t.dk, t.dv, work)), p.device)
        self._postprocess = prepare(launches.bwd_postprocess_launch(p, after), p.device)

    def run(self, p: Problem, work: Workspace, t: BackwardTensors) -> None:
        seed, inputs = seed_of(p), (p.query, p.key, p.value, t.grad_out)
        self._preprocess.launch([t.out, t.grad_out, t.lse, t.dlse, work.lse_padded, work.delta_padded, t.delta, work.dq_sums])
        self._bwd.launch([*inputs, t.dk, t.dv, work.dq_sums, work.lse_padded, work.delta_padded, work.nonfinite, seed])
        self._postprocess.launch([*inputs, t.lse, t.delta, t.dq, t.dk, t.dv, work.dq_sums, work.nonfinite, seed])
