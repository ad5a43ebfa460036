"""From a kernel's arguments to a launch, in three steps that are repeated ever more often:

    prepare     the kernel is looked up and everything packed that calls of one structure share: once for a structure
    bind        the addresses of what follows contents are put in: the mask's and the score's tensors, tile schedules, places; once for a layout of documents
    launch      the addresses of the call's own tensors, and off it goes: in every call

Every integer is passed as it is, so that no value of it ever makes a new kernel. What does is the arguments' types, whether rows
can be loaded 16 bytes at a time, and the constants (see kernel_cache).
"""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.core.problem import Problem
from tilewise.engines.gpu import kernel_cache
from tilewise.engines.gpu.driver import Kernel, OwnPlaces, current_stream, enter_context, is_capturing
from tilewise.engines.gpu.generated import Generated
from tilewise.engines.gpu.kernel_args import AlignedStrides, Strides
from tilewise.engines.gpu.kernel_cache import architecture
from tilewise.engines.gpu.kernel_request import KernelRequest, KernelTable, OwnCompiler, TmaBlock
from tilewise.engines.gpu.limits import interpreted

ADDRESS = struct.Struct("P")
POINTER = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


class TmaTensor(NamedTuple):
    """A tensor that TMA loads or stores in blocks of this shape."""

    tensor: Tensor
    block: tuple[int, ...]


class Stretch:
    """A stretch of a tensor of int32 that kernels are given by its address: a view of it takes longer to make than a launch."""

    __slots__ = ("_at", "_memory", "_size")
    dtype = torch.int32

    def __init__(self, memory: Tensor, at: int, size: int) -> None:
        self._memory, self._at, self._size = memory, at, size

    def data_ptr(self) -> int:
        return self._at

    def __len__(self) -> int:
        return self._size

    def record_stream(self, stream: Any) -> None:
        self._memory.record_stream(stream)

    def view(self) -> Tensor:
        """What lies there, to look at."""
        begin = (self._at - self._memory.data_ptr()) // 4
        return self._memory.view(-1)[begin : begin + self._size]


AnyTensor = Tensor | Stretch


def stretches(memory: Tensor, begin: int, sizes: Sequence[int]) -> Sequence[AnyTensor]:
    """Parts of a tensor of int32, one after the other, from this element on. The interpreter needs tensors."""
    if interpreted():
        views: Sequence[Tensor] = memory.view(-1)[begin : begin + sum(sizes)].split(list(sizes))
        return views
    found, at = [], memory.data_ptr() + 4 * begin
    for size in sizes:
        found.append(Stretch(memory, at, size))
        at += 4 * size
    return found


Find = Callable[[Problem], Any]  # finds the map of a problem that is made on the device, or None (device_map.py)
# Tensors that a kernel's static arguments hold, of a problem: its captures, a tile schedule of it, its places.
Source = Callable[[Problem, Find], Sequence[AnyTensor | None]]


def mask_captures(p: Problem, _: Find) -> tuple[Tensor, ...]:
    return () if p.mask is None else p.mask.captures


def score_captures(p: Problem, _: Find) -> tuple[Tensor, ...]:
    return () if p.score is None else p.score.captures


def place_squares(p: Problem, _: Find) -> tuple[Tensor, ...]:
    return () if p.dropout_places is None else p.dropout_places.squares


def page_tensors(p: Problem, _: Find) -> tuple[Tensor, ...]:
    return () if p.pages is None else (p.pages.table, p.pages.lengths)


CAPTURES = (mask_captures, score_captures, page_tensors)  # what belongs to the caller, who keeps it alive


class Launch(NamedTuple):
    """A kernel to be launched: how many programs, with what."""

    kernel: str
    table: KernelTable  # where the compiler finds it
    programs: int
    tensors: dict[str, Any]  # the call's own: the kernel's first parameters, TMA tensors before all (see below)
    static_args: dict[str, Any]  # the other arguments, which every call like this one has
    constants: dict[str, Any]
    warps: int
    stages: int
    fp_fusion: bool = True  # False: every product is rounded before it is added (see compiler.py)
    sources: tuple["Source", ...] = ()  # where the tensors of `static_args` come from, in their order


# Values of `Launch.tensors` are tensors, None, TmaTensors, or tuples of them. A kernel is compiled for the 16-byte alignment of the pointers that are
# arguments of their own or fields of a NamedTuple. Pointers in plain tuples, and in any tuple of `static_args`, count as unaligned.


