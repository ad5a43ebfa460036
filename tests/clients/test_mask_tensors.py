"""How mask tensors are simplified, and that no cached reading is ever stale."""

import gc
import sys
import weakref

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.support.compare import normal
from tilewise.core import map_cache
from tilewise.frontend import mask_tensors
from tilewise.frontend.mask_tensors import read
from tilewise.functional import attend, scaled_dot_product_attention

B, H, Q, K = 2, 3, 5, 7
SIZES = (B, H, Q, K)
KEEP = torch.arange(K) < torch.tensor([[K], [4]])


def name_of(mask: Tensor) -> str | None:
    reading = read(mask, SIZES)
    assert reading is not None
    return (reading.mask.name if reading.mask is not None else "none") + (" + bias" if reading.score is not None else "")


READINGS = {
    "all true": (torch.ones(B, 1, 1, K, dtype=torch.bool), "none"),
    "all 0": (torch.zeros(B, H, Q, K), "none"),
    "key padding": (KEEP[:, None, None], "padding"),
    "key padding by head": (KEEP[:, None, None].repeat(1, H, 1, 1), "padding"),
    "key padding, expanded": (KEEP[:, None, None].expand(SIZES), "padding"),
    "key padding for all": (KEEP[1:2, None, None], "padding"),
    "-10000": (torch.where(KEEP, 0.0, -10000.0)[:, None, None], "padding"),
    "-10000 in bfloat16": (torch.where(KEEP, 0.0, -10000.0).bfloat16()[:, None, None], "padding"),
    "finfo.min": (torch.where(KEEP, 0.0, torch.finfo(torch.float16).min).half()[:, None, None], "padding"),
    "-inf": (torch.where(KEEP, 0.0, -torch.inf)[:, None, None], "padding"),
    "left padding": (KEEP.flip(-1)[:, None, None], "key_padding(2, 1, 1, 7)"),
    "causal": (torch.ones(Q, K, dtype=torch.bool).tril(), "tensor(1, 1, 5, 7)"),
    "padding of queries and keys": (KEEP[:, None, :Q, None] & KEEP[:, None, None], "token_padding(2, 1, 5, 7)"),
    "0 and 1, added": (KEEP.float()[:, None, None], "none + bias"),
    "a bias": (normal(H, Q, K, seed=0, dtype=torch.float32), "none + bias"),
    "a bias and -inf": (torch.where(KEEP, 0.5, -torch.inf)[:, None, None], "padding + bias"),
    "a row of -10000 only": (torch.where(torch.arange(Q)[:, None] > 0, 0.0, -10000.0).expand(Q, K), "none + bias"),
    "-5000": (torch.where(KEEP, 0.0, -5000.0)[:, None, None], "none + bias"),
}


@pytest.mark.parametrize("name", READINGS)
def test_what_a_tensor_says(name: str) -> None:
    mask, expected = READINGS[name]
    assert name_of(mask) == expected


@pytest.mark.parametrize("name", READINGS)
def test_it_means_the_same_as_the_tensor(name: str) -> None:
    mask, _ = READINGS[name]
    q, k, v = (normal(B, H, n, 4, seed=s, dtype=torch.float64) for s, n in enumerate((Q, K, K)))
    added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
    scores = q @ k.mT / 2 + added.double()
    expected = torch.softmax(scores, -1).nan_to_num() @ v  # a row with nothing to attend gives 0
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


@pytest.fixture(params=["by identity", "by value"])
def by_value(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether small tensors are known by their values. Nothing is known yet."""
    if request.param == "by identity":
        monkeypatch.setattr(map_cache, "MAX_VALUE_BYTES", -1)
    mask_tensors.forget()
    map_cache.maps.clear()
    return bool(request.param == "by value")


def test_read_once_however_many_views_are_made(by_value: bool) -> None:
    keep = KEEP.clone()
    before, maps = mask_tensors.looked(), map_cache.maps.built
    q = normal(B, H, Q, 4, seed=0, dtype=torch.float32)
    k = normal(B, H, K, 4, seed=1, dtype=torch.float32)
    for _ in range(5):
        scaled_dot_product_attention(q, k, k, keep[:, None, None, :])
    assert (mask_tensors.looked() - before, map_cache.maps.built - maps) == (1, 1)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_read_once_however_often_it_is_made_anew(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls after the first are known ones, too."""
    mask_tensors.forget()
    q, k = normal(B, H, Q, 4, seed=0, dtype=torch.float32), normal(B, H, K, 4, seed=1, dtype=torch.float32)
    made: list[Tensor] = []
    original = sys.modules["tilewise.attention"].make_problem
    monkeypatch.setattr(sys.modules["tilewise.attention"], "make_problem", lambda *args: (made.append(args[0]), original(*args))[1])
    before = mask_tensors.looked()
    with torch.inference_mode(inference):
        found = [scaled_dot_product_attention(q, k, k, KEEP.flip(-1)[:, None, None, :]) for _ in range(5)]
    assert mask_tensors.looked() - before == 1 and len(made) == 1
    assert all(torch.equal(found[0], again) for again in found)


def test_equal_bytes_may_mean_another_mask() -> None:
    """The values' dtype, the mask's shape and the sizes it broadcasts to are part of what it is known by."""
    some = torch.tensor([[0.0, 1.5, 0.0, 0.0]])
    for mask, at in ((some, (1, 1, 2, 4)), (some, (1, 1, 4, 4)), (some.view(4, 1), (1, 1, 4, 4)), (some.view(torch.float64), (1, 1, 4, 2))):
        q, k = normal(*at[:3], 4, seed=0, dtype=torch.float64), normal(*at[:2], at[3], 4, seed=1, dtype=torch.float64)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask.double())
        torch.testing.assert_close(scaled_dot_product_attention(q, k, k, mask), expected)


