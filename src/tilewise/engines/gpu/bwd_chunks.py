"""A backward in chunks of batches or heads, one after the other, so that the memory in which dQ is added up stays small."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tilewise.core.problem import Problem

MAX_SUMS_BYTES = 128 * 2**20


def sums_rows(p: Problem) -> int:
    return p.batch * p.heads * padded_rows(p)


def padded_rows(p: Problem) -> int:
    """Rows of a head in tensors of our own, so that no tile of queries reaches into the next head."""
    tile = p.given_tiles.tile[0] if p.given_tiles is not None else 1  # the last of given tiles may reach far past the end
    return -(-(-(-p.q_len // tile) * tile) // 128) * 128


def chunking(p: Problem, columns: int) -> tuple[int, int]:
    """The dimension, batches (0) or heads (1), and the number of chunks that keep a backward's float32 sums of so many columns small. A chunk is a
    problem that knows nothing of the others: only where nothing is computed from the number of a batch or head."""
    needed = sums_rows(p) * columns * 4
    axis = 0 if p.batch > 1 else 1
    if needed <= MAX_SUMS_BYTES:
        return axis, 1
    numbered = any(["bh"[axis] in bound.program.uses for bound in (p.mask, p.score) if bound is not None])
    if numbered or p.dropout_p > 0 or p.tiles is not None:
        return axis, 1
    size = p.batch if axis == 0 else p.kv_heads
    return axis, next(n for n in range(1, size + 1) if size % n == 0 and (needed <= n * MAX_SUMS_BYTES or n == size))


def chunks(p: Problem, axis: int, count: int, *tensors: Tensor | None) -> Iterator[tuple[Problem, list[Any]]]:
    """Every chunk, with its share of these tensors. Chunks are alike: launches prepared for one serve the others."""
    if count == 1:
        yield p, list(tensors)
        return
    cut = [[None] * count if t is None else t.chunk(count, axis) for t in (p.query, p.key, p.value, *tensors)]
    for query, key, value, *rest in zip(*cut, strict=True):
        yield p.replaced(query=query, key=key, value=value), rest
