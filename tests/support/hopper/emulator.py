"""A Hopper GPU on the CPU for kernels in CUDA C++: the CUDA engine takes tensors of the CPU, and everything is its own down to the driver's calls.

The text that NVRTC would be given is compiled by the C++ compiler instead, its inline PTX turned into calls of functions (ptx.py), and run by an emulated
machine (machine/): threads are fibers, copies and products happen some time after they were asked for. What Triton compiles, its interpreter runs.
"""

import ctypes
import hashlib
import re
import struct
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.hopper.ptx import translated
from tests.support.recorded_launches import Driver, stand_in
from tilewise.engines.cpp import compiler
from tilewise.engines.gpu.limits import shared_memory

MACHINE = Path(__file__).parent / "machine"
SHARED = shared_memory(90)
EAGER, LATE, RANDOM = range(3)  # when copies and products happen: at once, as late as possible, at any time
FLAGS = ("-U_FORTIFY_SOURCE", "-w", "-I", str(MACHINE))
BARRIER = re.compile(r"\b(\w+_(?:full|empty)) = ")
DTYPE_BYTES = {6: 2, 7: 4, 9: 2}  # of CU_TENSOR_MAP_DATA_TYPE_*


class EmulationError(RuntimeError):
    """The kernel did what it must not, or came to a stop."""


class Timing(NamedTuple):
    kind: int = RANDOM
    seed: int = 0


class Emulator(Driver):
    """CUDA's driver: kernels are shared libraries, a launch runs them to the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # for compiled texts, by what they are
        self.timing = Timing()
        self.change: Callable[[str], str] = lambda text: text  # of a kernel's text, before it is compiled
        self.launches = 0
        self._kernels: list[_Kernel] = []

    # -- the compiler ------------------------------------------------------------------------------------------------

    def compiled(self, text: str, name: str) -> tuple[bytes, str]:
        """In place of NVRTC's: the path of a shared library."""
        path = self._library(kernel_source(self.change(text)), ("-O1",))
        return str(path).encode(), ""

    def _library(self, source: str, extra: tuple[str, ...]) -> Path:
        digest = hashlib.sha256(f"{compiler.identity()} {machine_digest()} {extra} {source}".encode()).hexdigest()
        path = self.folder / f"{digest[:32]}.so"
        if not path.exists():
            path.with_suffix(f".{id(self)}").write_bytes(compiler.compiled(source, (*FLAGS, *extra)))
            path.with_suffix(f".{id(self)}").rename(path)  # another process may be compiling the same
        return path

    @cache
    def machine(self) -> Any:
        run = ctypes.CDLL(str(self._library('#include "machine.cpp"', ("-O3",))), mode=ctypes.RTLD_GLOBAL).run_grid
        run.restype = ctypes.c_char_p
        return run

    # -- the driver --------------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, module: Any, path: bytes) -> int:
        self.machine()
        self._kernels.append(_Kernel(path.decode()))
        module._obj.value = len(self._kernels)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = module.value
        return 0

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any, *rest: Any) -> int:
        swizzle = rest[1]
        described = struct.pack("P", address.value) + b"".join([bytes(x)[:size].ljust(size, b"\0") for x, size in ((sizes, 32), (strides, 24), (box, 16), (steps, 16))])
        ctypes.memmove(at.value, (described + struct.pack("II", DTYPE_BYTES[dtype], swizzle)).ljust(128, b"\0"), 128)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, _: None) -> int:
        given, kernel = config._obj, self._kernels[function.value - 1]
        assert given.shared_bytes <= SHARED and given.programs % kernel.cluster == 0
        said = self.machine()(
            kernel.run, ctypes.c_void_p(parameters[0]), kernel.names, given.programs, given.threads, given.shared_bytes, kernel.cluster, *self.timing_numbers()
        )
        if said is not None:
            raise EmulationError(said.decode())
        self.launches += 1
        return 0

    def timing_numbers(self) -> tuple[Any, Any]:
        return ctypes.c_int(self.timing.kind), ctypes.c_uint64(self.timing.seed)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, sms: int = 4) -> Emulator:
    """The CUDA engine on the CPU, as long as the patch lasts. The kernel store is left out: kernels of changed texts would have the same keys."""
    from tilewise.engines.cuda import nvrtc
    from tilewise.engines.gluon import run
    from tilewise.engines.gpu import kernel_cache, launch, structure
    from tilewise.engines.gpu.kernel_request import OwnCompiler
    from tilewise.frontend import call_cache

    emulator = Emulator(folder)
    stand_in(monkeypatch, emulator, sms, SHARED)
    monkeypatch.setattr(nvrtc, "compiled", emulator.compiled)
    monkeypatch.setattr(kernel_cache, "load_or_build", lambda request, table: table.compiled(request))
    monkeypatch.setattr(structure, "_prepared", {})
    call_cache.forget()
    interpreted, prepare = launch.interpreted, launch.prepare

    def prepared(given: launch.Launch, device: torch.device) -> Any:
        is_ours = isinstance(given.table, OwnCompiler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "interpreted", lambda: not is_ours and interpreted())
            return prepare(given, device)

    monkeypatch.setattr(run, "prepare", prepared)
    return emulator


class _Kernel:
    """A loaded text."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.run = self._library.run_thread
        self.cluster = ctypes.c_int.in_dll(self._library, "cluster_size").value
        self.names = ctypes.byref(ctypes.c_char.in_dll(self._library, "barrier_names"))


def kernel_source(text: str) -> str:
    """C++ of a kernel's text: its entry, called by every thread, and the names of its barriers, for messages."""
    names = "".join([f'{{"{name}", Shared::{name}}}, ' for name in BARRIER.findall(text)])
    return f"""#include "language.h"
#include "instructions.h"
{translated(text)}
#pragma GCC visibility push(default)
extern "C" {{
int cluster_size = CLUSTER;
hopper::BarrierName barrier_names[] = {{{names}{{nullptr, 0}}}};
void run_thread(const void* args) {{ forward(*(const Args*)args); }}
}}
#pragma GCC visibility pop
"""


@lru_cache(maxsize=1)
def machine_digest() -> str:
    return hashlib.sha256(b"".join([path.read_bytes() for path in sorted(MACHINE.iterdir())])).hexdigest()
