"""Masks of one sequence, by the places of query and key: causal, windows, prefixes, tokens that all see."""

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InputError
from tilewise.masks.checks import integers
from tilewise.masks.expressions import at_most
from tilewise.masks.mask import Mask
from tilewise.named import check_whole, covers, named

full = Mask(lambda b, h, q, kv: True, "full", fixed=True)
"""Every query sees every key."""

causal = Mask(lambda b, h, q, kv: q >= kv, "causal", fixed=True)
"""Query i sees keys 0 to i: aligned to the upper left, as in torch's SDPA. A decoder that continues a cache wants causal_lower_right."""

full.made_by, causal.made_by = "full", "causal"


@named
def causal_lower_right(q_len: int, kv_len: int) -> Mask:
    """Causal with the last query aligned to the last key, as for a decoder that continues a cache."""
    check_whole("causal_lower_right", q_len=q_len, kv_len=kv_len)
    offset = kv_len - q_len
    return Mask(lambda b, h, q, kv: q + offset >= kv, "causal_lower_right", q_len, kv_len, covers=covers("causal_lower_right", q=q_len, kv=kv_len))


def of_causal_bias(bias: Any) -> Mask:
    return causal_lower_right(bias.seq_len_q, bias.seq_len_kv) if bias.variant.name == "LOWER_RIGHT" else causal


@named
def sliding_window(left: int, right: int | None = None) -> Mask:
    """Keys from `left` before the query to `right` after it; `right` is `left` unless given."""
    reach = left if right is None else right
    check_whole("sliding_window", left=left, right=reach)
    if left < 0 or reach < 0:
        raise InputError(f"sliding_window takes non-negative reaches, got left={left}, right={right}")
    parameters = (left,) if right is None else (left, right)
    return Mask(lambda b, h, q, kv: at_most(q - kv, left) & at_most(kv - q, reach), "sliding_window", *parameters)


@named
def dilated_window(reach: int, dilation: int) -> Mask:
    """Every `dilation`-th key within `reach` on either side of the query."""
    check_whole("dilated_window", reach=reach, dilation=dilation)
    if reach < 0 or dilation < 1:
        raise InputError(f"dilated_window takes reach >= 0 and dilation >= 1, got {reach}, {dilation}")

    def dilated(b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = (q - kv).abs()
        return at_most(distance, reach) & (distance % dilation == 0)

    return Mask(dilated, "dilated_window", reach, dilation)


@named
def prefix_lm(prefix: int | Tensor) -> Mask:
    """All queries see the first `prefix` keys (a number, or one per batch element); the rest is causal."""
    if isinstance(prefix, Tensor):
        lengths = integers(prefix, 1, "prefix_lm")
        return Mask(lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv), "prefix_lm", "per batch", covers=covers("prefix_lm", b=lengths.shape[0]))
    check_whole("prefix_lm", prefix=prefix)
    if prefix < 0:
        raise InputError(f"prefix_lm takes a prefix of at least 0, got {prefix}")
    return Mask(lambda b, h, q, kv: at_most(kv + 1, prefix) | (q >= kv), "prefix_lm", prefix)


@named
def global_tokens(which: int | Tensor) -> Mask:
    """Marked tokens attend to all and are attended by all: the first `which`, or those true in a boolean (S,) tensor."""
    if isinstance(which, Tensor):
        if which.dtype != torch.bool or which.dim() != 1:
            raise InputError(f"global_tokens takes a number or a boolean (S,) tensor, got {which.dtype} of shape {tuple(which.shape)}")
        return Mask(lambda b, h, q, kv: which[q] | which[kv], "global_tokens", covers=covers("global_tokens", q=which.shape[0], kv=which.shape[0]))
    check_whole("global_tokens", which=which)
    if which < 0:
        raise InputError(f"global_tokens takes a number of at least 0, got {which}")
    return Mask(lambda b, h, q, kv: at_most(q + 1, which) | at_most(kv + 1, which), "global_tokens", which)
