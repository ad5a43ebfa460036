"""Calls remembered: one like an earlier one skips the checks, the tracing and the choice of an engine.

A call is known by everything those depend on: shapes, strides, dtypes, options, and its mask and score functions. A function is
known by its code and by what its closure, defaults and globals hold: numbers by value, tensors by identity and place. What
cannot be known that way (an object with attributes, a list, a function that computes with tensors while it is traced) is not
remembered, and such a call takes the long way every time. Tensors are held weakly: nothing here keeps one alive, and what was
remembered of a call goes when one of its tensors has gone.
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

from tilewise.dispatch import Choice
from tilewise.engines import AGAIN, Engine
from tilewise.lang import Call
from tilewise.masks import Mask
from tilewise.plan import maps
from tilewise.problem import Options, Problem, seed_tensor
from tilewise.scores import Score, Sinks
from tilewise.tf32 import allows_tf32
from tilewise.tiles import TileMap
from tilewise.weak_entries import WeakEntries

MOST_CALLS = 512
DEEPEST = 8  # functions within functions
VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)
PLAIN = (Tensor, Parameter)
NO_TENSORS = dict.fromkeys(("query", "key", "value", "tiles", "sinks", "seed"))
CONSTANT_MODULES = (torch, math, operator, torch.nn.functional)


class Sight(NamedTuple):
    """What a call looks like, and the tensors, maps and code that its mask and score hold."""

    key: tuple[Any, ...]
    held: tuple[Any, ...]


class Known(NamedTuple):
    """What was found out about a call. The problem is without its tensors; their places among those held are kept instead."""

    engine: Engine
    problem: Problem
    choice: Choice
    mask_name: str
    mask: tuple[int, ...]
    score: tuple[int, ...]
    sinks: int | None
    tiles: int | None


_calls: WeakEntries[Known] = WeakEntries(MOST_CALLS)
_kinds: dict[torch.device, str] = {}


def sight(query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str, needs_lse: bool) -> Sight | None:
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
        backend, needs_lse, device, dtype, options[:5], options.seed is None, torch.are_deterministic_algorithms_enabled(),
        dtype is torch.float32 and allows_tf32(), shape, query.stride(), kv_shape, key.stride(), value.shape, value.stride(),
        query.data_ptr() & 15, key.data_ptr() & 15, value.data_ptr() & 15,
    )  # fmt: skip
    if mask is None and score is None:
        return Sight(known, ())
    parts: list[Any] = [known]
    held: list[Any] = []
    if _look(mask, parts, held, DEEPEST) and _look(score, parts, held, DEEPEST):
        return Sight(tuple(parts), tuple(held))
    return None


def _look(value: Any, parts: list[Any], held: list[Any], depth: int) -> bool:
    """Add what a value is known by; False if that cannot be told."""
    kind = type(value)
    parts.append(kind)
    if kind in VALUES:
        parts.append(value)
        return True
    if kind is FunctionType:
        return depth > 0 and _look_at_function(value, parts, held, depth - 1)
    if kind in PLAIN:
        if value.is_inference() or (depth == DEEPEST and value.is_floating_point()):  # an additive mask: its contents decide how it is read
            return False
        parts += (id(value), value.data_ptr(), value.shape, value.stride(), value.requires_grad)
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
    if kind is tuple or (kind is list and depth == DEEPEST):  # a list only of scores: any other may change
        parts.append(len(value))
        return depth > 0 and all([_look(v, parts, held, depth if depth == DEEPEST else depth - 1) for v in value])
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
        if len(_names_of) >= MOST_CALLS:
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


def find(seen: Sight) -> Known | None:
    return _calls.find(seen.key, seen.held)


def remember(seen: Sight, engine: Engine, problem: Problem, choice: Choice, mask_name: str) -> None:
    """Keep what was found out, if the problem holds nothing but what the call showed."""
    places = {id(t): n for n, t in enumerate(seen.held)}
    calls = [c for c in (problem.mask, problem.score) if c is not None]
    inner = [t for c in calls if problem.tiles is None or c is problem.score for t in c.captures]  # a given map has its mask's
    owned = [*inner, *[t for t in (problem.sinks, problem.tiles) if t is not None]]
    if any([id(t) not in places for t in owned]) or not all([c.repeatable for c in calls]):
        return
    problem.memory[AGAIN] = None  # to be left there by an engine that can
    bare = problem.with_tensors(**NO_TENSORS, mask=_bare(problem.mask), score=_bare(problem.score))
    known = Known(
        engine, bare, choice, mask_name,
        () if problem.mask is None or problem.tiles is not None else tuple([places[id(t)] for t in problem.mask.captures]),
        () if problem.score is None else tuple([places[id(t)] for t in problem.score.captures]),
        None if problem.sinks is None else places[id(problem.sinks)],
        None if problem.tiles is None else places[id(problem.tiles)],
    )  # fmt: skip
    _calls.keep(seen.key, seen.held, known)


def _bare(call: Call | None) -> Call | None:
    return None if call is None else Call(call.program, (), call.ints, call.floats)


def restored(known: Known, seen: Sight, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Problem:
    """The problem of a call like an earlier one."""
    bare, held = known.problem, seen.held
    tiles = None if known.tiles is None else held[known.tiles]
    return bare.with_tensors(
        query=query, key=key, value=value, tiles=tiles,
        mask=tiles.mask if tiles is not None else _with(bare.mask, known.mask, held), score=_with(bare.score, known.score, held),
        sinks=None if known.sinks is None else held[known.sinks], seed=seed_tensor(options.seed, options.dropout_p),
    )  # fmt: skip


def trains(known: Known, seen: Sight, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether anything of such a call, which has no sinks, wants a gradient."""
    if not torch.is_grad_enabled():
        return False
    captures = [seen.held[n] for n in known.score] if known.score else []
    return query.requires_grad or key.requires_grad or value.requires_grad or any([t.requires_grad for t in captures])


def _with(call: Call | None, places: tuple[int, ...], held: tuple[Any, ...]) -> Call | None:
    return call if not places or call is None else Call(call.program, tuple([held[n] for n in places]), call.ints, call.floats)


def forget() -> None:
    _calls.clear()


maps.also.append(forget)
