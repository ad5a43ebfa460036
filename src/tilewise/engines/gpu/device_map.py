"""Tile schedules of masks that load from tensors, and of tiles chosen from data, made by kernels on the current stream.

Such a mask may be another at every step (packed documents, lengths, lists of tiles), so nothing here waits for the device: no number comes back from it,
and every size follows from shapes. That also makes it work inside a CUDA graph, whose replays then follow the tensors' contents.

Other masks are functions of the positions alone, and given maps of runs are what they are: their maps (tile_classifier.py) are made once.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.core.locks import new_lock
from tilewise.core.map_cache import contents_key, exact, maps
from tilewise.core.problem import Problem
from tilewise.core.weak_cache import WeakCache
from tilewise.engines.gpu.driver import capture_id, is_capturing, stream_of
from tilewise.engines.gpu.kernel_args import BaseConstants, BaseGeometry, OrderConstants, RowsConstants, RowsGeometry
from tilewise.engines.gpu.launch import AnyTensor, KernelLaunch, Launch, PreparedLaunch, keep_for_graphs, prepare, stretches
from tilewise.engines.gpu.limits import interpreted
from tilewise.engines.gpu.mods import extents_of, mask_of, mod_arguments
from tilewise.engines.gpu.tile_classifier import classified
from tilewise.tiles import FULL, PARTIAL, ChosenTiles, Geometry, mask_geometry, sharpened

SIZE = 16  # of a base tile: every kernel's tiles consist of whole ones
FORBIDS, ALLOWS = 1, 2  # bits of a state
COLUMNS = 512  # keys of the base tiles that a program evaluates: 64 elements a thread
CHUNK = 128  # tiles of a row, or rows of a head, looked at together
TILE = 128  # of most kernels
MAX_ELEMENTS = 2**31  # of a mask, in whole tiles: the mask bits of a pass take 256 MiB
MAX_MAPS = 64
MAX_BYTES = 2**30  # of what is kept for maps, all together
MAX_RECIPES = 256
MAX_LOOKED_AT = 2**33  # elements of a mask on top of chosen tiles; one with more is not asked which of them it forbids or allows altogether
Value = TypeVar("Value")


def is_made_on_device(p: Problem) -> bool:
    """Whether a problem's tile schedules are made here; on the meta device, whether they would be."""
    if p.device.type == "cpu" and not interpreted():
        return False
    if p.given_tiles is not None:
        return p.given_tiles.chosen is not None
    return p.mask is not None and len(p.mask.captures) > 0 and mask_elements(p) <= MAX_ELEMENTS


