"""The arguments of every Hopper kernel, from a problem and its tensors."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.output import Output
from tilewise.core.problem import Problem
from tilewise.engines.gluon.config import ROWS, backward_config, forward_config
from tilewise.engines.gluon.kernel_args import (
    FixupArgs,
    FixupConstants,
    PostprocessArgs,
    PostprocessConstants,
    PostprocessTensors,
    PreprocessArgs,
    PreprocessConstants,
    PreprocessTensors,
)
from tilewise.engines.gluon.mask_bits import kernels
from tilewise.engines.gluon.patches import grid_width, in_strips, tma_box, tma_view
from tilewise.engines.gluon.tile_schedule import HopperSchedule, MapAxis, hopper_schedule, key_axis, query_axis
from tilewise.engines.gpu.arguments import attention_constants, dropout_arguments, mods_of, schedule_of, seed_of, shape_arguments, shape_of, strides
from tilewise.engines.gpu.bwd_chunks import padded_rows, sums_rows
from tilewise.engines.gpu.config import padded_dim
from tilewise.engines.gpu.kernel_args import BwdStrides, FwdStrides, FwdTensors, PreprocessStrides
from tilewise.engines.gpu.launch import Launch, Source, TmaTensor, mask_captures, score_captures
from tilewise.engines.gpu.limits import free_sms
from tilewise.engines.gpu.mods import dscore_of, mask_of, mod_arguments, scales, score_of
from tilewise.engines.gpu.workspace import Part, Workspace

L2_SHARE = 8 * 2**20  # bytes of keys and values that programs read at a time: of 4 to 32 MiB the best on an H200
PREPROCESS_ROWS = 32
FIXUP_TILES = 8  # that a program looks at, where it may have to compute them again with products: it then has too many registers for many programs at a time

Tensors = dict[str, Any]


class Work(NamedTuple):
    """What the kernels of a backward hand each other: tensors, or their addresses."""

    delta: Any
    lse_padded: Any
    delta_padded: Any
    dq_sums: Any
    nonfinite: Any  # int32: whether dK or dV of a key tile holds NaN or Inf, by warpgroup


def backward_workspace(p: Problem, count: int = 1) -> Workspace:
    """The memory for that, of one chunk of so many at a time, but for delta, which is of all."""
    config, rows = backward_config(p), sums_rows(p) // count
    key_tiles = p.batch * p.kv_heads // count * -(-p.kv_len // config.block_n)
    delta, sums = Part((p.batch, p.heads, p.q_len)), Part((rows * config.d // 32, 32))  # as dQ's descriptor sees its sums
    return Workspace(p.device, delta, Part((rows,)), Part((rows,)), sums, Part((2 * key_tiles,), torch.int32))


# -- tensors of the kernels, in the order of their parameters --------------------------------------------------------------


def tma_tensor(t: Tensor, rows: int, columns: int, width: int | None) -> TmaTensor:
    """A tensor of the problem's tokens, for tiles of so many of them."""
    return TmaTensor(tma_view(t, width), tma_box(rows, columns, width))


def fwd_tensors(p: Problem, output: Output, counter: Tensor) -> Tensors:
    config, width = forward_config(p), grid_width(p)
    return {
        "q_desc": tma_tensor(p.query, ROWS, config.d, width),
        "k_desc": tma_tensor(p.key, config.block_n, config.d, width),
        "v_desc": tma_tensor(p.value, config.block_n, config.dv, width),
        "o_desc": output.out if config.partial else tma_tensor(output.out, ROWS, config.dv, width),
        "p_lse": output.lse,
        "p_max": output.max_score,
        "p_counter": counter,
        "p_sinks": p.sinks,
        "p_seed": seed_of(p),
    }


def fwd_fixup_tensors(p: Problem, output: Output) -> FwdTensors:
    return FwdTensors(p.query, p.key, p.value, output.out, output.lse, output.max_score, p.sinks, seed_of(p))


def bwd_preprocess_tensors(out: Tensor, lse: Tensor, grad_out: Tensor, dlse: Tensor | None, delta: Tensor, work: Work) -> PreprocessTensors:
    return PreprocessTensors(out, grad_out, lse, dlse, work.lse_padded, work.delta_padded, delta, work.dq_sums)


