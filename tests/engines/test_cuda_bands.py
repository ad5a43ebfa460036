"""The key tiles of a band (engines/cuda/kernels/band.cuh), compiled for the CPU and walked beside the mask written out."""

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilewise as tw
from tests.engines.test_cuda import problem
from tests.support.recorded_launches import record
from tilewise import TileMap, masks
from tilewise.core.map_cache import maps
from tilewise.engines.cuda.config import band_for, forward_forms
from tilewise.engines.cuda.source import FOLDER
from tilewise.lang import Band
from tilewise.lang.bands import FAR, LONGEST

COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCE = """
#include <algorithm>
using std::max;
using std::min;
#define DEV inline
#define BN {keys}
#include "{header}"
extern "C" void walk(int row, int rows, int n_kv, int low, int high, int* out) {{
    BandTiles band(row, rows, n_kv, low, high);
    out[0] = band.steps(), out[1] = band.masked();
    for (int i = 0; i < band.steps(); i++) out[2 + i] = band.tile(i);
}}
"""
Walk = Callable[..., tuple[list[int], int]]


@pytest.fixture(scope="module", params=[16, 80, 128])
def walk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Walk]:
    """Keys of a tile, and a function that gives a query tile's key tiles, and how many of them are masked."""
    if COMPILER is None:
        pytest.skip("no C++ compiler was found")
    folder: Path = tmp_path_factory.mktemp("band")
    (folder / "walk.cpp").write_text(SOURCE.format(keys=request.param, header=FOLDER / "band.cuh"))
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", str(folder / "walk.so"), str(folder / "walk.cpp")], check=True)
    function = ctypes.CDLL(str(folder / "walk.so")).walk

    def run(*numbers: int) -> tuple[list[int], int]:
        out = (ctypes.c_int * 4096)()
        function(*numbers, out)
        return list(out[2 : 2 + max(out[0], 0)]), out[1]

    return request.param, run


LIMITS = [(-FAR, 0), (-FAR, 50), (-FAR, -70), (0, FAR), (30, FAR), (-FAR, FAR), (-100, 0), (-100, 100), (-3, 1), (0, 0), (200, 300), (-300, -200), (FAR, -FAR)]


@pytest.mark.parametrize(("low", "high"), LIMITS)
def test_every_key_that_a_row_sees_is_visited_once(walk: tuple[int, Walk], low: int, high: int) -> None:
    size, run = walk
    for n_q, n_kv, block in itertools.product((1, 64, 200, 300), (1, 79, 128, 257, 400), (64, 128, 192)):
        for row in range(0, n_q, block):
            rows = min(block, n_q - row)
            tiles, masked = run(row, rows, n_kv, low, high)
            distance = torch.arange(n_kv)[None, :] - torch.arange(row, row + rows)[:, None]
            seen = (low <= distance) & (distance <= high)
            columns = seen.any(0).nonzero().flatten() // size
            assert len(set(tiles)) == len(tiles) and set(columns.tolist()) <= set(tiles)
            assert len(tiles) == len(set(columns.tolist()))  # nothing is visited in vain
            for step, tile in enumerate(tiles):
                inside = seen[:, tile * size : (tile + 1) * size]
                assert (step < masked) == (inside.shape[1] < size or not bool(inside.all()))


def test_a_causal_mask_is_walked_from_the_diagonal_down(walk: tuple[int, Walk]) -> None:
    size, run = walk
    tiles, _ = run(256, 128, 1000, -FAR, 0)
    assert tiles == list(range(383 // size, -1, -1))


def test_which_problems_are_bands() -> None:
    assert band_for(problem()) is None and band_for(problem(mask=masks.document(torch.arange(512)))) is None
    assert band_for(problem(mask=masks.causal)) == Band(-FAR, 0)
    given = TileMap.from_lists(torch.zeros(1, 1, 4, 1, dtype=torch.int32), q_len=512, kv_len=512, tile=(128, 128)).to("meta")
    assert band_for(problem(mask=given)) is None
    assert band_for(problem((1, 1, LONGEST, 64), mask=masks.causal)) is None


@pytest.mark.parametrize(("dim", "tile"), [(64, (192, 128)), (96, (128, 128)), (128, (128, 128)), (192, (128, 112)), (256, (128, 80))])
def test_tiles_of_bands(dim: int, tile: tuple[int, int]) -> None:
    (config,) = forward_forms(problem((1, 2, 512, dim), mask=masks.causal), mapped=False)
    assert config.tile == tile and config.banded and not config.mapped


def test_a_bands_forward_makes_no_tile_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to count mask bits, which it has none of."""
    recorded = record(monkeypatch)
    query = torch.zeros(1, 1, 32768, 64, dtype=torch.bfloat16)
    before = maps.built
    for mask in (masks.causal, masks.causal & masks.sliding_window(1000)):
        tw.attention(query, query, query, mask=mask, backend="cuda")
    assert [launch.kernel for launch in recorded] == ["cuda_fwd"] * 2 and maps.built == before
