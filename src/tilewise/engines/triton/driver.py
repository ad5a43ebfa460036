"""Loading and starting compiled kernels through the CUDA driver, by ctypes: no C compiler, no launcher to build.

Arguments are packed into one buffer, laid out as the kernel's parameters are: in order, each at its natural alignment. The first
are pointers, so what follows them can be packed apart.
"""

import ctypes
import struct
import threading
from functools import lru_cache
from typing import Any

import torch

SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
STATIC_SHARED = 48 * 1024  # what a kernel may use without asking
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_*
PACK = {"i32": "i", "i64": "q", "fp32": "f"}  # pointers are "P"


class OutOfSharedMemory(RuntimeError):
    """A kernel needs more shared memory than the GPU has."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return cuda


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


class Kernel:
    """A kernel loaded on one device, ready to start."""

    def __init__(self, cubin: bytes, name: str, shared: int, warps: int, types: tuple[str, ...], extra_pointers: int, device: int) -> None:
        if shared > shared_limit(device):
            raise OutOfSharedMemory(f"{shared} bytes of shared memory, the GPU has {shared_limit(device)}")
        cuda = library()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "loading a kernel")
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        if shared > STATIC_SHARED:
            check(cuda.cuFuncSetAttribute(function, DYNAMIC_SHARED, shared), "reserving shared memory")
        self._function = function
        self._threads = 32 * warps
        self._shared = shared
        self._codes = [PACK.get(t, "P") for t in types] + ["P"] * extra_pointers
        self._extra_pointers = (0,) * extra_pointers
        self._size = ctypes.c_size_t(struct.calcsize("@" + "".join(self._codes)))
        self._buffer = ctypes.create_string_buffer(self._size.value)
        self._address = ctypes.addressof(self._buffer)
        self._extra = (ctypes.c_void_p * 5)(BUFFER_POINTER, self._address, BUFFER_SIZE, ctypes.addressof(self._size), END)
        self._lock = threading.Lock()  # the driver copies the buffer while it starts a kernel, not later

    def pack_rest(self, values: list[Any]) -> bytes:
        """The arguments from some pointer argument on, laid out as the kernel's last parameters."""
        codes = self._codes[len(self._codes) - len(values) - len(self._extra_pointers) :]
        return struct.pack("@" + "".join(codes), *values, *self._extra_pointers)

    def start(self, programs: int, stream: int, arguments: bytes) -> None:
        with self._lock:
            ctypes.memmove(self._address, arguments, len(arguments))
            code = library().cuLaunchKernel(self._function, programs, 1, 1, self._threads, 1, 1, self._shared, stream, None, self._extra)
        if code != 0:
            check(code, "starting a kernel")


def current_stream(device: int) -> int:
    """The stream's handle, the quick way that torch's own compiler takes."""
    return torch._C._cuda_getCurrentRawStream(device)
