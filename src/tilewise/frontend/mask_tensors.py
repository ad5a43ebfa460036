"""Mask tensors as clients pass them, read once: most say less than their size suggests, and that is quicker to attend with.

A tensor that forbids nothing is no mask; one that only says which keys are padding is a few lengths; an additive one of 0 and
-10000 (or finfo.min, or -inf) is boolean. Saying so means looking at the contents, so the answer is remembered: by the identity,
the version and the place of the tensor, so that one changed in place or replaced is read anew.
"""

import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import scores
from tilewise.errors import InputError
from tilewise.masks import Mask, padding

FORBIDS = -9984.0  # added to a score, this or less leaves exp() nothing: clients write "do not attend" as -10000, which bfloat16 rounds to this
REMEMBERED = 64


class Reading(NamedTuple):
    """What a mask tensor says: who may attend to whom, and what is added to the scores."""

    mask: Mask | None = None
    score: scores.Score | None = None


def read(mask: Tensor, sizes: tuple[int, int, int, int]) -> Reading | None:
    """The reading of a mask that broadcasts to (batch, heads, queries, keys); None where its contents must not be looked at.

    That is under torch.compile, and for a mask that is learned.
    """
    check(mask, sizes)
    if torch.compiler.is_compiling() or mask.requires_grad or type(mask) not in (Tensor, torch.nn.Parameter):
        return None
    if mask.is_inference():  # its changes leave no trace, so nothing may be remembered
        return _look(mask, sizes)
    return _readings.get(mask, sizes)


def check(mask: Tensor, sizes: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"a mask tensor must be boolean (true: attend) or floating point (added to the scores), got {mask.dtype}")
    if mask.dim() > 4 or any([have not in (1, want) for have, want in zip(reversed(mask.shape), reversed(sizes), strict=False)]):
        raise InputError(f"a mask tensor of shape {tuple(mask.shape)} does not broadcast to (batch, heads, queries, keys) = {sizes}")


class _Readings:
    """The most recent readings. The tensors are held weakly, and readings share their memory only as long as they live."""

    def __init__(self) -> None:
        self.looked = 0  # how many tensors were really looked at; tests count
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, tuple[weakref.ref[Tensor], Reading]] = OrderedDict()

    def get(self, mask: Tensor, sizes: tuple[int, int, int, int]) -> Reading:
        whole = mask if mask._base is None else mask._base  # clients make a new view for every layer
        key = (id(whole), mask._version, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, sizes)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0]() is whole:
                self._kept.move_to_end(key)
                return found[1]
        reading = _look(mask, sizes)
        self.looked += 1
        with self._lock:
            self._kept[key] = weakref.ref(whole, lambda _: self._kept.pop(key, None)), reading
            while len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        return reading


_readings = _Readings()


def _look(mask: Tensor, sizes: tuple[int, int, int, int]) -> Reading:
    if 0 in sizes:  # nobody meets anybody, and tensors of no elements have nothing to load
        return Reading()
    whole = mask.detach().reshape((1,) * (4 - mask.dim()) + mask.shape)  # detached: the reading keeps no client's tensor alive
    for d, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        if size > 1 and stride == 0:  # only expanded
            whole = whole.narrow(d, 0, 1)
    return _of_boolean(whole, sizes) if whole.dtype == torch.bool else _of_additive(whole, sizes)


def _of_boolean(mask: Tensor, sizes: tuple[int, int, int, int]) -> Reading:
    """What is asked of the contents is asked together: on a GPU every answer is a wait."""
    heads, queries, keys = mask.shape[1:]
    first = mask[:, :1]
    lengths = first.sum(-1, keepdim=True)
    rows, columns = first.any(-1, keepdim=True), first.any(-2, keepdim=True)
    allows_all, heads_agree, is_padding, is_product = _answers(
        mask.all(),
        (mask == first).all() if heads > 1 else None,
        (first == (torch.arange(keys, device=mask.device) < lengths)).all() if queries == 1 and keys == sizes[3] else None,
        (first == (rows & columns)).all() if queries > 1 else None,
    )
    if allows_all:
        return Reading()
    if heads > 1 and not heads_agree:
        return Reading(Mask(_loaded(mask), "tensor", *mask.shape))
    if is_padding:
        return Reading(padding(lengths.flatten().expand(sizes[0]).contiguous()))
    if queries == 1:
        return Reading(Mask(_loaded(first), "key_padding", *first.shape))
    if is_product:  # padding of queries and of keys, multiplied out
        return Reading(Mask(_both(_loaded(rows), _loaded(columns)), "token_padding", *first.shape))
    return Reading(Mask(_loaded(first), "tensor", *first.shape))


def _of_additive(mask: Tensor, sizes: tuple[int, int, int, int]) -> Reading:
    forbidden, impossible = mask <= FORBIDS, mask == -torch.inf
    adds, uniform, forbids = _answers(
        (torch.where(forbidden, 0, mask) != 0).any(),
        (forbidden.all(-1) & ~impossible.all(-1)).any(),  # a row of -10000 alone attends to all keys alike: there the number counts
        impossible.any(),
    )
    if not adds and not uniform:
        return _of_boolean(~forbidden, sizes)
    bias = scores.bias(mask)
    return Reading(_of_boolean(~impossible, sizes).mask, bias) if forbids else Reading(None, bias)


def _answers(*questions: Tensor | None) -> list[bool]:
    """The truth of 0-d tensors, fetched at once; None is false."""
    asked = [q for q in questions if q is not None]
    found = iter(torch.stack(asked).tolist())
    return [q is not None and next(found) for q in questions]


def _loaded(mask: Tensor) -> Any:
    """mask[b, h, q, kv], with 0 where it broadcasts. The function holds plain values only, by which calls with it are remembered."""
    one_batch, one_head, one_query, one_key = [size == 1 for size in mask.shape]

    def look_up(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return mask[0 if one_batch else b, 0 if one_head else h, 0 if one_query else q, 0 if one_key else kv]

    return look_up


def _both(left: Any, right: Any) -> Any:
    return lambda b, h, q, kv: left(b, h, q, kv) & right(b, h, q, kv)