def bwd_tensors(p: Problem, grad_out: Tensor, dk: Tensor, dv: Tensor, work: Work) -> Tensors:
    config, width = backward_config(p), grid_width(p)
    m, n = config.tile
    return {
        "q_desc": tma_tensor(p.query, m, config.d, width),
        "k_desc": tma_tensor(p.key, n, config.d, width),
        "v_desc": tma_tensor(p.value, n, config.d, width),
        "do_desc": tma_tensor(grad_out, m, config.d, width),
        "dk_desc": tma_tensor(dk, 64, config.d, width),
        "dv_desc": tma_tensor(dv, 64, config.d, width),
        "dq_desc": TmaTensor(work.dq_sums, (2 * config.dq_columns, 32)),
        "lse_desc": TmaTensor(work.lse_padded, (m,)),
        "delta_desc": TmaTensor(work.delta_padded, (m,)),
        "p_nonfinite": work.nonfinite,
        "p_seed": seed_of(p),
    }


def bwd_postprocess_tensors(p: Problem, lse: Tensor, grad_out: Tensor, delta: Tensor, grads: tuple[Tensor, Tensor, Tensor], work: Work) -> PostprocessTensors:
    dq, dk, dv = grads
    return PostprocessTensors(p.query, p.key, p.value, grad_out, lse, delta, dq, dk, dv, work.dq_sums, work.nonfinite, seed_of(p))


# -- sources of static tensors ---------------------------------------------------------------------------------------


def hopper_tiles(axis: MapAxis) -> Source:
    return lambda p, find: hopper_schedule(in_strips(p), axis, find).tensors


def tiles(axis: MapAxis) -> Source:
    return lambda p, find: axis.schedule(p, find).tensors


# -- launches --------------------------------------------------------------------------------------------------------


