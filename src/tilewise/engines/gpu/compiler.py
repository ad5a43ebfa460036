"""Compiling a kernel with Triton, for any architecture, with or without a GPU."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from tilewise.core.folders import process_folder, warn_once
from tilewise.engines.gpu import build_queue
from tilewise.engines.gpu.driver import TENSOR_MAP
from tilewise.engines.gpu.generated import Generated
from tilewise.engines.gpu.kernel_request import KernelRequest, TmaBlock

DIVISIBLE = [["tt.divisibility", 16]]
TENSOR_MEMORY, TOO_MUCH = 512, 2**20  # columns of it that Blackwell has; bytes of shared memory that no GPU has
RED_ADD = "red.relaxed.gpu.global.add.f32"  # what primitives.red_add does for every element

# Whose source is read first, where several are waiting: those that are read in no time, then those that take longest after it; the others last.
READ_FIRST = ("classify", "base_states", "bwd_preprocess", "decode_combine", "hopper_bwd_preprocess", "bwd", "hopper_fwd", "hopper_bwd")
# Triton reads a kernel's source in Python, which only one thread can do at a time anyway. Here they take turns, because Triton sets the process's
# filters of warnings meanwhile, and because some versions of Python count the depth of all threads' syntax trees together (python/cpython#106905).
_reading = build_queue.PriorityLock()


def compiled(request: KernelRequest, table: Mapping[str, Any]) -> dict[str, bytes]:
    """What the store keeps: the binary, and the facts needed to launch it. `table` has the kernel's function by name."""
    function = table[request.kernel]
    signature: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    fixed: dict[Any, Any] = {}
    types: list[str] = []
    for position, (name, kind) in enumerate(request.signature):
        signature[name] = _describe(kind, (position,), attributes, fixed, types)
    constants = {name: value.function() if isinstance(value, Generated) else value for name, value in request.constants}
    fixed |= {(function.arg_names.index(name),): value for name, value in constants.items()}
    turn = READ_FIRST.index(request.kernel) if request.kernel in READ_FIRST else len(READ_FIRST)
    source = source_class(function, turn)(fn=function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=fixed, attrs=attributes)
    # Kernels of 32-bit inputs round every product: s * c - max(s) * c is 0 for the largest s, however large, but not if a product is left unrounded.
    # `classify` and `base_states` do too, because a rounding may decide about a whole tile.
    options = {"num_warps": request.warps, "num_stages": request.stages, "enable_fp_fusion": request.fp_fusion}
    _hash_triton()
    give_triton_a_folder()
    kernel = triton.compile(source, target=GPUTarget("cuda", request.arch, 32), options=options)
    fits = (getattr(kernel.metadata, "tmem_size", None) or 0) <= TENSOR_MEMORY  # else Triton leaves a kernel that does nothing
    dkdv: Any = getattr(constants.get("C"), "dkdv", None)  # of the `bwd` kernel
    if fits and getattr(dkdv, "atomic_dq", None) == "red" and not held_once(kernel, dkdv.d * dkdv.m, request.warps):
        atomic = {"C": replace(constants["C"], dkdv=replace(dkdv, atomic_dq="atomic_add"))}
        return compiled(request._replace(constants=tuple((dict(request.constants) | atomic).items())), table)
    if kernel.metadata.global_scratch_size:
        raise RuntimeError(f"the {request.kernel} kernel wants scratch memory, which is not provided")
    facts = {
        "name": kernel.metadata.name,
        "shared": kernel.metadata.shared if fits else TOO_MUCH,
        "warps": kernel.metadata.num_warps,
        "types": types,
        "extra_pointers": _parameters(kernel.asm["ptx"]) - len(types),
        "boxes": [(m["block_size"], m["swizzle"]) for m in getattr(kernel.metadata, "tensordesc_meta", None) or ()],
    }
    return {"facts": json.dumps(facts).encode(), "cubin": kernel.asm["cubin"]}


