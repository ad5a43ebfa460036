"""The C++ engine: CPU kernels compiled for this processor on first use, with masks and scores as generated functions."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from tilewise.core import store
from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.blocked import BlockedEngine
from tilewise.engines.cpp.compiler import CompilerError
from tilewise.engines.cpp.tile_size import KEYS, LANES
from tilewise.engines.dropout import refuse_scattered

LARGEST_HEAD_DIM = 512  # products of wider heads lose digits: they are summed up one term after the other


class CppEngine(Engine):
    name = "cpp"
    summary = "generated C++, vectorised and threaded, forward and backward, on CPUs with a C++ compiler"
    serves: ClassVar[Mapping[str, int]] = {"auto": 4, "flex": 3, "flash": 3}
    takes_pages = True

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on CPUs, got tensors on {problem.device}"
        if max(problem.head_dim, problem.v_dim) > LARGEST_HEAD_DIM:
            return f"it needs head dims up to {LARGEST_HEAD_DIM}, got {problem.head_dim} and {problem.v_dim}"
        return refuse_scattered(problem) or missing()

    def tile(self, problem: Problem) -> tuple[int, int]:
        return LANES, KEYS

    def plan(self, problem: Problem) -> Plan:
        from tilewise.engines.cpp.plan import CppPlan

        return CppPlan(problem)

    def forward(self, problem: Problem, plan: Any) -> Output:
        try:
            found: Output = plan.forward(problem)
        except CompilerError as error:
            return _fallback(error).forward(problem, plan)
        return found

    def backward(self, problem: Problem, plan: Any, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        try:
            found: Gradients = plan.backward(problem, output, grad_out, grad_lse, wanted)
        except CompilerError as error:
            return _fallback(error).backward(problem, plan, output, grad_out, grad_lse, wanted)
        return found


SLOWER = "served by tiles of plain torch operations, which is slower"
_missing: list[str | None] = []


def missing() -> str | None:
    """Why C++ cannot be compiled here, or None. Checked once, by building the thread pool, which every kernel needs."""
    if not _missing:
        from tilewise.engines.cpp.libraries import library_of
        from tilewise.engines.cpp.threads import POOL

        try:
            library_of(POOL, POOL.source)
            _missing.append(None)
        except CompilerError as error:
            store.warn_once(f"{error}; until then CPUs are {SLOWER}")
            _missing.append(str(error))
    return _missing[0]


missing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets, without its imports


def _fallback(error: Exception) -> Engine:
    """The compiler passed its check but failed on this program: its calls fall back to the blocked engine, those of others do not."""
    store.warn_once(f"{error}; calls with this program are {SLOWER}")
    return BlockedEngine()
