"""The plan: the tile map of a problem, cut for an engine's tiles and cached.

A map depends on the contents of the tensors its mask captures. The cache knows a tensor by identity and version, so a
tensor changed in place or replaced gives a new map, and an unchanged one is never looked at again.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch

from tilewise.lang import Call
from tilewise.problem import Problem
from tilewise.tiles import Geometry, Runs, TileMap, from_call

CACHED_MAPS = 64


class MapCache:
    """The most recently used maps. Captured tensors are held weakly: the cache keeps none of them alive."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.built = 0  # how many maps were really built; tests count
        self._lock = threading.Lock()
        self._maps: OrderedDict[Any, tuple[tuple[weakref.ref[torch.Tensor], ...], Geometry, Runs, Runs]] = OrderedDict()

    def get(self, call: Call, geometry: Geometry, device: torch.device) -> TileMap:
        if any(t.is_inference() for t in call.captures):  # their changes leave no trace, so nothing may be remembered
            return self._build(call, geometry, device)
        key = (call.program.text, call.ints, call.floats, tuple((id(t), t._version) for t in call.captures), geometry, device)
        with self._lock:
            found = self._maps.get(key)
            if found is not None and all(ref() is t for ref, t in zip(found[0], call.captures, strict=True)):
                self._maps.move_to_end(key)
                return TileMap(found[1], found[2], found[3], call)
        tile_map = self._build(call, geometry, device)
        with self._lock:
            self._maps[key] = (tuple(weakref.ref(t) for t in call.captures), tile_map.geometry, tile_map.partial, tile_map.full)
            while len(self._maps) > self.size:
                self._maps.popitem(last=False)
        return tile_map

    def _build(self, call: Call, geometry: Geometry, device: torch.device) -> TileMap:
        self.built += 1
        return from_call(call, geometry, "mask", device)

    def clear(self) -> None:
        with self._lock:
            self._maps.clear()


maps = MapCache(CACHED_MAPS)


def map_of(problem: Problem, tile: tuple[int, int]) -> TileMap | None:
    """The problem's map on tiles of this size; None where everything is attended.

    A map the user gave keeps its own tiles if these do not divide them.
    """
    if problem.tiles is not None:
        given = problem.tiles
        divides = given.tile[0] % tile[0] == 0 and given.tile[1] % tile[1] == 0
        return given.recut(tile) if divides or not given.given else given
    if problem.mask is None:
        return None
    geometry = Geometry(problem.batch, problem.heads, problem.q_len, problem.kv_len, tile)
    return maps.get(problem.mask, geometry, problem.device)
