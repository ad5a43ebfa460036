"""Generated mask and score functions of a problem, made once per structure."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tilewise.core.map_cache import exact
from tilewise.core.problem import Problem
from tilewise.engines.codegen import layouts_of
from tilewise.engines.facts import Extents, Facts
from tilewise.engines.gpu.config import LOG2E
from tilewise.engines.gpu.emit import Writer, dscore_source, either_source, fixed_source, gauge_source, mask_source, scatter_source, score_source
from tilewise.engines.gpu.emit_bounds import BoundsWriter, bounds_source
from tilewise.engines.gpu.generated import Generated, generated
from tilewise.lang import BoundProgram, Derivative, Factored, Program, derive, factored, parse

MAX_FUNCTIONS = 4096
LARGEST_TILE = 256  # queries or keys of any kernel's tiles
SMALLEST_SCALE = 1e-3  # kernels multiply by a smaller one, or a negative one, before they look for the largest score
UNCHANGED = generated("score_mod", ["@triton.jit", "def score_mod(score, b, h, q, kv, p, i, f, s):", "    return score"])
ONE = generated("dscore", ["@triton.jit", "def dscore(score, b, h, q, kv, p, i, f, s):", "    return 1.0"])
_functions: dict[Any, tuple[Generated | None]] = {}


def mask_of(p: Problem) -> Generated | None:
    """Exact whatever the inputs' type: a rounding may change what is allowed."""
    make = lambda call: generated("mask", mask_source(_writer(call.program, call, extents_of(p), True, False)))
    return None if p.mask is None else function_of("mask", p.mask, p, make)


def bounds_of(p: Problem) -> Generated | None:
    """What a mask allows in whole tiles; None where it has to be evaluated in them."""

    def make(call: BoundProgram) -> Generated | None:
        lines = BoundsWriter(call.program, Facts(call.program, call, extents_of(p)), layouts_of(call.captures)).lines()
        return None if lines is None else generated("bounds", bounds_source(lines))

    return None if p.mask is None else function_of("bounds", p.mask, p, make)


def score_of(p: Problem, split_index: bool = False) -> Generated | None:
    """None where the score is q.k times a constant, which can be applied last. split_index: q and kv are passed as sums of two terms
    (row_index and column_index in gluon/kernels/primitives.py)."""
    call = inner_score(p)
    if call is None:
        return UNCHANGED if has_score(p) else None
    make = lambda call: _scored("score_mod", score_source, call.program, call, p, split_index)
    return function_of(f"score {split_index}", call, p, make)


def has_score(p: Problem) -> bool:
    """Whether there is something to compute before q.k is multiplied into base 2: a score function, or a scale that has to be applied first."""
    return inner_score(p) is not None or _overall_scale(p) < SMALLEST_SCALE


def inner_score(p: Problem) -> BoundProgram | None:
    """The score function without the numbers it multiplies by first and last; None where nothing else is left of it."""
    _, call, _ = _inner(p)
    return None if call is None or call.program.instructions[call.program.results[0]].op == "score" else call


def dscore_of(p: Problem, split_index: bool = False) -> Generated | None:
    """The score's derivative with respect to the incoming score; None where the score only adds and the scale may be divided by."""
    _, call, _ = _inner(p)
    by_scale = _overall_scale(p) >= SMALLEST_SCALE
    if call is None:
        return None if by_scale else ONE

    def make(call: BoundProgram) -> Generated | None:
        if by_scale and only_adds(call.program):
            return None
        program = derive(call.program, frozenset()).program
        return _scored("dscore", dscore_source, program, call, p, split_index)

    return function_of(f"dscore {by_scale} {split_index}", call, p, make)


def only_adds(program: Program) -> bool:
    """Whether a score is the incoming one plus something that does not depend on it: only then lse may be subtracted before it. A derivative of 1
    would not be enough: a rounding has none of its own."""
    at = program.results[0]
    while program.instructions[at].op != "score":
        op, args, _, _ = program.instructions[at]
        scored = [a for a in args if "score" in program.dependencies[a]]
        if op not in ("add", "sub") or len(scored) != 1 or (op == "sub" and scored[0] != args[0]):
            return False
        at = scored[0]
    return True


def _inner(p: Problem) -> tuple[float, BoundProgram | None, float]:
    """The score without the numbers it multiplies by first and last (lang/factors.py), between them. Scores of float32 inputs are computed as
    they are written: every rounding counts there."""
    if p.score is None or p.dtype == torch.float32:
        return 1.0, p.score, 1.0
    if torch.compiler.is_compiling():  # it traces through caches, with a warning
        return factored(p.score)
    known = _factored(p.score.program.text, p.score.ints, exact(p.score.floats))
    return known.factor, replace(known.call, captures=p.score.captures), known.gain


