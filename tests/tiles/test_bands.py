"""Tile maps of bands, made by arithmetic."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bands import BANDS, band
from tilewise.lang import Band, band_of, trace_mask
from tilewise.lang.bands import FAR
from tilewise.tiles import FULL, Geometry, build
from tilewise.tiles.bands import of_band

LIMITS = st.one_of(st.integers(-90, 90), st.sampled_from([-FAR, FAR, -(2**62), 2**62, -(2**63), 2**63]))


def states(limits: Band, geometry: Geometry) -> torch.Tensor:
    """EMPTY, PARTIAL or FULL of every tile, by looking at every pair."""
    q, kv = torch.arange(geometry.q_len)[:, None], torch.arange(geometry.kv_len)
    low, high = (max(-1000, min(1000, limit)) for limit in limits)  # farther than any two are apart
    allowed = (kv - q >= low) & (kv - q <= high)
    (rows, columns), (m, n) = (geometry.q_tiles, geometry.kv_tiles), geometry.tile
    found = [[allowed[i * m : i * m + m, j * n : j * n + n] for j in range(columns)] for i in range(rows)]
    return torch.tensor([[int(cell.any()) + int(cell.all()) for cell in row] for row in found]).view(rows, columns)


@given(st.integers(0, 70), st.integers(0, 70), st.sampled_from([(16, 16), (8, 24), (24, 8), (1, 5), (64, 64)]), LIMITS, LIMITS)
def test_a_band_map_is_what_looking_at_every_pair_finds(q_len: int, kv_len: int, tile: tuple[int, int], low: int, high: int) -> None:
    limits, geometry = Band(low, high), Geometry(1, 1, q_len, kv_len, tile)
    partial, full = of_band(limits, geometry)
    found = partial.dense(geometry.kv_tiles).int() + FULL * full.dense(geometry.kv_tiles).int()
    assert torch.equal(found, states(limits, geometry).int())
    for runs in (partial, full):  # sorted, and not touching
        row, end = runs.row_of_run(), runs.start + runs.count
        assert (runs.count > 0).all()
        assert not ((row[1:] == row[:-1]) & (runs.start[1:] <= end[:-1])).any()


@pytest.mark.parametrize("limits", BANDS)
def test_no_tile_of_a_band_is_looked_at(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    call, geometry = trace_mask(band(*limits)), Geometry(1, 1, 700, 900, (128, 64))
    looked_at = build._Builder(call, geometry, torch.device("cpu"), None).build()
    monkeypatch.setattr(build, "_Builder", forbidden)
    assert band_of(call) is not None
    for made, wanted in zip(build.build(call, geometry, torch.device("cpu")), looked_at, strict=True):
        assert torch.equal(made.dense(geometry.kv_tiles), wanted.dense(geometry.kv_tiles))


@pytest.mark.parametrize("number", [2**62, 2**62 - 9, 2**61])
def test_numbers_of_any_size(number: int) -> None:
    """The difference of two that are as large as numbers may be is larger than int64."""
    geometry = Geometry(1, 1, 300, 300, (128, 64))
    for mask, wanted in ((lambda b, h, q, kv: q + number >= kv - number, FULL), (lambda b, h, q, kv: q - number >= kv + number, 0)):
        call = trace_mask(mask)
        assert band_of(call) is not None
        partial, full = build.build(call, geometry, torch.device("cpu"))
        assert not partial.dense(geometry.kv_tiles).any() and bool(full.dense(geometry.kv_tiles).all()) == (wanted == FULL)


def forbidden(*_: Any) -> Any:
    raise AssertionError("a band was looked at")
