"""Intercepts torch's scaled_dot_product_attention inside a `with` block."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tilewise.engines.native import SDPA, own_call
from tilewise.frontend.dispatch import attention_backend, check_name

LOOKS_LIKE_ATTENTION = re.compile(r"Attention|Attn")  # class names
Sdpa = Callable[..., Tensor]  # with torch's signature
MULTI_HEAD = functional.multi_head_attention_forward  # behind nn.MultiheadAttention: a TorchFunctionMode does not see the SDPA call inside it


class Interception(TorchFunctionMode):
    """Inside the `with` block, on this thread, `sdpa` serves every call of torch's scaled_dot_product_attention; `backend` is as in attention_backend."""

    def __init__(self, sdpa: Sdpa, backend: str | None, name: str) -> None:
        super().__init__()
        if backend is not None:
            check_name(backend, name)
        self._sdpa = sdpa
        self._choices: list[AbstractContextManager[None]] = []  # a stack, because the block may be entered again inside itself
        self.backend = backend

    def __enter__(self) -> "Interception":
        self._choices.append(nullcontext() if self.backend is None else attention_backend(self.backend))
        self._choices[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._choices.pop().__exit__(*raised)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is SDPA and not own_call.running:
            return self._sdpa(*args, **kwargs)
        if func is MULTI_HEAD:
            served = multi_head_attention(self._sdpa, *args, **kwargs)
            if served is not None:
                return served
        return func(*args, **kwargs)


def multi_head_attention(
    sdpa: Sdpa,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None] | None:
    """torch's F.multi_head_attention_forward, (sequence, batch, features); None if the call needs something that only torch's own provides."""
    rare = (bias_k, bias_v, static_k, static_v)
    if need_weights or add_zero_attn or any([t is not None for t in rare]) or query.is_nested:
        return None
    if is_causal and attn_mask is None:
        return None  # an error, which torch tells: is_causal is a hint about the mask
    unbatched = query.dim() == 2
    if unbatched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else _thirds(in_proj_weight)
    projected = [functional.linear(t, w, b) for t, w, b in zip((query, key, value), weights, _thirds(in_proj_bias), strict=True) if w is not None]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in projected)
    causal = is_causal and key_padding_mask is None  # then torch goes by the hint, and does not look at the mask
    mask = None if causal else _merged(attn_mask, key_padding_mask, q)
    out = sdpa(q, k, v, mask, dropout_p if training else 0.0, causal)
    out = functional.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (out.squeeze(1) if unbatched else out), None


def _thirds(packed: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if packed is None else packed.chunk(3)


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """nn.MultiheadAttention's masks, in which True means "do not attend", merged into one mask for SDPA."""
    batch, heads = query.shape[:2]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (batch, heads)) if attn_mask.shape[0] == batch * heads else attn_mask.unsqueeze(0)
    given = [m for m in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]) if m is not None]
    if not given:
        return None
    if all([m.dtype == torch.bool for m in given]):
        forbidden = given[0] if len(given) == 1 else given[0] | given[1]
        return ~forbidden
    added = [torch.zeros_like(m, dtype=query.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in given]
    return added[0] if len(added) == 1 else added[0] + added[1]
