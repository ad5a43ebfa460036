"""varlen_attention: packed sequences of different lengths, with any mask and score on top."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilewise.attention import packed_attention
from tilewise.core.problem import Options
from tilewise.errors import InputError
from tilewise.frontend.packing import Packed, check_offsets
from tilewise.scores import ScoreFunction


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Any:
    """Attention within each of many sequences packed end to end; no padding is stored or computed.

    query, key, value            (tokens, heads, head dim)
    cu_seqlens_q, cu_seqlens_k   int offsets 0, l0, l0 + l1, ...: sequence n has tokens cu[n] .. cu[n + 1]; the keys' are the
                                 queries' unless given
    mask, score                  functions that see positions inside each sequence, and the sequence's number as b
    return_lse                   also return (heads, tokens)

    The other arguments are those of tilewise.attention. `is_causal` aligns upper-left in every sequence.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise InputError(f"{name} must be (tokens, heads, head dim), got shape {tuple(tensor.shape)}")
    kv_offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens_k is None and query.shape[0] != key.shape[0]:
        raise InputError(f"query has {query.shape[0]} tokens and key {key.shape[0]}: give cu_seqlens_k")
    check_offsets(cu_seqlens_q, query.shape[0], "cu_seqlens_q")
    check_offsets(kv_offsets, key.shape[0], "cu_seqlens_k")
    if cu_seqlens_q.shape != kv_offsets.shape:
        raise InputError(f"cu_seqlens_q describes {cu_seqlens_q.shape[0] - 1} sequences, cu_seqlens_k {kv_offsets.shape[0] - 1}")
    packed = Packed(query, key, value, cu_seqlens_q, kv_offsets)
    options = Options(scale, dropout_p, is_causal, enable_gqa, deterministic, seed)
    output = packed_attention(packed, mask, score, options, backend, return_lse)
    out = output.out.squeeze(0).transpose(0, 1)
    return (out, output.lse.squeeze(0)) if return_lse else out
