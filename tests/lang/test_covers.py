"""Masks and scores of the library are made for so many tokens, heads and batch elements: a call that has more or fewer is told so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise import masks, scores

Q = torch.zeros(2, 4, 300, 16)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def shrunk(make: Callable[[torch.Tensor], masks.Mask]) -> masks.Mask:
    ids = zeros(300)
    mask = make(ids)
    ids.data = ids.data[:200]
    return mask


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "documents that end before the tokens": (lambda: {"mask": masks.document(lengths=[100, 100])}, "document is made for 200 queries, the call has 300"),
    "ids of fewer tokens": (lambda: {"mask": masks.document(torch.zeros(299, dtype=torch.int64))}, "document is made for 299 queries"),
    "ids of another batch": (lambda: {"mask": masks.document(torch.zeros((1, 300), dtype=torch.int64))}, "document is made for 1 batch elements"),
    "padding of another batch": (lambda: {"mask": masks.padding(torch.tensor([3]))}, "padding is made for 1 batch elements, the call has 2"),
    "within another mask": (lambda: {"mask": masks.causal & ~masks.padding(torch.tensor([3]))}, "padding is made for 1 batch"),
    "ids of more tokens": (lambda: {"mask": masks.document(zeros(512))}, "document is made for 512 queries, the call has 300"),
    "ids of more keys": (lambda: {"mask": masks.document(zeros(300), zeros(301))}, "document is made for 301 keys"),
    "ids of a larger batch": (lambda: {"mask": masks.document(zeros(3, 300))}, "document is made for 3 batch elements, the call has 2"),
    "key ids of a larger batch": (lambda: {"mask": masks.document(zeros(2, 300), zeros(3, 300))}, "ids of shape .2, 300. and kv_ids of shape .3, 300."),
    "documents that end after the tokens": (lambda: {"mask": masks.document(lengths=[100, 100, 101])}, "document is made for 301 queries"),
    "padding of a larger batch": (lambda: {"mask": masks.padding(torch.tensor([3, 4, 5]))}, "padding is made for 3 batch elements, the call has 2"),
    "prefixes of a larger batch": (lambda: {"mask": masks.prefix_lm(torch.tensor([3, 4, 5]))}, "prefix_lm is made for 3 batch elements"),
    "choices of a larger batch": (lambda: {"mask": masks.per_batch([masks.full], zeros(3))}, "per_batch is made for 3 batch elements"),
    "marks of more tokens": (lambda: {"mask": masks.global_tokens(zeros(301).bool())}, "global_tokens is made for 301 queries"),
    "prompts of more tokens": (lambda: {"mask": masks.shared_prefix([100, 201], [0, 0])}, "shared_prefix is made for 301 queries"),
    "prompts of fewer tokens": (lambda: {"mask": masks.shared_prefix([100, 199], [0, 0])}, "shared_prefix is made for 299 queries"),
    "a longer diffusion": (lambda: {"mask": masks.block_diffusion(151, 10)}, "block_diffusion is made for 302 queries"),
    "a larger tree": (lambda: {"mask": masks.tree([-1] * 300, 1)}, "tree is made for 301 keys"),
    "a larger grid": (lambda: {"mask": masks.neighborhood((20, 20), 3)}, "neighborhood is made for 400 queries, the call has 300"),
    "tiles of a larger grid": (lambda: {"mask": masks.sliding_tile((20, 20), (4, 4), (4, 4))}, "sliding_tile is made for 400 queries"),
    "text after the grid": (lambda: {"mask": masks.sliding_tile((10, 30), (2, 3), (2, 3), text=5)}, "sliding_tile is made for 305 queries"),
    "more images": (lambda: {"mask": masks.cross(zeros(4, 2), 100)}, "cross is made for 400 keys, the call has 300"),
    "larger lengths": (lambda: {"mask": masks.causal_lower_right(300, 301)}, "causal_lower_right is made for 301 keys"),
    "a bias of more tokens": (lambda: {"score": scores.bias(torch.zeros(4, 512, 512))}, "bias is made for 512 queries"),
    "a bias of a larger batch": (lambda: {"score": scores.bias(torch.zeros(3, 1, 1, 1))}, "bias is made for 3 batch elements"),
    "rates of more heads": (lambda: {"score": scores.distance_decay(torch.zeros(5))}, "distance_decay is made for 5 heads"),
    "a t5 table of more heads": (lambda: {"score": scores.relative_bias(torch.zeros(32, 5), buckets="t5")}, "relative_bias is made for 5 heads"),
    "a tensor that shrank": (lambda: {"mask": shrunk(masks.document)}, "was made of a tensor of shape .300,., which has shape .200,. now"),
    "a part that shrank": (lambda: {"mask": masks.causal & shrunk(masks.document)}, "was made of a tensor of shape .300,., which has shape .200,. now"),
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
    "ids of each batch element": lambda: {"mask": masks.document(zeros(2, 300))},
    "a grid": lambda: {"mask": masks.neighborhood((15, 20), 3)},
    "lengths of each batch element": lambda: {"mask": masks.padding(torch.tensor([3, 4]))},
    "a broadcast bias": lambda: {"score": scores.bias(torch.zeros(1, 4, 1, 300))},
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


PACKED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a mask of fewer tokens than the longest": (lambda: {"mask": masks.document(lengths=[30, 29])}, "made for sequences of up to 59 queries, .* has 60"),
    "lengths of more sequences": (lambda: {"mask": masks.padding(zeros(4))}, "padding is made for 4 batch elements, the call has 3"),
    "slopes of more heads": (lambda: {"score": scores.alibi(8)}, "alibi is made for 8 heads, the call has 4"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_as_many_as_the_mask_is_made_for(name: str) -> None:
    tokens, offsets = torch.zeros(150, 4, 16), torch.tensor([0, 50, 110, 150], dtype=torch.int32)
    arguments, words = PACKED[name]
    with pytest.raises(tw.InputError, match=words):
        tw.varlen_attention(tokens, tokens, tokens, offsets, offsets, **arguments())


def test_tile_maps_are_as_large_as_the_mask_is_made_for() -> None:
    with pytest.raises(tw.InputError, match="neighborhood is made for 81 queries, the call has 64"):
        tw.tile_map(masks.neighborhood((9, 9), 3), q_len=64, kv_len=64)
    with pytest.raises(tw.InputError, match="padding is made for 3 batch elements, the call has 2"):
        tw.flex.create_block_mask(masks.padding(zeros(3)), 2, None, 64, 64, device="cpu")
    tw.tile_map(masks.neighborhood((8, 8), 3), q_len=64, kv_len=64)


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
