"""Compiled C++ libraries: cached in this process, in the store, or built now."""

import _ctypes
import ctypes
import hashlib
import os
import tempfile
import weakref
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from tilewise._version import __version__
from tilewise.core import store
from tilewise.core.locks import new_lock
from tilewise.engines import cxx
from tilewise.engines.cpp import compiler
from tilewise.engines.cpp.compiler import FOR_PROGRAMS, CompilerError

MAX_LOADED = 1024  # libraries of masks and scores, each of a few pages; the kernels' own are few, and stay
Value = TypeVar("Value")


class Counts:
    """How many libraries this process compiled, and how many it loaded from the store (for tests)."""

    built = 0
    loaded = 0


class Unit(NamedTuple):
    """What one library is compiled from."""

    source: str
    extra: tuple[str, ...]  # further compiler flags


class Library:
    """A loaded library. That of a mask or score is unloaded when it was evicted and no call holds it any more."""

    def __init__(self, path: str, unloads: bool) -> None:
        self._library = ctypes.CDLL(path)
        if unloads and hasattr(_ctypes, "dlclose"):
            weakref.finalize(self, _ctypes.dlclose, self._library._handle).atexit = False  # at the end of the process, threads may still be in it
        self.addresses: dict[str, int] = {}

    def function(self, name: str) -> Any:
        return getattr(self._library, name)

    def address(self, name: str) -> int:
        found = self.addresses.get(name)
        if found is None:
            value = ctypes.cast(self.function(name), ctypes.c_void_p).value
            assert value is not None
            found = self.addresses[name] = value
        return found


# Of this process: not by compiler and target, whose libraries may be mixed (they share pointers and plain numbers). The store's keys have both.
_libraries: OrderedDict[Unit, Library] = OrderedDict()
_failed: dict[Unit, str] = {}  # what could not be compiled, and why: it is not tried again in this process
_lock = new_lock()


def library_of(unit: Unit, program: str) -> Library:
    """The library of a unit; an error names the program that it is compiled from. Whoever uses an address of it must hold the library meanwhile."""
    found = _libraries.get(unit)
    if found is None:
        with _lock:
            found = _libraries.get(unit)
            if found is None:
                found = _libraries[unit] = _compiled_once(unit, program)
                _evict()
    elif 2 * len(_libraries) > MAX_LOADED:  # only then the order matters
        with suppress(KeyError):  # another thread has just evicted it
            _libraries.move_to_end(unit)
    return found


def _evict() -> None:
    programs = [unit for unit in list(_libraries) if unit.extra == FOR_PROGRAMS]  # a list at once: other threads reorder them
    for unit in programs[: max(0, len(programs) - MAX_LOADED)]:
        del _libraries[unit]


def _compiled_once(unit: Unit, program: str) -> Library:
    if unit not in _failed:
        try:
            return _find_or_build(unit)
        except CompilerError as error:
            if len(_failed) >= MAX_LOADED:
                _failed.clear()
            _failed[unit] = str(error)
    raise CompilerError(f"{_failed[unit]} (compiling {program[:200]!r})")


def _find_or_build(unit: Unit) -> Library:
    return _counted(store.find_or_build(key_of(unit), lambda: _build(unit), lambda parts: _load(parts["library"], unit.extra == FOR_PROGRAMS)))


def build_unit(unit: Unit) -> None:
    """See that the compiled unit is in the store."""
    _counted(store.find_or_build(key_of(unit), lambda: _build(unit), lambda parts: parts["library"]))


def _build(unit: Unit) -> dict[str, bytes]:
    return {"library": compiler.compiled(unit.source, unit.extra)}


def _counted(found: tuple[Value, bool]) -> Value:
    Counts.built += found[1]
    Counts.loaded += not found[1]
    return found[0]


def key_of(unit: Unit) -> str:
    return hashlib.sha256(f"{sources_digest()} {compiler.identity()} {unit!r}".encode()).hexdigest()


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Part of every cache key: changes with tilewise's version and with the C++ it comes with."""
    digest = hashlib.sha256(__version__.encode())
    for path in [*sorted(compiler.KERNELS.iterdir()), *sorted(cxx.HEADERS.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _load(data: bytes, unloads: bool) -> Library:
    """Loads a library by way of a temporary file, which is deleted once it is loaded."""
    reasons = []
    for folder in (None, str(store.kernel_root())):  # the system's temporary folder may be mounted noexec
        path = ""
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix="tilewise-", suffix=".so", delete=False) as file:
                path = file.name
                file.write(data)
            return Library(path, unloads)
        except OSError as error:
            reasons.append(str(error))
        finally:
            if path:
                with suppress(OSError):
                    os.unlink(path)
    raise CompilerError(f"a compiled kernel could not be loaded: {'; '.join(reasons)}")
