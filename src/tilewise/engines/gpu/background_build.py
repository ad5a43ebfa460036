"""What a call will want next, built in the background while the call waits for its first kernel.

A guess: that the gradient of the output will be laid out like the output, say. Where it is wrong, a kernel is built that nobody needs.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.gpu import aot, build_queue, tuning
from tilewise.engines.gpu.aot import Candidates
from tilewise.engines.gpu.kernel_cache import architecture
from tilewise.lang import BoundProgram


def start(p: Problem, launches: Callable[[Problem], list[Candidates]]) -> None:
    """Build the launches of a problem, each in a thread of its own."""
    if tuning.is_on():  # nobody knows what will be wanted
        return
    arch = architecture(p.device)
    for candidates in launches(on_meta(p)):
        build_queue.in_background(partial(_build, candidates, arch))


def _build(candidates: Candidates, arch: int) -> None:
    aot.build(candidates(), arch)


def wanted_gradients(p: Problem) -> frozenset[int] | None:
    """The slots of the score's captures whose gradient a backward will be asked for; None if there will be no backward."""
    if torch.is_inference_mode_enabled() or not any([t.requires_grad for t in p.tensors]):
        return None
    return p.learned


def on_meta(p: Problem) -> Problem:
    """The problem without its data, which a build must not keep alive."""
    return replace(
        p,
        query=_meta(p.query),
        key=_meta(p.key),
        value=_meta(p.value),
        mask=_program(p.mask),
        score=_program(p.score),
        sinks=None if p.sinks is None else _meta(p.sinks),
        seed=None if p.seed is None else _meta(p.seed),
    )


def _program(bound: BoundProgram | None) -> BoundProgram | None:
    return None if bound is None else replace(bound, captures=tuple([_meta(t) for t in bound.captures]))


def _meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
