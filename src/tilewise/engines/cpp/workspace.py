"""Memory that kernels work in, kept from call to call: in fresh memory every 4 KiB cost a page fault, together as much as a tenth of a short backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_BYTES = 2**27  # what is kept, at most
LINE = 64

_kept: list[Tensor] = []  # one at most; a second call at the same time brings its own


@contextmanager
def borrowed(*sizes: int) -> Iterator[list[int]]:
    """Addresses of so many bytes each, with anything in them; 0 for none."""
    needed = sum([_whole(size) for size in sizes])
    try:
        memory = _kept.pop()
    except IndexError:
        memory = None
    if memory is None or memory.numel() < needed:
        memory = torch.empty(needed, dtype=torch.uint8)
    addresses, at = [], memory.data_ptr()
    for size in sizes:
        addresses.append(at if size else 0)
        at += _whole(size)
    yield addresses
    if memory.numel() <= MOST_BYTES and not _kept:
        _kept.append(memory)


def _whole(size: int) -> int:
    return -(-size // LINE) * LINE
