"""transformers: tilewise as an attention implementation.

    tilewise.integrations.transformers.register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")     # or model.set_attn_implementation("tilewise")

Masks stay functions: the mask that transformers describes is traced once for all layers, and never becomes a (queries, keys) tensor.

    with tilewise.integrations.transformers.continuous_batching():
        model.generate_batch(prompts)                                           # or a manager made here, and used for as long as you like
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise import masks, scores
from tilewise.attention import attention
from tilewise.core.problem import Options
from tilewise.errors import BackendError, InputError
from tilewise.flex import mask_for
from tilewise.frontend import mask_tensors
from tilewise.frontend.shared_sequence import scopes
from tilewise.integrations import step_masks
from tilewise.integrations.continuous_batching import Layer, cached_attention, let_in
from tilewise.integrations.library_masks import Parts, parts_of
from tilewise.integrations.step_masks import Sight
from tilewise.integrations.traced_mask import TracedMask, dropped_mask
from tilewise.masks import Mask
from tilewise.memory import can_be_looked_at

__all__ = ["continuous_batching", "register", "unregister"]

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


def continuous_batching() -> AbstractContextManager[None]:
    """A scope in which models with the implementation `tilewise` are let into continuous batching: `generate_batch`, `init_continuous_batching`.

    transformers asks when a manager is made. Made inside the scope, it can be used outside, too. Other models are treated as ever.
    """
    return let_in(NAME)


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
    device: Any = None,
    **_: Any,
) -> Any:
    """transformers' mask interface: combines a mask function, offsets and a boolean (batch, keys) padding mask into one mask.

    The other arguments describe how to build a mask tensor, and none is built.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if scopes and q_length == kv_length == scopes[-1].local_length:
        if attention_mask is not None:  # whether there is padding in it or not: ranks that hold none would wait for the one that raises
            raise InputError(f"attention_mask of {_shape(attention_mask)}: {_THE_PLANS}")
        return None  # the plan's is used
    asked = causal_mask_function if mask_function is None else mask_function
    sizes = Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)

    def hold(mask: Mask | None) -> TracedMask:
        return TracedMask(mask, (batch_size, 1, q_length, kv_length), config)

    if torch.compiler.is_compiling():
        return hold(_traced(asked, sizes, attention_mask))
    records = torch.is_grad_enabled()
    with _ordinary_tensors(), torch.set_grad_enabled(records):  # to leave inference mode switches gradients on
        keep = None if attention_mask is None else _ordinary(attention_mask).bool()
        parts = Parts() if asked is bidirectional_mask_function else parts_of(asked)
        if parts is None or not _is_simple(parts, sizes):
            return hold(_traced(asked, sizes, keep))
        return _of_step(parts, sizes, keep, config, device, hold)


_THE_PLANS = (
    "inside tilewise.distributed.context the plan's mask is used, and no other. Pass no attention_mask to the model, and make the plan with "
    "what has to be hidden: masks.padding(lengths) & masks.causal"
)


def _shape(tensor: Tensor) -> str:
    return " x ".join([str(size) for size in tensor.shape])


class Sizes(NamedTuple):
    """How many queries and keys a step has, and the positions of the first of each: those of a static cache are tensors."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int


def _traced(function: Callable[..., Any], sizes: Sizes, keep: Tensor | None) -> Mask | None:
    """The mask of any function, traced by the first layer; under torch.compile, of every function."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    found: Mask | None
    if function is bidirectional_mask_function:
        found = None
    elif function is causal_mask_function and isinstance(sizes.q_offset, int):
        found = _causal(sizes.kv_length, sizes.q_offset - sizes.kv_offset)
    else:
        found = Mask(_shifted(function, sizes.q_offset, sizes.kv_offset), _name(function), fixed=True)
    return _both(found, None if keep is None else _padding(_visible(keep, sizes)))


def _both(one: Mask | None, other: Mask | None) -> Mask | None:
    return one if other is None else other if one is None else one & other