def fwd_launch(p: Problem, output: Output, counter: Tensor) -> Launch:
    config, width, tensors = forward_config(p), grid_width(p), fwd_tensors(p, output, counter)
    p = in_strips(p)
    schedule = hopper_schedule(p, query_axis(config))
    heads = p.batch * p.heads
    group = min(heads_per_group(p, schedule) * (p.heads // p.kv_heads), heads)
    return Launch(
        "hopper_fwd",
        kernels,
        min(heads * schedule.count, free_sms(p)),
        tensors,
        {
            "tiles": schedule.tensors,
            "s_tiles": schedule.strides,
            **shape_arguments(p),
            "n_tiles": schedule.count,
            "n_bh": heads,
            "n_group": group,
            "grid_width": width or 0,
            "scale": scales(p),
            **dropout_arguments(p),
            "score": mod_arguments(p)["score"],
            "s_out": strides(output.out) if config.partial else None,
            "dv_true": p.v_dim if config.partial else None,
        },
        {
            "SCORE": score_of(p, split_index=True),
            "MAPPED": schedule.mapped,
            "PATCHED": width is not None,
            "SINKS": p.sinks is not None,
            "DROPOUT": p.dropout_p > 0,
            "C": config,
        },
        4,
        1,
        sources=(hopper_tiles(query_axis(config)), score_captures),
    )


def fwd_fixup_launch(p: Problem, tensors: FwdTensors) -> Launch:
    config = forward_config(p)
    schedule = query_axis(config).schedule(p)
    constants = replace(attention_constants(p, config.tile, schedule.mapped), sinks=p.sinks is not None, anchored=config.anchored)
    count, at_once = p.batch * p.heads * schedule.count, FIXUP_TILES if config.anchored else 1
    return Launch(
        "hopper_fwd_fixup",
        kernels,
        -(-count // at_once),
        {"tensors": tensors},
        {
            "args": FixupArgs(
                FwdStrides(strides(tensors.q), strides(tensors.k), strides(tensors.v), strides(tensors.out)),
                schedule_of(schedule),
                shape_of(p),
                schedule.count,
                count,
                mods_of(p),
            )
        },
        {"MASK": mask_of(p), "SCORE": score_of(p), "C": FixupConstants(**vars(constants), rows=padded_dim(config.tile[0]), tiles=at_once)},
        4,
        1,
        sources=(tiles(query_axis(config)), mask_captures, score_captures),
    )


def bwd_preprocess_launch(p: Problem, tensors: PreprocessTensors) -> Launch:
    width = grid_width(p)
    return Launch(
        "hopper_bwd_preprocess",
        kernels,
        p.batch * p.heads * padded_rows(p) // PREPROCESS_ROWS,
        {"tensors": tensors},
        {"args": PreprocessArgs(PreprocessStrides(strides(tensors.out), strides(tensors.do)), p.heads, p.q_len, padded_rows(p), width or 0)},
        {
            "C": PreprocessConstants(
                has_dlse=tensors.dlse is not None,
                patched=width is not None,
                m=PREPROCESS_ROWS,
                dv=padded_dim(p.v_dim),
                dv_true=p.v_dim,
                d_sum=backward_config(p).d,
            )
        },
        4,
        1,
    )


def bwd_launch(p: Problem, tensors: Tensors) -> Launch:
    config, width = backward_config(p), grid_width(p)
    p = in_strips(p)
    schedule = hopper_schedule(p, key_axis(config))
    return Launch(
        "hopper_bwd_wide" if config.is_wide else "hopper_bwd",
        kernels,
        p.batch * p.kv_heads * schedule.count,
        tensors,
        {
            "tiles": schedule.tensors,
            "s_tiles": schedule.strides,
            **shape_arguments(p),
            "n_tiles": schedule.count,
            "n_bh": p.batch * p.kv_heads,
            "n_group": heads_per_group(p, schedule),
            "n_padded": padded_rows(p),
            "grid_width": width or 0,
            "scale": scales(p),
            **dropout_arguments(p),
            "score": mod_arguments(p)["score"],
        },
        {
            "SCORE": score_of(p, split_index=True),
            "DSCORE": dscore_of(p, split_index=True),
            "MAPPED": schedule.mapped,
            "PATCHED": width is not None,
            "DROPOUT": p.dropout_p > 0,
            "C": config,
        },
        4,
        1,
        sources=(hopper_tiles(key_axis(config)), score_captures),
    )


def bwd_postprocess_launch(p: Problem, tensors: PostprocessTensors) -> Launch:
    width, fwd, bwd = grid_width(p), forward_config(p), backward_config(p)
    rows, columns = query_axis(fwd).schedule(p), key_axis(bwd).schedule(p)
    dq_programs = p.batch * p.heads * rows.count
    t = tensors
    return Launch(
        "hopper_bwd_postprocess",
        kernels,
        dq_programs + p.batch * p.kv_heads * columns.count,
        {"tensors": tensors},
        {
            "args": PostprocessArgs(
                BwdStrides(*[strides(x) for x in (t.q, t.k, t.v, t.do, t.dq, t.dk, t.dv)]),
                schedule_of(rows),
                rows.count,
                schedule_of(columns),
                columns.count,
                dq_programs,
                shape_of(p),
                padded_rows(p),
                width or 0,
                mods_of(p),
            )
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "DSCORE": dscore_of(p),
            "C": PostprocessConstants(
                dq=attention_constants(p, fwd.tile, rows.mapped), dkdv=attention_constants(p, bwd.tile, rows.mapped), patched=width is not None, d_sum=bwd.d
            ),
        },
        4,
        1,
        sources=(tiles(query_axis(fwd)), tiles(key_axis(bwd)), mask_captures, score_captures),
    )


def heads_per_group(p: Problem, schedule: HopperSchedule) -> int:
    """How many key heads' tiles are mixed, longest first. Without a map all tiles are alike, and those of one head follow each other."""
    return heads_at_a_time(p, schedule.density) if schedule.mapped else 1


def heads_at_a_time(p: Problem, density: float) -> int:
    """The same for tiles of different lengths. `density`: the share of tiles that are visited."""
    share = min(1.0, 2 * density)  # causal maps visit half of the tiles, and all keys
    bytes_of_head = max(1.0, share * p.kv_len * (p.head_dim + p.v_dim) * p.key.element_size())
    at_once: int = 2 ** max(0, round(math.log2(L2_SHARE / bytes_of_head)))  # a power of two is likely to divide all heads: the last group should not be small
    return min(at_once, p.batch * p.kv_heads)
