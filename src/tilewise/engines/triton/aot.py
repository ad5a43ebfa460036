"""Ahead-of-time builds: every Triton kernel a problem needs."""

from functools import partial

import torch

from tilewise.core.problem import Problem
from tilewise.engines.base import like_query
from tilewise.engines.gpu.aot import Candidates, step_down
from tilewise.engines.gpu.arguments import seed_of
from tilewise.engines.gpu.decoding import is_decoding
from tilewise.engines.gpu.device_map import base_ahead, is_made_on_device, rows_ahead
from tilewise.engines.gpu.launch import Launch
from tilewise.engines.gpu.tile_classifier import BLOCK, classify_launch
from tilewise.engines.triton import fixed_point, launches, run
from tilewise.engines.triton.config import BWD, BWD_ATOMIC_DQ, DECODE, DEEP_DECODE, table_config, table_configs
from tilewise.tiles import Geometry


def forward_launches(p: Problem) -> list[Candidates]:
    """What a forward of this problem launches."""
    out, rows, seed = like_query(p.query, p.v_dim, p.result_dtype), _rows(p), seed_of(p)
    if is_decoding(p):
        partial = launches.Partial(rows, rows, rows)
        split, whole = launches.decode_split_tensors(p, partial, seed), launches.decode_whole_tensors(p, out, rows, rows, seed)
        return [  # with fewer or more keys it may be the other way
            step_down(table_configs(DECODE, p), lambda c: launches.decode_split_launch(p, split, 2, *c)),
            lambda: [launches.decode_combine_launch(p, launches.decode_combine_tensors(p, partial, out, rows, rows), 2)],
            *[step_down(table_configs(roles, p), lambda c: launches.decode_split_launch(p, whole, 1, *c)) for roles in (DECODE, DEEP_DECODE)],
        ]
    tensors = launches.fwd_tensors(p, out, rows, rows, seed)
    forwards = [step_down(table_configs((role,), p), lambda c: launches.fwd_launch(p, tensors, *c)) for role in run.fwd_roles(p)]
    return forwards + map_launches(p) + _schedules(p, run.fwd_roles(p), (False,))


def map_launches(p: Problem) -> list[Candidates]:
    """What makes the problem's tile map, the backward's too."""
    if p.mask is None or p.given_tiles is not None:
        return []
    if is_made_on_device(p):
        return [lambda: [base_ahead(p)]]
    states, numbers = torch.empty(1, dtype=torch.int8, device=p.device), torch.empty(1, dtype=torch.int64, device=p.device)
    return [lambda: [classify_launch(p, Geometry(p.batch, p.heads, p.q_len, p.kv_len, BLOCK), states, numbers)]]


def _schedules(p: Problem, roles: tuple[str, ...], axes: tuple[bool, ...]) -> list[Candidates]:
    """What makes schedules of the tiles of these roles, by queries or by keys, where kernels make them."""
    if not is_made_on_device(p):
        return []
    tiles = {(c.m, c.n) for c in table_configs(roles, p)}
    return [partial(list, [launch]) for tile in tiles for by_keys in axes for launch in rows_ahead(p, tile, by_keys)]


def backward_launches(p: Problem, wanted: frozenset[int]) -> list[Candidates]:
    out, rows, seed = like_query(p.query, p.v_dim), _rows(p), seed_of(p)
    dq, dk, dv = (t.new_empty(t.shape, dtype=p.result_dtype) for t in (p.query, p.key, p.value))
    workspace = run.backward_workspace(p, wanted)
    _, shift, dq_sums = workspace.tensors(workspace.allocate())
    tensors = launches.bwd_tensors(p, out, rows, rows, shift, (dq, dk, dv), seed, dq_sums)

    def preprocess() -> list[Launch]:
        return [launches.bwd_preprocess_launch(p, launches.bwd_preprocess_tensors(out, out, rows, None, rows, shift, dq_sums))]

    def bwd(capture_grads: tuple[torch.Tensor, ...]) -> Candidates:
        given = tensors._replace(capture_grads=capture_grads)
        return step_down(table_configs(BWD, p), lambda c: launches.bwd_launch(p, given, wanted, *c))

    if run.adds_dq_atomically(p, wanted):
        after = launches.dq_postprocess_tensors(p, out, rows, rows, dq, dq_sums, seed)
        return [
            preprocess,
            step_down(table_configs(BWD_ATOMIC_DQ, p), lambda c: launches.bwd_atomic_dq_launch(p, tensors, *c)),
            lambda: [launches.dq_postprocess_launch(p, after, table_config("dkdv_atomic_dq", p))],
            *_schedules(p, BWD_ATOMIC_DQ, (True, False)),
        ]
    before = [preprocess, *_schedules(p, BWD[:1], (True,)), *_schedules(p, BWD[1:], (False,))]
    if p.score is None or not wanted:
        return [*before, bwd(())]
    if not p.deterministic:
        return [*before, bwd(fixed_point.zeros(p, wanted, run.accum_dtype(p)))]
    gauges = fixed_point.gauges(p, wanted)
    totals = fixed_point.Totals(fixed_point.zeros(p, wanted, torch.int64), gauges.limits.double())  # arithmetic without data makes torch import for seconds
    measured = tensors._replace(capture_grads=gauges.arguments)
    return [*before, step_down(table_configs(BWD, p), lambda c: launches.gauge_launch(p, measured, wanted, *c)), bwd(totals.arguments)]


def _rows(p: Problem) -> torch.Tensor:
    return torch.empty((p.batch, p.heads, p.q_len), dtype=torch.float32, device=p.device)
