"""The call cache: a call like an earlier one skips the checks, the tracing, the choice of an engine and its preparations.

This is the plan's call layer; call_key.py says what a call is known by. Tensors are held weakly: nothing here keeps one alive, and a
cached call goes when one of the tensors its mask or score holds has gone, or the memory of one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import maps
from tilewise.core.pages import Pages
from tilewise.core.plan import Plan
from tilewise.core.problem import Options, Problem, mask_sources, seed_tensor
from tilewise.core.weak_cache import WeakCache
from tilewise.engines import Engine, Output
from tilewise.frontend.call_key import CallKey
from tilewise.frontend.dispatch import Choice
from tilewise.frontend.token_order import TokenPermutation, best_permutation

MAX_CALLS = 512


class CachedCall(NamedTuple):
    """What was found out about a call: the engine and why, its plan, the problem without its tensors, and where to find those among the key's `held`."""

    engine: Engine
    plan: Plan
    problem: Problem
    choice: Choice
    mask_name: str
    permutation: TokenPermutation | None
    permuted_plans: dict[Any, Plan]  # by the strides of the copies, which depend on which gradients are wanted
    replays: bool  # the plan may be asked to: tokens are not permuted, and no gradient is wanted or torch makes it
    trains: bool  # a gradient is wanted that the engine makes, and tokens are not permuted
    mask: tuple[int, ...] = ()
    score: tuple[int, ...] = ()
    sinks: int | None = None
    tiles: int | None = None

    def bind(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor, options: Options, pages: Pages | None) -> Problem:
        """The problem of a call like the one this was made for. (`dataclasses.replace` would take several times as long.)"""
        found = self.bare(key, options, query.device).of(self.tensors(key, query, k, value))
        return found if pages is None else found.replaced(pages=pages)

    def bare(self, key: CallKey, options: Options, device: torch.device) -> Problem:
        """The same without the tensors that a gradient can be asked for."""
        held, problem = key.held, self.problem
        if self.tiles is not None:
            tiles = held[self.tiles]
            problem = problem.replaced(tiles=tiles, mask=tiles.mask)
        elif self.mask:
            assert problem.mask is not None
            problem = problem.replaced(mask=problem.mask.with_captures(tuple([held[n] for n in self.mask])))
        if problem.dropout_p > 0:
            problem = problem.replaced(seed=seed_tensor(options.seed, options.dropout_p, device))
        return problem

    def tensors(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Those (`Problem.tensors`)."""
        if not self.score and self.sinks is None:
            return query, k, value
        held = key.held
        captures = [held[n] for n in self.score]
        return (query, k, value, *captures) if self.sinks is None else (query, k, value, *captures, held[self.sinks])

    def replay(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor, needs_lse: bool) -> Output | None:
        """The forward straight from the plan, where nothing has to be bound but the tensors, and the gradient is nobody's or torch's; else None."""
        if not self.replays:
            return None
        held = key.held
        if not held:
            return self.plan.replay(query, k, value, (), needs_lse)
        tiles = None if self.tiles is None else held[self.tiles]
        sources = tuple([held[n] for n in self.mask]) if tiles is None else mask_sources(tiles.mask, tiles)
        return self.plan.replay(query, k, value, sources, needs_lse)

    def plan_for(self, permuted: Problem) -> Plan:
        """The plan of the problem in the order of its permutation."""
        strides = (permuted.key.stride(), permuted.value.stride())
        if strides not in self.permuted_plans:
            made = self.permuted_plans[strides] = self.engine.plan(permuted)
            made.by_name = self.plan.by_name
        return self.permuted_plans[strides]


_calls: WeakCache[CachedCall] = WeakCache(MAX_CALLS)


def find(key: CallKey | None) -> CachedCall | None:
    return None if key is None else _calls.find(key.key, key.watched)


def keep(key: CallKey | None, problem: Problem, engine: Engine, choice: Choice, mask_name: str) -> CachedCall:
    """What the next call like this one will need; remembered if the call has a key and every tensor of the problem is part of it."""
    permutation = None if problem.grid is None else best_permutation(engine, problem)
    trains = torch.is_grad_enabled() and any([t.requires_grad for t in problem.tensors])
    plain, own = permutation is None, trains and not engine.is_torch_function
    cached = CachedCall(engine, engine.plan(problem), problem, choice, mask_name, permutation, {}, replays=plain and not own, trains=plain and own)
    if key is None:
        return cached
    places = {id(t): n for n, t in enumerate(key.held)}
    programs = [c for c in (problem.mask, problem.score) if c is not None]
    captures = [t for c in programs if problem.tiles is None or c is problem.score for t in c.captures]  # a given map has its mask's
    tensors = [*captures, *[t for t in (problem.sinks, problem.tiles) if t is not None]]
    if any([id(t) not in places for t in tensors]) or not all([c.repeatable for c in programs]) or _was_moved(problem):
        return cached
    kept = cached._replace(
        problem=problem.bare.replaced(mask=None if problem.mask is None else problem.mask.with_captures(()), tiles=None, seed=None, pages=None),
        mask=() if problem.mask is None or problem.tiles is not None else tuple([places[id(t)] for t in problem.mask.captures]),
        score=() if problem.score is None else tuple([places[id(t)] for t in problem.score.captures]),
        sinks=None if problem.sinks is None else places[id(problem.sinks)],
        tiles=None if problem.tiles is None else places[id(problem.tiles)],
    )
    captured = () if problem.score is None else problem.score.captures
    _calls.keep(key.key, key.watched, kept, [t.untyped_storage() for t in captured])
    return kept


def _was_moved(problem: Problem) -> bool:
    """Whether the mask of a given map loads from copies: its own tensors are on another device, or not in memory as they are."""
    given = None if problem.tiles is None else problem.tiles.mask
    if given is None or problem.mask is None:
        return False
    return any([mine is not its for mine, its in zip(problem.mask.captures, given.captures, strict=True)])


def forget() -> None:
    _calls.clear()


maps.on_clear.append(forget)
