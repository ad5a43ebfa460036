"""What the tour (tests/test_tour.py) shows, under torch.compile with sizes that vary, by inductor, and with everything around a call changing between calls.

tests/engines/test_torch_around.py compiles the same for fixed sizes.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise as tw
from tilewise import masks, scores

pytestmark = pytest.mark.usefixtures("one_thread")
H, D, LONGEST = 2, 8, 70
TABLE = torch.randn(H, 2 * LONGEST, generator=torch.Generator().manual_seed(7)).requires_grad_()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, H, length, D, generator=generator).requires_grad_() for _ in range(3)]


def is_own_document(q: Tensor) -> Callable[..., Any]:
    document = torch.arange(q.shape[2]) // 10
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


def before_the_end(q: Tensor) -> Callable[..., Any]:
    return lambda b, h, i, j: (j < q.size(-2) - 3) & (abs(i - j) <= q.shape[2] // 4)


def blocks_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    block_mask = tw.flex.create_block_mask(before_the_end(q), None, None, q.shape[2], k.shape[2], device="cpu")
    return tw.flex.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2, block_mask)


TOUR: dict[str, Callable[..., Any]] = {
    "plain": tw.attention,
    "sdpa": tw.functional.scaled_dot_product_attention,
    "flex": tw.flex.flex_attention,
    "grouped": lambda q, k, v: tw.attention(q, k[:, :1], v[:, :1], enable_gqa=True, mask=is_own_document(q)),
    "captured size": lambda q, k, v: tw.attention(q, k, v, mask=before_the_end(q)),
    "block mask": blocks_inside,
    "learned score": lambda q, k, v: tw.attention(
        q, k, v, is_causal=True, score=[scores.softcap(30.0), lambda s, b, h, i, j: s + TABLE[h, i - j + q.shape[2]]]
    ),
    "options": lambda q, k, v: tw.attention(q, k, v, mask=masks.sliding_window(9), dropout_p=0.1, seed=1, scale=0.2, return_lse=True),
}


def gradients(out: Any, sources: list[Tensor]) -> tuple[Tensor | None, ...]:
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).square().sum() for o in outs)
    return torch.autograd.grad(loss, sources, allow_unused=True)


def assert_compiled_is_eager(compiled: Callable[..., Any], function: Callable[..., Any], lengths: tuple[int, ...]) -> None:
    for length in lengths:
        inputs = tensors(length)
        found, expected = compiled(*inputs), function(*inputs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found, [*inputs, TABLE]), gradients(expected, [*inputs, TABLE]))


@pytest.mark.parametrize("name", TOUR)
def test_with_lengths_that_vary(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    assert_compiled_is_eager(torch.compile(TOUR[name], fullgraph=True, dynamic=True, backend=counter), TOUR[name], (40, 67))
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler: g++ was not found")
def test_by_inductor() -> None:
    """With a GPU, this mode captures CUDA graphs (tests/gpu/test_compiled.py)."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.gelu(TOUR["learned score"](q, k, v)) * TOUR["captured size"](q, k, v)

    assert_compiled_is_eager(torch.compile(layer, fullgraph=True, dynamic=True, mode="reduce-overhead"), layer, (40, 67))


# -- numbers that vary -------------------------------------------------------------------------------------------------


def test_numbers_that_vary_compile_once_more() -> None:
    inputs = tensors(40)
    counter = CompileCounterWithBackend("eager")

    def function(n: int) -> Tensor:
        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return ((i - j).abs() < n) & (n >= abs(j - i)) & (i != n) | (n == j) | (i // n > n % (j + 1))

        return tw.attention(*inputs, mask=mask, backend="blocked")

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for n in (3, 4, 9, 2):
        assert torch.equal(compiled(n), function(n))
    assert counter.frame_count <= 2  # once for the first number, once for all


def test_nothing_around_a_call_is_remembered_too_long() -> None:
    """Numbers, tensors and attributes that a mask or score reads are replaced or changed between calls of one compiled function."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.window, self.slope, self.table = 5, 0.5, torch.nn.Parameter(torch.randn(H))
            self.document = torch.arange(40) // 10

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (self.document[i] == self.document[j]) & ((i - j).abs() < self.window)

            return tw.attention(q, k, v, mask=mask, score=lambda s, b, h, i, j: s * self.slope + self.table[h], backend="blocked")

    layer, inputs = Layer(), tensors(40)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    seen: list[Tensor] = []

    def changed() -> None:
        found = compiled(*inputs)
        assert torch.equal(found, layer(*inputs))
        assert not any(torch.equal(found, other) for other in seen)
        seen.append(found)

    changed()
    layer.window = 7
    changed()
    layer.slope = 0.25
    changed()
    layer.document = torch.arange(40) // 8
    changed()
    layer.document += torch.arange(40) // 30
    changed()
    layer.table = torch.nn.Parameter(torch.arange(H) * inputs[0].new_ones(()))  # adds the same to every score of a head: the result stays
    assert torch.equal(compiled(*inputs), layer(*inputs))
    assert torch.autograd.grad(compiled(*inputs).sum(), layer.table)[0].shape == (H,)


def test_a_whole_number_as_scale_that_varies() -> None:
    q, k, v = (t.detach() for t in tensors(20))
    compiled = torch.compile(lambda q, k, v, scale: tw.attention(q, k, v, scale=scale, backend="blocked"), backend="eager", fullgraph=True)
    for scale in (1, 2, 3):
        torch.testing.assert_close(compiled(q, k, v, scale), tw.attention(q, k, v, scale=scale, backend="blocked"))
