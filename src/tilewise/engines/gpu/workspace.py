"""Memory that the kernels of a pass hand each other: one allocation for all of it, because each takes a few microseconds."""

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engines.gpu.limits import interpreted

ALIGNED_BYTES = 256


class Part(NamedTuple):
    """A contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Workspace:
    """Of these parts; None stays None."""

    def __init__(self, device: torch.device, *parts: Part | None) -> None:
        self._parts = parts
        sizes = [0 if part is None else -(-math.prod(part.shape) * part.dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES for part in parts]
        ends = list(accumulate(sizes))
        self._begins = [None if part is None else end - size for part, size, end in zip(parts, sizes, ends, strict=True)]
        self._like = torch.empty((), dtype=torch.uint8, device=device).expand(ends[-1])  # one number, for torch.empty_like: the quickest way to memory
        self._interpreted = interpreted()

    def allocate(self) -> Tensor:
        return torch.empty_like(self._like)

    def parts(self, memory: Tensor) -> list[Any]:
        """What launches are given: addresses, without a view for each part; or tensors, as Triton's interpreter wants them."""
        if self._interpreted:
            return self.tensors(memory)
        at = memory.data_ptr()
        return [None if begin is None else at + begin for begin in self._begins]

    def tensors(self, memory: Tensor) -> list[Any]:
        """What launches are prepared with."""
        return [
            None if part is None else memory[begin:].view(part.dtype)[: math.prod(part.shape)].view(part.shape)
            for part, begin in zip(self._parts, self._begins, strict=True)
        ]
