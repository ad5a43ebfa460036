"""Tile maps for the kernels, made on the GPU: the mask's own kernel looks into the tiles."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.engines.triton.launch import Launch, prepare
from tilewise.engines.triton.mods import mask_of, mod_arguments
from tilewise.plan import map_of
from tilewise.problem import Problem
from tilewise.tiles import EMPTY, FULL, PARTIAL, Geometry, TileMap

BLOCK = (32, 64)  # elements of the mask evaluated at a time; a smaller tile takes as long as one of these
TOGETHER = 4  # tiles of one program
WARPS = 4


def kernel_map(p: Problem, tile: tuple[int, int]) -> TileMap | None:
    """The problem's map; None where everything is attended."""
    return map_of(p, tile, partial(states, p))


def states(p: Problem, geometry: Geometry, numbers: Tensor) -> Tensor:
    """[tiles] EMPTY, PARTIAL or FULL."""
    own = {"p_states": torch.empty(len(numbers), dtype=torch.int8, device=p.device), "p_tiles": numbers}
    if len(numbers) > 0:
        prepare(classify_launch(p, geometry, own), p.device).start(own)
    return own["p_states"]


def classify_launch(p: Problem, geometry: Geometry, own: dict[str, Any]) -> Launch:
    g = geometry
    count = len(own["p_tiles"])
    return Launch(
        "classify",
        -(-count // TOGETHER),
        own,
        {
            "n_tiles": count, "n_heads": g.heads, "n_rows": g.q_tiles, "n_columns": g.kv_tiles, "n_q": g.q_len, "n_kv": g.kv_len,
            "m": g.tile[0], "n": g.tile[1], "mask": mod_arguments(p)["mask"],
        },
        {
            "MASK": mask_of(p), "EMPTY": EMPTY, "PARTIAL": PARTIAL, "FULL": FULL,
            "ROWS": BLOCK[0], "COLUMNS": BLOCK[1], "TOGETHER": TOGETHER,
        },
        WARPS, 1,
    )  # fmt: skip
