"""The Hopper engine: warp-specialised kernels with TMA and wgmma for H100 and H200, programmed by the same masks and scores.

Gluon, the language the kernels are written in, comes with Triton and is imported when the engine first serves a call.
"""

import importlib.metadata
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.base import on_boundaries
from tilewise.engines.gluon.config import backward_cut, backward_tile, forward_cut, forward_tile
from tilewise.engines.gluon.patches import HEIGHT, width
from tilewise.engines.triton import MISSING as NO_TRITON
from tilewise.engines.triton import KernelEngine, interpreted, too_far
from tilewise.problem import Problem

HOPPER = (9, 0)
ARCHITECTURE = 90
OLDEST_TRITON = (3, 6)
LARGEST_HEAD_DIM = 256


class GluonEngine(KernelEngine):
    name = "gluon"
    summary = "warp-specialised kernels for Hopper GPUs (H100, H200)"
    copies_worth = 768  # sparing 512 was slower: 36 TFLOP/s instead of 47 with a neighborhood of 13 x 13, and 55 instead of 48 backward

    def refuse(self, problem: Problem) -> str | None:
        if MISSING is not None:
            return MISSING
        if problem.device.type != "cuda" or interpreted():
            return f"Query, key, and value must be on a CUDA device, got {problem.device}"
        capability = torch.cuda.get_device_capability(problem.device)
        if capability != HOPPER:
            return f"its kernels are for compute capability {HOPPER[0]}.{HOPPER[1]}, the GPU has {capability[0]}.{capability[1]}"
        return refuse_problem(problem)

    def says(self, problem: Problem) -> str:
        if problem.device.type == "cuda" and _too_many_stencils(problem):
            return f"{self.summary}; its mask decides in too many tiles, which the Triton engine's kernels evaluate one by one"
        reason = refuse_backward(problem, learns=bool(problem.learned))
        return self.summary if reason is None else f"{self.summary}; the backward is the Triton engine's: {reason}"

    def tile(self, problem: Problem) -> tuple[int, int]:
        return forward_tile(forward_cut(problem))

    def own_strips(self, problem: Problem) -> tuple[int, ...] | None:
        if width(problem) is None or _too_many_stencils(problem):
            return None
        learns = bool(problem.learned)
        trains = torch.is_grad_enabled() and (learns or any([t.requires_grad for t in (problem.query, problem.key, problem.value)]))
        if trains and refuse_backward(problem, learns) is not None:  # the Triton engine's backward reads tokens as they come
            return None
        return (HEIGHT,)

    def kernels(self) -> Any:
        return _run()

    def soon(self) -> Any:
        from tilewise.engines.gluon import soon

        return soon


def refuse_problem(p: Problem) -> str | None:
    """Why the kernels cannot serve a problem, whatever the device."""
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"Query, key, and value must be either bfloat16 or float16, got {p.dtype}"
    return _shape(p) or _strides(p) or too_far(p) or _tiles(p)


def refuse_backward(p: Problem, learns: bool) -> str | None:
    """Why a backward is left to the Triton engine's kernels. `learns`: gradients of captured tensors are asked for."""
    if p.deterministic:
        return "dQ is added up in any order here, and it must be the same every time"
    if learns:
        return "a score's captured tensors want gradients"
    if p.tiles is not None and p.tiles.given and any([given % own for given, own in zip(p.tiles.tile, backward_tile(backward_cut(p)), strict=True)]):
        return f"tiles of {p.tiles.tile} were given"
    return None


def _shape(p: Problem) -> str | None:
    if p.query.numel() == 0 or p.key.numel() == 0:
        return "it needs queries and keys, got none"
    if max(p.head_dim, p.v_dim) > LARGEST_HEAD_DIM:
        return f"it needs head dims up to {LARGEST_HEAD_DIM}, got {p.head_dim} and {p.v_dim}"
    if p.head_dim % 8 or p.v_dim % 8:
        return f"the copy engine needs head dims that are multiples of 8, got {p.head_dim} and {p.v_dim}"
    from tilewise.engines.triton.run import is_decoding

    if is_decoding(p):
        return f"few queries ({p.q_len}) over many keys ({p.kv_len}): splitting the keys is faster"
    return None


def _strides(p: Problem) -> str | None:
    for name, t in (("query", p.query), ("key", p.key), ("value", p.value)):
        if not describable(t):
            return f"the copy engine needs rows of consecutive elements on 16-byte boundaries, got a {name} with strides {tuple(t.stride())}"
    return None


def describable(t: Tensor) -> bool:
    """Whether the copy engine can find the tensor's tiles."""
    return on_boundaries(t) and all([s > 0 for s, n in zip(t.stride(), t.shape, strict=True) if n > 1])


def _tiles(p: Problem) -> str | None:
    if p.tiles is None or not p.tiles.given:
        return None
    wanted, given = forward_tile(forward_cut(p)), p.tiles.tile
    if given[0] % wanted[0] or given[1] % wanted[1]:
        return f"it needs given tiles that are multiples of {wanted}, got {given}"
    geometry = p.tiles.geometry
    for name, index, own, tiled in (("batch elements", "b", p.batch, geometry.batch), ("heads", "h", p.heads, geometry.heads)):
        if p.mask is not None and index in p.mask.program.uses and tiled < own:
            return f"the given tiles are the same for all {name}, the mask inside them is not"
    return None


def _too_many_stencils(p: Problem) -> bool:
    from tilewise.engines.gluon.maps import too_many_stencils

    return too_many_stencils(p)


@lru_cache(maxsize=1)
def _run() -> Any:
    """The module that imports Triton."""
    from tilewise.engines.gluon import run

    return run


def _missing() -> str | None:
    if NO_TRITON is not None:
        return NO_TRITON
    installed = importlib.metadata.version("triton")
    if tuple(int(x) for x in installed.split(".")[:2]) < OLDEST_TRITON:
        return f"it needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer, {installed} is installed"
    return None


MISSING = _missing()
