"""What a call of the Triton engine will want next, built in the background while the call waits for its first kernel."""

import os
from functools import partial

from tilewise.core.problem import Problem
from tilewise.engines.gpu.aot import Candidates
from tilewise.engines.gpu.background_build import start, wanted_gradients
from tilewise.engines.triton import aot, run

MANY_CORES = 8  # enough for a build that may turn out not to be needed


def forward(p: Problem) -> None:
    wanted = wanted_gradients(p)
    start(p, lambda p: ([] if wanted is None else aot.backward_launches(p, wanted)) + _forward_launches(p))  # what takes longest first


def _forward_launches(p: Problem) -> list[Candidates]:
    """Which of two forwards it will be only the map knows: where cores are few, that is waited for."""
    many = (os.cpu_count() or 1) >= MANY_CORES
    return aot.forward_launches(p) if many or len(run.fwd_roles(p)) == 1 else []


def backward(p: Problem, wanted: frozenset[int]) -> None:
    start(p, partial(aot.backward_launches, wanted=wanted))
