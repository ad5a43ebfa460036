"""The plans of calls of the torch operators, kept for calls that are alike: compiled code has no call cache in front of it.

A plan may be used again wherever the call cache would (frontend/call_key.py), so the key covers the same: the engine, programs, floats, scale, dropout and
switches, which are the recipe, the integers, torch's switches, dtype, device, shape, strides, 16-byte alignment and requires_grad of query, key and value,
and of captures identity, address, dtype, shape, strides and requires_grad. The mask's, whose contents plans depend on, are watched: ids get reused. Sinks and
seed are handed to a plan in every call, and may be elsewhere each time. What a plan depends on besides, it looks at itself: contents, tuning, the current
device.

Not kept are plans of given tiles, which are another object in every call, and of masks that load from Parameters or inference tensors, whose contents may
change unseen (core/map_cache.py).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.core.map_cache import maps
from tilewise.core.plan import Plan
from tilewise.core.tf32 import allows_tf32
from tilewise.core.weak_cache import WeakCache
from tilewise.engines.packed_call import PackedCall

MAX_PLANS = 512
_plans: WeakCache[Plan] = WeakCache(MAX_PLANS)
maps.on_clear.append(_plans.clear)  # plans hold what was made for maps


def plan_of(call: PackedCall) -> Plan:
    """The plan of a call, made now or for an earlier one."""
    (query, key, value, others, recipe, ints), counts = call.arguments, call.frame.recipe
    watched = others[: counts.mask_captures]
    if counts.tiles or (watched and any([type(t) is Parameter or t.is_inference() for t in watched])):
        return call.frame.engine.plan(call.problem)
    known: tuple[Any, ...] = (
        recipe,
        query.device,
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        query.dtype is torch.float32 and allows_tf32(),
        _layout(query),
        _layout(key),
        _layout(value),
    )
    if not call.frame.is_complete:
        captures = counts.mask_captures + counts.score_captures
        known += (tuple(ints), tuple([_place(t) for t in others[:captures]]), tuple([_layout(t) for t in others[captures:]]))
    found = _plans.find(known, watched)
    if found is None:
        found = call.frame.engine.plan(call.problem)
        _plans.keep(known, watched, found)
    return found


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.requires_grad


def _place(t: Tensor) -> tuple[Any, ...]:
    return id(t), t.data_ptr(), t.dtype, t.shape, t.stride(), t.requires_grad
