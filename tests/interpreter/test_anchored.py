"""Anchored softmax (docs/kernels/softmax.md) in Triton's interpreter: what it computes, and what it computes again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import CASES, Case
from tests.support.error_rule import check
from tilewise import masks, scores
from tilewise.core.output import Output
from tilewise.core.problem import Options, make_problem
from tilewise.engines.gluon import launches
from tilewise.engines.gpu import structure
from tilewise.engines.gpu.device_map import device_map_of
from tilewise.engines.gpu.launch import prepare
from tilewise.engines.triton.kernels import forward
from tilewise.frontend import call_cache

LARGEST = 20_000  # score elements of a case
LENGTH = 104


@pytest.fixture(autouse=True)
def anchored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(structure, "_prepared", {})
    call_cache.forget()
    yield
    call_cache.forget()


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many times tiles, and rows, were computed again."""
    counts = {"fwd_again": 0, "fwd_rows": 0}

    def counting(name: str) -> Any:
        function = getattr(forward, name)

        def counted(*args: Any) -> None:
            counts[name] += 1
            function(*args)

        return counted

    for name in counts:
        monkeypatch.setattr(forward, name, counting(name))
    return counts


def small(case: Case) -> bool:
    return torch.bfloat16 in case.dtypes and case.q_len > 1 and case.batch * case.heads * case.q_len * case.kv[2] <= LARGEST


@pytest.mark.parametrize("case", [case for case in CASES if small(case)], ids=str)
def test_error_rule(case: Case) -> None:
    check(case, "triton", "cpu", torch.bfloat16)


def drawn(length: int = LENGTH, dim: int = 16, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, heads, length, dim), generator=generator).bfloat16() for _ in range(3))
    return query, key, value


def assert_right(inputs: tuple[Tensor, Tensor, Tensor], **options: Any) -> None:
    found, lse = tw.attention(*inputs, return_lse=True, backend="triton", **options)
    wanted, wanted_lse = tw.attention(*[t.double() for t in inputs], return_lse=True, backend="reference", **options)
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-5, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2, atol=1e-2, equal_nan=True)


def rising(factor: float, toward_the_end: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scores whose maximum rises by `factor`, in base 2, from one end of the keys to the other."""
    query, key, value = drawn()
    query[..., 0] = 16.0
    ramp = torch.linspace(0, 1, LENGTH) if toward_the_end else torch.linspace(1, 0, LENGTH)
    key[..., 0] = (ramp * factor * 0.6931 / 16 * 4).bfloat16()  # the scale is 1/4
    return query, key, value


@pytest.mark.parametrize("mask", [None, masks.causal, masks.sliding_window(70)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("toward_the_end", [False, True])
@pytest.mark.parametrize("factor", [70.0, 110.0, 150.0, 400.0, 5000.0])
def test_rising_maxima(factor: float, toward_the_end: bool, mask: Any, again: dict[str, int]) -> None:
    assert_right(rising(factor, toward_the_end), mask=mask)
    assert again["fwd_rows"] == 0
    if mask is None:
        assert (again["fwd_again"] > 0) == (factor > 140.0 and not toward_the_end)  # the end, where there are fewer keys than a tile's, comes first


def test_ordinary_scores_are_computed_once(again: dict[str, int]) -> None:
    for mask in (None, masks.causal):
        assert_right(drawn(), mask=mask)
    assert again == {"fwd_again": 0, "fwd_rows": 0}


def test_rows_whose_masked_tiles_hold_no_key() -> None:
    """Their anchor is that of a full tile."""
    query, key, value = drawn()
    assert_right((query * 30, key, value), mask=lambda b, h, q, kv: (kv >= 64) | ((q % 2 == 0) & (kv < 40)))


@pytest.mark.parametrize("logit", [-200.0, 0.0, 60.0, 90.0])
@pytest.mark.parametrize("factor", [0.0, 100.0, 300.0])
def test_sinks(factor: float, logit: float) -> None:
    sinks = torch.tensor([logit])
    assert_right(rising(factor, True), score=scores.sinks(sinks))
    assert_right(rising(factor, True), mask=masks.causal, score=scores.sinks(sinks))


def test_nan_and_infinity() -> None:
    for which, place, number in ((0, 40, torch.nan), (1, 70, -torch.inf), (2, 90, torch.inf)):
        inputs = drawn()
        inputs[which][0, 0, place, 3] = number
        assert_right(inputs, mask=masks.causal if which else None)


def test_huge_scores() -> None:
    query, key, value = drawn()
    for size in (1e2, 1e4, 1e9):
        assert_right((query * size, key, value), mask=masks.causal)
        assert_right((query * size, key, value))


def test_small_values() -> None:
    query, key, value = drawn()
    found = tw.attention(query, key, value * 2.0**-110, backend="triton")
    torch.testing.assert_close(found.float() * 2.0**110, tw.attention(query, key, value, backend="triton").float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("mask", [None, masks.causal], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_hopper_fix_up_computes_marked_tiles_again(dim: int, mask: Any) -> None:
    """Tiles of 192 or 128 queries, 64 rows at a time; what is not marked stays."""
    query, key, value = drawn(300, dim, heads=3)
    p = make_problem(query, key, value, mask, None, Options())[0]
    output = Output(torch.full_like(query, 7.0), torch.zeros(1, 3, 300), torch.zeros(1, 3, 300))
    rows = 192 if dim == 64 else 128
    output.lse[0, 1, rows + 3] = output.lse[0, 2, 299] = torch.nan
    tensors = launches.fwd_fixup_tensors(p, output)
    prepare(launches.fwd_fixup_launch(p, tensors), p.device).bind(p, device_map_of, False).launch(list(tensors))
    wanted, wanted_lse = tw.attention(*[t.double() for t in (query, key, value)], mask=mask, return_lse=True, backend="reference")
    marked = torch.zeros(1, 3, 300, dtype=torch.bool)
    marked[0, 1, rows : 2 * rows] = marked[0, 2, 300 // rows * rows :] = True
    torch.testing.assert_close(output.out[marked].double(), wanted[marked], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(output.lse[marked].double(), wanted_lse[marked], rtol=1e-4, atol=1e-4)
    assert bool((output.out[~marked] == 7.0).all()) and bool((output.lse[~marked] == 0.0).all())
