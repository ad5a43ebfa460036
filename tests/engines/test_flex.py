"""tilewise.flex against torch's own FlexAttention, run eagerly; gradients, which torch's does not have on a CPU, against a dense float64 computation."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor

import tilewise as tw
from tilewise import flex as ours
from tilewise import masks
from tilewise.block_mask import BACKWARD, FORWARD

B, H, D = 2, 4, 8
LENGTHS = (37, 127, 256, 383)
LISTS = (*FORWARD, *BACKWARD)


@pytest.fixture(autouse=True)
def torch_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the mods torch's own test suite uses ------------------------------------------------------------------------------


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def documents(n: int) -> Tensor:
    return torch.arange(2 * n) // (n // 3 + 1)  # longer than the queries: there may be more keys


def silu_score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.nn.functional.silu(s)


def composed(n: int) -> Callable[..., Any]:
    slopes, table = numbers(H), numbers(n)

    def capped(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 5 * torch.tanh((s + slopes[h] * (kv - q) * 0.01) / 5) + table[kv]

    return lambda s, b, h, q, kv: torch.where(q >= kv, capped(s, b, h, q, kv), -float("inf"))


def neighbours(n: int) -> Callable[..., Any]:
    side = int(n**0.5)
    return lambda s, b, h, q, kv: torch.where((q // side - kv // side).abs() + (q % side - kv % side).abs() <= 4, s, -float("inf"))


SCORES: dict[str, Callable[[int], Callable[..., Any]]] = {
    "identity": lambda n: lambda s, b, h, q, kv: s,
    "times two": lambda n: lambda s, b, h, q, kv: s * 2,
    "squared": lambda n: lambda s, b, h, q, kv: s * s,
    "causal": lambda n: lambda s, b, h, q, kv: torch.where(q >= kv, s, float("-inf")),
    "inverse causal": lambda n: lambda s, b, h, q, kv: torch.where(q <= kv, s, float("-inf")),
    "relative": lambda n: lambda s, b, h, q, kv: s + (q - kv) / n,
    "alibi": lambda n: lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-(h + 1) * 8.0 / H),
    "trigonometric": lambda n: lambda s, b, h, q, kv: torch.sin(torch.cos(s)) + torch.sin(b),
    "head offset": lambda n: lambda s, b, h, q, kv: s + 2 * h,
    "silu": lambda n: silu_score,
    "soft cap": lambda n: lambda s, b, h, q, kv: 3 * torch.tanh(s / 3),
    "no score": lambda n: lambda s, b, h, q, kv: kv.double() / n,
    "neighbours": neighbours,
    "bias by all": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[b, h, q, kv])(numbers(B, H, n, n)),
    "bias by head": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[h])(numbers(H)),
    "bias by distance": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[q - kv + n - 1])(numbers(2 * n - 1)),
    "bias at negative places": lambda n: (lambda bias: lambda s, b, h, q, kv: s + bias[h, q - kv])(numbers(H, n)),
    "two buffers": lambda n: (lambda by_head, by_batch: lambda s, b, h, q, kv: s * by_head[h] + by_batch[b, kv])(numbers(H), numbers(B, n)),
    "looked up twice": lambda n: (lambda ids, bias: lambda s, b, h, q, kv: s + bias[ids[q], ids[kv]])(documents(n), numbers(6, 6)),
    "one number": lambda n: (lambda gate: lambda s, b, h, q, kv: s * gate)(torch.tensor(0.3, dtype=torch.float64)),
    "composed": composed,
}  # fmt: skip

MASKS: dict[str, Callable[[int], Callable[..., Any]]] = {
    "noop": lambda n: ours.noop_mask,
    "causal": lambda n: lambda b, h, q, kv: q >= kv,
    "inverse causal": lambda n: lambda b, h, q, kv: q <= kv,
    "window": lambda n: lambda b, h, q, kv: (q - kv).abs() <= 20,
    "global and causal": lambda n: lambda b, h, q, kv: (q >= kv) | (kv < 10),
    "offset": lambda n: (lambda offset: lambda b, h, q, kv: q + offset >= kv)(torch.tensor(30)),
    "document": lambda n: (lambda ids: lambda b, h, q, kv: ids[q] == ids[kv])(documents(n)),
    "document and causal": lambda n: (lambda ids: ours.and_masks(lambda b, h, q, kv: ids[q] == ids[kv], lambda b, h, q, kv: q >= kv))(documents(n)),
    "padding": lambda n: (lambda lengths: lambda b, h, q, kv: (kv < lengths[b]) & (q < lengths[b]))(torch.tensor([n // 2, n - 1])),
    "batches apart": lambda n: lambda b, h, q, kv: torch.where(b == 0, q >= kv, q <= kv),
    "heads apart": lambda n: lambda b, h, q, kv: (q - kv) % (h + 2) == 0,
    "tail only": lambda n: lambda b, h, q, kv: kv >= n - 1,
    "union": lambda n: ours.or_masks(lambda b, h, q, kv: kv < 5, lambda b, h, q, kv: q == kv),
    "nothing": lambda n: lambda b, h, q, kv: kv < 0,
}  # fmt: skip


# -- the two computations it is held to --------------------------------------------------------------------------------


def tensors(n: int, kv_heads: int = H, *, kv_len: int | None = None, v_dim: int = D, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    m = n if kv_len is None else kv_len
    return tuple(torch.randn(B, heads, length, dim, dtype=dtype) for heads, length, dim in ((H, n, D), (kv_heads, m, D), (kv_heads, m, v_dim)))


def dense(query: Tensor, key: Tensor, value: Tensor, score: Any = None, allowed: Tensor | None = None, scale: float = D**-0.5) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores), written down plainly."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = scale * query @ key.mT
    if score is not None:
        scores = score(scores, *places(*scores.shape)).expand_as(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    nothing = (scores == -torch.inf).all(-1)
    lse = torch.where(nothing, -torch.inf, scores.masked_fill(nothing[..., None], 0).logsumexp(-1))
    weights = torch.exp(scores - torch.where(nothing, 0.0, lse)[..., None])
    return weights @ value, lse, scores.amax(-1)


def places(*shape: int) -> list[Tensor]:
    return [torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape)]


def allowed_by(mask: Callable[..., Any], q_len: int, kv_len: int) -> Tensor:
    return theirs.create_mask(mask, B, H, q_len, kv_len, device="cpu")


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def assert_same_attributes(found: ours.BlockMask, expected: theirs.BlockMask) -> None:
    for name in LISTS:
        mine, torchs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (torchs is None), name
        if torchs is not None:
            assert mine.shape == torchs.shape and mine.dtype == torchs.dtype == torch.int32
            assert torch.equal(mine, torchs), name
    assert (found.shape, found.seq_lengths, found.BLOCK_SIZE) == (expected.shape, expected.seq_lengths, expected.BLOCK_SIZE)
    assert found.numel() == expected.numel() and found.sparsity() == pytest.approx(expected.sparsity())
    assert torch.equal(found.to_dense(), expected.to_dense())


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, n: int) -> None:
    score = SCORES[name](n)
    causal = theirs.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")
    own = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")
    ways = [(H, None, None), (2, causal, own)] + [(2, None, None), (H, causal, own)] * (n < 256)
    for kv_heads, block_mask, same in ways:
        q, k, v = tensors(n, kv_heads)
        expected = theirs.flex_attention(q, k, v, score, block_mask, enable_gqa=kv_heads < H, return_aux=theirs.AuxRequest(lse=True))
        found = ours.flex_attention(q, k, v, score, same, enable_gqa=kv_heads < H, return_aux=ours.AuxRequest(lse=True))
        assert_close(found[0], expected[0])
        assert_close(found[1].lse, expected[1].lse)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str, n: int) -> None:
    mask = MASKS[name](n)
    torchs = theirs.create_block_mask(mask, B, H, n, n, device="cpu")
    own = ours.create_block_mask(mask, B, H, n, n, device="cpu")
    assert torch.equal(own.to_dense(), torchs.to_dense())
    for kv_heads in (H, 2):
        q, k, v = tensors(n, kv_heads, v_dim=24)
        expected = theirs.flex_attention(q, k, v, None, torchs, enable_gqa=kv_heads < H, return_aux=theirs.AuxRequest(lse=True))
        for block_mask in (own, torchs) if kv_heads == H else (own, own.tile_map(), masks.as_mask(mask)):
            found = ours.flex_attention(q, k, v, None, block_mask, enable_gqa=kv_heads < H, return_aux=ours.AuxRequest(lse=True))
            assert_close(found[0], expected[0])
            assert_close(found[1].lse, expected[1].lse)


def test_other_lengths_of_keys_and_a_scale() -> None:
    q, k, v = tensors(70, kv_len=300)
    mask = MASKS["offset"](0)
    torchs, own = (m.create_block_mask(mask, None, None, 70, 300, device="cpu", BLOCK_SIZE=(32, 64)) for m in (theirs, ours))
    assert_close(ours.flex_attention(q, k, v, None, own, 0.3), theirs.flex_attention(q, k, v, None, torchs, 0.3))


def test_keys_of_one_batch_element_serve_all() -> None:
    q, k, v = tensors(64)
    torchs, own = (m.create_block_mask(MASKS["padding"](64), B, None, 64, 64, device="cpu") for m in (theirs, ours))
    assert_close(ours.flex_attention(q, k[:1], v[:1], None, own), theirs.flex_attention(q, k[:1], v[:1], None, torchs))


def test_a_block_mask_made_for_one_batch_element_follows_its_mask_in_every_one() -> None:
    q, k, v = tensors(256)
    for name in ("padding", "heads apart"):
        mask = MASKS[name](256)
        torchs, own = (m.create_block_mask(mask, None, None, 256, 256, device="cpu") for m in (theirs, ours))
        assert_close(ours.flex_attention(q, k, v, None, own), theirs.flex_attention(q, k, v, None, torchs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_keeps_lse_in_float32(dtype: torch.dtype) -> None:
    q, k, v = tensors(100, dtype=dtype)
    out, aux = ours.flex_attention(q, k, v, SCORES["relative"](100), return_aux=ours.AuxRequest(lse=True, max_scores=True))
    assert (out.dtype, aux.lse.dtype, aux.max_scores.dtype) == (dtype, torch.float32, torch.float32)
    expected = dense(q.double(), k.double(), v.double(), SCORES["relative"](100))
    torch.testing.assert_close(out.double(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(aux.lse.double(), expected[1], rtol=1e-4, atol=1e-4)


def test_what_is_returned() -> None:
    q, k, v = tensors(40)
    out = ours.flex_attention(q, k, v)
    with_lse = ours.flex_attention(q, k, v, return_lse=True)
    assert type(with_lse) is tuple and len(with_lse) == 2
    expected = dense(q, k, v)
    assert_close(out, expected[0])
    assert_close(with_lse[1], expected[1])
    for request in (ours.AuxRequest(), ours.AuxRequest(lse=True), ours.AuxRequest(max_scores=True), ours.AuxRequest(True, True)):
        same, aux = ours.flex_attention(q, k, v, return_aux=request)
        assert_close(same, expected[0])
        assert isinstance(aux, ours.AuxOutput)
        for wanted, found, value in zip(request, aux, expected[1:], strict=True):
            assert (found is not None) == wanted
            if found is not None:
                assert_close(found, value)


def test_the_output_has_the_strides_of_the_query() -> None:
    q = torch.randn(B, 50, H, D).transpose(1, 2)
    out = ours.flex_attention(q, q, q, SCORES["times two"](50))
    assert out.shape == q.shape and out.stride() == q.stride()


def test_rows_that_attend_to_nothing() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(200))

    def even(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i % 2 == 0) & (i >= j)

    own = ours.create_block_mask(even, None, None, 200, 200, device="cpu")
    out, aux = ours.flex_attention(q, k, v, block_mask=own, return_aux=ours.AuxRequest(True, True))
    assert bool((out[:, :, 1::2] == 0).all())
    assert bool((aux.lse[:, :, 1::2] == -torch.inf).all()) and bool((aux.max_scores[:, :, 1::2] == -torch.inf).all())
    (out.sum() + aux.lse[:, :, ::2].sum()).backward()
    assert q.grad is not None and bool((q.grad[:, :, 1::2] == 0).all()) and bool(q.grad.isfinite().all())
    with torch.no_grad():
        expected = theirs.flex_attention(q.detach(), k.detach(), v.detach(), block_mask=theirs.create_block_mask(even, None, None, 200, 200, device="cpu"))
    assert_close(out.detach(), expected)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(function: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor]) -> list[Tensor]:
    """Those of both the output and lse, weighted unevenly."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out, lse = function(*leaves)
    rows = lse > -torch.inf
    loss = (out * torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + (lse[rows] * 0.3).sum()
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


@pytest.mark.parametrize("name", SCORES)
def test_gradients_of_score_mods(name: str) -> None:
    n, score = 131, SCORES[name](131)
    inputs = list(tensors(n, 2))
    found = gradients(lambda q, k, v: ours.flex_attention(q, k, v, score, enable_gqa=True, return_lse=True), inputs)
    expected = gradients(lambda q, k, v: dense(q, k, v, score)[:2], inputs)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "nothing"])
