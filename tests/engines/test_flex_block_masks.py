"""tilewise.flex's block masks against torch's own: their attributes and drawings, blocks given or changed by the caller, slices, adjusted lengths."""

from copy import copy
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor

import tilewise as tw
from tests.support.flex_problems import LISTS, MASKS, SCORES, B, D, H, allowed_by, assert_close, chosen_blocks, dense, gradients, places, tensors
from tilewise import flex as ours
from tilewise import masks, scores

pytestmark = pytest.mark.usefixtures("torchs_flex_runs_eagerly", "seeded", "one_thread")

# -- made from a mask --------------------------------------------------------------------------------------------------

# Older torchs leave a slice the lengths of the whole mask, and count a block's elements past the end as computed ones, so that sparsity may be below 0.
TORCH_COUNTS_BLOCKS = torch.__version__ >= (2, 14)


def assert_same_attributes(found: ours.BlockMask, expected: theirs.BlockMask, q_len: int | None = None) -> None:
    """q_len: the queries of a slice."""
    for name in LISTS:
        mine, torchs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (torchs is None), name
        if torchs is not None:
            assert mine.shape == torchs.shape and mine.dtype == torchs.dtype == torch.int32
            assert torch.equal(mine, torchs), name
            assert mine.is_contiguous()
    assert torch.equal(found.to_dense(), expected.to_dense())
    lengths = (expected.seq_lengths[0] if q_len is None else q_len, expected.seq_lengths[1])
    shape = (*expected.shape[:2], *lengths)
    assert (found.shape, found.seq_lengths, found.BLOCK_SIZE) == (shape, lengths, expected.BLOCK_SIZE)
    assert found.numel() == torch.Size(shape).numel()
    assert found.sparsity() == pytest.approx(100 * (1 - expected.to_dense().double().mean().item()))
    if TORCH_COUNTS_BLOCKS:
        assert (found.shape, found.seq_lengths, found.numel()) == (expected.shape, expected.seq_lengths, expected.numel())
        assert found.sparsity() == pytest.approx(expected.sparsity())