def _causal(kv_length: int, offset: int) -> Mask | None:
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


def _visible(keep: Tensor, sizes: Sizes) -> Tensor:
    """(batch, keys) booleans of keys that are not padding; keys past the end of `keep` are not written yet, and masked."""
    end = sizes.kv_offset + sizes.kv_length
    missing = end - keep.shape[-1]
    keep = torch.nn.functional.pad(keep.bool(), (0, missing)) if missing > 0 else keep.bool()
    return keep if sizes.kv_offset == 0 and missing >= 0 else keep[:, sizes.kv_offset : end]


def _padding(visible: Tensor) -> Mask | None:
    """The simplest mask that hides what is not visible."""
    reading = mask_tensors.read(visible[:, None, None, :], (visible.shape[0], 1, 1, visible.shape[1]))
    return Mask(lambda b, h, q, kv: visible[b, kv], "key_padding", fixed=True) if reading is None else reading.mask


# -- masks in the forms of step_masks ------------------------------------------------------------------------------------


def _is_simple(parts: Parts, sizes: Sizes) -> bool:
    """Windows and documents only of causal masks, and documents only without a cache."""
    if parts.documents is not None and not (isinstance(sizes.q_offset, int) and sizes.q_offset == sizes.kv_offset == 0):
        return False
    return parts.causal or (parts.window is None and parts.documents is None)


def _of_step(parts: Parts, sizes: Sizes, keep: Tensor | None, config: Any, device: Any, hold: Callable[[Mask | None], Any]) -> Any:
    """The mask of a step, given to its holder. On a GPU padding is loaded as it is; on a CPU a prompt's is read, which makes simpler masks of most."""
    _, q_length, kv_length, q_offset, kv_offset = sizes
    documents = None if parts.documents is None else _ordinary(parts.documents)
    at: int | Tensor | None = q_offset - kv_offset if parts.causal else None  # a new tensor: a static cache increments its own before attention runs
    if keep is not None and q_length > 1 and keep.device.type == "cpu" and can_be_looked_at(keep):
        positions = step_masks.mask_of(step_masks.needed(Sight(at, parts.window, documents), q_length, kv_length))
        return hold(_both(positions, _padding(_visible(keep, sizes))))
    if keep is not None and not isinstance(at, Tensor) and not _hides(keep, q_length, config):
        known = keep.shape[-1] - kv_offset  # keys after these are not written yet
        if known >= kv_length or (at is not None and at + q_length <= known):
            keep = None
    sight = step_masks.needed(Sight(at, parts.window, documents), q_length, kv_length)
    if sight.offset is None and documents is None and keep is None:
        return hold(None)
    where = keep.device if keep is not None else at.device if isinstance(at, Tensor) else None if device is None else torch.device(device)
    if _is_buffered(sizes) and where is not None and not _is_capturing(where):
        within = None if keep is None else keep[:, kv_offset : kv_offset + kv_length]
        return step_masks.in_buffers(sizes.batch, kv_length, where, sight._replace(visible=within), hold)
    return hold(step_masks.mask_of(sight if keep is None else sight._replace(visible=_visible(keep, sizes))))


def _is_buffered(sizes: Sizes) -> bool:
    """Whether the next token will have as many keys as this one. Recorded for autograd, a mask keeps its tensors: a backward may come late."""
    grows = isinstance(sizes.q_offset, int) and sizes.kv_offset == 0 and sizes.q_offset + 1 == sizes.kv_length
    return sizes.q_length == 1 and not grows and not torch.is_grad_enabled()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# Whether a model's last mask had padding, by the id of its configuration. A guess: a wrong one costs a look, or a mask that hides nothing.
_padded: dict[int, bool] = {}
MAX_MODELS = 256


