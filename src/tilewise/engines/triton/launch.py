"""From arguments to a running kernel: look it up, in memory, then in the store, else build it.

Every integer is passed as it is, so that no value of it ever makes a new kernel. What does is the arguments' types, whether rows
can be read 16 bytes at a time, and the constants.
"""

import hashlib
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import store
from tilewise._version import __version__
from tilewise.engines.triton import builds, interpreted
from tilewise.engines.triton.driver import Box, Kernel, OutOfSharedMemory, current_stream, enter_context, is_capturing
from tilewise.engines.triton.modules import Generated

POINTER = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip

__all__ = ["Aligned", "Block", "Counts", "Described", "Launch", "OutOfSharedMemory", "Prepared", "Request", "Strides", "parts_of", "prepare", "request_of"]


class Strides(tuple[int, ...]):
    """(batch, head, sequence, dim) strides, 64-bit, so that every offset made with them is."""


class Aligned(Strides):
    """Strides of a tensor whose rows lie on 16-byte boundaries: the last is 1, the others multiples of 16."""


class Described(NamedTuple):
    """A tensor that the copy engine brings in blocks of this shape."""

    tensor: Tensor
    block: tuple[int, ...]


class Request(NamedTuple):
    """A kernel, named by everything its code depends on."""

    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    arch: int


class Block(NamedTuple):
    """The type of a described tensor."""

    dtype: str
    sizes: tuple[int, ...]


class Counts:
    """Kernels this process compiled, and took from the store; tests count."""

    built = 0
    loaded = 0


_kernels: dict[Any, Kernel] = {}
_captured: list[Any] = []  # maps whose addresses are in CUDA graphs
_lock = threading.Lock()


class Launch(NamedTuple):
    """A kernel to be started: how many programs, with what."""

    kernel: str
    programs: int
    own: dict[str, Any]  # the call's own tensors (or None, or tuples of them): the kernel's first parameters, described ones before all
    rest: dict[str, Any]  # the other arguments, which every call like this one has
    constants: dict[str, Any]
    warps: int
    stages: int


class Prepared:
    """A kernel with its arguments packed. Calls that differ only in their own tensors start it again."""

    def __init__(self, launch: Launch, kernel: Kernel, rest: list[Any], device: int) -> None:
        self._kernel = kernel
        self._programs = launch.programs
        self._image = kernel.image(*own_tensors(launch.own), rest)
        self.device = device
        self._kept = [t for name, v in launch.rest.items() if name in MAPS for t in v if t is not None]  # addresses of these are among the arguments
        self._streams: set[int] = set()

    def start(self, own: dict[str, Any]) -> None:
        self.start_with(*own_tensors(own))

    def start_with(self, described: list[Tensor], addresses: list[int]) -> None:
        """The same for own tensors in order: those the copy engine brings, and the addresses of the others."""
        enter_context(self.device)  # this may be a thread's first call
        stream = current_stream(self.device)
        if self._kept and (stream not in self._streams or is_capturing(stream)):
            self._used_on(stream)
        self._kernel.start(self._programs, stream, self._image, described, addresses)

    def _used_on(self, stream: int) -> None:
        """A map may have been made on another stream; when it goes, torch must not reuse its memory before this one is done with it. One that is
        captured in a graph stays: nobody tells when the graph goes."""
        if is_capturing(stream):
            _captured.append(self._kept)
            return
        for t in self._kept:
            t.record_stream(torch.cuda.current_stream(self.device))
        self._streams.add(stream)


