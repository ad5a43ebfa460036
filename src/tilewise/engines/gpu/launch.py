"""From a kernel's arguments to a launch: types are read off once, arguments packed once, and the same call launches again at once.

Every integer is passed as it is, so that no value of it ever makes a new kernel. What does is the arguments' types, whether rows
can be loaded 16 bytes at a time, and the constants (see kernel_cache).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engines.gpu import kernel_cache
from tilewise.engines.gpu.driver import Kernel, current_stream, enter_context, is_capturing
from tilewise.engines.gpu.generated import Generated
from tilewise.engines.gpu.kernel_args import AlignedStrides, Schedule, Strides
from tilewise.engines.gpu.kernel_cache import architecture
from tilewise.engines.gpu.kernel_request import KernelRequest, KernelTable, TmaBlock
from tilewise.engines.gpu.limits import interpreted

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
}


class TmaTensor(NamedTuple):
    """A tensor that TMA loads or stores in blocks of this shape."""

    tensor: Tensor
    block: tuple[int, ...]


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


# Values of `Launch.tensors` are tensors, None, TmaTensors, or tuples of them. A kernel is compiled for the 16-byte alignment of the pointers that are
# arguments of their own or fields of a NamedTuple. Pointers in plain tuples, and in any tuple of `static_args`, count as unaligned.


class PreparedLaunch:
    """A kernel with its arguments packed. Calls that differ only in their tensors' addresses launch it again."""

    def __init__(self, launch: Launch, kernel: Kernel, static_values: list[Any], device: int) -> None:
        self._kernel = kernel
        self._programs = launch.programs
        tensors = flat(launch.tensors)
        tma_tensors = [t.tensor for t in launch.tensors.values() if type(t) is TmaTensor]
        self._tma = len(tma_tensors)
        self._image = kernel.image(tma_tensors, [t.data_ptr() for t in tensors[self._tma :] if t is not None], static_values)
        self.device = device
        self._schedule = schedule_tensors(launch.static_args)  # packed by address: kept alive
        self._streams: set[int] = set()

    def launch(self, tensors: Sequence[Tensor | None]) -> None:
        """With these tensors, in the order of the kernel's parameters; None where there was none."""
        enter_context(self.device)  # this may be a thread's first call
        stream = current_stream(self.device)
        if self._schedule and (stream not in self._streams or is_capturing(stream)):
            self._used_on(stream)
        addresses = [t.data_ptr() for t in tensors if t is not None]
        self._kernel.launch(self._programs, stream, self._image, addresses[: self._tma], addresses[self._tma :])

    def _used_on(self, stream: int) -> None:
        """A tile schedule may have been made on another stream; when it goes, torch must not reuse its memory before this one is done with it.
        One that is captured in a graph stays: nobody tells when the graph goes."""
        if is_capturing(stream):
            _captured.append(self._schedule)
            return
        for t in self._schedule:
            t.record_stream(torch.cuda.current_stream(self.device))
        self._streams.add(stream)


_captured: list[Any] = []  # tile schedules whose addresses are in CUDA graphs


class InterpretedLaunch:
    """The same in Triton's interpreter."""

    device = None

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def launch(self, tensors: Sequence[Tensor | None]) -> None:
        left = iter(tensors)
        named = {name: _refilled(value, left) for name, value in self._launch.tensors.items()}
        constants = {k: v.function() if isinstance(v, Generated) else v for k, v in self._launch.constants.items()}
        function = self._launch.table()[self._launch.kernel]
        function[(self._launch.programs,)](**named, **self._launch.static_args, **constants)


def prepare(launch: Launch, device: torch.device) -> PreparedLaunch | InterpretedLaunch:
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


def flat(tensors: dict[str, Any]) -> list[Tensor | None]:
    """A launch's tensors, in the order of the kernel's parameters."""
    found: list[Tensor | None] = []
    for value in tensors.values():
        _flatten(value, found)
    return found


def _flatten(value: Any, found: list[Tensor | None]) -> None:
    if type(value) is TmaTensor:
        found.append(value.tensor)
    elif isinstance(value, tuple):
        for v in value:
            _flatten(v, found)
    else:
        found.append(value)


def _refilled(value: Any, left: Iterator[Tensor | None]) -> Any:
    """A value of `Launch.tensors` with the next tensors in place of its own."""
    if isinstance(value, tuple):
        return _like(value, [_refilled(v, left) for v in value])
    return next(left)


def _like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple, or NamedTuple, of the kind of another."""
    return type(value)(*items) if _is_named(value) else tuple(items)


def _is_named(value: tuple[Any, ...]) -> bool:
    return hasattr(value, "_fields")


def schedule_tensors(static_args: dict[str, Any]) -> list[Tensor]:
    """Those of tile schedules: fields of a kernel's `args`, or the argument "tiles"."""
    schedules = [static_args.get("tiles", ()), *[field for field in static_args.get("args", ()) if isinstance(field, Schedule)]]
    return [t for schedule in schedules for t in schedule if isinstance(t, Tensor)]


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
    if isinstance(value, Tensor):
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
