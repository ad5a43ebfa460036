"""The mask object that is passed through a transformers model, from mask creation to attention."""

import weakref
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from tilewise.errors import InputError
from tilewise.lang.checkpoints import allow_changes
from tilewise.masks import Mask


class TracedMask(BlockMask):
    """A mask function that is never evaluated to a tensor. It subclasses torch's BlockMask because transformers passes those through unchanged.

    `mask` is None if every query sees every key. `config` is the configuration of the model that asked for the mask.
    """

    def __init__(self, mask: Mask | None, shape: tuple[int, int, int, int], config: Any = None) -> None:
        self.mask = mask
        self.config = config
        self.is_used = False  # by an attention call
        self.is_compiled = torch.compiler.is_compiling()  # made within the graph that uses it
        self._shape = torch.Size(shape)
        if not self.is_compiled:  # a graph that looks at those that compiled steps have used would put guards on them
            for used in [m for m in _all_unused() if m.is_used]:
                _unused.discard(used)
        if mask is not None:
            _unused.add(self)

    def use(self) -> Mask | None:
        """The mask, for an attention call: from now on it counts as used."""
        if not self.is_used:
            is_traced = torch.compiler.is_dynamo_compiling()
            before = is_traced and allow_changes(True)  # a layer may be checkpointed
            self.is_used = True
            # A graph that uses a mask made outside would be compiled again for every number of masks there are. One that makes it must leave none behind.
            if self.is_compiled or not torch.compiler.is_compiling():
                _unused.discard(self)
            if is_traced:
                allow_changes(before)
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


# Masks that a model asked for and that no attention call has received yet, unless compiled. An entry lives as long as its mask: for one forward of the model.
_unused: "weakref.WeakSet[TracedMask]" = weakref.WeakSet()


def _all_unused() -> list["TracedMask"]:
    while True:
        try:
            return list(_unused)
        except RuntimeError:  # another thread has changed it meanwhile
            continue


def dropped_mask(config: Any, shape: tuple[int, int, int]) -> TracedMask | None:
    """A mask made in this forward for the model of `config` and for attention of this (batch, queries, keys), that no call has received; None if there is none.

    It is for a layer that calls attention with something else: a layer that shares its sizes with another one's mask (cross-attention,
    as long as the text) finds that mask used, because self-attention comes first.
    """
    if config is None:
        return None
    unused = _unused if torch.compiler.is_compiling() else _all_unused()
    return next((mask for mask in unused if not mask.is_used and mask.config is config and (mask.shape[0], *mask.shape[2:]) == shape), None)