def test_what_was_read_is_not_what_the_client_writes_to() -> None:
    """A reading by value has a copy: the client may write to its tensor, and a tensor that then holds what the first one held has the first one's reading."""
    q, k = normal(B, H, Q, 4, seed=0, dtype=torch.float32), normal(B, H, K, 4, seed=1, dtype=torch.float32)
    mask = (torch.where(KEEP, 0.5, -torch.inf))[:, None, None].clone()
    first = scaled_dot_product_attention(q, k, k, mask)
    mask.zero_()
    assert not torch.equal(scaled_dot_product_attention(q, k, k, mask), first)
    assert torch.equal(scaled_dot_product_attention(q, k, k, (torch.where(KEEP, 0.5, -torch.inf))[:, None, None]), first)


def test_never_stale(by_value: bool) -> None:
    q, k = normal(B, H, Q, 4, seed=0, dtype=torch.float32), normal(B, H, K, 4, seed=1, dtype=torch.float32)

    def same(mask: Tensor) -> None:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, k, mask), expected, rtol=1e-5, atol=1e-6)

    keep = KEEP.clone()
    view = keep[:, None, None, :]
    same(view)
    keep[0, 5:] = False  # in place, through the base
    same(view)
    view[1, 0, 0, 2] = False  # in place, through the view
    same(view)
    keep.data = ~KEEP  # another memory
    same(keep[:, None, None, :])
    for seed in range(20):  # new tensors that may get the same place and the same id
        fresh = normal(B, 1, 1, K, seed=seed, dtype=torch.float32) > -0.5
        fresh[..., 0] = True
        same(fresh)
        del fresh
    with torch.inference_mode():
        inference = KEEP.clone()[:, None, None, :]
        same(inference)
        inference[0, 0, 0, 3] = False
        same(inference)


def test_no_tensor_is_kept_alive(by_value: bool) -> None:
    mask = (torch.where(KEEP, 0.5, -torch.inf))[:, None, None].clone()
    assert name_of(mask) == "padding + bias"
    alive = weakref.ref(mask)
    gc.collect()
    kept = len(mask_tensors._readings._kept)
    del mask
    gc.collect()
    assert alive() is None and len(mask_tensors._readings._kept) == kept - (not by_value)


def test_a_learned_mask_gets_its_gradient() -> None:
    q, k = normal(B, H, Q, 4, seed=0, dtype=torch.float64), normal(B, H, K, 4, seed=1, dtype=torch.float64)
    grads = []
    for sdpa in (torch.nn.functional.scaled_dot_product_attention, scaled_dot_product_attention):
        bias = normal(1, H, Q, K, seed=2, dtype=torch.float64).requires_grad_()
        sdpa(q, k, k, bias).square().sum().backward()
        grads.append(bias.grad)
    torch.testing.assert_close(*grads)


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(tw.InputError, match=r"boolean .* or floating point .* got torch.int64"):
        read(torch.ones(B, 1, 1, K, dtype=torch.int64), SIZES)
    with pytest.raises(tw.InputError, match=r"shape \(4, 7\) does not broadcast to .* \(2, 3, 5, 7\)"):
        read(torch.ones(4, K, dtype=torch.bool), SIZES)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are taken for those of a GPU, which are not read. Nothing is known yet."""
    monkeypatch.setattr(map_cache, "MAX_VALUE_BYTES", -1)
    monkeypatch.setattr(mask_tensors, "is_far", lambda mask: True)
    mask_tensors.forget()
    map_cache.maps.clear()


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_masks_of_keys_made_anew_in_every_layer_make_one_call(far: None, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = normal(B, H, Q, 4, seed=0, dtype=torch.float32), normal(B, H, K, 4, seed=1, dtype=torch.float32)
    made: list[Tensor] = []
    original = sys.modules["tilewise.attention"].make_problem
    monkeypatch.setattr(sys.modules["tilewise.attention"], "make_problem", lambda *args: (made.append(args[0]), original(*args))[1])
    with torch.inference_mode(inference), torch.no_grad():
        for hidden in range(K - 1):
            mask = torch.ones(B, 1, 1, K, dtype=torch.bool)
            mask[..., hidden] = False
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
            torch.testing.assert_close(scaled_dot_product_attention(q, k, k, mask), expected, rtol=1e-5, atol=1e-6)
            del mask
    assert len(made) == 1


def test_a_mask_of_keys_is_copied_once_however_many_layers_use_it(far: None) -> None:
    mask = KEEP[:, None, None].clone()
    before = mask_tensors.looked()
    with torch.no_grad():
        first, again = (mask_tensors.read_for_call(mask, SIZES) for _ in range(2))
        assert first is again and mask_tensors.looked() == before + 1
        mask[0, 0, 0, 2] = False
        assert mask_tensors.read_for_call(mask, SIZES) is not first


def test_what_is_held_is_not_written_to(far: None) -> None:
    """Neither by the reading of another mask, nor by one of a mask that takes its tensor's place."""
    with torch.no_grad():
        held = [mask_tensors.read_for_call((torch.arange(K) != n).expand(B, 1, 1, K), SIZES) for n in range(6)]  # more than are kept
        for n, reading in enumerate(held):
            assert reading is not None and reading.mask is not None
            (tensor,) = reading.mask.traced().captures
            assert tensor.flatten()[:K].tolist() == [i != n for i in range(K)]
        assert len({id(reading.mask) for reading in held if reading is not None}) == 6
        del reading, tensor, held
        found = set()
        for _ in range(6):
            again = mask_tensors.read_for_call(KEEP[:1, None, None].clone(), SIZES)
            assert again is not None
            found.add(id(again.mask))
            del again
        assert len(found) == 1