@pytest.mark.parametrize("separate", [True, False], ids=["full apart", "full among partial"])
@pytest.mark.parametrize("block", [128, 64, (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attributes_are_torchs(name: str, block: Any, separate: bool) -> None:
    mask = MASKS[name](256)
    for batch, heads in ((B, None), (None, H)):
        torchs, own = (m.create_block_mask(mask, batch, heads, 256, 384, device="cpu", BLOCK_SIZE=block, separate_full_blocks=separate) for m in (theirs, ours))
        assert repr(own) == repr(torchs)
        assert_same_attributes(own, torchs)
        for flatten in (True, False):
            mine, other = own.as_tuple(flatten), torchs.as_tuple(flatten)
            assert [type(x) for x in mine] == [type(x) for x in other] and mine[-1] is other[-1] is mask


@pytest.mark.parametrize("name", ["causal", "padding", "window", "nothing"])
def test_drawings_are_torchs(name: str) -> None:
    torchs, own = (m.create_block_mask(MASKS[name](300), B, H, 300, 700, device="cpu", BLOCK_SIZE=16) for m in (theirs, ours))
    shown = str(torchs) if TORCH_COUNTS_BLOCKS else str(torchs).replace(f"sparsity={torchs.sparsity():.2f}%", f"sparsity={own.sparsity():.2f}%")
    assert str(own) == shown
    for options in ({"grid_size": (2, 3), "limit": 1}, {"grid_size": 7}, {"grid_size": -1, "limit": 2}):
        assert own.to_string(**options) == torchs.to_string(**options)


@pytest.mark.parametrize("block", [64, (128, 32), 512], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_block_over_the_end_is_partial(name: str, block: Any) -> None:
    torchs, own = (m.create_block_mask(MASKS[name](200), B, H, 200, 300, device="cpu", BLOCK_SIZE=block) for m in (theirs, ours))
    assert_same_attributes(own, torchs)
    rows = (slice(None), slice(1, 2), torch.tensor([torchs.kv_indices.shape[2] - 1, 0]))
    assert_same_attributes(own[rows], torchs[rows], 2 * own.BLOCK_SIZE[0])


def test_a_million_tokens_take_no_lists() -> None:
    n = 1 << 20
    own = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")
    assert own.sparsity() == pytest.approx(49.99, abs=0.01)
    assert own.shape == (1, 1, n, n) and len(str(own).splitlines()) == 23 and f"kv_indices=torch.Size([1, 1, {n // 128}, {n // 128}])" in repr(own)
    assert own.kv_num_blocks.shape == (1, 1, n // 128)
    assert list(own._lists) == ["kv_num_blocks"]
    runs = (own.tile_map().partial, own.tile_map().full)
    assert sum(t.numel() for r in runs for t in (r.offsets, r.start, r.count)) < 10 * n // 128


def test_attention_reads_no_lists() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(300))
    own = ours.create_block_mask(MASKS["padding"](300), B, None, 300, 300, device="cpu")
    ours.flex_attention(q, k, v, None, own).sum().backward()
    tw.attention(q, k, v, mask=own).sum().backward()
    assert not own._lists


def test_create_mask_takes_either_kind_of_function() -> None:
    for function in (MASKS["padding"](50), SCORES["causal"](50), SCORES["times two"](50), lambda s, b, h, q, kv, extra=1: s / 0 + h):
        found, expected = (m.create_mask(function, B, H, 50, 60, device="cpu") for m in (ours, theirs))
        assert found.dtype == torch.bool and torch.equal(found, expected)
    assert ours.create_mask(MASKS["causal"](9), None, None, 9, 7, "cpu").shape == (1, 1, 9, 7)


# -- lists given or changed by the caller ------------------------------------------------------------------------------


def within(counts: Tensor, indices: Tensor, block: int, q_len: int, kv_len: int) -> Tensor:
    rows = indices.shape[-2]
    states = torch.zeros(B, H, rows, -(-kv_len // block), dtype=torch.bool)
    for place in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(rows)).tolist():
        listed = indices[tuple(place)][: counts[tuple(place)]].long()
        states[(*place, listed[listed < states.shape[-1]])] = True
    return states.repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :q_len, :kv_len]


@pytest.mark.parametrize("mask", [None, MASKS["causal"](0)], ids=["bare", "causal"])
@pytest.mark.parametrize("lengths", [(256, 384), (230, 321)], ids=str)
def test_blocks_chosen_by_data(mask: Any, lengths: tuple[int, int]) -> None:
    counts, indices = chosen_blocks(4, 6, 2)
    full = indices.roll(-2, -1)  # other blocks than those listed as partial
    allowed = within(counts, indices, 64, *lengths)
    if mask is not None:
        allowed &= allowed_by(mask, *lengths)
    allowed |= within(counts // 2, full, 64, *lengths)
    inputs = list(tensors(lengths[0], kv_len=lengths[1]))
    expected = gradients(lambda q, k, v: dense(q, k, v, None, allowed)[:2], inputs)
    for module in (ours, theirs):
        block_mask = module.BlockMask.from_kv_blocks(counts, indices, counts // 2, full, BLOCK_SIZE=64, mask_mod=mask, seq_lengths=lengths)
        assert_close(ours.flex_attention(*inputs, None, block_mask), dense(*inputs, None, allowed)[0])
        found = gradients(lambda q, k, v, m=block_mask: ours.flex_attention(q, k, v, None, m, return_lse=True), inputs)
        for mine, other in zip(found, expected, strict=True):
            assert_close(mine, other)


@pytest.mark.parametrize("compute_q_blocks", [True, False])
def test_lists_given_are_kept_and_transposed(compute_q_blocks: bool) -> None:
    counts, indices = chosen_blocks(4, 6, 3)
    lists = (counts, indices, counts - 2, indices.roll(-3, -1))
    torchs, own = (m.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(64, 32), compute_q_blocks=compute_q_blocks) for m in (theirs, ours))
    assert_same_attributes(own, torchs)
    assert own.kv_indices is indices and own.seq_lengths == (256, 192)
    assert repr(own) == repr(torchs) and str(own) == str(torchs)
    again = ours.BlockMask(*(getattr(own, name) for name in ("seq_lengths", *LISTS, "BLOCK_SIZE", "mask_mod")))
    assert_same_attributes(again, torchs)


def test_lists_with_less_room_than_there_are_key_blocks() -> None:
    counts, indices = torch.tensor([[[2, 1]]], dtype=torch.int32), torch.tensor([[[[0, 3], [2, 0]]]], dtype=torch.int32)
    own = ours.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, seq_lengths=(128, 256))
    assert own.to_dense().tolist() == [[[[1, 0, 0, 1], [0, 0, 1, 0]]]] and own.sparsity() == 100 * (1 - 3 / 8)
    assert own.q_num_blocks.tolist() == [[[1, 0, 1, 1]]]
    assert own.kv_indices is indices and "kv_indices=torch.Size([1, 1, 2, 2])" in repr(own)


def test_assigned_lists_are_the_mask() -> None:
    n = 256
    q, k, v = tensors(n)
    counts, indices = chosen_blocks(4, 4, 2)
    for change in ("assigned", "written to"):
        own = ours.create_block_mask(ours.noop_mask, B, H, n, n, device="cpu", BLOCK_SIZE=64, separate_full_blocks=False)
        if change == "assigned":
            own.kv_num_blocks, own.kv_indices = counts, indices
        else:
            own = own[:, :]
            own.mask_mod = ours.noop_mask
            own.kv_num_blocks.copy_(counts)
            own.kv_indices = indices
        assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, within(counts, indices, 64, n, n))[0])
        assert int(own.q_num_blocks.sum()) == int(counts.sum())


@pytest.mark.parametrize("way", ["written", "replaced"])
def test_a_derived_list_that_is_written_to_is_the_mask(way: str) -> None:
    n = 256
    q, k, v = tensors(n)
    own = ours.create_block_mask(MASKS["causal"](n), 1, 1, n, n, device="cpu", BLOCK_SIZE=64)
    ours.flex_attention(q, k, v, None, own)
    if way == "written":
        own.full_kv_num_blocks.zero_()
    else:
        own.full_kv_num_blocks.data = torch.zeros_like(own.full_kv_num_blocks)
    diagonal = (torch.arange(n)[:, None] // 64 == torch.arange(n) // 64) & (torch.arange(n)[:, None] >= torch.arange(n))
    assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, diagonal)[0])
    assert int(own.full_q_num_blocks.sum()) == 0


@pytest.mark.parametrize(("engine", "way"), [("reference", "eager"), ("blocked", "eager"), ("cpp", "eager"), ("cpp", "inference"), ("blocked", "compiled")])
def test_a_list_written_to_for_one_batch_element_is_honoured_by_the_next_call(engine: str, way: str) -> None:
    n = 256
    q, k, v = tensors(n)
    attend = torch.compile(ours.flex_attention, fullgraph=True, backend="eager") if way == "compiled" else ours.flex_attention
    with torch.inference_mode(way == "inference"), tw.attention_backend(engine):
        own = ours.create_block_mask(MASKS["causal"](n), B, H, n, n, device="cpu", BLOCK_SIZE=64)
        assert_close(attend(q, k, v, None, own), dense(q, k, v, None, allowed_by(MASKS["causal"](n), n, n))[0])
        other = copy(own)
        own.kv_num_blocks[1] = 0
        for _ in range(2):
            expected = dense(q, k, v, None, allowed_by(MASKS["causal"](n), n, n))[0]
            expected[1, :, :64] = 0  # of the second batch element, only full blocks are left, and the first rows have none
            assert_close(attend(q, k, v, None, own)[:, :, :64], expected[:, :, :64])
            assert_close(attend(q, k, v, None, own)[0], expected[0])
        own.full_kv_num_blocks[1] = 0
        assert attend(q, k, v, None, own)[1].count_nonzero() == 0 and own.to_dense()[1].count_nonzero() == 0
        assert attend(q, k, v, None, other)[1].count_nonzero() > 0, "the other mask had no list yet, and has its own"


def test_longer_keys_than_the_mask_was_made_for_are_masked_by_mask_mod() -> None:
    """torch lists the last block as partial, so assigning longer seq_lengths asks mask_mod about its rest."""
    q, k, v = tensors(64, kv_len=128)
    own = ours.create_block_mask(lambda b, h, q, kv: kv < 100, None, None, 64, 100, device="cpu", BLOCK_SIZE=64)
    own.seq_lengths = (64, 128)
    assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k[:, :, :100], v[:, :, :100])[0])


