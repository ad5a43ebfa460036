"""float8 keys and values beside a wider query, as torch's flex_attention takes them: converted exactly, on every engine, and the call is remembered."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import tilewise as tw
from tilewise import masks, scores
from tilewise.engines.cpp import missing
from tilewise.frontend import call_cache

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ENGINES = ["reference", "blocked", "native", pytest.param("cpp", marks=pytest.mark.skipif(missing() is not None, reason=str(missing())))]


def inputs(dtype: torch.dtype, narrow: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    return q.to(dtype), k.to(narrow), v.to(narrow)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("narrow", FLOAT8, ids=str)
def test_is_the_same_as_converting_before(narrow: torch.dtype, engine: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = inputs(dtype, narrow)
        out = tw.attention(q, k, v, is_causal=True, backend=engine)
        assert out.dtype == dtype and torch.equal(out, tw.attention(q, k.to(dtype), v.to(dtype), is_causal=True, backend=engine))


@pytest.mark.parametrize("narrow", FLOAT8, ids=str)
def test_every_number_is_exact_in_16_bits(narrow: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(narrow)
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(every.to(dtype).double(), every.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("narrow", FLOAT8, ids=str)
def test_agrees_with_torchs_flex_attention(narrow: torch.dtype) -> None:
    q, k, v = inputs(torch.float32, narrow)

    def score(s, b, h, i, j):  # type: ignore[no-untyped-def]  # as users write them
        return s + 0.1 * (i - j)

    for keys, values in ((k, v), (k, v.float()), (k.float(), v), (k, v.to(FLOAT8[0]))):
        torch.testing.assert_close(tw.flex.flex_attention(q, keys, values, score), torchs.flex_attention(q, keys, values, score), rtol=1e-4, atol=1e-5)


def test_the_query_gets_its_gradient_and_the_call_is_remembered() -> None:
    q, k, v = inputs(torch.bfloat16, FLOAT8[0])
    q.requires_grad_()
    tw.attention(q, k, v, mask=masks.causal, backend="blocked")
    known = len(call_cache._calls)
    out = tw.attention(q, k, v, mask=masks.causal, backend="blocked")
    assert len(call_cache._calls) == known > 0
    wanted = tw.attention(q, k.bfloat16(), v.bfloat16(), mask=masks.causal, backend="blocked")
    for x, y in zip(torch.autograd.grad(out.sum(), q), torch.autograd.grad(wanted.sum(), q), strict=True):
        assert torch.equal(x, y)


def test_under_autocast_and_compiled() -> None:
    q, k, v = inputs(torch.float32, FLOAT8[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = tw.attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, tw.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    compiled = torch.compile(tw.attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), tw.attention(q, k, v))


@pytest.mark.parametrize("engine", ["reference", "blocked", "cpp"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "flat"])
def test_scales_are_those_of_keys_and_values(layout: str, engine: str) -> None:
    """By head and as one number, with a score on top, grouped heads, gradients of the query."""
    q, k, v = torch.randn(3, 1, 4, 40, 16, generator=torch.Generator().manual_seed(1))
    k, v = k[:, :2].to(FLOAT8[0]), v[:, :2].to(FLOAT8[0])
    for k_scale, v_scale in ((0.5, 2.0), (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])), (None, torch.tensor(1.5)), (2, None)):
        of_k, of_v = (torch.as_tensor(1.0 if s is None else s).float().expand(2).view(1, 2, 1, 1) for s in (k_scale, v_scale))
        given = [t.clone().requires_grad_() if t.dtype == torch.float32 else t for t in (q, k, v)]
        options = {"score": scores.softcap(3.0), "mask": masks.causal, "enable_gqa": True, "backend": engine, "return_lse": True}
        shaped, more = given, {}
        if layout != "bhsd":
            shaped, more = [t.transpose(1, 2) for t in given], {"layout": "bshd"}
        if layout == "flat":
            shaped, more = [t.flatten(2) for t in shaped], {"heads": 4}
        found, lse = tw.attention(*shaped, k_scale=k_scale, v_scale=v_scale, **options, **more)
        wanted, right = tw.attention(given[0], k.float() * of_k, v.float() * of_v, **options)
        if layout != "bhsd":
            wanted = wanted.transpose(1, 2) if layout == "bshd" else wanted.transpose(1, 2).flatten(2)
        torch.testing.assert_close((found, lse), (wanted, right), rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(out.square().sum(), given[0], retain_graph=True)[0] for out in (found, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", [(0.5, 2.0), (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])), (None, 1.5), (None, None)], ids=str)
def test_scales_of_packed_sequences(scales: tuple[Any, Any]) -> None:
    q, k, v = torch.randn(3, 40, 4, 16, generator=torch.Generator().manual_seed(1))
    k, v = k[:, :2].to(FLOAT8[0]), v[:, :2].to(FLOAT8[0])
    of_k, of_v = (torch.as_tensor(1.0 if s is None else s).float().expand(2).view(1, 2, 1) for s in scales)
    more = {"mask": masks.causal, "score": scores.softcap(3.0), "enable_gqa": True, "return_lse": True}
    offsets = torch.tensor([0, 13, 40])
    found = tw.varlen_attention(q, k, v, offsets, k_scale=scales[0], v_scale=scales[1], **more)
    wanted = tw.varlen_attention(q, k.float() * of_k, v.float() * of_v, offsets, **more)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_scales_that_do_not_fit() -> None:
    q, k, v = inputs(torch.bfloat16, FLOAT8[0])
    with pytest.raises(tw.InputError, match=r"k_scale must be a number, or a float tensor with one for each of the 2 kv heads, got torch.float32 \(3,\)"):
        tw.attention(q, k, v, k_scale=torch.ones(3))
    with pytest.raises(tw.InputError, match=r"v_scale must be a number, .* got list"):
        tw.attention(q, k, v, v_scale=[1.0, 2.0])  # type: ignore[call-overload]  # on purpose


def test_explain_says_so() -> None:
    q, k, v = inputs(torch.bfloat16, FLOAT8[0])
    assert "converted to bfloat16 first: key from float8_e4m3fn, value from float8_e4m3fn" in str(tw.explain(q, k, v))
    assert "converted" not in str(tw.explain(q, q, q))


def test_a_float8_query_is_refused() -> None:
    q, k, v = inputs(FLOAT8[0], FLOAT8[0])
    with pytest.raises(tw.InputError, match=r"query has dtype torch.float8_e4m3fn; allowed are .*, and for key and value float8_e4m3fn and float8_e5m2"):
        tw.attention(q, k, v)
