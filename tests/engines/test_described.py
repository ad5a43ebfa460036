"""Fixed masks and scores are described once for the call cache: whatever the description leaves out is looked at in every call."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import tilewise as tw
from tilewise import masks, scores
from tilewise.core.problem import Options
from tilewise.frontend import call_cache, call_key
from tilewise.masks import Mask


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    call_cache.forget()


X = torch.randn(1, 2, 24, 8, generator=torch.Generator().manual_seed(0))


def known(mask: Any = None, score: Any = None) -> Any:
    found = call_key.key_of(X, X, X, mask, score, Options(), "cpp", False)
    return None if found is None else found.key


def assert_right(mask: Any = None, score: Any = None) -> Tensor:
    """Twice, so that the second is a known call where the first can be."""
    wanted = tw.attention(X, X, X, mask=mask, score=score, backend="reference")
    for _ in range(2):
        found = tw.attention(X, X, X, mask=mask, score=score, backend="blocked")
        torch.testing.assert_close(found, wanted)
    return found


MAKERS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masks.causal,
    "a combination": lambda: masks.causal & masks.sliding_window(5) | ~masks.sliding_window(9),
    "a grid": lambda: masks.neighborhood((4, 6), 3),
    "lower right": lambda: masks.causal_lower_right(24, 24),
    "several masks": lambda: masks.per_batch([masks.causal, masks.sliding_window(2)], WHICH),
}
WHICH = torch.tensor([1])


@pytest.mark.parametrize("name", MAKERS)
def test_equal_masks_have_one_description(name: str) -> None:
    one, other = MAKERS[name](), MAKERS[name]()
    assert known(one) == known(other) == known(one)
    assert one.described.description is other.described.description
    assert_right(one)
    assert_right(other)


def test_what_a_description_covers() -> None:
    found = [
        known(m)
        for m in (
            masks.causal,
            masks.sliding_window(5),
            masks.sliding_window(6),
            masks.sliding_window(5, 4),
            masks.causal & masks.sliding_window(5),
            masks.causal | masks.sliding_window(5),
            ~masks.causal,
            masks.causal_lower_right(10, 20),  # the same function as the next, for other sizes
            masks.causal_lower_right(20, 30),
            masks.neighborhood((6, 8), 3),
            masks.neighborhood((6, 8), 3, dilation=2),
            masks.neighborhood((6, 8), 3, stride=2),
            masks.neighborhood((6, 8), 3, is_causal=True),
            masks.neighborhood((6, 8), 3, is_causal=(True, False)),
            masks.on_grid(masks.causal, (4, 6), 3),  # the same function as the first, with a grid
        )
    ]
    assert None not in found and len(set(found)) == len(found)
    assert len({known(None, s) for s in (scores.softcap(2.0), scores.softcap(3.0), scores.distance_decay(2.0), [scores.softcap(2.0)])}) == 4
    assert known(None, []) == known()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "contents": lambda t: t.copy_(torch.arange(24) // 3),
    "memory": lambda t: setattr(t, "data", (torch.arange(24) // 3)),
    "strides": lambda t: setattr(t, "data", (torch.arange(48) // 6)[::2]),
    "dtype": lambda t: setattr(t, "data", (torch.arange(24) // 3).int()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tensors_of_a_described_mask_are_looked_at_every_time(change: str) -> None:
    ids = torch.arange(24) // 6
    mask = masks.document(ids) & masks.causal
    before, key = assert_right(mask), known(mask)
    CHANGES[change](ids)
    assert (known(mask) == key) == (change == "contents")  # for which maps have a key of their own
    after = assert_right(mask)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, tw.attention(X, X, X, mask=masks.document(torch.arange(24) // 3) & masks.causal, backend="reference"))


def test_a_tensor_of_another_shape_is_told() -> None:
    ids = torch.arange(24) // 6
    mask = masks.document(ids)
    assert_right(mask)
    ids.data = torch.arange(30) // 6
    with pytest.raises(tw.InputError, match="which has shape"):
        tw.attention(X, X, X, mask=mask, backend="blocked")


def test_a_tensor_that_becomes_a_parameter_or_lazy_has_no_key() -> None:
    ids = torch.arange(24) // 6
    mask = masks.document(ids)
    assert known(mask) is not None
    ids.data = torch.complex(torch.zeros(24), -(torch.arange(24) // 6).float()).conj().imag.neg().data  # no flag: only memory
    assert known(mask) is not None
    bias = torch.randn(24)
    score = scores.bias(bias)
    assert known(None, score) is not None
    bias.data = torch.complex(torch.zeros(24), torch.ones(24)).conj().imag.data
    assert bias.is_neg() and known(None, score) is None
    held = torch.arange(24) // 6
    other = masks.document(held)
    assert known(other) is not None
    call_cache.forget()
    torch.utils.swap_tensors(held, Parameter(torch.arange(24) // 3, requires_grad=False))
    assert known(other) is None


def test_one_tensor_in_two_places_is_not_two_tensors() -> None:
    ids, other = torch.arange(24) // 6, torch.arange(24) // 4
    twice, both = masks.document(ids), masks.document(ids, other)
    assert known(twice) != known(both)
    assert not torch.allclose(assert_right(twice), assert_right(both))


def test_scores_follow_their_tensors() -> None:
    table = torch.randn(24)
    score = scores.bias(table)
    before = assert_right(None, score)
    table.mul_(3)
    after = assert_right(None, score)
    table.data = -table.data
    last = assert_right(None, score)
    assert not torch.allclose(before, after) and not torch.allclose(after, last)
    key = known(None, score)
    table.requires_grad_()
    assert known(None, score) != key


def test_copies_have_descriptions_of_their_own() -> None:
    ids = torch.arange(24) // 6
    mask = masks.document(ids)
    first = assert_right(mask)
    copied, loaded = copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))
    assert copied.described is None and loaded.described is None
    for other in (copied, loaded):
        torch.testing.assert_close(assert_right(other), first)
    ids.copy_(torch.arange(24) // 3)
    changed = assert_right(mask)
    assert not torch.allclose(changed, first)
    torch.testing.assert_close(assert_right(copied), first)
    torch.testing.assert_close(assert_right(loaded), first)


def test_forgotten_descriptions_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_key, "MAX_DESCRIPTIONS", 2)
    kept = masks.sliding_window(3)
    first = assert_right(kept)
    for n in range(4, 9):
        assert not torch.allclose(assert_right(masks.sliding_window(n)), first)
        assert len(call_key._descriptions) <= 2
    torch.testing.assert_close(assert_right(masks.sliding_window(3)), first)
    torch.testing.assert_close(assert_right(kept), first)


class Settings:
    window = 3


def test_a_fixed_mask_that_cannot_be_described_is_known_by_itself() -> None:
    """What clients mark as fixed may hold anything; it is traced once, and that is what counts."""
    ids, settings = torch.arange(24) // 6, Settings()

    def made() -> Mask:
        return Mask(lambda b, h, q, kv: (q - kv < settings.window) & (ids[q] == ids[kv]), "a client's", fixed=True)

    mask = made()
    assert known(mask) is None  # not traced yet
    first = assert_right(mask)
    assert known(mask) == known(mask) is not None
    settings.window = 1
    other = made()
    assert not torch.allclose(assert_right(other), first) and known(other) != known(mask)
    torch.testing.assert_close(assert_right(mask), first)
    ids.copy_(torch.arange(24) // 3)
    assert not torch.allclose(assert_right(mask), first)


def test_a_function_that_is_not_fixed_is_walked_every_time() -> None:
    window = 3
    mask = masks.causal & (lambda b, h, q, kv: q - kv < window)
    assert not mask.fixed
    first = assert_right(mask)
    window = 1
    assert not torch.allclose(assert_right(mask), first)
    assert mask.described is None


def test_code_that_takes_the_place_of_another_is_not_taken_for_it() -> None:
    """Ids of code objects get reused as soon as the code is gone."""
    for n in range(1, 40):
        scope: dict[str, Any] = {}
        exec(f"def mask(b, h, q, kv):\n    return (q - kv < {n % 7 + 1}) & (q >= kv)", scope)
        found = tw.attention(X, X, X, mask=scope["mask"], backend="blocked")
        distance = torch.arange(24)[:, None] - torch.arange(24)
        wanted = tw.attention(X, X, X, mask=(distance < n % 7 + 1) & (distance >= 0), backend="reference")
        torch.testing.assert_close(found, wanted)
        del scope
        gc.collect()
        if n % 10 == 0:
            call_key._codes.clear()


def test_descriptions_keep_no_tensor_alive() -> None:
    import weakref

    ids = torch.arange(24) // 6
    mask = masks.document(ids)
    assert_right(mask)
    held = weakref.ref(ids)
    del ids, mask
    gc.collect()
    assert held() is None
