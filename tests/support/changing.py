"""Captures that change between calls of one function: dtype, layout, memory. Whatever is remembered of a call must not outlive what it stood for."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw

HEADS, QUERIES, KEYS = 2, 20, 36
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "negated")
WAYS = ("replaced", "data")  # another tensor, or the same with other `.data`

FORMS = (st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))
CHANGES = st.lists(st.tuples(*FORMS, *FORMS, st.sampled_from(WAYS)), min_size=3, max_size=3)  # of the score's capture and the mask's, call by call


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same (rows, columns) in another layout; expanded: its first row for all."""
    rows, columns = values.shape
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "sliced":
        return torch.cat([values, values], 1)[:, :columns]
    if layout == "expanded":
        return values[:1].expand(rows, columns)
    return torch._neg_view(-values) if layout == "negated" else values


def tensor(dtype: torch.dtype, layout: str, device: str, *shape: int, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").half()
    return laid_out(values.to(device, dtype), layout)


class Held:
    """A score and a mask that read the tensors of the day."""

    def __init__(self) -> None:
        self.bias, self.seen = torch.zeros(0), torch.zeros(0)

    def functions(self) -> tuple[Any, Any]:
        bias, seen = self.bias, self.seen
        return (lambda s, b, h, i, j: s * (1 + bias[h, j]) + bias[h, i]), (lambda b, h, i, j: (seen[i, j] > -0.5) | (i == j))


def check_changes(changes: list[tuple[Any, ...]], engine: str, device: str, dtype: torch.dtype) -> None:
    """Every call, forward and gradients, is the reference's."""
    held = Held()
    query, key, value = (tensor(dtype, "contiguous", device, HEADS * n, 16, seed=n).view(1, HEADS, n, 16).requires_grad_() for n in (QUERIES, KEYS, KEYS))
    grad = tensor(dtype, "contiguous", device, HEADS * QUERIES, 16, seed=3).view(1, HEADS, QUERIES, 16)
    for number, (bias_dtype, bias_layout, seen_dtype, seen_layout, way) in enumerate(changes):
        bias = tensor(bias_dtype, bias_layout, device, HEADS, KEYS, seed=10)  # seeds that do not change: only the form does
        seen = tensor(seen_dtype, seen_layout, device, QUERIES, KEYS, seed=11)
        if way == "replaced" or number == 0:
            held.bias, held.seen = bias, seen
        else:
            held.bias.requires_grad_(False).data, held.seen.data = bias, seen
        held.bias.requires_grad_()
        score, mask = held.functions()
        found = []
        for name in (engine, "reference"):
            out = tw.attention(query, key, value, score=score, mask=mask, backend=name)
            found.append([out.detach(), *torch.autograd.grad(out, [query, key, value, held.bias], grad)])
        for tested, wanted in zip(*found, strict=True):
            eps = max(torch.finfo(t).eps for t in (wanted.dtype, dtype))
            error = float((tested.double() - wanted.double()).norm() / wanted.double().norm())
            assert error < 20 * eps, f"call {number}: relative error {error:.3g}"
