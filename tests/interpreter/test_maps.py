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
from tilewise.tiles import Geometry, TileMap, build
from tilewise.tiles.runs import from_dense

WAYS = {"every tile": build.SEEN_WHOLE_ON_CPU, "those that bounds leave open": 0}  # mask elements of which every tile is looked into


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_map_is_exact(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE_ON_CPU", WAYS[way])
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


@pytest.mark.parametrize("tile", [(32, 32), (64, 64)], ids=["kernel tiles", "larger tiles"])
def test_a_given_map_changed_in_place(tile: tuple[int, int]) -> None:
    """Its schedules are made again, in both passes."""
    x = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    size = 128 // tile[0]
    tiles = torch.eye(size, dtype=torch.bool)
    given_map = TileMap(Geometry(1, 1, 128, 128, tile), from_dense(tiles & False), from_dense(tiles), None, given=True)
    seen = []
    for column in (0, size - 1):
        given_map.full.start[0] = column  # the first row's only tile
        found, expected = (tw.attention(*x, mask=given_map, backend=backend) for backend in ("triton", "reference"))
        gradients = [torch.autograd.grad(out.square().sum(), x) for out in (found, expected)]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*gradients)
        seen.append(found)
    assert not torch.equal(*seen)


def test_the_backward_of_decoding_follows_its_mask() -> None:
    """A forward of one query asks the mask itself; its backward has a tile schedule, which is made again."""
    lengths = torch.tensor([40, 200])
    query, key, value = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (1, 256, 256))
    mask = lambda b, h, q, kv: kv < lengths[b]
    for changed in (lengths.clone(), torch.tensor([250, 3])):
        lengths.copy_(changed)
        found, expected = (tw.attention(query, key, value, mask=mask, backend=backend) for backend in ("triton", "reference"))
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, expected)]
        torch.testing.assert_close(*gradients)
