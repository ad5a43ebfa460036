"""Keys and values in pages, in Triton's interpreter: decoding in one split and in several, prefill, packed batches."""

from typing import Any

import pytest
import torch

from tests.engines.test_paged import MODS, called, meaning, window
from tests.support.paged import assert_right, make_batch
from tilewise import masks
from tilewise.engines.gpu import structure
from tilewise.engines.triton import run
from tilewise.frontend import call_cache

QUERIES = {"decode": ([1, 1], [150, 70]), "prefill": ([20, 20], [20, 90]), "mixed": ([1, 33, 0, 5], [40, 33, 8, 90]), "no keys": ([1, 1], [0, 5])}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes would have the splits of the test before."""
    call_cache.forget()
    monkeypatch.setattr(structure, "_prepared", {})


@pytest.mark.parametrize("size", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("name", QUERIES)
def test_pages_are_keys_in_order(name: str, size: int) -> None:
    batch = make_batch(*QUERIES[name], size)
    for mask in (None, masks.causal):
        assert_right(batch, called(batch, mask=mask, backend="triton"), mask=mask)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("size", [16, 64])
def test_splits(size: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "split_count", lambda p: splits)
    batch = make_batch([1, 1], [200, 33], size, spare=6)
    for mask in (None, window):
        assert_right(batch, called(batch, mask=mask, backend="triton"), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODS)
def test_masks_and_scores_see_positions(name: str, dtype: torch.dtype) -> None:
    batch = make_batch(*QUERIES["mixed"], 16, dtype=dtype)
    assert_right(batch, called(batch, backend="triton", **MODS[name]), **meaning(MODS[name]))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_pages(stored: torch.dtype) -> None:
    options: dict[str, Any] = {"mask": masks.causal, "k_scale": torch.tensor([0.5, 1.25]), "v_scale": 2.0}
    for queries, size in (("decode", 64), ("mixed", 16)):
        batch = make_batch(*QUERIES[queries], size, dtype=torch.float16, stored=stored)
        assert_right(batch, called(batch, backend="triton", **options), **meaning(options))


def test_nan_in_attended_pages_stays_in_its_rows() -> None:
    """Rows are computed again one by one, through the same table."""
    batch = make_batch([1, 1], [90, 70], 16)
    page = int(batch.table[0, 2])
    batch.v_pages[page, 3], batch.value[0][:, 2 * 16 + 3] = torch.inf, torch.inf
    found, _ = called(batch, mask=masks.causal, backend="triton")
    assert bool((found[0] == torch.inf).all()) and bool(found[1].isfinite().all())
