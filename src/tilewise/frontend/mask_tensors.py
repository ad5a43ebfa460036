"""Mask tensors from clients, simplified: most hold a much simpler mask, which is faster to attend with.

A tensor that forbids nothing is no mask; a padding mask is one length per batch element; an additive mask of 0 and -10000 (or
finfo.min, or -inf) is boolean. Finding out means reading the contents, so the result is cached: of a small tensor on a CPU by its values, because
some clients make the same mask anew in every layer; of others by the tensor's identity, version and address, so that one that is changed in place or
replaced is read again.

To read a GPU's memory is to wait for the GPU, and many models make their padding masks anew in every step, some in every layer. So there a boolean mask of
keys alone is taken as it is: kernels find out which tiles it hides. For a call that no backward follows it is copied into a tensor that is kept, so that the
call is a known one, in which nothing is traced and planned again.
"""

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import scores
from tilewise.core.locks import new_lock
from tilewise.core.map_cache import contents_key, values_key
from tilewise.core.recording import unrecorded
from tilewise.errors import InputError
from tilewise.frontend.kept_buffers import KeptBuffers
from tilewise.masks import Mask, padding
from tilewise.masks.expressions import broadcast_load
from tilewise.memory import can_be_looked_at
from tilewise.sizes import broadcasts

FORBIDS = -9984.0  # added to a score, this or less makes exp() 0: clients write "do not attend" as -10000, which bfloat16 rounds to -9984
REMEMBERED = 64
LARGE = 2**30  # elements of a mask, broadcast: of much larger ones maps are not made on the device, but once, from the client's own tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """What a mask tensor means: a boolean mask, and what is added to the scores. One that `read_for_call` gave has to be held as long as its mask is used."""

    mask: Mask | None = None
    score: scores.Score | None = None


Sizes = tuple[int, int, int, int]
"""Batch, heads, queries and keys."""


def read(mask: Tensor, sizes: Sizes) -> Reading | None:
    """The reading of a mask that broadcasts to (batch, heads, queries, keys).

    None if its contents must not be read: under torch.compile, or if it requires grad.
    """
    return _read(mask, sizes, None, _meaning)


def read_for_call(mask: Tensor, sizes: Sizes) -> Reading | None:
    """The same, for one call on the current stream."""
    if not can_be_looked_at(mask) or not _is_of_keys(mask) or not 0 < math.prod(sizes) // sizes[1] <= LARGE:
        return read(mask, sizes)
    if torch.is_grad_enabled() or is_capturing(mask):  # a backward, or the replay of a CUDA graph, comes after the call
        return read(mask, sizes)
    stream = torch.cuda.current_stream(mask.device) if mask.is_cuda else None
    return _read(mask, sizes, ("buffer", stream), lambda whole, _: _in_buffer(whole, stream))


def read_contents(mask: Tensor, sizes: Sizes) -> Reading | None:
    """The same, for whoever cannot take a mask where there is none: all masks are looked at."""
    return _read(mask, sizes, "contents", _contents) if can_be_looked_at(mask) and _is_of_keys(mask) else read(mask, sizes)


def is_far(mask: Tensor) -> bool:
    """Whether to read it is to wait for a device."""
    return mask.is_cuda


def is_capturing(mask: Tensor) -> bool:
    return mask.is_cuda and torch.cuda.is_current_stream_capturing()


Look = Callable[[Tensor, Sizes], Reading]


def _read(mask: Tensor, sizes: Sizes, purpose: Any, look: Look) -> Reading | None:
    """`purpose` tells readings of one look from those of another."""
    check(mask, sizes)
    if mask.requires_grad or not can_be_looked_at(mask):
        return None
    with unrecorded():
        values = values_key((mask,))
        if values is not None:
            return _values.get(mask, (values, sizes))
    whole = mask if mask._base is None else mask._base  # clients make a new view for every layer
    contents = contents_key((whole,))
    with unrecorded():
        if contents is None:
            return look(_unexpanded(mask), sizes)
        key = (contents, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.is_neg(), sizes, purpose)
        return _readings.get(whole, key, lambda: look(_unexpanded(mask), sizes))


def check(mask: Tensor, sizes: Sizes) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"a mask tensor must be boolean (true: attend) or floating point (added to the scores), got {mask.dtype}")
    if not broadcasts(mask.shape, sizes):
        raise InputError(f"a mask tensor of shape {tuple(mask.shape)} does not broadcast to (batch, heads, queries, keys) = {sizes}")


