"""Hopper's forward in CUDA C++: what the Gluon engine does, faster for most problems. The backward is the Gluon engine's.

NVRTC, which compiles the kernel, and Triton, which compiles the rest, are loaded when the engine first serves a call.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.cuda import nvrtc
from tilewise.engines.cuda.refusals import faster_elsewhere, refuse_problem
from tilewise.engines.gluon import GluonEngine
from tilewise.engines.gpu.engine import PassModule


class CudaEngine(GluonEngine):
    name = "cuda"
    summary = "forward in CUDA C++, backward in Gluon, for Hopper GPUs (H100, H200)"
    serves: ClassVar[Mapping[str, int]] = {"auto": 1, "flex": 0, "flash": 0}

    def refuse(self, problem: Problem) -> str | None:
        return super().refuse(problem) or refuse_problem(problem) or nvrtc.refusal()

    def defers(self, problem: Problem, others: tuple[Engine, ...]) -> str | None:
        return (None if problem.dropout_p > 0 else faster_elsewhere(problem)) or super().defers(problem, others)

    def passes(self) -> PassModule:
        return _run()

    def background_builds(self) -> Any:
        from tilewise.engines.cuda import background_build

        return background_build


@lru_cache(maxsize=1)
def _run() -> PassModule:
    """The module that imports Triton."""
    from tilewise.engines.cuda import run

    return run