def _hides(keep: Tensor, q_length: int, config: Any) -> bool:
    """Whether any key is padding. To look at a GPU's memory is to wait for it. torch's SDPA is given a mask after the same look; here it is left out where
    there was padding in the step before, but for a prompt, with which there may be none again."""
    if not can_be_looked_at(keep) or _is_capturing(keep.device):
        return True
    is_prompt = q_length > 1 and not torch.is_grad_enabled()
    if keep.device.type != "cpu" and not is_prompt and _padded.get(id(config), False):
        return True
    if len(_padded) >= MAX_MODELS:
        _padded.clear()
    _padded[id(config)] = hidden = not bool(keep.all())
    return hidden


def _ordinary_tensors() -> AbstractContextManager[Any]:
    """Tensors made in inference mode cannot be told from changed ones, so that calls with them would be prepared again in every layer."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _ordinary(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


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
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (batch, heads, sequence, head dim) in, (batch, sequence, heads, head dim) out."""
    _refuse(kwargs)
    if cache is not None:  # a step of continuous batching says itself who sees what
        if dropout or position_bias is not None:
            what = f"dropout={dropout}" if dropout else "a position bias"
            raise InputError(f"the paged cache of continuous batching is for generating, and not served with {what}: model.eval(), or generate()")
        if isinstance(attention_mask, TracedMask):
            attention_mask.use()
        layer = Layer(getattr(module, "layer_idx", None), sliding_window, _changes(softcap, None, None, s_aux), scaling)
        return cached_attention(query, key, value, cache, layer, kwargs), None
    shared = bool(scopes) and _is_shared(module, query, key, is_causal)
    if shared:  # the model's mask is of local tokens: the plan's has the whole sequence
        if isinstance(attention_mask, Tensor):
            raise InputError(f"attention_mask of {_shape(attention_mask)}: {_THE_PLANS}")
        mask, added = _layer_type(module), None
    else:
        mask, added = _mask_and_bias(module, query, key, attention_mask, sliding_window, is_causal)
        _check_packing(kwargs, mask)
    changes = _changes(softcap, None if position_bias is None else scores.bias(position_bias[..., : key.shape[2]]), added, s_aux)
    if shared:
        out = scopes[-1].attention(query, key, value, mask, changes, Options(scaling, dropout), "bhsd", None, None, False)
    else:
        out = attention(query, key, value, mask=mask, score=changes, scale=scaling, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous(), None


def _changes(softcap: float | None, bias: scores.Score | None, added: scores.Score | None, sinks: Tensor | None) -> list[Any]:
    """Of scores, in order."""
    changes: list[Any] = [] if softcap is None else [_softcap(softcap)]
    changes += [score for score in (bias, added) if score is not None]
    return changes if sinks is None else [*changes, scores.sinks(sinks)]


def _is_shared(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> bool:
    """Whether a call inside tilewise.distributed.context is of the plan's tokens. Causal layers always are: with other tokens, all ranks say so."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return scopes[-1].holds(query, key, "bhsd", None) or (causal and query.shape[2] == key.shape[2])


def _layer_type(module: nn.Module) -> str | None:
    """The name of the mask that a layer takes of a plan with several; None where all layers are of one type."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    return None if types is None or len(set(types)) == 1 else str(types[module.layer_idx])


_known_softcap = lru_cache(maxsize=64)(scores.softcap)


def _softcap(cap: float) -> scores.Score:
    """One object for all layers; torch.compile warns of remembered results."""
    return scores.softcap(cap) if torch.compiler.is_compiling() else _known_softcap(cap)


def _mask_and_bias(
    module: nn.Module, query: Tensor, key: Tensor, given: Any, sliding_window: int | None, is_causal: bool | None
) -> tuple[Any, scores.Score | None]:
    if isinstance(given, TracedMask):  # it includes the sliding window, if there is one
        _, _, queries, keys = given.shape
        if queries != query.shape[2] or keys != key.shape[2]:
            raise InputError(f"the mask was made for {queries} queries and {keys} keys, the call has {query.shape[2]} and {key.shape[2]}")
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
            "pass position_ids that start again at each sequence, no attention_mask, and use_cache=False "
            "(with a cache, transformers does not look at position_ids)"
        )
