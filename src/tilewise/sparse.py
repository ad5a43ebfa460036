"""Sparse attention whose tiles are chosen from the data: scores of pooled tokens, choices made from them, and whole methods.

A choice is what TileMap.from_lists takes, so that a method of your own is three lines:

    scores = sparse.pooled_scores(q, k, tile=(64, 64))
    tiles = tw.TileMap.from_lists(*sparse.top_p(scores, 0.9), q_len=q.shape[2], kv_len=k.shape[2], always=[(0, 1)])
    out = tw.attention(q, k, v, mask=tiles)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.attention import attention
from tilewise.errors import InputError
from tilewise.lang import trace_mask
from tilewise.tiles import Geometry, TileMap
from tilewise.tiles.runs import from_sets

__all__ = ["moba", "moba_map", "pooled", "pooled_scores", "top_k", "top_p", "vsa"]

QUERY_TILE = 64  # of MoBA's maps: queries choose one by one, and a tile is computed if one of its queries chose it


# -- scores of tiles, and choices --------------------------------------------------------------------------------------


def pooled(tensor: Tensor, size: int) -> Tensor:
    """(..., tokens, width) -> (..., blocks, width): the means of `size` tokens after the other, in float32 or float64; the last block may hold fewer."""
    if size < 1:
        raise InputError(f"pooled takes blocks of at least 1 token, got {size}")
    whole = tensor.shape[-2] // size
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    means = tensor[..., : whole * size, :].unflatten(-2, (whole, size)).mean(-2, dtype=dtype)
    rest = tensor[..., whole * size :, :]
    return torch.cat([means, rest.mean(-2, keepdim=True, dtype=dtype)], -2) if rest.shape[-2] else means


def pooled_scores(query: Tensor, key: Tensor, tile: tuple[int, int] = (64, 64), *, scale: float | None = None) -> Tensor:
    """(batch, heads, query tiles, key tiles): scale * the product of the mean query of a tile and the mean key of another.

    Args:
        query: (batch, heads, queries, head dim).
        key: (batch, key heads, keys, head dim); query heads share key heads in groups.
        tile: Queries and keys of a tile.
        scale: 1 / sqrt(head dim) unless given.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return scale * pooled(query, tile[0]) @ _for_heads(pooled(key, tile[1]), query).transpose(-1, -2)


def top_k(scores: Tensor, k: int) -> Tensor:
    """(..., k) int32: the k key tiles with the highest scores, fewer if there are fewer; -1 in place of those with a score of -inf."""
    if k < 1:
        raise InputError(f"top_k takes at least 1 tile, got {k}")
    values, indices = scores.topk(min(k, scores.shape[-1]), -1)
    return indices.masked_fill(values == -math.inf, -1).int()


