"""transformers: tilewise as an attention implementation.

    tilewise.integrations.transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")     # or model.set_attn_implementation("tilewise")

Masks stay functions: the mask that transformers describes is traced once for all layers, and never becomes a (queries, keys) tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise import masks, scores
from tilewise.attention import attention
from tilewise.errors import BackendError, InputError
from tilewise.flex import mask_for
from tilewise.frontend import mask_tensors
from tilewise.masks import Mask

NAME = "tilewise"


def register() -> None:
    """Adds `tilewise` to the attention implementations and the mask functions. unregister() undoes it."""
    attention_interface, mask_interface = _interfaces()
    attention_interface.register(NAME, attention_forward)
    mask_interface.register(NAME, make_mask)


def unregister() -> None:
    """Removes `tilewise`. Switch models that use it to another implementation first."""
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise BackendError("tilewise.integrations.transformers needs transformers with AttentionMaskInterface: pip install 'transformers>=4.53'") from error
    return AttentionInterface, AttentionMaskInterface


# -- masks -------------------------------------------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> Any:
    """transformers' mask interface: combines a mask function, offsets and a boolean (batch, keys) padding mask into one mask.

    The other arguments describe how to build a mask tensor, and none is built.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    from tilewise.integrations.traced_mask import TracedMask

    asked = causal_mask_function if mask_function is None else mask_function
    padding = _padding(attention_mask, kv_length, kv_offset)
    found: Mask | None
    if asked is bidirectional_mask_function:
        found = None
    elif asked is causal_mask_function and isinstance(q_offset, int):
        found = _causal(q_length, kv_length, q_offset - kv_offset)
    else:
        found = Mask(_shifted(asked, q_offset, kv_offset), _name(asked), fixed=True)  # for one forward of the model: its layers trace it once
    if padding is not None:
        found = padding if found is None else found & padding
    return TracedMask(found, (batch_size, 1, q_length, kv_length), config)


def _causal(q_length: int, kv_length: int, offset: int) -> Mask | None:
    """Causal with query i at position i + offset; None if that allows everything."""
    if offset + 1 >= kv_length:
        return None  # the first query sees every key
    if offset == 0:
        return masks.causal
    return Mask(lambda b, h, q, kv: q + offset >= kv, "causal", f"offset {offset}", fixed=True)


def _shifted(function: Callable[..., Any], q_offset: int | Tensor, kv_offset: int) -> Callable[..., Any]:
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache increments this tensor in place before attention runs

    def shifted(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return function(b, h, q + q_offset, kv + kv_offset)

    return shifted


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__).removesuffix("_function")


