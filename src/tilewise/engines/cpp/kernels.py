"""The libraries of the engine's own kernels, and how they are called."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tilewise.engines.cpp import pairs
from tilewise.engines.cpp.compiler import FOR_KERNELS
from tilewise.engines.cpp.libraries import Unit, library_of

ELEMENT = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat", torch.float16: "half"}
STORED = ELEMENT | {torch.float8_e4m3fn: "float8_e4m3", torch.float8_e5m2: "float8_e5m2"}

Classifier = Callable[[bytes], None]
Kernel = Callable[[bytes, bytes], None]  # takes what is prepared and what differs from call to call, both packed (arguments.py)


def kernel_unit(name: str, dtype: torch.dtype, result: torch.dtype, stored: torch.dtype | None = None) -> Unit:
    """The library of a kernel: "forward" (which includes decode and classify) or "backward". `result` is the dtype of out and gradients, `stored` that of keys
    and values, `dtype` if it is None."""
    type_flags = () if result == dtype else (f"-DRESULT={ELEMENT[result]}",)
    type_flags += () if stored is None or stored == dtype else (f"-DSTORED={STORED[stored]}",)
    unit = pairs.unit() if in_pairs(dtype) else None
    return Unit(f'#include "{name}.cpp"\n', (*FOR_KERNELS, f"-DELEMENT={ELEMENT[dtype]}", *type_flags, *(() if unit is None else unit.flags)))


def in_pairs(dtype: torch.dtype) -> bool:
    """Whether products are of pairs of bfloat16 numbers."""
    return dtype == torch.bfloat16 and pairs.unit() is not None


@lru_cache(maxsize=32)
def kernel(name: str, dtype: torch.dtype, result: torch.dtype, stored: torch.dtype | None = None) -> Kernel:
    """ "forward", "decode" or "backward"."""
    unit = kernel_unit("backward" if name == "backward" else "forward", dtype, result, stored)
    function: Any = library_of(unit, unit.source).function(f"tilewise_call_{name}")
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_char_p), None
    found: Kernel = function
    return found


@lru_cache(maxsize=16)
def classifier(dtype: torch.dtype, result: torch.dtype) -> Classifier:
    unit = kernel_unit("forward", dtype, result)
    function: Any = library_of(unit, unit.source).function("tilewise_classify")
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    found: Classifier = function
    return found
