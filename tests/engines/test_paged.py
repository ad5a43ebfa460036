"""paged_attention against plain attention over keys in order, sequence by sequence."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise as tw
from tests.support.paged import Batch, apart, assert_right, make_batch
from tilewise import masks, scores

ENGINES = ["reference", "blocked", "cpp"]
SIZES = [1, 7, 16, 64, 128]
QUERIES = {
    "decode": ([1, 1, 1], [37, 1, 300]),
    "several tokens": ([3, 3, 3], [40, 3, 150]),
    "prefill": ([90, 90], [90, 200]),
    "no keys": ([1, 1], [0, 5]),
    "mixed": ([1, 70, 0, 5, 130], [33, 70, 8, 90, 200]),
    "few apart": ([1, 2, 0, 1], [130, 65, 9, 1]),
}


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 40)


def softcap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 5.0 * torch.tanh(s / 5.0)


def by_position(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s - 0.1 * (h + 1) * (q - kv) + 0.05 * b


def called(batch: Batch, **options: Any) -> tuple[Any, Any]:
    """Both forms where all sequences have as many queries: the packed one is compared with the other."""
    pages = (batch.k_pages, batch.v_pages, batch.table, batch.lengths)
    tokens, offsets = batch.packed
    packed = apart(batch, *tw.paged_attention(tokens, *pages, offsets, return_lse=True, **options))
    if len({q.shape[1] for q in batch.query}) != 1:
        return packed
    stacked = apart(batch, *tw.paged_attention(batch.stacked, *pages, return_lse=True, **options))
    assert_right(batch, packed, **meaning(options))
    return stacked


def meaning(options: dict[str, Any]) -> dict[str, Any]:
    found = {name: options[name] for name in ("mask", "score") if options.get(name) is not None}
    given = found.get("score")
    if isinstance(given, list):
        found = {"mask": found.get("mask"), "score": given[0], "sinks": given[1].logits}
    if "k_scale" in options:
        found["scales"] = (options["k_scale"], options["v_scale"])
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", QUERIES)
def test_pages_are_keys_in_order(name: str, size: int, engine: str) -> None:
    batch = make_batch(*QUERIES[name], size)
    assert_right(batch, called(batch, backend=engine))
    assert_right(batch, called(batch, backend=engine, mask=masks.causal), mask=masks.causal)


MODS = {
    "window": {"mask": window},
    "score by position": {"mask": masks.causal, "score": by_position},
    "softcap and sinks": {"mask": masks.causal, "score": [softcap, scores.sinks(torch.tensor([0.5, -1.0, 2.0, 0.0]))]},
    "by head": {"mask": lambda b, h, q, kv: (q >= kv) & ((h % 2 == 0) | (q - kv < 9))},
    "by sequence": {"mask": lambda b, h, q, kv: (kv % 3 != b % 3) & (q >= kv)},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODS)
def test_masks_and_scores_see_positions(name: str, dtype: torch.dtype, engine: str) -> None:
    for queries in ("decode", "mixed"):
        batch = make_batch(*QUERIES[queries], 16, dtype=dtype)
        assert_right(batch, called(batch, backend=engine, **MODS[name]), **meaning(MODS[name]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float8_pages(dtype: torch.dtype, stored: torch.dtype, engine: str) -> None:
    for queries in ("decode", "mixed"):
        for size in (16, 64):
            batch = make_batch(*QUERIES[queries], size, dtype=dtype, stored=stored)
            for k_scale, v_scale in ((0.5, 3.0), (torch.tensor([0.5, 1.25]), torch.tensor([2.0, 0.25]))):
                options = {"mask": masks.causal, "k_scale": k_scale, "v_scale": v_scale}
                assert_right(batch, called(batch, backend=engine, **options), **meaning(options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_number(stored: torch.dtype, engine: str) -> None:
    """One key has all the weight: its value comes out."""
    every = torch.arange(256, dtype=torch.uint8).view(stored)
    table, lengths = torch.zeros((1, 1), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    out = tw.paged_attention(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8).to(stored), every.view(1, 1, 1, 256), table, lengths, backend=engine)
    torch.testing.assert_close(out.flatten(), every.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_of_a_growing_cache(engine: str) -> None:
    """Tokens, lengths and the table change in place: the same call, other results."""
    size, batch = 4, make_batch([1, 1], [9, 30], 4, spare=3)
    free = [page for page in range(64) if page not in batch.table[:, :8].flatten().tolist()]
    pages = torch.full((64, size, 2, 24), float("nan"))
    k_pages, v_pages = pages[..., :16], pages[..., 16:]
    k_pages[: len(batch.k_pages)], v_pages[: len(batch.v_pages)] = batch.k_pages, batch.v_pages
    for _ in range(6):
        for n in range(2):
            at = int(batch.lengths[n])
            if at % size == 0:
                batch.table[n, at // size] = free.pop()
            new = [torch.randn(2, d) for d in (16, 8)]
            page = int(batch.table[n, at // size])
            k_pages[page, at % size], v_pages[page, at % size] = new
            batch.key[n], batch.value[n] = (torch.cat([t, x.unsqueeze(1)], 1) for t, x in zip((batch.key[n], batch.value[n]), new, strict=True))
            batch.query[n] = torch.randn(4, 1, 16)
        batch.lengths.add_(1)
        found = called(batch._replace(k_pages=k_pages, v_pages=v_pages), backend=engine, mask=window)
        assert_right(batch, found, mask=window)


def test_the_same_step_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have other pages and the same table; the next step has other lengths, in place."""
    made = []
    module = sys.modules["tilewise.attention"]  # the name stands for the function
    usual = module.make_problem
    monkeypatch.setattr(module, "make_problem", lambda *args: made.append(1) or usual(*args))
    batch = make_batch([1, 1], [90, 30], 16)
    pages = (batch.k_pages, batch.v_pages, batch.table, batch.lengths)
    for _ in range(3):
        tw.paged_attention(batch.stacked, *[t.clone() for t in pages[:2]], *pages[2:])
        tw.paged_attention(batch.stacked, *pages, mask=window)
        batch.lengths.sub_(1)
    assert len(made) == 2


