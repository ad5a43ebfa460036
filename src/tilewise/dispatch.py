"""Choosing an engine: an ordered list, the first that accepts, and why each other one refused."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise import store
from tilewise.engines import ENGINES, Engine, engine_named, is_plain
from tilewise.errors import BackendError
from tilewise.problem import Problem

logger = logging.getLogger("tilewise")

# What users ask for by intent, besides an engine's own name.
INTENTS = {
    "auto": "the fastest engine that can serve the call",
    "flex": "programmable: the best fused engine for the device, any mask and score",
    "flash": "fused: plain or causal attention without a score",
    "math": "dense and plain, the reference",
}
CANDIDATES = {"flex": ("gluon", "triton", "cpp", "blocked"), "flash": ("gluon", "triton", "cpp", "native", "blocked"), "math": ("reference",)}
VARIABLE = "TILEWISE_BACKEND"
WORTH_HOPPER = 8e9  # FLOPs, about 20 microseconds of GPU time: below that the host's time counts, and two kernels take 20 more of it than one


class Verdict(NamedTuple):
    """What one engine said of a problem; reason is None if it can serve it."""

    engine: str
    reason: str | None


class Request(NamedTuple):
    """What was asked of an engine beyond the problem itself."""

    backend: str
    source: str  # where the backend was named
    needs_lse: bool
    seeded: bool  # the user fixed the dropout's seed


@dataclass(frozen=True)
class Choice:
    engine: Engine | None
    verdicts: tuple[Verdict, ...]


class Served(NamedTuple):
    """One call and the engine it was given to."""

    engine: str
    problem: Problem
    mask: str


observers: list[Callable[[Served], None]] = []  # told of every call outside torch.compile, on the thread that makes it


class _Scope(threading.local):
    def __init__(self) -> None:
        self.backend: str | None = None


_scope = _Scope()


@contextmanager
def attention_backend(name: str) -> Iterator[None]:
    """Use a backend for every call inside the `with` block, on this thread."""
    check_name(name, "attention_backend")
    before = _scope.backend
    _scope.backend = name
    try:
        yield
    finally:
        _scope.backend = before


def names() -> list[str]:
    """Every name a backend can be asked for by."""
    return [*INTENTS, *[e.name for e in ENGINES]]


def check_name(name: str, source: str) -> None:
    if name not in names():
        raise BackendError(f"unknown backend {name!r} (from {source}); allowed are {', '.join(names())}")


def requested_backend(argument: str | None) -> tuple[str, str]:
    """The backend's name and who named it: the argument, then the scope, then the environment, then auto."""
    if argument is not None:
        return argument, "the backend argument"
    if _scope.backend is not None:
        return _scope.backend, "attention_backend(...)"
    variable = os.environ.get(VARIABLE)
    if variable:
        return variable, VARIABLE
    return "auto", "the default"


def choose(problem: Problem, request: Request, *, ask_all: bool = False) -> Choice:
    """Ask the candidates in order, up to the first that accepts, or all of them."""
    verdicts: list[Verdict] = []
    chosen: Engine | None = None
    for engine in candidates(request.backend):
        reason = reason_against(engine, problem, request)
        verdicts.append(Verdict(engine.name, reason))
        if reason is None and chosen is None:
            chosen = engine
            if not ask_all:
                break
    return Choice(chosen, tuple(verdicts))


def candidates(backend: str) -> list[Engine]:
    """The engines a backend name stands for, in order."""
    if backend == "auto":
        return [e for e in ENGINES if e.name != "reference"]
    wanted = CANDIDATES.get(backend, (backend,))
    return [e for name in wanted for e in ENGINES if e.name == name]


