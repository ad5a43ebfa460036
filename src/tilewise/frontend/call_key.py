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
from torch._C import _get_deterministic_algorithms, _get_flash_sdp_enabled, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import Parameter

from tilewise.core.pages import Pages
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
MAX_DESCRIPTIONS = 512  # of fixed masks and scores
MAX_DEPTH = 8  # functions within functions
VALUES = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])
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

    The key has ids of tensors and maps. Ids get reused, so those that are `watched` must be the same objects: maps, and the mask's tensors, whose contents
    plans depend on. Of a score's tensors they depend on what the key says, and on nothing else, so these are not watched: torch.utils.swap_tensors
    refuses tensors that are weakly referenced.
    """

    key: tuple[Any, ...]
    held: tuple[Any, ...]
    watched: tuple[Any, ...]


class _Code:
    """A code object as part of a key, and the names it looks up outside itself. Known by identity: to hash a code object takes longer than all the rest.

    Keys hold it, and it holds the code, so that neither can be mistaken for a later one.
    """

    __slots__ = ("code", "of_globals", "safe_attributes")

    def __init__(self, code: CodeType) -> None:
        of_globals, of_attributes = _names(code)
        self.code, self.of_globals, self.safe_attributes = code, tuple(sorted(of_globals)), of_attributes <= SAFE_NAMES


class _Description:
    """All that a fixed mask or score is known by but its tensors, as one object: equal descriptions are the same object, while both are remembered."""


class _Described(NamedTuple):
    """What a fixed mask or score keeps: its description, and the tensors and maps it reads, each once, whose facts are read in every call."""

    description: _Description
    held: tuple[Any, ...]


_kinds: dict[torch.device, str] = {}
_codes: dict[int, _Code] = {}
_descriptions: dict[tuple[Any, ...], _Description] = {}


def key_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, score: Any, options: Options, backend: str, needs_lse: bool, pages: Pages | None = None
) -> CallKey | None:
    """What a call is known by; None if it cannot be."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0 or peek_interpreter_stack() is not None:
        return None
    device, dtype = query.device, query.dtype
    if not (type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN) or forward_ad._current_level >= 0:
        return None
    stored = dtype if pages is None else key.dtype  # pages may be float8
    if key.dtype is not stored or value.dtype is not stored or key.device != device or value.device != device:
        return None
    shape, kv_shape = query.shape, key.shape
    if len(shape) != 4 or (shape[0] != kv_shape[0] and pages is None):
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
    scale, dropout_p, is_causal, enable_gqa, deterministic, seed, max_scores = options
    known: tuple[Any, ...] = (
        backend,
        needs_lse,
        device,
        dtype,
        scale if scale != 0.0 else repr(scale),  # 0.0 == -0.0
        dropout_p,
        is_causal,
        enable_gqa,
        deterministic,
        seed is None,
        max_scores,
        _get_deterministic_algorithms(),
        dtype is torch.float32 and allows_tf32(),
        _get_flash_sdp_enabled(),
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
        None if pages is None else (stored, pages.size, pages.all_attended, pages.v_scale, _where(pages.table), _where(pages.lengths)),
    )
    if score is None or (type(score) is list and not score):
        score = None
        if mask is None:
            return CallKey(known, (), ())
        described = (mask.described or _describe(mask)) if type(mask) is Mask and mask.fixed else None
        if described is not None:
            return _key_of_described(known, described)
    parts: list[Any] = [known]
    held: list[Any] = []
    if not _add(mask, parts, held, MAX_DEPTH) or (held and Parameter in map(type, held)):  # their contents have no key (core/map_cache.py)
        return None
    watched = tuple(held)  # of the mask
    if score is not None and not _add(score, parts, held, MAX_DEPTH):
        return None
    for n, thing in enumerate(held):
        if type(thing) is Sinks:
            held[n] = thing.logits
            if not _add_form(thing.logits, parts):
                return None
        elif not _add_facts(thing, parts):
            return None
    if len(held) > 1:
        ids = [id(thing) for thing in held]
        parts.append(None if len(set(ids)) == len(ids) else tuple(ids))  # a tensor with two places (sinks, too) may be two tensors in the next call
    return CallKey(tuple(parts), tuple(held), watched)


def _where(t: Tensor) -> tuple[Any, ...]:
    """Of a table or lengths of pages, which are plain int32: plans hold their addresses, and nothing of what they contain."""
    return t.data_ptr(), t.shape, t.stride()


def _key_of_described(known: tuple[Any, ...], mask: _Described) -> CallKey | None:
    """Of a call with a fixed mask and without a score: as key_of would find it, in fewer steps."""
    parts: list[Any] = [known, mask.description]
    for thing in mask.held:
        if type(thing) is Parameter or not _add_facts(thing, parts):
            return None
    return CallKey(tuple(parts), mask.held, mask.held)


