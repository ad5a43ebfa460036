"""How a problem becomes launches of the Triton kernels: a pass prepares them once, and runs them for every call like the first."""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any, NamedTuple

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
from tilewise.engines.gpu.device_map import device_map_of, is_made_on_device
from tilewise.engines.gpu.launch import prepare
from tilewise.engines.gpu.limits import MAX_TILE_SPAN, sm_count, tile_span
from tilewise.engines.gpu.mods import gain_of
from tilewise.engines.gpu.plan import FORWARD, GpuPlan, backward_name
from tilewise.engines.gpu.structure import Pass
from tilewise.engines.gpu.tile_classifier import kernel_map
from tilewise.engines.gpu.workspace import Part, Workspace
from tilewise.engines.triton import fixed_point, launches
from tilewise.engines.triton.config import BWD, BWD_ATOMIC_DQ, DECODE, DEEP_DECODE, MAX_ATOMIC_DQ_DIM, SHIFT_TERMS, SPARSE, table_config
from tilewise.engines.triton.fitting import fitted
from tilewise.engines.triton.kernel_args import BwdTensors
from tilewise.engines.triton.launches import MAX_SPLITS
from tilewise.lang import Program

PROGRAMS_PER_SM, DEEP_PER_SM, TILES_PER_SPLIT = 3, 2, 4  # of decoding: what registers and shared memory allow in either role, and tiles at least
# In the time in which one of that many programs reads a key tile (2.7 us of 64 keys and values of head dim 128 on an H200): what a program takes besides,
# what combining takes, and how much faster programs get when they are alone on their multiprocessors.
PROGRAM, COMBINE, LONE = 0.55, 1.9, 0.5


def forward(p: Problem, plan: GpuPlan) -> Output:
    if p.query.numel() == 0 or p.key.numel() == 0:
        return attend_nothing(p)
    if p.pages is not None and p.pages.ends_say_all and is_decoding(p):
        p = p.replaced(mask=None)
    ready = plan.prepared(FORWARD, p, "triton", lambda: _prepared_forward(p))
    return ready.run(p.query, p.key, p.value, p.sinks, seed_of(p))


def _prepared_forward(p: Problem) -> "Forward | DecodeWhole | Decode":
    if not is_decoding(p):
        return Forward(p)
    splits = split_count(p)
    return DecodeWhole(p) if splits == 1 else Decode(p, splits)


class Forward(Pass):
    """One launch: online softmax over the key tiles of every query tile."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        tensors = launches.fwd_tensors(p, *self._outputs(p.query)[0], seed_of(p))
        self._fwd = fitted(p, (fwd_role(p),), lambda configs: launches.fwd_launch(p, tensors, *configs))
        self.device = self._fwd.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output:
        output, filled = self._outputs(query, needs_lse)
        self._fwd.launch([query, key, value, *filled, sinks, seed])
        return output


class DecodeWhole(Pass):
    """One launch: a program for every key head, with all its keys."""

    def __init__(self, p: Problem) -> None:
        self._outputs = EmptyOutputs(p)
        tensors = launches.decode_whole_tensors(p, *self._outputs(p.query)[0], seed_of(p))
        self._decode = fitted(p, DEEP_DECODE if decodes_deeply(p) else DECODE, lambda configs: launches.decode_split_launch(p, tensors, 1, *configs))
        self.device = self._decode.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output:
        output, filled = self._outputs(query, needs_lse)
        self._decode.launch([query, key, value, None, None, None, *filled, sinks, seed])
        return output


class Decode(Pass):
    """Two launches: the keys are split among programs, and the splits of every row combined."""

    def __init__(self, p: Problem, splits: int) -> None:
        self._outputs = EmptyOutputs(p)
        self._workspace = decode_workspace(p, splits)
        output, _ = self._outputs(p.query)
        partial = launches.Partial(*self._workspace.tensors(self._workspace.allocate()))
        tensors = launches.decode_split_tensors(p, partial, seed_of(p))
        self._split = fitted(p, DECODE, lambda configs: launches.decode_split_launch(p, tensors, splits, *configs))
        self._combine = prepare(launches.decode_combine_launch(p, launches.decode_combine_tensors(p, partial, *output), splits), p.device)
        self.device = self._split.device

    def run(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, seed: Tensor | None, needs_lse: bool = True) -> Output:
        output, filled = self._outputs(query, needs_lse)
        memory = self._workspace.allocate()
        partial = self._workspace.parts(memory)
        self._split.launch([query, key, value, *partial, None, None, None, None, seed])
        self._combine.launch([*partial, *filled, sinks])
        return output


def decode_workspace(p: Problem, splits: int) -> Workspace:
    """Of launches.Partial."""
    rows = (p.batch * p.kv_heads, splits, p.heads // p.kv_heads * p.q_len)
    return Workspace(p.device, Part((*rows, p.v_dim)), Part(rows), Part(rows))


def backward(p: Problem, plan: GpuPlan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
    if p.score is not None and not all([p.score.captures[k].is_contiguous() for k in wanted]):  # their gradients are added up as if they were
        captures = tuple([t.contiguous() if k in wanted else t for k, t in enumerate(p.score.captures)])
        p, plan = p.replaced(score=p.score.with_captures(captures)), GpuPlan(p)  # launches hold the copies' addresses: they serve this call alone
    if grad_out.dtype != p.dtype:
        grad_out = grad_out.to(p.dtype)
    if not grad_out.is_contiguous() and tile_span(grad_out) >= MAX_TILE_SPAN:
        grad_out = grad_out.contiguous()
    dq, dk, dv = [torch.empty_like(t, dtype=p.result_dtype) for t in (p.query, p.key, p.value)]
    delta = None if p.sinks is None else torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    captured: dict[int, Tensor] = {}
    if p.query.numel() and p.key.numel():
        dlse = None if grad_lse is None else grad_lse.float().contiguous()
        axis, count = chunking(p, padded_dim(p.head_dim)) if adds_dq_atomically(p, wanted) else (0, 1)
        for chunk, tensors in chunks(p, axis, count, output.out, output.lse, grad_out, dlse, delta, dq, dk, dv):
            captured = run_backward(chunk, plan, wanted, BackwardTensors(*tensors))
    else:
        captured = {k: torch.zeros_like(p.score.captures[k]) for k in wanted} if p.score is not None else {}
        delta = torch.zeros_like(output.lse) if grad_lse is None else -grad_lse
        for t in (dq, dk, dv):
            t.zero_()
    return Gradients(dq, dk, dv, None if delta is None else sinks_gradient(p, output, delta), captured)


class BackwardTensors(NamedTuple):
    """What a backward, or a chunk of one, is given beside the problem, and what it fills: the gradients, and delta, if it is asked for."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    dlse: Tensor | None
    delta: Any  # a tensor, its address, or None
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run_backward(p: Problem, plan: GpuPlan, wanted: frozenset[int], t: BackwardTensors) -> dict[int, Tensor]:
    """One chunk: dQ, dK, dV and delta into their tensors; the gradients of the wanted captures by slot."""
    name = backward_name(p, t.out, t.lse, t.grad_out, t.dlse, wanted)
    return plan.prepared(name, p, "triton", lambda: _prepared_backward(p, wanted, t)).run(p, t)


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


