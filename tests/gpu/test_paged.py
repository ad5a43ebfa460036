"""Keys and values in pages on a GPU: every form of a batch, float8, steps without synchronisation, captured steps, offsets past 2^31, bad tables."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.engines.test_paged import MODS, called, meaning, window
from tests.support.paged import Batch, apart, assert_right, make_batch
from tilewise import masks, scores
from tilewise.engines.gpu import structure
from tilewise.engines.triton import run
from tilewise.frontend import call_cache

DEVICE = "cuda"
QUERIES = {
    "decode": ([1, 1, 1], [370, 1, 2000]),
    "several tokens": ([3, 3], [640, 3]),
    "prefill": ([300, 300], [300, 700]),
    "mixed": ([1, 70, 0, 5, 400], [33, 70, 8, 900, 450]),
    "few apart": ([1, 2, 0, 1], [1300, 65, 9, 1]),
    "no keys": ([1, 1], [0, 5]),
}


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    call_cache.forget()
    monkeypatch.setattr(structure, "_prepared", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 16, 64, 128, 256])
@pytest.mark.parametrize("name", QUERIES)
def test_pages_are_keys_in_order(name: str, size: int, dtype: torch.dtype) -> None:
    batch = make_batch(*QUERIES[name], size, dims=(64, 64), dtype=dtype, device=DEVICE)
    for mask in (None, masks.causal):
        assert_right(batch, called(batch, mask=mask, backend="triton"), mask=mask)


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("dims", [(128, 128), (40, 24), (256, 256)])
def test_splits(dims: tuple[int, int], splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "split_count", lambda p: splits)
    for size in (16, 64):
        batch = make_batch([1, 1], [2000, 33], size, 8, 2, dims, torch.bfloat16, spare=40, device=DEVICE)
        for mask in (None, window):
            assert_right(batch, called(batch, mask=mask, backend="triton"), mask=mask)


@pytest.mark.parametrize("name", MODS)
def test_masks_and_scores_see_positions(name: str) -> None:
    for queries in ("decode", "mixed"):
        batch = make_batch(*QUERIES[queries], 16, dtype=torch.bfloat16, device=DEVICE)
        given = MODS[name]
        if isinstance(given.get("score"), list):  # sinks follow the query
            given = given | {"score": [given["score"][0], scores.sinks(given["score"][1].logits.to(DEVICE))]}
        assert_right(batch, called(batch, backend="triton", **given), **meaning(given))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float8_pages(dtype: torch.dtype, stored: torch.dtype) -> None:
    options: dict[str, Any] = {"mask": masks.causal, "k_scale": torch.tensor([0.5, 1.25], device=DEVICE), "v_scale": 2.0}
    for queries, size in (("decode", 64), ("mixed", 16), ("prefill", 128)):
        batch = make_batch(*QUERIES[queries], size, dims=(128, 128), dtype=dtype, stored=stored, device=DEVICE)
        assert_right(batch, called(batch, backend="triton", **options), **meaning(options))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_float8_pages_take_queries_of_any_size(size: float) -> None:
    """Products are of float16, which has no such numbers."""
    batch = make_batch(*QUERIES["decode"], 64, dims=(128, 128), dtype=torch.bfloat16, stored=torch.float8_e4m3fn, device=DEVICE)
    large = batch._replace(query=[q * size for q in batch.query])
    batch = batch._replace(query=[(q.double() / size).to(torch.bfloat16) for q in large.query])  # rounded as those were
    out = tw.paged_attention(large.stacked, large.k_pages, large.v_pages, large.table, large.lengths, scale=128**-0.5 / size, return_lse=True)
    assert_right(batch, apart(batch, *out))


def stepped(batch: Batch) -> torch.Tensor:
    out: torch.Tensor = tw.paged_attention(batch.stacked, batch.k_pages, batch.v_pages, batch.table, batch.lengths, mask=window, backend="triton")
    return out


def test_a_step_with_other_lengths_waits_for_nothing() -> None:
    batch = make_batch([1, 1], [90, 300], 16, device=DEVICE, dtype=torch.bfloat16)
    stepped(batch)
    try:
        torch.cuda.set_sync_debug_mode("error")
        batch.lengths.sub_(1)
        stepped(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_follows_its_table_and_lengths() -> None:
    batch = make_batch([1, 1], [90, 300], 16, device=DEVICE, dtype=torch.bfloat16)
    query, pages = batch.stacked, (batch.k_pages, batch.v_pages, batch.table, batch.lengths)
    with torch.no_grad():
        tw.paged_attention(query, *pages, mask=window, return_lse=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = tw.paged_attention(query, *pages, mask=window, return_lse=True)
    for less in (0, 1, 40):
        batch.table.copy_(batch.table.flip(0))  # the sequences change places
        batch.lengths.copy_(batch.lengths.flip(0) - less)
        batch = batch._replace(key=[t[:, : t.shape[1] - less] for t in batch.key[::-1]], value=[t[:, : t.shape[1] - less] for t in batch.value[::-1]])
        graph.replay()
        assert_right(batch, apart(batch, *found), mask=window)


def test_offsets_past_2_31() -> None:
    """The last pages of a cache of more than 2^31 elements."""
    size, heads, dim = 64, 8, 128
    count = 2**31 // (size * heads * dim) + 40
    k_pages, v_pages = (torch.zeros(count, size, heads, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    batch = make_batch([1, 1], [200, 90], size, heads, heads, (dim, dim), torch.bfloat16, device=DEVICE)
    used = len(batch.k_pages)
    k_pages[-used:], v_pages[-used:] = batch.k_pages, batch.v_pages
    inside = (batch.table >= 0) & (batch.table < used)
    table = torch.where(inside, batch.table + (count - used), batch.table)
    moved = batch._replace(k_pages=k_pages, v_pages=v_pages, table=table)
    assert_right(moved, called(moved, mask=masks.causal, backend="triton"), mask=masks.causal)


def test_bad_tables_read_nothing_outside() -> None:
    """Numbers that are no pages, and lengths beyond the table: results are finite or NaN, but nothing is read elsewhere (compute-sanitizer looks on)."""
    batch = make_batch([1, 1], [90, 300], 16, device=DEVICE, dtype=torch.bfloat16)
    batch.table.fill_(2**31 - 1)
    stepped(batch)
    batch.table.fill_(-(2**31))
    batch.lengths.fill_(2**31 - 1)
    stepped(batch)
    batch.lengths.fill_(-5)
    assert bool((stepped(batch) == 0).all())
    torch.cuda.synchronize()


@pytest.mark.parametrize("queries", [[1, 2], [40, 20], [20]], ids=str)
def test_tokens_past_the_last_sequence_see_nothing(queries: list[int]) -> None:
    batch = make_batch(queries, [n + 30 for n in queries], 16, dtype=torch.bfloat16, device=DEVICE)
    tokens, offsets = batch.packed
    more, used = torch.cat([tokens, torch.randn_like(tokens[:1]).expand(9, -1, -1)]), len(tokens)
    for mask in (None, masks.causal):
        pages = (batch.k_pages, batch.v_pages, batch.table, batch.lengths)
        out, lse = tw.paged_attention(more, *pages, offsets, mask=mask, return_lse=True, backend="triton")
        assert bool((out[used:] == 0).all()) and bool((lse[:, used:] == -torch.inf).all())
        assert_right(batch, apart(batch, out, lse), mask=mask)
