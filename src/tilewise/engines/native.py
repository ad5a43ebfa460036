"""The native engine: torch's scaled_dot_product_attention (and so cuDNN), for problems it can express."""

import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import NOTHING, Engine, Request, is_plain, rows_are_aligned
from tilewise.tiles import dense_capture

# From so many on, the C++ engine takes no more time for float32 than SDPA on a CPU, with AVX2 (with AVX-512 from fewer on): forward alone; with gradients,
# which cost a fixed time more, of heads up to NARROW, and of wider ones.
FUSED_QUERIES, TRAINED_QUERIES, TRAINED_WIDE_QUERIES, FUSED_KEYS, NARROW = 64, 192, 320, 64, 64
CUDNN_HEAD_DIM = 512  # above what cuDNN takes; in torch 2.11 that is 256
SDPA = torch._C._nn.scaled_dot_product_attention  # torch's own, even if the name in torch.nn.functional was monkeypatched


class _OwnCall(threading.local):
    running = False


own_call = _OwnCall()  # whether tilewise itself is calling SDPA: interception and watch ignore such calls


class SdpaPlan(Plan):
    """Calls torch's SDPA without a mask tensor. Its options are part of the call's key; gradients are torch's."""

    def __init__(self, problem: Problem) -> None:
        self._options: dict[str, Any] = {"scale": problem.scale}
        if problem.is_causal_only:
            self._options["is_causal"] = True
        if problem.heads != problem.kv_heads:
            self._options["enable_gqa"] = True

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output:
        own_call.running = True
        try:
            return Output(SDPA(query, key, value, **self._options), *NOTHING)
        finally:
            own_call.running = False


def _may_reach_cudnn(problem: Problem) -> bool:
    """cuDNN's kernels take float16 and bfloat16, on compute capability 8 and newer (engines/fa2.py names the source)."""
    if problem.device.type != "cuda" or problem.dtype.itemsize != 2 or torch.version.cuda is None:
        return False
    if max(problem.head_dim, problem.v_dim) > CUDNN_HEAD_DIM:
        return False
    return torch.cuda.get_device_capability(problem.device) >= (8, 0)


def _fused_queries(problem: Problem) -> int:
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in problem.tensors]):
        return FUSED_QUERIES
    return TRAINED_QUERIES if max(problem.head_dim, problem.v_dim) <= NARROW else TRAINED_WIDE_QUERIES


class NativeEngine(Engine):
    """lse and max_score are empty: SDPA does not return them."""

    name = "native"
    summary = "torch SDPA, for problems it can express"
    serves: ClassVar[Mapping[str, int]] = {"auto": 0, "flash": 4}
    is_fused = False
    is_torch_function = True
    takes_dense_mask = True
    looks_at_contents = True

    def refuse(self, problem: Problem) -> str | None:
        if problem.partial:
            return "SDPA returns no lse to merge parts of a row by"
        if problem.dropout_places is not None:
            return "SDPA draws dropout for a whole problem alone, got a part of one"
        if problem.dense_mask is not None:  # asked for by name, with a mask for SDPA itself: what it cannot do it says
            return None
        if problem.score is not None or problem.sinks is not None:
            return "SDPA takes no score function or sinks"
        if problem.tiles is not None:
            return "SDPA takes no tile map"
        if problem.mask is not None and not problem.is_causal_only and self._dense(problem) is None:
            return "SDPA takes no mask but causal and a tensor of (queries, keys)"
        if problem.is_empty:
            return f"SDPA does not define empty problems, got {problem.describe()}"
        if problem.device.type == "cuda" and not all([rows_are_aligned(t) for t in (problem.query, problem.key, problem.value)]):
            return "SDPA's CUDA kernels need rows of consecutive elements that begin on 16 bytes"
        if problem.deterministic and problem.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
            return "SDPA is deterministic on CUDA only under torch.use_deterministic_algorithms(True)"
        return None

    def refuse_request(self, problem: Problem, request: Request) -> str | None:
        if request.backend != self.name and _may_reach_cudnn(problem):
            return "SDPA may hand 16-bit CUDA calls to cuDNN, which ends some with an illegal memory access: it gets them only when asked for by name"
        if request.needs_lse:
            return "SDPA does not return lse"
        if problem.dropout_p > 0 and request.backend != self.name:
            return "SDPA draws its own random numbers for dropout, so only backend='native' uses them"
        if problem.dropout_p > 0 and request.seeded:
            return "SDPA's dropout takes no seed"
        return None

    def defers(self, problem: Problem, others: tuple[Engine, ...]) -> str | None:
        fused = problem.device.type == "cpu" and any([e.is_fused and e.refuse(problem) is None for e in others])
        if problem.mask is not None:
            return self._leaks(problem, fused)
        if problem.dtype.itemsize == 2 and fused:
            return "the C++ engine computes 16-bit inputs faster, and their gradients several times as fast"
        if torch.compiler.is_compiling():  # a graph keeps torch's own operation, whatever the lengths: they may vary
            return None
        if problem.dtype == torch.float32 and fused and problem.q_len >= _fused_queries(problem) and problem.kv_len >= FUSED_KEYS:
            return f"the C++ engine is faster from {_fused_queries(problem)} queries and {FUSED_KEYS} keys on"
        return None

    def _leaks(self, problem: Problem, fused: bool) -> str | None:
        """Why SDPA could let NaN in masked keys through: it multiplies them by 0, and 0 * NaN is NaN."""
        if not problem.is_causal_only:
            return "SDPA lets NaN in masked keys through, so it gets a mask tensor only when asked for by name"
        if fused:
            return "SDPA lets NaN in masked keys through; the C++ engine keeps them out and is no slower"
        if problem.device.type != "cpu" or not is_plain(problem.tensors):
            return "SDPA lets NaN in masked keys through and nobody can look for them now, so it gets a causal mask only when asked for by name"
        if not all([bool(t.detach().sum(dtype=problem.inner_dtype).isfinite()) for t in (problem.key, problem.value)]):
            return "key or value holds NaN or Inf (or values near the end of its range), which SDPA lets through a causal mask"
        return None

    def plan(self, problem: Problem) -> Plan:
        plain = (problem.mask is None or problem.is_causal_only) and problem.dense_mask is None and problem.dropout_p == 0
        return SdpaPlan(problem) if plain else Plan()

    def forward(self, problem: Problem, plan: Plan) -> Output:
        mask = problem.dense_mask if problem.dense_mask is not None else self._dense(problem)
        own_call.running = not torch.compiler.is_compiling()
        try:
            out = SDPA(
                problem.query,
                problem.key,
                problem.value,
                attn_mask=mask,
                dropout_p=problem.dropout_p,
                is_causal=problem.is_causal_only,
                scale=problem.scale,
                **({"enable_gqa": True} if problem.heads != problem.kv_heads else {}),  # decided by `if`: with dynamic=True, torch.compile has no bool here
            )
        finally:
            own_call.running = False
        return Output(out, *NOTHING)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> NoReturn:
        raise NotImplementedError("torch differentiates its SDPA itself")

    @staticmethod
    def _dense(problem: Problem) -> Tensor | None:
        if problem.mask is None or problem.is_causal_only:
            return None
        return dense_capture(problem.mask, (problem.batch, problem.heads, problem.q_len, problem.kv_len))
