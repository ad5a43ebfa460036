"""Keys and values in pages, as servers of many sequences keep them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pages:
    """Where keys lie: key j of batch element b is row j % size of page table[b, j // size]. The same for values.

    A batch element has one sequence, or several that have room for `span` keys each: `lengths` says how many keys every sequence has. The mask leaves out all
    others, which may hold anything: kernels need not look at them.

    Tables come from a scheduler's bookkeeping, so kernels never trust them: an entry outside the pages is read as the nearest page. What is read that way is
    not attended to as long as `lengths` are right.
    """

    table: Tensor  # [batch, most] int32, rows of consecutive numbers
    size: int  # rows of a page
    lengths: Tensor  # [sequences] int32
    all_attended: bool  # the mask leaves out nothing else
    v_scale: float = 1.0  # what values were divided by before they were stored: outputs are multiplied by it

    @property
    def capacity(self) -> int:
        """Keys that a row of the table has room for."""
        return self.table.shape[1] * self.size

    @property
    def span(self) -> int:
        """Keys that a sequence has room for."""
        return self.capacity * self.table.shape[0] // max(self.lengths.shape[0], 1)

    @property
    def one_sequence(self) -> bool:
        """Whether each batch element has one: all its keys come before lengths[b]."""
        return self.lengths.shape[0] == self.table.shape[0]

    @property
    def ends_say_all(self) -> bool:
        """Whether a kernel that ends at lengths[b] need not ask the mask."""
        return self.all_attended and self.one_sequence


def gathered(stored: Tensor, pages: Pages, dtype: torch.dtype) -> Tensor:
    """[batch, kv heads, capacity, head dim] from pages [pages, kv heads, size, head dim]: a copy, for whoever takes no pages."""
    count, kv_heads, _, dim = stored.shape
    batch = pages.table.shape[0]
    if count == 0:
        return stored.new_zeros((batch, kv_heads, pages.capacity, dim), dtype=dtype)
    rows = stored[pages.table.long().clamp(0, count - 1)]  # [batch, most, kv heads, size, head dim]
    return rows.transpose(1, 2).reshape(batch, kv_heads, pages.capacity, dim).to(dtype)
