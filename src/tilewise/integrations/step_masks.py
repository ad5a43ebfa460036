"""The masks of a model's step in the forms most models ask for: causal, with a window, packed sequences and padding.

A step of training or decoding has other tensors than the last, and the same program. So a program is traced once for each form, and the masks of later
steps are that program with their own tensors and numbers. Where the sizes stay, as in a static cache, decoding goes further: a step writes its position
and its padding into the tensors of an earlier step's mask, so that its calls are those of that step, prepared and known.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import masks
from tilewise.frontend.kept_buffers import KeptBuffers
from tilewise.lang import BoundProgram, Program
from tilewise.masks import Mask


class Sight(NamedTuple):
    """What the queries of a step may see: query q stands at key q + offset, sees `window` keys at most, keys of its own document, and those `visible`."""

    offset: int | Tensor | None = None  # None: keys after the query are seen, too, and there is no window
    window: int | None = None
    documents: Tensor | None = None  # (batch, positions) ids; only with an offset of 0
    visible: Tensor | None = None  # (batch, keys) booleans


def needed(sight: Sight, q_length: int, kv_length: int) -> Sight:
    """Without what masks nothing in so many queries and keys."""
    offset, window = sight.offset, sight.window
    if not isinstance(offset, int):
        return sight
    if window is not None and offset + q_length <= window:  # the last query sees the first key
        window = None
    if window is None and offset + 1 >= kv_length:  # the first query sees every key
        return Sight(None, None, sight.documents, sight.visible)
    return sight._replace(window=window)


def mask_of(sight: Sight) -> Mask | None:
    """The mask of a step; None if everything is seen."""
    offset, window, documents, visible = sight
    if documents is None and visible is None:
        if offset is None:
            return None
        if isinstance(offset, int):
            return _positional(offset, window)
    return _bound(sight, Mask(_function(*sight), *_label(sight), fixed=True))


@lru_cache(maxsize=64)
def _positional(offset: int, window: int | None) -> Mask:
    """One object for all steps: it holds numbers alone."""
    if offset == 0:
        return masks.causal if window is None else masks.causal & masks.sliding_window(window - 1, 0)
    return Mask(_function(offset, window, None, None), *_label(Sight(offset, window)), fixed=True)


def _function(offset: int | Tensor | None, window: int | None, documents: Tensor | None, visible: Tensor | None) -> Callable[..., Any]:
    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        allowed: Any = True
        if offset is not None:
            at = q if isinstance(offset, int) and offset == 0 else q + offset
            allowed = at >= kv
            if window is not None:
                allowed = allowed & (at - kv < window)
        if documents is not None:
            allowed = allowed & (documents[b, q] == documents[b, kv])
        return allowed if visible is None else visible[b, kv] & allowed

    return seen


def _label(sight: Sight) -> list[str]:
    """The mask's name and its parameters."""
    named = {"causal": sight.offset, "window": sight.window, "packed": sight.documents, "key_padding": sight.visible}
    given = [name for name, value in named.items() if value is not None]
    numbers = [f"{name} {value}" for name, value in (("offset", sight.offset), ("window", sight.window)) if isinstance(value, int) and value]
    return [" & ".join(given), *numbers]


# -- programs ------------------------------------------------------------------------------------------------------------


class _Traced(NamedTuple):
    """A program, and which fields of a Sight its captures and its numbers are."""

    program: Program
    captures: tuple[int, ...]
    ints: tuple[int, ...]


# By form: which parts there are, whether the offset is 0, another number or a tensor, and the dtypes of tensors, whose ranks are fixed. That is all `seen`
# asks before it computes; what it computes with are the program's arguments.
_programs: dict[tuple[Any, ...], _Traced] = {}


def _bound(sight: Sight, mask: Mask) -> Mask:
    """The mask with its trace: of a program that is known, or known from now on."""
    form = tuple([None if v is None else v.dtype if isinstance(v, Tensor) else v == 0 for v in sight])
    known = _programs.get(form)
    if known is None:
        traced = mask.traced()
        captures = tuple([next(k for k, v in enumerate(sight) if v is t) for t in traced.captures])
        _programs[form] = _Traced(traced.program, captures, tuple([k for k, v in enumerate(sight) if isinstance(v, int) and (k > 0 or v != 0)]))
    else:
        given: Any = sight
        mask.assume(BoundProgram(known.program, tuple([given[k] for k in known.captures]), tuple([given[k] for k in known.ints])))
    return mask


# -- decoding within buffers of fixed sizes ------------------------------------------------------------------------------


class _InBuffers(NamedTuple):
    mask: Mask
    sight: Sight  # tensors of its own


# Masks of one query, by all that they are made of but what a step writes: device, stream, batch, keys, window, and whether there are an offset and padding.
_kept: KeptBuffers[_InBuffers] = KeptBuffers()


def in_buffers(batch: int, kv_length: int, device: torch.device, step: Sight, hold: Callable[[Mask], Any]) -> Any:
    """The mask of one query, in tensors that outlive the step, given to a holder: generate() still has the last step's when it asks for the next.

    `step.visible` may be shorter than the keys: those after it are not visible. Nobody may look at the mask once its holder is gone.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    kind = (device, stream, batch, kv_length, step.window, step.offset is None, step.visible is None)

    def make() -> _InBuffers:
        with torch.inference_mode(False):  # steps outside of inference mode write into them, too
            offset = None if step.offset is None else torch.zeros((), dtype=torch.int64, device=device)
            visible = None if step.visible is None else torch.zeros(batch, kv_length, dtype=torch.bool, device=device)
        sight = Sight(offset, step.window, None, visible)
        mask = mask_of(sight)
        assert mask is not None
        return _InBuffers(mask, sight)

    buffers = _kept.take(kind, make)
    _write(step, buffers.sight)
    holder = hold(buffers.mask)
    _kept.keep(kind, buffers, holder)
    return holder


def _write(step: Sight, into: Sight) -> None:
    if isinstance(step.offset, Tensor) and isinstance(into.offset, Tensor):
        into.offset.copy_(step.offset)
    elif step.offset is not None and isinstance(into.offset, Tensor):
        into.offset.fill_(step.offset)
    if step.visible is not None and into.visible is not None:
        known = step.visible.shape[1]
        if known < into.visible.shape[1]:
            into.visible[:, known:].zero_()
            into.visible[:, :known].copy_(step.visible)
        else:
            into.visible.copy_(step.visible)
