"""WeakCache: values found by a key and by the identity of the objects they were made from."""

import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from tilewise.core.weak_cache import WeakCache


def test_an_entry_is_found_by_its_key_and_its_objects() -> None:
    kept: WeakCache[str] = WeakCache(4)
    a, b = torch.zeros(1), torch.zeros(1)
    kept.keep("key", [a], "of a")
    assert kept.find("key", [a]) == "of a"
    assert kept.find("key", [b]) is None and kept.find("other", [a]) is None
    kept.keep("key", [b], "of b")
    assert kept.find("key", [b]) == "of b" and kept.find("key", [a]) is None


def test_an_entry_goes_with_what_it_was_made_of() -> None:
    kept: WeakCache[torch.Tensor] = WeakCache(4)
    a, other = torch.zeros(1), torch.zeros(1)
    kept.keep("a", [a], torch.zeros(8))
    del a
    gc.collect()
    kept.keep("other", [other], torch.zeros(8))  # the next one sweeps
    assert len(kept) == 1


def test_an_entry_that_took_a_lost_ones_place_stays() -> None:
    kept: WeakCache[int] = WeakCache(4)
    a, b = torch.zeros(1), torch.zeros(1)
    kept.keep("key", [a], 1)
    kept.keep("key", [b], 2)
    del a
    gc.collect()
    kept.keep("other", [b], 3)
    assert kept.find("key", [b]) == 2


def test_the_one_not_used_for_longest_goes_first() -> None:
    kept: WeakCache[int] = WeakCache(2)
    for n in (1, 2):
        kept.keep(n, [], n)
    assert kept.find(1, []) == 1
    kept.keep(3, [], 3)
    assert [kept.find(n, []) for n in (1, 2, 3)] == [1, None, 3]


def test_many_threads() -> None:
    kept: WeakCache[int] = WeakCache(8)

    def work(seed: int) -> None:
        for n in range(300):
            key, thing = (seed * n) % 20, torch.zeros(1)
            kept.keep(key, [thing], n)
            assert kept.find(key, [thing]) in (n, None)  # another thread may have put its own there

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 5)))
    assert len(kept) <= 8
