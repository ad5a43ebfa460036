"""The call cache: a call like an earlier one skips the checks, the tracing, the choice of an engine and its preparations.

This is the plan's call layer. A call is known by everything those depend on: shapes, strides, dtypes, alignment, options, torch's
switches, and its mask and score functions. A function is known by its code and by what its closure, defaults and globals hold: numbers by
value, tensors by identity, address, shape, strides and dtype. What cannot be known that way (an object with attributes, a list, a function
that computes with tensors while it is traced) has no key, and such a call is traced and planned every time. What tensors *contain* is no part
of the key: maps made from it have a key of their own (core/map_cache.py). Tensors are held weakly: nothing here keeps one alive, and a
cached call goes when one of its tensors has gone.
"""

import math
import operator
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilewise.core.map_cache import maps
from tilewise.core.plan import Plan
from tilewise.core.problem import Options, Problem, seed_tensor
from tilewise.core.tf32 import allows_tf32
from tilewise.core.weak_cache import WeakCache
from tilewise.engines import Engine, Output
from tilewise.frontend.dispatch import Choice
from tilewise.frontend.token_order import TokenPermutation, best_permutation
from tilewise.lang import BoundProgram
from tilewise.masks import Mask
from tilewise.scores import Score, Sinks
from tilewise.tiles import TileMap

MAX_CALLS = 512
MAX_DEPTH = 8  # functions within functions
VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)
PLAIN = (Tensor, Parameter)
NO_TENSORS = dict.fromkeys(("query", "key", "value", "tiles", "sinks", "seed"))
CONSTANT_MODULES = (torch, math, operator, torch.nn.functional)


class CallKey(NamedTuple):
    """What a call is known by, and the tensors, maps and code objects that its mask and score hold: found by id, so identity is checked too."""

    key: tuple[Any, ...]
    held: tuple[Any, ...]


class CachedCall(NamedTuple):
    """What was found out about a call: the engine and why, its plan, the problem without its tensors, and where to find those among the key's `held`."""

    engine: Engine
    plan: Plan
    problem: Problem
    choice: Choice
    mask_name: str
    permutation: TokenPermutation | None
    permuted_plans: dict[Any, Plan]  # by the strides of the copies, which depend on whether gradients are wanted
    mask: tuple[int, ...] = ()
    score: tuple[int, ...] = ()
    sinks: int | None = None
    tiles: int | None = None

    def bind(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor, options: Options) -> Problem:
        """The problem of a call like the one this was made for."""
        held = key.held
        tiles = None if self.tiles is None else held[self.tiles]
        return self.problem.with_tensors(
            query=query,
            key=k,
            value=value,
            tiles=tiles,
            mask=tiles.mask if tiles is not None else _bound(self.problem.mask, self.mask, held),
            score=_bound(self.problem.score, self.score, held),
            sinks=None if self.sinks is None else held[self.sinks],
            seed=seed_tensor(options.seed, options.dropout_p),
        )

    def replay(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor) -> Output | None:
        """The forward straight from the plan, where no gradient is wanted and nothing has to be bound but the tensors; else None."""
        if self.permutation is not None or (torch.is_grad_enabled() and self._trains(key, query, k, value)):
            return None
        return self.plan.replay(query, k, value, tuple([key.held[n] for n in self.mask]))

    def _trains(self, key: CallKey, query: Tensor, k: Tensor, value: Tensor) -> bool:
        return query.requires_grad or k.requires_grad or value.requires_grad or any([key.held[n].requires_grad for n in self.score])

    def plan_for(self, permuted: Problem) -> Plan:
        """The plan of the problem in the order of its permutation."""
        strides = (permuted.key.stride(), permuted.value.stride())
        if strides not in self.permuted_plans:
            self.permuted_plans[strides] = self.engine.plan(permuted)
        return self.permuted_plans[strides]


_calls: WeakCache[CachedCall] = WeakCache(MAX_CALLS)
_kinds: dict[torch.device, str] = {}


