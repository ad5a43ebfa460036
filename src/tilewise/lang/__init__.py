"""The mask and score language: trace a Python function, interpret it, bound it over tiles, derive it."""

from tilewise.lang.bands import Band, band_of
from tilewise.lang.bounds import Bounds
from tilewise.lang.derive import Derivative, LoadSite, derive
from tilewise.lang.distances import follows_distance
from tilewise.lang.factors import Factored, factored
from tilewise.lang.interpret import evaluate, interpret, wrapped
from tilewise.lang.intervals import Interval, point, steps
from tilewise.lang.parse import parse
from tilewise.lang.program import INDICES, BoundProgram, CaptureSpec, Program
from tilewise.lang.rewrite import gathered, in_patches, shifted
from tilewise.lang.trace import name_of, trace_mask, trace_score

__all__ = [
    "INDICES",
    "Band",
    "BoundProgram",
    "Bounds",
    "CaptureSpec",
    "Derivative",
    "Factored",
    "Interval",
    "LoadSite",
    "Program",
    "band_of",
    "derive",
    "evaluate",
    "factored",
    "follows_distance",
    "gathered",
    "in_patches",
    "interpret",
    "name_of",
    "parse",
    "point",
    "shifted",
    "steps",
    "trace_mask",
    "trace_score",
    "wrapped",
]