class Interpreted:
    """The same in Triton's interpreter."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def start(self, own: dict[str, Any]) -> None:
        from tilewise.engines.triton.build import function_named

        constants = {k: v.function() if isinstance(v, Generated) else v for k, v in self._launch.constants.items()}
        function_named(self._launch.kernel)[(self._launch.programs,)](**own, **self._launch.rest, **constants)


MAPS = ("tiles", "columns", "rows")


def prepare(launch: Launch, device: torch.device) -> Prepared | Interpreted:
    """Look the kernel up, or build it, and pack its arguments."""
    if interpreted():
        return Interpreted(launch)
    index = device.index if device.index is not None else torch.cuda.current_device()
    enter_context(index)
    marks: list[Any] = []
    values: list[Any] = []
    for arguments in (launch.own, launch.rest):
        for value in arguments.values():
            _read(value, marks, values)
    key = (launch.kernel, tuple(marks), tuple(launch.constants.values()), launch.warps, launch.stages, index)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _load(key, request_of(launch, architecture(device)), index)
    return Prepared(launch, kernel, values[len(own_tensors(launch.own)[1]) :], index)


def own_tensors(own: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """The described ones, and the addresses of the others."""
    described: list[Tensor] = []
    found: list[int] = []
    for value in own.values():
        kind = type(value)
        if kind is Described:
            described.append(value.tensor)
        elif kind is tuple:
            found += [t.data_ptr() for t in value]
        elif value is not None:
            found.append(value.data_ptr())
    return described, found


def _read(value: Any, marks: list[Any], values: list[Any]) -> None:
    """What of an argument the kernel's code depends on, and its numbers in the order of the kernel's parameters."""
    kind = type(value)
    if kind is int:
        marks.append(-(2**31) <= value < 2**31)
        values.append(value)
    elif kind is float:
        values.append(value)
    elif kind is Aligned:
        marks.append("aligned")
        values += value[:3]
    elif kind is Strides:
        marks.append("strides")
        values += value
    elif kind is tuple:
        marks.append(len(value))
        for v in value:
            _read_inner(v, marks, values)
    elif value is None:
        marks.append(None)
    elif kind is Described:
        marks.append((value.tensor.dtype, value.block))
    else:
        address = value.data_ptr()
        marks.append((value.dtype, address % 16 == 0))
        values.append(address)


def _read_inner(value: Any, marks: list[Any], values: list[Any]) -> None:
    """An element of a tuple: pointers in it count as unaligned."""
    if value is None:
        marks.append(None)
    elif type(value) is tuple:
        marks.append(len(value))
        for v in value:
            _read_inner(v, marks, values)
    elif isinstance(value, Tensor):
        marks.append(value.dtype)
        values.append(value.data_ptr())
    else:
        marks.append(-(2**31) <= value < 2**31 if type(value) is int else "float")
        values.append(value)


def request_of(launch: Launch, arch: int) -> Request:
    signature = tuple([(name, _type(value)) for name, value in (launch.own | launch.rest).items()])
    return Request(launch.kernel, signature, tuple(launch.constants.items()), launch.warps, launch.stages, arch)


def _type(value: Any) -> Any:
    """The type of an argument as part of a kernel's name. A pointer that is 16-byte aligned ends in `!`."""
    if isinstance(value, Tensor):
        return POINTER[value.dtype] + "!" if value.data_ptr() % 16 == 0 else POINTER[value.dtype]
    if isinstance(value, Described):
        return Block(POINTER[value.tensor.dtype][1:], value.block)
    if isinstance(value, Strides):
        return "aligned" if isinstance(value, Aligned) else ("i64",) * 4
    if isinstance(value, tuple):
        return tuple([_type(v) if isinstance(v, tuple) else _type(v).rstrip("!") for v in value])
    if value is None:
        return "none"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Changes with the kernels' own source and with the versions that compile them; torch has no part in that."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"{__version__} {version('triton')}".encode())
    engines = Path(__file__).parent.parent
    for path in sorted([*engines.glob("triton/*.py"), *engines.glob("gluon/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(request: Request) -> str:
    return hashlib.sha256(f"{sources_digest()} {request!r}".encode()).hexdigest()


def _load(key: Any, request: Request, device: int) -> Kernel:
    parts = parts_of(request)
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = _kernels[key] = _loaded(parts, request, device)
        return found


def _loaded(parts: dict[str, bytes], request: Request, device: int) -> Kernel:
    import json

    facts = json.loads(parts["facts"])
    boxes = [Box(tuple(sizes), swizzle) for sizes, swizzle in facts["boxes"]]
    return Kernel(parts["cubin"], facts["name"], facts["shared"], facts["warps"], tuple(facts["types"]), facts["extra_pointers"], boxes, device)


def parts_of(request: Request) -> dict[str, bytes]:
    """The compiled kernel: from the store, or built and put there."""
    key = key_of(request)

    def build() -> dict[str, bytes]:
        from tilewise.engines.triton.build import compiled

        builds.announce()
        return compiled(request)

    def find() -> dict[str, bytes]:
        parts, built = store.find_or_build(key, build)
        with _lock:
            Counts.built += built
            Counts.loaded += not built
        return parts

    found: dict[str, bytes] = builds.once(key, find)
    return found