def _add(value: Any, parts: list[Any], held: list[Any], depth: int) -> bool:
    """Add what a value is known by; False if that cannot be told. Tensors, maps and sinks are put in `held`, known by their place in it and by their facts."""
    kind = type(value)
    parts.append(kind)
    if kind is Mask or kind is Score:
        if value.fixed:
            described = value.described or _describe(value)
            if described is not None:
                parts.append(described.description)
                for thing in described.held:
                    parts.append(_place(thing, held))
                return True
        parts += (value.grid, value.covers) if kind is Mask else (value.covers,)  # the sizes it is made for are checked once
        return _add(value.function, parts, held, depth)
    if kind is FunctionType:
        return depth > 0 and _add_function(value, parts, held, depth - 1)
    if kind in VALUES:
        parts.append(repr(value) if kind is float and value == 0.0 else value)  # 0.0 == -0.0
        return True
    if kind in PLAIN:
        if depth == MAX_DEPTH and value.is_floating_point():  # an additive mask: its contents decide how it is read
            return False
        parts.append(_place(value, held))
        return not value.__dict__ or _add_attributes(value, parts, held, depth)
    if kind is TileMap or kind is Sinks:
        if kind is TileMap and value.mask is not None and any([is_lazy(t) for t in value.mask.captures]):
            return False
        parts.append(_place(value, held))
        return True
    if kind is tuple or (kind is list and depth == MAX_DEPTH):  # a list only of scores: any other may change
        parts.append(len(value))
        return depth > 0 and all([_add(v, parts, held, depth if depth == MAX_DEPTH else depth - 1) for v in value])
    if kind is partial:
        parts += (len(value.args), *value.keywords)
        return all([_add(v, parts, held, depth - 1) for v in (value.func, *value.args, *value.keywords.values())])
    return False


def _place(thing: Any, held: list[Any]) -> int:
    for place, other in enumerate(held):
        if other is thing:
            return place
    held.append(thing)
    return len(held) - 1


def _add_facts(thing: Any, parts: list[Any]) -> bool:
    """What may change about a tensor while it stays the same object (`.data = ...` does that); False if its contents cannot be known."""
    if type(thing) is TileMap:
        parts.append(id(thing))
        return True
    if type(thing) not in PLAIN or thing.is_inference():
        return False
    try:
        at = thing.data_ptr()
    except RuntimeError:  # sparse
        return False
    if thing.is_neg() or not at:  # lazy: what is computed with is a copy
        return False
    parts += (id(thing), at, thing.shape, thing.stride(), thing.dtype, thing.requires_grad)
    return True


def _add_form(logits: Any, parts: list[Any]) -> bool:
    """Sinks are handed to kernels with query, key and value, and known like these: those of all layers make one call. Nothing is made of what they hold."""
    if type(logits) not in PLAIN or logits.layout != torch.strided or is_lazy(logits):
        return False
    at = logits.data_ptr()
    if not at:  # freed: an error, which is told where all arguments are checked
        return False
    parts += (logits.device, at & 15, logits.shape, logits.stride(), logits.dtype, logits.requires_grad)
    return True


def _describe(value: Mask | Score) -> _Described | None:
    """What a fixed mask or score keeps (`Named.described`), found out once: what its function reads never changes, and its tensors stay the same objects.

    A function that cannot be described by what it holds is known by the object that it belongs to, if that is a mask that was traced: it is not traced again,
    and so what counts is what the trace loads from. None for others.
    """
    parts: list[Any] = [value.grid if type(value) is Mask else None, value.covers]
    held: list[Any] = []
    if _add(value.function, parts, held, MAX_DEPTH):
        if len(_descriptions) >= MAX_DESCRIPTIONS:
            _descriptions.clear()
        description = _descriptions.setdefault(tuple(parts), _Description())
    elif type(value) is Mask and value.is_traced:
        description, held = _Description(), list({id(t): t for t in value.traced().captures}.values())
    else:
        return None
    found = value.described = _Described(description, tuple(held))
    return found


def _add_function(function: FunctionType, parts: list[Any], held: list[Any], depth: int) -> bool:
    code = function.__code__
    known = _codes.get(id(code))
    if known is None or known.code is not code:
        if len(_codes) >= MAX_CODES:
            _codes.clear()
        known = _codes[id(code)] = _Code(code)
    if not known.safe_attributes or function.__kwdefaults__:
        return False
    parts.append(known)
    if function.__closure__ is not None:
        for cell in function.__closure__:
            try:
                found = cell.cell_contents
            except ValueError:  # not yet assigned
                return False
            if not _add(found, parts, held, depth):
                return False
    if function.__defaults__ is not None:
        for default in function.__defaults__:
            if not _add(default, parts, held, depth):
                return False
    if function.__dict__ and not _add_attributes(function, parts, held, depth):
        return False
    for name in known.of_globals:
        found = function.__globals__.get(name, _codes)
        if found is _codes:  # a builtin
            if name not in SAFE_NAMES:
                return False
            continue
        if type(found) is ModuleType:
            if found not in CONSTANT_MODULES:
                return False
        elif not _add(found, parts, held, depth):
            return False
    return True


def _add_attributes(owner: Any, parts: list[Any], held: list[Any], depth: int) -> bool:
    """What a function or a tensor was given by `owner.name = ...`: even a safe name may be one of them."""
    parts.append(len(owner.__dict__))
    for name, value in owner.__dict__.items():
        parts.append(name)
        if depth <= 0 or not _add(value, parts, held, depth - 1):
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
