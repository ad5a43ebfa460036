"""Sequences whose keys and values lie in pages, and what attention over them must give: one sequence after the other, keys in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.error_rule import FORWARD, ORDERS, errors_of, hold

NAN = float("nan")


class Batch(NamedTuple):
    """Queries, keys and values of each sequence in order, (heads, length, head dim), and the same keys and values in pages."""

    query: list[Tensor]
    key: list[Tensor]
    value: list[Tensor]
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def stacked(self) -> Tensor:
        """(batch, heads, queries, head dim), where all have as many queries."""
        return torch.stack(self.query)

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """(tokens, heads, head dim), and where each sequence begins."""
        counts = [q.shape[1] for q in self.query]
        offsets = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32, device=self.table.device)
        return torch.cat([q.transpose(0, 1) for q in self.query]), offsets


def make_batch(
    q_lengths: list[int],
    kv_lengths: list[int],
    size: int,
    heads: int = 4,
    kv_heads: int = 2,
    dims: tuple[int, int] = (16, 8),
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    spare: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Pages in a random order, full of NaN where nothing is stored; entries of the table that belong to no key point anywhere, outside too."""
    random = torch.Generator().manual_seed(seed)
    stored = dtype if stored is None else stored

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    query = [draw(heads, n, dims[0]).to(dtype) for n in q_lengths]
    key, value = ([draw(kv_heads, n, d).to(stored) for n in kv_lengths] for d in dims)
    counts = [-(-n // size) for n in kv_lengths]
    most, total = max(counts, default=0) + spare, sum(counts) + 2
    numbers = torch.randperm(total, generator=random).tolist()
    k_pages, v_pages = (torch.full((total, size, kv_heads, d), NAN, dtype=torch.float32).to(stored) for d in dims)
    table = torch.randint(-(2**31), 2**31 - 1, (len(kv_lengths), most), generator=random).to(torch.int32)
    for n, count in enumerate(counts):
        for at in range(count):
            page = table[n, at] = numbers.pop()
            rows = slice(at * size, min((at + 1) * size, kv_lengths[n]))
            k_pages[page, : rows.stop - rows.start] = key[n][:, rows].transpose(0, 1)
            v_pages[page, : rows.stop - rows.start] = value[n][:, rows].transpose(0, 1)
    lengths = torch.tensor(kv_lengths, dtype=torch.int32)
    lists = [[t.to(device) for t in ts] for ts in (query, key, value)]
    return Batch(*lists, *[t.to(device) for t in (k_pages, v_pages, table, lengths)])


def dense(
    batch: Batch,
    dtype: torch.dtype,
    mask: Callable[..., Any] | None = None,
    score: Callable[..., Any] | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Any, Any] = (1.0, 1.0),
    order: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Output (heads, queries, Dv) and lse (heads, queries) of each sequence, every step in plain torch in this dtype. An order other than 0 shuffles keys and
    features first, which changes nothing but the roundings."""
    random = torch.Generator().manual_seed(order)
    outs, lses = [], []
    for n, (q, k, v) in enumerate(zip(batch.query, batch.key, batch.value, strict=True)):
        heads, ratio = q.shape[0], q.shape[0] // k.shape[0]
        k_scale, v_scale = (torch.as_tensor(s, dtype=dtype, device=q.device).expand(k.shape[0]).repeat_interleave(ratio).view(-1, 1, 1) for s in scales)
        q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(ratio, 0), v.to(dtype).repeat_interleave(ratio, 0)
        b, h = torch.tensor(n, device=q.device), torch.arange(heads, device=q.device).view(-1, 1, 1)
        i = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device).view(1, -1, 1)
        j = torch.arange(k.shape[1], device=q.device).view(1, 1, -1)
        if order:
            places, features = (torch.randperm(size, generator=random).to(q.device) for size in k.shape[1:])
            q, k, v, j = q[:, :, features], k[:, places][:, :, features], v[:, places], j[:, :, places]
        s = q @ k.transpose(1, 2) / q.shape[2] ** 0.5 * k_scale
        if score is not None:
            s = score(s, b, h, i, j).to(dtype)
        if mask is not None:
            s = torch.where(mask(b, h, i, j), s, -torch.inf)
        logits = s if sinks is None else torch.cat([s, sinks.to(dtype).view(-1, 1, 1).expand(-1, q.shape[1], 1)], 2)
        weights = torch.softmax(logits, -1)[..., : k.shape[1]].nan_to_num(0.0) if logits.shape[2] else logits
        outs.append(weights @ v * v_scale)
        lses.append(torch.logsumexp(logits, -1) if logits.shape[2] else logits.new_full(logits.shape[:2], -torch.inf))
    return outs, lses


def assert_right(batch: Batch, found: tuple[list[Tensor], list[Tensor]], **meaning: Any) -> None:
    """Held to the error rule: the truth is dense attention in float64, the measure dense attention in the dtype of the query."""
    dtype = batch.query[0].dtype if batch.query else torch.float32
    exact = dense(batch, torch.float64, **meaning)
    plain = [dense(batch, dtype, **meaning, order=order) for order in range(ORDERS if dtype == torch.float32 else 1)]
    for part, name in enumerate(("out", "lse")):
        if found[part]:
            truth = _flat(exact[part])
            hold(name, _flat(found[part]), truth, errors_of([(_flat(usual[part]), truth) for usual in plain]), FORWARD)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def apart(batch: Batch, out: Tensor, lse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Of a batched or a packed result: out and lse of each sequence."""
    if out.dim() == 4:
        return list(out), list(lse)
    counts = [q.shape[1] for q in batch.query]
    return [t.transpose(0, 1) for t in out[: sum(counts)].split(counts)], list(lse[:, : sum(counts)].split(counts, 1))
