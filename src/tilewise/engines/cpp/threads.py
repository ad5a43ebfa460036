"""The threads kernels run on: torch's own, or the pool's."""

import ctypes
from functools import lru_cache

from tilewise.engines.cpp.compiler import FOR_KERNELS
from tilewise.engines.cpp.libraries import Unit, address_of, library_of

POOL = Unit('#include "pool.cpp"\n', FOR_KERNELS)
RUNTIMES = ("libgomp", "libiomp5")  # OpenMP libraries that start a team by GOMP_parallel


@lru_cache(maxsize=1)
def pool() -> int:
    """The address of the function that runs a kernel's items on threads."""
    library = library_of(POOL)
    team = _torch_team()
    if team is not None:
        library.tilewise_use_team(ctypes.c_void_p(team))
    return address_of(library, "tilewise_run")


def _torch_team() -> int | None:
    """GOMP_parallel of the OpenMP library that torch has loaded, if it has one: two teams on the same cores would disturb each other."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            paths = dict.fromkeys(line.split(maxsplit=5)[5].strip() for line in file if any(name in line for name in RUNTIMES))
    except (OSError, IndexError):
        return None
    if len(paths) != 1:  # none, or more than one, of which it is not known which torch uses
        return None
    try:
        return address_of(ctypes.CDLL(next(iter(paths))), "GOMP_parallel")
    except (OSError, AttributeError):
        return None