@lru_cache(maxsize=1)
def give_triton_a_folder() -> None:
    """Triton has a cache of its own, in the user's home; where that cannot be written to, it gets a folder of this process."""
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    cache = home / ".triton" / "cache"
    try:
        if home.is_absolute():  # else it is "~", and there is no home
            cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass  # told below
    if not (home.is_absolute() and os.access(cache, os.W_OK)):
        os.environ["TRITON_CACHE_DIR"] = str(process_folder())
        warn_once(f"Triton's own cache in {home} cannot be written to; it is in {os.environ['TRITON_CACHE_DIR']} for this process. Set TRITON_CACHE_DIR.")


def held_once(kernel: Any, elements: int, warps: int) -> bool:
    """Whether threads that add what they hold of a block of so many elements add each one once: small blocks, and those of some layouts, are held several
    times. Then a thread has more additions in its code than its share of the block; a loop that was unrolled has, too, and is taken for one of those."""
    blocks, additions = (kernel.asm[stage].count(RED_ADD) for stage in ("ttgir", "ptx"))
    return bool(additions * 32 * warps == blocks * elements)


def _hash_triton() -> None:
    """Triton hashes its whole installation before it first compiles, for a third of a second: of threads that begin together, one does."""
    triton_key = getattr(triton.runtime.cache, "triton_key", None)  # versions before 3.5 have it elsewhere: there every thread does
    if triton_key is not None:
        build_queue.once("the hash of Triton", triton_key)


def source_class(function: Any, turn: int) -> Any:
    """Kernels in Gluon and in plain Triton are read differently."""
    if not hasattr(function, "is_gluon") or not function.is_gluon():
        return _in_turn(triton.compiler.ASTSource, turn)
    from triton.experimental.gluon._runtime import GluonASTSource

    return _in_turn(GluonASTSource, turn)


def _in_turn(kind: Any, turn: int) -> Any:
    """A kind of source that one thread reads at a time. What follows, the compiler's passes, threads do at the same time."""

    class InTurn(kind):  # type: ignore[misc]  # one of two classes of Triton's
        def hash(self) -> Any:
            with _reading.wait(turn):
                return super().hash()

        def make_ir(self, *args: Any, **options: Any) -> Any:
            with _reading.wait(turn):
                return super().make_ir(*args, **options)

    return InTurn


def _describe(kind: Any, place: tuple[int, ...], attributes: dict[Any, Any], fixed: dict[Any, Any], types: list[str]) -> Any:
    """Triton's type of an argument; notes what is divisible by 16, what is constant, and the parameters it becomes."""
    if kind == "aligned":
        attributes |= {(*place, d): DIVISIBLE for d in range(3)}
        fixed[(*place, 3)] = 1
        types += ["i64"] * 3
        return ("i64", "i64", "i64", "constexpr")
    if isinstance(kind, TmaBlock):
        types += [TENSOR_MAP, *["i32"] * len(kind.sizes), *["i64"] * len(kind.sizes)]
        return _descriptor_type(kind)
    if isinstance(kind, tuple):
        inner = [_describe(k, (*place, d), attributes, fixed, types) for d, k in enumerate(kind)]
        return type(kind)(*inner) if hasattr(kind, "_fields") else tuple(inner)
    if kind == "none":
        fixed[place] = None
        return "constexpr"
    if kind.endswith("!"):
        attributes[place] = DIVISIBLE
        kind = kind[:-1]
    types.append(kind)
    return kind


def _descriptor_type(block: TmaBlock) -> str:
    """A TMA tensor's, with its layout in shared memory."""
    from triton.experimental.gluon import language as gl

    dtype = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}[block.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(block.sizes), dtype)
    return f"tensordesc<{block.dtype}{list(block.sizes)},{layout!r}>"


def _parameters(ptx: str) -> int:
    """How many parameters the kernel really has: Triton adds pointers of its own at the end."""
    entry = re.search(r"\.visible \.entry[^(]*\(([^)]*)\)", ptx)
    assert entry is not None
    return entry.group(1).count(".param")
