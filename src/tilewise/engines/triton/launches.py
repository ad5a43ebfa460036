"""The arguments of every Triton kernel, from a problem and its tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.dropout import threshold
from tilewise.engines.gpu.arguments import dim_constants, dropout_arguments, dropout_scale, mask_within_given_tiles, shape_arguments, size_constants, strides
from tilewise.engines.gpu.bwd_chunks import padded_rows
from tilewise.engines.gpu.config import LOG2E, Config
from tilewise.engines.gpu.launch import Launch
from tilewise.engines.gpu.mods import dscore_of, gauge_of, mask_of, mod_arguments, scales, scatter_of, score_of
from tilewise.engines.gpu.tile_schedule import key_schedule, query_schedule

MAX_SPLITS = 128  # of the keys, in decoding
PREPROCESS_ROWS = 32
SHIFT_TERMS = 16  # columns of a product that adds a number per query: the least a product takes; see kernels/backward.py

Tensors = dict[str, Any]


def kernels() -> Mapping[str, Any]:
    """Imports Triton, so only when a kernel has to be compiled."""
    from tilewise.engines.triton.kernel_table import KERNELS

    return KERNELS


def fwd_launch(p: Problem, tensors: Tensors, config: Config) -> Launch:
    schedule = query_schedule(p, (config.m, config.n))
    return Launch(
        "fwd",
        kernels,
        p.batch * p.heads * schedule.count,
        tensors,
        {
            "s_q": strides(p.query),
            "s_k": strides(p.key),
            "s_v": strides(p.value),
            "s_out": strides(tensors["p_out"]),
            "tiles": schedule.tensors,
            "s_tiles": schedule.strides,
            **shape_arguments(p),
            "n_tiles": schedule.count,
            "scale": scales(p),
            **dropout_arguments(p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "MAPPED": schedule.mapped,
            "GIVEN": mask_within_given_tiles(p),
            "SINKS": p.sinks is not None,
            "DROPOUT": p.dropout_p > 0,
            "M": config.m,
            "N": config.n,
            **size_constants(p),
            "STAGES": config.stages,
            "MASKED_STAGES": config.masked_stages,
        },
        config.warps,
        config.stages,
    )


def decode_split_launch(p: Problem, tensors: Tensors, splits: int, config: Config) -> Launch:
    rows = p.heads // p.kv_heads * p.q_len
    return Launch(
        "decode_split",
        kernels,
        p.batch * p.kv_heads * splits,
        tensors,
        {
            "s_q": strides(p.query),
            "s_k": strides(p.key),
            "s_v": strides(p.value),
            **shape_arguments(p),
            "n_splits": splits,
            "per_split": -(-p.kv_len // (config.n * splits)),
            "scale": scales(p),
            "threshold": threshold(p.dropout_p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "DROPOUT": p.dropout_p > 0,
            "M": max(16, 1 << (rows - 1).bit_length()),
            "N": config.n,
            **size_constants(p),
            "STAGES": config.stages,
        },
        config.warps,
        config.stages,
    )


def decode_combine_launch(p: Problem, tensors: Tensors, splits: int) -> Launch:
    dims = dim_constants(p)
    return Launch(
        "decode_combine",
        kernels,
        p.batch * p.heads * p.q_len,
        tensors,
        {
            "s_out": strides(tensors["p_out"]),
            "n_heads": p.heads,
            "ratio": p.heads // p.kv_heads,
            "n_q": p.q_len,
            "n_splits": splits,
            "keep_scale": dropout_scale(p),
        },
        {"SINKS": p.sinks is not None, "SPLITS": MAX_SPLITS, "DV": dims["DV"], "DV_TRUE": dims["DV_TRUE"]},
        4,
        1,
    )


def bwd_preprocess_launch(p: Problem, tensors: Tensors) -> Launch:
    dims = dim_constants(p)
    return Launch(
        "bwd_preprocess",
        kernels,
        p.batch * p.heads * -(-p.q_len // PREPROCESS_ROWS),
        tensors,
        {
            "s_out": strides(tensors["p_out"]),
            "s_do": strides(tensors["p_do"]),
            "n_heads": p.heads,
            "n_q": p.q_len,
            "unit": scales(p)[2] * LOG2E if dscore_of(p) is None else 1.0,
        },
        {
            "HAS_DLSE": tensors["p_dlse"] is not None,
            "FOLDED": tensors["p_shift"] is not None,
            "M": PREPROCESS_ROWS,
            "DV": dims["DV"],
            "DV_TRUE": dims["DV_TRUE"],
        },
        4,
        1,
    )


def bwd_launch(p: Problem, tensors: Tensors, wanted: frozenset[int], dkdv: Config, dq: Config) -> Launch:
    """Some programs make dK and dV of a key tile, the others dQ of a query tile."""
    columns, rows = key_schedule(p, (dkdv.m, dkdv.n)), query_schedule(p, (dq.m, dq.n))
    dkdv_programs = p.batch * p.kv_heads * columns.count
    return Launch(
        "bwd",
        kernels,
        dkdv_programs + p.batch * p.heads * rows.count,
        tensors,
        {
            **{f"s_{name}": strides(tensors[f"p_{name}"]) for name in ("q", "k", "v", "do", "dq", "dk", "dv")},
            "columns": columns.tensors,
            "s_columns": columns.strides,
            "n_columns": columns.count,
            "rows": rows.tensors,
            "s_rows": rows.strides,
            "n_rows": rows.count,
            "n_dkdv_programs": dkdv_programs,
            **shape_arguments(p),
            "n_padded": padded_rows(p),
            "scale": scales(p),
            **dropout_arguments(p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "DSCORE": dscore_of(p),
            "SCATTER": scatter_of(p, wanted),
            "MAPPED": rows.mapped,
            "GIVEN": mask_within_given_tiles(p),
            "DROPOUT": p.dropout_p > 0,
            "FOLDED": tensors["p_shift"] is not None,
            "DKDV": True,
            "ATOMIC_DQ": None,
            **size_constants(p),
            "DKDV_M": dkdv.m,
            "DKDV_N": dkdv.n,
            "DQ_M": dq.m,
            "DQ_N": dq.n,
            "DKDV_STAGES": dkdv.stages,
            "DKDV_MASKED_STAGES": dkdv.masked_stages,
            "DQ_STAGES": dq.stages,
            "DQ_MASKED_STAGES": dq.masked_stages,
        },
        dkdv.warps,
        dkdv.stages,
    )


def bwd_atomic_dq_launch(p: Problem, tensors: Tensors, config: Config) -> Launch:
    """Programs of key tiles alone, which add up dQ in memory too."""
    launch = bwd_launch(p, tensors, frozenset(), config, config)
    return launch._replace(programs=launch.static_args["n_dkdv_programs"], constants=launch.constants | {"ATOMIC_DQ": "red"})


def gauge_launch(p: Problem, tensors: Tensors, wanted: frozenset[int], dkdv: Config, dq: Config) -> Launch:
    """The programs of query tiles alone, measuring shares of the captures' gradients instead of adding them. What they write to dQ is written again."""
    launch = bwd_launch(p, tensors, wanted, dkdv, dq)
    programs = launch.programs - launch.static_args["n_dkdv_programs"]
    constants = launch.constants | {"SCATTER": gauge_of(p, wanted), "DKDV": False}
    return launch._replace(programs=programs, static_args=launch.static_args | {"n_dkdv_programs": 0}, constants=constants)


