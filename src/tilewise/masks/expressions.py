"""What functions of masks, and of scores, are written with."""

from typing import Any

from torch import Tensor

from tilewise.masks.mask import MaskFunction
from tilewise.sizes import equal


def broadcast_load(tensor: Tensor) -> MaskFunction:
    """f(b, h, q, kv) = tensor[b, h, q, kv], broadcast from the right as torch does: missing dimensions are left out, those of size 1 are indexed by 0.

    The closure holds a tensor and a tuple of bools, nothing mutable, so that calls with it can be cached.
    """
    is_one = tuple([equal(size, 1) for size in tensor.shape])

    def load(b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = (b, h, q, kv)[4 - len(is_one) :]
        return tensor[tuple([0 if one else i for one, i in zip(is_one, at, strict=True)])]

    return load


def at_most(value: Any, limit: int) -> Any:
    """value <= limit, written as a comparison with 0: before torch 2.11, torch.compile cannot trace a comparison with an int that varies."""
    return value - limit <= 0