def test_torchs_paged_attention() -> None:
    """It takes the lists for pages of another order, and asks mask_mod inside the last page, behind which the cache holds anything."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    q, k, v = tensors(37, kv_len=200)
    own = ours.create_block_mask(ours.noop_mask, B, H, 37, 200, device="cpu", BLOCK_SIZE=64)
    pages = PagedAttention(12, 64, B, device="cpu")
    cache = [torch.full((1, H, 12 * 64, D), torch.nan, dtype=torch.float64) for _ in range(2)]
    lengths = torch.full((B,), 200)
    for b in (1, 0):
        pages.reserve(torch.tensor(b), torch.tensor(200))
    pages.assign(torch.arange(B), torch.arange(200).expand(B, -1), k, v, *cache)
    paged = pages.convert_logical_block_mask(own, kv_len=lengths)
    got = ours.flex_attention(q, cache[0].expand(B, -1, -1, -1), cache[1].expand(B, -1, -1, -1), pages.get_score_mod(None, kv_len=lengths), paged)
    assert_close(got, dense(q, k, v)[0])


def test_an_assigned_mask_mod_decides_inside_the_blocks() -> None:
    n = 256
    q, k, v = tensors(n)
    own = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu", BLOCK_SIZE=64)
    own.mask_mod = lambda b, h, q, kv: kv % 2 == 0
    i, j = torch.arange(n)[:, None], torch.arange(n)
    allowed = (j // 64 < i // 64) | ((i // 64 == j // 64) & (j % 2 == 0))
    assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, allowed)[0])
    own.mask_mod = None
    assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, j // 64 <= i // 64)[0])


# -- slices, other lengths, other devices ------------------------------------------------------------------------------

SLICES = {
    "batch": 1,
    "last batch": -1,
    "batch and head": (0, 1),
    "batches": slice(0, 2),
    "heads": (slice(None), slice(1, 3)),
    "rows": (slice(None), slice(None), slice(1, 3)),
    "one row": (0, 0, 2),
    "listed rows": (slice(None), slice(None), torch.tensor([3, 1])),
    "all": (0, slice(0, 2), torch.tensor([1], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", ["causal", "padding", "heads apart", "noop"])
@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
def test_slices(index: Any, name: str) -> None:
    n = 256
    torchs, own = (m.create_block_mask(MASKS[name](n), B, H, n, n, device="cpu", BLOCK_SIZE=64) for m in (theirs, ours))
    assert_same_attributes(own[index], torchs[index], n if not isinstance(index, tuple) or len(index) < 3 else 64 * own[index].kv_num_blocks.shape[-1])
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        own[index].mask_mod(*places(1, 1, 1, 1))

    # The queries of the slice attend by it to what they attended to before.
    q, k, v = tensors(n)
    whole = ours.flex_attention(q, k, v, None, own)
    picks = [*index, slice(None), slice(None)] if isinstance(index, tuple) else [index, slice(None), slice(None)]
    b, h, rows = (torch.arange(size)[slice(i, i + 1 or None) if isinstance(i, int) else i] for i, size in zip(picks, (B, H, 4), strict=False))
    at = (b[:, None, None], h[None, :, None], (rows[:, None] * 64 + torch.arange(64)).flatten()[None, None])
    kv = (b[:, None], h[None, :])
    assert_close(ours.flex_attention(q[at], k[kv], v[kv], None, own[index]), whole[at])


# Of 200 queries in blocks of 64, the last of which has 8: what is chosen, and how many queries that is.
LENGTHS_OF_SLICES = {
    "all": (slice(None), 200),
    "first": (0, 64),
    "last": (3, 8),
    "last, from the end": (-1, 8),
    "to the end": (slice(2, None), 72),
    "past the end": (slice(3, 9), 8),
    "before the last": (slice(-3, -1), 128),
    "every second": (slice(None, None, 2), 128),
    "every second, with the last": (slice(1, None, 2), 72),
    "nothing": (slice(2, 2), 0),
    "listed": (torch.tensor([3]), 64),
    "flags": (torch.tensor([True, False, False, True]), 128),
}


@pytest.mark.parametrize(("rows", "q_len"), LENGTHS_OF_SLICES.values(), ids=LENGTHS_OF_SLICES)
def test_a_slice_has_the_queries_of_its_blocks(rows: Any, q_len: int) -> None:
    torchs, own = (m.create_block_mask(MASKS["padding"](200), B, H, 200, 300, device="cpu", BLOCK_SIZE=64) for m in (theirs, ours))
    index = (slice(None), 1, rows)
    if q_len:
        assert_same_attributes(own[index], torchs[index], q_len)
        assert_same_attributes(own[index][0], torchs[index][0], q_len)
    else:
        assert own[index].seq_lengths == (0, 300)
    listed = ours.BlockMask.from_kv_blocks(own.kv_num_blocks, own.kv_indices, BLOCK_SIZE=64, seq_lengths=(200, 300))
    assert listed[index].seq_lengths == own[index].seq_lengths and own[index]._adjust(min(q_len, 5), 300).shape == (B, 1, min(q_len, 5), 300)


def test_a_slice_with_a_mask_of_its_own_has_the_queries_it_says() -> None:
    """Also where an index tensor chooses the last block, of which the whole mask has 8 queries only."""
    whole = ours.create_block_mask(MASKS["causal"](200), None, None, 200, 200, device="cpu", BLOCK_SIZE=64)
    _, k, v = tensors(200)
    for rows in (3, torch.tensor([3])):
        part = whole[:, :, rows]
        part.mask_mod = lambda b, h, q, kv: q + 192 >= kv
        q = tensors(part.seq_lengths[0])[0]
        allowed = torch.arange(len(q[0, 0]))[:, None] + 192 >= torch.arange(200)
        assert_close(ours.flex_attention(q, k, v, None, part), dense(q, k, v, None, allowed)[0])


def test_slices_of_given_lists_and_of_slices() -> None:
    counts, indices = chosen_blocks(4, 6, 3)
    torchs, own = (m.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64) for m in (theirs, ours))
    assert torch.equal(own[1, :, 1:3].to_dense(), torchs[1, :, 1:3].to_dense())
    assert torch.equal(own[1:][:, 2].to_dense(), torchs[1:][:, 2].to_dense())


def test_decoding_with_a_slice() -> None:
    """One query against a long cache, as torch's users write it."""
    n = 512
    _, k, v = tensors(n)
    whole = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")
    for position in (0, 127, 128, 300, 511):
        step = whole[:, :, torch.tensor([position]) // 128]
        offset = torch.tensor(position)
        step.mask_mod = lambda b, h, q, kv, offset=offset: whole.mask_mod(b, h, q + offset, kv)
        step.seq_lengths = (1, n)
        q = torch.randn(B, H, 1, D, dtype=torch.float64)
        assert_close(ours.flex_attention(q, k, v, None, step), dense(q, k[:, :, : position + 1], v[:, :, : position + 1])[0])


@pytest.mark.parametrize("lengths", [(256, 256), (200, 130), (64, 256), (1, 37)], ids=str)
def test_adjusting_to_smaller_lengths(lengths: tuple[int, int]) -> None:
    own = ours.create_block_mask(MASKS["causal"](256), B, H, 256, 256, device="cpu", BLOCK_SIZE=64)
    expected = ours.create_block_mask(MASKS["causal"](256), B, H, *lengths, device="cpu", BLOCK_SIZE=64)
    lists = ours.BlockMask.from_kv_blocks(own.kv_num_blocks, own.kv_indices, own.full_kv_num_blocks, own.full_kv_indices, 64, own.mask_mod)
    q, k, v = tensors(lengths[0], kv_len=lengths[1])
    for mask in (own._adjust(*lengths), lists._adjust(*lengths)):
        assert mask.shape == (B, H, *lengths) and torch.equal(mask.to_dense(), expected.to_dense())
        assert_close(ours.flex_attention(q, k, v, None, mask), ours.flex_attention(q, k, v, None, expected))


def test_without_q_lists() -> None:
    """Parts have none either. A backward needs none here."""
    counts, indices = chosen_blocks(4, 6, 3)
    own = ours.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, compute_q_blocks=False)
    for mask in (own, own[0], own[:, 1, 2:], own._adjust(128, 192), own.to("cpu"), copy(own)):
        assert mask.q_indices is None and mask.q_num_blocks is None and mask.full_kv_indices is None
    q, k, v = tensors(256, kv_len=384)
    ours.flex_attention(q.requires_grad_(), k, v, None, own).sum().backward()
    assert q.grad is not None


