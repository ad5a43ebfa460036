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
    return ctypes.CDLL("libcuda.so.1")


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


def finds_map_addresses() -> bool:
    """Whether the driver keeps a tensor map's address in a known place. A constant to torch.compile."""
    try:
        enter_context(current_device())  # without one the driver describes no tensor
        return map_address_offset() is not None
    except (AttributeError, OSError, RuntimeError):  # a driver without tensor maps, or none
        return False


finds_map_addresses._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without what it imports


@lru_cache(maxsize=1)
def map_address_offset() -> int | None:
    """Where a tensor map holds its tensor's address, so that another one can be written there: for the driver to do it takes a call each time.
    Nothing documents that, so the driver is asked to change an address, and what changes is looked for; None if that is not one word."""
    before, after = 2**40, 2**41 + 4096
    raw = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    at = aligned_address(raw)
    sizes, strides, box, steps = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint64 * 1)(128), (ctypes.c_uint32 * 2)(64, 64), (ctypes.c_uint32 * 2)(1, 1)
    encode = library().cuTensorMapEncodeTiled
    check(encode(ctypes.c_void_p(at), MAP_DTYPES[torch.float16], 2, ctypes.c_void_p(before), sizes, strides, box, steps, 0, 0, 0, 0), "describing a tensor")
    given = ctypes.string_at(at, MAP_BYTES)
    check(library().cuTensorMapReplaceAddress(ctypes.c_void_p(at), ctypes.c_void_p(after)), "setting a tensor's address")
    replaced = ctypes.string_at(at, MAP_BYTES)
    offset = given.find(struct.pack("P", before))
    is_a_word = offset >= 0 and offset % 8 == 0 and replaced == given[:offset] + struct.pack("P", after) + given[offset + 8 :]
    return offset if is_a_word else None


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


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: cuLaunchKernelEx takes 4 arguments instead of cuLaunchKernel's 11, each of which ctypes converts in every call."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("programs", "grid_y", "grid_z", "threads", "block_y", "block_z", "shared_bytes")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class OwnPlaces(NamedTuple):
    """Which 8-byte words of the packed arguments hold the addresses of a call's own tensors: tensor maps first, then pointers side by side."""

    maps: tuple[int, ...]
    pointers: slice


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
        self._config = LaunchConfig(1, 1, 1, 32 * warps, 1, 1, shared, None, None, 0)
        self._at_config = ctypes.byref(self._config)
        self._start = cuda.cuLaunchKernelEx
        self._boxes = boxes
        self._types = [*types, *["*extra"] * extra_pointers]
        self._places, self._size = places_of(self._types)
        self._buffer = ctypes.create_string_buffer(self._size + MAP_ALIGNMENT)
        self._address = aligned_address(self._buffer)
        self._words: Any = (ctypes.c_uint64 * (self._size // 8)).from_address(self._address)
        self._in_place: bytes | None = None  # the arguments that the buffer holds
        self._parameters = (ctypes.c_void_p * len(self._places))(*[self._address + place for place in self._places])
        self._lock = new_lock()  # the driver copies the buffer while it launches a kernel, not later

    def packed(self, tma_tensors: list[Tensor], addresses: list[int], static_values: list[Any]) -> bytes:
        """All arguments, as the driver wants them in memory."""
        values: list[Any] = []
        for t, box in zip(tma_tensors, self._boxes, strict=True):
            values += [tensor_map(t, box), *t.shape, *t.stride()]
        values += [*addresses, *static_values]
        values += [0] * (len(self._types) - len(values))
        raw = bytearray(self._size)
        for place, kind, value in zip(self._places, self._types, values, strict=True):
            if kind == TENSOR_MAP:
                raw[place : place + MAP_BYTES] = value
            else:
                struct.pack_into(PACK.get(kind, "P"), raw, place, value)
        return bytes(raw)

    def address_places(self, own: int) -> tuple[OwnPlaces, list[int]]:
        """Where addresses lie among the packed arguments: those of the call's own tensors (tensor maps, then `own` pointers), and those of static tensors."""
        maps = [place + (map_address_offset() or 0) for place, t in zip(self._places, self._types, strict=True) if t == TENSOR_MAP]  # never None: gluon refuses
        pointers = [place for place, t in zip(self._places, self._types, strict=True) if t.startswith("*") and t != "*extra"]
        first = pointers[0] // 8 if own else 0
        assert pointers[:own] == [8 * (first + n) for n in range(own)]
        return OwnPlaces(tuple([place // 8 for place in maps]), slice(first, first + own)), pointers[own:]

    def launch(self, programs: int, stream: int, packed: bytes, places: OwnPlaces, addresses: list[int]) -> None:
        """With packed arguments, and these addresses in their places."""
        maps, pointers = places
        with self._lock:
            if self._in_place is not packed:
                ctypes.memmove(self._address, packed, len(packed))
                self._in_place = packed
            for word, address in zip(maps, addresses, strict=False):
                self._words[word] = address
            self._words[pointers] = addresses[len(maps) :] if maps else addresses
            config = self._config
            config.programs, config.stream = programs, stream
            code = self._start(self._at_config, self._function, self._parameters, None)
        if code != 0:
            check(code, "launching a kernel")


def is_capturing(stream: int) -> bool:
    """Whether what is started on the current stream goes into a CUDA graph. The default stream cannot be captured, and asking takes long."""
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def current_stream(device: int) -> int:
    """The stream's handle, the quick way that torch's own compiler takes."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """torch.cuda.current_device, for whoever holds a tensor of a GPU: it does not ask whether CUDA has begun."""
    return torch._C._cuda_getDevice()


def stream_of(device: torch.device) -> int:
    """The device's current stream; 0 where there are none."""
    return 0 if device.type != "cuda" else current_stream(torch.cuda.current_device() if device.index is None else device.index)


def capture_id(stream: int) -> int:
    """Which capture of a CUDA graph, of all in this process, the current stream takes part in; 0 if it takes part in none."""
    if not is_capturing(stream):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    asked = library().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    check(asked, "asking which graph is captured")
    return number.value
