"""Maps that the Triton engine makes by looking into the tiles, in the interpreter and on a GPU."""

from typing import Any

import torch

import tilewise as tw
from tilewise.core.map_cache import maps
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.tile_classifier import kernel_map


def problem(mask: Any, batch: int, heads: int, q_len: int, kv_len: int, device: str) -> Problem:
    query, key = torch.zeros(batch, heads, q_len, 16, device=device), torch.zeros(batch, heads, kv_len, 16, device=device)
    return make_problem(query, key, key, mask, None, Options())[0]


def looked_map(mask: Any, batch: int, heads: int, lengths: tuple[int, int], tile: tuple[int, int], device: str) -> tw.TileMap:
    """The engine's own, made anew."""
    maps.clear()
    found = kernel_map(problem(mask, batch, heads, *lengths, device), tile)
    assert found is not None and found.device.type == device
    return found
