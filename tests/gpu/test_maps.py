"""Tile maps made on a GPU: exactly those made on the CPU, in few operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.support.looked_maps import looked_map
from tests.tiles.test_build import BATCH, CASES, HEADS
from tests.tiles.test_properties import Expression, integer_masks
from tilewise import masks
from tilewise.tiles import build

WAYS = {"every tile": build.SEEN_WHOLE, "those that bounds leave open": 0}  # most mask elements, or tiles, of which every tile is looked into


def check_against_the_cpu(mask: object, batch: int, heads: int, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    found = looked_map(mask, batch, heads, lengths, tile, "cuda")
    wanted = tw.tile_map(mask, batch=batch, heads=heads, q_len=lengths[0], kv_len=lengths[1], tile=tile, device="cpu")
    assert found.shape == wanted.shape
    assert torch.equal(found.dense().cpu(), wanted.dense())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_maps_are_those_of_the_cpu(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SEEN_WHOLE", WAYS[way])
    monkeypatch.setattr(build, "BOUNDED_WHOLE", WAYS[way])
    for lengths, tile in (((97, 130), (32, 64)), ((65, 63), (48, 80)), ((1, 70), (16, 16)), ((700, 900), (128, 128)), ((640, 512), (32, 16))):
        check_against_the_cpu(CASES[name].function(*lengths), BATCH, HEADS, lengths, tile)


@settings(max_examples=200)
@given(integer_masks, st.tuples(st.integers(1, 300), st.integers(1, 300)), st.sampled_from([(128, 128), (64, 64), (32, 128), (16, 16), (13, 70)]))
def test_maps_of_random_masks_are_those_of_the_cpu(mask: Expression, lengths: tuple[int, int], tile: tuple[int, int]) -> None:
    check_against_the_cpu(mask, 2, 2, lengths, tile)


@pytest.mark.parametrize("most", [build.BOUNDED_WHOLE, 0], ids=["bounds in the kernel", "bounds on coarser cells"])
def test_a_long_causal_map(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More elements than are evaluated: bounds decide all but the diagonal."""
    length, tile = 2**17, 128
    assert length**2 > build.SEEN_WHOLE
    monkeypatch.setattr(build, "BOUNDED_WHOLE", most)
    found = looked_map(masks.causal, 1, 1, (length, length), (tile, tile), "cuda")
    tiles = length // tile
    assert (found.partial_tiles, found.full_tiles) == (tiles, tiles * (tiles - 1) // 2)
    assert torch.equal(found.full.count.long().cpu(), torch.arange(1, tiles))


@pytest.mark.parametrize("tile", [(192, 128), (128, 128), (64, 64)], ids=str)
def test_long_maps_are_those_of_the_cpu(tile: tuple[int, int]) -> None:
    """Of masks that load from tensors and are too large for schedules made on the device."""
    ids = torch.arange(75600) // 1234
    for mask in (masks.radial(21, 3600), masks.causal & masks.document(ids)):
        check_against_the_cpu(mask, 1, 1, (75600, 75600), tile)
