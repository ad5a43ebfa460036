"""tilewise.sparse: choices of tiles, and MoBA and VSA against the formulas of their papers, written densely with torch."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.brute import check_runs, elements_of
from tilewise import TileMap, sparse
from tilewise.errors import InputError


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def same_with_gradients(found: Tensor, wanted: Tensor, tensors: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted)
    upstream = normal(*found.shape, seed=9).detach()
    for own, other in zip(torch.autograd.grad(found, tensors, upstream), torch.autograd.grad(wanted, tensors, upstream), strict=True):
        torch.testing.assert_close(own, other)


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """softmax(scale q k^T where allowed) v, key heads repeated."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v


# -- choices -----------------------------------------------------------------------------------------------------------


def test_pooled_is_the_mean_of_each_block() -> None:
    x = normal(2, 3, 11, 5)
    for size in (1, 4, 11, 20):
        blocks = [x[:, :, at : at + size].mean(2) for at in range(0, 11, size)]
        torch.testing.assert_close(sparse.pooled(x, size), torch.stack(blocks, 2))
    assert sparse.pooled(x.bfloat16(), 4).dtype == torch.float32


def test_pooled_scores_of_grouped_heads() -> None:
    q, k = normal(2, 4, 10, 6), normal(2, 2, 13, 6, seed=1)
    found = sparse.pooled_scores(q, k, (4, 5))
    assert found.shape == (2, 4, 3, 3)
    torch.testing.assert_close(found[1, 3, 2, 1], q[1, 3, 8:].mean(0) @ k[1, 1, 5:10].mean(0) / 6**0.5)
    torch.testing.assert_close(sparse.pooled_scores(q, k, (4, 5), scale=2.0), found * 6**0.5 * 2)


def test_top_k() -> None:
    scores = torch.tensor([[0.1, 3.0, -math.inf, 2.0], [-math.inf, -math.inf, 1.0, -math.inf]])
    assert sparse.top_k(scores, 3).tolist() == [[1, 3, 0], [2, -1, -1]]
    assert sparse.top_k(scores, 9).shape == (2, 4) and sparse.top_k(scores, 3).dtype == torch.int32


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 1.0])
def test_top_p_takes_the_fewest_tiles_with_that_share(p: float) -> None:
    scores = 3 * normal(2, 2, 5, 7).detach()
    scores[0, 0, 1] = -math.inf
    scores[0, 1, 2, 3:] = -math.inf
    indices, counts = sparse.top_p(scores, p)
    assert counts[0, 0, 1] == 0 and counts[0, 1, 2] <= 3
    for at in product(range(2), range(2), range(5)):
        weights = scores[at].softmax(-1)[indices[at].long()]
        count = int(counts[at])
        if count:
            assert weights[:count].sum() >= p - 1e-12 and weights[: count - 1].sum() < p


def test_a_method_of_ones_own() -> None:
    q, k, v = normal(1, 4, 200, 16), normal(1, 2, 300, 16, seed=1), normal(1, 2, 300, 16, seed=2)
    indices, counts = sparse.top_p(sparse.pooled_scores(q, k), 0.6)
    tiles = TileMap.from_lists(indices, counts, q_len=200, kv_len=300, always=[(0, 1)])
    allowed = torch.zeros(1, 4, 200, 300, dtype=torch.bool)
    allowed[..., :64] = True
    for h, row in product(range(4), range(4)):
        for column in indices[0, h, row, : counts[0, h, row]].tolist():
            allowed[0, h, row * 64 : row * 64 + 64, column * 64 : column * 64 + 64] = True
    assert not bool(allowed.all())
    same_with_gradients(tw.attention(q, k, v, mask=tiles, enable_gqa=True), dense(q, k, v, allowed), [q, k, v])


# -- MoBA --------------------------------------------------------------------------------------------------------------


