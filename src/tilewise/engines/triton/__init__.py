"""The Triton engine: portable fused kernels into which masks and scores are compiled."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch

from tilewise.core.problem import FLOAT8, Problem
from tilewise.engines.dropout import refuse_scattered
from tilewise.engines.gpu.engine import GpuEngine, PassModule
from tilewise.engines.gpu.limits import NO_TRITON, cannot_launch, interpreted, rows_too_far_apart, shared_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_DIM = 512
MIN_TILE = 16  # rows or keys that tl.dot needs
WIDE_HEAD, WIDE_HEAD_SHARED_MEMORY = 256, 145 * 1024  # float32 gradients of wider heads take so many bytes of shared memory, in the smallest tiles
OLDEST_GPU = (8, 0)
FLOAT8_GPU = (8, 9)


class TritonEngine(GpuEngine):
    name = "triton"
    summary = "fused kernels, forward, backward and decode, on NVIDIA GPUs from Ampere on"
    serves: ClassVar[Mapping[str, int]] = {"auto": 3, "flex": 2, "flash": 2}
    takes_pages = True

    def refuse(self, problem: Problem) -> str | None:
        if NO_TRITON is not None:
            return NO_TRITON
        if not interpreted():
            if problem.device.type != "cuda":
                return f"Query, key, and value must be on a CUDA device, got {problem.device}"
            stopped = cannot_launch()
            if stopped is not None:
                return stopped
            capability = torch.cuda.get_device_capability(problem.device)
            if capability < OLDEST_GPU:
                return f"the GPU has compute capability {capability[0]}.{capability[1]}; {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer is needed"
            if problem.key.dtype in FLOAT8 and capability < FLOAT8_GPU:
                return f"it reads float8 pages from compute capability {FLOAT8_GPU[0]}.{FLOAT8_GPU[1]} on, the GPU has {capability[0]}.{capability[1]}"
            wide = too_wide(problem, 10 * capability[0] + capability[1])
            if wide is not None and any([t.requires_grad for t in problem.tensors]):
                return wide
        if problem.dtype not in DTYPES:
            return f"it computes in float16, bfloat16 and float32, got {problem.dtype}"
        if max(problem.head_dim, problem.v_dim) > LARGEST_HEAD_DIM:
            return f"it needs head dims up to {LARGEST_HEAD_DIM}, got {problem.head_dim} and {problem.v_dim}"
        far = rows_too_far_apart(problem)
        if far is not None:
            return far
        if problem.given_tiles is not None:
            tile = problem.given_tiles.tile
            if any([side % MIN_TILE for side in tile]):
                return f"it needs given tiles that are multiples of {MIN_TILE}, got {tile}"
        return refuse_scattered(problem)

    def tile(self, problem: Problem) -> tuple[int, int]:
        from tilewise.engines.triton.config import table_config

        config = table_config("sparse_fwd", problem)
        return config.m, config.n

    def passes(self) -> PassModule:
        return _run()

    def background_builds(self) -> Any:
        from tilewise.engines.triton import background_build

        return background_build


def too_wide(problem: Problem, arch: int) -> str | None:
    """Why a GPU cannot make the gradients of a problem."""
    widest, shared = max(problem.head_dim, problem.v_dim), shared_memory(arch)
    if problem.dtype != torch.float32 or widest <= WIDE_HEAD or shared >= WIDE_HEAD_SHARED_MEMORY:
        return None
    return (
        f"gradients of float32 head dims above {WIDE_HEAD} take {WIDE_HEAD_SHARED_MEMORY // 1024} KiB of shared memory, "
        f"got {widest} for sm_{arch}, which has {shared // 1024} KiB; bfloat16 and float16 take less"
    )


@lru_cache(maxsize=1)
def _run() -> PassModule:
    """The module that imports Triton."""
    from tilewise.engines.triton import run

    return run
