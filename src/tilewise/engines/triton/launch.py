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
from tilewise.engines.triton import interpreted
from tilewise.engines.triton.driver import Kernel, OutOfSharedMemory, current_stream, enter_context
from tilewise.engines.triton.modules import Generated

POINTER = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}  # fmt: skip

__all__ = ["Aligned", "Counts", "Launch", "OutOfSharedMemory", "Request", "Strides", "parts_of", "request_of", "start"]


class Strides(tuple[int, ...]):
    """(batch, head, sequence, dim) strides, 64-bit, so that every offset made with them is."""


class Aligned(Strides):
    """Strides of a tensor whose rows lie on 16-byte boundaries: the last is 1, the others multiples of 16."""


class Request(NamedTuple):
    """A kernel, named by everything its code depends on."""

    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    arch: int


class Counts:
    """Kernels this process compiled, and took from the store; tests count."""

    built = 0
    loaded = 0


_kernels: dict[Any, Kernel] = {}
_lock = threading.Lock()


class Launch(NamedTuple):
    """A kernel to be started: how many programs, with what."""

    kernel: str
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int


def start(launch: Launch, device: torch.device) -> None:
    kernel, programs, arguments, constants, _, _ = launch
    if programs == 0:
        return
    if interpreted():
        from tilewise.engines.triton.build import function_named

        function_named(kernel)[(programs,)](**arguments, **{k: v.function() if isinstance(v, Generated) else v for k, v in constants.items()})
        return
    index = device.index if device.index is not None else torch.cuda.current_device()
    enter_context(index)
    marks, values = read(arguments)
    key = (kernel, marks, tuple(constants.values()), launch.warps, launch.stages, index)
    found = _kernels.get(key)
    if found is None:
        found = _load(key, request_of(launch, architecture(device)), index)
    found.start(programs, current_stream(index), values)


def read(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """In one pass: what of the arguments the kernel's code depends on, and their numbers in the order of its parameters."""
    marks: list[Any] = []
    values: list[Any] = []
    for value in arguments.values():
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
        else:
            address = value.data_ptr()
            marks.append((value.dtype, address % 16 == 0))
            values.append(address)
    return tuple(marks), values


def _read_inner(value: Any, marks: list[Any], values: list[Any]) -> None:
    """An element of a tuple: pointers in it count as unaligned."""
    if value is None:
        marks.append(None)
    elif isinstance(value, Tensor):
        marks.append(value.dtype)
        values.append(value.data_ptr())
    else:
        marks.append(-(2**31) <= value < 2**31 if type(value) is int else "float")
        values.append(value)


def request_of(launch: Launch, arch: int) -> Request:
    signature = tuple([(name, _type(value)) for name, value in launch.arguments.items()])
    return Request(launch.kernel, signature, tuple(launch.constants.items()), launch.warps, launch.stages, arch)


def _type(value: Any) -> Any:
    """The type of an argument as part of a kernel's name. A pointer that is 16-byte aligned ends in `!`."""
    if isinstance(value, Tensor):
        return POINTER[value.dtype] + "!" if value.data_ptr() % 16 == 0 else POINTER[value.dtype]
    if isinstance(value, Strides):
        return "aligned" if isinstance(value, Aligned) else ("i64",) * 4
    if isinstance(value, tuple):
        return tuple([_type(v).rstrip("!") for v in value])
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
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(request: Request) -> str:
    return hashlib.sha256(f"{sources_digest()} {request!r}".encode()).hexdigest()


def _load(key: Any, request: Request, device: int) -> Kernel:
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = _kernels[key] = _loaded(parts_of(request), request, device)
        return found


def _loaded(parts: dict[str, bytes], request: Request, device: int) -> Kernel:
    import json

    facts = json.loads(parts["facts"])
    return Kernel(parts["cubin"], facts["name"], facts["shared"], request.warps, tuple(facts["types"]), facts["extra_pointers"], device)


def parts_of(request: Request) -> dict[str, bytes]:
    """The compiled kernel: from the store, or built and put there."""
    key = key_of(request)
    parts = store.read(key)
    if parts is None:
        with store.building(key):
            parts = store.read(key)
            if parts is None:
                from tilewise.engines.triton.build import compiled

                parts = compiled(request)
                store.write(key, parts)
                Counts.built += 1
                return parts
    Counts.loaded += 1
    return parts