@lru_cache(maxsize=MAX_FUNCTIONS)
def _factored(text: str, ints: tuple[int, ...], floats: tuple[float | str, ...]) -> Factored:
    return factored(BoundProgram(parse(text), (), ints, tuple([float(f) for f in floats])))


def _overall_scale(p: Problem) -> float:
    """What q.k is multiplied by in all, the score's own numbers included."""
    factor, _, gain = _inner(p)
    return p.scale * factor * gain


def scales(p: Problem) -> tuple[float, float, float]:
    """Of q.k before the score function; of what it returns, into base 2; of sums over dS, into dQ and dK. Without a score function q.k is
    multiplied once, on its way into base 2, where that costs nothing."""
    factor, _, gain = _inner(p)
    into_base_2 = gain if has_score(p) else _overall_scale(p)
    return float(p.scale * factor), float(into_base_2 * LOG2E), float(_overall_scale(p))


def gain_of(p: Problem) -> float:
    """What gradients of a score's captures have to be multiplied by."""
    return _inner(p)[2]


def scatter_of(p: Problem, wanted: frozenset[int]) -> Generated | None:
    """Adds the gradients of the wanted captures."""
    return _shares_of(p, wanted, "fixed", fixed_source) if p.deterministic else _shares_of(p, wanted, "scatter", scatter_source)


def gauge_of(p: Problem, wanted: frozenset[int]) -> Generated | None:
    """Finds the largest share of each of those gradients."""
    return _shares_of(p, wanted, "gauge", gauge_source)


def _shares_of(p: Problem, wanted: frozenset[int], entry: str, source: Callable[[Writer, Derivative], list[str]]) -> Generated | None:
    def make(call: BoundProgram) -> Generated:
        derivative = derive(call.program, wanted)
        return generated(entry, source(_writer(derivative.program, call, extents_of(p), p.dtype == torch.float32, False), derivative))

    _, call, _ = _inner(p)
    return None if call is None or not wanted else function_of(f"{entry} {sorted(wanted)}", call, p, make)


def function_of(kind: str, call: BoundProgram, p: Problem, make: Callable[[BoundProgram], Generated | None]) -> Generated | None:
    """What is generated depends on the program, and on what its integers and the lengths let the bounds prove."""
    places = tuple((t.shape, t.stride()) for t in call.captures)
    key = (kind, call.program.text, call.ints, places, extents_of(p), p.dtype == torch.float32)
    known = _functions.get(key)
    if known is None:
        if len(_functions) >= MAX_FUNCTIONS:
            _functions.clear()
        known = _functions[key] = (make(call),)
    return known[0]


def extents_of(p: Problem) -> Extents:
    return Extents(p.batch, p.heads, p.q_len, p.kv_len)


def _writer(program: Program, call: BoundProgram, extents: Extents, precise: bool, split_index: bool) -> Writer:
    return Writer(program, Facts(program, call, extents), layouts_of(call.captures), precise, split_index)


def _scored(entry: str, source: Callable[[Writer, str], list[str]], program: Program, call: BoundProgram, p: Problem, split_index: bool) -> Generated:
    """Scores of 16-bit inputs do not see the last bits. With split_index, an index may lie past the end of the sequence: where loads would then have to be
    clamped, two versions are generated, one for tiles that end before it and one for all."""
    precise = p.dtype == torch.float32
    inside = _writer(program, call, extents_of(p), precise, split_index)
    if split_index:
        anywhere = _writer(program, call, Extents(p.batch, p.heads, p.q_len + LARGEST_TILE, p.kv_len + LARGEST_TILE), precise, True)
        if anywhere.lines != inside.lines:
            return generated(entry, either_source(entry, source(inside, "inside"), source(anywhere, "anywhere")))
    return generated(entry, source(inside, entry))


def mod_arguments(p: Problem) -> dict[str, Any]:
    """Captures, ints, floats, and sizes and strides, of the mask and of the score."""
    return {"mask": _arguments_of(p.mask), "score": _arguments_of(p.score)}


def _arguments_of(call: BoundProgram | None) -> tuple[tuple[Any, ...], ...]:
    if call is None:
        return (), (), (), ()
    return call.captures, call.ints, call.floats, tuple([x for t in call.captures for x in (*t.shape, *t.stride())])
