"""The Triton engine: portable fused kernels into which masks and scores are compiled.

Triton is imported when the engine first serves a call, never by `import tilewise`.
"""

import importlib.metadata
import importlib.util
import os
from abc import abstractmethod
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import Engine, Gradients, Output
from tilewise.engines.triton.builds import Beside
from tilewise.problem import Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_TILE = 16  # rows or keys that a product needs
MOST_ROWS, FARTHEST = 256, 2**30  # of a tile: rows, and elements from its first to its last
WIDE_HEAD, SHARED_BY_WIDE = 256, 145 * 1024  # gradients of wider heads take so many bytes of shared memory in 32 bits, in the smallest tiles
SHARED_MEMORY = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}  # bytes that a program may have
LEAST_SHARED = 99 * 1024  # on all other GPUs
OLDEST_GPU = (8, 0)
OLDEST_TRITON = (3, 3)


class KernelEngine(Engine):
    """An engine of Triton kernels, which start on the current device: that need not be the tensors'."""

    @abstractmethod
    def kernels(self) -> Any:
        """The module that imports Triton."""

    @abstractmethod
    def soon(self) -> Any:
        """The module that starts building what a call will want."""

    def forward(self, problem: Problem) -> Output:
        with Beside(lambda: self.soon().forward(problem)):
            if on_current_device(problem.device):
                return self.kernels().forward(problem)
            with torch.cuda.device(problem.device):
                return self.kernels().forward(problem)

    def backward(self, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        with Beside(lambda: self.soon().backward(problem, wanted)):
            if on_current_device(problem.device):
                return self.kernels().backward(problem, output, grad_out, grad_lse, wanted)
            with torch.cuda.device(problem.device):
                return self.kernels().backward(problem, output, grad_out, grad_lse, wanted)


class TritonEngine(KernelEngine):
    name = "triton"
    summary = "fused kernels, forward, backward and decode, on NVIDIA GPUs from Ampere on"

    def refuse(self, problem: Problem) -> str | None:
        if MISSING is not None:
            return MISSING
        if not interpreted():
            if problem.device.type != "cuda":
                return f"Query, key, and value must be on a CUDA device, got {problem.device}"
            capability = torch.cuda.get_device_capability(problem.device)
            if capability < OLDEST_GPU:
                return f"the GPU has compute capability {capability[0]}.{capability[1]}; {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer is needed"
            wide = too_wide(problem, 10 * capability[0] + capability[1])
            if wide is not None and any([t.requires_grad for t in problem.tensors]):
                return wide
        if problem.dtype not in DTYPES:
            return f"it computes in float16, bfloat16 and float32, got {problem.dtype}"
        far = too_far(problem)
        if far is not None:
            return far
        if problem.tiles is not None and problem.tiles.given:
            tile = problem.tiles.tile
            if any([side % LEAST_TILE for side in tile]):
                return f"it needs given tiles that are multiples of {LEAST_TILE}, got {tile}"
        return None

    def tile(self, problem: Problem) -> tuple[int, int]:
        from tilewise.engines.triton.config import choose

        config = choose("sparse", problem)
        return config.m, config.n

    def kernels(self) -> Any:
        return _run()

    def soon(self) -> Any:
        from tilewise.engines.triton import soon

        return soon


def shared_memory(arch: int) -> int:
    return SHARED_MEMORY.get(arch, LEAST_SHARED)


def too_wide(problem: Problem, arch: int) -> str | None:
    """Why a GPU cannot make the gradients of a problem."""
    widest, shared = max(problem.head_dim, problem.v_dim), shared_memory(arch)
    if problem.dtype != torch.float32 or widest <= WIDE_HEAD or shared >= SHARED_BY_WIDE:
        return None
    return (
        f"gradients of float32 head dims above {WIDE_HEAD} take {SHARED_BY_WIDE // 1024} KiB of shared memory, "
        f"got {widest} for sm_{arch}, which has {shared // 1024} KiB; bfloat16 and float16 take less"
    )


def too_far(problem: Problem) -> str | None:
    for name, t in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        if reach(t) >= FARTHEST:
            return f"it needs rows of a tile within {FARTHEST} elements of each other, {name}'s strides are {tuple(t.stride())}; {name}.contiguous() serves"
    return None


def reach(t: Tensor) -> int:
    """How far the last element of a tile may lie from its first: kernels know offsets within a tile by 30 bits (see steps.load_rows)."""
    return (min(t.shape[2], MOST_ROWS) - 1) * t.stride(2) + (t.shape[3] - 1) * t.stride(3)


@lru_cache(maxsize=1)
def _run() -> Any:
    """The module that imports Triton."""
    from tilewise.engines.triton import run

    return run


def _missing() -> str | None:
    """Why Triton cannot be used at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "it is not usable because of missing package 'triton': pip install triton"
    installed = importlib.metadata.version("triton")
    if tuple(int(x) for x in installed.split(".")[:2]) < OLDEST_TRITON:
        return f"it needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer, {installed} is installed"
    return None


MISSING = _missing()


def interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_current_device(device: torch.device) -> bool:
    """Kernels start on the current device, which need not be the tensors'."""
    return device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device()
