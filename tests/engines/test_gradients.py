"""Gradients against finite differences, and the same bits every time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks, scores

ENGINES = ("reference", "blocked", "cpp")
engines = pytest.mark.parametrize("engine", ENGINES)


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


Q, KV, GQA_KV, WIDE = (1, 2, 5, 3), (1, 2, 6, 3), (1, 1, 6, 3), (1, 2, 6, 4)


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return tw.attention(q, k, v, enable_gqa=True, **options)


def with_relative_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor, **options: Any) -> Any:
    return plain(q, k, v, score=scores.relative_bias(table), **options)


def with_many_loads(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gain: Tensor, **options: Any) -> Any:
    picks = torch.tensor([2, 0, 0, 1, 2])

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * gain + rows[h, picks[i]] - torch.tanh(rows[h, j % 3] * gain)

    return plain(q, k, v, score=score, **options)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, **options: Any) -> Any:
    return plain(q, k, v, score=[scores.softcap(2.0), scores.sinks(logits)], **options)


def with_additive_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, **options: Any) -> Any:
    return plain(q, k, v, mask=bias, **options)


def rows_with_nothing(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q % 2 == 1) & (kv <= q)


GRADCHECKS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "plain": (plain, (Q, KV, KV), {}),
    "V wider": (plain, (Q, KV, WIDE), {"scale": 0.8}),
    "gqa, causal": (plain, (Q, GQA_KV, GQA_KV), {"mask": masks.causal}),
    "window": (plain, (Q, KV, KV), {"mask": masks.sliding_window(1)}),
    "rows with nothing": (plain, (Q, KV, KV), {"mask": rows_with_nothing}),
    "lse": (plain, (Q, KV, KV), {"return_lse": True}),
    "lse, causal, softcap": (plain, (Q, KV, KV), {"return_lse": True, "mask": masks.causal, "score": scores.softcap(1.5)}),
    "dropout": (plain, (Q, KV, KV), {"dropout_p": 0.4, "seed": 3}),
    "dropout, lse, causal": (plain, (Q, KV, KV), {"dropout_p": 0.4, "seed": 4, "mask": masks.causal, "return_lse": True}),
    "relative bias": (with_relative_bias, (Q, KV, KV, (2, 7)), {}),
    "relative bias, causal, lse": (with_relative_bias, (Q, KV, KV, (2, 7)), {"mask": masks.causal, "return_lse": True}),
    "relative bias, rows with nothing, dropout": (with_relative_bias, (Q, KV, KV, (2, 7)), {"mask": rows_with_nothing, "dropout_p": 0.3, "seed": 1}),
    "many loads": (with_many_loads, (Q, KV, KV, (2, 3), ()), {}),
    "many loads, gqa, causal": (with_many_loads, (Q, GQA_KV, GQA_KV, (2, 3), ()), {"mask": masks.causal}),
    "sinks": (with_sinks, (Q, KV, KV, (2,)), {}),
    "sinks, lse, window": (with_sinks, (Q, KV, KV, (2,)), {"mask": masks.sliding_window(2), "return_lse": True}),
    "additive mask": (with_additive_mask, (Q, KV, KV, (2, 5, 6)), {}),
}


@engines
@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradcheck(name: str, engine: str) -> None:
    f, shapes, options = GRADCHECKS[name]

    def call(*inputs: Tensor) -> Any:
        found = f(*inputs, backend=engine, **options)
        if not options.get("return_lse"):
            return found
        return found[0], found[1]

    assert torch.autograd.gradcheck(call, tensors(*shapes), fast_mode=False)


@engines
def test_gradcheck_of_lse_over_finite_rows(engine: str) -> None:
    """Rows with nothing have lse -inf, whose difference is NaN: only the others are compared, the gradient of all is finite."""
    q, k, v = tensors(Q, KV, KV)

    def call(*inputs: Tensor) -> Tensor:
        return tw.attention(*inputs, mask=rows_with_nothing, return_lse=True, backend=engine)[1][..., 1::2]

    assert torch.autograd.gradcheck(call, (q, k, v))
    lse = tw.attention(q, k, v, mask=rows_with_nothing, return_lse=True, backend=engine)[1]
    for gradient in torch.autograd.grad(lse, (q, k), torch.ones_like(lse)):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@engines
def test_only_what_requires_grad_gets_a_gradient(engine: str) -> None:
    q, k, v = (t.detach() for t in tensors(Q, KV, KV))
    table, other = (t for t in tensors((2, 7), (2, 7), seed=1))
    frozen = other.detach()
    k.requires_grad_()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i] + frozen[h, j]

    tw.attention(q, k, v, score=score, backend=engine).sum().backward()
    assert k.grad is not None and table.grad is not None and q.grad is None and frozen.grad is None


def deterministic_gradients() -> list[Tensor]:
    q, k, v = (torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))
    table = torch.randn(2, 11, generator=torch.Generator().manual_seed(3)).requires_grad_()
    where = torch.randint(0, 11, (200,), generator=torch.Generator().manual_seed(4))
    out, lse = tw.attention(
        q,
        k,
        v,
        mask=masks.sliding_window(150),
        score=lambda s, b, h, i, j: s + table[h, where[i]] * table[h, where[j]],
        deterministic=True,
        return_lse=True,
        backend="blocked",
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad((out.square().sum() + lse.sum()), (q, k, v, table))]


def test_deterministic_is_bitwise_over_30_runs() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one thread repeats itself anyway
    try:
        first = deterministic_gradients()
        for run in range(1, 30):
            assert all(torch.equal(a, b) for a, b in zip(first, deterministic_gradients(), strict=True)), f"run {run} differs"
    finally:
        torch.set_num_threads(threads)


def test_deterministic_follows_torchs_switch() -> None:
    from tilewise.core.problem import Options, make_problem

    q = torch.randn(1, 1, 3, 4)
    assert not make_problem(q, q, q, None, None, Options())[0].deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert make_problem(q, q, q, None, None, Options())[0].deterministic
        assert not make_problem(q, q, q, None, None, Options(deterministic=False))[0].deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_training_step_saves_what_its_backward_reads(return_lse: bool) -> None:
    query, key, value = torch.randn(3, 1, 2, 16, 8).requires_grad_().unbind()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = tw.attention(query, key, value, mask=masks.causal, backend="blocked", return_lse=return_lse)
    out = found[0] if return_lse else found
    assert [t.shape for t in saved] == [query.shape, key.shape, value.shape, out.shape, out.shape[:3]]
    wanted = tw.attention(query, key, value, mask=masks.causal, backend="reference", return_lse=return_lse)
    losses = [sum(t.square().sum() for t in (output if return_lse else (output,))) for output in (found, wanted)]
    for one, other in zip(*[torch.autograd.grad(loss, (query, key, value)) for loss in losses], strict=True):
        torch.testing.assert_close(one, other)


LEARNED: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "table and sinks": lambda table, sinks: {"score": [scores.relative_bias(table), scores.sinks(sinks)]},
    "function": lambda table, sinks: {"score": lambda s, b, h, q, kv: s + table[h, 0] * sinks[h], "is_causal": True},
    "additive mask": lambda table, sinks: {"mask": (table[:, :1] + sinks[:, None])[None, :, :, None]},
}


@pytest.mark.parametrize("backend", ["auto", "cpp", "blocked", "reference"])
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (0, 0, 0)], ids=["batch", "queries", "keys", "all"])
@pytest.mark.parametrize("name", LEARNED)
def test_where_no_query_meets_a_key_gradients_are_0(name: str, sizes: tuple[int, int, int], backend: str) -> None:
    """Not None: with a rank that has no tokens, DistributedDataParallel would fail in the next step."""
    batch, queries, keys = sizes
    table, sinks = torch.randn(2, 7, requires_grad=True), torch.randn(2, requires_grad=True)
    query, key = torch.randn(batch, 2, queries, 8, requires_grad=True), torch.randn(batch, 2, keys, 8, requires_grad=True)
    out = tw.attention(query, key, key, backend=backend, **LEARNED[name](table, sinks))
    for t, gradient in zip((table, sinks, query, key), torch.autograd.grad(out.sum(), (table, sinks, query, key)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))


def test_where_no_query_meets_a_key_tensors_may_be_empty() -> None:
    query, ids, table = torch.randn(1, 2, 0, 8, requires_grad=True), torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0, requires_grad=True)
    mask, score = lambda b, h, q, kv: ids[q] == ids[kv], lambda s, b, h, q, kv: s + table[h, q]
    assert tw.attention(query, query, query, mask=mask, score=score).shape == query.shape
