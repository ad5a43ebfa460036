"""What a call is known by in the call cache.

Everything that the checks, the tracing and the choice of an engine depend on: shapes, strides, dtypes, alignment, options, torch's switches,
whether gradients are wanted, and the mask and score functions. A function is known by its code and by what its closure, defaults and
globals hold: numbers by value, tensors by identity, address, shape, strides, dtype and requires_grad. What cannot be known that way (an object
with attributes, a list, a module, a name that is not known to be safe, a function that computes with tensors while it is traced, a tensor whose
memory does not hold its values: memory.py) has no key, and such a call is traced and planned every time. What tensors *contain* is no part of it:
maps made from that have a key of their own (core/map_cache.py).
"""

import dis
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

from tilewise.core.problem import Options
from tilewise.core.tf32 import allows_tf32
from tilewise.engines.base import PLAIN
from tilewise.lang.torch_functions import FUNCTIONS
from tilewise.lang.types import DTYPE_OF
from tilewise.masks import Mask
from tilewise.memory import is_lazy
from tilewise.scores import Score, Sinks
from tilewise.tiles import TileMap

MAX_CODES = 512  # whose names are remembered
MAX_DEPTH = 8  # functions within functions
VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)
CONSTANT_MODULES = (torch, math, operator, torch.nn.functional)
# Names besides globals that a function may use and still be known by its code: what they give follows from their operands alone. Any other (an attribute
# somebody set, `eval`, `open`, `globals`, torch.is_grad_enabled, a module imported inside) may give something else at the next call.
BUILTINS = [
    "abs",
    "all",
    "any",
    "append",
    "bool",
    "divmod",
    "enumerate",
    "float",
    "int",
    "isinstance",
    "len",
    "max",
    "min",
    "pow",
    "range",
    "reversed",
    "round",
    "slice",
    "sum",
    "tuple",
    "zip",
]
# What a tensor is known by, and the way to torch's functions.
TENSORS = ["device", "dim", "dtype", "functional", "ndim", "nn", "numel", "shape", "size", "special"]
SAFE_NAMES = frozenset([*FUNCTIONS, *dir(math), *dir(operator), *BUILTINS, *TENSORS, *[str(dtype).removeprefix("torch.") for dtype in DTYPE_OF.values()]]) - {
    "attrgetter",
    "methodcaller",
}


class CallKey(NamedTuple):
    """What a call is known by, and the tensors and the map that its mask and score hold.

    The key has ids of code objects, maps and tensors. Ids get reused, so those that are `watched` must be the same objects: code, maps, and the mask's
    tensors, whose contents plans depend on. Of a score's tensors they depend on what the key says, and on nothing else, so these are not watched:
    torch.utils.swap_tensors refuses tensors that are weakly referenced.
    """

    key: tuple[Any, ...]
    held: tuple[Any, ...]
    watched: tuple[Any, ...]


_kinds: dict[torch.device, str] = {}
_names_of: dict[int, "_Names"] = {}


def key_of(query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str, needs_lse: bool) -> CallKey | None:
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
    try:
        at, kv_at, v_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
    except RuntimeError:  # sparse
        return None
    if query.is_neg() or key.is_neg() or value.is_neg() or not (at and kv_at and v_at):  # lazy ones, and empty ones: they are resolved for every call
        return None
    kind = _kinds.get(device) or _kinds.setdefault(device, device.type)  # to ask a device for its type takes longer
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is not dtype:
        return None
    known: tuple[Any, ...] = (
        backend,
        needs_lse,
        device,
        dtype,
        options[:5],
        repr(options.scale) if options.scale == 0.0 else None,  # 0.0 == -0.0
        options.seed is None,
        torch.are_deterministic_algorithms_enabled(),
        dtype is torch.float32 and allows_tf32(),
        shape,
        query.stride(),
        kv_shape,
        key.stride(),
        value.shape,
        value.stride(),
        at & 15,
        kv_at & 15,
        v_at & 15,
        torch.is_grad_enabled(),
        query.requires_grad,
        key.requires_grad,
        value.requires_grad,
    )
    if mask is None and score is None:
        return CallKey(known, (), ())
    parts: list[Any] = [known]
    held: list[Any] = []
    watched: list[Any] = []
    if not _add(mask, parts, held, watched, MAX_DEPTH) or (held and Parameter in map(type, held)):  # their contents have no key (core/map_cache.py)
        return None
    watched += held  # of the mask
    if not _add(score, parts, held, watched, MAX_DEPTH):
        return None
    return CallKey(tuple(parts), tuple(held), tuple(watched))


