"""The arguments of the operators of the passes: a problem's tensors and integers, and its recipe, one text for all that never varies between the calls of one
operator in a graph. Every argument of an operator costs host time."""

import json
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.base import Engine
from tilewise.engines.registry import engine_named
from tilewise.lang import BoundProgram, parse
from tilewise.tiles import ChosenTiles, Geometry, Runs, TileMap, from_chosen, trimmed

PACKED = "Tensor query, Tensor key, Tensor value, Tensor[] others, str recipe, SymInt[] ints"
PACKED_COUNT = 6  # of these arguments


class Recipe(NamedTuple):
    """What of a problem never varies between the calls of one operator in a graph, and how many tensors and integers of each kind there are."""

    engine: str
    mask: str
    mask_captures: int
    mask_ints: int
    mask_floats: list[float]
    tiles: int  # tensors of a given map: its runs, the states of its tiles, or none
    score: str
    score_captures: int
    score_ints: int
    score_floats: list[float]
    has_sinks: bool
    scale: float
    dropout_p: float
    has_seed: bool
    deterministic: bool
    max_scores: bool
    names: list[int]  # of the values that the mask's tensors and the given tiles are in the graph (graph_values.py); none outside of graphs


STATES, GEOMETRY = 1, 9  # tensors of a map of chosen tiles, and integers of any given map


def packed(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, list[Tensor], str, list[int]]:
    """The arguments of `tilewise::attention` as those of the passes."""
    engine, query, key, value, mask, m_captures, m_ints, m_floats, runs, geometry, score, s_captures, s_ints, s_floats, *rest = args
    sinks, scale, dropout_p, seed, deterministic, max_scores, last = rest
    names = [] if isinstance(last, int) else list(last)  # in a graph, names stand in place of `passes` (transforms._attention)
    recipe = Recipe(
        engine,
        mask,
        len(m_captures),
        len(m_ints),
        list(m_floats),
        len(runs),
        score,
        len(s_captures),
        len(s_ints),
        list(s_floats),
        sinks is not None,
        scale,
        dropout_p,
        seed is not None,
        deterministic,
        max_scores,
        names,
    )
    others = [*m_captures, *runs, *s_captures, *[t for t in (sinks, seed) if t is not None]]
    return query, key, value, others, json.dumps(recipe), [*m_ints, *geometry, *s_ints]


class Frame(NamedTuple):
    """A recipe read: the problem but for its tensors and integers."""

    recipe: Recipe
    engine: Engine
    problem: Problem
    is_complete: bool  # there are no tensors besides query, key and value, and no integers


NO_TENSOR = torch.empty(0, device="cpu")


@lru_cache(maxsize=1024)
def frame_of(text: str) -> Frame:
    """A function of the text alone: JSON gives every number, a float's every bit included, back as it was."""
    r = Recipe(*json.loads(text))
    mask = BoundProgram(parse(r.mask), (), (), tuple(r.mask_floats)) if r.mask else None
    score = BoundProgram(parse(r.score), (), (), tuple(r.score_floats)) if r.score else None
    problem = Problem(NO_TENSOR, NO_TENSOR, NO_TENSOR, mask, None, score, None, r.scale, r.dropout_p, None, r.deterministic, max_scores=r.max_scores)
    more = r.mask_captures + r.mask_ints + r.score_captures + r.score_ints
    return Frame(r, engine_named(r.engine), problem, not (more or r.tiles or r.has_sinks or r.has_seed))


def unpacked(query: Tensor, key: Tensor, value: Tensor, others: list[Tensor], recipe: str, ints: list[int]) -> tuple[Engine, Problem]:
    """The inverse of `packed`, as an engine and its problem."""
    r, engine, problem, is_complete = frame_of(recipe)
    if is_complete:
        return engine, problem.replaced(query=query, key=key, value=value)
    tensors, numbers = _Reader(others), _Reader(ints)
    mask, score, tiles = problem.mask, problem.score, None
    if mask is not None:
        mask = BoundProgram(mask.program, tensors.take(r.mask_captures), numbers.take(r.mask_ints), mask.floats)
    if r.tiles:
        tiles = _tiles(tensors.take(r.tiles), numbers.take(GEOMETRY), mask)
    if score is not None:
        score = BoundProgram(score.program, tensors.take(r.score_captures), numbers.take(r.score_ints), score.floats)
    sinks = tensors.take(1)[0] if r.has_sinks else None
    seed = tensors.take(1)[0] if r.has_seed else None
    return engine, problem.replaced(query=query, key=key, value=value, mask=mask, tiles=tiles, score=score, sinks=sinks, seed=seed)


class PackedCall:
    """The arguments of a pass, and the problem that they are, which is put together once, and for some calls never."""

    __slots__ = ("_problem", "arguments", "frame")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.frame = arguments, frame_of(arguments[4])
        self._problem: Problem | None = None

    @property
    def problem(self) -> Problem:
        if self._problem is None:
            _, self._problem = unpacked(*self.arguments)
        return self._problem


def _tiles(tensors: tuple[Tensor, ...], numbers: tuple[int, ...], mask: BoundProgram | None) -> TileMap:
    batch, heads, q_len, kv_len, tile_q, tile_kv, given, most, sharpens = numbers
    geometry = Geometry(batch, heads, q_len, kv_len, (tile_q, tile_kv))
    if len(tensors) == STATES:
        return from_chosen(geometry, ChosenTiles(tensors[0], most, bool(sharpens)), mask, "mask")
    return TileMap(geometry, trimmed(Runs(*tensors[:3])), trimmed(Runs(*tensors[3:])), mask, given=bool(given))


class _Reader:
    """Takes the items of a list, one stretch after the other."""

    def __init__(self, items: list[Any]) -> None:
        self._items, self._at = items, 0

    def take(self, count: int) -> tuple[Any, ...]:
        begin, self._at = self._at, self._at + count
        return tuple(self._items[begin : self._at])
