"""Loading and launching compiled kernels through the CUDA driver, by ctypes: no C compiler, no launcher to build.

Arguments are packed into one buffer, in the order of the kernel's parameters. First come tensor maps (by which TMA finds tiles
of a tensor), then pointers, then everything that calls of one kind share.
"""

import ctypes
import struct
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.locks import new_lock

SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED = 48 * 1024  # what a kernel may use without asking
PACK = {"i32": "i", "i64": "q", "fp32": "f"}  # pointers are "P"
TENSOR_MAP, MAP_BYTES, MAP_ALIGNMENT = "tensor map", 128, 64
MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
PROMOTE_L2 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class OutOfSharedMemory(RuntimeError):
    """A kernel needs more shared memory than the GPU has."""


class UnusableBinary(RuntimeError):
    """A compiled kernel that the driver does not load."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return cuda


@lru_cache(maxsize=1)
def replace_address() -> Any:
    """Sets the address of a tensor map. Drivers before CUDA 12 have no tensor maps, so this is looked up when a kernel has one."""
    function = library().cuTensorMapReplaceAddress
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return function


def check(code: int, what: str) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {what} failed: {(text.value or b'unknown error').decode()} ({code})")


@lru_cache(maxsize=64)
def shared_limit(device: int) -> int:
    value = ctypes.c_int()
    check(library().cuDeviceGetAttribute(ctypes.byref(value), SHARED_LIMIT, device), "asking for the shared memory")
    return value.value


_entered = threading.local()


def enter_context(device: int) -> None:
    """A thread that torch has not used yet (autograd's, say) has no CUDA context: give it the device's own."""
    if getattr(_entered, "done", False):
        return
    context = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if not context.value:
        check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "taking the device's context")
        check(library().cuCtxSetCurrent(context), "entering the context")
    _entered.done = True


class Box(NamedTuple):
    """What one TMA load brings of a tensor, and how it lies in shared memory."""

    sizes: tuple[int, ...]
    swizzle: int  # CU_TENSOR_MAP_SWIZZLE_*


def tensor_map(t: Tensor, box: Box) -> bytes:
    """The 128 bytes that describe a tensor to TMA (CUtensorMap); their address is set again for every call."""
    rank, size = t.dim(), t.element_size()
    strides = [s * size if n > 1 else MAP_ALIGNMENT for s, n in zip(t.stride(), t.shape, strict=True)]  # one of a kind: any stride will do
    raw = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    address = aligned_address(raw)
    check(
        library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(address),
            MAP_DTYPES[t.dtype],
            rank,
            ctypes.c_void_p(t.data_ptr()),
            (ctypes.c_uint64 * rank)(*reversed(t.shape)),
            (ctypes.c_uint64 * rank)(*reversed(strides[:-1])),
            (ctypes.c_uint32 * rank)(*reversed(box.sizes)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            box.swizzle,
            PROMOTE_L2,
            0,
        ),
        f"describing a tensor of shape {tuple(t.shape)} and strides {t.stride()}",
    )
    return ctypes.string_at(address, MAP_BYTES)


def aligned_address(buffer: Any) -> int:
    return -(-ctypes.addressof(buffer) // MAP_ALIGNMENT) * MAP_ALIGNMENT


def places_of(types: list[str]) -> tuple[list[int], int]:
    """Where each parameter lies in the buffer, and its size."""
    places, end = [], 0
    for t in types:
        size, alignment = (MAP_BYTES, MAP_ALIGNMENT) if t == TENSOR_MAP else (struct.calcsize(PACK.get(t, "P")),) * 2
        places.append(-(-end // alignment) * alignment)
        end = places[-1] + size
    return places, end


class Kernel:
    """A kernel loaded on one device, ready to launch."""

    def __init__(self, cubin: bytes, name: str, shared: int, warps: int, types: tuple[str, ...], extra_pointers: int, boxes: list[Box], device: int) -> None:
        if shared > shared_limit(device):
            raise OutOfSharedMemory(f"{shared} bytes of shared memory, the GPU has {shared_limit(device)}")
        cuda = library()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
            check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        except RuntimeError as error:
            raise UnusableBinary(str(error)) from None
        if shared > STATIC_SHARED:
            check(cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED, shared), "reserving shared memory")
        self._function = function
        self._threads = 32 * warps
        self._shared = shared
        self._boxes = boxes
        self._types = [*types, *["*extra"] * extra_pointers]
        self._places, self._size = places_of(self._types)
        self._maps_at = [place for place, t in zip(self._places, self._types, strict=True) if t == TENSOR_MAP]
        self._buffer = ctypes.create_string_buffer(self._size + MAP_ALIGNMENT)
        self._address = aligned_address(self._buffer)
        self._offset = self._address - ctypes.addressof(self._buffer)
        self._in_place: Image | None = None  # whose arguments the buffer holds
        self._parameters = (ctypes.c_void_p * len(self._places))(*[self._address + place for place in self._places])
        self._lock = new_lock()  # the driver copies the buffer while it launches a kernel, not later

    def image(self, tma_tensors: list[Tensor], addresses: list[int], static_values: list[Any]) -> "Image":
        """All arguments in place."""
        values: list[Any] = []
        for t, box in zip(tma_tensors, self._boxes, strict=True):
            values += [tensor_map(t, box), *t.shape, *t.stride()]
        pointers = len(values)
        values += [*addresses, *static_values]
        values += [0] * (len(self._types) - len(values))
        raw = bytearray(self._size)
        for place, kind, value in zip(self._places, self._types, values, strict=True):
            if kind == TENSOR_MAP:
                raw[place : place + MAP_BYTES] = value
            else:
                struct.pack_into(PACK.get(kind, "P"), raw, place, value)
        at = self._places[pointers] if addresses else 0
        return Image(bytes(raw), at, struct.Struct(f"{len(addresses)}P"))

    def launch(self, programs: int, stream: int, image: "Image", tma_addresses: list[int], addresses: list[int]) -> None:
        with self._lock:
            if self._in_place is not image:
                ctypes.memmove(self._address, image.raw, len(image.raw))
                self._in_place = image
            if addresses:
                image.pointers.pack_into(self._buffer, self._offset + image.pointers_at, *addresses)
            for place, address in zip(self._maps_at, tma_addresses, strict=True):
                check(replace_address()(self._address + place, address), "setting a tensor's address")
            code = library().cuLaunchKernel(self._function, programs, 1, 1, self._threads, 1, 1, self._shared, stream, self._parameters, None)
        if code != 0:
            check(code, "launching a kernel")


class Image(NamedTuple):
    """The arguments of calls that differ only in the addresses of their own tensors."""

    raw: bytes
    pointers_at: int
    pointers: struct.Struct


def is_capturing(stream: int) -> bool:
    """Whether what is started on the current stream goes into a CUDA graph. The default stream cannot be captured, and asking takes long."""
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def current_stream(device: int) -> int:
    """The stream's handle, the quick way that torch's own compiler takes."""
    return torch._C._cuda_getCurrentRawStream(device)