class BoundLaunch:
    """A kernel with everything in place but the addresses of a call's own tensors."""

    __slots__ = ("_kept", "_kernel", "_packed", "_places", "_programs", "_shared", "_streams", "device")

    def __init__(self, kernel: Kernel, packed: bytes, programs: int, places: OwnPlaces, kept: Sequence[Any], device: int, for_stream: bool) -> None:
        self._kernel, self._packed, self._programs, self._places, self.device = kernel, packed, programs, places, device
        self._kept = kept  # tile schedules and tables of places, packed by address: kept alive. Captures are their owner's
        self._shared = not for_stream and len(kept) > 0
        self._streams: set[int] = set()

    def launch(self, tensors: Sequence[AnyTensor | int | None]) -> None:
        """With these tensors (or addresses), in the order of the kernel's parameters; None where there was none."""
        enter_context(self.device)  # this may be a thread's first call
        stream = current_stream(self.device)
        if self._shared and (stream not in self._streams or is_capturing(stream)):
            self._used_on(stream)
        addresses = [t if isinstance(t, int) else t.data_ptr() for t in tensors if t is not None]
        self._kernel.launch(self._programs, stream, self._packed, self._places, addresses)

    def bind(self, p: Problem, find: Find, for_stream: bool = False) -> "BoundLaunch":
        return self

    def _used_on(self, stream: int) -> None:
        """A tile schedule may have been made on another stream; when it goes, torch must not reuse its memory before this one is done with it.
        One that is captured in a graph stays: nobody tells when the graph goes."""
        if is_capturing(stream):
            if not getattr(_graph, "owns_schedules", False):
                keep_for_graphs(self._kept)
            return
        for t in self._kept:
            t.record_stream(torch.cuda.current_stream(self.device))
        self._streams.add(stream)


_captured: list[Any] = []  # tile schedules whose addresses are in CUDA graphs
_graph = threading.local()


def keep_for_graphs(tensors: Any) -> None:
    """Something whose address a CUDA graph holds that is being captured: it stays, because nobody tells when the graph goes."""
    _captured.append(tensors)


@contextmanager
def schedules_of_the_graph() -> Iterator[None]:
    """Schedules of what this thread captures are made within the graph, which fills their memory again before it reads it: they need not be kept."""
    _graph.owns_schedules = True
    try:
        yield
    finally:
        _graph.owns_schedules = False


class PreparedLaunch:
    """A kernel, and its arguments packed but for addresses."""

    def __init__(self, launch: Launch, kernel: Kernel, static_values: list[Any], device: int) -> None:
        tensors = flat(launch.tensors)
        maps = [t.tensor for t in launch.tensors.values() if type(t) is TmaTensor]
        addresses = [t.data_ptr() for t in tensors[len(maps) :] if t is not None]
        self._kernel, self._programs, self._sources, self.device = kernel, launch.programs, launch.sources, device
        self._raw = kernel.packed(maps, addresses, static_values)
        self._places, self._static_places = kernel.address_places(len(addresses))
        tensors_given = static_tensors(launch.static_args)
        self._dtypes = [t.dtype for t in tensors_given]
        self._given = () if launch.sources else tensors_given
        self._bound: BoundLaunch | None = None

    def bind(self, p: Problem, find: Find, for_stream: bool = False) -> BoundLaunch:
        """For a problem of the same structure, with its captures and its schedule, whose map `find` finds. `for_stream`: it will
        be launched on the current stream alone, where the schedule is ready, and in the current capture if there is one."""
        tensors: list[AnyTensor] = []
        kept: list[AnyTensor] = []
        for source in self._sources:
            found = [t for t in source(p, find) if t is not None]
            tensors += found
            if source not in CAPTURES:
                kept += found
        return self._with(tensors, kept, for_stream)

    def launch(self, tensors: Sequence[AnyTensor | int | None]) -> None:
        """As it was prepared, for a launch that has no sources."""
        if self._bound is None:
            self._bound = self._with(self._given, self._given)
        self._bound.launch(tensors)

    def _with(self, tensors: Sequence[AnyTensor], kept: Sequence[AnyTensor], for_stream: bool = False) -> BoundLaunch:
        if [t.dtype for t in tensors] != self._dtypes:  # a tensor in another's place would be read as what it is not
            raise RuntimeError(f"a kernel's static arguments hold tensors of {self._dtypes}, its sources gave {[t.dtype for t in tensors]}")
        raw = bytearray(self._raw)
        for place, t in zip(self._static_places, tensors, strict=True):
            ADDRESS.pack_into(raw, place, t.data_ptr())
        return BoundLaunch(self._kernel, bytes(raw), self._programs, self._places, kept, self.device, for_stream)


class KernelLaunch(Protocol):
    """A launch, bound or not."""

    @property
    def device(self) -> int | None: ...

    def bind(self, p: Problem, find: Find, for_stream: bool = False) -> "KernelLaunch": ...

    def launch(self, tensors: Sequence[AnyTensor | int | None]) -> None: ...


class InterpretedLaunch:
    """All three steps in Triton's interpreter."""

    device = None

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def bind(self, p: Problem, find: Find, for_stream: bool = False) -> "InterpretedLaunch":
        tensors = [t for source in self._launch.sources for t in source(p, find) if t is not None]
        left = iter(tensors)
        static = {name: _rebound(value, left) for name, value in self._launch.static_args.items()}
        assert [id(t) for t in static_tensors(static)] == [id(t) for t in tensors]
        return InterpretedLaunch(self._launch._replace(static_args=static, sources=()))

    def launch(self, tensors: Sequence[AnyTensor | int | None]) -> None:
        left = iter(tensors)
        named = {name: _refilled(value, left) for name, value in self._launch.tensors.items()}
        constants = {k: v.function() if isinstance(v, Generated) else v for k, v in self._launch.constants.items()}
        table = self._launch.table
        assert not isinstance(table, OwnCompiler)
        function = table()[self._launch.kernel]
        function[(self._launch.programs,)](**named, **self._launch.static_args, **constants)


