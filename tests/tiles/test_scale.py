"""A million tokens: maps that cost their boundary, not their area. How fast is for benchmarks/tile_maps.py to tell."""

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.common import MIB, in_subprocess, peak_growth

import tilewise as tw
from tests.support.brute import check_runs
from tilewise import masks
from tilewise.tiles import EMPTY, FULL, PARTIAL, TileMap

LENGTH = 2**20
LIMIT = 512 * MIB


def documents() -> torch.Tensor:
    """A thousand documents of random lengths."""
    cuts = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(0))[:999] + 1
    return torch.searchsorted(cuts.sort().values, torch.arange(LENGTH), right=True)


MASKS: dict[str, Any] = {
    "causal": lambda: masks.causal,
    "causal window": lambda: masks.causal & masks.sliding_window(4096),
    "causal documents": lambda: masks.causal & masks.document(documents()),
}


def map_of(name: str) -> TileMap:
    return tw.tile_map(MASKS[name](), q_len=LENGTH, kv_len=LENGTH)


def peak_memories() -> list[int]:
    """Of every mask. Called in a process of its own; each is measured in a fork of it, which has used no memory yet."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.map(peak_memory, MASKS, chunksize=1)


def peak_memory(name: str) -> int:
    tw.tile_map(masks.causal, q_len=4096, kv_len=4096)
    mask = MASKS[name]()
    return peak_growth(lambda: tw.tile_map(mask, q_len=LENGTH, kv_len=LENGTH))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_memory_of_a_million_tokens() -> None:
    peaks = dict(zip(MASKS, in_subprocess(Path(__file__), "peak_memories"), strict=True))
    assert all(0 < peak < LIMIT for peak in peaks.values()), peaks


def test_causal_map_of_a_million_tokens() -> None:
    found = map_of("causal")
    tiles = LENGTH // 128
    assert (found.partial_tiles, found.full_tiles, found.total_tiles) == (tiles, tiles * (tiles - 1) // 2, tiles**2)
    assert len(found.partial.start) == tiles and len(found.full.start) == tiles - 1
    assert torch.equal(found.full.count.long(), torch.arange(1, tiles))
    assert found.computed_pairs() == 128 * 128 * tiles * (tiles + 1) // 2


def test_window_map_of_a_million_tokens() -> None:
    found = map_of("causal window")
    tiles, reach = LENGTH // 128, 4096 // 128
    row = torch.arange(tiles)
    assert torch.equal(found.partial.row_of_run(), torch.cat([row, row[reach:]]).sort().values)  # the diagonal and the far end
    assert found.full_tiles == int((row - (row - reach + 1).clamp(min=0)).sum())


def test_document_map_of_a_million_tokens() -> None:
    """Per row of tiles: documents are contiguous, so its computed tiles are one stretch from the first one's start."""
    found = map_of("causal documents")
    ids = documents()
    first_token = torch.searchsorted(ids, ids[::128].contiguous())  # of the document of each tile's first token
    row = torch.arange(LENGTH // 128)
    assert found.computed_tiles == int((row - first_token // 128 + 1).sum())
    same = ids[::128] == ids[127::128]  # tiles within one document: all but the diagonal and the tile of its start are full
    full = torch.where(same, (row - -(-first_token // 128)).clamp(min=0), 0)
    assert found.full_tiles == int(full.sum())


@pytest.mark.parametrize("tile", [(128, 128), (64, 64), (32, 128), (256, 128), (256, 512)], ids=str)
def test_neighborhood_computes_no_tile_without_an_allowed_pair(tile: tuple[int, int]) -> None:
    """13 x 13 on 128 x 128. Tiles are whole rows of the image or parts of one, so each is a product of stretches."""
    side, window = 128, 13
    found = tw.tile_map(masks.neighborhood((side, side), window), q_len=side**2, kv_len=side**2, tile=tile)
    at = torch.arange(side)
    start = (at - window // 2).clamp(0, side - window)
    near = (at >= start[:, None]) & (at < start[:, None] + window)  # [i, j]: coordinate i sees coordinate j

    def stretches(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tiles, coordinate]: which rows, and which columns, of the image a tile holds."""
        token = torch.arange(side**2).view(-1, size)
        return torch.nn.functional.one_hot(token // side, side).any(1), torch.nn.functional.one_hot(token % side, side).any(1)

    some, every = torch.ones(()), torch.ones(())
    for queries, keys in zip(stretches(tile[0]), stretches(tile[1]), strict=True):
        pairs = queries.double() @ near.double() @ keys.double().T
        some = some * (pairs > 0)
        every = every * (pairs == queries.sum(1)[:, None] * keys.sum(1))
    wanted = torch.where(every > 0, FULL, torch.where(some > 0, PARTIAL, EMPTY)).to(torch.uint8)
    check_runs(found)
    assert torch.equal(found.dense()[0, 0], wanted)


def test_transpose_of_a_million_tokens() -> None:
    found = map_of("causal window")
    partial, full = found.transpose()
    assert (partial.total(), full.total()) == (found.partial_tiles, found.full_tiles)
    again = full.transpose(1, LENGTH // 128)
    assert torch.equal(again.start, found.full.start) and torch.equal(again.count, found.full.count)
