"""Finds and runs the C++ compiler."""

import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

from tilewise.core.folders import temporary_folder
from tilewise.engines import cxx

NAMES = ("g++", "clang++", "c++")
COMPILER, TARGET = "TILEWISE_CXX", "TILEWISE_MARCH"  # environment variables, read when something is compiled
SECONDS = 120
INSTALL = "install one, such as g++ (apt install g++; dnf install gcc-c++; xcode-select --install)"
KERNELS = Path(__file__).parent / "kernel"

# No fast-math: NaN and Inf keep their meaning. Kernels may use FMA; generated programs may not, because they must round as torch does.
FLAGS = ("-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fopenmp-simd", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
FOR_KERNELS = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-ffp-contract=fast")
FOR_PROGRAMS = ("-O3", "-ffp-contract=off")
GCC_ONLY = ("-fvect-cost-model=dynamic",)  # an error to clang, whose vectoriser needs no asking


class CompilerError(Exception):
    """The compiler is missing or failed; the message says what to do."""


def find() -> str | None:
    """The compiler's path."""
    named = os.environ.get(COMPILER)
    return next((path for path in map(shutil.which, (named,) if named else NAMES) if path is not None), None)


def _found() -> str:
    path = find()
    if path is None and os.environ.get(COMPILER):
        raise CompilerError(f"{COMPILER} names {os.environ[COMPILER]!r}, which is no program that can be run; name a C++ compiler, or {INSTALL}")
    if path is None:
        raise CompilerError(f"no C++ compiler was found ({', '.join(NAMES)}); {INSTALL}")
    return path


def identity() -> str:
    """Part of every cache key: changes with the compiler and with the processor it compiles for (flags() names the target)."""
    return f"{_stamp(_found())} {processor()} {' '.join(flags())}"


@lru_cache(maxsize=4)
def _stamp(path: str) -> str:
    real = os.path.realpath(path)
    status = os.stat(real)
    return f"{real} {status.st_size} {status.st_mtime_ns}"


@lru_cache(maxsize=1)
def processor() -> str:
    """The processor's features, which decide what `-march=native` generates."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(2**14).splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    return f"{platform.machine()} {sorted(found.items())}"


def flags() -> tuple[str, ...]:
    return (*FLAGS, target())


def target() -> str:
    """What to compile for, as a flag."""
    named = os.environ.get(TARGET)
    if named:
        return f"-march={named}"
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


@lru_cache(maxsize=4)
def _is_clang(path: str) -> bool:
    """Asked of the compiler itself: clang goes by many names, on macOS by that of g++."""
    ran = subprocess.run([path, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, timeout=SECONDS, check=False)
    return b"__clang__" in ran.stdout


def compiled(source: str, extra: tuple[str, ...]) -> bytes:
    """Compiles C++ source, which may include files of kernel/, into a shared library."""
    path = _found()
    try:
        with temporary_folder() as folder:
            return _compiled_in(folder, path, source, extra)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"the C++ compiler {path} could not be run: {error}") from error


def _compiled_in(folder: Path, path: str, source: str, extra: tuple[str, ...]) -> bytes:
    library = folder / "library.so"
    known = [flag for flag in extra if flag not in GCC_ONLY or not _is_clang(path)]
    command = [path, *flags(), *known, "-I", str(KERNELS), "-I", str(cxx.HEADERS), "-x", "c++", "-", "-o", str(library)]
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}  # its own temporary files go there too, and it speaks English
    ran = subprocess.run(command, input=source.encode(), capture_output=True, timeout=SECONDS, check=False, env=environment)
    if ran.returncode != 0 or not library.exists():
        said = ran.stderr.decode(errors="replace").splitlines()
        messages = [line for line in said if "error" in line] or said or [f"it ended with {ran.returncode}"]
        raise CompilerError(f"the C++ compiler {path} failed: {messages[0][:300]}; {INSTALL}")
    return library.read_bytes()
