"""Compiled C++ libraries: cached in this process, in the store, or built now."""

import ctypes
import hashlib
import os
import tempfile
import threading
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from tilewise._version import __version__
from tilewise.core import store
from tilewise.engines.cpp import compiler
from tilewise.engines.cpp.compiler import CompilerError


class Counts:
    """How many libraries this process compiled, and how many it loaded from the store (for tests)."""

    built = 0
    loaded = 0


class Unit(NamedTuple):
    """What one library is compiled from."""

    source: str
    extra: tuple[str, ...]  # further compiler flags


# Of this process: not by compiler and target, whose libraries may be mixed (they share pointers and plain numbers). The store's keys have both.
_libraries: dict[Unit, ctypes.CDLL] = {}
_lock = threading.Lock()


def library_of(unit: Unit) -> ctypes.CDLL:
    found = _libraries.get(unit)
    if found is None:
        with _lock:
            found = _libraries.get(unit)
            if found is None:
                found = _libraries[unit] = _load(build_unit(unit)["library"])
    return found


def build_unit(unit: Unit) -> dict[str, bytes]:
    """The compiled unit, from the store or built now: {"library": bytes}."""
    files, built = store.find_or_build(key_of(unit), lambda: {"library": compiler.compiled(unit.source, unit.extra)})
    Counts.built += built
    Counts.loaded += not built
    return files


def key_of(unit: Unit) -> str:
    return hashlib.sha256(f"{sources_digest()} {compiler.identity()} {unit!r}".encode()).hexdigest()


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Part of every cache key: changes with tilewise's version and with the source in kernel/."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(compiler.KERNELS.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _load(data: bytes) -> ctypes.CDLL:
    """Loads a library by way of a temporary file, which is deleted once it is loaded."""
    reasons = []
    for folder in (None, str(store.kernel_root())):  # the system's temporary folder may be mounted noexec
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="tilewise-", suffix=".so", delete=False) as file:
                file.write(data)
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            return ctypes.CDLL(file.name)
        except OSError as error:
            reasons.append(str(error))
        finally:
            with suppress(OSError):
                os.unlink(file.name)
    raise CompilerError(f"a compiled kernel could not be loaded: {'; '.join(reasons)}")


def address_of(library: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found
