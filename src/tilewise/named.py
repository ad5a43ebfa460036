"""What masks and scores have in common: the sizes they are made for, and how they are copied and pickled.

A mask of the library is known by the function that made it and the arguments it was given, and that is what a pickle holds. One of a user's function is
pickled with the function, as Python pickles functions. A deep copy holds copies of all tensors, those in closures and bound methods included, so that a
copied model computes with its own parameters.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial, wraps
from numbers import Integral
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from tilewise.errors import InputError, TraceError
from tilewise.lang.refusals import AS_MASK, AS_SCORE

AXES = {"b": "batch elements", "h": "heads", "q": "queries", "kv": "keys"}
P = ParamSpec("P")
Kind = TypeVar("Kind", bound="Named")
Maker = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a function, its arguments and keywords
Sources = tuple[tuple[Tensor, torch.Size], ...]  # tensors, and the shapes they had
FOUND_OUT = ("_trace", "described")  # attributes that are about this very object: a copy has other tensors
NUMBERS = (int, float, bool, str, type(None))


class Covers(NamedTuple):
    """How many batch elements, heads, queries or keys a mask or score is made for.

    A larger problem would repeat the last element it knows, a smaller one would ignore the rest: both are refused.
    """

    what: str
    axis: str  # b, h, q or kv
    size: int


def covers(what: str, **sizes: int) -> tuple[Covers, ...]:
    return tuple([Covers(what, axis, size) for axis, size in sizes.items()])


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, as numbers of tokens are: Python's, numpy's, torch's symbols, or a tensor's of no dimensions. bool is none."""
    if isinstance(value, (int, torch.SymInt)):
        return not isinstance(value, bool)
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype != torch.bool and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, Integral)


def check_whole(who: str, **given: Any) -> None:
    for name, value in given.items():
        if type(value) is not int and not is_whole(value):
            raise InputError(f"{who} takes whole numbers, got {name}={value!r} ({type(value).__name__}); give an int")


class Named:
    """A function with a name, made for certain sizes."""

    function: Callable[..., Any]
    covers: tuple[Covers, ...] = ()
    made_by: Maker | str | None = None  # a string: the name of a constant in the module of its class
    fixed = False  # what the function reads never changes: numbers, and tensors that stay the same objects
    described: Any = None  # what the call cache has found out about it, if it is fixed (frontend/call_key.py)
    _sources: Sources = ()  # what it was made of

    def record(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Remember what this was made by and of."""
        self.made_by = (function, _snapshot(arguments), dict(zip(keywords, _snapshot(tuple(keywords.values())), strict=True)) if keywords else {})
        self.fixed, self._sources = _look(arguments if not keywords else (*arguments, *keywords.values()))

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raises if it is not made for so many batch elements, heads, queries and keys (by axis; those not named are not checked)."""
        for tensor, shape in self._sources:
            if tensor.shape != shape:  # by tensor.data = ..., resize_ or torch.utils.swap_tensors
                raise InputError(f"{self!r} was made of a tensor of shape {tuple(shape)}, which has shape {tuple(tensor.shape)} now: make it again")
        for what, axis, size in self.covers:
            count = sizes.get(axis, size)
            if count != size:
                raise InputError(
                    f"{what} is made for {size} {AXES[axis]}, the call has {count}: make it for as many (slice what is larger, expand a tensor of one for all)"
                )

    # -- copies and pickles ------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in FOUND_OUT}

    def __reduce__(self) -> str | tuple[Any, ...]:
        if isinstance(self.made_by, str):
            return self.made_by
        if self.made_by is not None:
            return _make, self.made_by
        return _with_state, (type(self), self._state())

    def __deepcopy__(self: Kind, memo: dict[int, Any]) -> Kind:
        if isinstance(self.made_by, str):
            return self
        made = object.__new__(type(self))
        memo[id(self)] = made  # before what it holds, which may hold it
        made.__dict__.update({name: copied(value, memo) for name, value in self._state().items()})
        return made


def named(make: Callable[P, Kind]) -> Callable[P, Kind]:
    """A function that makes masks or scores, which then know it and its arguments. If it hands on what another such function made, that one stays known."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Kind:
        found = make(*args, **kwargs)
        if found.made_by is None:
            found.record(made, args, kwargs)
        return found

    return made


def counted(call: Callable[P, Any]) -> Callable[P, Any]:
    """The __call__ of masks or scores; called with other arguments, because one was passed for the other, or called to get it, it tells what it is."""
    names = call.__code__.co_varnames[1 : call.__code__.co_argcount]

    @wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Any:
        given = len(args) + len(kwargs) - 1
        if given != len(names):
            kind, other, argument = ("mask", "score", AS_MASK) if len(names) == 4 else ("score", "mask", AS_SCORE)
            if given in (4, 5):
                raise TraceError(f"{args[0]!r} is a {kind}, not a {other}: pass it as {argument}")
            hint = "; it is given as it is, without a call" if given == 0 else ""
            raise TraceError(f"{args[0]!r} is a {kind}, a function of ({', '.join(names)}), and was called with {given} arguments{hint}")
        return call(*args, **kwargs)

    return checked


def _with_state(kind: type["Named"], state: dict[str, Any]) -> "Named":
    """Made whole: another mask may be made of it at once, where an object that holds both is unpickled."""
    made = object.__new__(kind)
    made.__dict__.update(state)
    return made


def _make(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return function(*arguments, **keywords)


def _snapshot(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, with lists as tuples: those may change."""
    holds_list = any([type(a) is list for a in arguments])  # torch 2.7 does not trace `list in map(type, arguments)`
    return tuple([tuple(a) if type(a) is list else a for a in arguments]) if holds_list else arguments


def _look(values: Sequence[Any]) -> tuple[bool, Sources]:
    """Whether something made of these values reads nothing that can change, and the tensors among them, those of its parts included."""
    fixed = True
    sources: Sources = ()
    for value in values:
        if type(value) in NUMBERS:
            continue
        if isinstance(value, Tensor):
            sources += ((value, value.shape),)
        elif isinstance(value, Named):
            fixed, sources = fixed and value.fixed, sources + value._sources
        elif isinstance(value, (tuple, list)):
            inner, more = _look(value)
            fixed, sources = fixed and inner, sources + more
        else:
            fixed = False
    return fixed, sources


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """copy.deepcopy, which leaves functions alone, but with their closures and defaults copied too."""
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is FunctionType:
        return _copied_function(value, memo)
    if type(value) is tuple:
        return tuple([copied(v, memo) for v in value])
    if type(value) is list:
        made = memo[id(value)] = []
        made.extend([copied(v, memo) for v in value])
        return made
    if type(value) is dict:
        found = memo[id(value)] = {}
        found.update({k: copied(v, memo) for k, v in value.items()})
        return found
    if type(value) is partial:
        return partial(copied(value.func, memo), *copied(value.args, memo), **copied(value.keywords, memo))
    return value if isinstance(value, ModuleType) else copy.deepcopy(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    if "<locals>" not in function.__qualname__:  # a function of a module: what it reads are globals
        return function
    cells = tuple([memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()])
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    memo[id(function)] = made
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__defaults__, made.__kwdefaults__ = copied(function.__defaults__, memo), copied(function.__kwdefaults__, memo)
    for old, new in zip(function.__closure__ or (), cells, strict=True):
        try:
            contents = old.cell_contents
        except ValueError:  # not assigned yet
            continue
        new.cell_contents = copied(contents, memo)
    return made
