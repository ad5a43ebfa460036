"""Masks and scores of the library are made for so many tokens, heads and batch elements: a call that has others is told so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores

Q = torch.zeros(2, 4, 300, 16)

WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "documents that end before the tokens": (lambda: {"mask": masks.document(lengths=[100, 100])}, "document is made for 200 queries, the call has 300"),
    "ids of fewer tokens": (lambda: {"mask": masks.document(torch.zeros(299, dtype=torch.int64))}, "document is made for 299 queries"),
    "ids of another batch": (lambda: {"mask": masks.document(torch.zeros((1, 300), dtype=torch.int64))}, "document is made for 1 batch elements"),
    "padding of another batch": (lambda: {"mask": masks.padding(torch.tensor([3]))}, "padding is made for 1 batch elements, the call has 2"),
    "within another mask": (lambda: {"mask": masks.causal & ~masks.padding(torch.tensor([3]))}, "padding is made for 1 batch"),
    "a smaller grid": (lambda: {"mask": masks.neighborhood((10, 10), 3)}, "neighborhood is made for 100 queries"),
    "other lengths": (lambda: {"mask": masks.causal_lower_right(10, 20)}, "causal_lower_right is made for 10 queries"),
    "a smaller bias": (lambda: {"score": scores.bias(torch.zeros(4, 10, 10))}, "bias is made for 10 queries"),
    "a bias of more heads": (lambda: {"score": scores.bias(torch.zeros(8, 300, 300))}, "bias is made for 8 heads, the call has 4"),
    "slopes of more heads": (lambda: {"score": scores.alibi(8)}, "alibi is made for 8 heads, the call has 4"),
    "a table of fewer heads": (lambda: {"score": scores.relative_bias(torch.zeros(3, 11))}, "relative_bias is made for 3 heads"),
    "one of several scores": (lambda: {"score": [scores.softcap(2.0), scores.distance_decay(torch.zeros(3))]}, "distance_decay is made for 3 heads"),
}
RIGHT: dict[str, Callable[[], dict[str, Any]]] = {
    "documents": lambda: {"mask": masks.document(lengths=[100, 200]) & masks.causal},
    "ids of more tokens": lambda: {"mask": masks.document(torch.zeros(512, dtype=torch.int64))},
    "a broadcast bias": lambda: {"score": scores.bias(torch.zeros(1, 4, 1, 300))},
    "a bias of more tokens": lambda: {"score": scores.bias(torch.zeros(4, 512, 512))},
    "slopes": lambda: {"score": scores.alibi(4)},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    arguments, words = WRONG[name]
    with pytest.raises(tw.InputError, match=words):
        tw.attention(Q, Q, Q, backend="reference", **arguments())


@pytest.mark.parametrize("name", RIGHT)
def test_what_fits_is_taken(name: str) -> None:
    tw.attention(Q, Q, Q, backend="reference", **RIGHT[name]())


def test_packed_sequences_have_places_of_their_own() -> None:
    """A mask of 60 tokens is right for sequences of up to 60 tokens, however many there are."""
    tokens, offsets = torch.zeros(150, 4, 16), torch.tensor([0, 50, 110, 150], dtype=torch.int32)
    tw.varlen_attention(tokens, tokens, tokens, offsets, offsets, mask=masks.document(lengths=[30, 30]), score=scores.alibi(4))


def test_lists_where_tensors_are_wanted() -> None:
    with pytest.raises(tw.InputError, match="alibi takes a number of heads or a float"):
        scores.alibi([0.5, 0.25])
    with pytest.raises(tw.InputError, match="sinks takes one logit per query head"):
        scores.sinks([0.0, 0.0])
    tokens = torch.zeros(10, 2, 8)
    with pytest.raises(tw.InputError, match="cu_seqlens_q must be a tensor, got list"):
        tw.varlen_attention(tokens, tokens, tokens, [0, 10])


def test_nested_tensors_in_the_other_layout() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(10, 4, 8), torch.zeros(5, 4, 8)], layout=torch.jagged)
    with pytest.raises(tw.InputError, match="varies in length along dimension 1, where layout 'bhsd' has heads; pass layout='bshd'"):
        tw.attention(nested, nested, nested)
    assert tw.attention(nested, nested, nested, layout="bshd").shape[2:] == (4, 8)