def prepare(launch: Launch, device: torch.device) -> KernelLaunch:
    """Look the kernel up, or build it, and pack its arguments."""
    if interpreted():
        return InterpretedLaunch(launch)
    index = device.index if device.index is not None else torch.cuda.current_device()
    enter_context(index)
    types: list[Any] = []
    values: list[Any] = []
    for value in launch.tensors.values():
        _read(value, types, values)
    pointers = len(values)
    for value in launch.static_args.values():
        _read(value, types, values, not isinstance(value, tuple))
    key = (launch.kernel, tuple(types), tuple(launch.constants.values()), launch.warps, launch.stages, launch.fp_fusion, index)
    kernel = kernel_cache.find(key)
    if kernel is None:
        kernel = kernel_cache.load(key, request_of(launch, architecture(device)), launch.table, index)
    return PreparedLaunch(launch, kernel, values[pointers:], index)


def flat(tensors: dict[str, Any]) -> list[AnyTensor | None]:
    """A launch's tensors, in the order of the kernel's parameters."""
    found: list[AnyTensor | None] = []
    for value in tensors.values():
        _flatten(value, found)
    return found


def _flatten(value: Any, found: list[AnyTensor | None]) -> None:
    if type(value) is TmaTensor:
        found.append(value.tensor)
    elif isinstance(value, tuple):
        for v in value:
            _flatten(v, found)
    else:
        found.append(value)


def _refilled(value: Any, left: Iterator[Any]) -> Any:
    """A value of `Launch.tensors` with the next tensors in place of its own."""
    if isinstance(value, tuple):
        return _like(value, [_refilled(v, left) for v in value])
    return next(left)


def _rebound(value: Any, left: Iterator[AnyTensor]) -> Any:
    """A value of `Launch.static_args` with the next tensors in place of its own."""
    if isinstance(value, tuple) and not isinstance(value, Strides):
        return _like(value, [_rebound(v, left) for v in value])
    return next(left) if isinstance(value, Tensor) else value


def _like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple, or NamedTuple, of the kind of another."""
    return type(value)(*items) if _is_named(value) else tuple(items)


def _is_named(value: tuple[Any, ...]) -> bool:
    return hasattr(value, "_fields")


def static_tensors(static_args: dict[str, Any]) -> list[AnyTensor]:
    """Those of a launch's static arguments, in the order of the kernel's parameters."""
    return [t for t in flat(static_args) if isinstance(t, (Tensor, Stretch))]


def _read(value: Any, types: list[Any], values: list[Any], aligned: bool = True) -> None:
    """What of an argument the kernel's code depends on, and its numbers in the order of the kernel's parameters. `aligned`: so is pointers' alignment."""
    kind = type(value)
    if kind is int:
        types.append(-(2**31) <= value < 2**31)
        values.append(value)
    elif kind is float:
        types.append("float")
        values.append(value)
    elif kind is AlignedStrides:
        types.append("aligned")
        values += value[:3]
    elif kind is Strides:
        types.append("strides")
        values += value
    elif value is None:
        types.append(None)
    elif kind is TmaTensor:
        types.append((value.tensor.dtype, value.block))
    elif isinstance(value, tuple):
        types.append(len(value))
        for v in value:
            _read(v, types, values, aligned and _is_named(value))
    else:
        address = value.data_ptr()
        types.append((value.dtype, address % 16 == 0) if aligned else value.dtype)
        values.append(address)


def request_of(launch: Launch, arch: int) -> KernelRequest:
    own = [(name, _type(value)) for name, value in launch.tensors.items()]
    static = [(name, _type(value, not isinstance(value, tuple))) for name, value in launch.static_args.items()]
    return KernelRequest(launch.kernel, (*own, *static), tuple(launch.constants.items()), launch.warps, launch.stages, arch, launch.fp_fusion)


def _type(value: Any, aligned: bool = True) -> Any:
    """The type of an argument as part of a kernel's name. A pointer that is known to be 16-byte aligned ends in `!`, if `aligned` asks for that."""
    if isinstance(value, (Tensor, Stretch)):
        return POINTER[value.dtype] + "!" if aligned and value.data_ptr() % 16 == 0 else POINTER[value.dtype]
    if isinstance(value, TmaTensor):
        return TmaBlock(POINTER[value.tensor.dtype][1:], value.block)
    if isinstance(value, Strides):
        return "aligned" if isinstance(value, AlignedStrides) else ("i64",) * 4
    if isinstance(value, tuple):
        return _like(value, [_type(v, aligned and _is_named(value)) for v in value])
    if value is None:
        return "none"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
