"""Workspace memory, reused across calls: page faults in fresh memory took up to a tenth of a short backward."""

import torch
from torch import Tensor

MAX_SPARE_BYTES = 2**27  # larger workspaces are freed after the call
CACHE_LINE = 64

_spare: list[Tensor] = []  # at most one; concurrent calls allocate their own


class Workspace:
    """Uninitialised buffers of these sizes in bytes, side by side in one piece of memory that every call borrows."""

    def __init__(self, *sizes: int) -> None:
        self._offsets: list[int | None] = []
        self._bytes = 0
        for size in sizes:
            self._offsets.append(self._bytes if size else None)
            self._bytes += -(-size // CACHE_LINE) * CACHE_LINE
        self._last: tuple[int, list[int]] = 0, [0] * len(sizes)  # where the memory was, and the buffers in it: mostly it is the same

    def borrow(self) -> tuple[Tensor | None, list[int]]:
        """The memory, to be given back, and the addresses of the buffers in it; 0 for a size of 0."""
        if not self._bytes:
            return None, self._last[1]
        try:
            memory = _spare.pop()
        except IndexError:
            memory = None
        if memory is None or memory.numel() < self._bytes:
            memory = torch.empty(self._bytes, dtype=torch.uint8, device="cpu")
        base, last = memory.data_ptr(), self._last
        if last[0] != base:
            last = self._last = base, [0 if offset is None else base + offset for offset in self._offsets]
        return memory, last[1]


def give_back(memory: Tensor | None) -> None:
    if memory is not None and memory.numel() <= MAX_SPARE_BYTES and not _spare:
        _spare.append(memory)
