"""A Hopper GPU on the CPU: the GPU engines take tensors of the CPU, and everything is their own down to the driver's calls.

The text that NVRTC would be given is compiled by the C++ compiler instead, its inline PTX turned into calls of functions (ptx.py). So is the PTX of what Triton
compiles (ptx_module.py); where its interpreter was chosen, that runs it. The rest is an emulated machine (machine/): threads are fibers, copies and products
happen some time after they were asked for.
"""

import ctypes
import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.hopper import ptx_module
from tests.support.hopper.ptx import translated
from tests.support.recorded_launches import Driver, stand_in
from tilewise.engines.cpp import compiler
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu.driver import MAP_ALIGNMENT, MAP_BYTES, aligned_address
from tilewise.engines.gpu.kernel_request import KernelRequest, KernelTable, OwnCompiler
from tilewise.engines.gpu.launch import Stretch
from tilewise.engines.gpu.limits import shared_memory

MISSING = NO_GLUON or (None if compiler.find() else "needs a C++ compiler")
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
        self.marked = 0  # rows that a kernel has left to the fix-up, or computed again by itself, which would hide what it did to them
        self.tensors: list[Any] = []  # whose addresses a launch is given
        self.workspace: list[Any] = []  # the same, of the memory that a pass' kernels hand each other
        self._kernels: list[_Kernel] = []

    # -- the compiler ------------------------------------------------------------------------------------------------

    def compiled(self, text: str, name: str) -> tuple[bytes, str]:
        """In place of NVRTC's: the path of a shared library."""
        path = self._library(kernel_source(self.change(text)), ("-O1",))
        return str(path).encode(), ""

    def built(self, request: KernelRequest, table: KernelTable) -> dict[str, bytes]:
        """In place of the store's: the path of a shared library, and the facts needed to launch it."""
        if isinstance(table, OwnCompiler):
            return table.compiled(request)
        files, ptx = with_ptx(request, table(), self.folder)
        path = self._library(module_source(self.change(ptx)), ("-O0", "-fwrapv", "-fno-strict-aliasing", "-fno-operator-names"))
        return files | {"cubin": str(path).encode()}

    def _library(self, source: str, extra: tuple[str, ...]) -> Path:
        digest = hashlib.sha256(f"{compiler.identity()} {machine_digest()} {extra} {source}".encode()).hexdigest()
        path = self.folder / f"{digest[:32]}.so"
        if not path.exists():
            own = path.with_suffix(f".{os.getpid()}")  # another process may be compiling the same
            own.write_bytes(compiler.compiled(source, (*FLAGS, *extra)))
            own.rename(path)
        return path

    @cached_property
    def machine(self) -> Any:
        library = ctypes.CDLL(str(self._library('#include "machine.cpp"', ("-O3",))), mode=ctypes.RTLD_GLOBAL)
        library.run_grid.restype, library.give_memory.restype = ctypes.c_char_p, ctypes.c_void_p
        return library

    # -- the driver --------------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, module: Any, path: bytes) -> int:
        self._kernels.append(_Kernel(path.decode(), self.machine))
        module._obj.value = len(self._kernels)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = module.value
        return 0

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any, *rest: Any) -> int:
        """As struct TensorMap of machine/state.h."""
        lists = [bytes(x)[:size].ljust(size, b"\0") for x, size in ((sizes, 40), (strides, 32), (box, 20))]
        described = b"".join([struct.pack("P", address.value), *lists, struct.pack("III", rank, DTYPE_BYTES[dtype], rest[1])])
        ctypes.memmove(at.value, described.ljust(MAP_BYTES, b"\0"), MAP_BYTES)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, _: None) -> int:
        given, kernel = config._obj, self._kernels[function.value - 1]
        assert given.shared_bytes <= SHARED and given.programs % kernel.cluster == 0
        with self._moved(parameters[0], kernel.bytes_of_args) as args:
            grid = (kernel.window, kernel.reads_early, given.programs, given.threads, given.shared_bytes, kernel.cluster)
            said = self.machine.run_grid(kernel.run, args, kernel.names, *grid, self.timing.kind, ctypes.c_uint64(self.timing.seed))
            if said is not None:
                raise EmulationError(said.decode())
            self.launches += 1
            self.marked += kernel.marked(args)
        return 0

    @contextmanager
    def _moved(self, arguments: int, size: int) -> Iterator[Any]:
        """The arguments, with the tensors in guarded memory; what is written there is copied back."""
        machine, moved = self.machine, ctypes.create_string_buffer(size + MAP_ALIGNMENT)
        at = aligned_address(moved)
        ctypes.memmove(at, arguments, size)
        words = (ctypes.c_uint64 * (size // 8)).from_address(at)
        places: dict[int, int] = {}
        stretches = _stretches(self.tensors + self.workspace)
        for n, word in enumerate(words):
            if word in stretches:
                begin, size = stretches[word]
                if begin not in places:
                    places[begin] = machine.give_memory(ctypes.c_size_t(begin), ctypes.c_size_t(size))
                    ctypes.memmove(places[begin], begin, size)
                words[n] = places[begin] + word - begin
        try:
            yield ctypes.c_void_p(at)
            for given, place in places.items():
                ctypes.memmove(given, place, stretches[given][1])
        finally:
            machine.take_memory()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, sms: int = 4) -> Emulator:
    """The CUDA engine on the CPU, as long as the patch lasts. The kernel store is left out: kernels of changed texts would have the same keys."""
    from tilewise.engines.cuda import nvrtc
    from tilewise.engines.gluon import run
    from tilewise.engines.gpu import kernel_cache, launch, structure
    from tilewise.frontend import call_cache

    emulator = Emulator(folder)
    stand_in(monkeypatch, emulator, sms, SHARED)
    monkeypatch.setattr(nvrtc, "compiled", emulator.compiled)
    monkeypatch.setattr(kernel_cache, "load_or_build", emulator.built)
    monkeypatch.setattr(structure, "_prepared", {})
    call_cache.forget()
    interpreted, prepare = launch.interpreted, launch.prepare

    def prepared(given: launch.Launch, device: torch.device) -> Any:
        is_ours = isinstance(given.table, OwnCompiler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "interpreted", lambda: not is_ours and interpreted())
            return prepare(given, device)

    monkeypatch.setattr(run, "prepare", prepared)
    monkeypatch.setattr(run, "_counters", {})  # a kernel that was stopped leaves one anywhere
    _tell_tensors(monkeypatch, emulator)
    return emulator


def _tell_tensors(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """The emulator is told how large what it is given addresses of is: the call's own tensors, static ones, and parts of a pass' workspace."""
    from tilewise.engines.gpu.launch import BoundLaunch, PreparedLaunch
    from tilewise.engines.gpu.workspace import Workspace

    static: dict[int, tuple[Any, Any]] = {}
    launch, bind, parts = BoundLaunch.launch, PreparedLaunch._with, Workspace.parts

    def launched(self: BoundLaunch, tensors: Sequence[Any]) -> None:
        emulator.tensors = [t for t in tensors if t is not None and not isinstance(t, int)] + static[id(self)][1]
        launch(self, tensors)

    def bound(self: PreparedLaunch, tensors: Sequence[Any], *rest: Any) -> BoundLaunch:
        made = bind(self, tensors, *rest)
        static[id(made)] = made, list(tensors)
        return made

    def parted(self: Workspace, memory: torch.Tensor) -> list[Any]:
        emulator.workspace = [t for t in self.tensors(memory) if t is not None]
        return parts(self, memory)

    monkeypatch.setattr(Workspace, "parts", parted)
    monkeypatch.setattr(BoundLaunch, "launch", launched)
    monkeypatch.setattr(PreparedLaunch, "_with", bound)


def _stretches(tensors: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Of memory in which these tensors lie, by their addresses: where it begins, and its size. Those that overlap lie in one."""
    found: dict[int, tuple[int, int]] = {}
    begin = end = 0
    members: list[int] = []
    for at, size in sorted([(t.data_ptr(), bytes_of(t)) for t in tensors]):
        if size == 0:
            continue
        if at >= end:
            begin, members = at, []
        end = max(end, at + size)
        members.append(at)
        found |= dict.fromkeys(members, (begin, end - begin))
    return found


def bytes_of(t: Any) -> int:
    """From its first byte to behind its last."""
    if isinstance(t, Stretch):
        return 4 * len(t)
    return (sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) + 1) * t.element_size() if t.numel() > 0 else 0


class _Kernel:
    """A loaded text."""

    def __init__(self, path: str, machine: Any) -> None:
        self._machine = machine  # whose functions it calls, so that has to be loaded before
        self._library = ctypes.CDLL(path)
        self.run, self.marked = self._library.run_thread, self._library.marked_rows
        self.cluster, self.bytes_of_args, self.window, self.reads_early = (
            ctypes.c_int.in_dll(self._library, name).value for name in ("cluster_size", "bytes_of_args", "window_begin", "reads_early")
        )
        self.names = ctypes.byref(ctypes.c_char.in_dll(self._library, "barrier_names"))


def kernel_source(text: str) -> str:
    """C++ of a kernel's text: its entry, called by every thread, and the names of its barriers, for messages."""
    names = "".join([f'{{"{name}", Shared::{name}}}, ' for name in BARRIER.findall(text)])
    return f"""#include "language.h"
#include "instructions.h"
namespace {{ int repaired; }}
{translated(text).replace("repair_row(a, bh, first", "repaired++, repair_row(a, bh, first")}
#pragma GCC visibility push(default)
extern "C" {{
int cluster_size = CLUSTER, bytes_of_args = sizeof(Args), window_begin = 1040, reads_early = 0;  // the window: on 16 bytes and no more
hopper::BarrierName barrier_names[] = {{{names}{{nullptr, 0}}}};
void run_thread(const void* args) {{ forward(*(const Args*)args); }}
int marked_rows(const Args* a) {{  // or those that the kernel computed again by itself, a warp each
    int count = repaired / 32;
    repaired = 0;
    if (REPAIRS) return count;
    for (long long i = 0; i < (long long)a->n_bh * a->n_q; i++) count += a->lse[i] != a->lse[i];
    return count;
}}
}}
#pragma GCC visibility pop
"""


def with_ptx(request: KernelRequest, table: Any, folder: Path) -> tuple[dict[str, bytes], str]:
    """What the store keeps of a kernel that Triton compiles, but for the binary, and its PTX."""
    from triton.backends.nvidia.compiler import CUDABackend

    from tilewise.engines.gpu import compiler

    compile, seen = compiler.triton.compile, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))  # others want binaries
        patch.setattr(CUDABackend, "make_cubin", lambda *given: b"none")
        patch.setattr(compiler.triton, "compile", lambda *given, **options: seen.append(compile(*given, **options)) or seen[-1])
        files = compiler.compiled(request, table)
    return files, seen[-1].asm["ptx"]


def module_source(ptx: str) -> str:
    """C++ of a kernel that Triton has compiled. Shared memory begins where swizzled tiles may, as on the GPU. The Gluon backward begins a step more than there
    are: it has no branch around products."""
    module = ptx_module.translated(ptx)
    return f"""#include "module.h"
namespace {{
using module::u16;
{module.text}
}}
#pragma GCC visibility push(default)
extern "C" {{
int cluster_size = 1, bytes_of_args = {module.bytes_of_args}, window_begin = 1024, reads_early = 1;
hopper::BarrierName barrier_names[] = {{{{nullptr, 0}}}};
void run_thread(const void* args) {{ kernel((const char*)args); }}
int marked_rows(const void*) {{ return 0; }}
}}
#pragma GCC visibility pop
"""


@lru_cache(maxsize=1)
def machine_digest() -> str:
    return hashlib.sha256(b"".join([path.read_bytes() for path in sorted(MACHINE.iterdir())])).hexdigest()
