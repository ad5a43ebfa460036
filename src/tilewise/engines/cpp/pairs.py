"""Which instructions multiply pairs of bfloat16 numbers here, if any (kernel/pairs.h).

Some virtual machines announce such instructions and then kill any process that uses them, so they are tried first, in a process of their own.
"""

import ctypes
import os
import platform
import subprocess
import sys
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from tilewise.core import store
from tilewise.core.folders import temporary_folder
from tilewise.engines.cpp import compiler


class Unit(NamedTuple):
    name: str
    feature: str  # as Linux calls it
    flags: tuple[str, ...]  # for kernels that use it
    on_request: bool = False  # Linux grants a process its registers only on request, and may refuse


UNITS = (
    Unit("the matrix unit (AMX)", "amx_bf16", ("-DPAIRS", "-DMATRIX_UNIT"), on_request=True),
    Unit("AVX-512's bfloat16 instructions", "avx512_bf16", ("-DPAIRS",)),
)
SOURCE = '#define ELEMENT bfloat\n#include "probe.cpp"\n'
TRY = "import ctypes, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1]).tilewise_try_pairs() == 1 else 1)"
SECONDS = 60
ANSWERS = (b"no", b"yes")
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


@lru_cache(maxsize=1)
def unit() -> Unit | None:
    """The fastest that works."""
    return next((u for u in UNITS if _works(u)), None)


def _works(u: Unit) -> bool:
    """Tried once per machine, compiler and target, in a subprocess; the store remembers the result."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or u.feature not in compiler.processor():
        return False
    key = sha256(f"{u.feature} {platform.node()} {os.uname().release} {compiler.identity()}".encode()).hexdigest()
    known = store.find(key, lambda parts: ANSWERS.index(parts["usable"]))
    if known is None:
        known = _try(u)
        if known is not None:
            store.write(key, {"usable": ANSWERS[known]})
    return bool(known) and (not u.on_request or _granted())


def _granted() -> bool:
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _try(u: Unit) -> bool | None:
    """Whether a product comes out right; None if it could not be tried."""
    try:
        data = compiler.compiled(SOURCE, (*compiler.FOR_KERNELS, *u.flags))
        with temporary_folder() as folder:
            library = folder / "probe.so"
            library.write_bytes(data)
            ran = subprocess.run([sys.executable, "-I", "-S", "-c", TRY, str(library)], capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired, compiler.CompilerError):
        return None
    return ran.returncode == 0