def moba_allowed(q: Tensor, k: Tensor, block: int, top_k: int, causal: bool) -> Tensor:
    """The paper's gate, query by query: s_i = <q, mean of K in block i>, +inf for the own block, -inf for later ones; the top k are attended."""
    q, k = q.detach(), k.detach()
    batch, heads, length, _ = q.shape
    allowed = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    blocks = [range(at, min(at + block, length)) for at in range(0, length, block)]
    for b, h, i in product(range(batch), range(heads), range(length)):
        gate = [float(q[b, h, i] @ k[b, h // (heads // k.shape[1]), list(keys)].mean(0)) for keys in blocks]
        eligible = [n for n in range(len(blocks)) if n != i // block and (n < i // block or not causal)]
        for n in [i // block, *sorted(eligible, key=lambda n: -gate[n])[: top_k - 1]]:
            for j in blocks[n]:
                allowed[b, h, i, j] = j <= i or not causal
    return allowed


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "block", "top_k", "causal"),
    [
        (2, 2, 150, 64, 2, True),
        (2, 1, 200, 64, 3, True),
        (1, 1, 130, 16, 3, True),
        (2, 1, 170, 32, 3, False),
        (1, 1, 40, 64, 2, True),
        (1, 1, 129, 64, 9, True),
    ],
)
def test_moba_is_the_paper_s(heads: int, kv_heads: int, length: int, block: int, top_k: int, causal: bool) -> None:
    q, k, v = normal(1, heads, length, 8), normal(1, kv_heads, length, 8, seed=1), normal(1, kv_heads, length, 5, seed=2)
    allowed = moba_allowed(q, k, block, top_k, causal)
    tiles = sparse.moba_map(q, k, block=block, top_k=top_k, causal=causal)
    check_runs(tiles)
    assert torch.equal(elements_of(tiles), allowed)
    same_with_gradients(sparse.moba(q, k, v, block=block, top_k=top_k, causal=causal, scale=0.7), dense(q, k, v, allowed, 0.7), [q, k, v])


def test_moba_knows_full_tiles() -> None:
    """With every block chosen it is causal attention, and so is its map."""
    q = normal(1, 1, 256, 8)
    tiles = sparse.moba_map(q, q, block=64, top_k=4)
    assert torch.equal(tiles.dense(), tw.tile_map(tw.masks.causal, q_len=256, kv_len=256, tile=(64, 64)).dense())


# -- cubes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "cube"), [((4, 8, 8), (4, 4, 4)), ((3, 5, 9), (2, 4, 4)), ((2, 9, 17), (1, 8, 16)), ((7, 5), (2, 3)), ((10,), (4,))], ids=str)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (0, 5), (2, 4)])
def test_the_order_of_cubes(grid: tuple[int, ...], cube: tuple[int, ...], before: int, after: int) -> None:
    """Point by point: the tokens of a cube are one tile, in row-major order and with room for those that a cube at the border lacks; text comes last."""
    order = sparse.cubes(grid, cube, before=before, after=after)
    points = list(product(*map(range, grid)))
    corners = list(product(*[range(0, n, c) for n, c in zip(grid, cube, strict=True)]))
    wanted = []
    for corner in corners:
        for offset in product(*map(range, cube)):
            point = tuple(a + b for a, b in zip(corner, offset, strict=True))
            wanted.append(before + points.index(point) if point in points else -1)
    wanted += [*range(before), *range(before + len(points), before + len(points) + after)]
    assert order.order.tolist() == wanted
    assert (order.count, order.size, order.text) == (len(corners), math.prod(cube), before + after)
    assert order.is_ragged == (-1 in wanted) and order.inside.tolist() == [token >= 0 for token in wanted]
    x = normal(1, 2, before + len(points) + after, 3).detach()
    assert torch.equal(order.unpermute(order.permute(x)), x)
    means = [x[:, :, [t for t in wanted[at * order.size : (at + 1) * order.size] if t >= 0]].mean(2) for at in range(order.count)]
    torch.testing.assert_close(order.means(order.permute(x)), torch.stack(means, 2))


def test_cubes_leave_out_nothing_that_is_nan_outside() -> None:
    """Empty places of ragged cubes hold some token's copy, which must not count."""
    order = sparse.cubes((3, 3), (2, 2))
    x = torch.zeros(1, 1, 9, 2)
    x[:, :, 0] = torch.nan
    assert order.means(order.permute(x))[0, 0].isnan().any(-1).tolist() == [True, False, False, False]


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize("choice", ["top_k", "top_p"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "before", "after", "padded"), [(2, 2, 0, 0, False), (2, 1, 0, 7, True), (2, 2, 5, 0, False), (1, 1, 3, 70, True), (2, 2, 0, 0, True)]
)
def test_cube_attention_with_text(heads: int, kv_heads: int, before: int, after: int, padded: bool, choice: str, keep: float) -> None:
    grid, cube = (3, 5, 9), (2, 4, 8)
    video = math.prod(grid)
    tokens = before + video + after
    q, k, v = normal(2, heads, tokens, 8), normal(2, kv_heads, tokens, 8, seed=1), normal(2, kv_heads, tokens, 6, seed=2)
    visible = torch.rand(2, tokens, generator=torch.Generator().manual_seed(3)) < 0.8 if padded else None
    order = sparse.cubes(grid, cube, before=before, after=after)
    chosen_lists: list[Any] = []

    def choose(scores: Tensor) -> Any:
        chosen_lists.append((3 * scores, sparse.top_k(scores, math.ceil(keep * 8)) if choice == "top_k" else sparse.top_p(3 * scores, keep)))
        return chosen_lists[0][1]

    found = sparse.cube_attention(q, k, v, order, choose, visible=visible)
    cube_of = torch.full((tokens,), -1)
    names = sorted({tuple(x // c for x, c in zip(point, cube, strict=True)) for point in product(*map(range, grid))})
    for n, point in enumerate(product(*map(range, grid))):
        cube_of[before + n] = names.index(tuple(x // c for x, c in zip(point, cube, strict=True)))
    lists = chosen_lists[0][1]
    indices, counts = lists if isinstance(lists, tuple) else (lists, torch.full(lists.shape[:3], lists.shape[3]))
    allowed = torch.zeros(2, heads, tokens, tokens, dtype=torch.bool)
    for b, h, row in product(range(2), range(heads), range(len(names))):
        columns = indices[b, h, row, : counts[b, h, row]]
        allowed[b, h, cube_of == row] = torch.isin(cube_of, columns) | (cube_of < 0)
    allowed[:, :, cube_of < 0] = True
    assert bool(allowed.all()) == (keep == 1.0)
    if visible is not None:
        allowed &= visible[:, None, None]
    same_with_gradients(found, dense(q, k, v, allowed), [q, k, v])


def test_top_p_of_1_takes_what_rounding_would_leave_out() -> None:
    scores = torch.tensor([[200.0, 0.0, -300.0, -math.inf], [0.0, 0.0, 0.0, 0.0]])
    indices, counts = sparse.top_p(scores, 1.0)
    assert counts.tolist() == [3, 4] and indices[0, :3].tolist() == [0, 1, 2]


def test_top_p_begins_with_what_has_no_end() -> None:
    """As top_k does, with NaN and infinity alike: a row of them must not choose nothing."""
    inf, nan = math.inf, math.nan
    scores = torch.tensor([[1.0, inf, 2.0, -inf], [1.0, nan, 2.0, 0.0], [inf, 1.0, inf, nan], [-inf, -inf, -inf, -inf]])
    for p, wanted in ((0.2, [1, 1, 1, 0]), (0.9, [1, 1, 3, 0]), (1.0, [3, 4, 4, 0])):
        indices, counts = sparse.top_p(scores, p)
        assert counts.tolist() == wanted
        assert indices[:2, 0].tolist() == [1, 1] and sorted(indices[2, :3].tolist()) == [0, 2, 3] and indices[0, 3] == 3


@pytest.mark.parametrize("spoil", [math.nan, math.inf, 1e4])
@pytest.mark.parametrize("choice", ["top_k", "top_p"])
def test_hidden_keys_choose_no_cubes(choice: str, spoil: float) -> None:
    """What is in keys that nobody sees changes nothing, and a cube of such keys alone is not chosen."""
    order = sparse.cubes((4, 4, 8), (4, 4, 2))
    q, k, v = (normal(1, 2, 128, 8, seed=n) for n in range(3))
    visible = torch.ones(1, 128, dtype=torch.bool)
    visible[0, 5] = False
    hidden = order.place // order.size == 2
    visible[0, hidden] = False
    chosen: list[Any] = []

    def choose(scores: Tensor) -> Any:
        assert (scores[..., 2] == -math.inf).all()
        chosen.append(sparse.top_k(scores, 2) if choice == "top_k" else sparse.top_p(scores, 0.7))
        return chosen[-1]

    found = []
    for value in (0.0, spoil):
        key, vals = (torch.where(visible[0, :, None], t, value) for t in (k, v))
        found.append(sparse.cube_attention(q, key, vals, order, choose, visible=visible))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    for one, other in zip(*[c if isinstance(c, tuple) else (c,) for c in chosen], strict=True):
        assert torch.equal(one, other)


# -- VSA ---------------------------------------------------------------------------------------------------------------


def vsa_dense(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, ...], cube: tuple[int, ...], keep: float, gate: Tensor | None) -> Tensor:
    """The paper's formulas, token by token: C = softmax(mean Q mean K^T / sqrt(d)), coarse = C mean V, the top cubes of each row of C are attended to."""
    cube_of: list[tuple[int, ...]] = [tuple(x // c for x, c in zip(point, cube, strict=True)) for point in product(*map(range, grid))]
    names = sorted(set(cube_of))
    member = torch.tensor([[name == own for own in cube_of] for name in names])  # (cubes, tokens)
    means = [torch.stack([t[:, :, row].mean(2) for row in member], 2).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (q, k, v)]
    weights: Tensor = (means[0] @ means[1].transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
    own = torch.tensor([names.index(c) for c in cube_of])
    coarse = (weights @ means[2])[:, :, own]
    best = weights.topk(math.ceil(keep * len(names)), -1).indices
    chosen = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, True)
    fine = dense(q, k, v, chosen[:, :, own][..., own])
    return fine + (coarse if gate is None else gate * coarse)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "grid", "cube", "keep", "gated"),
    [
        (2, 2, (4, 8, 8), (4, 4, 4), 0.5, True),
        (2, 1, (3, 5, 9), (2, 4, 4), 0.3, True),  # ragged along every axis
        (1, 1, (4, 4, 6), (1, 4, 4), 0.2, False),
        (1, 1, (10, 13), (8, 8), 0.5, True),
        (1, 1, (100,), (64,), 1.0, False),
    ],
)
def test_vsa_is_the_paper_s(heads: int, kv_heads: int, grid: tuple[int, ...], cube: tuple[int, ...], keep: float, gated: bool) -> None:
    tokens = math.prod(grid)
    q, k, v = normal(1, heads, tokens, 8), normal(1, kv_heads, tokens, 8, seed=1), normal(1, kv_heads, tokens, 6, seed=2)
    gate = normal(1, heads, tokens, 6, seed=3) if gated else None
    found = sparse.vsa(q, k, v, grid, cube=cube, keep=keep, gate=gate)
    same_with_gradients(found, vsa_dense(q, k, v, grid, cube, keep, gate), [q, k, v] if gate is None else [q, k, v, gate])


def test_half_precision_stays() -> None:
    q = normal(1, 2, 128, 16).bfloat16()
    assert sparse.vsa(q, q, q, (2, 8, 8), keep=0.5).dtype == torch.bfloat16
    assert sparse.moba(q, q, q, block=64, top_k=1).dtype == torch.bfloat16


Q = torch.zeros(1, 2, 12, 4)
BAD: dict[str, Any] = {
    "no tokens in a block": lambda: sparse.pooled(Q, 0),
    "no tiles": lambda: sparse.top_k(Q, 0),
    "more than all": lambda: sparse.top_p(Q, 1.5),
    "heads that do not divide": lambda: sparse.pooled_scores(Q, torch.zeros(1, 3, 12, 4)),
    "other keys": lambda: sparse.moba(Q, Q[:, :, :5], Q[:, :, :5], block=4, top_k=1),
    "no blocks": lambda: sparse.moba(Q, Q, Q, block=4, top_k=0),
    "another grid": lambda: sparse.vsa(Q, Q, Q, (2, 2, 2), keep=0.5),
    "a cube of other axes": lambda: sparse.vsa(Q, Q, Q, (3, 4), keep=0.5),
    "nothing kept": lambda: sparse.vsa(Q, Q, Q, (3, 2, 2), keep=0.0),
    "an empty grid": lambda: sparse.cubes((0, 2, 2)),
    "fewer than no text": lambda: sparse.cubes((4, 4, 4), after=-1),
    "cubes of other tokens": lambda: sparse.cube_attention(Q, Q, Q, sparse.cubes((2, 2, 2)), lambda scores: sparse.top_k(scores, 1)),
    "padding in a list": lambda: sparse.cube_attention(Q, Q, Q, sparse.cubes((3, 2, 2)), lambda scores: sparse.top_k(scores, 1), visible=[[True] * 12]),
    "padding of others": lambda: sparse.cube_attention(
        Q, Q, Q, sparse.cubes((3, 2, 2)), lambda scores: sparse.top_k(scores, 1), visible=torch.ones(2, 12, dtype=torch.bool)
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        BAD[name]()


@pytest.mark.parametrize("engine", ["reference", "blocked", "cpp"])
def test_a_mask_on_lists_follows_its_tensors(engine: str) -> None:
    query, key, value = torch.randn(3, 1, 1, 256, 32)
    document = torch.zeros(256, dtype=torch.int64)
    mask = lambda b, h, q, kv: document[q] == document[kv]
    lists = tw.TileMap.from_lists(torch.arange(4).expand(1, 1, 4, 4).contiguous(), q_len=256, kv_len=256, tile=(64, 64), mask=mask)
    for contents in (torch.zeros(256), torch.arange(256) // 40):
        document.copy_(contents)
        torch.testing.assert_close(tw.attention(query, key, value, mask=lists, backend=engine), tw.attention(query, key, value, mask=mask, backend="reference"))
