"""Calls of torch's functions with symbols among their arguments: which function answers, and what it may be given."""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from tilewise.errors import TraceError
from tilewise.lang.refusals import BRANCHING, WRITING, refuse
from tilewise.lang.rows import part
from tilewise.lang.symbol import Traced
from tilewise.lang.torch_functions import FUNCTIONS, OPERATORS, where_method
from tilewise.lang.tracer import tracer_of


@dataclass(frozen=True)  # and no NamedTuple, which torch.compile cannot call before torch 2.11
class Handler:
    """One of the functions of torch_functions.py, with what torch's callers may pass to it."""

    name: str
    apply: Callable[..., Any]
    names: tuple[str, ...]  # parameters, the positional ones first
    positional: int
    required: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.fits(args, kwargs):
            given = ", ".join([*[str(type(a).__name__) for a in args], *[f"{k}={v!r}" for k, v in kwargs.items()]])
            raise refuse(f"{self.name} was called with ({given}); a mask or score function can use it as {self.name}({', '.join(self.names)})")
        return self.apply(*args, **kwargs)

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > self.positional:
            return False
        unexpected = [k for k in kwargs if k in self.names[: len(args)] or k not in self.names]
        missing = [name for name in self.names[len(args) : self.required] if name not in kwargs]
        return not unexpected and not missing


def handler(name: str, f: Callable[..., Any]) -> Handler:
    parameters = inspect.signature(f).parameters.values()
    positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in (*positional, *(p for p in parameters if p.kind == p.KEYWORD_ONLY))]
    return Handler(name, f, tuple(names), len(positional), sum(p.default is p.empty for p in positional))


def _by_function() -> dict[Any, Handler]:
    """The tables by torch's own function objects, under every name torch gives them, and Python's operators, which torch.export names itself."""
    found: dict[Any, Handler] = {}
    for name, f in (FUNCTIONS | OPERATORS).items():
        h = handler(name, f)
        for home in (operator, torch, torch.Tensor, torch.nn.functional, torch.special):
            function = getattr(home, name, None)
            if callable(function) and not isinstance(function, type):
                found.setdefault(function, h)
    found[torch.Tensor.where] = handler("where", where_method)
    return found


BY_FUNCTION = _by_function()
# Some operators of tensors are functions written in Python. Dynamo makes such a function anew whenever an operator calls it: no dictionary finds it, `is` does.
IN_PYTHON = tuple([(f, h.name) for f, h in BY_FUNCTION.items() if isinstance(f, FunctionType) and f.__module__ == "torch._tensor"])
WRITTEN = {name: BY_FUNCTION[f] for f, name in IN_PYTHON}  # by name, because before torch 2.11 Dynamo takes a handler only from a global dictionary
SHAPES = {torch.Tensor.dim: "dim", torch.Tensor.size: "size", torch.Tensor.__len__: "__len__"}  # asked of a row under torch.compile
CUSTOM_OPERATORS = {"approx.tanh": BY_FUNCTION[torch.tanh]}  # the name users know a hardware tanh by; here it is exact


INSTEAD = {"hypot": "torch.sqrt(x * x + y * y)", "cumsum": "the sum before the call, and load from it"}


def unknown(name: str) -> TraceError:
    if name.endswith("_") and not name.startswith("__"):
        return refuse(f"{name} changes a value in place; use {name[:-1]} and keep its result")
    hint = f"; write {INSTEAD[name]}" if name in INSTEAD else ""
    return refuse(f"the operation {name!r} is not part of the mask and score language{hint}; it has Python's operators and {', '.join(sorted(FUNCTIONS))}")


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function was called with a symbol among its arguments."""
    if func in (torch.Tensor.__getitem__, operator.getitem):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return args[0][index] if isinstance(args[0], Traced) else tracer_of(index).load(args[0], index)  # type: ignore[index]  # all that is traced has it
    if func in SHAPES:
        return getattr(args[0], SHAPES[func])(*args[1:], **kwargs)
    if func is torch.Tensor.__setitem__ or kwargs.get("out") is not None:
        raise refuse(WRITING)
    if func in (torch.Tensor.__contains__, torch.Tensor.__bool__):
        raise refuse(BRANCHING)
    found = _handler_of(func)
    if found is None and isinstance(func, torch._ops.OpOverloadPacket):
        found = CUSTOM_OPERATORS.get(str(func))
        if found is None:
            raise unknown(f"torch.ops.{func}")
    if found is None:
        raise unknown(func.__name__)
    return found(args, {k: v for k, v in kwargs.items() if k != "out"})


def _handler_of(func: Any) -> Handler | None:
    if torch.compiler.is_dynamo_compiling():
        for known, name in IN_PYTHON:
            if func is known:
                return WRITTEN[name]
    return BY_FUNCTION.get(func)


# -- what symbols get from here --------------------------------------------------------------------------------------
# The functions are made of symbols, so the classes of symbols, defined before them, cannot name them.


def _torch_function(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    return called(func, args, kwargs or {})


def _missing(self: Traced, name: str) -> Any:
    if name.startswith("__"):  # a protocol that Python or a library asks for
        raise AttributeError(name)
    raise unknown(name)


METHODS = {name: BY_FUNCTION[getattr(torch.Tensor, name)] for name in FUNCTIONS if hasattr(torch.Tensor, name)}
METHODS |= {name: handler("@", OPERATORS[name]) for name in ("__matmul__", "__rmatmul__")}


def _method(name: str) -> Callable[..., Any]:
    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        return METHODS[name]((self, *args), kwargs)

    method.__name__ = name
    return method


def _getitem(self: Traced, index: Any) -> Any:
    return part(self, index if isinstance(index, tuple) else (index,))


Traced.__torch_function__ = classmethod(_torch_function)
setattr(Traced, "__getattr__", _missing)  # noqa: B010  # set here, since values do not know torch's functions
setattr(Traced, "__getitem__", _getitem)  # noqa: B010  # likewise
for _name in METHODS:
    setattr(Traced, _name, _method(_name))
