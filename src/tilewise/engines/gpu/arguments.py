"""Arguments that many kernels take."""

from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.dropout import output_scale, threshold
from tilewise.engines.gpu.config import dot_precision, padded_dim
from tilewise.engines.gpu.kernel_args import AlignedStrides, AttentionConstants, Mods, PageArgs, PlaceArgs, Schedule, Shape, Strides
from tilewise.engines.gpu.limits import interpreted
from tilewise.engines.gpu.mods import mod_arguments, scales
from tilewise.engines.gpu.tile_schedule import TileSchedule


def strides(t: Tensor) -> Strides:
    """(batch, head, sequence, dim) strides; aligned ones where rows can be loaded 16 bytes at a time."""
    found = t.stride()
    if found[3] == 1 and t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in found[:3]):
        return AlignedStrides(found)
    return Strides(found)


def seed_of(p: Problem) -> Tensor | None:
    return None if p.seed is None else p.seed.to(p.device)


def shape_of(p: Problem) -> Shape:
    return Shape(p.heads, p.heads // p.kv_heads, p.q_len, p.kv_len)


def schedule_of(schedule: TileSchedule) -> Schedule:
    order, offsets, starts, stops = schedule.tensors
    return Schedule(order, offsets, starts, stops, schedule.strides)


def mods_of(p: Problem) -> Mods:
    return Mods(scales(p), output_scale(p), threshold(p.dropout_p), **mod_arguments(p), places=_places_of(p))


def _places_of(p: Problem) -> PlaceArgs | tuple[()]:
    places = p.dropout_places
    return () if places is None else PlaceArgs(*places.squares, places.batch, places.head)


def pages_of(p: Problem) -> PageArgs | tuple[()]:
    if p.pages is None:
        return ()
    sequences = p.pages.lengths.shape[0] // p.batch
    return PageArgs(p.pages.table, p.pages.lengths, p.pages.table.stride(0), sequences, p.pages.span, p.key.shape[0])


def attention_constants(p: Problem, tile: tuple[int, int], mapped: bool, stages: int = 1, masked_stages: int = 1) -> AttentionConstants:
    """For tiles of this size. Sinks and anchors are the forward's business alone."""
    return AttentionConstants(
        *tile,
        d=padded_dim(p.head_dim),
        dv=padded_dim(p.v_dim),
        d_true=p.head_dim,
        dv_true=p.v_dim,
        mapped=mapped,
        given=mask_within_given_tiles(p),
        dropout=p.dropout_p > 0,
        placed=p.dropout_places is not None,
        sinks=False,
        precision=dot_precision(p.dtype),
        upcast=interpreted() and p.dtype == torch.bfloat16,
        stages=stages,
        masked_stages=masked_stages,
        page=0 if p.pages is None else p.pages.size,
        anchored=False,
    )


def shape_arguments(p: Problem) -> dict[str, int]:
    """The same numbers as `shape_of`, for kernels that take them one by one."""
    return shape_of(p)._asdict()


def dropout_arguments(p: Problem) -> dict[str, Any]:
    return {"keep_scale": output_scale(p), "threshold": threshold(p.dropout_p)}


def mask_within_given_tiles(p: Problem) -> bool:
    """Whether the mask applies inside the partial ones of given tiles, and only there."""
    return p.mask is not None and p.given_tiles is not None
