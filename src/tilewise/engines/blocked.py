"""The blocked engine: tiles of plain torch operations, on anything torch runs on.

Memory is O(N), forward and backward: only one strip of scores exists at a time. Empty tiles are never visited, full ones
never masked. A strip is one query tile against a stretch of neighbouring key tiles, which keeps the products large.

Forward, for each strip (m: max_score score so far, l: sum of weights, acc: weighted values, all of the query tile):

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
from tilewise.engines.base import Engine, scalar_seed, sinks_gradient
from tilewise.engines.dropout import keep_scale, kept
from tilewise.engines.masked_matmul import mix
from tilewise.lang import Derivative, derive, evaluate, interpret, wrapped
from tilewise.tiles import TileMap

TILE = (128, 128)
STRIP_KEYS = 1024  # keys of a strip, at most
STRIP_ELEMENTS = 2**22  # scores of a strip over all its heads, at most


@dataclass(frozen=True)
class Part:
    """Batch elements and heads that are computed together because they share one row of the map (or have none)."""

    batch: slice
    heads: slice
    kv_heads: slice
    rows: int  # the map's rows of this part begin here


@dataclass(frozen=True)
class Strip:
    """One query tile against a stretch of keys."""

    part: Part
    q: slice
    kv: slice
    masked: bool


class Walk:
    """The order of work: parts, then query tiles, then strips."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tiles = map_of(problem, TILE)
        self.tile = TILE if self.tiles is None else self.tiles.tile
        self._stretches = [] if self.tiles is None else _stretches(self.tiles)

    def parts(self) -> Iterator[Part]:
        p, tiles = self.problem, self.tiles
        ratio = p.heads // p.kv_heads if p.kv_heads else 1
        by_head = tiles is not None and tiles.geometry.heads > 1
        by_batch = tiles is not None and tiles.geometry.batch > 1
        room = max(1, STRIP_ELEMENTS // (self.tile[0] * max(self.tile[1], 256)))  # heads, counted over the batch, that fit a strip
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
                yield Part(slice(b, min(b + batch_step, p.batch)), heads, kv_heads, row)

    def query_tiles(self) -> Iterator[tuple[int, slice]]:
        for at, start in enumerate(range(0, self.problem.q_len, self.tile[0])):
            yield at, slice(start, min(start + self.tile[0], self.problem.q_len))

    def strips(self, part: Part, at: int, q: slice) -> Iterator[Strip]:
        size = (part.batch.stop - part.batch.start) * (part.heads.stop - part.heads.start) * (q.stop - q.start)
        longest = max(1, min(STRIP_KEYS, STRIP_ELEMENTS // max(size, 1)) // self.tile[1]) * self.tile[1]
        stretches = [(0, self.problem.kv_len, False)] if self.tiles is None else self._stretches[part.rows + at]
        for start, stop, masked in stretches:
            for k in range(start, min(stop, self.problem.kv_len), longest):
                yield Strip(part, q, slice(k, min(k + longest, stop, self.problem.kv_len)), masked)


def _stretches(tiles: TileMap) -> list[list[tuple[int, int, bool]]]:
    """For every row of the map, its runs in order as (first key, last key + 1, whether the mask decides)."""
    rows: list[list[tuple[int, int, bool]]] = [[] for _ in range(tiles.geometry.rows)]
    width = tiles.tile[1]
    for runs, masked in ((tiles.partial, tiles.mask is not None), (tiles.full, False)):
        for row, start, count in zip(runs.row_of_run().tolist(), runs.start.tolist(), runs.count.tolist(), strict=True):
            rows[row].append((start * width, (start + count) * width, masked))
    return [sorted(row) for row in rows]


class _Work:
    """A problem's tensors and the steps that forward and backward share."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.inner = problem.inner_dtype
        self.ratio = problem.heads // problem.kv_heads if problem.kv_heads else 1

    def rows_of(self, tensor: Tensor, strip_part: Part, q: slice) -> Tensor:
        """[b, kv heads, ratio * queries, D]: the query heads of one key head lie side by side as rows."""
        piece = tensor[strip_part.batch, strip_part.heads, q].to(self.inner)
        b, h, m, d = piece.shape
        ratio = self.ratio if h > 1 or self.ratio == 1 else 1
        return piece.reshape(b, h // ratio, ratio * m, d)

    def keys_of(self, tensor: Tensor, strip: Strip) -> Tensor:
        """[b, kv heads, keys, D]"""
        return tensor[strip.part.batch, strip.part.kv_heads, strip.kv].to(self.inner)

    def indices(self, strip: Strip) -> dict[str, Tensor]:
        ranges = {"b": strip.part.batch, "h": strip.part.heads, "q": strip.q, "kv": strip.kv}
        device = self.problem.device
        return {
            name: torch.arange(s.start, s.stop, device=device).view([-1 if d == axis else 1 for d in range(4)]) for axis, (name, s) in enumerate(ranges.items())
        }

    def by_head(self, scores: Tensor, strip: Strip) -> Tensor:
        """[b, kv heads, ratio * queries, keys] -> [b, heads, queries, keys]"""
        return scores.view(scores.shape[0], strip.part.heads.stop - strip.part.heads.start, strip.q.stop - strip.q.start, scores.shape[-1])

    def scores(self, strip: Strip, q_rows: Tensor, at: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(scale * q k^T, the final scores, where they are attended: None if everywhere)"""
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

    def keep(self, at: dict[str, Tensor]) -> Tensor:
        return kept(self.problem.dropout_p, scalar_seed(self.problem), *(at[n].flatten() for n in ("b", "h", "q", "kv")))

    def like_rows(self, x: Tensor | None, rows: Tensor) -> Tensor | None:
        """[b, heads, queries, keys] laid out as [b, kv heads, ratio * queries, keys]"""
        return None if x is None else x.reshape(*rows.shape[:3], x.shape[-1])


class BlockedEngine(Engine):
    name = "blocked"
    summary = "tiles of plain torch operations; O(N) memory; needs no compiler"
    serves: ClassVar[Mapping[str, int]] = {"auto": 4, "flex": 3, "flash": 4}
    is_fused = False

    def refuse(self, problem: Problem) -> str | None:
        return None

    def tile(self, problem: Problem) -> tuple[int, int]:
        return TILE

    def forward(self, problem: Problem, plan: Plan) -> Output:
        p, work, walk = problem, _Work(problem), Walk(problem)
        shape = (p.batch, p.heads, p.q_len)
        out = torch.zeros((*shape, p.v_dim), dtype=p.dtype, device=p.device)
        lse = torch.full(shape, -torch.inf, dtype=work.inner, device=p.device)
        max_score = torch.full_like(lse, -torch.inf)
        for part in walk.parts():
            for at, q in walk.query_tiles():
                place = (part.batch, part.heads, q)
                out[place], lse[place], max_score[place] = _forward_rows(work, walk, part, at, q)
        return Output(out, lse, max_score)

    def backward(self, problem: Problem, plan: Plan, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> Gradients:
        return _Backward(problem, output, grad_out, grad_lse, wanted).run()


def _forward_rows(work: _Work, walk: Walk, part: Part, at: int, q: slice) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and max_score score of one query tile."""
    p = work.problem
    q_rows = work.rows_of(p.query, part, q)
    shape = (part.batch.stop - part.batch.start, part.heads.stop - part.heads.start, q.stop - q.start)
    m = torch.full((*shape, 1), -torch.inf, dtype=work.inner, device=p.device)
    total = torch.zeros_like(m)
    acc = torch.zeros((*shape, p.v_dim), dtype=work.inner, device=p.device)
    for strip in walk.strips(part, at, q):
        indices = work.indices(strip)
        _, s, attended = work.scores(strip, q_rows, indices)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        weights = torch.exp(s - base)
        decay = torch.exp(m - base)
        total = total * decay + weights.sum(-1, keepdim=True)
        if p.dropout_p > 0:
            weights = torch.where(work.keep(indices), weights, 0.0)
        rows = work.like_rows(weights, q_rows)
        assert rows is not None
        acc = acc * decay + mix(rows, work.keys_of(p.value, strip), work.like_rows(attended, q_rows)).view_as(acc)
        m = m_new
    ceiling = m
    if p.sinks is not None:
        sink = p.sinks[part.heads].to(work.inner).view(1, -1, 1, 1)
        ceiling = torch.maximum(m, sink)
    base = torch.where(ceiling == -torch.inf, 0.0, ceiling)
    decay = torch.exp(m - base)
    total, acc = total * decay, acc * decay
    if p.sinks is not None:
        total = total + torch.exp(sink - base)
    nothing = total == 0
    out = acc * (keep_scale(p.dropout_p) if p.dropout_p > 0 else 1.0) / torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -torch.inf, base + torch.log(torch.where(nothing, 1.0, total)))
    return out.to(p.dtype), lse.squeeze(-1), m.squeeze(-1)


class _Backward:
    """One walk over the strips; the sums for keys, values and captures grow as it goes, in a fixed order."""

    def __init__(self, problem: Problem, output: Output, grad_out: Tensor, grad_lse: Tensor | None, wanted: frozenset[int]) -> None:
        p = problem
        self.problem, self.output, self.grad_out = p, output, grad_out
        self.work, self.walk = _Work(p), Walk(p)
        inner = self.work.inner
        self.delta = (grad_out.to(inner) * output.out.to(inner)).sum(-1, keepdim=True)
        if grad_lse is not None:
            self.delta = self.delta - grad_lse.to(inner).unsqueeze(-1)
        self.d_query = torch.zeros(p.query.shape, dtype=p.dtype, device=p.device)
        self.d_key = torch.zeros(p.key.shape, dtype=inner, device=p.device)
        self.d_value = torch.zeros(p.value.shape, dtype=inner, device=p.device)
        self.derivative: Derivative | None = None
        self.d_captures: dict[int, Tensor] = {}
        if p.score is not None:
            self.derivative = derive(p.score.program, wanted)
            self.d_captures = {k: torch.zeros(p.score.captures[k].shape, dtype=inner, device=p.device) for k in wanted}

    def run(self) -> Gradients:
        p = self.problem
        for part in self.walk.parts():
            for at, q in self.walk.query_tiles():
                self._rows(part, at, q)
        captures = {k: g.to(p.score.captures[k].dtype) for k, g in self.d_captures.items()} if p.score is not None else {}
        return Gradients(self.d_query, self.d_key.to(p.dtype), self.d_value.to(p.dtype), sinks_gradient(p, self.output, self.delta.squeeze(-1)), captures)

    def _rows(self, part: Part, at: int, q: slice) -> None:
        p, work = self.problem, self.work
        place = (part.batch, part.heads, q)
        q_rows, do_rows = work.rows_of(p.query, part, q), work.rows_of(self.grad_out, part, q)
        lse = self.output.lse[place].unsqueeze(-1)
        delta = self.delta[place]
        dq_rows = torch.zeros_like(q_rows)
        for strip in self.walk.strips(part, at, q):
            indices = work.indices(strip)
            raw, s, attended = work.scores(strip, q_rows, indices)
            weights = torch.where(lse == -torch.inf, 0.0, torch.exp(s - lse))
            if attended is not None:
                weights = torch.where(attended, weights, 0.0)  # a NaN in lse must not reach the keys its row does not attend
            d_weights = work.by_head(do_rows @ work.keys_of(p.value, strip).transpose(-1, -2), strip)
            dropped = weights
            if p.dropout_p > 0:
                keep, scale = work.keep(indices), keep_scale(p.dropout_p)
                dropped = torch.where(keep, weights * scale, 0.0)
                d_weights = torch.where(keep, d_weights * scale, 0.0)
            ds = weights * (d_weights - delta)
            if attended is not None:
                ds = torch.where(attended, ds, 0.0)
            ds = self._through_score(ds, raw, attended, indices)
            keys = (part.batch, part.kv_heads, strip.kv)
            ds_rows, dropped_rows, attended_rows = (work.like_rows(x, q_rows) for x in (ds, dropped, attended))
            assert ds_rows is not None and dropped_rows is not None
            columns = None if attended_rows is None else attended_rows.transpose(-1, -2)
            self.d_value[keys] += mix(dropped_rows.transpose(-1, -2), do_rows, columns)
            self.d_key[keys] += p.scale * mix(ds_rows.transpose(-1, -2), q_rows, columns)
            dq_rows += p.scale * mix(ds_rows, work.keys_of(p.key, strip), attended_rows)
        self.d_query[place] = dq_rows.view(self.d_query[place].shape).to(p.dtype)

    def _through_score(self, ds: Tensor, raw: Tensor, attended: Tensor | None, indices: dict[str, Tensor]) -> Tensor:
        """From the gradient of the final score to that of the raw one; the captures' shares are added up on the way."""
        call = self.problem.score
        if call is None:
            return ds
        assert self.derivative is not None and attended is not None
        values = interpret(self.derivative.program, call, indices | {"score": raw})
        for site in self.derivative.sites:
            share = torch.where(attended, ds * values[site.gradient], 0.0)
            _scatter(self.d_captures[site.slot], tuple(values[k] for k in site.indices), share)
        return torch.where(attended, ds * values[0], 0.0)


def _scatter(into: Tensor, indices: tuple[object, ...], share: Tensor) -> None:
    """into[indices] += share, summed first over the dimensions on which no index depends."""
    if not indices:
        into += share.sum()
        return
    tensors = [i for i in indices if isinstance(i, Tensor)]
    varying = torch.broadcast_shapes(*(t.shape for t in tensors)) if tensors else ()
    varying = (1,) * (4 - len(varying)) + tuple(varying)
    still = [d for d in range(4) if varying[d] == 1]
    share = share.sum(still, keepdim=True) if still else share
    into.index_put_(_broadcast(wrapped(into, indices), share), share, accumulate=True)


def _broadcast(indices: tuple[object, ...], share: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(i, device=share.device).expand(share.shape) for i in indices)
