"""Workspace memory, reused across calls: page faults in fresh memory took up to a tenth of a short backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MAX_SPARE_BYTES = 2**27  # larger workspaces are freed after the call
CACHE_LINE = 64

_spare: list[Tensor] = []  # at most one; concurrent calls allocate their own


@contextmanager
def borrowed(*sizes: int) -> Iterator[list[int]]:
    """Addresses of uninitialised buffers of these sizes in bytes; 0 for a size of 0."""
    needed = sum([_aligned(size) for size in sizes])
    try:
        memory = _spare.pop()
    except IndexError:
        memory = None
    if memory is None or memory.numel() < needed:
        memory = torch.empty(needed, dtype=torch.uint8)
    addresses, at = [], memory.data_ptr()
    for size in sizes:
        addresses.append(at if size else 0)
        at += _aligned(size)
    yield addresses
    if memory.numel() <= MAX_SPARE_BYTES and not _spare:
        _spare.append(memory)


def _aligned(size: int) -> int:
    return -(-size // CACHE_LINE) * CACHE_LINE