class BackwardPass(Pass, ABC):
    """delta (`bwd_preprocess`), then the gradients, which are made in one of four ways."""

    def __init__(self, p: Problem, wanted: frozenset[int], t: BackwardTensors) -> None:
        self._wanted = wanted
        self._workspace = backward_workspace(p, wanted)
        delta, shift, dq_sums = self._workspace.tensors(self._workspace.allocate())
        delta = delta if t.delta is None else t.delta
        before = launches.bwd_preprocess_tensors(t.out, t.grad_out, t.lse, t.dlse, delta, shift, dq_sums)
        self._preprocess = prepare(launches.bwd_preprocess_launch(p, before), p.device)
        if tuning.is_on():  # trials of the kernels that follow should see numbers
            self._preprocess.bind(p, device_map_of).launch(before)
        self._prepare(p, launches.bwd_tensors(p, t.grad_out, t.lse, delta, shift, (t.dq, t.dk, t.dv), seed_of(p), dq_sums))

    @abstractmethod
    def _prepare(self, p: Problem, tensors: BwdTensors) -> None: ...

    def run(self, p: Problem, t: BackwardTensors) -> dict[int, Tensor]:
        memory = self._workspace.allocate()
        delta, shift, dq_sums = self._workspace.parts(memory)
        delta = delta if t.delta is None else t.delta
        self._preprocess.launch([t.out, t.grad_out, t.lse, t.dlse, delta, shift, dq_sums])
        tensors = [p.query, p.key, p.value, t.grad_out, t.lse, delta, shift, t.dq, t.dk, t.dv, seed_of(p)]
        return self._launch(p, tensors if dq_sums is None else [*tensors, dq_sums])

    @abstractmethod
    def _launch(self, p: Problem, tensors: list[Any]) -> dict[int, Tensor]:
        """`tensors` in the order of launches.bwd_tensors; the gradients of captures by slot."""


class Backward(BackwardPass):
    """dK and dV of key tiles and dQ of query tiles, every sum in one program's registers: the same every time."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        self._bwd = fitted(p, BWD, lambda configs: launches.bwd_launch(p, tensors, frozenset(), *configs))

    def _launch(self, p: Problem, tensors: list[Any]) -> dict[int, Tensor]:
        self._bwd.launch(tensors)
        return {}


class AtomicDqBackward(BackwardPass):
    """Programs of key tiles add up dQ in memory, and `dq_postprocess` takes it from there."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        self._bwd = fitted(p, BWD_ATOMIC_DQ, lambda configs: launches.bwd_atomic_dq_launch(p, tensors, *configs))
        after = launches.dq_postprocess_tensors(p, tensors.do, tensors.lse, tensors.delta, tensors.dq, tensors.dq_sums[0], tensors.seed)
        self._postprocess = prepare(launches.dq_postprocess_launch(p, after, table_config("dkdv_atomic_dq", p)), p.device)

    def _launch(self, p: Problem, tensors: list[Any]) -> dict[int, Tensor]:
        self._bwd.launch(tensors)
        query, key, value, grad_out, lse, delta, _, dq, _, _, seed, dq_sums = tensors
        self._postprocess.launch([query, key, value, grad_out, lse, delta, dq, dq_sums, seed])
        return {}


