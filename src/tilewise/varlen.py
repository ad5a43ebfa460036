"""varlen_attention: packed sequences of different lengths, with any mask and score on top."""

from collections.abc import Sequence
from typing import Any, Literal, overload

from torch import Tensor

from tilewise.attention import packed_attention
from tilewise.core.problem import Options
from tilewise.errors import InputError
from tilewise.frontend.kv_scales import kv_scales
from tilewise.frontend.packing import Packed, check_offsets
from tilewise.frontend.shared_sequence import scopes
from tilewise.scores import ScoreFunction

__all__ = ["varlen_attention"]


@overload
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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor: ...


@overload
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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str | None = None,
    return_lse: Literal[True],
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str | None = None,
    return_lse: bool,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    seed: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of many sequences packed end to end; no padding is stored or computed.

    Arguments that are not listed are those of tilewise.attention. `is_causal` aligns upper-left in every sequence.

    Args:
        query: (tokens, heads, head dim).
        key: (tokens, heads, head dim).
        value: (tokens, heads, head dim).
        cu_seqlens_q: int offsets 0, l0, l0 + l1, ...: sequence n has tokens cu[n] up to before cu[n + 1].
        cu_seqlens_k: The keys' offsets; the queries' unless given.
        mask: As for tilewise.attention; a function sees positions inside each sequence, and the sequence's number as b.
        score: Likewise.
        return_lse: Also return the lse, (heads, tokens).

    Returns:
        The output, (tokens, heads, head dim); with `return_lse`, the output and the lse.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise InputError(f"{name} must be (tokens, heads, head dim), got shape {tuple(tensor.shape)}")
    kv_offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens_k is None and query.shape[0] != key.shape[0]:
        raise InputError(f"query has {query.shape[0]} tokens and key {key.shape[0]}: give cu_seqlens_k")
    check_offsets(cu_seqlens_q, "cu_seqlens_q")
    check_offsets(kv_offsets, "cu_seqlens_k")
    if cu_seqlens_q.shape != kv_offsets.shape:
        raise InputError(f"cu_seqlens_q describes {cu_seqlens_q.shape[0] - 1} sequences, cu_seqlens_k {kv_offsets.shape[0] - 1}")
    if len(scopes) > 0 and query.shape[0] == key.shape[0] == scopes[-1].local_length:
        raise InputError(
            f"inside tilewise.distributed.context the sequences that {query.shape[0]} local tokens belong to are the plan's mask (masks.document): "
            "call tilewise.attention without a mask"
        )
    packed = Packed(query, key, value, cu_seqlens_q, kv_offsets, ("cu_seqlens_q", "cu_seqlens_k"))
    scales = kv_scales(k_scale, v_scale, key.shape[1], query.device)
    score, options = scales.applied(query.transpose(0, 1).unsqueeze(0), score, Options(scale, dropout_p, is_causal, enable_gqa, deterministic, seed))
    output = packed_attention(packed, mask, score, options, backend, return_lse)
    out = scales.of_output(output.out).squeeze(0).transpose(0, 1)
    return (out, output.lse.squeeze(0)) if return_lse else out
