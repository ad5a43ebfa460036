"""Generated mask and score functions of a problem, cached by structure."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.map_cache import exact
from tilewise.core.problem import Problem
from tilewise.engines.codegen import layouts_of
from tilewise.engines.cpp.compiler import FOR_PROGRAMS
from tilewise.engines.cpp.emit import BY_KEY, BY_QUERY, Axes, Writer, mask_source, score_source, slope_source
from tilewise.engines.cpp.libraries import Unit, library_of
from tilewise.engines.cpp.texts import Texts
from tilewise.engines.facts import Extents, Facts
from tilewise.lang import BoundProgram, Program, derive

MAX_UNITS = 4096
_units: Texts[Unit] = Texts(MAX_UNITS)
_units_of_calls: dict[Any, Unit] = {}  # the same, for lengths and integers of which no question need be asked again


def mask_unit(p: Problem) -> Unit | None:
    return None if p.mask is None else _unit("mask", p.mask.program, p.mask, p, lambda writers: mask_source(writers, real(p)))


def score_unit(p: Problem) -> Unit | None:
    return None if p.score is None else _unit("score", p.score.program, p.score, p, lambda writers: score_source(writers, real(p)))


def dscore_unit(score: BoundProgram, p: Problem, wanted: frozenset[int]) -> Unit:
    """The score's derivative, and the gradients of the wanted captures."""
    derivative = derive(score.program, wanted)
    return _unit(f"dscore {sorted(wanted)}", derivative.program, score, p, lambda writers: slope_source(writers[0], derivative, real(p)), (BY_QUERY,))


def real(p: Problem) -> str:
    return "double" if p.dtype == torch.float64 else "float"


def _unit(
    kind: str, program: Program, call: BoundProgram, p: Problem, source: Callable[[list[Writer]], str], axes: tuple[Axes, ...] = (BY_QUERY, BY_KEY)
) -> Unit:
    """The generated code of `program`, which is the call's or made of it and `kind`. It depends on the precision, on how captures lie in memory, and on what
    is known of values, which follows from integers, lengths and captures' sizes."""
    extents, precision = Extents(p.batch, p.heads, p.q_len, p.kv_len), p.dtype == torch.float64
    exact_key = (kind, call.program.text, call.ints, tuple([(t.shape, t.stride()) for t in call.captures]), extents, precision)
    found = _units_of_calls.get(exact_key)
    if found is None:
        if len(_units_of_calls) >= MAX_UNITS:
            _units_of_calls.clear()
        facts, layouts = Facts(program, call, extents), layouts_of(call.captures)
        write = lambda: Unit(source([Writer(program, facts, layouts, a) for a in axes]), FOR_PROGRAMS)
        found = _units_of_calls[exact_key] = _units.find((kind, call.program.text, layouts, precision), facts, write)
    return found


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
