"""scaled_dot_product_attention with torch's signature, and a scope like torch's sdpa_kernel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from tilewise.attention import attention
from tilewise.core.problem import DenseMask
from tilewise.errors import InputError
from tilewise.frontend import mask_tensors
from tilewise.frontend.dispatch import TAKES_DENSE_MASK, TAKES_MASKS, attention_backend, requested_backend
from tilewise.frontend.interception import Interception
from tilewise.frontend.shared_sequence import scopes
from tilewise.masks.mask import is_causal_bias
from tilewise.masks.sequence import of_causal_bias
from tilewise.memory import check_dense

__all__ = ["intercept_sdpa", "scaled_dot_product_attention", "sdpa_kernel"]

# torch's kernels by what they are to a user; cuDNN and the memory-efficient kernel are reached through torch itself.
BACKEND_OF = {SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.EFFICIENT_ATTENTION: "native", SDPBackend.CUDNN_ATTENTION: "native"}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, served by tilewise.

    Tensors are (..., heads, sequence, head dim) with any number of leading dimensions, or (sequence, head dim), or nested.
    `attn_mask` may also be anything tilewise.attention takes as a mask; a tensor broadcasts as torch's does.
    With `is_causal`, both apply, as in torch's fused kernels.
    """
    dims = query.dim()
    if dims < 2 or key.dim() != dims or value.dim() != dims:
        raise InputError(f"query, key and value must have the same number of dimensions, at least 2, got {dims}, {key.dim()} and {value.dim()}")
    if not (query.is_nested or key.is_nested or value.is_nested):
        if query.size(-1) == 0 or value.size(-1) == 0:
            return _without_features(query, key, value, attn_mask, dropout_p, is_causal, 1.0 if query.shape[-1] == 0 else scale, enable_gqa)
        if not enable_gqa:
            query, key, value = _broadcast(query, key, value)
    mask = None if attn_mask is None else _mask(attn_mask, query, key, is_causal)
    q, k, v = (query, key, value) if dims == 4 else (_four_dimensional(t) for t in (query, key, value))
    out: Tensor = attend(q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return out if dims == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *, backend: str | None = None, **options: Any) -> Any:
    """tilewise.attention with a mask that may be a 4-D tensor, which is then read once and remembered."""
    if not isinstance(mask, Tensor) or query.is_nested:
        return attention(query, key, value, mask=mask, backend=backend, **options)
    name = requested_backend(backend)[0]
    if name in TAKES_DENSE_MASK:
        return attention(query, key, value, mask=DenseMask(mask), backend=backend, **options)
    reads_anyway = len(scopes) > 0 or name not in TAKES_MASKS  # there a mask that hides nothing has to be none
    read = mask_tensors.read_contents if reads_anyway else mask_tensors.read_for_call
    reading = read(mask, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
    if reading is None:
        return attention(query, key, value, mask=mask, backend=backend, **options)
    return attention(query, key, value, mask=reading.mask, score=reading.score, backend=backend, **options)


def _without_features(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """Head dims of 0, by one feature that is 0: without features to compare, all scores are 0; without values, there is nothing to return."""
    q, k, v = (pad(t, (0, 1)) if t.shape[-1] == 0 else t for t in (query, key, value))
    return scaled_dot_product_attention(q, k, v, *others)[..., : value.shape[-1]]


def _broadcast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Batch and heads of size 1 stand for all of the others', as in torch's products."""
    lead = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    if lead[0] == lead[1] == lead[2]:
        return query, key, value
    if any([size not in (1, max(sizes)) for sizes in zip(*lead, strict=True) for size in sizes]):
        return query, key, value  # the error is told where all arguments are checked
    common = [max(sizes) for sizes in zip(*lead, strict=True)]
    return query.expand(*common, *query.shape[-2:]), key.expand(*common, *key.shape[-2:]), value.expand(*common, *value.shape[-2:])


def _four_dimensional(t: Tensor) -> Tensor:
    """(..., H, S, D) -> (B, H, S, D); without a head dimension there is one head."""
    if t.dim() < 4:
        return t.reshape((1,) * (4 - t.dim()) + t.shape)
    return t if t.dim() == 4 else t.flatten(0, -4)


def _mask(mask: Any, query: Tensor, key: Tensor, is_causal: bool) -> Any:
    """torch's masks: a tensor is read from the right, (..., queries, keys); a CausalBias says which corner it aligns to."""
    if is_causal_bias(mask):
        if is_causal:
            raise InputError("CausalBias should not be used with causal=True: it says itself to which corner it aligns")
        return of_causal_bias(mask)
    if not isinstance(mask, Tensor):
        return mask
    check_dense(mask, "attn_mask")
    if mask.dim() == query.dim() == 4:  # the same object in every layer
        return mask
    whole = mask.reshape((1,) * (max(4, query.dim()) - mask.dim()) + mask.shape)
    if whole.dim() == 4:
        return whole
    lead = query.shape[:-3] if any(size != 1 for size in whole.shape[:-3]) else whole.shape[:-3]
    return whole.expand(*lead, *whole.shape[-3:]).flatten(0, -4)


@contextmanager
def sdpa_kernel(backends: SDPBackend | Sequence[SDPBackend], set_priority: bool = False) -> Iterator[None]:
    """Restrict the calls inside to these kernels, as torch.nn.attention.sdpa_kernel does; among several, tilewise chooses as `auto` does."""
    listed = [backends] if isinstance(backends, SDPBackend) else list(backends)
    unknown = [b for b in listed if b not in BACKEND_OF]
    if not listed or unknown:
        raise InputError(f"sdpa_kernel takes one or more of {', '.join(b.name for b in BACKEND_OF)}, got {listed}")
    with attention_backend(BACKEND_OF[listed[0]] if len(listed) == 1 else "auto"):
        yield


class intercept_sdpa(Interception):
    """Inside the `with` block, on this thread, tilewise serves every torch scaled_dot_product_attention.

        with tilewise.intercept_sdpa():
            loss = model(x)

    `backend` chooses for all of tilewise's calls inside, as tilewise.attention_backend does. nn.MultiheadAttention is served where
    it needs no weights. Activations that are checkpointed are computed again in the backward, out of reach of any such block:
    there, use tilewise.integrations.route(model).
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(scaled_dot_product_attention, backend, "intercept_sdpa")
