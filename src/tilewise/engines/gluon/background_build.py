"""What a call of the Hopper engine will want next, built in the background while the call waits for its first kernel."""

from functools import partial

from tilewise.core.problem import Problem
from tilewise.engines.gluon import aot
from tilewise.engines.gluon.refusals import refuse_backward
from tilewise.engines.gpu.aot import Candidates
from tilewise.engines.gpu.background_build import start, wanted_gradients
from tilewise.engines.triton import aot as triton_aot


def forward(p: Problem) -> None:
    wanted = wanted_gradients(p)
    start(p, lambda p: aot.forward_launches(p) + ([] if wanted is None else backward_launches(p, wanted)))


def backward(p: Problem, wanted: frozenset[int]) -> None:
    start(p, partial(backward_launches, wanted=wanted))


def backward_launches(p: Problem, wanted: frozenset[int]) -> list[Candidates]:
    if refuse_backward(p, bool(wanted)) is None:
        return aot.backward_launches(p)
    return triton_aot.backward_launches(p, wanted)