def top_p(scores: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The fewest key tiles that together have a share p of the softmax of the scores: (..., key tiles) int32 with the highest first, and how many of them."""
    if not 0 < p <= 1:
        raise InputError(f"top_p takes a share above 0 and up to 1, got {p}")
    weights, indices = scores.softmax(-1).nan_to_num().sort(-1, descending=True)  # NaN: nothing but -inf
    counts = ((weights.cumsum(-1) - weights < p) & (weights > 0)).sum(-1)
    return indices.int(), counts.int()


# -- MoBA --------------------------------------------------------------------------------------------------------------


def moba(query: Tensor, key: Tensor, value: Tensor, *, block: int, top_k: int, causal: bool = True, scale: float | None = None) -> Tensor:
    """Mixture of block attention: every query attends to its own block of keys and to those whose mean key it has the largest products with.

    As in the paper, the choice has no gradient; the attention to what was chosen has.

    Args:
        query: (batch, heads, tokens, head dim).
        key: (batch, key heads, tokens, head dim); query heads may share key heads in groups.
        value: Like the key; its head dim may be another.
        block: Keys of a block. Multiples of 64 suit every engine.
        top_k: Blocks that a query attends to, its own included.
        causal: Queries attend to the keys up to their own place, and choose among the blocks before their own; else among all.
        scale: 1 / sqrt(head dim) unless given.
    """
    tiles = moba_map(query, key, block=block, top_k=top_k, causal=causal)
    return attention(query, key, value, mask=tiles, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


@torch.no_grad()
def moba_map(query: Tensor, key: Tensor, *, block: int, top_k: int, causal: bool = True) -> TileMap:
    """What `moba` attends to."""
    length = query.shape[2]
    if key.shape[2] != length or min(block, top_k) < 1:
        raise InputError(f"moba takes as many keys as queries, and at least 1 block of 1 key, got {key.shape[2]}, {length}, {top_k} and {block}")
    means = _for_heads(pooled(key, block), query)
    count, token = means.shape[2], torch.arange(length, device=query.device)
    column, own = torch.arange(count, device=query.device), token[:, None] // block
    scores = (query.to(means.dtype) @ means.transpose(-1, -2)).masked_fill(column == own, math.inf)
    values, chosen = (scores.masked_fill(column > own, -math.inf) if causal else scores).topk(min(top_k, count), -1)
    chosen = chosen.masked_fill(values == -math.inf, count).int()  # (batch, heads, tokens, top_k); `count` is no block

    def within(b: Any, h: Any, q: Any, kv: Any) -> Any:
        seen = (chosen[b, h, q] == kv // block).any(-1)
        return seen & (q >= kv) if causal else seen

    geometry = Geometry(query.shape[0], query.shape[1], length, length, (QUERY_TILE, block))
    seen = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=query.device).scatter_(-1, chosen.long(), True)[..., :count]
    rows, missing = geometry.q_tiles, -length % QUERY_TILE
    some, every = (functional.pad(seen, (0, 0, 0, missing), value=fill).unflatten(2, (rows, QUERY_TILE)) for fill in (False, True))
    full = every.all(3)
    if causal:
        full = full & ((column + 1) * block <= token[::QUERY_TILE, None] + 1)  # up to the tile's first query
    partial_runs, full_runs = from_sets(torch.stack([some.any(3) & ~full, full]).flatten(1, 3))
    return TileMap(geometry, partial_runs, full_runs, trace_mask(within), f"moba({block}, {top_k})", given=True)


# -- VSA ---------------------------------------------------------------------------------------------------------------


def vsa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid: Sequence[int],
    *,
    cube: Sequence[int] = (4, 4, 4),
    keep: float,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Video sparse attention: attention among the means of cubes, which also says to which cubes the tokens of a cube attend.

    The result is fine + gate * coarse: every token's attention to the tokens of the chosen cubes, and its cube's attention to the means of all cubes. Both
    have gradients; the choice has none.

    Args:
        query: (batch, heads, tokens, head dim), of the points of a grid in row-major order.
        key: (batch, key heads, tokens, head dim); query heads may share key heads in groups.
        value: Like the key; its head dim may be another.
        grid: Frames, height and width; or a grid of fewer axes.
        cube: As many points along each axis. Cubes of 64 or 128 points suit every engine. Those at the border may hold fewer.
        keep: The share of all cubes, above 0 and up to 1, that a cube attends to.
        gate: Broadcast to the result, learned as a rule; 1 unless given.
        scale: 1 / sqrt(head dim) unless given.
    """
    sizes, cubes = tuple(grid), tuple(cube)
    if not len(sizes) == len(cubes) or min(*sizes, *cubes) < 1 or not 0 < keep <= 1:
        raise InputError(f"vsa takes a grid, a cube with as many axes, and a share to keep above 0 and up to 1, got {sizes}, {cubes} and {keep}")
    if not query.shape[2] == key.shape[2] == math.prod(sizes):
        raise InputError(f"vsa: the grid {sizes} has {math.prod(sizes)} points, the call {query.shape[2]} queries and {key.shape[2]} keys")
    order = _in_cubes(sizes, cubes).to(query.device)
    inside, size = order >= 0, math.prod(cubes)
    place = torch.empty(math.prod(sizes), dtype=torch.int64, device=query.device)
    place[order[inside]] = torch.arange(len(order), device=query.device)[inside]
    q, k, v = (t.index_select(2, order.clamp(min=0)) for t in (query, key, value))

    means = [_means(t, inside.view(-1, size)) for t in (q, k, v)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * means[0] @ _for_heads(means[1], query).transpose(-1, -2)
    coarse = (scores.softmax(-1) @ _for_heads(means[2], query)).to(value.dtype).index_select(2, place // size)

    chosen = top_k(scores.detach(), math.ceil(keep * scores.shape[-1]))
    ragged = any(n % c for n, c in zip(sizes, cubes, strict=True))
    tiles = TileMap.from_lists(chosen, q_len=len(order), kv_len=len(order), tile=(size, size), mask=(lambda b, h, q, kv: inside[kv]) if ragged else None)
    fine = attention(q, k, v, mask=tiles, scale=scale, enable_gqa=query.shape[1] != key.shape[1]).index_select(2, place)
    return fine + (coarse if gate is None else gate * coarse)


def _in_cubes(sizes: tuple[int, ...], cubes: tuple[int, ...]) -> Tensor:
    """The points of a row-major grid cube after cube; -1 where a cube at the border has none."""
    points = torch.arange(math.prod(sizes)).view(sizes)
    counts = [-(-n // c) for n, c in zip(sizes, cubes, strict=True)]
    room = [0 if side == 0 else counts[axis] * cubes[axis] - sizes[axis] for axis in reversed(range(len(sizes))) for side in (0, 1)]
    split = functional.pad(points, room, value=-1).view([n for pair in zip(counts, cubes, strict=True) for n in pair])
    return split.permute([*range(0, split.dim(), 2), *range(1, split.dim(), 2)]).flatten()


def _means(tensor: Tensor, inside: Tensor) -> Tensor:
    """(batch, heads, cubes * size, width) -> (batch, heads, cubes, width) over the points that are inside, (cubes, size)."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).unflatten(2, inside.shape)
    return torch.where(inside[..., None], wide, 0).sum(3) / inside.sum(1, keepdim=True)


def _for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    heads, own = query.shape[1], tensor.shape[1]
    if own == 0 or heads % own:
        raise InputError(f"{heads} query heads cannot share {own} key heads")
    return tensor if heads == own else tensor.repeat_interleave(heads // own, 1)
