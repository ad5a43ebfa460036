"""Masks and scores of a long sequence, for processes that share it and for one that does not."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.cases import Case, by_function
from tests.support.grammar import MASKS, SCORES
from tilewise import masks, scores

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16


class LongCase(NamedTuple):
    name: str
    mask: Any
    score: Callable[..., Any] | None = None  # of the learned tensors (table [HEADS, 2 * length], logits [HEADS]): the scores of a call
    options: Mapping[str, Any] = MappingProxyType({})


def long_cases(length: int) -> list[LongCase]:
    g = torch.Generator().manual_seed(1)
    document = torch.sort(torch.randint(0, 5, (length,), generator=g)).values
    keep = torch.rand(BATCH, length, generator=g) > 0.1

    def biased(table: Tensor, logits: Tensor) -> Any:
        return lambda s, b, h, q, kv: s + table[h, q - kv + length]

    return [
        LongCase("full", None),
        LongCase("causal", masks.causal),
        LongCase("window, softcap", masks.causal & masks.sliding_window(150), lambda table, logits: scores.softcap(5.0)),
        LongCase("documents, learned bias", lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv), biased),
        LongCase(
            "padding by batch, window by head, alibi", lambda b, h, q, kv: keep[b, kv] & (q - kv < 40 * (h + 1)) & (q >= kv), lambda t, s: scores.alibi(HEADS)
        ),
        LongCase("rows without keys", lambda b, h, q, kv: (kv < length // 5) & (q > length // 3)),
        LongCase("global tokens, sinks", masks.sliding_window(64) | masks.global_tokens(20), lambda table, logits: scores.sinks(logits)),
        LongCase("additive tensor", torch.randn(1, HEADS, 1, length, generator=g)),
        LongCase("window by head, dropout", lambda b, h, q, kv: (q - kv).abs() <= 60 * h + 2, options={"dropout_p": 0.3, "seed": 7}),
        LongCase("sinks and a bias, rows without keys", lambda b, h, q, kv: q // 100 == kv // 100 + 1, lambda t, s: [biased(t, s), scores.sinks(s)]),
    ]


@st.composite
def problems(draw: st.DrawFn) -> Case:
    """Masks and scores of the grammar, on sequences of several tiles."""
    ratio, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    mask, steps = draw(MASKS), draw(SCORES)
    return Case(
        f"{mask.text}; {', '.join(s.text for s in steps) or 'no score'}; numbers {draw(st.integers(0, 999))}",
        batch=draw(st.integers(1, 2)),
        heads=ratio * kv_heads,
        kv_heads=kv_heads,
        q_len=draw(st.integers(100, 300)),
        head_dim=8,
        mask=lambda source: by_function(source, mask.build(source)),
        score=(lambda source: [s.build(source) for s in steps]) if steps else None,
        options=draw(st.sampled_from([{}, {"dropout_p": 0.4, "seed": 9}])),
        through=("out", "lse"),
    )