def _padding(keep: Tensor | None, kv_length: int, kv_offset: int) -> Mask | None:
    """The mask of keys that are not padding; keys past the end of `keep` are not written yet, and masked."""
    if keep is None:
        return None
    missing = kv_offset + kv_length - keep.shape[-1]
    keep = torch.nn.functional.pad(keep.bool(), (0, missing)) if missing > 0 else keep.bool()
    visible = keep[:, kv_offset : kv_offset + kv_length]
    if not torch.compiler.is_compiling():
        reading = mask_tensors.read(visible[:, None, None, :], (visible.shape[0], 1, 1, visible.shape[1]))
        assert reading is not None
        return reading.mask
    return Mask(lambda b, h, q, kv: visible[b, kv], "key_padding", fixed=True)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (batch, heads, sequence, head dim) in, (batch, sequence, heads, head dim) out."""
    _refuse(kwargs)
    mask, added = _mask_and_bias(module, query, key, attention_mask, sliding_window, is_causal)
    _check_packing(kwargs, mask)
    changes: list[Any] = []
    if softcap is not None:
        changes.append(scores.softcap(softcap))
    if position_bias is not None:
        changes.append(scores.bias(position_bias[..., : key.shape[2]]))
    if added is not None:
        changes.append(added)
    if s_aux is not None:
        changes.append(scores.sinks(s_aux))
    out = attention(query, key, value, mask=mask, score=changes, scale=scaling, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    module: nn.Module, query: Tensor, key: Tensor, given: Any, sliding_window: int | None, is_causal: bool | None
) -> tuple[Any, scores.Score | None]:
    from tilewise.integrations.traced_mask import TracedMask

    if isinstance(given, TracedMask):  # it includes the sliding window, if there is one
        if given.shape[2:] != (query.shape[2], key.shape[2]):
            made, used = tuple(given.shape[2:]), (query.shape[2], key.shape[2])
            raise InputError(f"the mask was made for {made[0]} queries and {made[1]} keys, the call has {used[0]} and {used[1]}")
        return given.use(), None
    _refuse_dropped_mask(module, query, key, given)
    if given is None:
        return _without_a_mask(module, query, sliding_window, is_causal), None
    if not isinstance(given, Tensor):
        return mask_for(given, query, key), None
    given = given[..., : key.shape[2]]  # with a static cache, the mask may cover more keys than are given
    reading = mask_tensors.read(given, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
    if reading is not None:
        return reading.mask, reading.score
    return (given, None) if given.dtype == torch.bool else (None, scores.bias(given))


def _refuse_dropped_mask(module: nn.Module, query: Tensor, key: Tensor, given: Any) -> None:
    """Raises if tilewise made a mask for this layer's model and the layer calls attention with a mask of its own (Doge does)."""
    from tilewise.integrations.traced_mask import dropped_mask

    if given is None:  # cross-attention without padding, or causal by `is_causal`
        return
    dropped = dropped_mask(getattr(module, "config", None), (query.shape[0], query.shape[2], key.shape[2]))
    if dropped is None:
        return
    dropped.use()  # told once; the error's traceback may keep it for long
    layer = type(module).__name__ + (f" (layer {module.layer_idx})" if getattr(module, "layer_idx", None) is not None else "")
    instead = f"a {tuple(given.shape)} {str(given.dtype).removeprefix('torch.')} tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise InputError(
        f"{layer} was given the mask {dropped} but calls attention with {instead} of its own, so that mask would be lost: "
        "use model.set_attn_implementation('sdpa') and tilewise.integrations.route(model), which run tilewise with the mask tensors of the model"
    )


def _without_a_mask(module: nn.Module, query: Tensor, sliding_window: int | None, is_causal: bool | None) -> Mask | None:
    """No mask may mean causal, if the call or the module says so; a single query sees all keys."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or query.shape[2] == 1:
        return None
    return masks.causal if sliding_window is None else masks.causal & masks.sliding_window(sliding_window - 1, 0)


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise InputError("tilewise forms no attention weights: for output_attentions=True use attn_implementation='eager'")
    if kwargs.get("cache") is not None:
        raise InputError("tilewise does not serve the paged cache of continuous batching: use attn_implementation='sdpa' there, or generate()")
    for name in ("indices", "block_indices"):  # keys that an indexer chose (DeepSeek V3.2, MiniMax M3)
        if kwargs.get(name) is not None:
            raise InputError(
                f"this model chooses its keys by {name}, which the tilewise implementation does not take: "
                "use model.set_attn_implementation('sdpa') and tilewise.integrations.route(model), which run tilewise with the mask tensors of the model"
            )


def _check_packing(kwargs: dict[str, Any], mask: Any) -> None:
    """Raises if sequences are packed but the mask does not separate them: tilewise ignores cu_seq_lens, and relies on masks made from position_ids."""
    offsets = kwargs.get("cu_seq_lens_q")
    if not isinstance(offsets, Tensor) or offsets.numel() <= 2:
        return
    if mask is None or (isinstance(mask, Mask) and not mask.traced().captures):  # a mask that separates sequences captures their ids
        raise InputError(
            f"cu_seq_lens_q describes {offsets.numel() - 1} packed sequences, but the mask keeps none of them apart: "
            "pass position_ids that start again at each sequence, and no attention_mask"
        )
