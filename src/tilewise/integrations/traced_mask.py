"""The mask object that is passed through a transformers model, from mask creation to attention."""

import weakref
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from tilewise.errors import InputError
from tilewise.masks import Mask


class TracedMask(BlockMask):
    """A mask function that is never evaluated to a tensor. It subclasses torch's BlockMask because transformers passes those through unchanged.

    `mask` is None if every query sees every key. `config` is the configuration of the model that asked for the mask.
    """

    def __init__(self, mask: Mask | None, shape: tuple[int, int, int, int], config: Any = None) -> None:
        self.mask = mask
        self.config = config
        self._shape = torch.Size(shape)
        if mask is not None:
            _unused.add(self)

    def use(self) -> Mask | None:
        """The mask, for an attention call: from now on it counts as used."""
        _unused.discard(self)
        return self.mask

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


# Masks that a model asked for and that no attention call has received yet. An entry lives as long as its mask: for one forward of the model.
_unused: "weakref.WeakSet[TracedMask]" = weakref.WeakSet()


def dropped_mask(config: Any, shape: tuple[int, int, int]) -> TracedMask | None:
    """A mask made in this forward for the model of `config` and for attention of this (batch, queries, keys), that no call has received; None if there is none.

    It is for a layer that calls attention with something else: a layer that shares its sizes with another one's mask (cross-attention,
    as long as the text) finds that mask used, because self-attention comes first.
    """
    if config is None:
        return None
    return next((mask for mask in _unused if mask.config is config and (mask.shape[0], *mask.shape[2:]) == shape), None)
