"""The launch of every Triton kernel, from a problem and its tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import FLOAT8, Problem
from tilewise.engines.dropout import output_scale
from tilewise.engines.gpu.anchoring import is_anchored
from tilewise.engines.gpu.arguments import attention_constants, mods_of, pages_of, schedule_of, shape_of, strides
from tilewise.engines.gpu.bwd_chunks import padded_rows
from tilewise.engines.gpu.config import LOG2E, Config, padded_dim
from tilewise.engines.gpu.kernel_args import AlignedStrides, BwdStrides, FwdArgs, FwdStrides, FwdTensors, PreprocessStrides
from tilewise.engines.gpu.launch import Launch, Source, mask_captures, page_tensors, place_squares, score_captures
from tilewise.engines.gpu.mods import dscore_of, gauge_of, mask_of, scales, scatter_of, score_of
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule
from tilewise.engines.triton.kernel_args import (
    BwdArgs,
    BwdConstants,
    BwdTensors,
    DecodeCombineArgs,
    DecodeCombineConstants,
    DecodeCombineTensors,
    DecodeSplitArgs,
    DecodeSplitConstants,
    DecodeSplitTensors,
    DecodeStrides,
    DkdvConstants,
    DqPostprocessArgs,
    DqPostprocessStrides,
    DqPostprocessTensors,
    PreprocessArgs,
    PreprocessConstants,
    PreprocessTensors,
)

MAX_SPLITS = 128  # of the keys, in decoding
PREPROCESS_ROWS = 32


class Partial(NamedTuple):
    """Of the rows of every split."""

    acc: Tensor  # weighted values
    row_max: Tensor
    row_sum: Tensor


def kernels() -> Mapping[str, Any]:
    """Imports Triton, so only when a kernel has to be compiled."""
    from tilewise.engines.triton.kernel_table import KERNELS

    return KERNELS


def query_tiles(config: Config) -> Source:
    return lambda p, find: query_schedule(p, (config.m, config.n), find).tensors


def key_tiles(config: Config) -> Source:
    return lambda p, find: key_schedule(p, (config.m, config.n), find).tensors


def fwd_tensors(p: Problem, out: Tensor, lse: Tensor, max_score: Tensor, seed: Tensor | None) -> FwdTensors:
    return FwdTensors(p.query, p.key, p.value, out, lse, max_score, p.sinks, seed)


def fwd_launch(p: Problem, tensors: FwdTensors, config: Config) -> Launch:
    schedule = query_schedule(p, (config.m, config.n))
    constants = attention_constants(p, (config.m, config.n), schedule.mapped, config.stages, config.masked_stages)
    return Launch(
        "fwd",
        kernels,
        p.batch * p.heads * schedule.count,
        {"tensors": tensors},
        {
            "args": FwdArgs(
                FwdStrides(strides(tensors.q), strides(tensors.k), strides(tensors.v), strides(tensors.out)),
                schedule_of(schedule),
                shape_of(p),
                schedule.count,
                mods_of(p),
                pages_of(p),
            )
        },
        {"MASK": mask_of(p), "SCORE": score_of(p), "C": replace(constants, sinks=p.sinks is not None, anchored=is_anchored(p))},
        config.warps,
        config.stages,
        fuses(p),
        (query_tiles(config), mask_captures, score_captures, place_squares, page_tensors),
    )


def decode_split_tensors(p: Problem, partial: Partial, seed: Tensor | None) -> DecodeSplitTensors:
    return DecodeSplitTensors(p.query, p.key, p.value, *partial, None, None, None, None, seed)


def decode_whole_tensors(p: Problem, out: Tensor, lse: Tensor, max_score: Tensor, seed: Tensor | None) -> DecodeSplitTensors:
    return DecodeSplitTensors(p.query, p.key, p.value, None, None, None, out, lse, max_score, p.sinks, seed)


def decode_split_launch(p: Problem, tensors: DecodeSplitTensors, splits: int, config: Config) -> Launch:
    rows, out = p.heads // p.kv_heads * p.q_len, tensors.out
    # Triton gives the loads of page numbers half of the stages, and those of keys and values the other half: as many tiles are in flight as without pages.
    stages = config.stages if p.pages is None else 2 * config.stages - 1
    constants = attention_constants(p, (padded_dim(rows), config.n), False, stages)
    return Launch(
        "decode_split",
        kernels,
        p.batch * p.kv_heads * splits,
        {"tensors": tensors},
        {
            "args": DecodeSplitArgs(
                DecodeStrides(strides(tensors.q), strides(tensors.k), strides(tensors.v), None if out is None else strides(out)),
                shape_of(p),
                splits,
                mods_of(p),
                pages_of(p),
            )
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "C": DecodeSplitConstants(
                **vars(replace(constants, sinks=tensors.sinks is not None)),
                whole=out is not None,
                paired=loads_pairs(p),
                has_lengths=p.pages is not None and p.pages.one_sequence,
            ),
        },
        config.warps,
        stages,
        fuses(p),
        (mask_captures, score_captures, place_squares, page_tensors),
    )


def loads_pairs(p: Problem) -> bool:
    """Whether float8 keys and values are loaded two by two (kernels/decode.py): their rows must allow that, and halves of them make a product."""
    halves = all([padded_dim(t.shape[3]) >= 32 and t.shape[3] % 2 == 0 and isinstance(strides(t), AlignedStrides) for t in (p.key, p.value)])
    return p.key.dtype in FLOAT8 and p.dtype in (torch.float16, torch.bfloat16) and halves


def decode_combine_tensors(p: Problem, partial: Partial, out: Tensor, lse: Tensor, max_score: Tensor) -> DecodeCombineTensors:
    return DecodeCombineTensors(*partial, out, lse, max_score, p.sinks)


def decode_combine_launch(p: Problem, tensors: DecodeCombineTensors, splits: int) -> Launch:
    return Launch(
        "decode_combine",
        kernels,
        p.batch * p.heads * p.q_len,
        {"tensors": tensors},
        {"args": DecodeCombineArgs(strides(tensors.out), p.heads, p.heads // p.kv_heads, p.q_len, splits, output_scale(p))},
        {"C": DecodeCombineConstants(p.sinks is not None, MAX_SPLITS, padded_dim(p.v_dim), p.v_dim)},
        4,
        1,
    )


def bwd_preprocess_tensors(
    out: Tensor, grad_out: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor, shift: Tensor | None, dq_sums: Tensor | None
) -> PreprocessTensors:
    return PreprocessTensors(out, grad_out, lse, dlse, delta, shift, dq_sums)


def bwd_preprocess_launch(p: Problem, tensors: PreprocessTensors) -> Launch:
    unit = scales(p)[2] * LOG2E if dscore_of(p) is None else 1.0
    has_sums = tensors.dq_sums is not None
    rows = padded_rows(p) if has_sums else p.q_len
    return Launch(
        "bwd_preprocess",
        kernels,
        p.batch * p.heads * -(-rows // PREPROCESS_ROWS),
        {"tensors": tensors},
        {"args": PreprocessArgs(PreprocessStrides(strides(tensors.out), strides(tensors.do)), p.heads, p.q_len, rows, unit)},
        {
            "C": PreprocessConstants(
                has_dlse=tensors.dlse is not None,
                folded=tensors.shift is not None,
                has_sums=has_sums,
                m=PREPROCESS_ROWS,
                dv=padded_dim(p.v_dim),
                dv_true=p.v_dim,
                d_sum=padded_dim(p.head_dim),
            )
        },
        4,
        1,
        fuses(p),
    )


def bwd_tensors(
    p: Problem, grad_out: Tensor, lse: Tensor, delta: Tensor, shift: Tensor | None, grads: tuple[Tensor, ...], seed: Tensor | None, dq_sums: Tensor | None
) -> BwdTensors:
    dq, dk, dv = grads
    return BwdTensors(p.query, p.key, p.value, grad_out, lse, delta, shift, dq, dk, dv, seed, dq_sums=() if dq_sums is None else (dq_sums,))


def bwd_launch(p: Problem, tensors: BwdTensors, wanted: frozenset[int], dkdv: Config, dq: Config) -> Launch:
    """Some programs make dK and dV of a key tile, the others dQ of a query tile."""
    columns, rows = key_schedule(p, (dkdv.m, dkdv.n)), query_schedule(p, (dq.m, dq.n))
    dkdv_programs = p.batch * p.kv_heads * columns.count
    dkdv_constants, dq_constants = (attention_constants(p, (c.m, c.n), rows.mapped, c.stages, c.masked_stages) for c in (dkdv, dq))
    t = tensors
    return Launch(
        "bwd",
        kernels,
        dkdv_programs + p.batch * p.heads * rows.count,
        {"tensors": tensors},
        {
            "args": BwdArgs(
                BwdStrides(*[strides(x) for x in (t.q, t.k, t.v, t.do, t.dq, t.dk, t.dv)]),
                schedule_of(columns),
                columns.count,
                schedule_of(rows),
                rows.count,
                dkdv_programs,
                shape_of(p),
                padded_rows(p),
                mods_of(p),
            )
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "DSCORE": dscore_of(p),
            "SCATTER": scatter_of(p, wanted),
            "C": BwdConstants(DkdvConstants(**vars(dkdv_constants), folded=t.shift is not None, atomic_dq=None), dq_constants, has_dkdv=True),
        },
        dkdv.warps,
        dkdv.stages,
        fuses(p),
        (key_tiles(dkdv), query_tiles(dq), mask_captures, score_captures, place_squares),
    )


def bwd_atomic_dq_launch(p: Problem, tensors: BwdTensors, config: Config) -> Launch:
    """Only the programs of key tiles, which add up dQ in memory too."""
    launch = bwd_launch(p, tensors, frozenset(), config, config)
    c = launch.constants["C"]
    return launch._replace(
        programs=launch.static_args["args"].n_dkdv_programs, constants=launch.constants | {"C": replace(c, dkdv=replace(c.dkdv, atomic_dq="red"))}
    )


def gauge_launch(p: Problem, tensors: BwdTensors, wanted: frozenset[int], dkdv: Config, dq: Config) -> Launch:
    """Only the programs of query tiles, which measure the contributions to the captures' gradients instead of adding them. The dQ they write is written
    again by the launch that follows."""
    launch = bwd_launch(p, tensors, wanted, dkdv, dq)
    args: BwdArgs = launch.static_args["args"]
    constants = launch.constants | {"SCATTER": gauge_of(p, wanted), "C": replace(launch.constants["C"], has_dkdv=False)}
    return launch._replace(programs=launch.programs - args.n_dkdv_programs, static_args={"args": args._replace(n_dkdv_programs=0)}, constants=constants)


def dq_postprocess_tensors(p: Problem, grad_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dq_sums: Tensor, seed: Tensor | None) -> DqPostprocessTensors:
    return DqPostprocessTensors(p.query, p.key, p.value, grad_out, lse, delta, dq, dq_sums, seed)


def dq_postprocess_launch(p: Problem, tensors: DqPostprocessTensors, config: Config) -> Launch:
    """From the sums that programs of key tiles made, in the order they lie in, to dQ."""
    schedule = query_schedule(p, (config.m, config.n))
    t = tensors
    return Launch(
        "dq_postprocess",
        kernels,
        p.batch * p.heads * schedule.count,
        {"tensors": tensors},
        {
            "args": DqPostprocessArgs(
                DqPostprocessStrides(*[strides(x) for x in (t.q, t.k, t.v, t.do, t.dq)]),
                schedule_of(schedule),
                schedule.count,
                shape_of(p),
                padded_rows(p),
                mods_of(p),
            )
        },
        {"MASK": mask_of(p), "SCORE": score_of(p), "DSCORE": dscore_of(p), "C": attention_constants(p, (config.m, config.n), schedule.mapped)},
        4,
        1,
        fuses(p),
        (query_tiles(config), mask_captures, score_captures, place_squares),
    )


def fuses(p: Problem) -> bool:
    """Whether products may be fused with sums (Launch.fp_fusion)."""
    return p.dtype != torch.float32
