"""The score function of a problem as CUDA C++, made once per structure."""

import torch

from tilewise.core.problem import Problem
from tilewise.engines.codegen import layouts_of
from tilewise.engines.cuda.emit import Writer, score_source
from tilewise.engines.facts import Extents, Facts
from tilewise.engines.gpu.generated import Generated
from tilewise.engines.gpu.mods import LARGEST_TILE, extents_of, function_of, has_score, inner_score, scales
from tilewise.lang import Band, BoundProgram, follows_distance
from tilewise.lang.program import Tape, finish

UP_TO_ONE = ("tanh", "sigmoid", "sin", "cos", "erf")  # functions whose values have a size of at most 1
NARROW = 160.0  # in base 2: scores that differ by no more need no maximum but the first key tile's, after which weights have room up to 2^190


def score_of(p: Problem) -> Generated | None:
    """None where the score is q.k times a constant, which can be applied last."""

    def make(call: BoundProgram) -> Generated:
        b, h, q, kv = extents_of(p)
        return Generated("score", score_source(_writer(call, extents_of(p)), _writer(call, Extents(b, h, q + LARGEST_TILE, kv + LARGEST_TILE))))

    return function_of("cuda score", _call(p), p, make) if has_score(p) else None


def keeps_range(p: Problem, band: Band | None) -> bool:
    """Whether a score cannot rise far above any row's first ones, or is not expected to: what follows the distance between key and query (ALiBi, tables of
    distances) falls with it as a rule, and under a causal band keys are visited from the diagonal on. Where that is wrong, time is lost, nothing else.
    Weights in float16 have no room for either."""
    if p.dtype != torch.bfloat16 or band is None or band.high > 0:
        return is_bounded(p)
    return is_bounded(p) or follows_distance(_call(p).program)


def uses_distance(p: Problem) -> bool:
    """Whether something is computed for the distance between key and query, and used for two rows."""
    return len(_writer(_call(p), extents_of(p)).distances) > 0


def is_bounded(p: Problem) -> bool:
    """Whether a score has an upper and a lower bound, and weights between them fit bfloat16's range."""
    program = _call(p).program
    return p.dtype == torch.bfloat16 and program.instructions[program.results[0]].op in UP_TO_ONE and 2.0 * scales(p)[1] <= NARROW


def _call(p: Problem) -> BoundProgram:
    return inner_score(p) or _unchanged()


def _unchanged() -> BoundProgram:
    """Of problems whose scale must be applied first."""
    tape = Tape()
    return BoundProgram(finish(tape, (tape.score("f32"),), ()), ())


def _writer(call: BoundProgram, extents: Extents) -> Writer:
    return Writer(call.program, Facts(call.program, call, extents), layouts_of(call.captures))
