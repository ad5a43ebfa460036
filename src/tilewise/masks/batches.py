"""Masks that differ from one batch element to the next: padding, and a choice of masks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks.checks import integers
from tilewise.masks.mask import Mask, MaskFunction, as_mask
from tilewise.memory import can_be_looked_at
from tilewise.named import covers, named


@named
def padding(lengths: Tensor) -> Mask:
    """Key kv of batch element b counts only if kv < lengths[b]."""
    valid = integers(lengths, 1, "padding")
    return Mask(lambda b, h, q, kv: kv < valid[b], "padding", covers=covers("padding", b=valid.shape[0]))


@named
def per_batch(choices: Sequence["Mask | MaskFunction"], which: Tensor) -> Mask:
    """Batch element b uses choices[which[b]].

    Where `which` lies on the CPU, numbers without a choice are refused. On a GPU it is not looked at, which would wait for the GPU: there, a batch element
    without a choice attends to nothing.
    """
    options = tuple([as_mask(m) for m in choices])  # a list in a closure may change: calls with it would not be cached
    if not options:
        raise InputError("per_batch takes at least one mask")
    chosen = integers(which, 1, "per_batch")
    if chosen.device.type == "cpu" and can_be_looked_at(chosen) and bool(((chosen < 0) | (chosen >= len(options))).any()):
        raise InputError(f"per_batch: which holds numbers of choices, from 0 to {len(options) - 1}, got {chosen.tolist()}")

    def select(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed: Any = options[0](b, h, q, kv) & (chosen[b] == 0)
        for k in range(1, len(options)):
            allowed = allowed | (options[k](b, h, q, kv) & (chosen[b] == k))
        return allowed

    inner = tuple([c for m in options for c in m.covers])
    return Mask(select, "per_batch", *options, covers=covers("per_batch", b=chosen.shape[0]) + inner)
