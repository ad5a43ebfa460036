"""tilewise.flex.flex_attention against torch's own FlexAttention, run eagerly: every mod, what is returned, errors and options.

Gradients, which torch's does not have on a CPU, are held to a dense float64 computation.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor

import tilewise as tw
from tests.support.flex_problems import MASKS, SCORES, B, D, H, allowed_by, assert_close, causal_blocks, chosen_blocks, dense, gradients, numbers, tensors
from tilewise import flex as ours
from tilewise import masks, scores
from tilewise.frontend import dispatch

pytestmark = pytest.mark.usefixtures("torchs_flex_runs_eagerly", "seeded", "one_thread")

LENGTHS = (37, 127, 256, 383)

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


@pytest.mark.parametrize("engine", ["reference", "blocked", "cpp"])
def test_the_largest_scores_are_not_differentiable(engine: str) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(40))
    with tw.attention_backend(engine):
        _, aux = ours.flex_attention(q, k, v, return_aux=ours.AuxRequest(True, True))
    assert aux.lse.requires_grad and not aux.max_scores.requires_grad


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


# -- errors and options ------------------------------------------------------------------------------------------------


def wrong(*, n: int = 128, q_heads: int = H, kv_heads: int = H, block_mask: Any = None, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        q, k = torch.randn(B, q_heads, n, D), torch.randn(B, kv_heads, n, D)
        return ours.flex_attention(q, k, k, block_mask=block_mask, **options)

    return call


SMALLER = "block_mask was created for a smaller length than you're using it for, you likely need to create a new block mask."
HEADS = "Expect query and key/value to have the same number of heads but got Hq=4 and Hkv=2. Try setting enable_gqa=True for GQA."
LARGER = "created for a larger length than you're using it for"
NESTED = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(2, 2, 8)], layout=torch.jagged)


def lists() -> tuple[torch.Tensor, torch.Tensor]:
    return chosen_blocks(2, 2, 1)


ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads": (wrong(kv_heads=2), ValueError, HEADS),
    "heads that do not divide": (wrong(kv_heads=3), ValueError, "Even for GQA (enable_gqa=True) query heads must be a multiple of kv heads"),
    "more kv heads": (wrong(kv_heads=2 * H), ValueError, "Even for GQA (enable_gqa=True) query heads must be a multiple of kv heads"),
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
    "backend": (wrong(kernel_options={"BACKEND": "CUDNN"}), ValueError, "Invalid BACKEND value"),
    "two backends": (wrong(kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}), RuntimeError, "BACKEND cannot be combined"),
    "nested": (lambda: ours.flex_attention(*[NESTED] * 3), NotImplementedError, "does not support NestedTensor inputs"),
    "mask": (wrong(block_mask="causal"), ValueError, "a BlockMask"),
    "dimensions": (lambda: ours.flex_attention(*[torch.randn(3, 5, 8)] * 3), ValueError, "(batch, heads, sequence, head dim)"),
    "no function": (lambda: ours.create_block_mask(3, None, None, 8, 8), ValueError, "takes a function"),
    "a score function": (lambda: ours.create_block_mask(lambda s, b, h, q, kv: s, None, None, 8, 8), TypeError, "looks like a score function"),
    "a score function's name here": (lambda: ours.create_block_mask(lambda s, b, h, q, kv: s, None, None, 8, 8), TypeError, "score_mod="),
    "a mask of numbers": (lambda: ours.create_block_mask(lambda b, h, q, kv: q - kv, None, None, 8, 8), TypeError, "score_mod="),
    "a score for a mask": (lambda: ours.create_block_mask(scores.softcap(30.0), None, None, 8, 8), TypeError, "Score(softcap(30.0)) is a score"),
    "a mask function": (wrong(score_mod=lambda b, h, q, kv: q >= kv), TypeError, "block_mask=create_block_mask(...)"),
    "a score of booleans": (wrong(score_mod=lambda s, b, h, q, kv: q >= kv), TypeError, "block_mask=create_block_mask(...)"),
    "a mask for a score": (wrong(score_mod=masks.causal), TypeError, "Mask(causal) is a mask, not a score"),
    "one dimension": (lambda: ours.BlockMask.from_kv_blocks(torch.tensor(1), torch.tensor([0])), RuntimeError, "must have at least 2 dimensions"),
    "half of the full lists": (lambda: ours.BlockMask.from_kv_blocks(*chosen_blocks(2, 2, 1), torch.ones(1)), AssertionError, "both provided or omitted"),
    "half of the full q lists": (lambda: ours.BlockMask((4, 4), *lists(), None, None, *lists(), lists()[0], None), AssertionError, "both provided or omitted"),
    "an order of nothing": (lambda: ours.BlockMask.from_kv_blocks(*lists(), dq_write_order_full=lists()[1]), ValueError, "requires dq_write_order"),
    "an order by number": (lambda: ours.BlockMask.from_kv_blocks(*lists(), dq_kv_order=1), ValueError, "dq_kv_order must be a bool"),
    "an order by tensor": (lambda: ours.create_block_mask(ours.noop_mask, 1, 1, 8, 8, dq_kv_order=torch.ones(1)), ValueError, "dq_kv_order must be a bool"),
    "a slice for other queries": (wrong(n=200, block_mask=causal_blocks(200)[:, :, 0]), RuntimeError, "Cannot use mask_mod from a sliced BlockMask"),
    "shapes": (lambda: ours.BlockMask.from_kv_blocks(torch.ones(1, 1, 3), torch.ones(1, 1, 2, 2)), ValueError, "one dimension more"),
    "rows": (wrong(n=500, block_mask=ours.BlockMask.from_kv_blocks(*chosen_blocks(2, 4, 1), seq_lengths=(500, 500))), ValueError, "2 query blocks"),
    "too many indices": (lambda: causal_blocks(128)[0, 0, 0, 0], ValueError, "batch, head and query block"),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(tw.TilewiseError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert text in str(caught.value)


def test_kernel_options_are_said_once_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = tensors(20)
    ours._log_once.cache_clear()
    options: ours.FlexKernelOptions = {"BLOCK_M": 32, "BACKEND": "TRITON"}
    with caplog.at_level(logging.INFO, "tilewise"):
        assert_close(ours.flex_attention(q, k, v, kernel_options=options), ours.flex_attention(q, k, v, kernel_options=options))
    assert sum("kernel_options" in message for message in caplog.messages) == 1


def test_the_backend_of_the_scope_is_used(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    q, k, v = tensors(20)
    with caplog.at_level(logging.INFO, "tilewise"), tw.attention_backend("math"):
        ours.flex_attention(q, k, v, SCORES["times two"](20), causal_blocks(20))
    assert any("using reference" in message for message in caplog.messages)
