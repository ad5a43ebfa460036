"""Choosing an engine: an ordered list, the first that accepts, and why each other one refused."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.core import store
from tilewise.core.problem import Problem
from tilewise.engines import ENGINES, Engine, Request, engine_named
from tilewise.errors import BackendError, meant

logger = logging.getLogger("tilewise")

# What users ask for by intent, besides an engine's own name.
INTENTS = {
    "auto": "the fastest engine that can serve the call",
    "flex": "programmable: the best fused engine for the device, any mask and score",
    "flash": "fused: plain or causal attention without a score",
    "math": "dense and plain, the reference",
}
VARIABLE = "TILEWISE_BACKEND"
_VARIABLE_IN_ENVIRON = os.environ.encodekey(VARIABLE)


class Verdict(NamedTuple):
    """What one engine said of a problem; reason is None if it can serve it."""

    engine: str
    reason: str | None


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
        raise BackendError(f"unknown backend {name!r} (from {source}); allowed are {', '.join(names())}{meant(name, names())}")


def requested_backend(argument: str | None) -> tuple[str, str]:
    """The backend's name and who named it: the argument, then the scope, then the environment, then auto."""
    if argument is not None:
        return argument, "the backend argument"
    if _scope.backend is not None:
        return _scope.backend, "attention_backend(...)"
    set_names = getattr(os.environ, "_data", None)  # to ask os.environ itself takes a microsecond: it encodes the name first
    if set_names is None or _VARIABLE_IN_ENVIRON in set_names:
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


def candidates(backend: str) -> tuple[Engine, ...]:
    """The engines a backend name stands for, in the order in which they are asked: one of that name, or all that serve the intent."""
    return _candidates[backend]


def _serving(intent: str) -> tuple[Engine, ...]:
    return tuple(sorted([e for e in ENGINES if intent in e.serves], key=lambda e: e.serves[intent]))


_candidates = {intent: _serving(intent) for intent in INTENTS}
_candidates |= {e.name: (e,) for e in ENGINES}


TAKES_DENSE_MASK = frozenset([name for name in names() if all([e.takes_dense_mask for e in candidates(name)])])
"""Backends that hand a mask tensor on as it is, whatever the problem."""
TAKES_MASKS = frozenset([name for name in names() if name != "flash" and any([e.takes_masks for e in candidates(name)])])
"""Backends that take masks other than the causal one."""


def reason_against(engine: Engine, problem: Problem, request: Request) -> str | None:
    """Why an engine is passed over: what the request rules out, what the engine cannot do, and whom it leaves the problem to."""
    if request.backend == "flash" and (problem.score is not None or problem.sinks is not None):
        return "'flash' is attention without a score or sinks; use 'flex'"
    if request.backend == "flash" and problem.mask is not None and not problem.is_causal_only:
        return "'flash' is plain or causal attention; use 'flex' for other masks"
    if problem.dense_mask is not None and not engine.takes_dense_mask:
        return "it takes no mask tensor as it is"
    if problem.pages is not None and not engine.takes_pages:
        return "it takes no keys and values in pages"
    reason = engine.refuse_request(problem, request) or engine.refuse(problem)
    if reason is None and engine.name != request.backend:  # an engine that was asked for by name leaves the problem to nobody
        reason = engine.defers(problem, tuple([e for e in candidates(request.backend) if e is not engine]))
    return reason


def must_choose(problem: Problem, request: Request) -> tuple[Engine, Choice]:
    """The engine for a call and how it was chosen, or an error with every reason."""
    choice = choose(problem, request)
    if choice.engine is None:
        raise BackendError(refusal(choice, request, problem))
    if len(choice.verdicts) > 1 and not torch.compiler.is_compiling():
        for option, engine in ruling_options(choice, problem, request):
            store.warn_once(f"{option} rules out {engine!r}; using {choice.engine.name!r}. See tilewise.explain")
    return choice.engine, choice


def ruling_options(choice: Choice, problem: Problem, request: Request) -> list[tuple[str, str]]:
    """Options without which an engine that comes earlier in the order would have been chosen, and that engine."""
    without: dict[str, tuple[Problem, Request]] = {}
    if problem.deterministic:
        without["deterministic=True"] = problem.replaced(deterministic=False), request
    if problem.dropout_p > 0:
        without["dropout_p"] = problem.replaced(dropout_p=0.0, seed=None), request._replace(seeded=False)
    if request.needs_lse:
        without["return_lse=True"] = problem, request._replace(needs_lse=False)
    if problem.tiles is not None and problem.mask is not None:  # bare tiles are a mask themselves
        without["the given tile map"] = problem.replaced(tiles=None), request
    skipped = [v.engine for v in choice.verdicts if v.reason is not None]
    return [(option, engine) for engine in skipped for option, other in without.items() if reason_against(engine_named(engine), *other) is None]


def tell_observers(engine: Engine, problem: Problem, mask_name: str) -> None:
    for observer in tuple(observers):
        observer(Served(engine.name, problem, mask_name))


def refusal(choice: Choice, request: Request, problem: Problem) -> str:
    reasons = "; ".join([f"{v.engine}: {v.reason}" for v in choice.verdicts if v.reason is not None])
    told = "" if problem.pages is not None else "; tilewise.explain(...) tells which"
    advice = "" if request.backend == "auto" else f". 'auto' takes an engine that can{told}"
    return f"backend {request.backend!r} (from {request.source}) cannot serve {problem.describe()}. {reasons}{advice}"


def is_logged() -> bool:
    return logger.isEnabledFor(logging.INFO)


_logged: set[str] = set()
MOST_LOGGED = 10_000  # lines that are remembered


def log(choice: Choice, problem: Problem, mask_name: str) -> None:
    """One INFO line for every kind of call: a training loop that makes the same call at every step is told of it once."""
    if torch.compiler.is_compiling() or not is_logged():
        return
    assert choice.engine is not None
    skipped = "; ".join(f"{v.engine} ({v.reason})" for v in choice.verdicts if v.reason is not None)
    line = f"using {choice.engine.name} for {problem.describe()}, mask {mask_name}{f'; skipped {skipped}' if skipped else ''}"
    if line not in _logged:
        if len(_logged) >= MOST_LOGGED:
            _logged.clear()
        _logged.add(line)
        logger.info("%s", line)
