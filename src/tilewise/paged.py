"""paged_attention: keys and values in pages, as servers of many sequences keep them, with any mask and score."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewise.attention import run
from tilewise.core.problem import Options
from tilewise.errors import InputError
from tilewise.frontend.kv_scales import kv_scales
from tilewise.frontend.paging import batched, check_pages, in_pages, packed
from tilewise.scores import ScoreFunction

__all__ = ["paged_attention"]


@overload
def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: Any = None,
    score: ScoreFunction | Sequence[ScoreFunction] | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens to all its keys, which lie in pages: decoding, prefill and both in one batch.

    Key j of sequence n is row j % page size of page `page_table[n, j // page size]`. Query i of a sequence with m queries and `kv_lengths[n]` keys stands at
    position `kv_lengths[n] - m + i`; masks and scores see such positions, and the sequence's number as b, so `masks.causal` is what it says. Without a mask,
    all keys of the sequence are attended. Rows that are not written yet may hold anything. Nothing is read outside the pages, whatever the table holds.

    Fewer key heads than query heads (GQA) need no option. With gradients, or in torch.compile, keys and values are copied out of their pages first.

    Args:
        query: (batch, heads, queries, head dim), or (tokens, heads, head dim) with `cu_seqlens_q`; float16, bfloat16, float32 or float64.
        k_pages: (pages, page size, kv heads, head dim), in the query's dtype, float8_e4m3fn or float8_e5m2.
        v_pages: Like k_pages; its head dim may be another.
        page_table: (batch, most pages), int32. Entries past a sequence's last page may hold anything.
        kv_lengths: (batch,), int32: the keys of each sequence, those of its queries included.
        cu_seqlens_q: int32 offsets 0, m0, m0 + m1, ...: sequence n has query tokens cu[n] up to before cu[n + 1].
        mask: A function f(b, h, q, kv) or a mask of tilewise.masks.
        score: A function f(score, b, h, q, kv), one of tilewise.scores, or several, applied in order.
        scale: 1 / sqrt(head dim) unless given.
        k_scale: What keys were divided by, one number or one for each kv head: for float8 pages.
        v_scale: The same for values.
        backend: As for tilewise.attention.
        return_lse: Also return the lse: (batch, heads, queries), or (heads, tokens).

    Returns:
        The output, shaped like the query with the values' head dim; with `return_lse`, the output and the lse.
    """
    check_pages(k_pages, v_pages, page_table, kv_lengths)
    dims = 4 if cu_seqlens_q is None else 3
    if not isinstance(query, Tensor) or query.dim() != dims:
        allowed = "(tokens, heads, head dim), as cu_seqlens_q is given"
        if cu_seqlens_q is None:
            allowed = "(batch, heads, queries, head dim), or (tokens, heads, head dim) with cu_seqlens_q"
        raise InputError(f"query must be a tensor {allowed}, got {tuple(query.shape) if isinstance(query, Tensor) else type(query).__name__}")
    table, lengths = page_table.to(torch.int32), kv_lengths.to(torch.int32).contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    size, kv_heads = k_pages.shape[1:3]
    scales = kv_scales(k_scale, v_scale, kv_heads, query.device)
    v_number, scales = scales.number_of_values()
    if cu_seqlens_q is None:
        paged = batched(query, size, table, lengths, mask is None, v_number)
    else:
        paged = packed(query, size, table, lengths, cu_seqlens_q, mask is None, v_number)
    within, scores = in_pages(paged, mask, score, page_table.shape[0])
    scores, options = scales.applied(paged.query, scores, Options(scale=scale, enable_gqa=True))
    output = run(paged.query, k_pages.transpose(1, 2), v_pages.transpose(1, 2), within, scores, options, backend, return_lse, paged.pages)
    out = scales.of_output(output.out)
    if cu_seqlens_q is None:
        return (out, output.lse) if return_lse else out
    apart = paged.tokens_apart
    out = out.squeeze(2) if apart else out.squeeze(0).transpose(0, 1)
    return (out, output.lse.squeeze(2).transpose(0, 1) if apart else output.lse.squeeze(0)) if return_lse else out
