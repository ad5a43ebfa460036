"""What attention means: every engine, over the same cases, held to the error rule."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.cases import CASES, LAYOUTS, STRIDES, Case, function, make, shape_in
from tests.support.error_rule import check
from tilewise import masks, scores

ENGINES = ("reference", "blocked", "cpp")

engines = pytest.mark.parametrize("engine", ENGINES)


def dtypes_of_cpp(k: int, case: Case) -> list[torch.dtype]:
    """float32 and one other of the case's dtypes, the next one in turn: each program is compiled, which takes its time."""
    others = [d for d in case.dtypes if d != torch.float32]
    return [d for d in [torch.float32, *(others[k % len(others) :][:1] if others else [])] if d in case.dtypes]


def every_engine() -> Iterator[Any]:
    """Engine after engine for each case, so that they share its truth."""
    for k, case in enumerate(CASES):
        for dtype in case.dtypes:
            serve = {"reference": True, "blocked": True, "cpp": dtype in dtypes_of_cpp(k, case), "native": case.native}
            for engine in (name for name, does in serve.items() if does):
                yield pytest.param(case, dtype, engine, id=f"{case}-{str(dtype).removeprefix('torch.')}-{engine}")


@pytest.mark.parametrize(("case", "dtype", "engine"), [*every_engine()])
def test_engine(case: Case, dtype: torch.dtype, engine: str) -> None:
    if (case.name, dtype, engine) == ("trigonometric", torch.float64, "cpp"):
        pytest.skip("cos(kv * 0.1) is a float32 number, and the C library's cosine differs from torch's in its last bit")
    check(case, engine, "cpu", dtype)


ROW = torch.tensor([3])


@pytest.mark.parametrize("spoil", [lambda t: t * 1.001, lambda t: t.index_fill(2, ROW, 0.0), lambda t: t.index_fill(2, ROW, torch.nan)])
def test_the_rule_notices(spoil: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    original = tw.attention
    monkeypatch.setattr(tw, "attention", lambda *args, **options: spoil(original(*args, **options)))
    with pytest.raises(AssertionError, match=r"out: (largest error|NaN differs)"):
        check(next(c for c in CASES if c.name == "causal"), "blocked")


def test_case_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)


# -- what an output looks like ---------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("case", LAYOUTS[:5], ids=str)
@pytest.mark.parametrize("strides", ["contiguous", "last stride not 1", "reversed", "sliced"])
def test_output_strides_follow_the_query(case: Case, strides: str, engine: str) -> None:
    shape = shape_in(case.layout, case.batch, case.heads, case.q_len, case.head_dim)
    view = STRIDES[strides]
    query, key, value = (view.view(torch.randn(view.stored(shape)), shape) for _ in range(3))
    out = tw.attention(query, key, value, backend=engine, **make(case, torch.float32, torch.float32).arguments())
    assert out.shape == query.shape
    if query.dim() == 3 and query.stride(0) < query.stride(2):  # heads lie outside of the batch: they are put side by side by a copy
        assert out.is_contiguous()
        return
    order = [*sorted(range(query.dim() - 1), key=lambda d: -query.stride(d)), query.dim() - 1]  # the last stride is 1 whatever the query's
    assert out.permute(order).is_contiguous(), f"query strides {query.stride()}, output strides {out.stride()}"


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_and_lse_dtypes(dtype: torch.dtype, engine: str) -> None:
    q = torch.randn(2, 3, 5, 8, dtype=dtype)
    out, lse = tw.attention(q, q, q, return_lse=True, backend=engine)
    assert out.dtype == dtype and lse.shape == (2, 3, 5)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@engines
def test_lse_is_the_logarithm_of_the_sum_of_exponentials(engine: str) -> None:
    q, k = torch.randn(2, 1, 2, 9, 8, dtype=torch.float64)
    _, lse = tw.attention(q, k, k, score=scores.softcap(1.5), scale=0.7, return_lse=True, backend=engine)
    torch.testing.assert_close(lse, torch.logsumexp(1.5 * torch.tanh(0.7 * q @ k.mT / 1.5), -1))


@engines
def test_inputs_are_not_changed(engine: str) -> None:
    tensors = [torch.randn(1, 2, 150, 8, requires_grad=True) for _ in range(3)]
    bias = torch.randn(2, 150, requires_grad=True)
    before = [t.detach().clone() for t in (*tensors, bias)]
    tw.attention(*tensors, mask=masks.causal, score=lambda s, b, h, q, kv: s + bias[h, q], backend=engine).sum().backward()
    assert all(torch.equal(t, b) for t, b in zip((*tensors, bias), before, strict=True))


# -- dropout ---------------------------------------------------------------------------------------------------------


def dropped(p: float, seed: int, engine: str, length: int = 70) -> Tensor:
    """The weights themselves: with the identity as values, out is the dropped-out weight matrix."""
    q = torch.zeros(2, 3, length, 4, dtype=torch.float64)
    eye = torch.eye(length, dtype=torch.float64).expand(2, 3, -1, -1)
    return tw.attention(q, q, eye, dropout_p=p, seed=seed, backend=engine) * length


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_same_elements_on_every_engine(p: float) -> None:
    one, other = dropped(p, 3, "blocked"), dropped(p, 3, "reference")
    assert torch.equal(one == 0, other == 0)
    torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


