"""Tile maps whose tiles a kernel has looked into, in Triton's interpreter: exactly those of the dense mask."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.support.brute import check_map, dense_mask
from tests.support.looked_maps import looked_map
from tests.tiles.test_build import BATCH, CASES, HEADS
from tests.tiles.test_properties import Expression, random_masks
from tilewise.tiles import build

WAYS = {"every tile": build.SEEN_WHOLE, "those that bounds leave open": 0}  # mask elements of which every tile is looked into


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_map_is_exact(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE", WAYS[way])
    for (q_len, kv_len), tile in (((97, 130), (32, 64)), ((65, 63), (48, 80)), ((1, 70), (16, 16))):
        mask = CASES[name].function(q_len, kv_len)
        found = looked_map(mask, BATCH, HEADS, (q_len, kv_len), tile, "cpu")
        uses = CASES[name].uses
        assert found.shape == (BATCH if "b" in uses else 1, HEADS if "h" in uses else 1, q_len, kv_len)
        check_map(found, dense_mask(mask, BATCH, HEADS, q_len, kv_len))


@settings(max_examples=40)
@given(random_masks, st.tuples(st.integers(1, 50), st.integers(1, 50)), st.tuples(st.integers(16, 40), st.integers(16, 70)))
def test_random_masks_have_exact_maps(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    check_map(looked_map(mask, 2, 2, lengths, tile, "cpu"), dense_mask(mask, 2, 2, *lengths))


@pytest.mark.parametrize("shape", [(1, 1, 97, 130), (2, 1, 97, 130), (1, 3, 97, 130), (2, 3, 97, 130)], ids=str)
def test_dense_masks(shape: tuple[int, ...]) -> None:
    dense = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.02
    dense[:, :, :40, 30:100] = True
    found = looked_map(dense, 2, 3, (97, 130), (16, 32), "cpu")
    assert found.shape == shape and found.full_tiles > 0
    check_map(found, dense.expand(2, 3, -1, -1))


@pytest.mark.parametrize("queries", [40, 1])
def test_a_loaded_map_attends_as_the_saved_one(queries: int, tmp_path: Path) -> None:
    offsets = torch.tensor([40, -40, 3])
    tile_map = tw.tile_map(lambda b, h, q, kv: offsets[kv % 5] > offsets[q - 9], q_len=queries, kv_len=40, tile=(16, 16))
    tile_map.save(tmp_path / "map")
    x = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    found = tw.attention(x[:, :, :queries], x, x, mask=tw.TileMap.load(tmp_path / "map"), backend="triton")
    torch.testing.assert_close(found, tw.attention(x[:, :, :queries], x, x, mask=tile_map, backend="reference"))