class _Readings:
    """Cache of recent readings. It holds the tensors weakly, and drops a reading, which shares their memory, when its tensor is freed."""

    def __init__(self) -> None:
        self.looked = 0  # cache misses
        self._lock = new_lock()
        self._kept: OrderedDict[Any, tuple[weakref.ref[Tensor], Reading]] = OrderedDict()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def get(self, whole: Tensor, key: tuple[Any, ...], look: Callable[[], Reading]) -> Reading:
        """The reading of a mask that is a view of `whole`, or that itself."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found[0]() is whole:
                self._kept.move_to_end(key)
                return found[1]
        reading = look()
        self.looked += 1
        with self._lock:
            self._kept[key] = weakref.ref(whole, lambda _: self._kept.pop(key, None)), reading
            while len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        return reading


class _Values:
    """Cache of recent readings of small masks, by all that a reading follows from. Such a reading has a copy of the mask that nobody else can change: so the
    calls and maps that are made of it are those of every tensor that holds the same."""

    def __init__(self) -> None:
        self.looked = 0  # cache misses
        self._lock = new_lock()
        self._kept: OrderedDict[Any, Reading] = OrderedDict()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()

    def get(self, mask: Tensor, key: tuple[Any, ...]) -> Reading:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        with torch.inference_mode(False):  # else the copy would be an inference tensor, of which no map is kept
            reading = _meaning(_unexpanded(mask).clone(), key[-1])
        self.looked += 1
        with self._lock:
            self._kept[key] = reading
            while len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        return reading


_readings, _values = _Readings(), _Values()


def looked() -> int:
    """How many tensors were read because no reading of theirs was known; tests count."""
    return _readings.looked + _values.looked


def forget() -> None:
    """Drop all readings."""
    for cache in (_readings, _values, _buffers):
        cache.clear()


def _unexpanded(mask: Tensor) -> Tensor:
    """Four dimensions, without repetitions; detached, so that a reading does not keep the client's tensor alive."""
    whole = mask.detach().reshape((1,) * (4 - mask.dim()) + mask.shape)
    for d, (size, stride) in enumerate(zip(whole.shape, whole.stride(), strict=True)):
        if size > 1 and stride == 0:  # an expanded dimension
            whole = whole.narrow(d, 0, 1)
    return whole


def _meaning(mask: Tensor, sizes: Sizes) -> Reading:
    return Reading(_key_padding(mask)) if _is_of_keys(mask) and 0 not in sizes else _contents(mask, sizes)


def _contents(mask: Tensor, sizes: Sizes) -> Reading:
    if 0 in sizes:  # an empty problem: there is nothing to mask, and an empty tensor has nothing to load
        return Reading()
    return _of_boolean(mask, sizes) if mask.dtype == torch.bool else _of_additive(mask, sizes)


def _of_boolean(mask: Tensor, sizes: Sizes) -> Reading:
    """All questions about the contents are answered together: on a GPU, every answer is a synchronisation."""
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
        return Reading(Mask(broadcast_load(mask), "tensor", *mask.shape, fixed=True))
    if is_padding:
        return Reading(padding(lengths.flatten().expand(sizes[0]).contiguous()))
    if queries == 1:
        return Reading(_key_padding(first))
    if is_product:  # an outer product of query and key padding
        return Reading(Mask(_both(broadcast_load(rows), broadcast_load(columns)), "token_padding", *first.shape, fixed=True))
    return Reading(Mask(broadcast_load(first), "tensor", *first.shape, fixed=True))


def _is_of_keys(mask: Tensor) -> bool:
    """Whether kernels find out what it hides. Expanded dimensions count as one."""
    if not is_far(mask) or mask.dtype != torch.bool or mask.dim() < 1:
        return False
    return all([size == 1 or stride == 0 for size, stride in zip(mask.shape[-3:-1], mask.stride()[-3:-1], strict=True)])


def _key_padding(mask: Tensor) -> Mask:
    return Mask(broadcast_load(mask), "key_padding", *mask.shape, fixed=True)


class _Buffer(NamedTuple):
    mask: Mask
    tensor: Tensor  # what it loads from


_buffers: KeptBuffers[_Buffer] = KeptBuffers()  # by device, stream and shape: the rest is written for every call


def _in_buffer(mask: Tensor, stream: Any) -> Reading:
    """A mask of keys, copied into a tensor that is kept."""
    kind = (mask.device, stream, mask.shape)

    def make() -> _Buffer:
        with torch.inference_mode(False):  # else it would be an inference tensor, with which no call is known
            tensor = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
        return _Buffer(_key_padding(tensor), tensor)

    buffer = _buffers.take(kind, make)
    buffer.tensor.copy_(mask)
    reading = Reading(buffer.mask)
    _buffers.keep(kind, buffer, reading)
    return reading


def _of_additive(mask: Tensor, sizes: Sizes) -> Reading:
    forbidden, impossible = mask <= FORBIDS, mask == -torch.inf
    adds, uniform, forbids = _answers(
        (torch.where(forbidden, 0, mask) != 0).any(),
        (forbidden.all(-1) & ~impossible.all(-1)).any(),  # a row of nothing but -10000 attends to all keys equally, so there it must be added
        impossible.any(),
    )
    if not adds and not uniform:
        return _of_boolean(~forbidden, sizes)
    bias = scores.bias(mask)
    return Reading(_of_boolean(~impossible, sizes).mask, bias) if forbids else Reading(None, bias)


def _answers(*questions: Tensor | None) -> list[bool]:
    """0-d boolean tensors as bools, fetched in one transfer; None is False."""
    asked = [q for q in questions if q is not None]
    found = iter(torch.stack(asked).tolist())
    return [q is not None and next(found) for q in questions]


def _both(left: Any, right: Any) -> Any:
    return lambda b, h, q, kv: left(b, h, q, kv) & right(b, h, q, kv)
