"""Runs: stretches of cells by row, checked against the matrix they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilewise.tiles.runs import Runs, from_dense, from_entries, from_sets, joined, of_blocks, trimmed

SHAPES = [(1, 1), (1, 9), (9, 1), (6, 8), (17, 5)]


def random_cells(rows: int, columns: int, density: float, seed: int = 0) -> Tensor:
    return torch.rand((rows, columns), generator=torch.Generator().manual_seed(seed)) < density


def matrix(runs: Runs, columns: int) -> Tensor:
    cells = torch.zeros((runs.rows, columns), dtype=torch.bool)
    for row in range(runs.rows):
        for k in range(int(runs.offsets[row]), int(runs.offsets[row + 1])):
            cells[row, int(runs.start[k]) : int(runs.start[k] + runs.count[k])] = True
    return cells


def same(a: Runs, b: Runs) -> bool:
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in ("offsets", "start", "count"))


matrices = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10), st.integers(0, 99)).map(lambda p: random_cells(p[0], p[1], p[2] / 10, p[3]))


@given(matrices)
def test_from_dense(cells: Tensor) -> None:
    runs = from_dense(cells)
    assert torch.equal(matrix(runs, cells.shape[1]), cells)
    assert torch.equal(runs.dense(cells.shape[1]), cells)
    assert runs.total() == int(cells.sum())
    row, column = runs.cells()
    assert torch.equal(torch.stack([row, column], 1), cells.nonzero())


@given(st.lists(matrices, min_size=2, max_size=3))
def test_from_sets(parts: list[Tensor]) -> None:
    """Sets of one shape, found together."""
    rows, columns = (min(t.shape[d] for t in parts) for d in (0, 1))
    cells = [t[:rows, :columns] for t in parts]
    for found, alone in zip(from_sets(torch.stack(cells)), cells, strict=True):
        assert torch.equal(matrix(found, columns), alone)
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in (found.offsets, found.start, found.count))


@given(matrices)
def test_from_entries_joins_what_touches(cells: Tensor) -> None:
    row, column = cells.nonzero(as_tuple=True)
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(1))
    runs = from_entries(row[order], column[order], torch.ones_like(column), cells.shape[0])
    assert same(runs, from_dense(cells))


def test_joined_keeps_rows_apart() -> None:
    """The end of one row does not touch the beginning of the next."""
    row, start, count = joined([(torch.tensor([1, 0]), torch.tensor([0, 3]), torch.tensor([2, 2])), (torch.tensor([1]), torch.tensor([2]), torch.tensor([1]))])
    assert (row.tolist(), start.tolist(), count.tolist()) == ([0, 1], [3, 0], [2, 3])


@given(matrices)
def test_transpose_against_dense(cells: Tensor) -> None:
    rows, columns = cells.shape
    turned = from_dense(cells).transpose(1, columns)
    assert same(turned, from_dense(cells.T))
    assert same(turned.transpose(1, rows), from_dense(cells))


@given(matrices, st.integers(1, 4))
def test_transpose_within_groups(cells: Tensor, groups: int) -> None:
    rows, columns = cells.shape
    stacked = torch.cat([cells.roll(g, 1) ^ (g % 2 == 1) for g in range(groups)])
    turned = from_dense(stacked).transpose(groups, columns)
    expected = torch.cat([block.T for block in stacked.split(rows)])
    assert same(turned, from_dense(expected))
    assert same(turned.transpose(groups, rows), from_dense(stacked))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("full", [False, True])
def test_transpose_of_nothing_and_of_everything(shape: tuple[int, int], full: bool) -> None:
    cells = torch.full(shape, full)
    assert same(from_dense(cells).transpose(1, shape[1]), from_dense(cells.T))


def test_transpose_of_no_rows() -> None:
    empty = from_dense(torch.zeros((0, 7), dtype=torch.bool))
    turned = empty.transpose(1, 7)
    assert turned.rows == 7 and turned.total() == 0
    no_columns = from_dense(torch.zeros((7, 0), dtype=torch.bool))
    assert no_columns.transpose(1, 0).rows == 0


@given(matrices, st.lists(st.integers(0, 1000), max_size=15))
def test_select(cells: Tensor, picks: list[int]) -> None:
    rows = torch.tensor([p % cells.shape[0] for p in picks], dtype=torch.int64)
    assert same(from_dense(cells).select(rows), from_dense(cells[rows]))


def test_row_of_run() -> None:
    cells = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()
    assert from_dense(cells).row_of_run().tolist() == [0, 0, 2, 2]
    assert from_dense(cells[1:2]).row_of_run().tolist() == []


def blocks(cells: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """torch's form: how many, and which, padded with columns that do not count; in any order."""
    order = torch.rand(cells.shape, generator=torch.Generator().manual_seed(seed)) + (~cells).float() * 2
    return cells.sum(1).int(), order.argsort(1).int()


@given(matrices, st.integers(0, 9))
def test_of_blocks(cells: Tensor, seed: int) -> None:
    columns = cells.shape[1]
    counts, indices = blocks(cells, seed)
    runs = Runs(*of_blocks(counts, indices, columns))
    assert len(runs.start) == len(runs.count) == indices.numel()  # sizes do not depend on contents
    assert same(trimmed(runs), from_dense(cells))
    assert same(trimmed(Runs(*torch.ops.tilewise.runs_of_blocks(counts, indices, columns))), from_dense(cells))


def test_padding_stands_for_nothing() -> None:
    """Lists that still carry their padding mean the same."""
    cells = random_cells(5, 6, 0.5)
    padded = Runs(*of_blocks(*blocks(cells, 0), 6))
    assert padded.total() == int(cells.sum())
    assert torch.equal(torch.stack(padded.cells(), 1), cells.nonzero())


def test_of_blocks_leaves_out_columns_past_the_end() -> None:
    runs = Runs(*of_blocks(torch.tensor([3, 1]), torch.tensor([[0, 1, 5], [4, 0, 0]]), 4))
    assert matrix(runs, 4).tolist() == [[True, True, False, False], [False] * 4]


def test_of_blocks_while_compiling_has_the_sizes_it_has() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts, indices = blocks(random_cells(5, 6, 0.5), 0)
    real = torch.ops.tilewise.runs_of_blocks(counts, indices, 6)
    with FakeTensorMode() as mode:
        fake = torch.ops.tilewise.runs_of_blocks(mode.from_tensor(counts), mode.from_tensor(indices), 6)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_of_blocks_takes_blocks_twice_and_in_any_order() -> None:
    runs = Runs(*of_blocks(torch.tensor([6, 0, 3]), torch.tensor([[5, 1, 2, 5, 2, -1], [0] * 6, [3, 0, 3, 1, 1, 1]]), 6))
    assert (runs.offsets.tolist(), *[t[:4].tolist() for t in (runs.start, runs.count)]) == ([0, 2, 2, 4], [1, 5, 0, 3], [2, 1, 1, 1])