def key_of(query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str, needs_lse: bool) -> CallKey | None:
    """What a call is known by; None if it cannot be."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None:
        return None
    device, dtype = query.device, query.dtype
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN) or forward_ad._current_level >= 0:
        return None
    if key.dtype is not dtype or value.dtype is not dtype or key.device != device or value.device != device:
        return None
    shape, kv_shape = query.shape, key.shape
    if len(shape) != 4 or shape[0] != kv_shape[0]:
        return None
    kind = _kinds.get(device) or _kinds.setdefault(device, device.type)  # to ask a device for its type takes longer
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not dtype:
        return None
    known: tuple[Any, ...] = (
        backend,
        needs_lse,
        device,
        dtype,
        options[:5],
        options.seed is None,
        torch.are_deterministic_algorithms_enabled(),
        dtype is torch.float32 and allows_tf32(),
        shape,
        query.stride(),
        kv_shape,
        key.stride(),
        value.shape,
        value.stride(),
        query.data_ptr() & 15,
        key.data_ptr() & 15,
        value.data_ptr() & 15,
    )
    if mask is None and score is None:
        return CallKey(known, ())
    parts: list[Any] = [known]
    held: list[Any] = []
    if _look(mask, parts, held, MAX_DEPTH) and _look(score, parts, held, MAX_DEPTH):
        return CallKey(tuple(parts), tuple(held))
    return None


def _look(value: Any, parts: list[Any], held: list[Any], depth: int) -> bool:
    """Add what a value is known by; False if that cannot be told."""
    kind = type(value)
    parts.append(kind)
    if kind in VALUES:
        parts.append(repr(value) if kind is float and value == 0.0 else value)  # 0.0 == -0.0
        return True
    if kind is FunctionType:
        return depth > 0 and _look_at_function(value, parts, held, depth - 1)
    if kind in PLAIN:
        if value.is_inference() or (depth == MAX_DEPTH and value.is_floating_point()):  # an additive mask: its contents decide how it is read
            return False
        parts += (id(value), value.data_ptr(), value.shape, value.stride(), value.dtype, value.requires_grad)
        held.append(value)
        return True
    if kind is TileMap:
        parts.append(id(value))
        held.append(value)
        return True
    if kind is Sinks:
        return _look(value.logits, parts, held, depth - 1)
    if kind is Mask:
        parts.append(value.grid)
        return _look(value.function, parts, held, depth)
    if kind is Score:
        return _look(value.function, parts, held, depth)
    if kind is tuple or (kind is list and depth == MAX_DEPTH):  # a list only of scores: any other may change
        parts.append(len(value))
        return depth > 0 and all([_look(v, parts, held, depth if depth == MAX_DEPTH else depth - 1) for v in value])
    if kind is partial:
        parts += (len(value.args), *value.keywords)
        return all([_look(v, parts, held, depth - 1) for v in (value.func, *value.args, *value.keywords.values())])
    return False


def _look_at_function(function: FunctionType, parts: list[Any], held: list[Any], depth: int) -> bool:
    code = function.__code__
    parts.append(id(code))  # to hash a code object takes longer than all the rest
    held.append(code)
    for cell in function.__closure__ or ():
        try:
            found = cell.cell_contents
        except ValueError:  # not yet assigned
            return False
        if not _look(found, parts, held, depth):
            return False
    for default in function.__defaults__ or ():
        if not _look(default, parts, held, depth):
            return False
    if function.__kwdefaults__:
        return False
    known = _names_of.get(id(code))
    if known is None or known[0] is not code:
        if len(_names_of) >= MAX_CALLS:
            _names_of.clear()
        known = _names_of[id(code)] = (code, tuple(sorted(_global_names(code))))
    for name in known[1]:
        found = function.__globals__.get(name, _names_of)
        if found is _names_of:  # a builtin, or an attribute's name
            continue
        if type(found) is ModuleType:
            if found not in CONSTANT_MODULES:
                return False
        elif not _look(found, parts, held, depth):
            return False
    return True


_names_of: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _global_names(code: CodeType) -> set[str]:
    """Names a function may look up outside itself; those of the functions it makes included."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*[_global_names(c) for c in inner])


def find(key: CallKey | None) -> CachedCall | None:
    return None if key is None else _calls.find(key.key, key.held)


def keep(key: CallKey | None, problem: Problem, engine: Engine, choice: Choice, mask_name: str) -> CachedCall:
    """What the next call like this one will need; remembered if the call has a key and every tensor of the problem is part of it."""
    permutation = None if problem.grid is None else best_permutation(engine, problem)
    cached = CachedCall(engine, engine.plan(problem), problem, choice, mask_name, permutation, {})
    if key is None or (engine.looks_at_contents and problem.mask is not None):
        return cached
    places = {id(t): n for n, t in enumerate(key.held)}
    programs = [c for c in (problem.mask, problem.score) if c is not None]
    captures = [t for c in programs if problem.tiles is None or c is problem.score for t in c.captures]  # a given map has its mask's
    tensors = [*captures, *[t for t in (problem.sinks, problem.tiles) if t is not None]]
    if any([id(t) not in places for t in tensors]) or not all([c.repeatable for c in programs]):
        return cached
    bare = problem.with_tensors(**NO_TENSORS, mask=_bare(problem.mask), score=_bare(problem.score))
    kept = cached._replace(
        problem=bare,
        mask=() if problem.mask is None or problem.tiles is not None else tuple([places[id(t)] for t in problem.mask.captures]),
        score=() if problem.score is None else tuple([places[id(t)] for t in problem.score.captures]),
        sinks=None if problem.sinks is None else places[id(problem.sinks)],
        tiles=None if problem.tiles is None else places[id(problem.tiles)],
    )
    _calls.keep(key.key, key.held, kept)
    return kept


def _bare(bound: BoundProgram | None) -> BoundProgram | None:
    return None if bound is None else BoundProgram(bound.program, (), bound.ints, bound.floats)


def _bound(bare: BoundProgram | None, places: tuple[int, ...], held: tuple[Any, ...]) -> BoundProgram | None:
    return bare if not places or bare is None else bare.with_captures(tuple([held[n] for n in places]))


def forget() -> None:
    _calls.clear()


maps.on_clear.append(forget)
