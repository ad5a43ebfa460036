"""The FlashAttention-2 kernel that torch ships, called by itself: what torch's SDPA would give a 16-bit call to, if it did not prefer cuDNN's.

SDPA asks cuDNN first on compute capability 9 and 10, for float16 and bfloat16 alone (ATen/native/transformers/cuda/sdp_utils.cpp: priority_order,
can_use_cudnn_attention). In torch 2.11 cuDNN ends calls of ordinary shapes with an illegal memory access, (1, 24, 4608, 128) for one, so tilewise hands it
nothing that the user did not: `auto` and `flash` call this kernel where SDPA's host time is what counts.
"""

from collections.abc import Mapping
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from tilewise.core.output import Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import NOTHING, Engine, Request, rows_are_aligned
from tilewise.engines.gpu.decoding import is_decoding
from tilewise.sizes import less

OLDEST_GPU = (8, 0)
LARGEST_HEAD_DIM = 256
NOT_TRAINED_ON_SMALL_GPUS = range(193, 225)  # head dims whose gradients the kernel does not make there
SMALL_GPUS = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))  # by shared memory
LARGEST_GRID = 65535  # batch elements, and heads
NEWER_TENSOR_CORES = (9, 10)  # major compute capabilities whose tensor cores this kernel's instructions (mma.sync) reach at about half their rate
# Least FLOPs of a forward from which a fused engine serves such a GPU. benchmarks/results/gpu/dense.md: 300 TFLOP/s here, 400 to 600 there; host.md: a tiny
# call takes SDPA 18 microseconds of host time, and the fused engines 33 to 37. 8 GFLOP are 27 microseconds of this kernel: below, the host's time counts.
WORTH_LEAVING = 8e9


class FlashPlan(Plan):
    """Calls the kernel. The scale is part of the call's key; gradients are torch's."""

    def __init__(self, problem: Problem) -> None:
        self._scale = problem.scale

    def replay(self, query: Tensor, key: Tensor, value: Tensor, mask_sources: tuple[Tensor, ...], needs_lse: bool = True) -> Output:
        return Output(flash_attention(query, key, value, self._scale), *NOTHING)


class Fa2Engine(Engine):
    """lse and max_score are empty: torch does not differentiate the kernel's."""

    name = "fa2"
    summary = "torch's FlashAttention-2 kernel, never cuDNN's: float16 and bfloat16 without a mask on NVIDIA GPUs from Ampere on"
    serves: ClassVar[Mapping[str, int]] = {"auto": 0, "flash": 0}
    takes_masks = False
    is_fused = False
    is_torch_function = True

    def refuse(self, problem: Problem) -> str | None:
        p = problem
        if p.device.type != "cuda":
            return f"Query, key, and value must be on a CUDA device, got {p.device}"
        if torch.version.cuda is None:
            return "it needs an NVIDIA GPU; this torch was built for another kind"
        if torch.compiler.is_compiling():  # torch 2.11 fails on it, and on the questions below
            return "torch.compile cannot trace torch's kernel by itself"
        if peek_interpreter_stack() is not None:
            return "torch.func does not transform torch's kernel by itself"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this torch was built without its flash kernels"
        if not torch.backends.cuda.flash_sdp_enabled():
            return "torch's flash kernels are switched off (torch.backends.cuda.enable_flash_sdp, torch.nn.attention.sdpa_kernel)"
        capability = torch.cuda.get_device_capability(p.device)
        if capability < OLDEST_GPU:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}; {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer is needed"
        if p.mask is not None or p.tiles is not None or p.score is not None or p.sinks is not None or p.dropout_p > 0:
            return "it computes attention without mask, score, sinks or dropout"
        return _refuse_tensors(p, capability)

    def refuse_request(self, problem: Problem, request: Request) -> str | None:
        return "torch does not differentiate its lse" if request.needs_lse else None

    def defers(self, problem: Problem, others: tuple[Engine, ...]) -> str | None:
        if torch.cuda.get_device_capability(problem.device)[0] not in NEWER_TENSOR_CORES or is_decoding(problem) or less(problem.flops, WORTH_LEAVING):
            return None
        faster = [e.name for e in others if e.is_fused and e.refuse(problem) is None]
        return f"so large a problem is computed faster by {faster[0]!r}: this kernel's instructions reach half of the GPU's rate" if faster else None

    def plan(self, problem: Problem) -> Plan:
        return FlashPlan(problem)

    def forward(self, problem: Problem, plan: Plan) -> Output:
        return Output(flash_attention(problem.query, problem.key, problem.value, problem.scale), *NOTHING)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> NoReturn:
        raise NotImplementedError("torch differentiates its kernel itself")


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Grouped heads are the kernel's own; keys are split where there are few queries."""
    out: Tensor = torch._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)[0]
    return out


def _refuse_tensors(p: Problem, capability: tuple[int, int]) -> str | None:
    if p.partial:
        return "its lse, by which parts of a row are merged, is not differentiated by torch"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, got {p.dtype}"
    if p.is_empty:
        return f"it needs queries and keys, got {p.describe()}"
    if p.head_dim != p.v_dim or p.head_dim % 8 or p.head_dim > LARGEST_HEAD_DIM:
        return f"it needs one head dim for keys and values, a multiple of 8 up to {LARGEST_HEAD_DIM}, got {p.head_dim} and {p.v_dim}"
    if less(LARGEST_GRID, p.batch) or less(LARGEST_GRID, p.heads):
        return f"it takes up to {LARGEST_GRID} batch elements and heads, got {p.batch} and {p.heads}"
    if not p.scale > 0:
        return f"it takes the largest score before it is scaled, which needs a positive scale, got {p.scale}"
    if not all([rows_are_aligned(t) for t in (p.query, p.key, p.value)]):
        return "it needs rows of consecutive elements that begin on 16 bytes"
    if capability in SMALL_GPUS and p.head_dim in NOT_TRAINED_ON_SMALL_GPUS and any([t.requires_grad for t in p.tensors]):
        return f"it makes no gradients of head dim {p.head_dim} on sm_{capability[0]}{capability[1]}, which has too little shared memory"
    if p.deterministic and not torch.are_deterministic_algorithms_enabled():
        return "its gradients repeat only under torch.use_deterministic_algorithms(True)"
    return None
