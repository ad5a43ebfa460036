"""What Triton, a GPU and the kernels' address arithmetic allow. Nothing here imports Triton."""

import importlib.metadata
import importlib.util
import os
import sys
from functools import lru_cache

import torch
from torch import Tensor

from tilewise.core.problem import Problem

MAX_TILE_ROWS = 256
MAX_TILE_SPAN = 2**30  # elements from the first to the last of a tile: kernels hold offsets within a tile in 30 bits
SHARED_MEMORY = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}  # bytes a thread block may have, by architecture
MIN_SHARED_MEMORY = 99 * 1024  # on all other GPUs
OLDEST_TRITON = (3, 3)
INTERPRETED_SMS = 4
DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm", "pytorch-triton-xpu")  # packages that bring a module named triton


def shared_memory(arch: int) -> int:
    return SHARED_MEMORY.get(arch, MIN_SHARED_MEMORY)


def rows_too_far_apart(problem: Problem) -> str | None:
    """Why the rows of a tile cannot be addressed; None if they can."""
    for name, t in (("query", problem.query), ("key", problem.key), ("value", problem.value)):
        if tile_span(t) >= MAX_TILE_SPAN:
            return (
                f"it needs rows of a tile within {MAX_TILE_SPAN} elements of each other, {name}'s strides are {tuple(t.stride())}; {name}.contiguous() serves"
            )
    return None


def tile_span(t: Tensor) -> int:
    """How far the last element of a tile may lie from its first (see primitives.load_rows)."""
    return (min(t.shape[2], MAX_TILE_ROWS) - 1) * t.stride(2) + (t.shape[3] - 1) * t.stride(3)


def triton_older_than(oldest: tuple[int, int]) -> str | None:
    """Why the installed Triton cannot be used; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    installed = _triton_version()
    if installed is not None and tuple(int(x) for x in installed.split(".")[:2]) < oldest:
        return f"it needs Triton {oldest[0]}.{oldest[1]} or newer, {installed} is installed"
    return None


def _triton_version() -> str | None:
    """The version of whichever package brought Triton; None if it is a copy that no package brought, which is taken for a new one."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cannot_launch() -> str | None:
    """Why no kernel can be launched on this machine's GPUs: they are loaded by NVIDIA's driver, through its library for Linux."""
    if torch.version.cuda is None:
        return "it needs an NVIDIA GPU; this torch was built for another kind"
    if sys.platform != "linux":
        return f"it loads its kernels through the CUDA driver's library for Linux, got {sys.platform}"
    return None


NO_TRITON = triton_older_than(OLDEST_TRITON)


def interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few for Triton's interpreter, so that small tests split their keys."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else INTERPRETED_SMS


def free_sms(problem: Problem) -> int:
    """Those that a persistent kernel may hold to its end."""
    return max(2, sm_count(problem.device) - problem.busy_sms)  # a cluster has two programs
