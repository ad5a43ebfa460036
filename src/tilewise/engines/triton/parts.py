"""A backward in parts, one after the other, so that the memory in which dQ is added up stays small."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tilewise.problem import Problem

LARGEST_SUMS = 128 * 2**20  # bytes


def sums_rows(p: Problem) -> int:
    return p.batch * p.heads * padded_rows(p)


def padded_rows(p: Problem) -> int:
    """Rows of a head in tensors of our own, so that no tile of queries reaches into the next head."""
    tile = p.tiles.tile[0] if p.tiles is not None and p.tiles.given else 1  # the last of given tiles may reach far past the end
    return -(-(-(-p.q_len // tile) * tile) // 128) * 128


def partition(p: Problem, columns: int) -> tuple[int, int]:
    """Into how many parts, along batches (0) or heads (1), a backward goes so that its float32 sums of so many columns stay small. A part is a problem
    that knows nothing of the others: only where nothing is computed from the number of a batch or head."""
    needed = sums_rows(p) * columns * 4
    axis = 0 if p.batch > 1 else 1
    numbered = any(["bh"[axis] in call.program.uses for call in (p.mask, p.score) if call is not None])
    if needed <= LARGEST_SUMS or numbered or p.dropout_p > 0 or p.tiles is not None:
        return axis, 1
    size = p.batch if axis == 0 else p.kv_heads
    return axis, next(n for n in range(1, size + 1) if size % n == 0 and (needed <= n * LARGEST_SUMS or n == size))


def each(p: Problem, axis: int, count: int, *tensors: Tensor | None) -> Iterator[tuple[Problem, list[Any]]]:
    """Every part, with its share of these tensors. Parts are alike: what is remembered for one serves the others."""
    if count == 1:
        yield p, list(tensors)
        return
    memory = p.memory.setdefault("part", {})
    cut = [[None] * count if t is None else t.chunk(count, axis) for t in (p.query, p.key, p.value, *tensors)]
    for query, key, value, *rest in zip(*cut, strict=True):
        yield p.with_tensors(query=query, key=key, value=value, memory=memory), rest