def test_gradients_go_to_pages() -> None:
    batch = make_batch([3, 3], [20, 9], 4, dtype=torch.float64)
    pages = [t.nan_to_num(0.0).requires_grad_() for t in (batch.k_pages, batch.v_pages)]
    query = batch.stacked.requires_grad_()
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [query, *pages, bias]

    def run(backend: str, pages: list[Any], query: Any) -> Any:
        return tw.paged_attention(query, *pages, batch.table, batch.lengths, mask=masks.causal, score=lambda s, b, h, q, kv: s * bias[h], backend=backend)

    found = torch.autograd.grad(run("cpp", pages, query).square().sum(), leaves)
    wanted = torch.autograd.grad(run("reference", pages, query).square().sum(), leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    only_bias = torch.autograd.grad(run("cpp", [p.detach() for p in pages], query.detach()).square().sum(), bias)
    torch.testing.assert_close(only_bias[0], wanted[3], rtol=1e-9, atol=1e-10)


def test_compiled() -> None:
    batch = make_batch([1, 1], [20, 9], 4)
    step = torch.compile(lambda q, k, v: tw.paged_attention(q, k, v, batch.table, batch.lengths, mask=masks.causal), backend="eager", fullgraph=True)
    pages = (batch.k_pages.nan_to_num(0.0), batch.v_pages.nan_to_num(0.0))
    torch.testing.assert_close(step(batch.stacked, *pages), tw.paged_attention(batch.stacked, *pages, batch.table, batch.lengths, mask=masks.causal))


@pytest.mark.parametrize("queries", [[5, 1, 0], [1, 1, 1]])
def test_packed_queries_compiled(queries: list[int]) -> None:
    """How many queries a sequence has is data: other offsets, the same graph. What is wrong with them is found by an assert."""
    batch = make_batch(queries, [20, 9, 12], 4)
    pages = (batch.k_pages.nan_to_num(0.0), batch.v_pages.nan_to_num(0.0))
    query, offsets = batch.packed
    call = lambda q, cu: tw.paged_attention(q, *pages, batch.table, batch.lengths, cu, mask=masks.causal)
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, offsets), call(query, offsets))
    with pytest.raises(RuntimeError, match="must start at 0"):
        compiled(query, offsets + 1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 150)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 5, 8, 16, 32, 48, 64, 65, 128, 256]),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (8, 8)]),
    st.sampled_from([(1, 3), (8, 8), (40, 24), (64, 64), (80, 128)]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([None, "causal", "window"]),
    st.integers(0, 2**16),
)
def test_generated(sequences: Any, size: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, mask: str | None, seed: int) -> None:
    queries, keys = [min(q, kv) for q, kv in sequences], [kv for _, kv in sequences]
    batch = make_batch(queries, keys, size, *heads, dims, dtype=dtype, seed=seed)
    chosen = {None: None, "causal": masks.causal, "window": window}[mask]
    assert_right(batch, called(batch, mask=chosen, backend="cpp"), mask=chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 16)}, r"or \(tokens, heads, head dim\) with cu_seqlens_q, got \(2, 4, 16\)"),
        ({"k_pages": torch.zeros(5, 8, 2)}, r"k_pages must be a tensor \(pages, page size, kv heads, head dim\), got shape \(5, 8, 2\)"),
        ({"k_pages": torch.zeros(5, 8, 2, 12)}, "k_pages the query's head dim 16"),
        ({"k_pages": torch.zeros(5, 8, 2, 16).half(), "v_pages": torch.zeros(5, 8, 2, 16).half()}, "k_pages must have the query's dtype torch.float32"),
        ({"k_pages": torch.zeros(5, 8, 3, 16), "v_pages": torch.zeros(5, 8, 3, 16)}, "multiple of kv heads"),
        ({"page_table": torch.zeros(2, 4)}, r"page_table must be an int32 tensor \(batch, most pages\)"),
        ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, "page_table has 3 sequences, kv_lengths 2"),
        ({"page_table": torch.full((2, 4), 5, dtype=torch.int32)}, r"page_table\[0, 0\] is 5, but there are 5 pages; sequence 0 has 9 keys"),
        ({"page_table": torch.full((2, 4), -1, dtype=torch.int32)}, r"page_table\[0, 0\] is -1"),
        ({"kv_lengths": torch.tensor([9, 33], dtype=torch.int32)}, r"from 0 to 32, which 4 pages of 8 rows hold .*, got \[9, 33\]"),
        ({"kv_lengths": torch.tensor([9, -1], dtype=torch.int32)}, "kv_lengths must be from 0 to 32"),
        ({"query": torch.zeros(2, 4, 10, 16)}, r"sequence 0 has 10 queries but kv_lengths\[0\] is 9: it counts the keys of the queries, too"),
        ({"query": torch.zeros(30, 4, 16), "cu_seqlens_q": torch.tensor([0, 9, 30], dtype=torch.int32)}, r"sequence 1 has 21 queries"),
        ({"k_scale": 0.0}, "k_scale is what keys or values were divided by, a number above 0, got 0.0"),
        ({"v_scale": float("nan")}, "v_scale is what keys or values were divided by"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}, r"query must be a tensor \(tokens, heads, head dim\), as cu_seqlens_q is given"),
        ({"query": torch.zeros(2, 4, 16), "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_seqlens_q describes 1 sequences, page_table 2"),
        ({"query": torch.zeros(2, 4, 16), "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32)}, "cu_seqlens_q must start at 0"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "keys in pages take a mask function"),
        ({"k_scale": torch.ones(4)}, "k_scale must be a number, or a float tensor with one for each of the 2 kv heads"),
        ({"v_scale": True}, "v_scale must be a number, or a float tensor with one for each of the 2 kv heads, got bool"),
        ({"backend": "native"}, "it takes no keys and values in pages"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([9, 20], dtype=torch.int32)
    arguments = {"query": torch.zeros(2, 4, 1, 16), "k_pages": torch.zeros(5, 8, 2, 16), "v_pages": torch.zeros(5, 8, 2, 16)}
    with pytest.raises((tw.InputError, tw.BackendError), match=message):
        tw.paged_attention(**(arguments | {"page_table": table, "kv_lengths": lengths} | change))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("queries", [[1, 2], [40, 20], [20]], ids=str)
def test_tokens_past_the_last_sequence_see_nothing(queries: list[int], engine: str) -> None:
    batch = make_batch(queries, [n + 30 for n in queries], 16)
    tokens, offsets = batch.packed
    more, used = torch.cat([tokens, torch.randn(9, 4, 16)]), len(tokens)
    for mask in (None, masks.causal):
        out, lse = tw.paged_attention(more, batch.k_pages, batch.v_pages, batch.table, batch.lengths, offsets, mask=mask, return_lse=True, backend=engine)
        assert bool((out[used:] == 0).all()) and bool((lse[:, used:] == -torch.inf).all())
        assert_right(batch, apart(batch, out, lse), mask=mask)


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_of_other_forms(engine: str) -> None:
    batch = make_batch([1, 1], [37, 90], 16)
    wide = torch.cat([batch.table, batch.table], 1)[:, : batch.table.shape[1]]
    assert not wide.is_contiguous()
    for table, lengths in ((wide, batch.lengths), (batch.table.long(), batch.lengths.long()), (batch.table.t().contiguous().t(), batch.lengths)):
        assert_right(batch, called(batch._replace(table=table, lengths=lengths), backend=engine))
