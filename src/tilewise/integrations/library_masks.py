"""What transformers' mask functions say, read from the functions: most models ask for causal masks, with or without a window or packed sequences.

A mask that is understood needs no tracing, and disappears where it allows everything. Any other is traced (integrations/transformers.py).
"""

from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """What a mask function asks for, all of it at once: a key at most as late as the query, less than `window` before it, of the same document."""

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None  # (batch, positions) ids


def parts_of(function: Callable[..., Any]) -> Parts | None:
    """The parts of a mask function of transformers; None if it is none of those known here."""
    if torch._C._len_torch_dispatch_stack() > 0:  # fake tensors: what the library's functions mean cannot be tried
        return None
    known = _library()
    if known is None or type(function) is not FunctionType:
        return None
    if function is known.causal:
        return Parts(causal=True)
    code, held = function.__code__, [cell.cell_contents for cell in function.__closure__ or ()]
    if code is known.window and type(held[0]) is int:
        return Parts(window=held[0])
    if code is known.packed and type(held[0]) is Tensor and held[0].dim() == 2:
        return Parts(documents=held[0])
    return _all_of([parts_of(f) for f in held[0]]) if code is known.both else None


def _all_of(parts: list[Parts | None]) -> Parts | None:
    """Masks joined by `and_masks`; None if one is not understood, or two say the same thing differently."""
    found = Parts()
    for part in parts:
        if part is None or (part.window is not None and found.window is not None) or (part.documents is not None and found.documents is not None):
            return None
        causal = found.causal or part.causal
        found = Parts(causal, found.window if part.window is None else part.window, found.documents if part.documents is None else part.documents)
    return found


class _Library(NamedTuple):
    """transformers' causal mask, and the code of the functions that its other masks are made of."""

    causal: Callable[..., Any]
    window: CodeType
    packed: CodeType
    both: CodeType


@lru_cache(maxsize=1)
def _library() -> _Library | None:
    """None if this version's functions hold or mean something else than is read here: then nothing is understood."""
    from transformers import masking_utils as library

    ids, position = torch.tensor([[0, 1, 1]], device="cpu"), torch.arange(6, device="cpu")
    try:
        window, packed = library.sliding_window_overlay(3), library.packed_sequence_mask_function(ids)
        both = library.and_masks(library.causal_mask_function, window)
        reaches = both(0, 0, position[:, None], position[None, :])
        same = [bool(packed(0, 0, q, kv)) for q, kv in ((0, 0), (0, 1), (1, 2))]
    except (AttributeError, TypeError):
        return None
    distance = position[:, None] - position[None, :]
    means = torch.equal(reaches, (distance >= 0) & (distance < 3)) and same == [True, False, True]
    held = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (window, packed, both)]
    alone = held[0] == [3] and len(held[1]) == 1 and held[1][0] is ids and held[2] == [(library.causal_mask_function, window)]
    return _Library(library.causal_mask_function, window.__code__, packed.__code__, both.__code__) if means and alone else None
