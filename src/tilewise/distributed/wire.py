"""Tensors of a call on their way between ranks: packed into rows of tokens, exchanged, and unpacked.

A row holds all numbers of one token, so (batch, heads, tokens, D) travels as (tokens, batch * heads * D).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.plan import MaskPlan


class Wire:
    """All collectives of one mask's calls. Along a dimension that only one rank has, tensors pass unchanged."""

    def __init__(self, part: MaskPlan) -> None:
        self._heads, self._keys, self._team = part.whole.head_exchange, part.keys, part.whole.team
        sizes, groups = part.whole.sizes, part.whole.team.head_groups
        self._q_heads = [slice(u * sizes.heads // groups, (u + 1) * sizes.heads // groups) for u in range(groups)]
        # Where there are fewer key heads than head groups, neighbouring groups share one.
        self._kv_heads = [slice(u * sizes.kv_heads // groups, -(-(u + 1) * sizes.kv_heads // groups)) for u in range(groups)]
        self._shares_kv = sizes.kv_heads < groups

    # -- heads ---------------------------------------------------------------------------------------------------------

    def split_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All heads of the own tokens -> some heads of all tokens of the row group."""
        if self._heads is None:
            return query, key, value
        messages = [_pack(query[:, q], key[:, kv], value[:, kv]) for q, kv in zip(self._q_heads, self._kv_heads, strict=True)]
        rows = self._heads.split(torch.stack(messages))
        own_q, own_kv = self._q_heads[self._team.head_group], self._kv_heads[self._team.head_group]
        q, k, v = _unpack(rows, query.shape[0], (_width(own_q), query.shape[3]), (_width(own_kv), key.shape[3]), (_width(own_kv), value.shape[3]))
        return q, k, v

    def split_out(self, grad: Tensor) -> Tensor:
        """As split_heads, of what has the query's heads."""
        if self._heads is None:
            return grad
        rows = self._heads.split(torch.stack([_pack(grad[:, q]) for q in self._q_heads]))
        return _unpack(rows, grad.shape[0], (_width(self._q_heads[0]), grad.shape[3]))[0]

    def split_lse(self, grad: Tensor) -> Tensor:
        return self.split_out(grad.unsqueeze(3)).squeeze(3)

    def join_heads(self, out: Tensor) -> Tensor:
        """Some heads of all tokens of the row group -> all heads of the own tokens."""
        if self._heads is None:
            return out
        parts = self._heads.join(_pack(out))
        return torch.cat([_unpack(rows, out.shape[0], (out.shape[1], out.shape[3]))[0] for rows in parts], 1)

    def join_lse(self, lse: Tensor) -> Tensor:
        return self.join_heads(lse.unsqueeze(3)).squeeze(3)

    def join_gradients(self, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """As join_heads, of gradients. Those of a key head that several head groups share are added in the order of ranks, and rounded after that."""
        if self._heads is None:
            return query.to(dtype), key.to(dtype), value.to(dtype)
        wide = key.dtype if self._shares_kv else dtype
        parts = self._heads.join(_pack(query.to(wide), key.to(wide), value.to(wide)))
        sizes = [(t.shape[1], t.shape[3]) for t in (query, key, value)]
        queries, keys, values = zip(*[_unpack(rows, query.shape[0], *sizes) for rows in parts], strict=True)
        return torch.cat(queries, 1).to(dtype), self._joined(keys).to(dtype), self._joined(values).to(dtype)

    def _joined(self, parts: tuple[Tensor, ...]) -> Tensor:
        if not self._shares_kv:
            return torch.cat(parts, 1)
        whole = parts[0].new_zeros((parts[0].shape[0], self._kv_heads[-1].stop, *parts[0].shape[2:]))
        for heads, part in zip(self._kv_heads, parts, strict=True):
            whole[:, heads] += part
        return whole

    # -- keys ----------------------------------------------------------------------------------------------------------

    def fetch(self, key: Tensor, value: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
        """Start to bring the keys and values that the queries of this rank attend to; the result waits for those of a stage."""
        if self._keys is None:
            return lambda stage: (key, value)
        fetch = self._keys.fetch(_pack(key, value))

        def of_stage(stage: int) -> tuple[Tensor, Tensor]:
            k, v = _unpack(fetch.rows(stage), key.shape[0], (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
            return k, v

        return of_stage

    def give_back(self, grads: Sequence[tuple[Tensor, Tensor]], deterministic: bool) -> tuple[Tensor, Tensor]:
        """The gradients of each stage's keys and values to those who own them, summed in fp32 (fp64 of fp64)."""
        key, value = grads[0]
        inner = torch.float64 if key.dtype == torch.float64 else torch.float32
        if self._keys is None:
            return (key.to(inner), value.to(inner)) if self._shares_kv else (key, value)
        rows = self._keys.give_back([_pack(k.to(inner), v.to(inner)) for k, v in grads], deterministic)
        k, v = _unpack(rows, key.shape[0], (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        return k, v

    # -- what every rank has -------------------------------------------------------------------------------------------

    def sum(self, gradient: Tensor) -> Tensor:
        """Of a tensor that every rank has a copy of, over all ranks."""
        inner = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        summed = gradient.to(inner, copy=True).contiguous()
        for group in self._team.everyone:
            dist.all_reduce(summed, group=group)
        return summed.to(gradient.dtype)

    def of_all_heads(self, own: Tensor | None, sinks: Tensor) -> Tensor:
        """The gradients of the logits of all heads: what this rank adds is to those of its own heads."""
        whole = torch.zeros_like(sinks)
        if own is not None:
            whole[self._q_heads[self._team.head_group]] = own.to(whole.dtype)
        return whole


def _width(heads: slice) -> int:
    return int(heads.stop - heads.start)


def _pack(*tensors: Tensor) -> Tensor:
    """(B, H, S, D) each -> (S, numbers)"""
    rows = [t.permute(2, 0, 1, 3).flatten(1) for t in tensors]
    return torch.cat(rows, 1) if len(rows) > 1 else rows[0]


def _unpack(rows: Tensor, batch: int, *sizes: tuple[int, int]) -> list[Tensor]:
    """(S, numbers) -> (B, H, S, D) each, of the given heads and head dims"""
    parts = rows.split([batch * heads * dim for heads, dim in sizes], 1)
    return [part.unflatten(1, (batch, heads, dim)).permute(1, 2, 0, 3) for part, (heads, dim) in zip(parts, sizes, strict=True)]