def test_gradients_of_mask_mods(name: str) -> None:
    n, mask = 131, MASKS[name](131)
    own = ours.create_block_mask(mask, B, H, n, n, device="cpu", BLOCK_SIZE=64)
    inputs = list(tensors(n, 2))
    found = gradients(lambda q, k, v: ours.flex_attention(q, k, v, None, own, enable_gqa=True, return_lse=True), inputs)
    expected = gradients(lambda q, k, v: dense(q, k, v, None, allowed_by(mask, n, n))[:2], inputs)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)


def test_gradients_of_learned_biases() -> None:
    n = 90
    allowed = allowed_by(MASKS["causal"](n), n, n)
    own = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu", BLOCK_SIZE=32)

    def learned(by_distance: Tensor, gate: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, q, kv: s * gate[h] + by_distance[h, q - kv + n - 1] + by_distance[h, kv]

    inputs = [*tensors(n), numbers(H, 2 * n - 1), numbers(H)]
    found = gradients(lambda q, k, v, *w: ours.flex_attention(q, k, v, learned(*w), own, return_lse=True), inputs)
    expected = gradients(lambda q, k, v, *w: dense(q, k, v, learned(*w), allowed)[:2], inputs)
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other)


# -- block masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [True, False], ids=["full apart", "full among partial"])
@pytest.mark.parametrize("block", [128, 64, (64, 32)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attributes_are_torchs(name: str, block: Any, separate: bool) -> None:
    mask = MASKS[name](256)
    for batch, heads in ((B, None), (None, H)):
        torchs, own = (
            m.create_block_mask(mask, batch, heads, 256, 384, device="cpu", BLOCK_SIZE=block, separate_full_blocks=separate) for m in (theirs, ours)
        )
        assert repr(own) == repr(torchs)
        assert_same_attributes(own, torchs)
        for flatten in (True, False):
            mine, other = own.as_tuple(flatten), torchs.as_tuple(flatten)
            assert [type(x) for x in mine] == [type(x) for x in other] and mine[-1] is other[-1] is mask


@pytest.mark.parametrize("name", ["causal", "padding", "window", "nothing"])
def test_drawings_are_torchs(name: str) -> None:
    torchs, own = (m.create_block_mask(MASKS[name](300), B, H, 300, 700, device="cpu", BLOCK_SIZE=16) for m in (theirs, ours))
    assert str(own) == str(torchs)
    for options in ({"grid_size": (2, 3), "limit": 1}, {"grid_size": 7}, {"grid_size": -1, "limit": 2}):
        assert own.to_string(**options) == torchs.to_string(**options)


@pytest.mark.parametrize("name", MASKS)
def test_a_block_over_the_end_is_full_here_where_torch_calls_it_partial(name: str) -> None:
    torchs, own = (m.create_block_mask(MASKS[name](200), B, H, 200, 300, device="cpu", BLOCK_SIZE=64) for m in (theirs, ours))
    assert torch.equal(own.to_dense(), torchs.to_dense())
    assert own.sparsity() == pytest.approx(torchs.sparsity())
    assert bool((own.full_kv_num_blocks >= torchs.full_kv_num_blocks).all())


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


def chosen_blocks(rows: int, columns: int, count: int) -> tuple[Tensor, Tensor]:
    """For every query block, `count` key blocks, the highest of some numbers, in their order: not ascending."""
    indices = torch.rand(B, H, rows, columns).argsort(-1).int()
    return torch.full((B, H, rows), count, dtype=torch.int32), indices


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
            own.kv_num_blocks = own.kv_num_blocks.contiguous()
            own.kv_num_blocks.copy_(counts)
            own.kv_indices = indices
        assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, within(counts, indices, 64, n, n))[0])
        assert int(own.q_num_blocks.sum()) == int(counts.sum())


