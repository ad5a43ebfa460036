"""Keys and values in pages, as servers of many sequences keep them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    """Where keys lie: key j of batch element b is row j % size of page table[b, j // size]. The same for values.

    Tables come from a scheduler's bookkeeping, so kernels never trust them: an entry outside the pages is read as the nearest page. What is read that way is
    not attended to as long as `lengths`, and the mask, are right.
    """

    table: Tensor  # [batch, most] int32, rows of consecutive numbers
    size: int  # rows of a page
    lengths: Tensor | None  # [batch] int32: kernels need not look at keys from there on, which the mask leaves out; None: they look at all
    all_attended: bool = False  # the mask leaves out nothing else: kernels that end at `lengths` need not ask it

    @property
    def capacity(self) -> int:
        """Keys that a row of the table has room for."""
        return self.table.shape[1] * self.size


def gathered(stored: Tensor, pages: Pages, dtype: torch.dtype) -> Tensor:
    """[batch, kv heads, capacity, head dim] from pages [pages, kv heads, size, head dim]: a copy, for whoever takes no pages."""
    count, kv_heads, _, dim = stored.shape
    batch = pages.table.shape[0]
    if count == 0:
        return stored.new_zeros((batch, kv_heads, pages.capacity, dim), dtype=dtype)
    rows = stored[pages.table.long().clamp(0, count - 1)]  # [batch, most, kv heads, size, head dim]
    return rows.transpose(1, 2).reshape(batch, kv_heads, pages.capacity, dim).to(dtype)
