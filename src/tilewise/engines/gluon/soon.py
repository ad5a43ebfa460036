"""What a call of the Hopper engine will want soon, built in the background while the call waits for its first kernel."""

from functools import partial

from tilewise.engines.gluon import ahead, refuse_backward
from tilewise.engines.triton import ahead as triton_ahead
from tilewise.engines.triton.soon import Launches, start, wanted_of
from tilewise.problem import Problem


def forward(p: Problem) -> None:
    wanted = wanted_of(p)
    start(p, lambda p: ahead.forward_launches(p) + ([] if wanted is None else _backward_launches(p, wanted)))


def backward(p: Problem, wanted: frozenset[int]) -> None:
    start(p, partial(_backward_launches, wanted=wanted))


def _backward_launches(p: Problem, wanted: frozenset[int]) -> Launches:
    if refuse_backward(p, bool(wanted)) is None:
        return ahead.backward_launches(p)
    return triton_ahead.backward_launches(p, wanted)
