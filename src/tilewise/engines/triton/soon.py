"""What a call will want soon, built in the background while the call waits for its first kernel.

A guess: that the gradient of the output will be laid out like the output, say. Where it is wrong, a kernel is built that nobody needs.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.engines.triton import ahead, builds, run, tuning
from tilewise.engines.triton.launch import Launch, architecture
from tilewise.lang import Call
from tilewise.problem import Problem

MANY_PROCESSORS = 8  # enough for a build that may turn out not to be needed
Launches = list[Callable[[], list[Launch]]]


def forward(p: Problem) -> None:
    wanted = wanted_of(p)
    start(p, lambda p: ([] if wanted is None else ahead.backward_launches(p, wanted)) + _forward_launches(p))  # what takes longest first


def _forward_launches(p: Problem) -> Launches:
    """Which of two forwards it will be only the map knows: where processors are few, that is waited for."""
    many = (os.cpu_count() or 1) >= MANY_PROCESSORS
    return ahead.forward_launches(p) if many or len(run.forward_kinds(p)) == 1 else []


def backward(p: Problem, wanted: frozenset[int]) -> None:
    start(p, partial(ahead.backward_launches, wanted=wanted))


def start(p: Problem, launches: Callable[[Problem], Launches]) -> None:
    if tuning.is_on():  # nobody knows what will be wanted
        return
    arch = architecture(p.device)
    for make in launches(on_meta(p)):
        builds.in_background(partial(_build, make, arch))


def _build(make: Callable[[], list[Launch]], arch: int) -> None:
    ahead.build(make(), arch)


def wanted_of(p: Problem) -> frozenset[int] | None:
    """The slots of the score's captures whose gradient a backward will be asked for; None if there will be no backward."""
    if torch.is_inference_mode_enabled() or not any([t.requires_grad for t in p.tensors]):
        return None
    return p.learned


def on_meta(p: Problem) -> Problem:
    """The problem without its data, which a build must not keep alive."""
    return replace(
        p, query=_meta(p.query), key=_meta(p.key), value=_meta(p.value), mask=_call(p.mask), score=_call(p.score),
        sinks=None if p.sinks is None else _meta(p.sinks), seed=None if p.seed is None else _meta(p.seed), memory={},
    )  # fmt: skip


def _call(call: Call | None) -> Call | None:
    return None if call is None else replace(call, captures=tuple([_meta(t) for t in call.captures]))


def _meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
