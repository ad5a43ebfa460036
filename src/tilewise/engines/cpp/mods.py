"""Generated mask and score functions of a problem, cached by structure."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import exact
from tilewise.core.problem import Problem
from tilewise.engines.codegen import Extents, layouts_of
from tilewise.engines.cpp.compiler import FOR_PROGRAMS
from tilewise.engines.cpp.emit import BY_KEY, BY_QUERY, Axes, Writer, mask_source, score_source, slope_source
from tilewise.engines.cpp.libraries import Unit, library_of
from tilewise.lang import BoundProgram, Program, derive

MAX_UNITS = 4096
_units: dict[Any, Unit] = {}


def mask_unit(p: Problem) -> Unit | None:
    return None if p.mask is None else _unit("mask", p.mask, p, lambda call: mask_source(_both_axes(call, p), real(p)))


def score_unit(p: Problem) -> Unit | None:
    return None if p.score is None else _unit("score", p.score, p, lambda call: score_source(_both_axes(call, p), real(p)))


def dscore_unit(score: BoundProgram, p: Problem, wanted: frozenset[int]) -> Unit:
    """The score's derivative, and the gradients of the wanted captures."""

    def make(call: BoundProgram) -> str:
        derivative = derive(call.program, wanted)
        return slope_source(_writer(derivative.program, call, p, BY_QUERY), derivative, real(p))

    return _unit(f"dscore {sorted(wanted)}", score, p, make)


def real(p: Problem) -> str:
    return "double" if p.dtype == torch.float64 else "float"


def _unit(kind: str, call: BoundProgram, p: Problem, make: Callable[[BoundProgram], str]) -> Unit:
    """Cached by all that the generated code depends on: the program, and the integers, layouts and lengths that its bounds are proved from."""
    layout = tuple([(t.shape, t.stride()) for t in call.captures])
    extents = Extents(p.batch, p.heads, p.q_len, p.kv_len)
    key = (kind, call.program.text, call.ints, layout, extents, p.dtype == torch.float64)
    found = _units.get(key)
    if found is None:
        if len(_units) >= MAX_UNITS:
            _units.clear()
        found = _units[key] = Unit(make(call), FOR_PROGRAMS)
    return found


def _both_axes(call: BoundProgram, p: Problem) -> list[Writer]:
    return [_writer(call.program, call, p, axes) for axes in (BY_QUERY, BY_KEY)]


def _writer(program: Program, call: BoundProgram, p: Problem, axes: Axes) -> Writer:
    return Writer(program, call, Extents(p.batch, p.heads, p.q_len, p.kv_len), layouts_of(call.captures), axes)


class Arguments(NamedTuple):
    """A kernel struct as numbers, and the objects they point into."""

    values: tuple[int, ...]
    keep_alive: Any = None


ABSENT = Arguments((0,) * 6)


def program_arguments(call: BoundProgram | None, unit: Unit | None) -> Arguments:
    if call is None or unit is None:
        return ABSENT
    library = library_of(unit, call.program.text)
    arrays = call_arrays(call) if call.captures else _without_captures(call.ints, exact(call.floats))
    return Arguments((library.address("by_query"), library.address("by_key"), *arrays.values), (library, arrays.keep_alive))


@lru_cache(maxsize=256)
def _without_captures(ints: tuple[int, ...], floats: tuple[float | str, ...]) -> Arguments:
    return _arrays((), ints, tuple([float(f) for f in floats]))


def call_arrays(call: BoundProgram) -> Arguments:
    """Pointers to the captures, ints, floats, and the captures' sizes and strides."""
    return _arrays(call.captures, call.ints, call.floats)


def _arrays(tensors: tuple[Tensor, ...], ints: tuple[int, ...], floats: tuple[float, ...]) -> Arguments:
    layout = [x for t in tensors for x in (*t.shape, *t.stride())]
    keep_alive = (
        (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors]),
        (ctypes.c_int64 * len(ints))(*ints),
        (ctypes.c_double * len(floats))(*floats),
        (ctypes.c_int64 * len(layout))(*layout),
    )
    return Arguments(tuple([ctypes.addressof(array) for array in keep_alive]), keep_alive)