def test_orders_for_torchs_deterministic_kernels() -> None:
    for length, options in ((512, {}), (200, {"dq_kv_order": False}), (200, {"separate_full_blocks": False})):
        make = {"device": "cpu", "BLOCK_SIZE": 64, "compute_dq_write_order": True} | options
        torchs, own = (m.create_block_mask(MASKS["padding"](length), B, H, length, length, **make) for m in (theirs, ours))
        for mine, other in ((own, torchs), (own[1, :, 1:], torchs[1, :, 1:]), (own.to("cpu"), torchs)):
            assert mine.dq_kv_order_spt == other.dq_kv_order_spt == mine._dq_kv_order()
            assert torch.equal(mine.dq_write_order, other.dq_write_order)
            assert (mine.dq_write_order_full is None) == (other.dq_write_order_full is None)
            if other.dq_write_order_full is not None:
                assert torch.equal(mine.dq_write_order_full, other.dq_write_order_full)
    assert own._adjust(100, 100).dq_write_order is not None
    counts, indices = chosen_blocks(4, 4, 2)
    ordered = ours.BlockMask.from_kv_blocks(counts, indices, dq_write_order=indices, dq_kv_order=indices)
    assert ordered.dq_write_order is indices is ordered._dq_kv_order() is ordered.to("cpu").dq_kv_order
    for part in (lambda: ordered[0], lambda: ordered._adjust(128, 128)):
        with pytest.raises(NotImplementedError, match="tensor dq_kv_order"):
            part()


