"""Ahead-of-time builds of the Hopper kernels a problem needs."""

from functools import partial

import torch

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.base import like_query
from tilewise.engines.gluon import launches
from tilewise.engines.gluon.config import backward_config, forward_config
from tilewise.engines.gluon.patches import in_strips
from tilewise.engines.gluon.tile_schedule import MapAxis, bits_launch, key_axis, query_axis
from tilewise.engines.gpu.aot import Candidates
from tilewise.engines.gpu.device_map import is_made_on_device, rows_ahead


def forward_launches(p: Problem) -> list[Candidates]:
    counter = torch.empty(1, dtype=torch.int32, device=p.device)
    return [lambda: [launches.fwd_launch(p, output_of(p), counter)], fwd_fixup(p), *fwd_mask_bits(p)]


def fwd_fixup(p: Problem) -> Candidates:
    return lambda: [launches.fwd_fixup_launch(p, launches.fwd_fixup_tensors(p, output_of(p)))]


def fwd_mask_bits(p: Problem) -> list[Candidates]:
    return _mask_bits(p, query_axis(forward_config(p)))


def backward_launches(p: Problem) -> list[Candidates]:
    (out, lse, _), workspace = output_of(p.replaced(partial=False)), launches.backward_workspace(p)  # those of whole rows
    work, grads = (
        launches.Work(*workspace.tensors(workspace.allocate())),
        (torch.empty_like(p.query, dtype=p.result_dtype), torch.empty_like(p.key), torch.empty_like(p.value)),
    )
    return [
        lambda: [launches.bwd_preprocess_launch(p, launches.bwd_preprocess_tensors(out, lse, out, None, work.delta, work))],
        lambda: [launches.bwd_launch(p, launches.bwd_tensors(p, out, grads[1], grads[2], work))],
        lambda: [launches.bwd_postprocess_launch(p, launches.bwd_postprocess_tensors(p, lse, out, work.delta, grads, work))],
        *_mask_bits(p, key_axis(backward_config(p))),
    ]


def _mask_bits(p: Problem, axis: MapAxis) -> list[Candidates]:
    if p.mask is None:
        return []
    p = in_strips(p)
    numbers = torch.empty(1, dtype=torch.int32, device=p.device)
    on_device = is_made_on_device(p)
    schedules = rows_ahead(p, axis.tile, axis.by_keys) if on_device else []
    bits = lambda: [bits_launch(p, axis, numbers, axis.schedule(p), numbers, numbers if on_device else None)]
    return [bits, *[partial(list, [launch]) for launch in schedules]]


def output_of(p: Problem) -> Output:
    rows = torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
    return Output(like_query(p.query, p.v_dim, p.result_dtype), rows, rows)