def reason_against(engine: Engine, problem: Problem, request: Request) -> str | None:
    """Why an engine is passed over: what the request rules out, then what the engine itself cannot do."""
    if request.backend == "flash" and (problem.score is not None or problem.sinks is not None):
        return "'flash' is attention without a score or sinks; use 'flex'"
    if request.backend == "flash" and problem.mask is not None and not problem.is_causal_only:
        return "'flash' is plain or causal attention; use 'flex' for other masks"
    if engine.name == "native":
        if request.needs_lse:
            return "SDPA does not return lse"
        if problem.dropout_p > 0 and request.backend != "native":
            return "SDPA draws its own random numbers for dropout, so only backend='native' uses them"
        if problem.dropout_p > 0 and request.seeded:
            return "SDPA's dropout takes no seed"
    reason = engine.refuse(problem)
    if reason is None and engine.name != request.backend:  # what follows does not count if the engine was asked for by name
        if engine.name == "native" and problem.mask is not None:
            return _leak(problem)
        if engine.name == "native" and problem.dtype.itemsize == 2 and engine_named("cpp").refuse(problem) is None:
            return "the C++ engine computes 16-bit inputs faster, and their gradients several times as fast"
        if engine.name == "gluon" and problem.flops < WORTH_HOPPER:
            return "so small a problem starts sooner on the Triton engine"
    return reason


def _leak(problem: Problem) -> str | None:
    """Why SDPA would not keep masked keys out: it multiplies them by 0, and 0 * NaN is NaN."""
    if not problem.is_causal_only:
        return "SDPA lets NaN in masked keys through, so it gets a mask tensor only when asked for by name"
    if engine_named("cpp").refuse(problem) is None:
        return "SDPA lets NaN in masked keys through; the C++ engine keeps them out and is no slower"
    if problem.device.type != "cpu" or not is_plain(problem):
        return "SDPA lets NaN in masked keys through and nobody can look for them now, so it gets a causal mask only when asked for by name"
    if not all([bool(t.detach().sum(dtype=problem.inner_dtype).isfinite()) for t in (problem.key, problem.value)]):
        return "key or value holds NaN or Inf (or values near the end of its range), which SDPA lets through a causal mask"
    return None


def must_choose(problem: Problem, request: Request) -> tuple[Engine, Choice]:
    """The engine for a call and how it was chosen, or an error with every reason."""
    choice = choose(problem, request)
    if choice.engine is None:
        raise BackendError(refusal(choice, request, problem))
    if len(choice.verdicts) > 1 and not torch.compiler.is_compiling():
        for option, engine in costly_options(choice, problem, request):
            store.warn_once(f"{option} costs the engine {engine!r}, which would serve the call without it; {choice.engine.name!r} does. See tilewise.explain")
    return choice.engine, choice


def costly_options(choice: Choice, problem: Problem, request: Request) -> list[tuple[str, str]]:
    """Options without which an engine that comes earlier in the order would have been chosen, and that engine."""
    without: dict[str, tuple[Problem, Request]] = {}
    if problem.deterministic:
        without["deterministic=True"] = problem.with_tensors(deterministic=False, memory={}), request
    if problem.dropout_p > 0:
        without["dropout_p"] = problem.with_tensors(dropout_p=0.0, seed=None, memory={}), request._replace(seeded=False)
    if request.needs_lse:
        without["return_lse=True"] = problem, request._replace(needs_lse=False)
    if problem.tiles is not None and problem.mask is not None:  # bare tiles are a mask themselves
        without["the given tile map"] = problem.with_tensors(tiles=None, memory={}), request
    skipped = [v.engine for v in choice.verdicts if v.reason is not None]
    return [(option, engine) for engine in skipped for option, other in without.items() if reason_against(engine_named(engine), *other) is None]


def tell_observers(engine: Engine, problem: Problem, mask_name: str) -> None:
    for observer in tuple(observers):
        observer(Served(engine.name, problem, mask_name))


def refusal(choice: Choice, request: Request, problem: Problem) -> str:
    reasons = "; ".join([f"{v.engine}: {v.reason}" for v in choice.verdicts if v.reason is not None])
    advice = "" if request.backend == "auto" else ". 'auto' takes an engine that can; tilewise.explain(...) tells which"
    return f"backend {request.backend!r} (from {request.source}) cannot serve {problem.describe()}. {reasons}{advice}"


def is_logged() -> bool:
    return logger.isEnabledFor(logging.INFO)


def log(choice: Choice, problem: Problem, mask_name: str) -> None:
    if torch.compiler.is_compiling() or not is_logged():
        return
    assert choice.engine is not None
    skipped = "; ".join(f"{v.engine} ({v.reason})" for v in choice.verdicts if v.reason is not None)
    logger.info("using %s for %s, mask %s%s", choice.engine.name, problem.describe(), mask_name, f"; skipped {skipped}" if skipped else "")
