"""Whether the processor's matrix unit (AMX) works: some virtual machines announce it and then kill any process that uses it."""

import ctypes
import os
import platform
import subprocess
import sys
from functools import lru_cache
from hashlib import sha256

from tilewise.core import store
from tilewise.core.folders import temporary_folder
from tilewise.engines.cpp import compiler

SOURCE = '#include "probe.cpp"\n'
TRY = "import ctypes, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1]).tilewise_try_matrix_unit() == 1 else 1)"
SECONDS = 60
ANSWERS = (b"no", b"yes")
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


@lru_cache(maxsize=1)
def usable() -> bool:
    """Tried once per machine, in a subprocess; the store remembers the result."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or "amx_bf16" not in compiler.processor():
        return False
    key = sha256(f"matrix unit {platform.node()} {os.uname().release} {compiler.identity()}".encode()).hexdigest()
    known = store.find(key, lambda parts: ANSWERS.index(parts["usable"]))
    if known is None:
        known = _try()
        if known is not None:
            store.write(key, {"usable": ANSWERS[known]})
    return bool(known) and _granted()


def _granted() -> bool:
    """Linux grants a process the tile registers only on request, and may refuse."""
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _try() -> bool | None:
    """Whether a product comes out right; None if it could not be tried."""
    try:
        data = compiler.compiled(SOURCE, compiler.FOR_KERNELS)
        with temporary_folder() as folder:
            library = folder / "probe.so"
            library.write_bytes(data)
            ran = subprocess.run([sys.executable, "-I", "-S", "-c", TRY, str(library)], capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired, compiler.CompilerError):
        return None
    return ran.returncode == 0