def test_a_backward_finds_the_mask_of_its_forward(far: None) -> None:
    q, k = (normal(B, H, n, 4, seed=n, dtype=torch.float64).requires_grad_() for n in (Q, K))
    outs, expected = [], []
    for n in range(3):
        mask = (torch.arange(K) != n).expand(B, 1, 1, K)
        outs.append(scaled_dot_product_attention(q, k, k, mask))
        expected.append(torch.nn.functional.scaled_dot_product_attention(q, k, k, mask))
        del mask
    with torch.no_grad():
        scaled_dot_product_attention(q, k, k, (torch.arange(K) != 4).expand(B, 1, 1, K))
    for ours, theirs in zip(outs, expected, strict=True):
        for found, right in zip(torch.autograd.grad(ours.sum(), (q, k)), torch.autograd.grad(theirs.sum(), (q, k)), strict=True):
            torch.testing.assert_close(found, right)


def test_a_graph_that_is_captured_reads_the_tensor_itself(far: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays follow what the client writes there. So does a reading that was made before, for a call like it."""
    mask = KEEP[:, None, None].clone()
    with torch.no_grad():
        before = mask_tensors.read_for_call(mask, SIZES)
        monkeypatch.setattr(mask_tensors, "is_capturing", lambda mask: True)
        reading = mask_tensors.read_for_call(mask, SIZES)
    assert reading is not None and reading.mask is not None and before is not None and before.mask is not None
    assert reading.mask.traced().captures[0].data_ptr() == mask.data_ptr() != before.mask.traced().captures[0].data_ptr()


OTHERS = {
    "queries and keys": torch.ones(1, 1, Q, K, dtype=torch.bool).tril(),
    "by head": (torch.arange(K) != torch.arange(H)[:, None])[None, :, None],
    "additive": torch.where(KEEP, 0.5, -torch.inf)[:, None, None],
    "of keys, large": KEEP[:, None, None],
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_prepares_for_a_capture_like_it(far: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read must be known by then: to read is to wait, which ends a capture. Of large masks, so must be the map of the tensor itself."""
    mask = OTHERS[name].clone()
    if name == "of keys, large":
        monkeypatch.setattr(mask_tensors, "LARGE", 0)
    with torch.no_grad():
        before = mask_tensors.read_for_call(mask, SIZES)
        looked = mask_tensors.looked()
        monkeypatch.setattr(mask_tensors, "is_capturing", lambda mask: True)
        assert mask_tensors.read_for_call(mask, SIZES) is before and mask_tensors.looked() == looked


def test_who_takes_no_mask_is_told_that_there_is_none(far: None) -> None:
    q = normal(B, H, Q, 4, seed=0, dtype=torch.float32)
    nothing = torch.ones(B, 1, 1, Q, dtype=torch.bool)
    reading = mask_tensors.read(nothing, (B, H, Q, Q))
    assert reading is not None and reading.mask is not None  # it is not looked at
    for mask in (nothing, nothing.expand(B, H, Q, Q), torch.zeros(B, 1, 1, Q)):
        contents = mask_tensors.read_contents(mask, (B, H, Q, Q))
        assert contents is not None and contents.mask is None and contents.score is None
    with torch.no_grad():
        torch.testing.assert_close(attend(q, q, q, nothing, backend="flash"), torch.nn.functional.scaled_dot_product_attention(q, q, q))