def test_as_a_pytree() -> None:
    from torch.utils import _pytree as tree

    own = ours.create_block_mask(MASKS["causal"](256), B, H, 256, 256, device="cpu", BLOCK_SIZE=64, compute_dq_write_order=True)
    for mask in (own, ours.BlockMask.from_kv_blocks(*chosen_blocks(4, 4, 2), compute_q_blocks=False)):
        keyed, context = mask._flatten_with_keys()
        leaves, _ = mask._flatten()
        again = ours.BlockMask._unflatten(leaves, context)
        assert [type(key) for key, _ in keyed] == [tree.GetAttrKey] * len(leaves) and len(context) == len(ours.BlockMask._CONTEXT_ATTRS) + 1
        assert all(getattr(again, name) is getattr(mask, name) for name in ours.BlockMask._TENSOR_ATTRS)
        assert all(getattr(again, name) == getattr(mask, name) for name in ours.BlockMask._CONTEXT_ATTRS)
    assert list(ours.BlockMask._TENSOR_ATTRS) == list(theirs.BlockMask._TENSOR_ATTRS) and list(ours.BlockMask._CONTEXT_ATTRS) == theirs.BlockMask._CONTEXT_ATTRS


def test_moving() -> None:
    own = ours.create_block_mask(MASKS["document"](256), B, H, 256, 256, device="cpu")
    lists = ours.BlockMask.from_kv_blocks(*chosen_blocks(2, 2, 1))
    for mask in (own, lists):
        moved = mask.to("meta")
        assert (moved.device.type, mask.device.type) == ("meta", "cpu")
        assert moved.shape == mask.shape and moved.mask_mod is mask.mask_mod
    again = own.to("cpu")
    assert all(torch.equal(getattr(again, name), getattr(own, name)) for name in LISTS)


def test_blocks_larger_than_the_sequence() -> None:
    q, k, v = tensors(300)
    for block in (512, 1 << 30):
        own = ours.create_block_mask(MASKS["causal"](300), None, None, 300, 300, device="cpu", BLOCK_SIZE=block)
        assert own.kv_indices.tolist() == [[[[0]]]] and block in own.BLOCK_SIZE
        assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, allowed_by(MASKS["causal"](300), 300, 300))[0])
    assert_close(ours.flex_attention(q, k, v, None, theirs._create_empty_block_mask(q, k)), dense(q, k, v)[0])


def test_torchs_flex_attention_takes_masks_and_scores_of_the_library() -> None:
    """It counts the parameters of what it is given, to tell a mask from a score."""
    mask = theirs.create_block_mask(masks.causal & masks.sliding_window(20), None, None, 128, 128, device="cpu")
    assert mask.sparsity() == 0.0
    assert theirs._get_mod_type(masks.causal) == theirs._ModificationType.MASK_MOD
    assert theirs._get_mod_type(scores.softcap(2.0)) == theirs._ModificationType.SCORE_MOD
