"""Bands in the CUDA forward, on a GPU: tiles found by arithmetic, edges by comparing indices."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.test_fused import ON_HOPPER
from tests.support.bands import BANDS, FAR, band, band_case
from tests.support.error_rule import check
from tilewise import masks, scores
from tilewise.engines.cuda import nvrtc
from tilewise.engines.gpu.kernel_cache import Counts

MISSING = "needs a Hopper GPU" if not ON_HOPPER else nvrtc.refusal()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

LENGTHS = [(1000, 1000), (300, 700), (700, 300), (2048, 2048), (257, 1)]


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_bands(dim: int, lengths: tuple[int, int]) -> None:
    for limits in BANDS:
        check(band_case(dim, lengths, limits), "cuda", "cuda", torch.bfloat16)


@pytest.mark.parametrize("limits", BANDS[:4], ids=str)
def test_more_query_tiles_than_programs(limits: tuple[int, int]) -> None:
    """Programs take several, and heads are mixed in groups."""
    check(band_case(128, (1024, 1024), limits, batch=3, heads=32, kv_heads=16), "cuda", "cuda", torch.bfloat16)


def test_other_limits_are_other_numbers_of_one_kernel() -> None:
    def step(low: int, high: int, length: int) -> None:
        q, k, v = inputs(64, (length, length), torch.bfloat16)
        tw.attention(q, k, v, mask=band(low, high), enable_gqa=True, backend="cuda")

    step(-100, 0, 512)
    before = Counts.built + Counts.loaded
    for low, high, length in ((-FAR, 0, 512), (-7, 3, 700), (20, 40, 1000)):
        step(low, high, length)
    assert Counts.built + Counts.loaded == before


SCORES: dict[str, Any] = {
    "ALiBi": lambda draw: [scores.alibi(4)],
    "softcap": lambda draw: [scores.softcap(20.0)],
    "by query and key": lambda draw: [lambda s, b, h, q, kv: s + 0.01 * (q - 2 * kv)],
    "sinks": lambda draw: [scores.sinks(draw.normal(4))],
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)])
def test_with_scores(name: str, dim: int, dtype: torch.dtype) -> None:
    for limits in BANDS[:6]:
        check(band_case(dim, (700, 900), limits, score=SCORES[name], through=("out",)), "cuda", "cuda", dtype)


@pytest.mark.parametrize("dim", [64, 128])
def test_with_dropout(dim: int) -> None:
    for limits in BANDS[:6]:
        check(band_case(dim, (500, 700), limits, options={"dropout_p": 0.25, "seed": 7}), "cuda", "cuda", torch.bfloat16)


def inputs(dim: int, lengths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(dim + lengths[0] + lengths[1])
    return [torch.randn(2, heads, length, dim, device="cuda", dtype=dtype) for heads, length in ((4, lengths[0]), (2, lengths[1]), (2, lengths[1]))]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("low", [-FAR, -300])
def test_maxima_that_rise_along_the_keys(dim: int, low: int) -> None:
    """From the diagonal down, far beyond what the first tile's maximum leaves room for."""
    q, k, v = inputs(dim, (1000, 1000), torch.bfloat16)
    q, k = 6 * q, k * torch.linspace(3.0, 0.1, 1000, device="cuda", dtype=k.dtype)[:, None]
    found, wanted, plain = (
        tw.attention(*tensors, mask=band(low, 0), enable_gqa=True, backend=engine)
        for tensors, engine in (((q, k, v), "cuda"), ((q.double(), k.double(), v.double()), "reference"), ((q, k, v), "triton"))
    )
    assert (found - wanted).norm() <= 2 * (plain - wanted).norm()


def test_nan_outside_the_band_stays_outside() -> None:
    q, k, v = inputs(128, (1000, 1000), torch.bfloat16)
    k[:, :, 700:], v[:, :, 700:] = math.nan, math.nan
    out = tw.attention(q, k, v, mask=masks.causal, enable_gqa=True, backend="cuda")
    assert out[:, :, :700].isfinite().all() and out[:, :, 700:].isnan().all()


def test_gradients() -> None:
    """The backward is the Gluon engine's; it is given what the forward found."""
    leaves = [t.requires_grad_() for t in inputs(128, (1000, 1000), torch.bfloat16)]
    mask, grad = masks.causal & masks.sliding_window(300), torch.randn_like(leaves[0])
    found = [torch.autograd.grad(tw.attention(*leaves, mask=mask, enable_gqa=True, backend=engine), leaves, grad) for engine in ("cuda", "gluon")]
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).float().norm() <= 5e-3 * theirs.float().norm()


def test_in_a_cuda_graph() -> None:
    """Nothing is read back, and the graph follows its inputs."""
    q, k, v = inputs(128, (2048, 2048), torch.bfloat16)

    def run() -> Tensor:
        return tw.attention(q, k, v, mask=masks.causal, enable_gqa=True, backend="cuda")

    wanted = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert not torch.equal(captured, wanted) and torch.equal(captured, run())
