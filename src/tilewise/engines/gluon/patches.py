"""Neighborhoods on a grid: TMA loads patches of 8 points by a few, so that tiles are patches and nothing has to be copied first.

Tokens are computed in the order of strips (lang.rewrite.in_patches): rows of the grid are taken HEIGHT at a time and walked column by
column. Seen as (..., columns, rows, head dim), a tensor has the tokens of such a tile in one box. Maps, mask bits and scores are those of
the problem in that order; tensors, lse and everything that is computed again stay in the order they are given in.
"""

from functools import lru_cache
from math import ceil, prod

from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.lang import BoundProgram, in_patches, parse
from tilewise.masks import Grid

HEIGHT = 8
COLUMNS = 16  # of the largest box, 128 tokens
WORTH = 0.8  # of the keys that tiles of whole rows visit: patches that visit more are not taken


def grid_width(p: Problem) -> int | None:
    """The width of the grid if the problem is computed in patches, else None."""
    return p.grid.shape[1] if p.grid is not None and _fits(p, p.grid) and _pays(p.grid) else None


def _fits(p: Problem, grid: Grid) -> bool:
    shape = grid.shape
    whole = len(shape) == 2 and p.q_len == p.kv_len == prod(shape) and shape[0] % HEIGHT == 0 and shape[1] % COLUMNS == 0
    return whole and p.dropout_p == 0 and p.tiles is None and max(p.head_dim, p.v_dim) <= 128


@lru_cache(maxsize=256)
def _pays(grid: Grid) -> bool:
    """Whether 128 queries visit clearly fewer keys in patches, away from the grid's border."""
    wide, (down, along) = grid.shape[1], grid.window
    if wide < 128:
        by_rows = 1 + 2 * ceil(down // 2 * wide / 128)
    else:
        by_rows = down * (1 if wide == 128 else 1 + 2 * ceil(along // 2 / 128))
    in_boxes = (1 + 2 * ceil(down // 2 / HEIGHT)) * (2 + 2 * ceil(along // 2 / HEIGHT))
    return in_boxes * HEIGHT * HEIGHT <= WORTH * by_rows * 128


def in_strips(p: Problem) -> Problem:
    """The problem whose mask and score see tokens in the order of strips; its tensors are as they are."""
    if p.grid is None or grid_width(p) is None:
        return p
    return p.replaced(mask=_in_strips(p.mask, p.grid), score=_in_strips(p.score, p.grid), grid=None)


def _in_strips(bound: BoundProgram | None, grid: Grid) -> BoundProgram | None:
    if bound is None:
        return None
    made = _rewritten(bound.program.text, bound.ints, grid.shape)
    return BoundProgram(made.program, bound.captures, made.ints, bound.floats, bound.repeatable)


@lru_cache(maxsize=256)
def _rewritten(text: str, ints: tuple[int, ...], shape: tuple[int, ...]) -> BoundProgram:
    bound = BoundProgram(parse(text), (), ints)
    for name in ("q", "kv"):
        bound = in_patches(bound, name, shape, (HEIGHT,))
    return bound


def tma_box(rows: int, columns: int, width: int | None) -> tuple[int, ...]:
    """The block of a (batch, heads, tokens, head dim) tensor that holds a tile of so many tokens."""
    return (1, 1, rows, columns) if width is None else (1, 1, rows // HEIGHT, HEIGHT, columns)


def tma_view(t: Tensor, width: int | None) -> Tensor:
    """A tensor as TMA sees it."""
    return t if width is None else t.unflatten(2, (-1, width)).transpose(2, 3)
