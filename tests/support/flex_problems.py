"""What tilewise.flex is tested on: mods, tensors and block masks; and the plain dense computation it is held to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor

from tilewise import flex as ours
from tilewise.frontend.block_mask import BACKWARD, FORWARD

B, H, D = 2, 4, 8
LISTS = (*FORWARD, *BACKWARD)

# -- the mods torch's own test suite uses ------------------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def documents(n: int) -> Tensor:
    return torch.arange(2 * n) // (n // 3 + 1)  # longer than the queries: there may be more keys


def silu_score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.nn.functional.silu(s)


def composed(n: int) -> Callable[..., Any]:
    slopes, table = numbers(H), numbers(n)

    def capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 5 * torch.tanh((s + slopes[h] * (kv - q) * 0.01) / 5) + table[kv]

    return lambda s, b, h, q, kv: torch.where(q >= kv, capped(s, b, h, q, kv), -float("inf"))


def neighbours(n: int) -> Callable[..., Any]:
    side = int(n**0.5)
    return lambda s, b, h, q, kv: torch.where((q // side - kv // side).abs() + (q % side - kv % side).abs() <= 4, s, -float("inf"))


SCORES: dict[str, Callable[[int], Callable[..., Any]]] = {
    "identity": lambda n: lambda s, b, h, q, kv: s,
    "times two": lambda n: lambda s, b, h, q, kv: s * 2,
    "squared": lambda n: lambda s, b, h, q, kv: s * s,
    "causal": lambda n: lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")),
    "inverse causal": lambda n: lambda s, b, h, q, kv: torch.where(q <= kv, s, float("-inf")),
    "relative": lambda n: lambda s, b, h, q, kv: s + (q - kv) / n,
    "alibi": lambda n: lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1) * 8.0 / H),
    "trigonometric": lambda n: lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.sin(b),
    "head offset": lambda n: lambda s, b, h, q, kv: s + 2 * h,
    "silu": lambda n: silu_score,
    "soft cap": lambda n: lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
    "no score": lambda n: lambda s, b, h, q, kv: kv.double() / n,
    "neighbours": neighbours,
    "bias by all": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[b, h, q, kv])(numbers(B, H, n, n)),
    "bias by head": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[h])(numbers(H)),
    "bias by distance": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[q - kv + n - 1])(numbers(2 * n - 1)),
    "bias at negative places": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[h, q - kv])(numbers(H, n)),
    "two buffers": lambda n: (lambda by_head, by_batch: lambda s, b, h, q, kv: s * by_head[h] + by_batch[b, kv])(numbers(H), numbers(B, n)),
    "looked up twice": lambda n: (lambda ids, bias: lambda s, b, h, q, kv: s + bias[ids[q], ids[kv]])(documents(n), numbers(6, 6)),
    "one number": lambda n: (lambda gate: lambda s, b, h, q, kv: s * gate)(torch.tensor(0.3, dtype=torch.float64)),
    "composed": composed,
}

MASKS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "noop": lambda n: ours.noop_mask,
    "causal": lambda n: lambda b, h, q, kv: q >= kv,
    "inverse causal": lambda n: lambda b, h, q, kv: q <= kv,
    "window": lambda n: lambda b, h, q, kv: (q - kv).abs() <= 20,
    "global and causal": lambda n: lambda b, h, q, kv: (q >= kv) | (kv < 10),
    "offset": lambda n: (lambda offset: lambda b, h, q, kv: q + offset >= kv)(torch.tensor(30)),
    "document": lambda n: (lambda ids: lambda b, h, q, kv: ids[q] == ids[kv])(documents(n)),
    "document and causal": lambda n: (lambda ids: ours.and_masks(lambda b, h, q, kv: ids[q] == ids[kv], lambda b, h, q, kv: q >= kv))(documents(n)),
    "padding": lambda n: (lambda lengths: lambda b, h, q, kv: (kv < lengths[b]) & (q < lengths[b]))(torch.tensor([n // 2, n - 1])),
    "batches apart": lambda n: lambda b, h, q, kv: torch.where(b == 0, q >= kv, q <= kv),
    "heads apart": lambda n: lambda b, h, q, kv: (q - kv) % (h + 2) == 0,
    "tail only": lambda n: lambda b, h, q, kv: kv >= n - 1,
    "union": lambda n: ours.or_masks(lambda b, h, q, kv: kv < 5, lambda b, h, q, kv: q == kv),
    "nothing": lambda n: lambda b, h, q, kv: kv < 0,
}


# -- tensors and block masks -------------------------------------------------------------------------------------------


def tensors(n: int, kv_heads: int = H, *, kv_len: int | None = None, v_dim: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    m = n if kv_len is None else kv_len
    return tuple(torch.randn(B, heads, length, dim, dtype=dtype) for heads, length, dim in ((H, n, D), (kv_heads, m, D), (kv_heads, m, v_dim)))


def chosen_blocks(rows: int, columns: int, count: int) -> tuple[Tensor, Tensor]:
    """For every query block, `count` key blocks, the highest of some numbers, in their order: not ascending."""
    indices = torch.rand(B, H, rows, columns).argsort(-1).int()
    return torch.full((B, H, rows), count, dtype=torch.int32), indices


def causal_blocks(n: int, module: Any = ours) -> Any:
    return module.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, n, n, device="cpu")


# -- the computation it is held to -------------------------------------------------------------------------------------


def dense(query: Tensor, key: Tensor, value: Tensor, score: Any = None, allowed: Tensor | None = None, scale: float = D**-0.5) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores), written down plainly."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = scale * query @ key.mT
    if score is not None:
        scores = score(scores, *places(*scores.shape)).expand_as(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    nothing = (scores == -torch.inf).all(-1)
    lse = torch.where(nothing, -torch.inf, scores.masked_fill(nothing[..., None], 0).logsumexp(-1))
    weights = torch.exp(scores - torch.where(nothing, 0.0, lse)[..., None])
    return weights @ value, lse, scores.amax(-1)


def places(*shape: int) -> list[Tensor]:
    return [torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape)]


def allowed_by(mask: Callable[..., Any], q_len: int, kv_len: int) -> Tensor:
    return theirs.create_mask(mask, B, H, q_len, kv_len, device="cpu")


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def gradients(function: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    """Those of both the output and lse, weighted unevenly."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out, lse = function(*leaves)
    rows = lse > -torch.inf
    loss = (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + (lse[rows] * 0.3).sum()
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))