def _add(value: Any, parts: list[Any], held: list[Any], watched: list[Any], depth: int) -> bool:
    """Add what a value is known by; False if that cannot be told."""
    kind = type(value)
    parts.append(kind)
    if kind in VALUES:
        parts.append(repr(value) if kind is float and value == 0.0 else value)  # 0.0 == -0.0
        return True
    if kind is FunctionType:
        return depth > 0 and _add_function(value, parts, held, watched, depth - 1)
    if kind in PLAIN:
        if value.is_inference() or (depth == MAX_DEPTH and value.is_floating_point()):  # an additive mask: its contents decide how it is read
            return False
        try:
            at = value.data_ptr()
        except RuntimeError:  # sparse
            return False
        if value.is_neg() or not at:  # lazy: what is computed with is a copy
            return False
        parts += (id(value), at, value.shape, value.stride(), value.dtype, value.requires_grad)
        held.append(value)
        return not value.__dict__ or _add_attributes(value, parts, held, watched, depth)
    if kind is TileMap:
        if value.mask is not None and any([is_lazy(t) for t in value.mask.captures]):
            return False
        parts.append(id(value))
        held.append(value)
        return True
    if kind is Sinks:
        return _add(value.logits, parts, held, watched, depth - 1)
    if kind is Mask:
        parts += (value.grid, value.covers)  # the sizes it is made for are checked once
        return _add(value.function, parts, held, watched, depth)
    if kind is Score:
        parts.append(value.covers)
        return _add(value.function, parts, held, watched, depth)
    if kind is tuple or (kind is list and depth == MAX_DEPTH):  # a list only of scores: any other may change
        parts.append(len(value))
        return depth > 0 and all([_add(v, parts, held, watched, depth if depth == MAX_DEPTH else depth - 1) for v in value])
    if kind is partial:
        parts += (len(value.args), *value.keywords)
        return all([_add(v, parts, held, watched, depth - 1) for v in (value.func, *value.args, *value.keywords.values())])
    return False


class _Names(NamedTuple):
    """What a function looks up outside itself."""

    code: CodeType  # by whose id they are found
    of_globals: tuple[str, ...]
    safe_attributes: bool


def _add_function(function: FunctionType, parts: list[Any], held: list[Any], watched: list[Any], depth: int) -> bool:
    code = function.__code__
    parts.append(id(code))  # to hash a code object takes longer than all the rest
    watched.append(code)
    for cell in function.__closure__ or ():
        try:
            found = cell.cell_contents
        except ValueError:  # not yet assigned
            return False
        if not _add(found, parts, held, watched, depth):
            return False
    for default in function.__defaults__ or ():
        if not _add(default, parts, held, watched, depth):
            return False
    if function.__kwdefaults__:
        return False
    if function.__dict__ and not _add_attributes(function, parts, held, watched, depth):
        return False
    known = _names_of.get(id(code))
    if known is None or known.code is not code:
        if len(_names_of) >= MAX_CODES:
            _names_of.clear()
        of_globals, of_attributes = _names(code)
        known = _names_of[id(code)] = _Names(code, tuple(sorted(of_globals)), of_attributes <= SAFE_NAMES)
    if not known.safe_attributes:
        return False
    for name in known.of_globals:
        found = function.__globals__.get(name, _names_of)
        if found is _names_of:  # a builtin
            if name not in SAFE_NAMES:
                return False
            continue
        if type(found) is ModuleType:
            if found not in CONSTANT_MODULES:
                return False
        elif not _add(found, parts, held, watched, depth):
            return False
    return True


def _add_attributes(owner: Any, parts: list[Any], held: list[Any], watched: list[Any], depth: int) -> bool:
    """What a function or a tensor was given by `owner.name = ...`: even a safe name may be one of them."""
    parts.append(len(owner.__dict__))
    for name, value in owner.__dict__.items():
        parts.append(name)
        if depth <= 0 or not _add(value, parts, held, watched, depth - 1):
            return False
    return True


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Names that a function may look up among its globals and builtins, and as attributes (or import); those of the functions it makes included."""
    of_globals: set[str] = set()
    others: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            (of_globals if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else others).add(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for names, more in zip((of_globals, others), _names(inner), strict=True):
                names |= more
    return of_globals, others
