"""Sparse attention whose tiles are chosen from the data: scores of pooled tokens, choices made from them, and whole methods.

A choice is what TileMap.from_lists takes, so that a method of your own is three lines:

    scores = sparse.pooled_scores(q, k, tile=(64, 64))
    tiles = tw.TileMap.from_lists(*sparse.top_p(scores, 0.9), q_len=q.shape[2], kv_len=k.shape[2], always=[(0, 1)])
    out = tw.attention(q, k, v, mask=tiles)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.attention import attention
from tilewise.cubes import Cubes, cubes, cubes_for
from tilewise.errors import InputError
from tilewise.lang import trace_mask
from tilewise.masks import Mask
from tilewise.masks.expressions import broadcast_load
from tilewise.tiles import EMPTY, FULL, PARTIAL, ChosenTiles, Geometry, TileMap, check_tile, from_chosen

__all__ = ["Cubes", "cube_attention", "cubes", "moba", "moba_map", "pooled", "pooled_scores", "top_k", "top_p", "vsa"]

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
    check_tile("pooled_scores", tile)
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
    scores = scores.masked_fill(scores.isnan(), math.inf)  # first, as in top_k
    if p == 1:  # all that is not forbidden, however little: sums reach 1 by rounding, weights 0
        return scores.argsort(-1, descending=True).int(), (scores > -math.inf).sum(-1).int()
    endless = scores == math.inf  # these share all the weight
    finite = torch.where(endless.any(-1, keepdim=True), torch.where(endless, 0.0, -math.inf), scores)
    weights, indices = finite.softmax(-1).nan_to_num().sort(-1, descending=True)  # NaN: nothing but -inf
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
    states = torch.where(full, FULL, torch.where(some.any(3), PARTIAL, EMPTY)).to(torch.uint8)
    return from_chosen(geometry, ChosenTiles(states, count), trace_mask(within), f"moba({block}, {top_k})")


# -- cubes of a video, VSA ---------------------------------------------------------------------------------------------


def cube_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cubes: Cubes,
    choose: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]],
    *,
    visible: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of a video's tokens, with text or without, to the cubes that are chosen for each cube of them.

    Text is seen by all and sees all. The attention has gradients, the choice has none.

    Args:
        query: (batch, heads, tokens, head dim).
        key: (batch, key heads, tokens, head dim); query heads may share key heads in groups.
        value: Like the key; its head dim may be another.
        cubes: The order of the tokens, on their device.
        choose: Makes lists of cubes, as `top_k` and `top_p` do, from the (batch, heads, cubes, cubes) scores of mean queries and mean keys.
        visible: (batch or 1, tokens) boolean, false for keys that nobody sees, such as padding.
        scale: 1 / sqrt(head dim) unless given.
    """
    tokens = len(cubes.place)
    if not query.shape[2] == key.shape[2] == tokens:
        raise InputError(f"cube_attention: the cubes are of {tokens} tokens, the call of {query.shape[2]} queries and {key.shape[2]} keys")
    if visible is not None and not isinstance(visible, Tensor):
        raise InputError(f"cube_attention takes visible as a (batch or 1, {tokens}) boolean tensor, got {type(visible).__name__}")
    if visible is not None and (visible.dtype != torch.bool or visible.shape not in ((1, tokens), (query.shape[0], tokens))):
        raise InputError(f"cube_attention takes visible as (batch or 1, {tokens}) booleans, got {visible.dtype} of shape {tuple(visible.shape)}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (cubes.permute(t) for t in (query, key, value))
    seen = None if visible is None else visible[:, cubes.order.clamp(min=0)] & cubes.inside  # (batch or 1, places)
    with torch.no_grad():
        scores = _scores_of_cubes(cubes.means(q), cubes.means(k, None if seen is None else seen[:, None]), scale)
        if seen is not None:  # a cube of hidden keys alone is no choice
            scores = scores.masked_fill(~cubes.in_cubes(seen, -1).any(-1)[:, None, None], -math.inf)
        chosen = choose(scores)
    own = cubes.count * cubes.size
    out = _to_chosen(q[:, :, :own], k, v, cubes, chosen, seen, scale)
    if cubes.text:
        padding = None if visible is None else _key_padding(visible)
        text = attention(q[:, :, own:], key, value, mask=padding, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        out = torch.cat([out, text], 2)
    return cubes.unpermute(out)


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
    if not 0 < keep <= 1:
        raise InputError(f"vsa takes a share to keep above 0 and up to 1, got {keep}")
    order = cubes_for(query, grid, cube)
    points = len(order.place)
    if not query.shape[2] == key.shape[2] == points:
        raise InputError(f"vsa: the grid {order.grid} has {points} points, the call {query.shape[2]} queries and {key.shape[2]} keys")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (order.permute(t) for t in (query, key, value))

    scores = _scores_of_cubes(order.means(q), order.means(k), scale)
    coarse = (scores.softmax(-1) @ _for_heads(order.means(v), query)).to(value.dtype).index_select(2, order.place // order.size)

    chosen = top_k(scores.detach(), math.ceil(keep * order.count))
    fine = order.unpermute(_to_chosen(q, k, v, order, chosen, None, scale))
    return fine + (coarse if gate is None else gate * coarse)


def _scores_of_cubes(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    return scale * queries @ _for_heads(keys, queries).transpose(-1, -2)


def _to_chosen(q: Tensor, k: Tensor, v: Tensor, cubes: Cubes, chosen: Tensor | tuple[Tensor, Tensor], seen: Tensor | None, scale: float) -> Tensor:
    """The attention of the cubes' tokens to those of the chosen cubes and to text, as far as they are seen, all in the order of cubes."""
    indices, counts = chosen if isinstance(chosen, tuple) else (chosen, None)
    mask = None
    if seen is not None:
        mask = _key_padding(seen)
    elif cubes.is_ragged:
        mask = _key_padding(cubes.inside[None])
    text = (cubes.count, cubes.count + -(-cubes.text // cubes.size))
    size = (cubes.size, cubes.size)
    tiles = TileMap.from_lists(indices, counts, q_len=q.shape[2], kv_len=k.shape[2], tile=size, always=[text], mask=mask)
    return attention(q, k, v, mask=tiles, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _key_padding(visible: Tensor) -> Mask:
    """Of (batch or 1, keys) booleans."""
    return Mask(broadcast_load(visible[:, None, None]), "key_padding", f"{visible.shape[0]} x {visible.shape[1]}")


def _for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    heads, own = query.shape[1], tensor.shape[1]
    if own == 0 or heads % own:
        raise InputError(f"{heads} query heads cannot share {own} key heads")
    return tensor if heads == own else tensor.repeat_interleave(heads // own, 1)
