"""What the compiler is asked for."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

KernelTable = Callable[[], Mapping[str, Any]]  # Triton functions by name; called when one has to be compiled, since that imports Triton


class KernelRequest(NamedTuple):
    """A kernel, named by everything its code depends on."""

    kernel: str
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    arch: int
    fp_fusion: bool = True


class TmaBlock(NamedTuple):
    """The type of a tensor that TMA loads in blocks of these sizes."""

    dtype: str
    sizes: tuple[int, ...]
