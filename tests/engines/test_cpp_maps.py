"""Tile maps that the C++ engine makes by evaluating masks in generated code: exactly those of the dense mask."""

from typing import Any

import pytest
import torch

from tests.support.brute import check_map, dense_mask
from tests.tiles.test_build import BATCH, CASES, HEADS
from tilewise.core.map_cache import maps
from tilewise.core.problem import Options, make_problem
from tilewise.engines.cpp import missing
from tilewise.engines.cpp.tile_classifier import kernel_map
from tilewise.tiles import TileMap, build

WAYS = {"every tile": build.SEEN_WHOLE_ON_CPU, "those that bounds leave open": 0}  # mask elements of which every tile is looked into
TILE = (64, 64)


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def looked_map(mask: Any, batch: int, heads: int, q_len: int, kv_len: int, dtype: torch.dtype = torch.float32) -> TileMap:
    """The engine's own, made anew."""
    query, key = torch.zeros(batch, heads, q_len, 8, dtype=dtype), torch.zeros(batch, heads, kv_len, 8, dtype=dtype)
    maps.clear()
    found = kernel_map(make_problem(query, key, key, mask, None, Options())[0], TILE)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_map_is_exact(name: str, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE_ON_CPU", WAYS[way])
    for q_len, kv_len in ((130, 144), (65, 63), (1, 128)):
        mask = CASES[name].function(q_len, kv_len)
        check_map(looked_map(mask, BATCH, HEADS, q_len, kv_len, dtype), dense_mask(mask, BATCH, HEADS, q_len, kv_len))


def test_more_tiles_than_one_thread_takes() -> None:
    ids = torch.arange(1000) // 130
    mask = lambda b, h, q, kv: (ids[q] == ids[kv]) | (q + b < kv)
    check_map(looked_map(mask, 2, 1, 700, 1000), dense_mask(mask, 2, 1, 700, 1000))
