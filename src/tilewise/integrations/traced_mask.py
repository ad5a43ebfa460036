"""The mask object that is passed through a transformers model, from mask creation to attention."""

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from tilewise.errors import InputError
from tilewise.masks import Mask


class TracedMask(BlockMask):
    """A mask function that is never evaluated to a tensor. It subclasses torch's BlockMask because transformers passes those through unchanged.

    `mask` is None if every query sees every key.
    """

    def __init__(self, mask: Mask | None, shape: tuple[int, int, int, int]) -> None:
        self.mask = mask
        self._shape = torch.Size(shape)

    @property
    def shape(self) -> torch.Size:
        """(batch, 1, queries, keys)"""
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def to(self, *_: Any, **__: Any) -> "TracedMask":
        return self  # the tensors it captures follow the query to its device

    def contiguous(self) -> "TracedMask":
        return self

    def __getitem__(self, index: Any) -> Any:
        raise InputError(f"this model slices its attention mask (mask[{index}]), which a mask that is never materialised cannot do; use another implementation")

    def __repr__(self) -> str:
        return f"TracedMask({'full' if self.mask is None else self.mask.name}, shape={tuple(self._shape)})"

    __str__ = __repr__
