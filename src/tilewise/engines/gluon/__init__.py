"""The Hopper engine: warp-specialised kernels with TMA and wgmma for H100 and H200, programmed by the same masks and scores.

Gluon, the language the kernels are written in, comes with Triton and is imported when the engine first serves a call.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import torch

from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.gluon.config import forward_tile
from tilewise.engines.gluon.patches import HEIGHT, grid_width
from tilewise.engines.gluon.refusals import refuse_backward, refuse_problem
from tilewise.engines.gluon.tile_schedule import too_many_mask_bits
from tilewise.engines.gpu.driver import finds_map_addresses
from tilewise.engines.gpu.engine import GpuEngine, PassModule
from tilewise.engines.gpu.limits import cannot_launch, interpreted, triton_older_than
from tilewise.sizes import less

HOPPER = (9, 0)
ARCHITECTURE = 90
OLDEST_TRITON = (3, 6)
WORTH_IT = 8e9  # FLOPs, about 20 microseconds of GPU time: below that the host's time counts, and two kernels take 20 more of it than one
NO_GLUON = triton_older_than(OLDEST_TRITON)


class GluonEngine(GpuEngine):
    name = "gluon"
    summary = "warp-specialised kernels for Hopper GPUs (H100, H200)"
    serves: ClassVar[Mapping[str, int]] = {"auto": 2, "flex": 1, "flash": 1}
    rounds_key_gradients = True
    min_keys_spared = 768  # sparing 512 was slower: 36 TFLOP/s instead of 47 with a neighborhood of 13 x 13, and 55 instead of 48 backward

    def refuse(self, problem: Problem) -> str | None:
        if NO_GLUON is not None:
            return NO_GLUON
        if problem.device.type != "cuda" or interpreted():
            return f"Query, key, and value must be on a CUDA device, got {problem.device}"
        stopped = cannot_launch()
        if stopped is not None:
            return stopped
        capability = torch.cuda.get_device_capability(problem.device)
        if capability != HOPPER:
            return f"its kernels are for compute capability {HOPPER[0]}.{HOPPER[1]}, the GPU has {capability[0]}.{capability[1]}"
        if not finds_map_addresses():
            return "the CUDA driver keeps the address of a TMA tensor where tilewise does not find it"
        return refuse_problem(problem)

    def defers(self, problem: Problem, others: tuple[Engine, ...]) -> str | None:
        return "so small a problem starts sooner on the Triton engine" if less(problem.flops, WORTH_IT) else None

    def says(self, problem: Problem) -> str:
        if problem.device.type == "cuda" and too_many_mask_bits(problem):
            return f"{self.summary}; its mask decides in too many tiles, which the Triton engine's kernels evaluate one by one"
        reason = refuse_backward(problem, learns=bool(problem.learned))
        return self.summary if reason is None else f"{self.summary}; the backward is the Triton engine's: {reason}"

    def tile(self, problem: Problem) -> tuple[int, int]:
        return forward_tile(problem)

    def own_strips(self, problem: Problem) -> tuple[int, ...] | None:
        if grid_width(problem) is None or too_many_mask_bits(problem):
            return None
        learns = bool(problem.learned)
        trains = torch.is_grad_enabled() and (learns or any([t.requires_grad for t in (problem.query, problem.key, problem.value)]))
        if trains and refuse_backward(problem, learns) is not None:  # the Triton engine's backward reads tokens as they come
            return None
        return (HEIGHT,)

    def passes(self) -> PassModule:
        return _run()

    def background_builds(self) -> Any:
        from tilewise.engines.gluon import background_build

        return background_build


@lru_cache(maxsize=1)
def _run() -> PassModule:
    """The module that imports Triton."""
    from tilewise.engines.gluon import run

    return run
