"""Building ahead: the Hopper kernels a problem needs."""

from collections.abc import Callable

import torch

from tilewise.engines.base import Output, like_query
from tilewise.engines.gluon import maps, run
from tilewise.engines.gluon.patches import in_strips
from tilewise.engines.triton.launch import Launch
from tilewise.problem import Problem


def forward_launches(p: Problem) -> list[Callable[[], list[Launch]]]:
    output = _output(p)
    counter = torch.empty(1, dtype=torch.int32, device=p.device)
    return [
        lambda: [run.forward_launch(p, run.forward_own(p, output, counter))],
        lambda: [run.mend_forward_launch(p, run.mend_own(p, output))],
        *_stencils(p, maps.forward_side(p)),
    ]


def backward_launches(p: Problem) -> list[Callable[[], list[Launch]]]:
    output, work = _output(p), run.Workspace(p)
    return [
        lambda: [run.prepare_backward_launch(p, run.prepare_own(output, output.out, None, work))],
        lambda: [run.backward_launch(p, run.backward_own(p, output.out, work))],
        lambda: [run.finish_backward_launch(p, run.finish_own(p, output, output.out, work))],
        *_stencils(p, maps.backward_side(p)),
    ]


def _stencils(p: Problem, side: maps.Side) -> list[Callable[[], list[Launch]]]:
    if p.mask is None:
        return []
    p = in_strips(p)
    numbers = torch.empty(1, dtype=torch.int32, device=p.device)
    return [lambda: [maps.stencils_launch(p, side, {"p_stencils": numbers}, side.tiles(p), numbers)]]


def _output(p: Problem) -> Output:
    rows = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    return Output(like_query(p.query, p.v_dim), rows, rows)
