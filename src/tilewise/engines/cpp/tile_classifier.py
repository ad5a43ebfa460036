"""Tile maps whose tiles the mask's generated function has looked into."""

import struct
from functools import partial

import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.core.problem import Problem
from tilewise.engines.cpp import kernels, threads
from tilewise.engines.cpp.mods import mask_unit, program_arguments
from tilewise.tiles import Geometry, Look, TileMap

CLASSIFY = "=2q6q8q"  # `Classify` of kernel/arguments.h: the threads, the mask, the map, the tiles


def kernel_map(p: Problem, tile: tuple[int, int]) -> TileMap | None:
    """The problem's map, on the kernels' own tiles; None where everything is attended."""
    return map_of(p, tile, Look(partial(classified, p)))


def classified(p: Problem, geometry: Geometry, numbers: Tensor) -> Tensor:
    """EMPTY, PARTIAL or FULL for each of these tiles."""
    g, mask = geometry, program_arguments(p.mask, mask_unit(p))
    states = torch.empty(len(numbers), dtype=torch.uint8, device=p.device)
    places = (numbers.data_ptr(), states.data_ptr(), len(numbers))
    sizes = (g.heads, g.q_tiles, g.kv_tiles, g.q_len, g.kv_len)
    kernels.classifier(p.dtype, p.result_dtype)(struct.pack(CLASSIFY, threads.pool(), torch.get_num_threads(), *mask.values, *sizes, *places))
    return states
