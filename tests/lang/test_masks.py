"""Every mask of the library against its docstring, written again as plain Python on single numbers."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.programs import grid
from tilewise import masks
from tilewise.errors import InputError, TraceError
from tilewise.lang import evaluate, trace_mask
from tilewise.masks import Mask

B, H = 2, 2


def assert_means(mask: Mask, meaning: Callable[[int, int, int, int], bool], queries: int = 12, keys: int = 12) -> None:
    found = torch.as_tensor(evaluate(mask.traced(), grid(B, H, queries, keys))).expand(B, H, queries, keys)
    expected = torch.tensor([bool(meaning(*at)) for at in product(range(B), range(H), range(queries), range(keys))])
    assert torch.equal(found, expected.view(B, H, queries, keys))


def test_full_and_causal() -> None:
    assert_means(masks.full, lambda b, h, q, kv: True)
    assert_means(masks.causal, lambda b, h, q, kv: kv <= q, 7, 12)
    assert_means(masks.causal, lambda b, h, q, kv: kv <= q, 12, 7)


@pytest.mark.parametrize(("queries", "keys"), [(5, 12), (12, 5), (6, 6), (1, 9)])
def test_causal_lower_right_aligns_the_last_query_with_the_last_key(queries: int, keys: int) -> None:
    assert_means(masks.causal_lower_right(queries, keys), lambda b, h, q, kv: keys - 1 - kv >= queries - 1 - q, queries, keys)


@pytest.mark.parametrize(("left", "right"), [(0, None), (3, None), (4, 0), (0, 2), (2, 5), (100, 100)])
def test_sliding_window_reaches_left_and_right(left: int, right: int | None) -> None:
    after = left if right is None else right
    assert_means(masks.sliding_window(left, right), lambda b, h, q, kv: kv in range(q - left, q + after + 1))


@pytest.mark.parametrize(("reach", "dilation"), [(6, 2), (7, 3), (0, 1), (5, 1)])
def test_dilated_window_takes_every_nth_key(reach: int, dilation: int) -> None:
    assert_means(masks.dilated_window(reach, dilation), lambda b, h, q, kv: abs(q - kv) in range(0, reach + 1, dilation))


def test_prefix_lm_shows_the_prefix_to_everyone() -> None:
    assert_means(masks.prefix_lm(4), lambda b, h, q, kv: kv < 4 or kv <= q)
    lengths = [2, 7]
    assert_means(masks.prefix_lm(torch.tensor(lengths)), lambda b, h, q, kv: kv < lengths[b] or kv <= q)


def test_document_keeps_documents_apart() -> None:
    ids, by_batch, keys = [0] * 3 + [5] * 4 + [1] * 5, [[0] * 6 + [1] * 6, [2] * 12], [0, 0, 5, 5, 1, 1, 1]
    assert_means(masks.document(torch.tensor(ids)), lambda b, h, q, kv: ids[q] == ids[kv])
    assert_means(masks.document(torch.tensor(by_batch, dtype=torch.int32)), lambda b, h, q, kv: by_batch[b][q] == by_batch[b][kv])
    assert_means(masks.document(torch.tensor(ids), torch.tensor(keys)), lambda b, h, q, kv: ids[q] == keys[kv], 12, 7)
    assert_means(masks.document(lengths=[3, 4, 0, 5]), lambda b, h, q, kv: ids[q] == ids[kv])
    assert_means(masks.document(lengths=torch.tensor([3, 4, 5])), lambda b, h, q, kv: ids[q] == ids[kv])


def test_padding_hides_keys_past_the_length() -> None:
    lengths = [0, 9]
    assert_means(masks.padding(torch.tensor(lengths)), lambda b, h, q, kv: kv < lengths[b])


def test_global_tokens_see_and_are_seen() -> None:
    marked = [k % 5 == 2 for k in range(12)]
    assert_means(masks.global_tokens(3), lambda b, h, q, kv: q < 3 or kv < 3)
    assert_means(masks.global_tokens(torch.tensor(marked)), lambda b, h, q, kv: marked[q] or marked[kv])


def test_shared_prefix_is_causal_and_sees_the_whole_prompt() -> None:
    lengths, prefix_of = [3, 2, 4, 1, 2], [0, 0, 0, 3, 3]
    document = [d for d, n in enumerate(lengths) for _ in range(n)]

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        own = document[q] == document[kv] and kv <= q
        return own or (prefix_of[document[q]] != document[q] and document[kv] == prefix_of[document[q]])

    assert_means(masks.shared_prefix(lengths, prefix_of), meaning)
    assert_means(masks.shared_prefix(torch.tensor(lengths), torch.tensor(prefix_of)), meaning)


@pytest.mark.parametrize(("length", "block"), [(6, 2), (6, 4), (5, 5)])
def test_block_diffusion_sees_its_noised_block_and_the_clean_past(length: int, block: int) -> None:
    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        q_block, kv_block = q % length // block, kv % length // block
        if q < length:  # a noised token
            return q_block == kv_block if kv < length else kv_block < q_block
        return kv >= length and kv_block <= q_block

    assert_means(masks.block_diffusion(length, block), meaning, 2 * length, 2 * length)


@pytest.mark.parametrize("prefix", [0, 3])
def test_tree_nodes_see_their_ancestors(prefix: int) -> None:
    parents = [-1, 0, 0, 1, -1, 4, 3]

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        node = q
        while node >= 0:
            if kv - prefix == node:
                return True
            node = parents[node]
        return kv < prefix

    assert_means(masks.tree(parents, prefix), meaning, len(parents), prefix + len(parents))


def nearest(at: int, size: int, window: int) -> range:
    """The `window` positions around `at`, moved inwards at a border."""
    start = min(max(at - window // 2, 0), size - window)
    return range(start, start + window)


@pytest.mark.parametrize(
    ("shape", "window"), [(12, 5), (12, 4), ((3, 4), (3, 3)), ((4, 6), (1, 5)), ((5, 4), 3), ((2, 3, 4), (1, 3, 2)), ((3, 3, 3), 3)], ids=str
)
def test_neighborhood_is_the_nearest_along_every_axis(shape: Any, window: Any) -> None:
    sizes = (shape,) if isinstance(shape, int) else shape
    windows = (window,) * len(sizes) if isinstance(window, int) else window
    places = list(product(*(range(n) for n in sizes)))

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        return all(j in nearest(i, n, w) for i, j, n, w in zip(places[q], places[kv], sizes, windows, strict=True))

    mask = masks.neighborhood(shape, window)
    assert_means(mask, meaning, len(places), len(places))
    neighbours = torch.as_tensor(evaluate(mask.traced(), grid(1, 1, len(places), len(places)))).sum(-1)
    assert neighbours.unique().tolist() == [torch.tensor(windows).prod().item()]


def seen(at: int, size: int, window: int, stride: int, dilation: int, is_causal: bool) -> list[int]:
    """NATTEN's window, on the line of tokens that dilation leaves: as many queries as the stride has share a leader's, in the middle or, causal, the last."""
    line = list(range(at % dilation, size, dilation))
    place = line.index(at)
    group = line[place // stride * stride :][:stride]
    if is_causal:
        end = line.index(group[-1]) + 1
        return line[max(end - window, 0) : place + 1]
    leader = min(place // stride * stride + stride // 2, len(line) - 1)
    return [line[k] for k in nearest(leader, len(line), window)]


@pytest.mark.parametrize(
    ("shape", "window", "stride", "dilation", "is_causal"),
    [
        (13, 4, 1, 3, False),
        (13, 3, 1, 4, True),
        (12, 5, 1, 1, True),
        (13, 4, 3, 1, False),
        (13, 4, 2, 1, True),
        (17, 5, 2, 3, False),
        (17, 4, 3, 4, True),
        ((5, 7), (5, 3), 1, (1, 2), False),
        ((5, 8), 3, (2, 3), 1, (True, False)),
        ((3, 4, 6), (2, 2, 3), (1, 2, 1), (1, 1, 2), (True, False, False)),
    ],
    ids=str,
)
def test_neighborhood_with_stride_dilation_and_causal_axes(shape: Any, window: Any, stride: Any, dilation: Any, is_causal: Any) -> None:
    sizes = (shape,) if isinstance(shape, int) else shape
    each = [value if isinstance(value, tuple) else (value,) * len(sizes) for value in (window, stride, dilation, is_causal)]
    places = list(product(*(range(n) for n in sizes)))

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        return all(j in seen(i, *axis) for i, j, *axis in zip(places[q], places[kv], sizes, *each, strict=True))

    mask = masks.neighborhood(shape, window, stride=stride, dilation=dilation, is_causal=is_causal)
    assert_means(mask, meaning, len(places), len(places))


def test_what_a_neighborhood_cannot_be() -> None:
    with pytest.raises(InputError, match="a stride is from 1 to the window"):
        masks.neighborhood(12, 3, stride=4)
    with pytest.raises(InputError, match="window \\* dilation at most the size, got 1, 5 for 3 of 12"):
        masks.neighborhood(12, 3, dilation=5)
    with pytest.raises(InputError, match="dilation is one number, or one for each of 2 axes"):
        masks.neighborhood((4, 6), 3, dilation=(1, 2, 1))
    with pytest.raises(InputError, match="is_causal is True or False"):
        masks.neighborhood((4, 6), 3, is_causal=(True,))


def test_radial_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device='cuda', but torch finds no GPU here"):
        masks.radial(4, 16, device="cuda")


def test_radial_is_the_formula_of_the_paper() -> None:
    frames, s = 20, 6

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        (i, k), (j, m) = divmod(q, s), divmod(kv, s)
        halved = 2 ** math.floor(math.log2(max(abs(i - j), 1)))
        near = halved <= s and abs(k - m) + 1 <= s / halved
        return j == 0 or near or (abs(i - j) % math.ceil(halved / s) == 0 and k == m)

    assert_means(masks.radial(frames, s, least=1), meaning, frames * s, frames * s)


@pytest.mark.parametrize(("decay", "least", "text"), [(1.0, 4, 0), (0.5, 4, 3), (0.3, 20, 2), (2.0, 1, 0)])
def test_radial_with_a_decay_and_a_least_reach(decay: float, least: int, text: int) -> None:
    frames, size = 9, 13

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        if max(q, kv) >= frames * size:
            return True
        apart, places = abs(q // size - kv // size), abs(q % size - kv % size)
        reach = size * decay
        for _ in range(1, max(apart, 1).bit_length()):
            reach /= 2
        if apart == 0 or kv < size:
            return True
        return places + 1 <= reach if reach >= least else places < least and apart % math.ceil(least / reach) == 0

    assert_means(masks.radial(frames, size, decay=decay, least=least, text=text), meaning, frames * size + text, frames * size + text)


@pytest.mark.parametrize(("frame_reach", "token_reach", "text"), [(0, 0, 0), (1, 2, 3)])
def test_some_heads_look_around_and_some_through_time(frame_reach: int, token_reach: int, text: int) -> None:
    frames, size, temporal = 4, 5, torch.tensor([True, False])

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        if max(q, kv) >= frames * size:
            return True
        return abs(q % size - kv % size) <= token_reach if temporal[h] else abs(q // size - kv // size) <= frame_reach

    mask = masks.spatial_temporal(frames, size, temporal, frame_reach=frame_reach, token_reach=token_reach, text=text)
    assert_means(mask, meaning, frames * size + text, frames * size + text)


@pytest.mark.parametrize("text", [0, 3])
@pytest.mark.parametrize(("shape", "window", "tile"), [((4, 6), (4, 6), (2, 2)), ((4, 8), (2, 6), (2, 2)), ((2, 4, 6), (2, 2, 6), (1, 2, 2))], ids=str)
def test_sliding_tile_is_the_neighborhood_of_tiles(shape: tuple[int, ...], window: tuple[int, ...], tile: tuple[int, ...], text: int) -> None:
    counts = [s // t for s, t in zip(shape, tile, strict=True)]
    reaches = [w // t for w, t in zip(window, tile, strict=True)]
    # Tokens are stored tile after tile: each token's tile, in that order.
    tile_of = [at for at in product(*(range(n) for n in counts)) for _ in product(*(range(t) for t in tile))]

    def meaning(b: int, h: int, q: int, kv: int) -> bool:
        if max(q, kv) >= len(tile_of):
            return True
        return all(j in nearest(i, n, w) for i, j, n, w in zip(tile_of[q], tile_of[kv], counts, reaches, strict=True))

    assert_means(masks.sliding_tile(shape, window, tile, text), meaning, len(tile_of) + text, len(tile_of) + text)


def test_cross_shows_each_image_to_its_span_of_queries() -> None:
    spans = [[0, 4], [3, 12], [5, 5]]
    assert_means(masks.cross(torch.tensor(spans), 4), lambda b, h, q, kv: spans[kv // 4][0] <= q < spans[kv // 4][1])


def test_per_batch_chooses_by_batch_element() -> None:
    choices = [masks.causal, masks.full, lambda b, h, q, kv: kv < 2]
    meanings = [lambda q, kv: kv <= q, lambda q, kv: True, lambda q, kv: kv < 2]
    for which in ([0, 2], [1, 0], [2, 1]):
        assert_means(masks.per_batch(choices, torch.tensor(which)), lambda b, h, q, kv, which=which: meanings[which[b]](q, kv))


# -- combining -------------------------------------------------------------------------------------------------------


def first_five(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return kv < 5


def test_masks_combine_with_each_other_and_with_functions() -> None:
    window = masks.sliding_window(3)
    assert_means(masks.causal & window, lambda b, h, q, kv: 0 <= q - kv <= 3)
    assert_means(masks.causal | window, lambda b, h, q, kv: kv - q <= 3)
    assert_means(~masks.causal, lambda b, h, q, kv: kv > q)
    assert_means(~(masks.causal & window), lambda b, h, q, kv: not 0 <= q - kv <= 3)
    assert_means(masks.causal & first_five, lambda b, h, q, kv: kv <= q and kv < 5)
    assert_means(first_five & masks.causal, lambda b, h, q, kv: kv <= q and kv < 5)
    assert_means(first_five | masks.causal, lambda b, h, q, kv: kv <= q or kv < 5)
    assert_means(masks.causal | first_five, lambda b, h, q, kv: kv <= q or kv < 5)


def test_full_combines_as_a_constant() -> None:
    assert_means(~masks.full, lambda b, h, q, kv: False)
    assert_means(masks.full & masks.full, lambda b, h, q, kv: True)
    assert_means(masks.full & masks.causal, lambda b, h, q, kv: kv <= q)
    assert_means(masks.causal | ~masks.full, lambda b, h, q, kv: kv <= q)


def test_names_carry_parameters_and_parentheses() -> None:
    causal, window, start = masks.causal, masks.sliding_window(1024), masks.prefix_lm(16)
    assert (causal & window).name == "causal & sliding_window(1024)"
    assert (causal & window & start).name == "causal & sliding_window(1024) & prefix_lm(16)"
    assert (causal & window | start).name == "(causal & sliding_window(1024)) | prefix_lm(16)"
    assert (causal & (window | start)).name == "causal & (sliding_window(1024) | prefix_lm(16))"
    assert (~causal).name == "~causal"
    assert (~(causal | start)).name == "~(causal | prefix_lm(16))"
    assert (~causal & start).name == "~causal & prefix_lm(16)"
    assert (causal & first_five).name == "causal & first_five"
    assert masks.sliding_window(4, 0).name == "sliding_window(4, 0)"
    assert masks.neighborhood((8, 16), (3, 5)).name == "neighborhood(8x16, 3x5)"
    assert (
        masks.neighborhood((8, 16), 3, stride=(1, 2), dilation=2, is_causal=True).name
        == "neighborhood(8x16, 3x3, stride 1x2, dilation 2x2, causal along axis 0, causal along axis 1)"
    )
    assert masks.neighborhood((8, 16), 3, is_causal=(True, False)).name == "neighborhood(8x16, 3x3, causal along axis 0)"
    assert repr(causal & window) == "Mask(causal & sliding_window(1024))"


@pytest.mark.parametrize("combine", [lambda x, y: x and y, lambda x, y: x or y, lambda x, y: not x], ids=["and", "or", "not"])
def test_and_or_not_raise_and_teach_the_operators(combine: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"causal .*with & \| ~, not with and, or, not"):
        combine(masks.causal, masks.full)


def test_a_mask_is_traced_once() -> None:
    window = masks.sliding_window(3)
    assert window.traced() is window.traced()


def test_as_mask_keeps_masks_and_names_functions() -> None:
    assert masks.as_mask(masks.causal) is masks.causal
    assert masks.as_mask(first_five).name == "first_five"


IDS = torch.arange(4)
BAD: dict[str, Callable[[], Any]] = {
    "not a function": lambda: masks.causal & 3,
    "negative window": lambda: masks.sliding_window(-1),
    "negative right window": lambda: masks.sliding_window(3, -1),
    "negative reach": lambda: masks.dilated_window(-1, 1),
    "no dilation": lambda: masks.dilated_window(4, 0),
    "float prefix": lambda: masks.prefix_lm(torch.tensor([1.0])),
    "2-d prefix": lambda: masks.prefix_lm(torch.ones(2, 2, dtype=torch.long)),
    "no document": masks.document,
    "ids and lengths": lambda: masks.document(IDS, lengths=[4]),
    "ids as a list": lambda: masks.document([0, 1]),
    "float ids": lambda: masks.document(IDS.float()),
    "boolean ids": lambda: masks.document(IDS.bool()),
    "ids of other ranks": lambda: masks.document(IDS, IDS[None]),
    "negative lengths": lambda: masks.document(lengths=[3, -1]),
    "float lengths": lambda: masks.document(lengths=[3.5, 1.0]),
    "2-d lengths": lambda: masks.document(lengths=torch.ones(2, 2, dtype=torch.long)),
    "float padding": lambda: masks.padding(torch.tensor([3.0])),
    "integer marks": lambda: masks.global_tokens(IDS),
    "2-d marks": lambda: masks.global_tokens(torch.ones(2, 2, dtype=torch.bool)),
    "missing prefix": lambda: masks.shared_prefix([3, 4], [0]),
    "unknown prefix": lambda: masks.shared_prefix([3, 4], [0, 2]),
    "no block": lambda: masks.block_diffusion(8, 0),
    "no length": lambda: masks.block_diffusion(0, 2),
    "parent after child": lambda: masks.tree([-1, 1]),
    "parent below the root": lambda: masks.tree([-2]),
    "negative tree prefix": lambda: masks.tree([-1], -1),
    "even larger window": lambda: masks.neighborhood((4, 4), 5),
    "four axes": lambda: masks.neighborhood((2, 2, 2, 2), 1),
    "windows of other ranks": lambda: masks.neighborhood((4, 4), (3, 3, 3)),
    "no window": lambda: masks.neighborhood(4, 0),
    "tile does not divide": lambda: masks.sliding_tile((4, 4), (4, 4), (3, 2)),
    "tiles of other ranks": lambda: masks.sliding_tile((4, 4), (4, 4), (2,)),
    "no tile": lambda: masks.sliding_tile((4, 4), (4, 4), (0, 2)),
    "no frames": lambda: masks.radial(0, 4),
    "no decay": lambda: masks.radial(3, 4, decay=0.0),
    "no reach": lambda: masks.radial(3, 4, least=0),
    "integer heads": lambda: masks.spatial_temporal(3, 4, torch.tensor([0, 1])),
    "negative token reach": lambda: masks.spatial_temporal(3, 4, torch.tensor([True]), token_reach=-1),
    "spans of three": lambda: masks.cross(torch.ones(2, 3, dtype=torch.long), 4),
    "no tokens per image": lambda: masks.cross(torch.ones(2, 2, dtype=torch.long), 0),
    "no choices": lambda: masks.per_batch([], IDS),
    "an unknown choice": lambda: masks.per_batch([masks.causal, masks.full], torch.tensor([0, 2])),
    "a negative choice": lambda: masks.per_batch([masks.causal, masks.full], torch.tensor([-1])),
    "negative prefix": lambda: masks.prefix_lm(-3),
    "negative marks": lambda: masks.global_tokens(-1),
    "float choice": lambda: masks.per_batch([masks.causal], torch.tensor([0.0])),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_input_errors(name: str) -> None:
    with pytest.raises(InputError):
        BAD[name]()


COUNTS: dict[str, Callable[[Any], Any]] = {
    "causal_lower_right": lambda n: masks.causal_lower_right(1, n),
    "sliding_window": masks.sliding_window,
    "sliding_window, right": lambda n: masks.sliding_window(8, n),
    "dilated_window": lambda n: masks.dilated_window(8, n),
    "prefix_lm": masks.prefix_lm,
    "global_tokens": masks.global_tokens,
    "block_diffusion": lambda n: masks.block_diffusion(8, n),
    "tree": lambda n: masks.tree([-1, 0], n),
    "tree, parents": lambda n: masks.tree([-1, 0, 1, 2, 3, 4, n]),
    "neighborhood": lambda n: masks.neighborhood(n, 2),
    "neighborhood, window": lambda n: masks.neighborhood((8, 8), n),
    "neighborhood, one window": lambda n: masks.neighborhood((8, 8), (2, n)),
    "neighborhood, dilation": lambda n: masks.neighborhood(16, 2, dilation=n),
    "on_grid": lambda n: masks.on_grid(masks.causal, (8, n), 2),
    "sliding_tile": lambda n: masks.sliding_tile((5, 5), (5, 5), (5, n)),
    "sliding_tile, text": lambda n: masks.sliding_tile((4, 4), (4, 4), (2, 2), n),
    "radial": lambda n: masks.radial(3, n),
    "radial, least": lambda n: masks.radial(3, 8, least=n),
    "spatial_temporal": lambda n: masks.spatial_temporal(3, 8, torch.tensor([True]), token_reach=n),
    "cross": lambda n: masks.cross(torch.ones(2, 2, dtype=torch.long), n),
}


@pytest.mark.parametrize("wrong", [5.5, 5.0, "5", True, None, torch.tensor(5.0), np.float32(5), np.bool_(True)], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_tokens_are_whole(name: str, wrong: Any) -> None:
    if wrong is None and name == "sliding_window, right":
        return
    expected = "whole number|takes an integer tensor|takes a number or a boolean" if isinstance(wrong, Tensor) else "whole number"
    with pytest.raises(InputError, match=expected):
        COUNTS[name](wrong)


@pytest.mark.parametrize("right", [np.int64(5), np.int32(5), np.uint8(5)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_tokens_may_be_numpys(name: str, right: Any) -> None:
    mask, same = COUNTS[name](right), COUNTS[name](5)
    assert mask.name == same.name
    assert mask.traced().program.text == same.traced().program.text


def test_a_list_in_a_tensors_place_is_told_what_to_do() -> None:
    with pytest.raises(InputError, match=r"per_batch takes an integer tensor with 1 dimension\(s\), got list; torch.tensor makes one of a list"):
        masks.per_batch([masks.causal, masks.full], [0, 1])  # type: ignore[arg-type]  # on purpose


def test_the_number_of_tokens_is_named() -> None:
    with pytest.raises(InputError, match=r"^sliding_window takes whole numbers, got left='5' \(str\); give an int$"):
        masks.sliding_window("5")


def test_choices_are_not_looked_at_where_that_would_wait_or_tell_nothing() -> None:
    masks.per_batch([masks.causal], torch.tensor([3], device="meta"))
    with FakeTensorMode():
        masks.per_batch([masks.causal], torch.tensor([3]))


def test_a_function_that_makes_masks_is_not_one() -> None:
    with pytest.raises(TraceError, match=r"takes 2 parameters: .* It makes one: call it, and pass what it returns"):
        trace_mask(masks.sliding_window)
