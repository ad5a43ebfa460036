"""What the compiler is asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


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


class OwnCompiler(ABC):
    """Where a kernel is found that Triton does not compile."""

    @abstractmethod
    def compiled(self, request: KernelRequest) -> dict[str, bytes]:
        """What the store keeps (kernel_cache.py): the binary, and the facts needed to launch it."""


TritonTable = Callable[[], Mapping[str, Any]]  # Triton functions by name; called when one has to be compiled, since that imports Triton
KernelTable = TritonTable | OwnCompiler
