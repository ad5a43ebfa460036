"""NVRTC, NVIDIA's compiler of CUDA C++ as a library, through ctypes: from a text to a binary, with or without a GPU. No nvcc, no headers.

torch's CUDA builds bring the library; the package nvidia-cuda-nvrtc has it for machines without a GPU.
"""

import ctypes
import glob
import os
import re
import sys
from functools import lru_cache

import torch

OLDEST = (12, 3)  # compiles setmaxnreg and multicast for sm_90a
MAJORS = (13, 12)
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-default-device", "--ptxas-options=-v")  # the last: registers and spills are told in the log
MISSING = "NVRTC, the compiler of CUDA C++, was not found; torch's CUDA builds bring it (or pip install nvidia-cuda-nvrtc, nvidia-cuda-nvrtc-cu12 for CUDA 12)"


class CompileError(RuntimeError):
    """The compiler's own words, or those of the library around it."""


def refusal() -> str | None:
    """Why nothing can be compiled; None if it can. A constant to torch.compile."""
    return _refusal()


refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without what it imports


@lru_cache(maxsize=1)
def _refusal() -> str | None:
    try:
        found = version()
    except OSError:
        return MISSING
    except CompileError as error:
        return str(error)
    if found < OLDEST:
        return f"it needs NVRTC {OLDEST[0]}.{OLDEST[1]} or newer, got {found[0]}.{found[1]} (pip install nvidia-cuda-nvrtc)"
    return None


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Of the packages beside torch, or wherever the system looks; the newest whose kernels the driver that torch needs can load."""
    newest = int((torch.version.cuda or str(MAJORS[0])).split(".")[0])
    for name in [f"libnvrtc.so.{major}" for major in MAJORS if major <= newest]:
        found = [path for folder in sys.path for path in sorted(glob.glob(os.path.join(glob.escape(folder), "nvidia", "*", "lib", name)))]
        for candidate in (*found, name):
            try:
                return _loaded(candidate)
            except OSError:
                continue
    raise OSError(MISSING)


def _loaded(path: str) -> ctypes.CDLL:
    """NVRTC asks for a second library by its bare name, and finds it where it has been loaded from beside the first."""
    folder, name = os.path.split(path)
    if folder:
        for second in glob.glob(os.path.join(glob.escape(folder), f"libnvrtc-builtins.so.{name.rsplit('.', 1)[1]}*")):
            ctypes.CDLL(second)
    return ctypes.CDLL(path)


def found_at() -> str:
    """The library's path, or its name where the system knows it."""
    return str(library()._name)


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "asking for the version")
    return major.value, minor.value


def compiled(text: str, name: str) -> tuple[bytes, str]:
    """The binary for sm_90a of a program, and what the compiler said. `name` is what errors call it."""
    nvrtc, program = library(), ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None), "reading a program")
    try:
        options = [option.encode() for option in OPTIONS]
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise CompileError(f"NVRTC could not compile {name}:\n{log}")
        return _text(program, "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """What NVRTC has of this name."""
    size = ctypes.c_size_t()
    _check(getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"asking for the {what}")
    room = ctypes.create_string_buffer(size.value)
    _check(getattr(library(), f"nvrtcGet{what}")(program, room), f"taking the {what}")
    return room.raw


def _check(code: int, doing: str) -> None:
    if code != 0:
        words = library().nvrtcGetErrorString
        words.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {doing} failed: {words(code).decode()}")


def spilled_bytes(log: str) -> int:
    """Bytes that threads keep in memory for want of registers, stores and loads, as the compiler counts them."""
    return sum([int(stores) + int(loads) for stores, loads in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)])
