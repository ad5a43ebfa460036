"""The threads that kernels run on: torch's OpenMP team, or a pool of our own."""

import ctypes
from functools import lru_cache

from tilewise.engines.cpp.compiler import FOR_KERNELS
from tilewise.engines.cpp.libraries import Unit, library_of

POOL = Unit('#include "pool.cpp"\n', FOR_KERNELS)
RUNTIMES = ("libgomp", "libiomp5")  # OpenMP libraries that export GOMP_parallel


@lru_cache(maxsize=1)
def pool() -> int:
    """The address of the function that runs a kernel's items on threads."""
    library = library_of(POOL, POOL.source)
    team = _torch_team()
    if team is not None:
        library.function("tilewise_use_team")(ctypes.c_void_p(team))
    return library.address("tilewise_run")


def _torch_team() -> int | None:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded, if any: a second team of threads would compete for the same cores."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = dict.fromkeys(line.split(maxsplit=5)[5].strip() for line in file if any(name in line for name in RUNTIMES))
    except (OSError, IndexError):
        return None
    if len(paths) != 1:  # none, or several: no way to tell which one torch uses
        return None
    try:
        return ctypes.cast(ctypes.CDLL(next(iter(paths))).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
