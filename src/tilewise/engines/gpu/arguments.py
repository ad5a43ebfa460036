"""Arguments that many kernels take."""

from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.dropout import keep_scale, threshold
from tilewise.engines.gpu.config import dot_precision, padded_dim
from tilewise.engines.gpu.launch import AlignedStrides, Strides
from tilewise.engines.gpu.limits import interpreted


def strides(t: Tensor) -> Strides:
    """(batch, head, sequence, dim) strides; aligned ones where rows can be loaded 16 bytes at a time."""
    found = t.stride()
    if found[3] == 1 and t.data_ptr() % 16 == 0 and all(s % 16 == 0 for s in found[:3]):
        return AlignedStrides(found)
    return Strides(found)


def seed_of(p: Problem) -> Tensor | None:
    return None if p.seed is None else p.seed.to(p.device)


def shape_arguments(p: Problem) -> dict[str, int]:
    return {"n_heads": p.heads, "ratio": p.heads // p.kv_heads, "n_q": p.q_len, "n_kv": p.kv_len}


def dropout_scale(p: Problem) -> float:
    return float(keep_scale(p.dropout_p)) if p.dropout_p > 0 else 1.0


def dropout_arguments(p: Problem) -> dict[str, Any]:
    return {"keep_scale": dropout_scale(p), "threshold": threshold(p.dropout_p)}


def size_constants(p: Problem) -> dict[str, Any]:
    return dim_constants(p) | {"PRECISION": dot_precision(p.dtype), "UPCAST": interpreted() and p.dtype == torch.bfloat16}


def dim_constants(p: Problem) -> dict[str, int]:
    """Head dims as they are, and padded to what products take."""
    return {"D": padded_dim(p.head_dim), "DV": padded_dim(p.v_dim), "D_TRUE": p.head_dim, "DV_TRUE": p.v_dim}


def mask_within_given_tiles(p: Problem) -> bool:
    """Whether a mask decides inside the partial ones of given tiles, and only there."""
    return p.mask is not None and p.tiles is not None and p.tiles.given