@engines
@pytest.mark.parametrize("p", [0.05, 0.3, 0.75])
def test_dropout_rate_and_mean(p: float, engine: str) -> None:
    weights = dropped(p, 11, engine)
    rate = (weights == 0).double().mean().item()
    bound = 5 * (p * (1 - p) / weights.numel()) ** 0.5 + 0.5 / 65536
    assert abs(rate - p) < bound
    torch.testing.assert_close(weights[weights > 0], torch.full_like(weights[weights > 0], 65536 / (65536 - round(p * 65536))))


@engines
def test_dropout_with_another_seed_differs(engine: str) -> None:
    patterns = [dropped(0.5, seed, engine) == 0 for seed in (0, 1, 2**32, 2**62)]
    for k, one in enumerate(patterns):
        for other in patterns[:k]:
            agree = (one == other).double().mean().item()
            assert 0.45 < agree < 0.55


@engines
def test_dropout_gradients_use_the_same_pattern(engine: str) -> None:
    value = torch.randn(1, 1, 40, 4, dtype=torch.float64, requires_grad=True)
    q = torch.zeros(1, 1, 40, 4, dtype=torch.float64)
    tw.attention(q, q, value, dropout_p=0.5, seed=5, backend=engine).sum().backward()
    eye = torch.eye(40, dtype=torch.float64)[None, None]
    columns = tw.attention(q, q, eye, dropout_p=0.5, seed=5, backend=engine).sum(2).transpose(-1, -2).reshape(1, 1, 40, 1)
    torch.testing.assert_close(value.grad, columns.expand_as(value))


@engines
def test_dropout_of_nothing_and_of_everything(engine: str) -> None:
    q = torch.randn(1, 2, 37, 8, requires_grad=True)
    plain = tw.attention(q, q, q, backend=engine)
    assert torch.equal(tw.attention(q, q, q, dropout_p=0.0, seed=4, backend=engine), plain)
    out, lse = tw.attention(q, q, q, dropout_p=1.0, seed=4, return_lse=True, backend=engine)
    assert torch.equal(out, torch.zeros_like(out)) and lse.isfinite().all()
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_unseeded_dropout_follows_torchs_generator() -> None:
    q = torch.randn(1, 2, 37, 8)
    torch.manual_seed(1)
    first, second = (tw.attention(q, q, q, dropout_p=0.5, backend="blocked") for _ in range(2))
    torch.manual_seed(1)
    again = tw.attention(q, q, q, dropout_p=0.5, backend="blocked")
    assert torch.equal(first, again) and not torch.equal(first, second)


# -- sinks -----------------------------------------------------------------------------------------------------------


@engines
def test_a_sink_is_a_key_whose_value_is_zero(engine: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    logits = torch.randn(2, dtype=torch.float64)
    out, lse = tw.attention(q, k, v, score=scores.sinks(logits), return_lse=True, backend=engine)
    s = torch.cat([q @ k.mT / 8**0.5, logits.view(1, 2, 1, 1).expand(2, -1, 9, 1)], -1)
    torch.testing.assert_close(out, s.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, s.logsumexp(-1))


@engines
def test_a_sink_of_minus_infinity_is_no_sink(engine: str) -> None:
    q = torch.randn(1, 2, 9, 8)
    logits = torch.full((2,), -torch.inf, requires_grad=True)
    out = tw.attention(q, q, q, mask=lambda b, h, i, j: i < 3, score=scores.sinks(logits), backend=engine)
    torch.testing.assert_close(out, tw.attention(q, q, q, mask=lambda b, h, i, j: i < 3, backend=engine))
    (grad,) = torch.autograd.grad(out.sum(), logits)
    assert torch.equal(grad, torch.zeros(2))


FAR_FROM_ORDINARY = [
    Case("head dim 1024", head_dim=1024, batch=1, heads=2, q_len=70),
    Case("V dim 1000", head_dim=24, v_dim=1000, batch=1, heads=2, q_len=40, mask=function(masks.causal)),
    Case(
        "head dim 600, decoding",
        head_dim=600,
        v_dim=700,
        batch=2,
        heads=4,
        kv_heads=2,
        q_len=1,
        kv_len=300,
        mask=function(lambda b, h, q, kv: (kv > 120) | (b > 0)),
    ),
]


@pytest.mark.parametrize("engine", ["auto", "blocked", "reference"])
@pytest.mark.parametrize("case", FAR_FROM_ORDINARY, ids=str)
def test_head_dims_above_those_of_kernels(case: Case, engine: str) -> None:
    """Autoencoders of images and videos have one head, as wide as their channels."""
    for dtype in (torch.float32, torch.bfloat16):
        check(case, engine, "cpu", dtype)


def test_a_model_with_head_dims_above_512_can_be_intercepted() -> None:
    q = torch.randn(1, 1, 64, 1024)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with tw.intercept_sdpa():
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(q, q, q), wanted)