def test_a_derived_list_that_is_written_to_is_the_mask() -> None:
    n = 256
    q, k, v = tensors(n)
    own = ours.create_block_mask(MASKS["causal"](n), 1, 1, n, n, device="cpu", BLOCK_SIZE=64)
    ours.flex_attention(q, k, v, None, own)
    own.full_kv_num_blocks.zero_()
    diagonal = (torch.arange(n)[:, None] // 64 == torch.arange(n) // 64) & (torch.arange(n)[:, None] >= torch.arange(n))
    assert_close(ours.flex_attention(q, k, v, None, own), dense(q, k, v, None, diagonal)[0])
    assert int(own.full_q_num_blocks.sum()) == 0


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


SLICES = {
    "batch": 1, "last batch": -1, "batch and head": (0, 1), "batches": slice(0, 2), "heads": (slice(None), slice(1, 3)),
    "rows": (slice(None), slice(None), slice(1, 3)), "one row": (0, 0, 2), "listed rows": (slice(None), slice(None), torch.tensor([3, 1])),
    "all": (0, slice(0, 2), torch.tensor([1], dtype=torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "padding", "heads apart", "noop"])
@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
def test_slices(index: Any, name: str) -> None:
    n = 256
    torchs, own = (m.create_block_mask(MASKS[name](n), B, H, n, n, device="cpu", BLOCK_SIZE=64) for m in (theirs, ours))
    assert_same_attributes(own[index], torchs[index])
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


# -- errors and options ------------------------------------------------------------------------------------------------


def wrong(*, n: int = 128, q_heads: int = H, kv_heads: int = H, block_mask: Any = None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        q, k = torch.randn(B, q_heads, n, D), torch.randn(B, kv_heads, n, D)
        return ours.flex_attention(q, k, k, block_mask=block_mask, **options)

    return call


def causal_blocks(n: int, module: Any = ours) -> Any:
    return module.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, n, n, device="cpu")


SMALLER = "block_mask was created for a smaller length than you're using it for, you likely need to create a new block mask."
HEADS = "Expect query and key/value to have the same number of heads but got Hq=4 and Hkv=2. Try setting enable_gqa=True for GQA."
LARGER = "created for a larger length than you're using it for"
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads": (wrong(kv_heads=2), ValueError, HEADS),
    "ratio": (wrong(kv_heads=3, enable_gqa=True), ValueError, "Expect number of query heads to be a multiple of kv heads for GQA"),
    "smaller": (wrong(n=200, block_mask=causal_blocks(128)), ValueError, SMALLER),
    "smaller, torch's": (wrong(n=200, block_mask=causal_blocks(128, theirs)), ValueError, SMALLER),
    "smaller, a tile map": (wrong(n=200, block_mask=causal_blocks(128).tile_map()), ValueError, SMALLER),
    "larger": (wrong(n=100, block_mask=causal_blocks(128)), ValueError, LARGER),
    "larger, torch's": (wrong(n=100, block_mask=causal_blocks(128, theirs)), ValueError, LARGER),
    "device": (wrong(block_mask=causal_blocks(128).to("meta")), RuntimeError, "Expect q/k/v and block_mask to be on the same device"),
    "device, torch's": (wrong(block_mask=causal_blocks(128, theirs).to("meta")), RuntimeError, "Expect q/k/v and block_mask to be on the same device"),
    "both": (wrong(return_lse=True, return_aux=ours.AuxRequest(lse=True)), ValueError, "Cannot specify both return_lse and return_aux"),
    "and_masks": (lambda: ours.and_masks(ours.noop_mask, 3), RuntimeError, "All inputs should be callable mask_mods"),
    "or_masks": (lambda: ours.or_masks(None), RuntimeError, "All inputs should be callable mask_mods"),
    "options": (wrong(kernel_options=3), ValueError, "kernel_options must be a dict"),
    "mask": (wrong(block_mask="causal"), ValueError, "a BlockMask"),
    "dimensions": (lambda: ours.flex_attention(*[torch.randn(3, 5, 8)] * 3), ValueError, "(batch, heads, sequence, head dim)"),
    "no function": (lambda: ours.create_block_mask(3, None, None, 8, 8), ValueError, "takes a function"),
    "a score function": (lambda: ours.create_block_mask(lambda s, b, h, q, kv: s, None, None, 8, 8), TypeError, "looks like a score function"),
    "one dimension": (lambda: ours.BlockMask.from_kv_blocks(torch.tensor(1), torch.tensor([0])), RuntimeError, "must have at least 2 dimensions"),
    "half of the full lists": (lambda: ours.BlockMask.from_kv_blocks(*chosen_blocks(2, 2, 1), torch.ones(1)), ValueError, "both provided or omitted"),
    "shapes": (lambda: ours.BlockMask.from_kv_blocks(torch.ones(1, 1, 3), torch.ones(1, 1, 2, 2)), ValueError, "one dimension more"),
    "rows": (wrong(n=500, block_mask=ours.BlockMask.from_kv_blocks(*chosen_blocks(2, 4, 1), seq_lengths=(500, 500))), ValueError, "2 query blocks"),
    "too many indices": (lambda: causal_blocks(128)[0, 0, 0, 0], ValueError, "batch, head and query block"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(tw.TilewiseError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert text in str(caught.value)


def test_kernel_options_are_said_once_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors(20)
    ours._say_once.cache_clear()
    options: ours.FlexKernelOptions = {"BLOCK_M": 32, "BACKEND": "TRITON"}
    with caplog.at_level(logging.INFO, "tilewise"):
        assert_close(ours.flex_attention(q, k, v, kernel_options=options), ours.flex_attention(q, k, v, kernel_options=options))
    assert sum("kernel_options" in message for message in caplog.messages) == 1


def test_the_backend_of_the_scope_is_used(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors(20)
    with caplog.at_level(logging.INFO, "tilewise"), tw.attention_backend("math"):
        ours.flex_attention(q, k, v, SCORES["times two"](20), causal_blocks(20))
    assert any("using reference" in message for message in caplog.messages)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_gradients(function: Callable[..., Tensor], inputs: list[Tensor], *rest: Any) -> tuple[list[Tensor], list[Tensor]]:
    def with_lse(run: Callable[..., Tensor]) -> list[Tensor]:
        return gradients(lambda *leaves: (run(*leaves, *rest), torch.zeros(1, dtype=torch.float64)), inputs)

    return with_lse(torch.compile(function, backend="aot_eager", fullgraph=True)), with_lse(function)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("made_by", ["tilewise", "torch", "lists"])
@pytest.mark.parametrize("way", ["argument", "closure"])
def test_compiling_with_a_block_mask_from_outside(made_by: str, way: str) -> None:
    n = 200
    mask, bias = MASKS["document and causal"](n), numbers(H)
    counts, indices = chosen_blocks(2, 2, 1)
    made = {
        "tilewise": lambda: ours.create_block_mask(mask, B, None, n, n, device="cpu"),
        "torch": lambda: theirs.create_block_mask(mask, B, None, n, n, device="cpu"),
        "lists": lambda: ours.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n)),
    }[made_by]()

    def by_argument(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + bias[h], block_mask, kernel_options={"BLOCK_M": 64})

    def by_closure(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + bias[h], made)

    found = compiled_gradients(by_argument, list(tensors(n)), made) if way == "argument" else compiled_gradients(by_closure, list(tensors(n)))
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_the_making_of_a_block_mask() -> None:
    n = 200
    mask = MASKS["document"](n)

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours.flex_attention(q, k, v, block_mask=ours.create_block_mask(mask, B, H, n, n, device=q.device))

    for mine, other in zip(*compiled_gradients(inside, list(tensors(n))), strict=True):
        assert_close(mine, other)
    made, eager = (f(mask, B, H, 256, 256, "cpu") for f in (torch.compile(ours.create_block_mask, backend="eager"), ours.create_block_mask))
    assert all(torch.equal(getattr(made, name), getattr(eager, name)) for name in LISTS)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiling_a_decoding_step_compiles_once() -> None:
    n = 512
    _, k, v = tensors(n)
    whole = ours.create_block_mask(MASKS["causal"](n), None, None, n, n, device="cpu")

    def step(q: Tensor, position: Tensor, block_mask: ours.BlockMask) -> Tensor:
        part = block_mask[:, :, position // block_mask.BLOCK_SIZE[0]]
        part.mask_mod = lambda b, h, i, j: block_mask.mask_mod(b, h, i + position[0], j)
        part.seq_lengths = (1, n)
        out, aux = ours.flex_attention(q, k, v, block_mask=part, return_aux=ours.AuxRequest(lse=True))
        return out + 0 * aux.lse[..., None]

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for position in (3, 200, 511):
        q = torch.randn(B, H, 1, D, dtype=torch.float64)
        assert_close(compiled(q, torch.tensor([position]), whole), dense(q, k[:, :, : position + 1], v[:, :, : position + 1])[0])
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_slice_taken_while_compiling_wants_its_mask_mod() -> None:
    whole = causal_blocks(256)

    def untouched(q: Tensor) -> Tensor:
        return ours.flex_attention(q, q, q, block_mask=whole[:, :, :1])

    with pytest.raises(Exception, match="sliced BlockMask"):
        torch.compile(untouched, backend="eager", fullgraph=True)(torch.randn(1, 1, 128, D))
