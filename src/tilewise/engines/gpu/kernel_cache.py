"""Compiled kernels: looked up in memory, then in the store, else built.

This is the plan's structure layer. Two keys lead to a kernel:

KernelRequest   names everything the code depends on: the kernel, the types of its arguments (dtype and alignment of pointers, 32 or 64
                bits of integers), its constants (generated mask and score functions by the hash of their source, tile sizes, flags),
                warps, stages, the architecture, and whether products and sums may be fused. With `sources_digest` (our own kernels'
                source, tilewise and Triton versions) it is the store's key. A kernel in CUDA C++ has its compiler's
                version and options among its constants. Values of integers and floats are arguments, so no window,
                length or scale makes a new kernel.
its short form  `launch.prepare` has the same facts as Python values, and the device a kernel is loaded on; it is quicker to hash.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilewise._version import __version__
from tilewise.core import store
from tilewise.core.locks import new_lock
from tilewise.engines.gpu import build_queue
from tilewise.engines.gpu.driver import Box, Kernel, UnusableBinary
from tilewise.engines.gpu.kernel_request import KernelRequest, KernelTable, OwnCompiler


class Counts:
    """Kernels this process compiled, and took from the store; tests count."""

    built = 0
    loaded = 0


FACTS = {"name", "shared", "warps", "types", "extra_pointers", "boxes"}  # what is needed to launch a kernel
_kernels: dict[Any, Kernel] = {}  # by the short form
_rebuilt: set[str] = set()  # kernels of the store that the driver did not load: built again once, since the driver itself may be at fault
_lock = new_lock()


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Changes with the kernels' own source and with the versions that compile them; torch has no part in that."""
    from importlib.metadata import version

    digest = hashlib.sha256(f"{__version__} {version('triton')}".encode())
    engines = Path(__file__).parent.parent
    for package in ("gpu", "triton", "gluon", "cuda", "cxx"):
        for path in sorted([path for kind in ("*.py", "*.cu", "*.cuh", "*.h") for path in (engines / package).rglob(kind)]):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def store_key(request: KernelRequest) -> str:
    return hashlib.sha256(f"{sources_digest()} {request!r}".encode()).hexdigest()


def find(short_key: Any) -> Kernel | None:
    return _kernels.get(short_key)


def load(short_key: Any, request: KernelRequest, table: KernelTable, device: int) -> Kernel:
    """The kernel, loaded on a device and remembered. One that the driver does not load is built again, once."""
    files = load_or_build(request, table)
    try:
        return _remembered(short_key, files, device)
    except UnusableBinary:
        key = store_key(request)
        if key in _rebuilt:
            raise
        _rebuilt.add(key)
        files = store.rebuilt(key, lambda: _build(request, table), _checked)
        return _remembered(short_key, files, device)


def _remembered(short_key: Any, files: dict[str, bytes], device: int) -> Kernel:
    with _lock:
        found = _kernels.get(short_key)
        if found is None:
            found = _kernels[short_key] = _loaded(files, device)
        return found


def _loaded(files: dict[str, bytes], device: int) -> Kernel:
    facts = json.loads(files["facts"])
    boxes = [Box(tuple(sizes), swizzle) for sizes, swizzle in facts["boxes"]]
    return Kernel(files["cubin"], facts["name"], facts["shared"], facts["warps"], tuple(facts["types"]), facts["extra_pointers"], boxes, device)


def _checked(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same, if they are a kernel's; else an error."""
    if not (json.loads(files["facts"]).keys() >= FACTS and files["cubin"]):
        raise ValueError("not what is kept of a kernel")
    return files


def load_or_build(request: KernelRequest, table: KernelTable) -> dict[str, bytes]:
    """The compiled kernel ("cubin") and what is needed to launch it ("facts"): from the store, or built and put there."""
    key = store_key(request)

    def find_or_build() -> dict[str, bytes]:
        files, built = store.find_or_build(key, lambda: _build(request, table), _checked)
        with _lock:
            Counts.built += built
            Counts.loaded += not built
        return files

    found: dict[str, bytes] = build_queue.once(key, find_or_build)
    return found


def _build(request: KernelRequest, table: KernelTable) -> dict[str, bytes]:
    build_queue.notify()
    if isinstance(table, OwnCompiler):
        return table.compiled(request)
    from tilewise.engines.gpu.compiler import compiled

    return compiled(request, table())
