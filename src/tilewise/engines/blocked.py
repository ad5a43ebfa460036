"""The blocked engine: tiles of plain torch operations, on anything torch runs on.

Memory is O(N), forward and backward: only one strip of scores exists at a time. Empty tiles are skipped, full tiles are not
masked. A strip is one query tile against a range of neighbouring key tiles, which keeps the products large.

Forward, for each strip (of its query tile, m: row max so far, l: sum of weights, acc: weighted values):

    s = score(scale * q k^T), -inf where masked      m' = max(m, max s)      p = exp(s - m')
    l = l exp(m - m') + sum p                        acc = acc exp(m - m') + dropout(p) v

Backward, from lse (P = exp(s - lse), delta = dO . O - dlse):

    dV += dropout(P)^T dO     dS = P (dropout(dO V^T) - delta)     dscore = dS * score'     dQ += scale dscore K     dK += scale dscore^T Q
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.core.output import Gradients, Output
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem
from tilewise.engines.base import Engine, sinks_gradient
from tilewise.engines.dropout import keep_scale, kept, output_scale
from tilewise.engines.masked_matmul import masked_matmul
from tilewise.lang import Derivative, derive, evaluate, interpret, wrapped
from tilewise.tiles import TileMap

TILE = (128, 128)
STRIP_KEYS = 1024  # most keys in a strip
STRIP_ELEMENTS = 2**22  # most scores in a strip, over all its heads


@dataclass(frozen=True)
class HeadGroup:
    """Batch elements and heads that are computed together, because they share the rows of one map (or have no map)."""

    batch: slice
    heads: slice
    kv_heads: slice
    first_row: int  # of this group in the map


@dataclass(frozen=True)
class Strip:
    """One query tile against a range of keys."""

    group: HeadGroup
    q: slice
    kv: slice
    masked: bool


class TileLoop:
    """The loop nest: head groups, query tiles, strips."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tiles = map_of(problem, TILE)
        self.tile = TILE if self.tiles is None else self.tiles.tile
        self._key_ranges = [] if self.tiles is None else _key_ranges(self.tiles)

    def head_groups(self) -> Iterator[HeadGroup]:
        p, tiles = self.problem, self.tiles
        ratio = p.heads // p.kv_heads if p.kv_heads else 1
        by_head = tiles is not None and tiles.geometry.heads > 1
        by_batch = tiles is not None and tiles.geometry.batch > 1
        room = max(1, STRIP_ELEMENTS // (self.tile[0] * max(self.tile[1], 256)))  # (batch, head) pairs that fit a strip
        head_step = 1 if by_head else max(1, min(p.kv_heads, room // ratio)) * ratio
        batch_step = 1 if by_batch or head_step < p.heads else max(1, room // max(p.heads, 1))
        for b in range(0, p.batch, batch_step):
            for h in range(0, p.heads, head_step):
                row = 0
                if tiles is not None:
                    g = tiles.geometry
                    row = ((b if by_batch else 0) * g.heads + (h if by_head else 0)) * g.q_tiles
                heads = slice(h, min(h + head_step, p.heads))
                kv_heads = slice(h // ratio, -(-heads.stop // ratio))
                yield HeadGroup(slice(b, min(b + batch_step, p.batch)), heads, kv_heads, row)

    def query_tiles(self) -> Iterator[tuple[int, slice]]:
        for at, start in enumerate(range(0, self.problem.q_len, self.tile[0])):
            yield at, slice(start, min(start + self.tile[0], self.problem.q_len))

    def strips(self, group: HeadGroup, at: int, q: slice) -> Iterator[Strip]:
        size = (group.batch.stop - group.batch.start) * (group.heads.stop - group.heads.start) * (q.stop - q.start)
        longest = max(1, min(STRIP_KEYS, STRIP_ELEMENTS // max(size, 1)) // self.tile[1]) * self.tile[1]
        key_ranges = [(0, self.problem.kv_len, False)] if self.tiles is None else self._key_ranges[group.first_row + at]
        for start, stop, masked in key_ranges:
            for k in range(start, min(stop, self.problem.kv_len), longest):
                yield Strip(group, q, slice(k, min(k + longest, stop, self.problem.kv_len)), masked)


def _key_ranges(tiles: TileMap) -> list[list[tuple[int, int, bool]]]:
    """For every row of the map, its runs in order as (first key, last key + 1, whether to apply the mask)."""
    rows: list[list[tuple[int, int, bool]]] = [[] for _ in range(tiles.geometry.rows)]
    width = tiles.tile[1]
    for runs, masked in ((tiles.partial, tiles.mask is not None), (tiles.full, False)):
        for row, start, count in zip(runs.row_of_run().tolist(), runs.start.tolist(), runs.count.tolist(), strict=True):
            rows[row].append((start * width, (start + count) * width, masked))
    return [sorted(row) for row in rows]


class _StripMath:
    """The steps on a strip that forward and backward share."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.inner = problem.inner_dtype
        self.ratio = problem.heads // problem.kv_heads if problem.kv_heads else 1

    def rows_of(self, tensor: Tensor, group: HeadGroup, q: slice) -> Tensor:
        """[B, Hkv, ratio * M, D]: the M queries of all heads that share a key head, stacked as rows."""
        piece = tensor[group.batch, group.heads, q].to(self.inner)
        b, h, m, d = piece.shape
        ratio = self.ratio if h > 1 or self.ratio == 1 else 1
        return piece.reshape(b, h // ratio, ratio * m, d)

    def keys_of(self, tensor: Tensor, strip: Strip) -> Tensor:
        """[B, Hkv, N, D]"""
        return tensor[strip.group.batch, strip.group.kv_heads, strip.kv].to(self.inner)

    def indices(self, strip: Strip) -> dict[str, Tensor]:
        ranges = {"b": strip.group.batch, "h": strip.group.heads, "q": strip.q, "kv": strip.kv}
        device = self.problem.device
        return {
            name: torch.arange(s.start, s.stop, device=device).view([-1 if d == axis else 1 for d in range(4)]) for axis, (name, s) in enumerate(ranges.items())
        }

    def by_head(self, scores: Tensor, strip: Strip) -> Tensor:
        """[B, Hkv, ratio * M, N] -> [B, H, M, N]"""
        return scores.view(scores.shape[0], strip.group.heads.stop - strip.group.heads.start, strip.q.stop - strip.q.start, scores.shape[-1])

    def scores(self, strip: Strip, q_rows: Tensor, at: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """[B, H, M, N] each: scale * q k^T, the final scores, and where they are attended (None if everywhere)."""
        p = self.problem
        raw = self.by_head(p.scale * (q_rows @ self.keys_of(p.key, strip).transpose(-1, -2)), strip)
        final = raw
        if p.score is not None:
            final = torch.as_tensor(evaluate(p.score, at | {"score": raw})).to(self.inner).expand_as(raw)
        if strip.masked:
            assert p.mask is not None
            final = torch.where(torch.as_tensor(evaluate(p.mask, at), device=raw.device), final, -torch.inf)
        attended = final > -torch.inf if strip.masked or p.score is not None else None
        if attended is not None:
            attended = attended | final.isnan()
        return raw, final, attended

    def like_rows(self, x: Tensor | None, rows: Tensor) -> Tensor | None:
        """[B, H, M, N] -> [B, Hkv, ratio * M, N], the inverse of by_head"""
        return None if x is None else x.reshape(*rows.shape[:3], x.shape[-1])


class BlockedEngine(Engine):
    name = "blocked"
    summary = "tiles of plain torch operations; O(N) memory; needs no compiler"
    serves: ClassVar[Mapping[str, int]] = {"auto": 5, "flex": 4, "flash": 5}
    is_fused = False
    takes_pages = True

    def refuse(self, problem: Problem) -> str | None:
        return None

    def tile(self, problem: Problem) -> tuple[int, int]:
        return TILE

    def forward(self, problem: Problem, plan: Plan) -> Output:
        p = problem.without_pages()
        work, loop = _StripMath(p), TileLoop(p)
        shape = (p.batch, p.heads, p.q_len)
        out = torch.zeros((*shape, p.v_dim), dtype=p.result_dtype, device=p.device)
        lse = torch.full(shape, -torch.inf, dtype=work.inner, device=p.device)
        max_score = torch.full_like(lse, -torch.inf)
        for group in loop.head_groups():
            for at, q in loop.query_tiles():
                place = (group.batch, group.heads, q)
                out[place], lse[place], max_score[place] = _forward_tile(work, loop, group, at, q, output_scale(problem))
        return Output(out, lse, max_score)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        return _Backward(problem, output, grad_out, grad_lse, wanted).run()


def _forward_tile(work: _StripMath, loop: TileLoop, group: HeadGroup, at: int, q: slice, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """out [B, H, M, Dv], lse and max_score [B, H, M] of one query tile."""
    p = work.problem
    q_rows = work.rows_of(p.query, group, q)  # [B, Hkv, ratio * M, D]
    shape = (group.batch.stop - group.batch.start, group.heads.stop - group.heads.start, q.stop - q.start)
    m = torch.full((*shape, 1), -torch.inf, dtype=work.inner, device=p.device)  # [B, H, M, 1]
    total = torch.zeros_like(m)  # [B, H, M, 1]
    acc = torch.zeros((*shape, p.v_dim), dtype=work.inner, device=p.device)  # [B, H, M, Dv]
    for strip in loop.strips(group, at, q):
        indices = work.indices(strip)
        _, s, attended = work.scores(strip, q_rows, indices)  # [B, H, M, N]
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        weights = torch.exp(s - base)
        decay = torch.exp(m - base)
        total = total * decay + weights.sum(-1, keepdim=True)
        if p.dropout_p > 0:
            weights = torch.where(kept(p, indices), weights, 0.0)
        weight_rows = work.like_rows(weights, q_rows)  # [B, Hkv, ratio * M, N]
        assert weight_rows is not None
        acc = acc * decay + masked_matmul(weight_rows, work.keys_of(p.value, strip), work.like_rows(attended, q_rows)).view_as(acc)
        m = m_new
    ceiling = m
    if p.sinks is not None:
        sink = p.sinks[group.heads].to(work.inner).view(1, -1, 1, 1)  # [1, H, 1, 1]
        ceiling = torch.maximum(m, sink)
    base = torch.where(ceiling == -torch.inf, 0.0, ceiling)
    decay = torch.exp(m - base)
    total, acc = total * decay, acc * decay
    if p.sinks is not None:
        total = total + torch.exp(sink - base)
    nothing = total == 0
    out = acc * scale / torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -torch.inf, base + torch.log(torch.where(nothing, 1.0, total)))
    return out.to(p.result_dtype), lse.squeeze(-1), m.squeeze(-1)


class _Backward:
    """One loop over the strips, which accumulates the gradients of keys, values and captures in a fixed order."""

    def __init__(self, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> None:
        p = problem
        self.problem, self.output, self.grad_out = p, output, grad_out
        self.work, self.loop = _StripMath(p), TileLoop(p)
        inner = self.work.inner
        self.delta = (grad_out.to(inner) * output.out.to(inner)).sum(-1, keepdim=True)  # [B, H, Sq, 1]
        if grad_lse is not None:
            self.delta = self.delta - grad_lse.to(inner).unsqueeze(-1)
        self.d_query = torch.zeros(p.query.shape, dtype=p.result_dtype, device=p.device)  # [B, H, Sq, D]
        self.d_key = torch.zeros(p.key.shape, dtype=inner, device=p.device)  # [B, Hkv, Skv, D]
        self.d_value = torch.zeros(p.value.shape, dtype=inner, device=p.device)  # [B, Hkv, Skv, Dv]
        self.derivative: Derivative | None = None
        self.d_captures: dict[int, Tensor] = {}
        if p.score is not None:
            self.derivative = derive(p.score.program, wanted)
            self.d_captures = {k: torch.zeros(p.score.captures[k].shape, dtype=inner, device=p.device) for k in wanted}

    def run(self) -> Gradients:
        p = self.problem
        for group in self.loop.head_groups():
            for at, q in self.loop.query_tiles():
                self._backward_tile(group, at, q)
        captures = {k: g.to(p.score.captures[k].dtype) for k, g in self.d_captures.items()} if p.score is not None else {}
        d_key, d_value = self.d_key.to(p.result_dtype), self.d_value.to(p.result_dtype)
        return Gradients(self.d_query, d_key, d_value, sinks_gradient(p, self.output, self.delta.squeeze(-1)), captures)

    def _backward_tile(self, group: HeadGroup, at: int, q: slice) -> None:
        p, work = self.problem, self.work
        place = (group.batch, group.heads, q)
        q_rows, do_rows = work.rows_of(p.query, group, q), work.rows_of(self.grad_out, group, q)  # [B, Hkv, ratio * M, D or Dv]
        lse = self.output.lse[place].unsqueeze(-1)  # [B, H, M, 1]
        delta = self.delta[place]  # [B, H, M, 1]
        dq_rows = torch.zeros_like(q_rows)
        for strip in self.loop.strips(group, at, q):
            indices = work.indices(strip)
            raw, s, attended = work.scores(strip, q_rows, indices)  # [B, H, M, N]
            weights = torch.where(lse == -torch.inf, 0.0, torch.exp(s - lse))
            if attended is not None:
                weights = torch.where(attended, weights, 0.0)  # a NaN in lse must not reach keys that its row does not attend to
            d_weights = work.by_head(do_rows @ work.keys_of(p.value, strip).transpose(-1, -2), strip)  # [B, H, M, N]
            dropped = weights
            if p.dropout_p > 0:
                keep, scale = kept(p, indices), keep_scale(p.dropout_p)
                dropped = torch.where(keep, weights * scale, 0.0)
                d_weights = torch.where(keep, d_weights * scale, 0.0)
            ds = weights * (d_weights - delta)
            if attended is not None:
                ds = torch.where(attended, ds, 0.0)
            ds = self._through_score(ds, raw, attended, indices)
            keys = (group.batch, group.kv_heads, strip.kv)
            ds_rows, dropped_rows, attended_rows = (work.like_rows(x, q_rows) for x in (ds, dropped, attended))
            assert ds_rows is not None and dropped_rows is not None
            attended_columns = None if attended_rows is None else attended_rows.transpose(-1, -2)  # [B, Hkv, N, ratio * M]
            self.d_value[keys] += masked_matmul(dropped_rows.transpose(-1, -2), do_rows, attended_columns)  # [B, Hkv, N, Dv]
            self.d_key[keys] += p.scale * masked_matmul(ds_rows.transpose(-1, -2), q_rows, attended_columns)  # [B, Hkv, N, D]
            dq_rows += p.scale * masked_matmul(ds_rows, work.keys_of(p.key, strip), attended_rows)  # [B, Hkv, ratio * M, D]
        self.d_query[place] = dq_rows.view(self.d_query[place].shape).to(p.result_dtype)

    def _through_score(self, ds: Tensor, raw: Tensor, attended: Tensor | None, indices: dict[str, Tensor]) -> Tensor:
        """The gradient of the raw scores from that of the final ones; also accumulates the gradients of the captures."""
        call = self.problem.score
        if call is None:
            return ds
        assert self.derivative is not None and attended is not None
        values = interpret(self.derivative.program, call, indices | {"score": raw})
        for site in self.derivative.sites:
            d_load = torch.where(attended, (ds * values[site.gradient]).to(ds.dtype), 0.0)  # [B, H, M, N]
            _scatter_add(self.d_captures[site.slot], tuple(values[k] for k in site.indices), d_load)
        return torch.where(attended, (ds * values[0]).to(ds.dtype), 0.0)  # the slope of a score with float64 captures is float64


def _scatter_add(into: Tensor, indices: tuple[object, ...], gradient: Tensor) -> None:
    """into[indices] += gradient, summed first over the dimensions that no index depends on."""
    if not indices:
        into += gradient.sum()
        return
    tensors = [i for i in indices if isinstance(i, Tensor)]
    varying = torch.broadcast_shapes(*(t.shape for t in tensors)) if tensors else ()
    varying = (1,) * (4 - len(varying)) + tuple(varying)
    constant = [d for d in range(4) if varying[d] == 1]
    gradient = gradient.sum(constant, keepdim=True) if constant else gradient
    into.index_put_(_broadcast(wrapped(into, indices), gradient), gradient, accumulate=True)


def _broadcast(indices: tuple[object, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(i, device=gradient.device).expand(gradient.shape) for i in indices)
