"""torch.func around attention, and batched gradients: the same as one call after the other; what cannot be says so."""

from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.nn import functional

import tilewise as tw
from tests.engines.test_faults import DEVICE, engines
from tilewise import scores
from tilewise.errors import BackendError
from tilewise.flex import flex_attention
from tilewise.functional import scaled_dot_product_attention

HEADS, LENGTH, DIM, MANY = 2, 6, 8, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def qkv() -> list[Tensor]:
    return [normal(1, HEADS, LENGTH, DIM, seed=n) for n in range(3)]


def attend(engine: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, logits: Tensor) -> Tensor:
    score = [lambda s, b, h, i, j: s * bias[j], scores.sinks(logits)]
    out: Tensor = tw.attention(query, key, value, score=score, is_causal=True, backend=engine)
    return out


def leaves() -> list[Tensor]:
    return [*qkv(), normal(LENGTH, seed=3), normal(HEADS, seed=4)]


def each(function: Any, *batched: Tensor) -> Tensor:
    return torch.stack([function(*args) for args in zip(*batched, strict=True)])


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@engines
def test_grad_and_vjp(engine: str) -> None:
    given = leaves()
    wanted = torch.autograd.grad(attend(engine, *(watched := [t.clone().requires_grad_() for t in given])).square().sum(), watched)
    assert_same(func.grad(lambda *t: attend(engine, *t).square().sum(), argnums=(0, 1, 2, 3, 4))(*given), wanted)
    out, backward = func.vjp(lambda *t: attend(engine, *t), *given)
    assert_same(backward(2 * out), wanted)


@engines
def test_vmap_over_tensors_captures_and_sinks(engine: str) -> None:
    query, key, value, _, logits = leaves()
    queries, biases, sinks = normal(MANY, *query.shape, seed=5), normal(LENGTH, MANY, seed=6), normal(MANY, HEADS, seed=7)
    found = func.vmap(lambda q, b, s: attend(engine, q, key, value, b, s), in_dims=(0, 1, 0))(queries, biases, sinks)
    assert_same(found, each(lambda q, b, s: attend(engine, q, key, value, b, s), queries, biases.t(), sinks))
    twice = func.vmap(func.vmap(lambda q, b: attend(engine, q, key, value, b, logits), in_dims=(None, 0)), in_dims=(0, None))(queries, biases.t())
    assert_same(twice[1, 2], attend(engine, queries[1], key, value, biases[:, 2], logits))


@engines
def test_jacobians_and_per_sample_gradients(engine: str) -> None:
    query, key, value, bias, logits = leaves()
    wanted = torch.autograd.functional.jacobian(lambda b: attend(engine, query, key, value, b, logits), bias)
    assert_same(func.jacrev(lambda b: attend(engine, query, key, value, b, logits))(bias), wanted)
    assert_same(torch.autograd.functional.jacobian(lambda b: attend(engine, query, key, value, b, logits), bias, vectorize=True), wanted)
    queries = normal(MANY, *query.shape, seed=5)
    loss = lambda b, q: attend(engine, q, key, value, b, logits).square().sum()
    assert_same(func.vmap(func.grad(loss), in_dims=(None, 0))(bias, queries), each(lambda q: func.grad(loss)(bias, q), queries))


@engines
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_batched_gradients(engine: str, through: str) -> None:
    given = [t.requires_grad_() for t in leaves()]
    score = [lambda s, b, h, i, j: s * given[3][j], scores.sinks(given[4])]
    out, lse = tw.attention(*given[:3], score=score, return_lse=True, backend=engine)
    results = {"out": [out], "lse": [lse], "both": [out, lse]}[through]
    grads = [normal(MANY, *t.shape, seed=8) for t in results]
    found = torch.autograd.grad(results, given, grads, is_grads_batched=True, retain_graph=True)
    for n in range(MANY):
        wanted = torch.autograd.grad(results, given, [g[n] for g in grads], retain_graph=True)
        assert_same([t[n] for t in found], list(wanted))


def test_gradcheck_with_batched_gradients() -> None:
    given = [t.double()[:, :1, :3].requires_grad_() for t in qkv()]
    assert torch.autograd.gradcheck(lambda *t: tw.attention(*t, is_causal=True, backend="cpp"), given, check_batched_grad=True)


@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_the_drop_ins(mask: str | None) -> None:
    """With masks that are batched themselves: nobody can look at what they hold."""
    query, key, value = qkv()
    bias = normal(MANY, LENGTH, LENGTH, seed=6)
    masks = {None: None, "boolean": (bias < 1) | torch.eye(LENGTH, dtype=torch.bool), "additive": bias}[mask]
    queries = normal(MANY, *query.shape, seed=5)
    with tw.attention_backend("flex"):
        if masks is None:
            found = func.vmap(lambda q: scaled_dot_product_attention(q, key, value))(queries)
            assert_same(func.vmap(lambda q: flex_attention(q, key, value))(queries), found)
        else:
            found = func.vmap(lambda q, m: scaled_dot_product_attention(q, key, value, m))(queries, masks)
    assert_same(found, each(lambda q, *m: functional.scaled_dot_product_attention(q, key, value, *m), queries, *([] if masks is None else [masks])))


@engines
def test_what_has_no_derivative_says_so(engine: str) -> None:
    query, key, value = qkv()
    once = lambda x: tw.attention(x, key, value, backend=engine).sum()
    for wrong in (lambda: func.grad(lambda x: func.grad(once)(x).sum())(query), lambda: torch.autograd.functional.hessian(once, query)):
        with pytest.raises(BackendError, match="cannot be differentiated twice"):
            wrong()
    for wrong in (lambda: func.jacfwd(once)(query), lambda: func.hessian(once)(query)):
        with pytest.raises(BackendError, match="no forward-mode derivative"):
            wrong()
