"""Tile maps made on the GPU: a kernel decides by the mask's bounds where it can, and evaluates it in the other tiles."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.core.problem import Problem
from tilewise.engines.gpu.kernel_args import ClassifyConstants, TileGeometry
from tilewise.engines.gpu.launch import Launch, mask_captures, prepare
from tilewise.engines.gpu.mods import bounds_of, mask_of, mod_arguments
from tilewise.tiles import EMPTY, FULL, PARTIAL, Geometry, Look, TileMap

BLOCK = (32, 64)  # elements of the mask evaluated at a time; a smaller tile takes as long as one of these
TILES = 16  # of a program: their bounds take as long as those of one
PROGRAMS = 2048  # keep a GPU busy; programs have fewer tiles where there would not be as many
WARPS = 4


def kernel_map(p: Problem, tile: tuple[int, int]) -> TileMap | None:
    """The problem's map; None where everything is attended."""
    return map_of(p, tile, look_of(p))


def look_of(p: Problem) -> Look:
    return Look(partial(classified, p), has_bounds=bounds_of(p) is not None)


def classified(p: Problem, geometry: Geometry, numbers: Tensor) -> Tensor:
    """EMPTY, PARTIAL or FULL for each of these tiles."""
    states = torch.empty(len(numbers), dtype=torch.int8, device=p.device)
    if len(numbers) > 0:
        prepare(classify_launch(p, geometry, states, numbers), p.device).bind(p, _no_map).launch([states, numbers])
    return states


def _no_map(p: Problem) -> None:
    """The launch that makes a map needs none."""


def kernels() -> Mapping[str, Any]:
    from tilewise.engines.gpu.kernels.classify import classify

    return {"classify": classify}


def classify_launch(p: Problem, geometry: Geometry, states: Tensor, numbers: Tensor) -> Launch:
    g, count = geometry, len(numbers)
    tiles = TileGeometry(g.heads, g.q_tiles, g.kv_tiles, g.q_len, g.kv_len, *g.tile)
    share = max(1, min(TILES, count // PROGRAMS))
    return Launch(
        "classify",
        kernels,
        -(-count // share),
        {"p_states": states, "p_tiles": numbers},
        {"n_tiles": count, "n_share": share, "geometry": tiles, "mask": mod_arguments(p)["mask"]},
        {"MASK": mask_of(p), "BOUNDS": bounds_of(p), "C": ClassifyConstants(EMPTY, PARTIAL, FULL, *BLOCK, TILES)},
        WARPS,
        1,
        fp_fusion=False,
        sources=(mask_captures,),
    )
