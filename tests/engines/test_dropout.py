"""Dropout's random numbers: Philox as published, the documented grouping, and the same decisions under any slicing."""

import pytest
import torch
from torch import Tensor

from tilewise.engines.dropout import dropout_keep, keep_scale, philox, threshold

# Random123's known answers for philox4x32-10: counter, key, result.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key[0] | key[1] << 32)) == result


def philox_by_hand(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """In Python's integers, which do not overflow."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & ONES, seed >> 32 & ONES
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & ONES, first >> 32 ^ c3 ^ k1, first & ONES
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return c0, c1, c2, c3


def kept_by_hand(p: float, seed: int, b: int, h: int, i: int, j: int) -> bool:
    """The grouping as it is documented."""
    row, column = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
    word = philox_by_hand((column, row, h, b), seed)[2 * (i // 8 % 2) + j // 8 % 2]
    return (word >> 16 * (j % 2) & 0xFFFF) >= round(p * 65536)


def indices(*sizes: int) -> list[Tensor]:
    return [torch.arange(n) for n in sizes]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_grouping_is_the_documented_one(p: float) -> None:
    seed = 0x0123456789ABCDEF
    found = dropout_keep(p, seed, *indices(2, 3, 19, 37))
    for b, h, i, j in torch.cartesian_prod(*indices(2, 3, 19, 37)).tolist():
        assert bool(found[b, h, i, j]) == kept_by_hand(p, seed, b, h, i, j)


def test_eight_elements_share_one_word_group() -> None:
    """Rows i and i + 8, columns j, j + 1, j + 8 and j + 9 take the eight 16-bit halves of one Philox result."""
    halves = [half for word in philox_by_hand((0, 0, 0, 0), 5) for half in (word & 0xFFFF, word >> 16)]
    found = [(0, 0), (0, 1), (0, 8), (0, 9), (8, 0), (8, 1), (8, 8), (8, 9)]
    for (i, j), half in zip(found, halves, strict=True):
        for p in (half / 65536, (half + 1) / 65536):  # the thresholds just at and just above the half
            assert bool(dropout_keep(p, 5, *indices(1, 1, 16, 16))[0, 0, i, j]) == (half >= round(p * 65536))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_any_slicing_gives_the_same_decisions(seed: int) -> None:
    whole = dropout_keep(0.4, seed, *indices(2, 3, 70, 90))
    generator = torch.Generator().manual_seed(seed % 1000)
    for _ in range(20):
        picks = [torch.randperm(n, generator=generator)[: 1 + int(torch.randint(0, n, (), generator=generator))] for n in (2, 3, 70, 90)]
        b, h, q, kv = picks
        assert torch.equal(dropout_keep(0.4, seed, b, h, q, kv), whole[b][:, h][:, :, q][..., kv])


def test_far_positions() -> None:
    """Nothing overflows at the largest positions a counter holds."""
    far = torch.tensor([2**31 - 1, 2**31, 2**32 - 2])
    found = dropout_keep(0.5, 7, torch.tensor([0, 70000]), torch.tensor([0, 255]), far, far)
    for n, b in enumerate((0, 70000)):
        for m, h in enumerate((0, 255)):
            for r, i in enumerate(far.tolist()):
                for c, j in enumerate(far.tolist()):
                    assert bool(found[n, m, r, c]) == kept_by_hand(0.5, 7, b, h, i, j)


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_are_independent(axis: int) -> None:
    """Agreement between neighbours along every axis is that of fair coins."""
    found = dropout_keep(0.5, 3, *indices(8, 8, 64, 64))
    one, other = found.narrow(axis, 0, found.shape[axis] - 1), found.narrow(axis, 1, found.shape[axis] - 1)
    agree, count = (one == other).double().mean().item(), one.numel()
    assert abs(agree - 0.5) < 5 * 0.5 / count**0.5


def test_threshold_and_scale() -> None:
    assert threshold(0.0) == 0 and threshold(1.0) == 65536 and threshold(0.5) == 32768
    assert keep_scale(0.0) == 1.0 and keep_scale(0.5) == 2.0 and keep_scale(1.0) == 0.0
    assert keep_scale(0.1) == pytest.approx(1 / 0.9, rel=1e-4)
    assert dropout_keep(0.0, 1, *indices(1, 2, 32, 32)).all() and not dropout_keep(1.0, 1, *indices(1, 2, 32, 32)).any()
