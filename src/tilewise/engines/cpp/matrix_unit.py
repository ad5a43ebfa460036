"""Whether the processor's matrix unit (AMX) can really be used: some virtual machines announce it and then end a process that tries."""

import os
import platform
import subprocess
import sys
import tempfile
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from tilewise import store
from tilewise.engines.cpp import compiler

SOURCE = '#include "probe.cpp"\n'
TRY = "import ctypes, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1]).tilewise_try_matrix_unit() == 1 else 1)"
SECONDS = 60


@lru_cache(maxsize=1)
def usable() -> bool:
    """Tried once on this machine, in a process of its own."""
    if platform.machine() != "x86_64" or "amx_bf16" not in compiler.processor():
        return False
    key = sha256(f"matrix unit {platform.node()} {os.uname().release} {compiler.identity()}".encode()).hexdigest()
    known = store.read(key)
    if known is None:
        known = {"usable": b"yes" if _try() else b"no"}
        store.write(key, known)
    return known.get("usable") == b"yes"


def _try() -> bool:
    try:
        data = compiler.compiled(SOURCE, compiler.FOR_KERNELS)
    except compiler.CompilerError:
        return False
    with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
        library = Path(folder) / "probe.so"
        library.write_bytes(data)
        try:
            ran = subprocess.run([sys.executable, "-I", "-S", "-c", TRY, str(library)], capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
    return ran.returncode == 0
