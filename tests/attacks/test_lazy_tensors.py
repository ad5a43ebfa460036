"""Tensors whose memory does not hold their values: negated by a flag, as `z.conj().imag` is, or zeros without memory.

tests/gpu runs these with the Triton engine, tests/interpreter some of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.engines.test_faults import DEVICE, engines
from tilewise import masks, scores
from tilewise.flex import BlockMask
from tilewise.flex import flex_attention as flex
from tilewise.functional import scaled_dot_product_attention
from tilewise.tiles import Runs, TileMap

BATCH, HEADS, LENGTH, DIM = 1, 2, 40, 16


def negated(t: Tensor) -> Tensor:
    """-(-t), the outer negation by a flag."""
    return torch._neg_view(-t) if t.dtype != torch.bool else t


def imaginary(t: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(t), -t).conj().imag if t.dtype in (torch.float32, torch.float64) else negated(t)


def zeros(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


LAZY = {"negated": negated, "imaginary part": imaginary, "zeros": zeros}
lazy = pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def qkv() -> list[Tensor]:
    return [random(BATCH, HEADS, LENGTH, DIM, seed=n) for n in range(3)]


def in_memory(t: Tensor) -> Tensor:
    """The values of a lazy tensor."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


def with_gradients(call: Callable[[Tensor], Tensor], t: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and its gradient with respect to t if it has one."""
    t = t.detach().requires_grad_(t.is_floating_point())
    out = call(t)
    return [out.detach(), *(torch.autograd.grad(out, [t], grad) if out.requires_grad else [])]


def assert_resolved(call: Callable[[Tensor], Tensor], t: Tensor) -> None:
    """A call gives the same, gradients included, for a lazy tensor and for its values in memory; before and after calls like it."""
    assert t.is_neg() or t._is_zerotensor()
    grad, plain = random(BATCH, HEADS, LENGTH, DIM, seed=9), in_memory(t)
    wanted = with_gradients(call, plain, grad)
    for given in (t, plain, t):
        for found, exact in zip(with_gradients(call, given, grad), wanted, strict=True):
            torch.testing.assert_close(found, exact, rtol=0, atol=0)


@engines
@lazy
@pytest.mark.parametrize("place", range(3), ids=["query", "key", "value"])
def test_query_key_and_value(engine: str, make: Any, place: int) -> None:
    tensors = qkv()
    assert_resolved(lambda t: tw.attention(*tensors[:place], t, *tensors[place + 1 :], is_causal=True, backend=engine), make(tensors[place]))


@engines
@lazy
@pytest.mark.parametrize("through", ["out", "lse"])
def test_the_incoming_gradient(engine: str, make: Any, through: str) -> None:
    leaves = [t.requires_grad_() for t in qkv()]
    results = dict(zip(("out", "lse"), tw.attention(*leaves, return_lse=True, backend=engine), strict=True))
    grad = make(random(*results[through].shape, seed=5))
    found, wanted = (torch.autograd.grad(results[through], leaves[:2], g, retain_graph=True) for g in (grad, in_memory(grad)))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@engines
@lazy
def test_captures_and_sinks(engine: str, make: Any) -> None:
    tensors, table, logits = qkv(), make(random(HEADS, LENGTH)), make(random(HEADS))
    assert_resolved(lambda t: tw.attention(*tensors, score=lambda s, b, h, i, j: s + t[h, j], backend=engine), table)
    assert_resolved(lambda t: tw.attention(*tensors, mask=lambda b, h, i, j: (t[h, j].detach() > -0.5) | (i == j), backend=engine), table)
    assert_resolved(lambda t: tw.attention(*tensors, score=scores.sinks(t), backend=engine), logits)


@engines
@lazy
def test_everything_at_once(engine: str, make: Any) -> None:
    """Query, key, value, both programs' captures, sinks and the incoming gradient."""
    sizes = [(BATCH, HEADS, LENGTH, DIM)] * 3 + [(HEADS, LENGTH), (LENGTH,), (HEADS,), (BATCH, HEADS, LENGTH, DIM)]
    lazily = [make(random(*size, seed=n)) for n, size in enumerate(sizes)]
    found = []
    for given in (lazily, [in_memory(t) for t in lazily]):
        leaves = [t.detach().requires_grad_() for t in given[:-1]]
        query, key, value, bias, seen, logits = leaves
        score = [lambda s, b, h, i, j, bias=bias: s * bias[h, i], scores.sinks(logits)]
        out = tw.attention(query, key, value, mask=lambda b, h, i, j, seen=seen: (seen[j] > -0.5) | (i == j), score=score, backend=engine)
        found.append([out.detach(), *torch.autograd.grad(out, [query, key, value, bias, logits], given[-1])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@engines
@lazy
def test_mask_tensors(engine: str, make: Any) -> None:
    """An additive mask by tilewise.attention and by the drop-in, which remembers what it read in a mask."""
    tensors, bias = qkv(), make(random(LENGTH, LENGTH).masked_fill(random(LENGTH, LENGTH, seed=4) > 1, float("inf")).clamp(max=3))
    assert_resolved(lambda t: tw.attention(*tensors, mask=t, backend=engine), bias)

    def by_drop_in(t: Tensor) -> Tensor:
        with tw.attention_backend(engine):
            return scaled_dot_product_attention(*tensors, attn_mask=t)

    assert_resolved(by_drop_in, bias)
    with torch.no_grad():
        assert_resolved(by_drop_in, bias)


@engines
def test_a_view_that_flips_the_sign_is_another_mask(engine: str) -> None:
    """Same address, shape and strides; only the flag differs."""
    tensors, table = qkv(), torch.arange(-10, LENGTH - 10, device=DEVICE)
    held = {"t": table}

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (held["t"][j] > 0) | (j == 10)

    found = []
    for t in (table, torch._neg_view(table), table):
        held["t"] = t
        found.append(tw.attention(*tensors, mask=mask, backend=engine))
        wanted = tw.attention(*tensors, mask=((in_memory(t) > 0) | (torch.arange(LENGTH, device=DEVICE) == 10)).expand(LENGTH, LENGTH), backend=engine)
        torch.testing.assert_close(found[-1], wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


@engines
def test_data_that_becomes_lazy_is_seen(engine: str) -> None:
    tensors, table = qkv(), random(LENGTH)
    turned = table.clone()
    call = lambda: tw.attention(*tensors, score=lambda s, b, h, i, j: s + turned[j], backend=engine)
    first = call()
    turned.data = torch._neg_view(turned.data)
    torch.testing.assert_close(call(), tw.attention(*tensors, score=lambda s, b, h, i, j: s - table[j], backend=engine), rtol=0, atol=0)
    turned.data = table.clone()
    torch.testing.assert_close(call(), first, rtol=0, atol=0)


def flipped(runs: Runs) -> Runs:
    return Runs(*[torch._neg_view(-t) for t in (runs.offsets, runs.start, runs.count)])


@engines
def test_given_tile_maps_and_their_masks(engine: str, tmp_path: Path) -> None:
    tensors, rows = qkv(), torch._neg_view(-torch.arange(LENGTH, device=DEVICE))
    built = tw.tile_map(lambda b, h, i, j: rows[i] >= j, q_len=LENGTH, kv_len=LENGTH, device=DEVICE, tile=(16, 16))
    given = TileMap(built.geometry, flipped(built.partial), flipped(built.full), built.mask, given=True)
    wanted = tw.attention(*tensors, mask=masks.causal, backend=engine)
    built.save(tmp_path / "map")
    for tiles in (built, built, given, given, TileMap.load(tmp_path / "map").to(DEVICE)):
        torch.testing.assert_close(tw.attention(*tensors, mask=tiles, backend=engine), wanted, rtol=1e-6, atol=1e-6)


@engines
def test_block_lists_and_packed_lengths(engine: str) -> None:
    tensors = qkv()
    counts = torch.tensor([[[1, 2, 2]]], dtype=torch.int32, device=DEVICE)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32, device=DEVICE)
    outs = []
    for turn in (lambda t: t, negated):
        block_mask = BlockMask.from_kv_blocks(turn(counts), turn(indices), BLOCK_SIZE=16, seq_lengths=(LENGTH, LENGTH))
        with tw.attention_backend(engine):
            outs.append(flex(*tensors, block_mask=block_mask))
        packed = [t[0].transpose(0, 1) for t in tensors]
        outs.append(tw.varlen_attention(*packed, turn(torch.tensor([0, 13, LENGTH], device=DEVICE)), backend=engine))
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=0)
    torch.testing.assert_close(outs[1], outs[3], rtol=0, atol=0)


@lazy
@pytest.mark.parametrize("backend", ["native", "flex"])
def test_the_drop_ins(make: Any, backend: str) -> None:
    tensors = qkv()

    def call(t: Tensor) -> Tensor:
        with tw.attention_backend(backend):
            return scaled_dot_product_attention(t, tensors[1], tensors[2])

    assert_resolved(call, make(tensors[0]))
    bias = make(random(LENGTH, LENGTH))

    def masked(t: Tensor) -> Tensor:
        with tw.attention_backend(backend):
            return scaled_dot_product_attention(*tensors, attn_mask=t)

    assert_resolved(masked, bias)


def test_a_compiled_call() -> None:
    tensors, compiled = qkv(), torch.compile(lambda *t: tw.attention(*t, backend="blocked"), backend="aot_eager")
    lazily = [tensors[0], tensors[1], negated(tensors[2])]
    torch.testing.assert_close(compiled(*lazily), tw.attention(*tensors, backend="blocked"), rtol=1e-6, atol=1e-6)
