"""What is measured: a model of random weights and one call of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """Where a model runs, and whether at real width or tiny."""

    tiny: bool
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def pick(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    @contextmanager
    def building(self) -> Iterator[None]:
        """The same weights every time, made where they are used."""
        torch.manual_seed(0)
        with self.device:
            yield


@dataclass(frozen=True)
class Workload:
    """`forward(turn)` is one call of the model. Calls with the same turn see the same inputs; what is compared is its output, without padding."""

    model: nn.Module
    forward: Callable[[int], Tensor]
