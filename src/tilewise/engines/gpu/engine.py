"""An engine whose kernels Triton compiles."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.gpu.build_queue import on_first_build
from tilewise.engines.gpu.driver import current_device
from tilewise.engines.gpu.plan import GpuPlan


class PassModule(Protocol):
    """An engine's run.py. Importing it imports what launches kernels."""

    def forward(self, p: Problem, plan: Any) -> Output: ...

    def backward(self, p: Problem, plan: Any, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients: ...


class GpuEngine(Engine):
    """Kernels are launched on the current device, which need not be the tensors'. Triton is imported when the engine first serves a call."""

    @abstractmethod
    def passes(self) -> PassModule: ...

    @abstractmethod
    def background_builds(self) -> Any:
        """The module that starts building in the background what a call will want next."""

    def plan(self, problem: Problem) -> GpuPlan:
        return GpuPlan(problem)

    def is_capturable(self, problem: Problem) -> bool:
        from tilewise.engines.gpu import graph_memory

        return problem.device.type == "cuda" and graph_memory.is_capturable(problem)

    def run_in_graphs(self, device: torch.device, problem: Callable[[], Problem], call: Callable[[Plan | None], Any]) -> Any:
        from tilewise.engines.gpu import graph_memory

        return graph_memory.run(device, problem, call)

    def forward(self, problem: Problem, plan: Plan) -> Output:
        with on_first_build(lambda: self.background_builds().forward(problem)):
            if is_current(problem.device):
                return self.passes().forward(problem, plan)
            with torch.cuda.device(problem.device):
                return self.passes().forward(problem, plan)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        with on_first_build(lambda: self.background_builds().backward(problem, wanted)):
            if is_current(problem.device):
                return self.passes().backward(problem, plan, output, grad_out, grad_lse, wanted)
            with torch.cuda.device(problem.device):
                return self.passes().backward(problem, plan, output, grad_out, grad_lse, wanted)


def is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index is None or device.index == current_device()