def mask_elements(p: Problem) -> int:
    """In whole tiles: as many bits is what the mask bits of a pass take."""
    batch, heads = _copies(p)
    return batch * heads * (-(-p.q_len // TILE) * TILE) * (-(-p.kv_len // TILE) * TILE)


def _copies(p: Problem) -> tuple[int, int]:
    """How many batches and heads have a map of their own: one serves whatever the mask does not look at."""
    assert p.mask is not None
    uses = p.mask.program.uses
    return p.batch if "b" in uses else 1, p.heads if "h" in uses else 1


class Tables(NamedTuple):
    """What kernels read of a tile schedule, in the order in which the Hopper kernels want it."""

    order: AnyTensor  # [rows] of each (batch, head), those with most tiles first
    n_tiles: AnyTensor  # [rows] tiles to visit
    n_masked: AnyTensor  # [rows] how many of them are masked: partial, or cut by the end of the sequence
    offsets: AnyTensor  # [4 rows] see kernels/primitives.py
    starts: AnyTensor  # [rows * room]
    stops: AnyTensor
    first_bits: AnyTensor  # [rows] each row's first block of mask bits


class MapForm(NamedTuple):
    """What a map is made of: base tiles of the mask's elements, or the tiles that were chosen."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    size: tuple[int, int] = (SIZE, SIZE)  # of a base tile
    forbids: int = FORBIDS  # bits of a state
    allows: int = ALLOWS
    most: int | None = None  # base tiles of a row of queries that allow something, at most
    strides: tuple[int, int] | None = None  # of states, from one head and from one row to the next, where these lie apart
    is_aligned: bool = True  # states begin at a multiple of 16 bytes
    is_masked: bool = True  # a mask decides inside tiles


class Recipe:
    """The launches that make the maps of one structure (`mask_structure`) and form, each prepared once: what differs between such maps is addresses."""

    def __init__(self, form: MapForm, device: torch.device) -> None:
        self.form, self.device = form, device
        self._launches: dict[Hashable, PreparedLaunch] = {}

    def launch(self, name: Hashable, make: Callable[[], Launch]) -> KernelLaunch:
        """`name` has to tell this launch from the others of the structure."""
        found = self._launches.get(name)
        if found is not None:
            return found
        made = prepare(make(), self.device)
        if isinstance(made, PreparedLaunch):
            self._launches[name] = made
        return made


class DeviceMap:
    """The base tiles of a map, which `write` writes, and what engines make from them.

    It may be used on several streams. Whoever uses it waits for what the last maker's stream had been given until then, and a maker is a user first: so its
    event stands for everything in here.
    """

    def __init__(self, recipe: Recipe, write: Callable[["DeviceMap"], Tensor]) -> None:
        self.recipe = recipe
        self.nbytes = 0
        self._derived: dict[Hashable, Any] = {}
        self._tensors: list[Tensor] = []
        self._lock = new_lock()
        self._stream = stream_of(recipe.device)
        self._made = torch.cuda.Event() if recipe.device.type == "cuda" else None
        self._is_recorded = False
        self._states = write(self)

    def publish(self) -> None:
        """Whoever makes several things says so when they are made: to record an event takes as long as a launch. If another stream comes before, it is
        recorded for that one."""
        with self._lock:
            self._record()

    def _record(self) -> None:
        """The event stands for everything that the maker's stream has been given."""
        if self._made is None or self._is_recorded:
            return
        stream = torch.cuda.current_stream(self.recipe.device)
        if stream.cuda_stream != self._stream:
            stream = torch.cuda.ExternalStream(self._stream, self.recipe.device)
        self._made.record(stream)
        self._is_recorded = True

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
        """Memory that is kept as long as this map."""
        return self.keep(torch.empty(shape, dtype=dtype, device=self.recipe.device))

    def keep(self, made: Tensor) -> Tensor:
        self._tensors.append(made)
        self.nbytes += made.nbytes
        return made

    def borrow(self, chosen: ChosenTiles) -> None:
        """Chosen tiles may come from another stream: their memory must not be reused before this one is done with them. A CUDA graph reads those that were
        made outside of it in every replay, so that these stay."""
        if self._made is None:
            return
        if not is_capturing(self._stream):
            chosen.states.record_stream(torch.cuda.current_stream(self.recipe.device))
        elif not chosen.in_graph:
            keep_for_graphs(chosen.states)

    def remember(self, name: Hashable, make: Callable[[], Value]) -> Value:
        """What is made from this map, now or earlier, ready for the current stream."""
        with self._lock:
            stream = stream_of(self.recipe.device)
            if stream != self._stream:
                self._record()
                self._wait()
            found: Value | None = self._derived.get(name)
            if found is None:
                self._stream, self._is_recorded = stream, False
                found = self._derived[name] = make()
            return found

    def _wait(self) -> None:
        """Let the current stream wait for what is in here, and no memory of it be reused before that stream is done."""
        assert self._made is not None
        stream = torch.cuda.current_stream(self.recipe.device)
        stream.wait_event(self._made)
        for t in self._tensors:
            t.record_stream(stream)

    def states(self) -> Tensor:
        return self.remember("states", lambda: self._states)

    def rows(self, tile: tuple[int, int], by_keys: bool) -> Tables:
        """A row per query tile over key tiles, or per key tile over query tiles."""
        return self.remember((tile, by_keys), lambda: self._make_rows(tile, by_keys))

    def rows_with(self, name: Hashable, tile: tuple[int, int], by_keys: bool, block: tuple[int, int], fill: Callable[[Tables, Tensor], Value]) -> Value:
        """What `fill` makes of such rows, which it orders, and of one block of int32 for each masked tile, for which it is given memory."""
        return self.remember(name, lambda: self._fill(tile, by_keys, block, fill))

    def _make_rows(self, tile: tuple[int, int], by_keys: bool) -> Tables:
        geometry, sizes = table_sizes(self.recipe.form, tile, by_keys)
        tables = self._write_runs(tile, by_keys, self.empty((sum(sizes),)), 0)
        self.recipe.launch(("order_rows", tile, by_keys), lambda: order_launch(sizes[0], geometry, tables)).launch([*tables])
        return tables

    def _fill(self, tile: tuple[int, int], by_keys: bool, block: tuple[int, int], fill: Callable[[Tables, Tensor], Value]) -> Value:
        """Tables lie behind the blocks: to allocate memory takes as long as a launch."""
        blocks, size = bits_blocks(self.recipe.form, tile, by_keys), block[0] * block[1]
        tables: Tables | None = self._derived.get((tile, by_keys))
        behind = 0 if tables is not None else -(-sum(table_sizes(self.recipe.form, tile, by_keys)[1]) // size)
        memory = self.empty((blocks + behind, *block))
        if tables is None:
            tables = self._write_runs(tile, by_keys, memory, blocks * size)
        made = fill(tables, memory)
        self._derived[(tile, by_keys)] = tables
        return made

    def _write_runs(self, tile: tuple[int, int], by_keys: bool, memory: Tensor, begin: int) -> Tables:
        """Tables from this element of the memory on, all but the order."""
        form = self.recipe.form
        geometry, sizes = table_sizes(form, tile, by_keys)
        tables = Tables(*stretches(memory, begin, sizes))
        launch = self.recipe.launch(("schedule_rows", tile, by_keys), lambda: rows_launch(sizes[0], form, tile, by_keys, geometry, self._states, tables))
        launch.launch([self._states, *tables])
        return tables


# -- maps are kept ---------------------------------------------------------------------------------------------------


class DeviceMapCache:
    """The most recently used maps, one for each mask: new contents take the place of the old.

    A map is a function of the mask's program, its numbers, the contents of its captures, and the sizes of the problem. The first, second and last are its
    recipe, which with the captures' identity is the key; `contents_key` is kept beside the map and compared. Captures are held weakly.

    Inside a capture of a CUDA graph nothing that was made outside is used, because a replay must follow what the tensors hold by then, and nothing made
    inside is used outside, because it holds something only after a replay. A capture's own maps serve the rest of that capture.
    """

    def __init__(self) -> None:
        self.made = 0  # tests count
        self._recipes: dict[Hashable, Recipe] = {}
        self._kept: WeakCache[tuple[Any, DeviceMap]] = WeakCache(MAX_MAPS)
        self._bytes = 0  # of all maps that live
        self._captured = (0, self._kept)  # the latest capture, and its maps

    def get(self, p: Problem) -> DeviceMap:
        """Of base tiles of 16 x 16. With the map, the mask bits of both passes are kept: half a byte for each element, with tiles of 64."""
        form = MapForm(*_copies(p), p.q_len, p.kv_len)
        return self.find(p, form, lambda made: _base_states(p, made), mask_elements(p) // 2)

    def find(self, p: Problem, form: MapForm, write: Callable[[DeviceMap], Tensor], size: int) -> DeviceMap:
        """A map of a problem's mask, written if need be; `size`: bytes that are kept with it."""
        assert p.mask is not None
        recipe, captures = self.recipe(p, form), p.mask.captures
        contents = contents_key(captures)
        if contents is None:
            return self.make(recipe, write)
        cache = self._cache_of(capture_id(stream_of(p.device)))
        key = (recipe, *[id(t) for t in captures])
        found = cache.find(key, captures)
        if found is not None and found[0] == contents:
            return found[1]
        made = self.make(recipe, write)
        if cache is self._kept:
            self._weigh(made, made.nbytes + size)
        cache.keep(key, captures, (contents, made))
        return made

    def recipe(self, p: Problem, form: MapForm) -> Recipe:
        structure = mask_structure(p), form
        found = self._recipes.get(structure)
        if found is None:
            if len(self._recipes) >= MAX_RECIPES:
                self._recipes.clear()
            found = self._recipes[structure] = Recipe(form, p.device)
        return found

    def _cache_of(self, capture: int) -> WeakCache[tuple[Any, DeviceMap]]:
        """That of a capture, or the one outside of captures (0). Maps of an earlier capture are let go of."""
        latest = self._captured
        if latest[0] != capture:
            latest = self._captured = (capture, WeakCache(MAX_MAPS) if capture else self._kept)
        return latest[1]

    def forget_capture(self) -> None:
        """Let go of the maps of a capture, whose memory is the graph's."""
        self._captured = (0, self._kept)

    def make(self, recipe: Recipe, write: Callable[[DeviceMap], Tensor]) -> DeviceMap:
        self.made += 1
        return DeviceMap(recipe, write)

    def _weigh(self, made: DeviceMap, size: int) -> None:
        """Count a map as long as it lives. When all of them grow large, everything is forgotten, with the launches that hold their schedules."""
        self._bytes += size
        weakref.finalize(made, self._lighten, size).atexit = False
        if self._bytes > max(MAX_BYTES, size):  # others than this one
            maps.clear()

    def _lighten(self, size: int) -> None:
        self._bytes -= size

    def clear(self) -> None:
        self._kept.clear()


device_maps = DeviceMapCache()
maps.on_clear.append(device_maps.clear)


def device_map_of(p: Problem) -> DeviceMap | None:
    """The map of a problem, if it is made on the device."""
    if not is_made_on_device(p):
        return None
    return device_maps.get(p) if p.given_tiles is None else given_map(p)


def _base_states(p: Problem, made: DeviceMap) -> Tensor:
    form = made.recipe.form
    states = made.empty((form.batch * form.heads, -(-form.q_len // SIZE), -(-form.kv_len // SIZE)), torch.int8)
    made.recipe.launch("base_states", lambda: base_launch(p, states)).launch([states, *captures_of(p)])
    return states


class FoundOnce:
    """`device_map_of` for the launches of one pass, which ask for the same map several times."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, DeviceMap | None]] = []  # by mask: that of tokens in strips is another

    def __call__(self, p: Problem) -> DeviceMap | None:
        for mask, found in self._known:
            if mask is p.mask:
                return found
        made = device_map_of(p)
        self._known.append((p.mask, made))
        return made

    def publish(self) -> None:
        for _, made in self._known:
            if made is not None:
                made.publish()


# -- tiles chosen from data ------------------------------------------------------------------------------------------


def given_map(p: Problem) -> DeviceMap:
    """The map of chosen tiles. It is kept with these, in the one place that they have for it, and known by all it is made of: the structure of the mask on
    top, the form of the tiles, the contents of both, and the capture of a CUDA graph that is under way, whose replays must make it again."""
    tiles = p.given_tiles
    assert tiles is not None and tiles.chosen is not None
    recipe = device_maps.recipe(p, form_of_given(p))
    contents = contents_key(p.mask_sources)
    key = (recipe, contents, capture_id(stream_of(p.device)))
    found = tiles.derived.get("device map")
    if contents is not None and found is not None and found[0] == key:
        kept: DeviceMap = found[1]
        return kept
    made = device_maps.make(recipe, lambda made: _chosen_states(p, made))
    tiles.derived["device map"] = key, made
    return made


def form_of_given(p: Problem) -> MapForm:
    """Of chosen tiles, from shapes alone."""
    assert p.given_tiles is not None and p.given_tiles.chosen is not None
    g, chosen = p.given_tiles.geometry, p.given_tiles.chosen
    forbids = 0 if p.mask is None else PARTIAL  # without a mask, partial tiles are full ones
    form = MapForm(g.batch, g.heads, g.q_len, g.kv_len, g.tile, forbids, PARTIAL | FULL, chosen.most, is_masked=p.mask is not None)
    if _looks(p) is not None:  # into a tensor of our own
        return form
    states = _by_head(chosen.states)
    return form._replace(strides=(states.stride(0), states.stride(1)), is_aligned=states.data_ptr() % 16 == 0)


def _by_head(states: Tensor) -> Tensor:
    """[batch * heads, query tiles, key tiles]"""
    return states.flatten(0, 1)


def _looks(p: Problem) -> Geometry | None:
    """The tiles of the mask on top that are looked at, because chosen ones may turn out to be forbidden or allowed altogether."""
    tiles = p.given_tiles
    if p.mask is None or tiles is None or tiles.chosen is None or not tiles.chosen.sharpens:
        return None
    own = mask_geometry(p.mask, tiles.geometry)
    return own if own is not None and own.elements <= MAX_LOOKED_AT else None


def _chosen_states(p: Problem, made: DeviceMap) -> Tensor:
    """Those of the chosen tiles; where a mask decides, what it makes of them."""
    assert p.given_tiles is not None and p.given_tiles.chosen is not None
    chosen, own = p.given_tiles.chosen, _looks(p)
    made.borrow(chosen)
    if own is None:
        return made.keep(_by_head(chosen.states))
    form = MapForm(own.batch, own.heads, own.q_len, own.kv_len, own.tile, PARTIAL, PARTIAL | FULL)  # base states of tiles as large are another map's
    bare = p.replaced(tiles=None)
    found = device_maps.find(bare, form, lambda looked: looked.keep(_looked_at(bare, own)), 0)
    return made.keep(_by_head(sharpened(chosen.states, own, found.states())))


def _looked_at(p: Problem, own: Geometry) -> Tensor:
    """EMPTY, PARTIAL or FULL for every tile of a mask."""
    return classified(p, own, torch.arange(own.total, device=p.device))


# -- launches --------------------------------------------------------------------------------------------------------


def mask_structure(p: Problem) -> Hashable:
    """Everything of a mask in a launch but its captures' addresses: its function is made from the program, the integers, the captures' layouts and the
    sizes (mods.py), and is given these and the floats."""
    if p.mask is None:
        return extents_of(p), p.device
    layouts = tuple([(t.dtype, t.shape, t.stride()) for t in p.mask.captures])
    return p.mask.program.text, p.mask.ints, exact(p.mask.floats), layouts, extents_of(p), p.device


def captures_of(p: Problem) -> tuple[Tensor, ...]:
    return () if p.mask is None else p.mask.captures


def mask_numbers(p: Problem) -> dict[str, Any]:
    """The mask's arguments but its captures."""
    _, ints, floats, sizes = mod_arguments(p)["mask"]
    return {"ints": ints, "floats": floats, "sizes": sizes}


def kernels() -> Mapping[str, Any]:
    """Imports Triton, so only when a kernel has to be compiled."""
    from tilewise.engines.gpu.kernels.device_map import base_states, order_rows, schedule_rows

    return {"base_states": base_states, "schedule_rows": schedule_rows, "order_rows": order_rows}


def base_launch(p: Problem, states: Tensor) -> Launch:
    heads, rows, columns = states.shape
    blocks = -(-p.kv_len // COLUMNS)
    return Launch(
        "base_states",
        kernels,
        heads * rows * blocks,
        {"p_states": states, "captures": captures_of(p)},
        {"geometry": BaseGeometry(_copies(p)[1], rows, columns, blocks, p.q_len, p.kv_len), **mask_numbers(p)},
        {"MASK": mask_of(p), "C": BaseConstants(FORBIDS, ALLOWS, SIZE, COLUMNS)},
        4,
        1,
        fp_fusion=False,
    )


@lru_cache(maxsize=1024)
def table_sizes(form: MapForm, tile: tuple[int, int], by_keys: bool) -> tuple[RowsGeometry, tuple[int, ...]]:
    """Of the rows of a map's heads; and how long each of the Tables is."""
    geometry = rows_geometry(form, tile, by_keys)
    rows = form.batch * form.heads * geometry.n_rows
    room = rows * (2 * geometry.n_half + 1)
    return geometry, (rows, rows, rows, 4 * rows, room, room, rows)


def bits_blocks(form: MapForm, tile: tuple[int, int], by_keys: bool) -> int:
    """Blocks of mask bits of a pass; where no mask decides, one serves all tiles that the end of the sequence cuts."""
    geometry, sizes = table_sizes(form, tile, by_keys)
    return max(1, sizes[0] * geometry.n_bits)


def rows_geometry(form: MapForm, tile: tuple[int, int], by_keys: bool) -> RowsGeometry:
    along, across = -(-form.q_len // form.size[0]), -(-form.kv_len // form.size[1])
    s_head, s_row = form.strides if form.strides is not None else (along * across, across)
    rows, columns, end, strides, most = -(-form.q_len // tile[0]), -(-form.kv_len // tile[1]), form.kv_len % tile[1], (s_row, 1), form.most
    split = max(1, form.size[0] // tile[0]), max(1, form.size[1] // tile[1])
    if by_keys:
        along, across, rows, columns, end, strides = across, along, columns, rows, form.q_len % tile[0], (1, s_row)
        split, most = split[::-1], None
    half, bits = -(-columns // 2), columns if form.is_masked else 0
    if most is not None:
        bits = min(bits, most * split[1])
    if form.size != (SIZE, SIZE):  # tiles within a base tile are alike: a run ends where a base tile does, or a chunk
        half = min(half, min(-(-across // 2), across if most is None else most) + -(-columns // CHUNK))
    return RowsGeometry(rows, columns, half, int(end != 0), along, across, s_head, *strides, *split, bits)


def rows_launch(rows: int, form: MapForm, tile: tuple[int, int], by_keys: bool, geometry: RowsGeometry, states: Tensor, tables: Tables) -> Launch:
    fits = all([own % base == 0 or base % own == 0 for own, base in zip(tile, form.size, strict=True)])
    assert fits, f"tiles of kernels are made of base tiles, or divide them; got {tile} and {form.size}"
    base = [max(1, own // size) for own, size in zip(tile, form.size, strict=True)]  # tiles of a tile
    along, across = base[::-1] if by_keys else base
    constants = RowsConstants(form.forbids, form.allows, along, across, _padded(along), _padded(across), CHUNK)
    return Launch("schedule_rows", kernels, rows, {"p_states": states, "tables": tuple(tables)}, {"geometry": geometry}, {"C": constants}, 4, 1)


def order_launch(rows: int, geometry: RowsGeometry, tables: Tables) -> Launch:
    return Launch("order_rows", kernels, rows, {"tables": tuple(tables)}, {"n_rows": geometry.n_rows}, {"C": OrderConstants(CHUNK)}, 1, 1)


def base_ahead(p: Problem) -> Launch:
    """For building ahead: what evaluates the mask."""
    return base_launch(p, torch.empty((1, 1, 1), dtype=torch.int8, device=p.device))


def rows_ahead(p: Problem, tile: tuple[int, int], by_keys: bool) -> list[Launch]:
    """For building ahead: what makes a schedule of such tiles."""
    states, number = torch.empty((1, 1, 1), dtype=torch.int8, device=p.device), torch.empty(1, dtype=torch.int32, device=p.device)
    form = MapForm(*_copies(p), p.q_len, p.kv_len)
    geometry, tables = rows_geometry(form, tile, by_keys), Tables(*[number] * len(Tables._fields))
    return [rows_launch(1, form, tile, by_keys, geometry, states, tables), order_launch(1, geometry, tables)]


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
