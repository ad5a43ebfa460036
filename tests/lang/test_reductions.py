"""Rows and their reductions mean what torch makes of them when its vmap, as FlexAttention does, calls the function with single indices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.programs import BATCH, HEADS, KEYS, QUERIES, assert_derives_as_autograd, grid, scores, trace_value, value_of
from tilewise.lang import Bounds, Interval, trace_mask, trace_score
from tilewise.lang.types import DTYPE_OF

SHAPE = (BATCH, HEADS, QUERIES, KEYS)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Quarters: sums are exact, ties are met."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4


TABLE, OTHER, LISTS = random(QUERIES, 6), random(KEYS, 6, seed=1), random(BATCH, HEADS, QUERIES, 6, seed=2).long()
SQUARES, WHOLE, COORDINATES = random(QUERIES, 2, 3, seed=3), random(6, seed=4), random(KEYS, 2, seed=5)
HALVES, SMALL = TABLE.half(), (TABLE * 4).to(torch.int8)


def by_vmap(function: Callable[..., Any], score: Tensor) -> Tensor:
    whole = torch.broadcast_tensors(score, *(grid()[name] for name in ("b", "h", "q", "kv")))
    found: Tensor = torch.vmap(function)(*(t.flatten() for t in whole)).view(SHAPE)
    return found


def assert_as_vmap(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
    inputs = grid() | {"score": scores(dtype)}
    wanted = by_vmap(function, inputs["score"])
    found = value_of(trace_value(function, dtype), inputs)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found.expand(SHAPE), wanted, rtol=0, atol=0, equal_nan=True)


ROWS: dict[str, Callable[..., Any]] = {
    "a row": lambda s, b, h, q, kv: TABLE[q].sum(-1),
    "of several dimensions": lambda s, b, h, q, kv: LISTS[b, h, q].sum(-1) + LISTS[b][h].sum(),
    "distances": lambda s, b, h, q, kv: (TABLE[q] - OTHER[kv]).pow(2).sum(-1).sqrt(),
    "a list of keys": lambda s, b, h, q, kv: (LISTS[b, h, q] == kv.unsqueeze(-1)).any(-1),
    "a list of keys, no new dimension": lambda s, b, h, q, kv: (kv == LISTS[b, h, q]).any(),
    "a list of blocks": lambda s, b, h, q, kv: ((LISTS[b, h, q // 2] == kv // 2) & (q >= kv)).any(-1),
    "with the score": lambda s, b, h, q, kv: (TABLE[q] * s + OTHER[kv]).amax(-1),
    "with numbers": lambda s, b, h, q, kv: (2 * TABLE[q] + 0.5).sum(-1) + (1 - TABLE[q]).clamp(-1.0, 1).sum(),
    "a whole tensor": lambda s, b, h, q, kv: (kv == WHOLE).any() | (kv - WHOLE > 3).all(),
    "a whole tensor beside a row": lambda s, b, h, q, kv: (TABLE[q] * WHOLE).sum(-1),
    "an operator of a tensor": lambda s, b, h, q, kv: (WHOLE - TABLE[q] + WHOLE // 2).sum(),
    "two dimensions": lambda s, b, h, q, kv: SQUARES[q].sum(),
    "one of two dimensions": lambda s, b, h, q, kv: SQUARES[q].amax(-1).sum() + SQUARES[q].sum(0).amin(-1) + SQUARES[q].sum((0, -1)),
    "keepdim": lambda s, b, h, q, kv: (SQUARES[q] - SQUARES[q].sum(-1, keepdim=True)).abs().sum(),
    "an outer product": lambda s, b, h, q, kv: (TABLE[q].unsqueeze(-1) * OTHER[kv].unsqueeze(0)).amax(),
    "new dimensions by None": lambda s, b, h, q, kv: (TABLE[q][:, None] > OTHER[kv][None]).sum() + (LISTS[b, h, q] > kv[None]).sum() + kv[..., None].sum(),
    "squeezed": lambda s, b, h, q, kv: TABLE[q, None].squeeze(0).sum(-1) + TABLE[q].squeeze(0).sum(),
    "slices": lambda s, b, h, q, kv: TABLE[q, :3].sum() + TABLE[q][1::2].sum() + SQUARES[q, :, -1].sum() + SQUARES[q, ..., 1:].amax() + TABLE[q, -2:][0],
    "elements": lambda s, b, h, q, kv: TABLE[q][2] + (TABLE[q] + 1)[-1] + SQUARES[q][1][0] + SQUARES[q].sum(-1)[1],
    "unpacked": lambda s, b, h, q, kv: sum((x - y).abs() for x, y in zip(COORDINATES[q], COORDINATES[kv], strict=True)),
    "gathered": lambda s, b, h, q, kv: (WHOLE[LISTS[b, h, q] % 6] + TABLE[LISTS[b, h, q] % 5, q]).sum() + TABLE[LISTS[b, h, q] % 5].amax(),
    "where": lambda s, b, h, q, kv: torch.where(TABLE[q] > 0, TABLE[q], OTHER[kv]).sum(-1) + TABLE[q].masked_fill(OTHER[kv] > 0, 7.0).sum(),
    "functions": lambda s, b, h, q, kv: torch.relu(TABLE[q]).sum() + torch.isfinite(TABLE[q]).sum() + torch.ones_like(TABLE[q]).sum(),
    "conversions": lambda s, b, h, q, kv: TABLE[q].to(torch.int32).sum() + TABLE[q].double().sum() + q.to(TABLE[q]) + TABLE[q].type_as(q).sum(),
    "rounded division": lambda s, b, h, q, kv: torch.div(TABLE[q], 0.75, rounding_mode="trunc").sum() + (TABLE[q] // 0.75).sum(),
    "shapes": lambda s, b, h, q, kv: SQUARES[q].sum() / SQUARES[q].shape[-1] + TABLE[q].size(-1) + len(TABLE[q]) + SQUARES[q].dim() + q.dim(),
    "a single value's type yields": lambda s, b, h, q, kv: (HALVES[q] * s).sum() + (HALVES[q] * 0.3).sum(),
    "a small integer's type stays": lambda s, b, h, q, kv: (SMALL[q] * 9 + kv).sum(),
    "two types of rows": lambda s, b, h, q, kv: (HALVES[q] * OTHER[kv] + SMALL[q]).sum(),
    "a whole tensor's type counts": lambda s, b, h, q, kv: (HALVES[q] * WHOLE).sum(),
    "both extremes": lambda s, b, h, q, kv: TABLE[q].max(-1).values - TABLE[q].min(-1)[0] + TABLE[q].max() - torch.min(TABLE[q]) + s.max() - s.min(-1).values,
    "their places": lambda s, b, h, q, kv: TABLE[q].max(-1).indices * 10 + TABLE[q].min(-1)[1] + SQUARES[q].argmax() + TABLE[q].argmin(-1),
    "two rows' extremes": lambda s, b, h, q, kv: (
        torch.max(TABLE[q], OTHER[kv]).sum()
        + TABLE[q].min(other=OTHER[kv]).sum()
        + torch.max(WHOLE, other=TABLE[q]).sum()
        + torch.maximum(TABLE[q], WHOLE).sum()
    ),
    "dtype": lambda s, b, h, q, kv: SMALL[q].mean(dtype=torch.float32) + TABLE[q].sum(dtype=torch.float64),
    "a row of one, single values": lambda s, b, h, q, kv: q.prod() + kv.amax() + s.mean() + (q > kv).any(-1) + (q > kv).all(),
    "combined": lambda s, b, h, q, kv: torch.exp(-(TABLE[q] - OTHER[kv]).pow(2).sum(-1).sqrt() / WHOLE[h].abs().clamp(1)) * 0 + s,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_torchs(name: str) -> None:
    assert_as_vmap(ROWS[name])


@pytest.mark.parametrize("dtype", DTYPE_OF.values(), ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "any", "all", "amax", "amin", "argmax", "argmin"])
def test_every_reduction_of_every_dtype_is_torchs(name: str, dtype: torch.dtype) -> None:
    if (name == "mean" and not dtype.is_floating_point) or (name.startswith("arg") and dtype == torch.bool):
        pytest.skip("torch refuses it")
    numbers = (TABLE * 2).to(dtype)
    numbers[2] = 0
    assert_as_vmap(lambda s, b, h, q, kv: getattr(torch, name)(numbers[q], -1) if name != "mean" else numbers[q].mean())
    if dtype.is_floating_point:
        odd = numbers.clone()
        odd[0, 1], odd[1, 2], odd[3, 0], odd[3, 4] = float("nan"), float("inf"), float("nan"), float("nan")
        assert_as_vmap(lambda s, b, h, q, kv: getattr(odd[q], name)())


def test_rows_without_elements() -> None:
    empty = torch.zeros(QUERIES, 0)
    for name in ("sum", "mean", "prod", "any", "all"):
        assert_as_vmap(lambda s, b, h, q, kv, name=name: getattr((empty[q] + 1) * s, name)())
    assert_as_vmap(lambda s, b, h, q, kv: (empty[q][:, None] * TABLE[q]).sum(0).sum())


def test_numbers_and_elements_are_written_once() -> None:
    call = trace_value(lambda s, b, h, q, kv: (TABLE[q] * 3.0 + 1).sum() + (TABLE[q] * TABLE[q]).sum())
    assert len(call.floats) == 1 and len(call.ints) == 1 and len(call.captures) == 1
    assert sum(i.op == "load" for i in call.program.instructions) == 6


SLOPES: dict[str, Callable[..., Any]] = {
    "distances": lambda s, t, u, q, kv: s - (t[q] - u[kv]).pow(2).sum(-1),
    "mean": lambda s, t, u, q, kv: s * t[q].mean() + u[kv].prod(),
    "extremes": lambda s, t, u, q, kv: s + torch.maximum(t[q], u[kv]).amax() * t[q].amin() + u[kv].max(-1).values,
    "a whole tensor": lambda s, t, u, q, kv: s + (t[q, :, None] * u[:6] * s).sum(),
    "the score inside": lambda s, t, u, q, kv: torch.tanh(t[q] * s.unsqueeze(-1) + u[kv]).sum(-1),
}


@pytest.mark.parametrize("name", SLOPES)
def test_gradients_are_torchs(name: str) -> None:
    left, right = (torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (QUERIES, KEYS))

    def function(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return SLOPES[name](s, left, right, q, kv)

    score = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).requires_grad_()
    call = trace_score((function,), torch.float64)
    assert_derives_as_autograd(call, grid() | {"score": score.detach()})
    wanted = torch.autograd.grad(by_vmap(function, score).square().sum(), (score, left, right))
    found = torch.autograd.grad(torch.as_tensor(value_of(call, grid() | {"score": score})).square().sum(), (score, left, right))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_bounds_of_a_list_of_keys_decide() -> None:
    """Where no listed key is near, a tile is known to be empty."""
    lists = (torch.arange(64)[:, None] // 16 * 16 + torch.arange(4)) % 64
    bounds = Bounds(trace_mask(lambda b, h, q, kv: (lists[q] == kv.unsqueeze(-1)).any(-1)), torch.device("cpu"))
    zero, start = torch.zeros(1), torch.arange(0, 64, 16).double()
    box = {"b": Interval(zero, zero), "h": Interval(zero, zero), "q": Interval(start[:, None], start[:, None] + 15), "kv": Interval(start, start + 15)}
    found = bounds.over(box)
    assert torch.equal(found.hi, torch.eye(4, dtype=torch.float64)) and not found.lo.any()
