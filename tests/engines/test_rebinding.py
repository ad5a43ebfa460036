"""A pass prepared for one problem and bound to another launches the same kernels with the same arguments as one prepared for that other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.support.recorded_launches import Recorded, record
from tilewise import masks
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import bwd_chunks, structure
from tilewise.frontend import call_cache

pytestmark = pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))

LENGTH = 300


def documents(seed: int) -> dict[str, Any]:
    ids = torch.randint(0, 4, (LENGTH,), generator=torch.Generator().manual_seed(seed)).sort().values
    return {"mask": masks.document(ids) & masks.causal}


def padding(seed: int) -> dict[str, Any]:
    return {"mask": masks.padding(torch.tensor([100 + seed, 200 - seed]))}


def windows(seed: int) -> dict[str, Any]:
    return {"mask": documents(seed)["mask"] & masks.sliding_window(64)}


def bias(seed: int) -> dict[str, Any]:
    table = torch.randn(4, LENGTH, generator=torch.Generator().manual_seed(seed))
    return {**documents(seed), "score": lambda s, b, h, q, kv: s + table[h, kv]}


def sinks(seed: int) -> dict[str, Any]:
    return {**documents(seed), "score": tw.scores.sinks(torch.full((4,), float(seed)))}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {"documents": documents, "padding": padding, "windows": windows, "bias": bias, "sinks": sinks}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    return record(monkeypatch)


def step(backend: str, asked: dict[str, Any], transposed: bool = False) -> None:
    def tensor(heads: int) -> torch.Tensor:
        shape = (2, LENGTH, heads, 64) if transposed else (2, heads, LENGTH, 64)
        t = torch.zeros(shape, dtype=torch.bfloat16)
        return (t.transpose(1, 2) if transposed else t).requires_grad_()

    query, key, value = tensor(4), tensor(2), tensor(2)
    out = tw.attention(query, key, value, backend=backend, enable_gqa=True, **asked)
    out.backward(torch.zeros_like(out))
    assert query.grad is not None and query.grad.stride() == query.stride() and key.grad is not None and key.grad.stride() == key.stride()


@pytest.mark.parametrize(
    ("backend", "case"), [(backend, case) for backend in ("cuda", "gluon", "triton") for case in CASES if backend != "cuda" or case not in ("bias", "sinks")]
)
@pytest.mark.parametrize("sums", [2**30, 2**16], ids=["whole", "in chunks"])
def test_a_bound_pass_is_as_good_as_a_new_one(recorded: list[Recorded], backend: str, case: str, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwd_chunks, "MAX_SUMS_BYTES", sums)
    monkeypatch.setattr(structure, "_prepared", {})
    make = CASES[case]
    problems = [make(seed) for seed in (1, 2)]  # kept: their tile maps are the same in the second round
    for asked in problems:
        step(backend, asked)
    prepared_once = len(structure._prepared)
    bound, fresh = list(recorded), []
    for asked in problems:
        recorded.clear()
        monkeypatch.setattr(structure, "_prepared", {})
        call_cache.forget()
        step(backend, asked)
        fresh += recorded
    kernels = [r.kernel for r in fresh]
    assert len(structure._prepared) == prepared_once  # as many as one problem needs
    assert [r.kernel for r in bound if r.kernel in kernels] == kernels and len(set(kernels)) >= 3
    assert [r for r in bound if r.kernel in kernels] == fresh


@pytest.mark.parametrize("backend", ["cuda", "gluon", "triton"])
def test_gradients_lie_as_their_inputs_do(recorded: list[Recorded], backend: str) -> None:
    step(backend, documents(3), transposed=True)
