"""How a problem becomes launches of the Triton kernels: a pass prepares them once, and runs them for every call like the first."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import remembered
from tilewise.core.output import Gradients, Output
from tilewise.core.problem import Problem
from tilewise.engines.base import EmptyOutputs, attend_nothing, sinks_gradient
from tilewise.engines.gpu import tuning
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.bwd_chunks import chunking, chunks, sums_rows
from tilewise.engines.gpu.config import padded_dim
from tilewise.engines.gpu.decoding import is_decoding
from tilewise.engines.gpu.launch import prepare
from tilewise.engines.gpu.limits import MAX_TILE_SPAN, sm_count, tile_span
from tilewise.engines.gpu.mods import gain_of
from tilewise.engines.gpu.plan import FORWARD, ForwardPass, GpuPlan, backward_key
from tilewise.engines.gpu.tile_classifier import kernel_map
from tilewise.engines.triton import fixed_point, launches
from tilewise.engines.triton.config import BWD, BWD_ATOMIC_DQ, DECODE, MAX_ATOMIC_DQ_DIM, SHIFT_TERMS, SPARSE, table_config
from tilewise.engines.triton.fitting import fitted
from tilewise.engines.triton.kernel_args import BwdTensors
from tilewise.engines.triton.launches import MAX_SPLITS

PROGRAMS_PER_SM, MIN_SPLITS, TILES_PER_SPLIT = 2, 2, 4


def forward(p: Problem, plan: GpuPlan) -> Output:
    if p.query.numel() == 0 or p.key.numel() == 0:
        return attend_nothing(p)
    ready = plan.prepared(FORWARD, p, lambda: _prepared_forward(p))
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))


def _prepared_forward(p: Problem) -> ForwardPass:
    return Decode(p) if is_decoding(p) else Forward(p)


class Forward:
    """One launch: online softmax over the key tiles of every query tile."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        tensors = launches.fwd_tensors(p, *self._outputs(p.query), seed_of(p))
        self._fwd = fitted(p, (fwd_role(p),), lambda configs: launches.fwd_launch(p, tensors, *configs))
        self.device = self._fwd.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Output:
        output = self._outputs(query)
        self._fwd.launch([query, key, value, *output, sinks, seed])
        return output


class Decode:
    """Two launches: the keys are split among programs, and the splits of every row combined."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        self._v_dim, splits = p.v_dim, split_count(p)
        self._shape = (p.batch * p.kv_heads, splits, p.heads // p.kv_heads * p.q_len)
        partial, output = self._partial(p.query), self._outputs(p.query)
        tensors = launches.decode_split_tensors(p, partial, seed_of(p))
        self._split = fitted(p, DECODE, lambda configs: launches.decode_split_launch(p, tensors, splits, *configs))
        self._combine = prepare(launches.decode_combine_launch(p, launches.decode_combine_tensors(p, partial, *output), splits), p.device)
        self.device = self._split.device

    def _partial(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted values, maximum and sum of each split's rows."""
        acc = torch.empty((*self._shape, self._v_dim), dtype=torch.float32, device=query.device)
        row_max, row_sum = acc.new_empty((2, *self._shape)).unbind()
        return acc, row_max, row_sum

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None) -> Output:
        output, partial = self._outputs(query), self._partial(query)
        self._split.launch([query, key, value, *partial, seed])
        self._combine.launch([*partial, *output, sinks])
        return output


def backward(p: Problem, plan: GpuPlan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    if p.score is not None and not all([p.score.captures[k].is_contiguous() for k in wanted]):  # their gradients are added up as if they were
        captures = tuple([t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures)])
        p, plan = p.replaced(score=p.score.with_captures(captures)), GpuPlan(p)  # launches hold the copies' addresses: they serve this call alone
    if tile_span(grad_out) >= MAX_TILE_SPAN:
        grad_out = grad_out.contiguous()
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (p.query, p.key, p.value))
    delta = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    captured: dict[int, Tensor] = {}
    if p.query.numel() and p.key.numel():
        dlse = None if grad_lse is None else grad_lse.float().contiguous()
        axis, count = chunking(p, padded_dim(p.head_dim)) if adds_dq_atomically(p, wanted) else (0, 1)
        for chunk, tensors in chunks(p, axis, count, output.out, output.lse, grad_out, dlse, delta, dq, dk, dv):
            captured = run_backward(chunk, plan, wanted, BackwardTensors(*tensors))
    else:
        captured = {k: torch.zeros_like(p.score.captures[k]) for k in wanted} if p.score is not None else {}
        delta = delta.zero_() if grad_lse is None else -grad_lse
        for t in (dq, dk, dv):
            t.zero_()
    return Gradients(dq, dk, dv, sinks_gradient(p, output, delta), captured)


