"""torch.compile on a GPU: inductor, and the CUDA graphs that `mode="reduce-overhead"` captures and replays around attention."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise as tw
from tilewise import masks, scores

LENGTH, HEADS = 256, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, HEADS, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def documents(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], device=q.device) // 50


def own_document(q: Tensor) -> Callable[..., Any]:
    document = documents(q)
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


TABLE = torch.randn(HEADS, 2 * 400, generator=torch.Generator().manual_seed(3))

TOUR: dict[str, Callable[..., Any]] = {
    "plain": tw.attention,
    "causal": lambda q, k, v: tw.attention(q, k, v, mask=masks.causal),
    "softcap": lambda q, k, v: tw.attention(q, k, v, mask=masks.sliding_window(32), score=scores.softcap(5.0)),
    "document": lambda q, k, v: tw.attention(q, k, v, mask=own_document(q)),
    "captured size": lambda q, k, v: tw.attention(q, k, v, mask=lambda b, h, i, j: (j < q.size(-2) - 3) & (abs(i - j) <= q.shape[2] // 4)),
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def assert_compiled_is_eager(compiled: Callable[..., Any], function: Callable[..., Any], inputs: list[Tensor], more: tuple[Tensor, ...] = ()) -> None:
    torch.compiler.cudagraph_mark_step_begin()
    found, expected = compiled(*inputs), function(*inputs)
    grad = torch.randn_like(expected)
    sources = [*inputs, *more]
    got, wanted = torch.autograd.grad(found, sources, grad), torch.autograd.grad(expected, sources, grad)
    for mine, other in zip((found, *got), (expected, *wanted), strict=True):
        assert_close(mine.detach().clone(), other)


@pytest.mark.parametrize("name", TOUR)
def test_with_lengths_that_vary(name: str) -> None:
    compiled = torch.compile(TOUR[name], fullgraph=True, dynamic=True)
    for length in (256, 400):
        assert_compiled_is_eager(compiled, TOUR[name], tensors(length))


@pytest.mark.parametrize("name", TOUR)
def test_beside_cuda_graphs(name: str) -> None:
    """Inductor captures what is around attention."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(TOUR[name](q * 0.5, k, v)) + q

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # warm-up, capture, and replays with other contents
        assert_compiled_is_eager(compiled, layer, tensors(seed=seed))


def test_a_learned_table_beside_cuda_graphs() -> None:
    table = TABLE.to("cuda").requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q * 0.5, k, v, is_causal=True, score=lambda s, b, h, i, j: s + table[h, i - j + LENGTH])

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        assert_compiled_is_eager(compiled, function, tensors(seed=seed), (table,))
        with torch.no_grad():
            table.mul_(0.5)


def test_block_masks_beside_cuda_graphs() -> None:
    compiled = torch.compile(tw.flex.flex_attention, fullgraph=True, mode="reduce-overhead")
    q, k, v = (t.detach() for t in tensors(1024))
    for seed in range(4):
        end = torch.tensor(200 * (seed + 1), device="cuda")
        blocks = tw.flex.create_block_mask(lambda b, h, i, j: (i >= j) & (j < end), None, None, 1024, 1024, device="cuda")  # noqa: B023 - used before the next round
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(q, k, v, block_mask=blocks).clone(), tw.flex.flex_attention(q, k, v, block_mask=blocks))


def test_block_masks_made_anew_are_one_graph() -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(tw.flex.flex_attention, fullgraph=True, backend=counter)
    q, k, v = (t.detach() for t in tensors(1024))
    for seed in range(4):
        ends = torch.randint(1, 1024, (1,), generator=torch.Generator().manual_seed(seed)).to("cuda")
        blocks = tw.flex.create_block_mask(lambda b, h, i, j: (i >= j) & (j < ends[b]), 1, None, 1024, 1024, device="cuda")  # noqa: B023 - used before the next round
        assert_close(compiled(q, k, v, block_mask=blocks), tw.flex.flex_attention(q, k, v, block_mask=blocks))
    assert counter.frame_count == 1
