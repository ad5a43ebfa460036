"""Keys and values in pages, in Triton's interpreter: decoding in one split and in several, prefill, packed batches."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import tilewise as tw
from tests.engines.test_paged import MODS, called, meaning, window
from tests.support.paged import apart, assert_right, make_batch
from tilewise import masks
from tilewise.engines.gpu import structure
from tilewise.engines.gpu.kernels.primitives import as_float16
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
        for dims, dtype in (((16, 8), torch.float16), ((48, 64), torch.float16), ((48, 64), torch.bfloat16)):  # all but the first are loaded two by two
            batch = make_batch(*QUERIES[queries], size, dims=dims, dtype=dtype, stored=stored)
            assert_right(batch, called(batch, backend="triton", **options), **meaning(options))


@triton.jit
def float16_and_units(p, p_rows, p_units, M: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    b_rows, b_units = as_float16(tl.load(p + o))
    tl.store(p_rows + o, b_rows)
    tl.store(p_units + tl.arange(0, M), b_units)


def test_queries_of_any_size_become_float16() -> None:
    """What products with float8 keys take."""
    sizes = 2.0 ** torch.tensor([-120, -112, -100, -20, 0, 16, 17, 60, 120])
    rows = torch.zeros(16, 32, dtype=torch.bfloat16)
    drawn = (torch.randn(len(sizes), 32, generator=torch.Generator().manual_seed(0)) * sizes[:, None]).bfloat16()
    rows[: len(sizes)] = torch.where(drawn.abs() < 2.0**-126, 0, drawn)  # Triton's interpreter reads such bfloat16 wrongly
    found, units = torch.full_like(rows, float("nan"), dtype=torch.float16), torch.full((16,), float("nan"))
    float16_and_units[(1,)](rows, found, units, 16, 32)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double() * units.double()[:, None], rows.double(), rtol=0, atol=0)


@pytest.mark.parametrize("name", QUERIES)
def test_unwritten_rows_cost_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold NaN here, and are not read: nothing is computed again row by row."""
    from tilewise.engines.triton.kernels import decode, forward

    def refuse(*_: Any) -> None:
        raise AssertionError("rows were computed again")

    monkeypatch.setattr(decode, "split_rows", refuse)
    monkeypatch.setattr(forward, "fwd_rows", refuse)
    batch = make_batch(*QUERIES[name], 16)
    called(batch, mask=masks.causal, backend="triton")
    called(batch, backend="triton")


def test_nan_in_attended_pages_stays_in_its_rows() -> None:
    """Rows are computed again one by one, through the same table."""
    batch = make_batch([1, 1], [90, 70], 16)
    page = int(batch.table[0, 2])
    batch.v_pages[page, 3], batch.value[0][:, 2 * 16 + 3] = torch.inf, torch.inf
    found, _ = called(batch, mask=masks.causal, backend="triton")
    assert bool((found[0] == torch.inf).all()) and bool(found[1].isfinite().all())


@pytest.mark.parametrize("queries", [[1, 2], [40, 20], [20]], ids=str)
def test_tokens_past_the_last_sequence_see_nothing(queries: list[int]) -> None:
    batch = make_batch(queries, [n + 30 for n in queries], 16)
    tokens, offsets = batch.packed
    more, used = torch.cat([tokens, torch.randn(9, 4, 16)]), len(tokens)
    for mask in (None, masks.causal):
        pages = (batch.k_pages, batch.v_pages, batch.table, batch.lengths)
        out, lse = tw.paged_attention(more, *pages, offsets, mask=mask, return_lse=True, backend="triton")
        assert bool((out[used:] == 0).all()) and bool((lse[:, used:] == -torch.inf).all())
        assert_right(batch, apart(batch, out, lse), mask=mask)
