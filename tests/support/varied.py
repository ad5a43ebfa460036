"""A map whose mask depends on everything, maps given as bare tiles, and attention that shows who was attended."""

from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import dense_mask
from tilewise import masks
from tilewise.tiles import Geometry, TileMap
from tilewise.tiles.runs import from_dense

BATCH, HEADS, QUERIES, KEYS = 3, 2, 45, 37
TILE = (8, 16)
REACH = torch.tensor([[4, 30], [0, 9], [100, 2]])
BIAS = torch.linspace(-1, 1, KEYS)


def varied(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Depends on everything, captures two tensors, a number and a float."""
    return ((q - kv).abs() <= REACH[b, h]) | ((BIAS[kv] > 0.75) & (q > 20))


def varied_map(tile: tuple[int, int] = TILE) -> TileMap:
    return tw.tile_map(varied, batch=BATCH, heads=HEADS, q_len=QUERIES, kv_len=KEYS, tile=tile)


def varied_dense() -> Tensor:
    return dense_mask(varied, BATCH, HEADS, QUERIES, KEYS)


def given_map(states: Tensor, q_len: int, kv_len: int, tile: tuple[int, int], mask: Any = None) -> TileMap:
    """A map given as bare tiles, as top-k or video-sparse attention would choose them."""
    batch, heads = states.shape[:2]
    flat = states.flatten(0, 2)
    call = None if mask is None else masks.as_mask(mask).traced()
    return TileMap(Geometry(batch, heads, q_len, kv_len, tile), from_dense(flat == 1), from_dense(flat == 2), call, "given", given=True)


def random_states(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(3)).to(torch.uint8)


def attended(mask: Any, batch: int, heads: int, q_len: int, kv_len: int, backend: str) -> Tensor:
    """An output that shows who was attended: uniform weights over the allowed keys, whose values are one-hot."""
    query, key = torch.zeros((batch, heads, q_len, 4)), torch.zeros((batch, heads, kv_len, 4))
    return tw.attention(query, key, torch.eye(kv_len).expand(batch, heads, -1, -1), mask=mask, backend=backend) > 0