class CapturesBackward(BackwardPass):
    """Programs of query tiles also add the shares of the captures' gradients atomically, in any order."""

    def _prepare(self, p: Problem, tensors: BwdTensors) -> None:
        given = tensors._replace(capture_grads=self._sums(p))
        self._bwd = fitted(p, BWD, lambda configs: launches.bwd_launch(p, given, self._wanted, *configs))

    def _sums(self, p: Problem) -> tuple[Tensor, ...]:
        return fixed_point.zeros(p, self._wanted, accum_dtype(p))

    def _launch(self, p: Problem, tensors: list[Any]) -> dict[int, Tensor]:
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

    def _launch(self, p: Problem, tensors: list[Any]) -> dict[int, Tensor]:
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


def backward_workspace(p: Problem, wanted: frozenset[int]) -> Workspace:
    """Of three parts: delta, unless it has a tensor of its own; -lse and -delta of each query, each as the sum of 16-bit terms that a product can add (32-bit
    products need none); and dQ's sums, where it is added up in memory."""
    delta = Part((p.batch, p.heads, p.q_len)) if p.sinks is None else None
    shift = Part((p.batch * p.heads * p.q_len, 2, SHIFT_TERMS), p.dtype) if p.dtype != torch.float32 else None
    return Workspace(p.device, delta, shift, Part((sums_rows(p), padded_dim(p.head_dim))) if adds_dq_atomically(p, wanted) else None)


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
    """Those that may be taken. Nobody looks at maps that are made on the device: those of masks that load from tensors by query and by key (documents) are
    likely to be sparse, those by one of them (padding) are not."""
    if p.mask is None or p.given_tiles is not None or table_config("sparse_fwd", p) == table_config("fwd", p):
        return ("fwd",)
    if is_made_on_device(p):
        return ("sparse_fwd",) if loads_by_query_and_key(p.mask.program) else ("fwd",)
    return "fwd", "sparse_fwd"


def loads_by_query_and_key(program: Program) -> bool:
    loaded_by = [program.dependencies[k] for k, instruction in enumerate(program.instructions) if instruction.op == "load"]
    return {"q", "kv"} <= frozenset().union(*loaded_by)


def split_count(p: Problem) -> int:
    return best_split_count(key_tiles(p), p.batch * p.kv_heads, sm_count(p.device), has_depth(p))


def decodes_deeply(p: Problem) -> bool:
    """Whether programs that have all keys of a head do better with two on a multiprocessor."""
    return has_depth(p) and is_deep(key_tiles(p), p.batch * p.kv_heads, sm_count(p.device))


def has_depth(p: Problem) -> bool:
    """float32 leaves no room for another tile."""
    return p.dtype != torch.float32


def key_tiles(p: Problem) -> int:
    return -(-p.kv_len // table_config("decode", p).n)


@lru_cache(maxsize=1024)
def best_split_count(tiles: int, heads: int, sms: int, may_be_deep: bool) -> int:
    """Of the keys of each head, `tiles` key tiles: the count that takes the shortest time."""

    def time(splits: int) -> float:
        per_sm = DEEP_PER_SM if splits == 1 and may_be_deep and is_deep(tiles, heads, sms) else PROGRAMS_PER_SM
        return decode_time(tiles, heads, splits, sms, per_sm)

    return min(range(1, max(1, min(tiles // TILES_PER_SPLIT, MAX_SPLITS)) + 1), key=time)


def is_deep(tiles: int, heads: int, sms: int) -> bool:
    return decode_time(tiles, heads, 1, sms, DEEP_PER_SM) < decode_time(tiles, heads, 1, sms, PROGRAMS_PER_SM)


def decode_time(tiles: int, heads: int, splits: int, sms: int, per_sm: int) -> float:
    """In key tiles of PROGRAMS_PER_SM programs, where `per_sm` programs run on a multiprocessor at a time.

    Memory is the limit: the fewer share a multiprocessor, the faster is each, and so are programs in a last round that is not full, but not by more than
    1 / LONE. The more splits, the shorter is that round; but each program takes time to begin and to store what it found, and two splits and more are combined
    by another launch.
    """
    share = per_sm / PROGRAMS_PER_SM
    full, rest = divmod(heads * splits, per_sm * sms)
    rounds = full + (max(rest / (per_sm * sms), LONE / share) if rest else 0.0)
    return (-(-tiles // splits) * share + PROGRAM) * rounds + (COMBINE if splits > 1 else 0.0)