def dq_postprocess_launch(p: Problem, tensors: Tensors, config: Config) -> Launch:
    """From the sums that programs of key tiles made, in the order they are in, to dQ."""
    schedule = query_schedule(p, (config.m, config.n))
    return Launch(
        "dq_postprocess",
        kernels,
        p.batch * p.heads * schedule.count,
        tensors,
        {
            **{f"s_{name}": strides(tensors[f"p_{name}"]) for name in ("q", "k", "v", "do", "dq")},
            "tiles": schedule.tensors,
            "s_tiles": schedule.strides,
            "n_tiles": schedule.count,
            **shape_arguments(p),
            "n_padded": padded_rows(p),
            "scale": scales(p),
            **dropout_arguments(p),
            **mod_arguments(p),
        },
        {
            "MASK": mask_of(p),
            "SCORE": score_of(p),
            "DSCORE": dscore_of(p),
            "MAPPED": schedule.mapped,
            "GIVEN": mask_within_given_tiles(p),
            "DROPOUT": p.dropout_p > 0,
            "M": config.m,
            "N": config.n,
            **dim_constants(p),
        },
        4,
        1,
    )


# -- tensors of the kernels, in the order of their parameters --------------------------------------------------------------


def fwd_tensors(p: Problem, out: Tensor, lse: Tensor, max_score: Tensor, seed: Tensor | None) -> Tensors:
    return {"p_q": p.query, "p_k": p.key, "p_v": p.value, "p_out": out, "p_lse": lse, "p_max": max_score, "p_sinks": p.sinks, "p_seed": seed}


def decode_split_tensors(p: Problem, partial: tuple[Tensor, Tensor, Tensor], seed: Tensor | None) -> Tensors:
    acc, row_max, row_sum = partial
    return {"p_q": p.query, "p_k": p.key, "p_v": p.value, "p_acc": acc, "p_m": row_max, "p_l": row_sum, "p_seed": seed}


def decode_combine_tensors(p: Problem, partial: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, max_score: Tensor) -> Tensors:
    acc, row_max, row_sum = partial
    return {"p_acc": acc, "p_m": row_max, "p_l": row_sum, "p_out": out, "p_lse": lse, "p_max": max_score, "p_sinks": p.sinks}


def bwd_preprocess_tensors(out: Tensor, grad_out: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor, shift: Tensor | None) -> Tensors:
    return {"p_out": out, "p_do": grad_out, "p_lse": lse, "p_dlse": dlse, "p_delta": delta, "p_shift": shift}


def bwd_tensors(
    p: Problem,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    shift: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    seed: Tensor | None,
    capture_grads: tuple[Tensor, ...] = (),
    dq_sums: tuple[Tensor, ...] = (),
) -> Tensors:
    dq, dk, dv = grads
    return {
        "p_q": p.query,
        "p_k": p.key,
        "p_v": p.value,
        "p_do": grad_out,
        "p_lse": lse,
        "p_delta": delta,
        "p_shift": shift,
        "p_dq": dq,
        "p_dk": dk,
        "p_dv": dv,
        "p_seed": seed,
        "capture_grads": capture_grads,
        "dq_sums": dq_sums,
    }


def dq_postprocess_tensors(p: Problem, grad_out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dq_sums: Tensor, seed: Tensor | None) -> Tensors:
    return {"p_q": p.query, "p_k": p.key, "p_v": p.value, "p_do": grad_out, "p_lse": lse, "p_delta": delta, "p_dq": dq, "p_sum": dq_sums, "p_seed": seed}
