"""torch.export takes models with tilewise in them, sizes that depend on contents included; torch.jit.trace is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks

pytestmark = pytest.mark.usefixtures("one_thread")


class NonEmptyRows(torch.nn.Module):
    """Attention over a batch of those rows that are not all 0: how many there are is known only when it runs."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        x = x[x.sum(-1) != 0]
        return self.attend(x.view(-1, 1, 4, 8).transpose(1, 2), x)


def whole(x: Tensor) -> Tensor:
    return torch.ones((x.shape[0], 1, 1, 1), dtype=torch.bool)


ATTEND: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "plain": lambda q, x: tw.attention(q, q, q),
    "sdpa with a mask": lambda q, x: tw.functional.scaled_dot_product_attention(q, q, q, attn_mask=whole(x)),
    "captured rows": lambda q, x: tw.attention(q, q, q, mask=lambda b, h, i, j: x[b, j] > 0),
    "compared with a size": lambda q, x: tw.attention(q, q, q, mask=lambda b, h, i, j: b < x.shape[0] - 1),
    "flex": lambda q, x: tw.flex.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2),
}


@pytest.mark.parametrize(("name", "strict"), [*[(name, False) for name in ATTEND], ("sdpa with a mask", True), ("compared with a size", True)])
def test_a_batch_that_depends_on_contents(name: str, strict: bool) -> None:
    model, example, other = NonEmptyRows(ATTEND[name]), torch.randn(5, 32), torch.randn(5, 32)
    example[2], other[1:3] = 0, 0
    exported = torch.export.export(model, (example,), strict=strict).module()
    for x in (example, other):
        torch.testing.assert_close(exported(x), model(x))


TRACED: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda q: tw.attention(q, q, q, mask=masks.causal),
    "plain attention": lambda q: tw.attention(q, q, q),
    "flex": lambda q: tw.flex.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2),
    "sdpa": lambda q: tw.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
    "packed": lambda q: tw.varlen_attention(*[q[0].transpose(0, 1)] * 3, torch.tensor([0, 4, 16])),
}


@pytest.mark.parametrize("name", TRACED)
def test_jit_trace_is_refused(name: str) -> None:
    """For new calls, and for those that are remembered."""
    q = torch.randn(1, 2, 16, 8)
    for _ in range(2):
        with warnings.catch_warnings(), pytest.raises(tw.BackendError, match=r"torch\.jit\.trace.*torch\.export"):
            warnings.simplefilter("ignore")
            torch.jit.trace(TRACED[name], (q,))
        TRACED[name](q)


def test_jit_trace_is_refused_under_interception() -> None:
    q = torch.randn(1, 2, 16, 8)
    with tw.intercept_sdpa(), warnings.catch_warnings(), pytest.raises(tw.BackendError, match=r"torch\.jit\.trace"):
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), (q,))


def test_a_decomposed_graph_does_not_lose_the_derivative_in_silence() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + tw.attention(x, x, x, is_causal=True)

    x = torch.randn(1, 2, 24, 8)
    exported = torch.export.export(Model(), (x,))
    expected = Model()(x)
    with torch.no_grad():
        torch.testing.assert_close(exported.run_decompositions().module()(x), expected)
    x.requires_grad_()
    whole = exported.run_decompositions({}).module()(x)
    torch.testing.assert_close(torch.autograd.grad(whole.sum(), x), torch.autograd.grad(Model()(x).sum(), x))
    with pytest.raises(tw.TilewiseError, match="run_decompositions"):
        exported.run_decompositions().module()(x)


MADE: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "document": (lambda ids: masks.document(ids) & masks.causal, torch.arange(128).view(2, 64) // 20),
    "padding": (masks.padding, torch.tensor([60, 33])),
    "prefix_lm": (masks.prefix_lm, torch.tensor([20, 7])),
    "per_batch": (lambda which: masks.per_batch([masks.causal, masks.full], which), torch.tensor([0, 1])),
}


@pytest.mark.parametrize("name", MADE)
def test_masks_by_batch_element_with_any_batch_size(name: str) -> None:
    make, given = MADE[name]

    class Attend(torch.nn.Module):
        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            return tw.attention(x, x, x, mask=make(given))

    x, batch = torch.randn(2, 2, 64, 8), torch.export.Dim("batch", min=1, max=16)
    loaded = torch.export.export(Attend(), (x, given), dynamic_shapes={"x": {0: batch}, "given": {0: batch}}).module()
    for count in (1, 2, 5):
        some = torch.randn(count, 2, 64, 8), given[torch.arange(count) % 2]
        torch.testing.assert_close(loaded(*some), Attend()(*some))
