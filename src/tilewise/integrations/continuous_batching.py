"""transformers' continuous batching: attention over its paged cache.

A step has the newest tokens of many requests, packed; `cu_seq_lens_q` and `cu_seq_lens_k` say which are whose. Layers that see everything read their keys in
the cache's pages. Layers with a window have few keys, which lie in a ring: the cache copies them out in order. A step of whole prompts brings all its keys.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import masks
from tilewise.core.locks import new_lock
from tilewise.core.map_cache import contents_key
from tilewise.core.weak_cache import WeakCache
from tilewise.errors import BackendError, InputError
from tilewise.masks import Mask
from tilewise.memory import can_be_looked_at
from tilewise.paged import paged_attention
from tilewise.varlen import varlen_attention

# -- the implementations that are let in ---------------------------------------------------------------------------------

METHOD = "switch_to_cb_friendly_attn"  # of the library's manager: raises for implementations that it does not know, or puts another in their place
_lock = new_lock()
_before: list[Any] = []  # the library's own method, once for every open scope


@contextmanager
def let_in(name: str) -> Iterator[None]:
    """While open, continuous batching takes models whose attention implementation has this name: the library has a list of its own, which it asks when a
    manager is made."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

        usual = getattr(Manager, METHOD)
    except (ImportError, AttributeError) as error:
        raise BackendError("tilewise serves the continuous batching of transformers 5.22 and newer: pip install 'transformers>=5.22'") from error
    with _lock:
        own = _before[0] if _before else usual
        _before.append(own)

        def switch(manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            if model.config._attn_implementation != name:
                own(manager, model, *args, **kwargs)

        setattr(Manager, METHOD, switch)
    try:
        yield
    finally:
        with _lock:
            _before.pop()
            if not _before:
                setattr(Manager, METHOD, own)


# -- attention -----------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What a layer asks for besides its keys."""

    number: int | None
    window: int | None  # keys that a query sees, its own included
    changes: Sequence[Any]  # of scores
    scale: float | None


def cached_attention(query: Tensor, key: Tensor, value: Tensor, cache: Any, layer: Layer, step: dict[str, Any]) -> Tensor:
    """(1, heads, tokens, head dim) in, (1, tokens, heads, head dim) out. New keys and values are stored in the cache. `step` is the library's description."""
    if not hasattr(cache, "layer_to_allocator") or step.get("block_table") is not None:
        raise InputError(f"{type(cache).__name__} is not the paged cache of transformers 5.22, in steps as made for the implementation 'tilewise'")
    allocator = cache.layer_to_allocator[layer.number]
    history = step["read_index"][allocator.index]  # the row of every key in the cache; empty in a step of whole prompts
    reads_pages = history.numel() > 0 and allocator.supports_block_table
    told = step | {"read_index": {allocator.index: history[:0]}} if reads_pages else dict(step)  # without rows to read, the cache only writes
    key, value = cache.update(key_states=key, value_states=value, layer_idx=layer.number, kwargs=told)
    offsets, kv_offsets, longest = told["cu_seq_lens_q"], told["cu_seq_lens_k"], told["max_length_k"]
    options: dict[str, Any] = {"mask": _causal(getattr(allocator, "sliding_window", layer.window)), "score": layer.changes, "scale": layer.scale}
    if history.numel() == 0:
        out: Tensor = varlen_attention(_packed(query), _packed(key), _packed(value), offsets, enable_gqa=True, **options)
        return out.unsqueeze(0)
    if reads_pages:
        k_pages, v_pages = allocator.get_cache_for_block_table(layer.number)
    else:  # copies in order: pages of one row
        k_pages, v_pages = _packed(key).unsqueeze(1), _packed(value).unsqueeze(1)
    table, lengths = _where(history if reads_pages else None, kv_offsets, longest, k_pages.shape[1])
    out = paged_attention(_packed(query), k_pages, v_pages, table, lengths, offsets, **options)
    return out.unsqueeze(0)


def _packed(tensor: Tensor) -> Tensor:
    """(tokens, heads, head dim) from (1, heads, tokens, head dim)."""
    return tensor.squeeze(0).transpose(0, 1)


@lru_cache(maxsize=64)
def _causal(window: int | None) -> Mask:
    """One object for all layers and steps."""
    return masks.causal if window is None else masks.causal & masks.sliding_window(window - 1, 0)


class _Where(NamedTuple):
    table: Tensor  # [sequences, most] int32
    lengths: Tensor  # [sequences] int32


MAX_STEPS = 16
_known: WeakCache[_Where] = WeakCache(MAX_STEPS)


def _where(history: Tensor | None, kv_offsets: Tensor, longest: int, size: int) -> _Where:
    """The pages of each sequence: those that the rows of `history` are in, or all rows in order. Made once for the layers of a step.

    The key is what the contents of both are known by, the longest sequence, the size of a page, and the stream on which the tensors were made: another might
    read them too soon. A CUDA graph must make them itself.
    """
    sources = (kv_offsets,) if history is None else (kv_offsets, history)
    capturing, stream = (torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream().cuda_stream) if kv_offsets.is_cuda else (False, 0)
    contents = None if capturing or not all([can_be_looked_at(t) for t in sources]) else contents_key(sources)
    key = None if contents is None else (contents, longest, size, stream)
    found = None if key is None else _known.find(key, sources)
    if found is not None:
        return found
    lengths = kv_offsets.diff()
    firsts = kv_offsets[:-1, None] + torch.arange(0, longest, size, device=kv_offsets.device)  # the first key of each page
    table = firsts if history is None else history[firsts.clamp(max=history.shape[0] - 1)] // size
    made = _Where(table.to(torch.int32), lengths.to(torch.int32))
    if key is not None:
        _known.keep(key, sources, made)
    return made