class BackwardTensors(NamedTuple):
    """What a backward, or a chunk of one, is given beside the problem, and what it fills: delta and the gradients."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    dlse: Tensor | None
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run_backward(p: Problem, plan: GpuPlan, wanted: frozenset[int], t: BackwardTensors) -> dict[int, Tensor]:
    """One chunk: dQ, dK, dV and delta into their tensors; the gradients of the wanted captures by slot."""
    name = ("backward", backward_key(p, t.out, t.lse, t.grad_out, t.dlse), wanted)
    return plan.prepared(name, p, lambda: _prepared_backward(p, wanted, t)).run(p, t)


def _prepared_backward(p: Problem, wanted: frozenset[int], t: BackwardTensors) -> "BackwardPass":
    if adds_dq_atomically(p, wanted):
        return AtomicDqBackward(p, wanted, t)
    if not wanted:
        return Backward(p, wanted, t)
    return FixedPointBackward(p, wanted, t) if p.deterministic else CapturesBackward(p, wanted, t)


def adds_dq_atomically(p: Problem, wanted: frozenset[int]) -> bool:
    """Whether the programs that make dK and dV add up dQ too, in any order: five products a tile instead of seven. In 32 bits, and with wider heads, there
    are no registers for it."""
    return p.dtype != torch.float32 and max(p.head_dim, p.v_dim) <= MAX_ATOMIC_DQ_DIM and not p.deterministic and not wanted


class BackwardPass(ABC):
    """delta (`bwd_preprocess`), then the gradients, which are made in one of four ways."""

    def __init__(self, p: Problem, wanted: frozenset[int], t: BackwardTensors) -> None:
        self._wanted = wanted
        shift = shift_terms(p)
        tensors = launches.bwd_preprocess_tensors(t.out, t.grad_out, t.lse, t.dlse, t.delta, shift)
        self._preprocess = prepare(launches.bwd_preprocess_launch(p, tensors), p.device)
        if tuning.is_on():  # trials of the kernels that follow should see numbers
            self._preprocess.launch([t.out, t.grad_out, t.lse, t.dlse, t.delta, shift])
        self._prepare(p, launches.bwd_tensors(p, t.grad_out, t.lse, t.delta, shift, (t.dq, t.dk, t.dv), seed_of(p)))

    @abstractmethod
    def _prepare(self, p: Problem, tensors: BwdTensors) -> None: ...

    def run(self, p: Problem, t: BackwardTensors) -> dict[int, Tensor]:
        shift = shift_terms(p)
        self._preprocess.launch([t.out, t.grad_out, t.lse, t.dlse, t.delta, shift])
        return self._launch(p, [p.query, p.key, p.value, t.grad_out, t.lse, t.delta, shift, t.dq, t.dk, t.dv, seed_of(p)])

    @abstractmethod
    def _launch(self, p: Problem, tensors: list[Tensor | None]) -> dict[int, Tensor]:
        """`tensors` in the order of launches.bwd_tensors; the gradients of captures by slot."""


class Backward(BackwardPass):
    """dK and dV of key tiles and dQ of query tiles, every sum in one program's registers: the same every time."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        self._bwd = fitted(p, BWD, lambda configs: launches.bwd_launch(p, tensors, frozenset(), *configs))

    def _launch(self, p: Problem, tensors: list[Tensor | None]) -> dict[int, Tensor]:
        self._bwd.launch(tensors)
        return {}


