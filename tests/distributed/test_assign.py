"""Who computes what: dealing keeps its bound, tokens are held once, and needed keys are those that a dense look finds."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise import masks
from tilewise.distributed import assign
from tilewise.distributed.assign import TILE, Owners, Work, deal, is_needed, loads, needed_tiles, owners_in_order, owners_of_tiles, work_of, work_of_all
from tilewise.distributed.traffic import copies_of, key_tokens
from tilewise.errors import InputError
from tilewise.tiles.runs import from_dense


@pytest.fixture(autouse=True, scope="module")
def without_threads() -> Iterator[None]:
    with assign.one_thread():
        yield


ROUNDS = [1, 2, 3, 4, 8, 16]
seeds = st.integers(0, 2**32).map(Random)  # everything else is drawn from them: thousands of cases in seconds


def work_from(cells: Tensor, length: int) -> Work:
    """The work of a dense [heads, tiles, tiles] matrix, for tests: every covered tile costs 1."""
    heads, tiles, _ = cells.shape
    runs = from_dense(cells.reshape(heads * tiles, tiles))
    return Work(length, heads, runs.row_of_run(), runs.start.long(), runs.count.long(), cells.sum(2, dtype=torch.float64))


def random_work(draw: Random) -> tuple[Tensor, Work]:
    """A random matrix of tiles, by head, with its work; the last tile may be short."""
    tiles, heads = draw.randint(1, 40), draw.choice([1, 2, 4])
    chance = torch.rand(heads, tiles, tiles, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    near = (torch.arange(tiles)[:, None] - torch.arange(tiles)).abs() < draw.randint(0, tiles)
    cells = (chance < draw.choice([0.0, 0.02, 0.3, 0.9])) & near
    return cells, work_from(cells, tiles * TILE - draw.randrange(TILE))


def random_owners(draw: Random, length: int) -> tuple[Owners, int]:
    """(owners, head groups) of any kind: dealt tiles, or tokens in order that the caller has cut anywhere."""
    head_groups, groups = draw.choice([1, 2, 4]), draw.randint(1, 16)
    if draw.random() < 0.5:
        return owners_of_tiles(deal(random_cost(draw, assign.tiles_of(length)), groups, draw.choice(ROUNDS)).owner, groups, head_groups, length), head_groups
    cuts = sorted(draw.choices(range(length + 1), k=groups * head_groups - 1))
    return owners_in_order([b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]), head_groups


def random_cost(draw: Random, tiles: int) -> Tensor:
    kinds = [lambda: 0.0, lambda: float(draw.randint(1, 9)), lambda: draw.uniform(0, 1e4)]
    some = draw.choices(kinds, k=2)
    return torch.tensor([draw.choice(some)() for _ in range(tiles)], dtype=torch.float64)


def held_matrix(owners: Owners) -> Tensor:
    """[ranks, tokens] who holds which token, written from the ranges."""
    found = torch.zeros(owners.ranks, owners.length, dtype=torch.bool)
    for rank, ranges in enumerate(owners.holdings()):
        for begin, end in ranges:
            found[rank, begin:end] = True
    return found


# -- work ------------------------------------------------------------------------------------------------------------


def test_work_of_a_causal_map() -> None:
    work = work_of(tw.tile_map(masks.causal, q_len=1000, kv_len=1000, tile=(TILE, TILE)))
    assert (work.tiles, work.length, work.heads) == (8, 1000, 1)
    expected = torch.arange(8) + assign.PARTIAL_COST + assign.ROW_COST  # i full tiles and the partial one of the diagonal
    assert torch.allclose(work.cost, expected.double()[None])


def test_work_of_no_mask_is_that_of_a_full_one() -> None:
    ours, full = work_of_all(1024), work_of(tw.tile_map(masks.full, q_len=1024, kv_len=1024, tile=(TILE, TILE)))
    assert all(torch.equal(getattr(ours, name), getattr(full, name)) for name in ("row", "start", "count", "cost"))


def test_heads_are_kept_apart_and_batch_elements_averaged() -> None:
    window, lengths = torch.tensor([128, 512]), torch.tensor([1024, 512, 256])
    mask: Any = lambda b, h, q, kv: (q - kv < window[h]) & (q >= kv) & (kv < lengths[b])
    work = work_of(tw.tile_map(mask, q_len=1024, kv_len=1024, batch=3, heads=2, tile=(TILE, TILE)))
    each = [work_of(tw.tile_map(mask, q_len=1024, kv_len=1024, batch=3, heads=2, tile=(TILE, TILE))[b]).cost for b in range(3)]
    assert work.cost.shape == (2, 8) and int(work.row.max()) < 16
    plain = torch.stack([cost - assign.ROW_COST * (cost > 0) for cost in each]).mean(0)
    assert torch.allclose(work.cost, plain + assign.ROW_COST * (plain > 0))


def test_maps_that_are_not_square_are_refused() -> None:
    with pytest.raises(InputError, match="got 256 queries and 512 keys"):
        work_of(tw.tile_map(masks.causal, q_len=256, kv_len=512, tile=(TILE, TILE)))


# -- dealing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=1000)
@given(seeds)
def test_loads_keep_the_bound_and_tokens_balance(draw: Random) -> None:
    cost, groups, rounds = random_cost(draw, draw.randint(0, 200)), draw.randint(1, 64), draw.choice(ROUNDS)
    owner, bound = deal(cost, groups, rounds)
    load = torch.zeros(groups, dtype=torch.float64).index_add_(0, owner, cost)
    assert float(load.max() - load.min()) <= bound + 1e-9 * float(load.sum())
    held = torch.bincount(owner, minlength=groups)
    assert int(held.max() - held.min()) <= rounds


@pytest.mark.parametrize("groups", [2, 5, 8])
def test_two_rounds_of_a_causal_mask_are_a_zigzag(groups: int) -> None:
    cost = torch.arange(4 * groups * 2, dtype=torch.float64)  # chunks of four tiles
    owner = deal(cost, groups, 2).owner.view(-1, 4)
    assert torch.equal(owner, owner[:, :1].expand_as(owner)) and torch.equal(owner[:, 0], owner[:, 0].flip(0))


@given(seeds)
def test_one_round_keeps_the_order(draw: Random) -> None:
    owner = deal(random_cost(draw, draw.randint(0, 100)), draw.randint(1, 64), 1).owner
    assert torch.equal(owner, owner.sort().values)


# -- who holds which tokens ------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(seeds)
def test_every_token_is_held_once(draw: Random) -> None:
    length = draw.randint(0, 6000)
    owners, head_groups = random_owners(draw, length)
    held = held_matrix(owners)
    assert owners.length == length and bool((held.sum(0) == 1).all()) and torch.equal(held.sum(1), owners.held())
    for ranges in owners.holdings():
        assert all(begin < end for begin, end in ranges) and all(a[1] < b[0] for a, b in pairwise(ranges))
    rows = owners.row_groups(head_groups)
    assert torch.equal(held_matrix(rows), held.view(rows.ranks, head_groups, length).any(1))


@given(st.integers(0, 100), st.integers(1, 20), st.sampled_from([1, 2, 4, 8]))
def test_ranks_of_a_row_group_hold_neighbouring_parts(tiles: int, groups: int, head_groups: int) -> None:
    owner = torch.arange(tiles) % groups
    owners = owners_of_tiles(owner, groups, head_groups, tiles * TILE)
    held = (owners.held() // TILE).view(groups, head_groups)
    assert int((held.amax(1) - held.amin(1)).max()) <= 1
    for group in range(groups):
        part = owners.rank[owner == group] - group * head_groups
        assert torch.equal(part, part.sort().values)


def test_tokens_in_order_are_cut_where_the_caller_says() -> None:
    owners = owners_in_order([100, 0, 200, 84])
    assert owners.holdings() == (((0, 100),), (), ((100, 300),), ((300, 384),))
    assert owners.tile.tolist() == [0, 0, 1, 2, 2] and owners.tokens.tolist() == [100, 28, 128, 44, 84]


# -- what follows ----------------------------------------------------------------------------------------------------


@settings(max_examples=1000)
@given(seeds)
def test_needed_keys_are_those_of_a_dense_look(draw: Random) -> None:
    cells, work = random_work(draw)
    owners, head_groups = random_owners(draw, work.length)
    rows = owners.row_groups(head_groups)
    held = torch.zeros(rows.ranks, work.tiles, dtype=torch.bool)  # some token of the tile
    held[rows.rank, rows.tile] = True
    dense = (held.float() @ cells.any(0).float()) > 0
    needed = needed_tiles(work, rows)
    assert torch.equal(needed.dense(work.tiles), dense)
    assert torch.equal(copies_of(needed, work.tiles), dense.sum(0))
    every = torch.arange(rows.ranks)[:, None], torch.arange(work.tiles)
    assert torch.equal(is_needed(needed, *every, work.tiles), dense)


@settings(max_examples=500)
@given(seeds)
def test_tokens_that_travel_are_counted_as_a_dense_look_does(draw: Random) -> None:
    beside, kind = draw.choice([1, 2, 4, 8]), draw.choice(["none", "some", "all"])
    _, work = random_work(draw)
    owners, head_groups = random_owners(draw, work.length)
    rows = owners.row_groups(head_groups)
    hot = {"none": torch.zeros, "some": lambda n, dtype: torch.arange(n) % 3 == 1, "all": torch.ones}[kind](work.tiles, dtype=torch.bool)
    needed = needed_tiles(work, rows)
    tokens = held_matrix(rows).float()  # [groups, length]
    goes = (needed.dense(work.tiles) | hot)[:, torch.arange(work.length) // TILE].float()
    pairs = (goes @ tokens.T).long() * (1 - torch.eye(rows.ranks, dtype=torch.int64))  # [receiver, sender]
    node = torch.arange(rows.ranks) // beside
    near = (node[:, None] == node).long()
    received, sent = key_tokens(needed, rows, beside, hot)
    assert torch.equal(received.node, (pairs * near).sum(1)) and torch.equal(received.network, (pairs * (1 - near)).sum(1))
    assert int(received.node.sum() + received.network.sum()) >= int(sent.node.sum() + sent.network.sum())
    if kind == "none":
        assert torch.equal(sent.node, (pairs * near).sum(0)) and torch.equal(sent.network, (pairs * (1 - near)).sum(0))
    if kind == "all" and rows.ranks > 1:
        assert torch.equal(sent.node + sent.network, rows.held())


@settings(max_examples=500)
@given(seeds)
def test_loads_add_up_to_the_work(draw: Random) -> None:
    _, work = random_work(draw)
    owners, head_groups = random_owners(draw, work.length)
    if work.heads > 1 and work.heads % head_groups:
        head_groups = 1
    load = loads(work, owners, head_groups)
    assert load.shape == (owners.ranks,)
    assert torch.allclose(load.sum(), work.cost.sum())
    by_head = load.view(-1, head_groups).sum(0)
    expected = work.cost.sum(1).view(head_groups, -1).sum(1) if work.heads > 1 else work.cost.sum().expand(head_groups) / head_groups
    assert torch.allclose(by_head, expected)
