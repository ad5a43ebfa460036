"""Dropout that is the same in every engine and for every tiling: whether element (b, h, i, j) is kept depends on these indices and the seed alone.

Philox-4x32-10 with key = seed and counter = (column, row, h, b) gives 128 bits, 16 for each of eight elements: rows i
and i + 8, columns j, j + 1, j + 8 and j + 9 of an aligned 16 x 16 square. These are the elements that one thread holds of a
tensor core's accumulator, so a GPU kernel computes each Philox word once and needs no shuffles.

    row    = i // 16 * 8 + i % 8        word = 2 * (i // 8 % 2) + j // 8 % 2
    column = j // 16 * 4 + j % 8 // 2   half = j % 2
    kept  <=>  half-word >= round(p * 65536)

Of a part of a problem, the indices are those in the whole (Problem.places).
"""

import torch
from torch import Tensor

from tilewise.core.places import SQUARE
from tilewise.core.problem import Problem
from tilewise.engines.base import scalar_seed

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Elements whose 16 bits are below this are dropped."""
    return round(p * 65536)


def keep_scale(p: float) -> float:
    """1 / (1 - p), for p as rounded to a threshold of 16 bits."""
    dropped = threshold(p) / 65536
    return 0.0 if dropped == 1.0 else 1.0 / (1.0 - dropped)


def output_scale(p: Problem) -> float:
    """What rows of the output are multiplied by, beside 1 / the sum of their weights: for dropout, and for stored values."""
    return (keep_scale(p.dropout_p) if p.dropout_p > 0 else 1.0) * (1.0 if p.pages is None else p.pages.v_scale)


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * x, both unsigned 32-bit, in int64 arithmetic that does not overflow."""
    low, high = a * (x & 0xFFFF), a * (x >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four unsigned 32-bit words, as int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, (seed >> 32) & MASK32
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def dropout_keep(p: float, seed: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """[len(b), len(h), len(q), len(kv)]: whether dropout keeps each element. Every argument is a 1-D tensor of indices."""
    row, at_row = torch.unique(q // 16 * 8 + q % 8, return_inverse=True)
    column, at_column = torch.unique(kv // 16 * 4 + kv % 8 // 2, return_inverse=True)
    counter = torch.broadcast_tensors(column, row[:, None], h[:, None, None], b[:, None, None, None])
    words = torch.stack(philox(counter, seed))  # [4, b, h, rows, columns]
    word = 2 * (q[:, None] // 8 % 2) + kv // 8 % 2
    chosen = words.permute(0, 3, 4, 1, 2)[word, at_row[:, None], at_column].permute(2, 3, 0, 1)
    return ((chosen >> (16 * (kv % 2))) & 0xFFFF) >= threshold(p)


# -- problems and their parts --------------------------------------------------------------------------------------------


def kept(problem: Problem, at: dict[str, Tensor]) -> Tensor:
    """[B, H, Sq, Skv] of the problem's indices b, h, q and kv: whether its dropout keeps each element."""
    b, h, q, kv = (at[name].flatten() for name in ("b", "h", "q", "kv"))
    places = problem.places
    if places is not None:
        b, h, q, kv = b + places.batch, h + places.head, places.query[q], places.key[kv]
    return dropout_keep(problem.dropout_p, scalar_seed(problem), b, h, q, kv)


def refuse_scattered(problem: Problem) -> str | None:
    """Why kernels that draw for whole squares cannot serve a part of a problem."""
    places = problem.dropout_places
    if places is None or places.scattered is None:
        return None
    return f"its dropout needs tokens in whole aligned blocks of {SQUARE} positions, got {places.scattered}"


def places_key(problem: Problem) -> tuple[int, ...] | None:
    """All that kernels are given of a problem's places, with the tables by their addresses: whoever remembers a pass by this key keeps the tables alive."""
    places = problem.dropout_places
    return None if places is None else (*[t.data_ptr() for t in places.squares], places.batch, places.head)