class AtomicDqBackward(BackwardPass):
    """Programs of key tiles add up dQ in memory, and `dq_postprocess` takes it from there."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        sums = self._sums(p)
        given = tensors._replace(dq_sums=(sums,))
        self._bwd = fitted(p, BWD_ATOMIC_DQ, lambda configs: launches.bwd_atomic_dq_launch(p, given, *configs))
        after = launches.dq_postprocess_tensors(p, tensors.do, tensors.lse, tensors.delta, tensors.dq, sums, tensors.seed)
        self._postprocess = prepare(launches.dq_postprocess_launch(p, after, table_config("dkdv_atomic_dq", p)), p.device)

    def _sums(self, p: Problem) -> Tensor:
        return torch.zeros((sums_rows(p), padded_dim(p.head_dim)), dtype=torch.float32, device=p.device)

    def _launch(self, p: Problem, tensors: list[Tensor | None]) -> dict[int, Tensor]:
        sums = self._sums(p)
        self._bwd.launch([*tensors, sums])
        query, key, value, grad_out, lse, delta, _, dq, _, _, seed = tensors
        self._postprocess.launch([query, key, value, grad_out, lse, delta, dq, sums, seed])
        return {}


class CapturesBackward(BackwardPass):
    """Programs of query tiles also add the shares of the captures' gradients atomically, in any order."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        given = tensors._replace(capture_grads=self._sums(p))
        self._bwd = fitted(p, BWD, lambda configs: launches.bwd_launch(p, given, self._wanted, *configs))

    def _sums(self, p: Problem) -> tuple[Tensor, ...]:
        return fixed_point.zeros(p, self._wanted, accum_dtype(p))

    def _launch(self, p: Problem, tensors: list[Tensor | None]) -> dict[int, Tensor]:
        sums = self._sums(p)
        self._bwd.launch([*tensors, *sums])
        return {k: _as_gradient(p, k, sums[k]) for k in self._wanted}


class FixedPointBackward(BackwardPass):
    """Shares of the captures' gradients are measured first, then added as integers: the same every time (fixed_point.py)."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        gauges = fixed_point.gauges(p, self._wanted)
        measured = tensors._replace(capture_grads=gauges.arguments)
        added = tensors._replace(capture_grads=fixed_point.totals(p, self._wanted, gauges.limits).arguments)
        self._gauge = fitted(p, BWD, lambda configs: launches.gauge_launch(p, measured, self._wanted, *configs))
        self._bwd = fitted(p, BWD, lambda configs: launches.bwd_launch(p, added, self._wanted, *configs))

    def _launch(self, p: Problem, tensors: list[Tensor | None]) -> dict[int, Tensor]:
        gauges = fixed_point.gauges(p, self._wanted)
        self._gauge.launch([*tensors, *gauges.arguments])
        totals = fixed_point.totals(p, self._wanted, gauges.limits)
        self._bwd.launch([*tensors, *totals.arguments])
        return {k: _as_gradient(p, k, fixed_point.gradient(k, totals, gauges)) for k in self._wanted}


def _as_gradient(p: Problem, slot: int, sums: Tensor) -> Tensor:
    """Of a capture, from the sum of its shares."""
    assert p.score is not None
    gain = gain_of(p)
    return (sums if gain == 1.0 else sums * gain).to(p.score.captures[slot].dtype)


def accum_dtype(p: Problem) -> torch.dtype:
    """What shares of the captures' gradients are added up in: more digits than they have."""
    return torch.float64 if p.dtype == torch.float32 else torch.float32


def shift_terms(p: Problem) -> Tensor | None:
    """Room for -lse and -delta of each query, each as the sum of 16-bit terms that a product can add; 32-bit products need none."""
    return None if p.dtype == torch.float32 else p.query.new_empty((p.batch * p.heads * p.q_len, 2, SHIFT_TERMS))


# -- which kernels -------------------------------------------------------------------------------------------------------


def fwd_role(p: Problem) -> str:
    """Which table of configurations a forward takes, by how much of its map is computed."""
    roles = fwd_roles(p)
    if len(roles) == 1 or p.device.type == "meta":
        return roles[0]
    small = table_config("sparse_fwd", p)
    tile_map = kernel_map(p, (small.m, small.n))
    assert tile_map is not None
    computed: float = remembered(tile_map, "computed", lambda: 1.0 - tile_map.sparsity)
    return "sparse_fwd" if computed < SPARSE else "fwd"


def fwd_roles(p: Problem) -> tuple[str, ...]:
    """Those that may be taken."""
    mapped = p.mask is not None and p.given_tiles is None
    return ("fwd", "sparse_fwd") if mapped and table_config("sparse_fwd", p) != table_config("fwd", p) else ("fwd",)


def split_count(p: Problem) -> int:
    """As many programs as run at a time, each with a few key tiles at least; but one of a (batch, head) alone would end late."""
    tiles = -(-p.kv_len // table_config("decode", p).n)
    wanted = -(-PROGRAMS_PER_SM * sm_count(p.device) // (p.batch * p.kv_heads))
    return max(1, min(max(wanted, MIN_SPLITS), tiles // TILES_PER_SPLIT, MAX_SPLITS))
