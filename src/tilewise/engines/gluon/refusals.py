"""Which problems the Hopper kernels cannot serve, and why."""

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.base import rows_are_aligned
from tilewise.engines.gluon.config import backward_config, forward_tile
from tilewise.engines.gpu.decoding import is_decoding
from tilewise.engines.gpu.limits import rows_too_far_apart

LARGEST_HEAD_DIM = 256


def refuse_problem(p: Problem) -> str | None:
    """Why the kernels cannot serve a problem, whatever the device."""
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"Query, key, and value must be either bfloat16 or float16, got {p.dtype}"
    return _part(p) or _shape(p) or _strides(p) or rows_too_far_apart(p) or _tiles(p)


def refuse_backward(p: Problem, learns: bool) -> str | None:
    """Why a backward is left to the Triton engine's kernels. `learns`: gradients of captured tensors are asked for."""
    if p.deterministic:
        return "dQ is added up atomically here, and it must be the same every time"
    if learns:
        return "a score's captured tensors want gradients"
    if p.given_tiles is not None and any([given % own for given, own in zip(p.given_tiles.tile, backward_config(p).tile, strict=True)]):
        return f"tiles of {p.given_tiles.tile} were given"
    return None


def _part(p: Problem) -> str | None:
    return None if p.dropout_places is None else "it draws dropout for a whole problem alone, got a part of one"


def _shape(p: Problem) -> str | None:
    if p.query.numel() == 0 or p.key.numel() == 0:
        return "it needs queries and keys, got none"
    if max(p.head_dim, p.v_dim) > LARGEST_HEAD_DIM:
        return f"it needs head dims up to {LARGEST_HEAD_DIM}, got {p.head_dim} and {p.v_dim}"
    if p.head_dim % 8 or p.v_dim % 8:
        return f"TMA needs head dims that are multiples of 8, got {p.head_dim} and {p.v_dim}"
    if is_decoding(p):
        return f"few queries ({p.q_len}) over many keys ({p.kv_len}): splitting the keys is faster"
    return None


def _strides(p: Problem) -> str | None:
    for name, t in (("query", p.query), ("key", p.key), ("value", p.value)):
        if not tma_can_load(t):
            return f"TMA needs rows of consecutive elements on 16-byte boundaries, got a {name} with strides {tuple(t.stride())}"
    return None


def tma_can_load(t: Tensor) -> bool:
    """Whether TMA can load the tensor's tiles."""
    return rows_are_aligned(t) and all([s > 0 for s, n in zip(t.stride(), t.shape, strict=True) if n > 1])


def _tiles(p: Problem) -> str | None:
    if p.given_tiles is None:
        return None
    wanted, given = forward_tile(p), p.given_tiles.tile
    if given[0] % wanted[0] or given[1] % wanted[1]:
        return f"it needs given tiles that are multiples of {wanted}, got {given}"
    geometry = p.given_tiles.geometry
    for name, index, own, tiled in (("batch elements", "b", p.batch, geometry.batch), ("heads", "h", p.heads, geometry.heads)):
        if p.mask is not None and index in p.mask.program.uses and tiled < own:
            return f"the given tiles are the same for all {name}, the mask inside them is not"
    return None
