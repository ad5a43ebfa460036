"""Tile maps made on the GPU: a kernel evaluates the mask in the tiles that its bounds leave undecided."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.core.problem import Problem
from tilewise.engines.gpu.kernel_args import ClassifyConstants, TileGeometry
from tilewise.engines.gpu.launch import Launch, mask_captures, prepare
from tilewise.engines.gpu.mods import mask_of, mod_arguments
from tilewise.tiles import EMPTY, FULL, PARTIAL, Geometry, TileMap

BLOCK = (32, 64)  # elements of the mask evaluated at a time; a smaller tile takes as long as one of these
TILES_PER_PROGRAM = 4
WARPS = 4


def kernel_map(p: Problem, tile: tuple[int, int]) -> TileMap | None:
    """The problem's map; None where everything is attended."""
    return map_of(p, tile, partial(classified, p))


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
    g = geometry
    return Launch(
        "classify",
        kernels,
        -(-len(numbers) // TILES_PER_PROGRAM),
        {"p_states": states, "p_tiles": numbers},
        {"n_tiles": len(numbers), "geometry": TileGeometry(g.heads, g.q_tiles, g.kv_tiles, g.q_len, g.kv_len, *g.tile), "mask": mod_arguments(p)["mask"]},
        {"MASK": mask_of(p), "C": ClassifyConstants(EMPTY, PARTIAL, FULL, *BLOCK, TILES_PER_PROGRAM)},
        WARPS,
        1,
        fp_fusion=False,
        sources=(mask_captures,),
    )
