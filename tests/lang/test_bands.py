"""Which masks are bands, and which band."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import masks
from tilewise.lang import Band, band_of, evaluate, trace_mask
from tilewise.lang.bands import FAR

Term = Callable[[Any, Any], Any]


def doubled(x: Any, times: int) -> Any:
    for _ in range(times):
        x = x + x
    return x


def found(mask: Any) -> Band | None:
    return band_of(trace_mask(getattr(mask, "function", mask)))


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (masks.causal, Band(-FAR, 0)),
        (masks.causal_lower_right(10, 30), Band(-FAR, 20)),
        (masks.sliding_window(100), Band(-100, 100)),
        (masks.sliding_window(100, 7), Band(-100, 7)),
        (masks.causal & masks.sliding_window(64), Band(-64, 0)),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 1024), Band(-1023, 0)),
        (lambda b, h, q, kv: (q - kv).abs() <= 3, Band(-3, 3)),
        (lambda b, h, q, kv: (kv - q + 1).abs() < 3, Band(-3, 1)),
        (lambda b, h, q, kv: -q + 5 == -kv, Band(-5, -5)),
        (lambda b, h, q, kv: (kv - q > 2) & (kv - q < 2), Band(3, 1)),  # sees nothing
    ],
)
def test_bands(mask: Any, band: Band) -> None:
    assert found(mask) == band


@pytest.mark.parametrize(
    "mask",
    [
        masks.full,
        masks.prefix_lm(10),
        masks.dilated_window(8, 2),
        masks.document(torch.arange(8)),
        ~masks.causal,
        masks.causal | masks.sliding_window(3),
        lambda b, h, q, kv: q >= kv + h,
        lambda b, h, q, kv: q >= kv + 0.5,
        lambda b, h, q, kv: 2 * q >= kv,
        lambda b, h, q, kv: q >= 3,
        lambda b, h, q, kv: q + kv >= 3,
        lambda b, h, q, kv: q // 4 >= kv // 4,
        lambda b, h, q, kv: q != kv,
        lambda b, h, q, kv: (q - kv).abs() >= 3,
        lambda b, h, q, kv: (q - kv).abs() <= kv,
        lambda b, h, q, kv: torch.tensor(3) >= q - kv,
        lambda b, h, q, kv: kv <= q + sys.maxsize,  # wraps around
        lambda b, h, q, kv: doubled(q, 63) - kv >= doubled(q, 63) - q,
    ],
)
def test_other_masks_are_none(mask: Any) -> None:
    assert found(mask) is None


NUMBERS = st.integers(-20, 20)
HUGE = st.sampled_from([n + d for n in (0, 2**31, 2**62, 2**63 - 40, -(2**31), -(2**62), -(2**63) + 40) for d in (-2, -1, 0, 1, 2)])
TERMS: tuple[Callable[[int], Term], ...] = (
    lambda n: lambda q, kv: q >= kv + n,
    lambda n: lambda q, kv: kv - n > q,
    lambda n: lambda q, kv: n - q <= -kv,
    lambda n: lambda q, kv: kv - q - n < 0,
    lambda n: lambda q, kv: (q - kv + n).abs() < 9,
    lambda n: lambda q, kv: n >= (kv - q).abs(),
    lambda n: lambda q, kv: q + n == kv,
)


OTHER_TERMS: tuple[Callable[[int], Term], ...] = (
    lambda n: lambda q, kv: q + n >= q,
    lambda n: lambda q, kv: 2 * q + n >= kv + q,
    lambda n: lambda q, kv: (q - kv).abs() + n > 4,
    lambda n: lambda q, kv: ~(q >= kv + n),
    lambda n: lambda q, kv: (q - n) % 8 >= kv % 8,
)
drawn_terms = lambda terms, numbers: st.lists(st.tuples(st.sampled_from(terms), numbers), min_size=1, max_size=3)


@given(drawn_terms(TERMS, NUMBERS))
def test_bands_are_found_and_are_what_their_masks_say(drawn: list[tuple[Callable[[int], Term], int]]) -> None:
    assert agrees(drawn)


@given(drawn_terms(TERMS + OTHER_TERMS, NUMBERS | HUGE))
def test_whatever_is_taken_for_a_band_is_one(drawn: list[tuple[Callable[[int], Term], int]]) -> None:
    """Numbers that wrap around, too."""
    agrees(drawn)


def agrees(drawn: list[tuple[Callable[[int], Term], int]]) -> bool:
    """Whether a band was found; an error if it is another."""
    terms = [make(n) for make, n in drawn]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        both = terms[0](q, kv)
        for term in terms[1:]:
            both = both & term(q, kv)
        return both

    call = trace_mask(mask)
    band = band_of(call)
    if band is None:
        return False
    q, kv = torch.arange(30)[:, None], torch.arange(34)[None, :]
    wanted = evaluate(call, {"q": q, "kv": kv})
    for low, high in (band, band.clamped):
        assert torch.equal((low <= kv - q) & (kv - q <= high), torch.as_tensor(wanted).expand(30, 34))
    return True


def test_loads_by_many_indices_are_no_sums() -> None:
    dense = torch.ones(2, 3, 4, 4, dtype=torch.bool)
    assert found(lambda b, h, q, kv: dense[b, h, q, kv] & (q >= kv)) is None
    assert found(lambda b, h, q, kv: dense[0, 0, q, kv]) is None
