"""Neighborhoods on a grid: the copy engine brings patches of 8 points by a few, so that tiles are patches and nothing has to be copied first.

Tokens are computed in the order of strips (lang.rewrite.in_patches): rows of the grid are taken HEIGHT at a time and walked column by
column. Seen as (..., columns, rows, head dim), a tensor has the tokens of such a tile in one box. Maps, stencils and scores are those of
the problem in that order; tensors, lse and everything that is done again stay in the order they are given in.
"""

from math import ceil, prod

from torch import Tensor

from tilewise.lang import Call, in_patches
from tilewise.masks import Grid
from tilewise.problem import Problem

HEIGHT = 8
COLUMNS = 16  # of the largest box, 128 tokens
WORTH = 0.8  # of the keys that tiles of whole rows visit: patches that visit more are not taken


def width(p: Problem) -> int | None:
    """The width of the grid if the problem is computed in patches, else None."""
    if "width" not in p.memory:
        p.memory["width"] = p.grid.shape[1] if p.grid is not None and _fits(p, p.grid) and _pays(p.grid) else None
    found: int | None = p.memory["width"]
    return found


def _fits(p: Problem, grid: Grid) -> bool:
    shape = grid.shape
    whole = len(shape) == 2 and p.q_len == p.kv_len == prod(shape) and shape[0] % HEIGHT == 0 and shape[1] % COLUMNS == 0
    return whole and p.dropout_p == 0 and p.tiles is None and max(p.head_dim, p.v_dim) <= 128


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
    if p.grid is None or width(p) is None:
        return p
    if "strips" not in p.memory:
        p.memory["strips"] = (_rewritten(p.mask, p.grid), _rewritten(p.score, p.grid), {"width": width(p)})
    mask, score, memory = p.memory["strips"]
    return p.with_tensors(mask=_with_captures(mask, p.mask), score=_with_captures(score, p.score), memory=memory, grid=None)


def _rewritten(call: Call | None, grid: Grid) -> Call | None:
    if call is None:
        return None
    for name in ("q", "kv"):
        call = in_patches(call, name, grid.shape, (HEIGHT,))
    return Call(call.program, (), call.ints, call.floats)


def _with_captures(made: Call | None, call: Call | None) -> Call | None:
    return made if made is None or call is None else Call(made.program, call.captures, made.ints, call.floats, call.repeatable)


def box(rows: int, columns: int, wide: int | None) -> tuple[int, ...]:
    """The block of a (batch, heads, tokens, head dim) tensor that holds a tile of so many tokens."""
    return (1, 1, rows, columns) if wide is None else (1, 1, rows // HEIGHT, HEIGHT, columns)


def as_boxes(t: Tensor, wide: int | None) -> Tensor:
    """A tensor as the copy engine sees it."""
    return t if wide is None else t.unflatten(2, (-1, wide)).transpose(2, 3)
