"""Tile maps of problems, cut for an engine's tiles and cached: the plan's contents layer.

A map depends on its mask's program and numbers, on the sizes of the problem, and on the contents of the tensors its mask captures.
`contents_key` stands for the last: a tensor changed in place or replaced gives another key, and an unchanged one is never looked at again.
Small tensors on a CPU are known by what they hold instead (`values_key`): a model that makes the same mask anew in every step, or layer, has one map.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.core.problem import Problem
from tilewise.core.weak_cache import WeakCache
from tilewise.errors import MisuseError
from tilewise.lang import BoundProgram
from tilewise.memory import can_be_looked_at, resolved
from tilewise.tiles import Geometry, Look, Runs, TileMap, from_call

Value = TypeVar("Value")
MAX_MAPS = 64
MAX_BYTES = 2**30
MAX_VALUE_BYTES = 2**14  # of tensors that are known by their values: comparing these takes microseconds, reading a mask or making a map a hundred times as long


def exact(floats: tuple[float, ...]) -> tuple[float | str, ...]:
    """Floats as part of a key: 0.0 equals -0.0, but 1 / 0.0 does not equal 1 / -0.0."""
    return tuple([f if f != 0.0 else repr(f) for f in floats])


def contents_key(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """What the contents of tensors are known by; None if they may change unseen.

    Identity, and `_version`, which torch raises with every change in place, would do if nobody assigned to `.data`: that swaps a tensor's memory, shape,
    strides, dtype or its flag for "negated" behind both, so these are part of the key. Addresses get reused, so the memory is known by a weak reference to
    its storage, which equals another only if both are of one that lives. What writes through a pointer of its own (numpy, DLPack,
    torch.distributed) is not seen: docs/masks.md.
    Ids get reused: caches that outlive the tensors check identity too (weak_cache.py).

    In compiled code a tensor may be the buffer of one value after the other, which nothing of that shows: there, values have names, too (`naming`).

    Inference tensors have no version. A Parameter may be given another one's version with its memory by torch.utils.swap_tensors, which `Module.to` and
    `load_state_dict` use if they are told to, and which refuses tensors that are weakly referenced: so Parameters have no key, either.
    """
    known: list[Any] = []
    for t in tensors:
        if type(t) is Parameter or t.is_inference():
            return None
        known.append((id(t), t._version, t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg(), weakref.ref(t.untyped_storage())))
    if known and _running.names:
        known.append(_running.names)
    return tuple(known)


class _Running(threading.local):
    names: tuple[int, ...] = ()


_running = _Running()


@contextmanager
def naming(names: Sequence[int]) -> Iterator[None]:
    """While an operator of a compiled graph runs: which values of that graph its tensors hold. Two with one name are the same in a run of the graph."""
    _running.names = tuple(names)
    try:
        yield
    finally:
        _running.names = ()


def values_key(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """All that small tensors on a CPU hold, so that equal ones are the same, whoever made them; None for others. It depends on no object and no address."""
    size = 0
    for t in tensors:
        size += t.nbytes
        if size > MAX_VALUE_BYTES or not t.is_cpu or not can_be_looked_at(t):
            return None
    return tuple([(_bytes_of(t), t.dtype, t.shape) for t in tensors])


def _bytes_of(tensor: Tensor) -> bytes:
    """The elements in order."""
    dense = resolved(tensor.contiguous())
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)


class _Kept(NamedTuple):
    """A map without its mask, which holds the captured tensors."""

    geometry: Geometry
    partial: Runs
    full: Runs
    derived: dict[str, Any]


class MapCache:
    """The most recently used maps. Captured tensors are held weakly: the cache keeps none of them alive, and no map that lost one."""

    def __init__(self, size: int) -> None:
        self.built = 0  # how many maps were really built; tests count
        self._maps: WeakCache[_Kept] = WeakCache(size)
        self._bytes = 0  # made for maps since they were last forgotten
        self.on_clear: list[Callable[[], None]] = []  # called when everything is forgotten: others remember what was made for maps

    def get(self, call: BoundProgram, geometry: Geometry, device: torch.device, look: Look | None = None) -> TileMap:
        values = values_key(call.captures)
        contents = contents_key(call.captures) if values is None else values
        if contents is None:
            return self._build(call, geometry, device, look)
        key = (call.program.text, call.ints, exact(call.floats), contents, geometry, device)
        return self._get(key, call.captures if values is None else (), call, False, lambda: self._build(call, geometry, device, look))

    def cut(self, given: TileMap, tile: tuple[int, int]) -> TileMap:
        """A map given as bare tiles, cut smaller; known by the tensors it is made of."""
        if tile == given.tile:
            return given
        tensors = given.tensors
        contents = contents_key(tensors)
        if contents is None:
            return _recut(given, tile)
        key = ("given", contents, given.geometry, tile)
        return self._get(key, tensors, given.mask, True, lambda: _recut(given, tile))

    def _get(self, key: Any, tensors: tuple[Tensor, ...], mask: BoundProgram | None, given: bool, make: Callable[[], TileMap]) -> TileMap:
        found = self._maps.find(key, tensors)
        if found is not None:
            return TileMap(found.geometry, found.partial, found.full, mask, given=given, derived=found.derived)
        made = make()
        publish(made.device)
        self._maps.keep(key, tensors, _Kept(made.geometry, made.partial, made.full, made.derived))
        return made

    def _build(self, call: BoundProgram, geometry: Geometry, device: torch.device, look: Look | None) -> TileMap:
        refuse_capture(device)
        self.built += 1
        return from_call(call, geometry, "mask", device, look)

    def weigh(self, size: int) -> None:
        """An engine made something of this many bytes that is kept as long as its map is. When all that grows large, everything is forgotten."""
        self._bytes += size
        if self._bytes > MAX_BYTES:
            self.clear()
            self._bytes = size

    def clear(self) -> None:
        self._maps.clear()
        self._bytes = 0
        for callback in self.on_clear:
            callback()


def _recut(given: TileMap, tile: tuple[int, int]) -> TileMap:
    refuse_capture(given.device)
    return given.recut(tile)


def remembered(tile_map: TileMap, name: str, make: Callable[[], Value]) -> Value:
    """What an engine makes from a map, made once and kept with it. A given map is made of its owner's tensors, which may be changed in place: then it is made
    again."""
    contents = contents_key(tile_map.tensors) if tile_map.given else ()
    found = tile_map.derived.get(name)
    if found is None or contents is None or found[0] != contents:
        found = tile_map.derived[name] = contents, make()
    made: Value = found[1]
    return made


def refuse_capture(device: torch.device) -> None:
    """Making a map waits for the GPU, which would end a capture with an error that names neither."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MisuseError(
            "the tile map of this mask is not there yet and cannot be made while a CUDA graph is captured: call attention once before the capture, "
            "with the same mask on tensors of the same sizes (and its backward, if that is captured too). Masks that load from Parameters or inference tensors "
            "get a new map in every call: let them load from a buffer"
        )


def publish(device: torch.device) -> None:
    """Synchronise before something made on the current stream is put in a cache, where other streams find it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


maps = MapCache(MAX_MAPS)


def map_of(problem: Problem, tile: tuple[int, int], look: Look | None = None) -> TileMap | None:
    """The problem's map on tiles of this size; None where everything is attended.

    A map the user gave keeps its own tiles if these do not divide them. An engine may bring its own way to look into tiles.
    """
    given = problem.tiles
    if given is not None and given.given:
        divides = given.tile[0] % tile[0] == 0 and given.tile[1] % tile[1] == 0
        return maps.cut(given, tile) if divides else given
    if problem.mask is None:
        return None
    uses = problem.mask.program.uses  # one map serves whatever the mask does not look at
    geometry = Geometry(problem.batch if "b" in uses else 1, problem.heads if "h" in uses else 1, problem.q_len, problem.kv_len, tile)
    return maps.get(problem.mask, geometry, problem.device, look)
