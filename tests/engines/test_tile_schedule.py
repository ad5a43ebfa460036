"""Maps as the Triton kernels walk them: every tile once, in the right kind of run, long rows first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.operations import Operations
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.engines.gpu.tile_schedule import TileSchedule, key_schedule, query_schedule
from tilewise.tiles import EMPTY, FULL, PARTIAL, Geometry, TileMap
from tilewise.tiles.runs import from_dense

TILE = 16
FULL_RUNS, CUT_RUNS, PARTIAL_RUNS = 0, 1, 2


def problem_of(states: Tensor, q_len: int, kv_len: int) -> Problem:
    """With a map given as (batch, heads, query tiles, key tiles)."""
    batch, heads, _, kv_tiles = states.shape
    flat = states.reshape(-1, kv_tiles)
    given_map = TileMap(Geometry(batch, heads, q_len, kv_len, (TILE, TILE)), from_dense(flat == PARTIAL), from_dense(flat == FULL), None, given=True)
    query, key = torch.zeros(batch, heads, q_len, 8), torch.zeros(batch, heads, kv_len, 8)
    return make_problem(query, key, key, given_map, None, Options())[0]


def walked(tiles: TileSchedule, columns: int) -> list[dict[int, int]]:
    """For every row, the kind of each tile it comes by."""
    _, offsets, starts, stops = tiles.tensors
    rows: list[dict[int, int]] = []
    for begins in offsets.view(-1, 4).tolist():
        found: dict[int, int] = {}
        for kind in range(3):
            for run in range(begins[kind], begins[kind + 1]):
                for tile in range(int(starts[run]), int(stops[run])):
                    assert tile not in found and 0 <= tile < columns
                    found[tile] = kind
        rows.append(found)
    return rows


def check(tiles: TileSchedule, states: Tensor, cut: bool) -> None:
    """`states` are (batch, heads, rows, columns)."""
    columns = states.shape[3]
    for found, row in zip(walked(tiles, columns), states.reshape(-1, columns).tolist(), strict=True):
        for tile, state in enumerate(row):
            wanted = {EMPTY: None, PARTIAL: PARTIAL_RUNS, FULL: CUT_RUNS if cut and tile == columns - 1 else FULL_RUNS}[state]
            assert found.get(tile) == wanted
    work = (states != EMPTY).sum(3)
    order = tiles.tensors[0].view(work.shape).long()
    assert torch.equal(order.sort(2).values, torch.arange(work.shape[2]).expand_as(order))
    assert bool((work.gather(2, order).diff(dim=2) <= 0).all())


sizes = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 15), st.integers(0, 15), st.integers(0, 99))


@given(sizes)
def test_every_tile_is_walked_once(size: tuple[int, ...]) -> None:
    batch, heads, q_tiles, kv_tiles, q_missing, kv_missing, seed = size
    states = torch.randint(3, (batch, heads, q_tiles, kv_tiles), generator=torch.Generator().manual_seed(seed))
    problem = problem_of(states, q_tiles * TILE - q_missing, kv_tiles * TILE - kv_missing)
    rows, columns = query_schedule(problem, (TILE, TILE)), key_schedule(problem, (TILE, TILE))
    assert (rows.count, columns.count) == (q_tiles, kv_tiles)
    check(rows, states, kv_missing > 0)
    check(columns, states.transpose(2, 3), q_missing > 0)
    for tiles, count in ((rows, q_tiles), (columns, kv_tiles)):
        assert tiles.strides == (heads * count if batch > 1 else 0, count if heads > 1 else 0)


@pytest.mark.parametrize("missing", [0, 5])
def test_walks_are_made_in_few_operations(missing: int) -> None:
    """Each is a launch on a GPU."""
    states = torch.randint(3, (1, 1, 60, 60), generator=torch.Generator().manual_seed(0))
    problem = problem_of(states, 60 * TILE - missing, 60 * TILE - missing)
    with Operations() as by_rows:
        query_schedule(problem, (TILE, TILE))
    with Operations() as by_columns:
        key_schedule(problem, (TILE, TILE))
    assert by_rows.seen.total() <= 45, by_rows.seen
    assert by_columns.seen.total() <= 115, by_columns.seen
