"""How arguments reach a kernel, with a driver that only looks at them."""

import ctypes
from functools import partial
from typing import Any

import pytest
import torch

from tilewise.engines.gpu import driver


class Driver:
    """Takes every call for done, and keeps what kernels are launched with."""

    def __init__(self) -> None:
        self.started: list[list[int]] = []

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:
        self.started.append([ctypes.c_int64.from_address(place).value for place in given[-2]])
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    fake = Driver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "shared_limit", lambda device: 2**20)
    return fake.started


def test_every_start_has_its_own_addresses_and_its_arguments_numbers(started: list[list[int]]) -> None:
    kernel = driver.Kernel(b"", "kernel", 0, 4, ("*fp32", "*fp32", "i64", "*i32", "i64"), 1, [], 0)
    places, static = kernel.address_places(2)
    one, two = (kernel.packed([], [1, 2], list(numbers)) for numbers in ((30, 5, 40), (50, 6, 60)))
    a, b, c = (torch.zeros(1) for _ in range(3))
    at = {name: t.data_ptr() for name, t in (("a", a), ("b", b), ("c", c))}
    words = [place // 8 for place in places]
    for packed, tensors in ((one, [a, b]), (one, [b.data_ptr(), c]), (two, [c, a]), (two, [a, None]), (one, [c, a])):
        kernel.launch(1, 0, packed, words, tensors)
    own = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "a"), ("c", "a")]
    numbers = [[30, 5, 40], [30, 5, 40], [50, 6, 60], [50, 6, 60], [30, 5, 40]]
    assert started == [[*[at[name] for name in names], *rest, 0] for names, rest in zip(own, numbers, strict=True)]
    assert static == [24]


def test_the_address_in_a_tensor_map_is_found_by_asking_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Maps:
        """Tensor maps with the address in one place, or in one that moves when it is set."""

        def __init__(self, offset: int, moved: int) -> None:
            self.offset, self.moved = offset, moved

        def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
            ctypes.memset(at.value, 7, 128)
            ctypes.c_uint64.from_address(at.value + self.offset).value = address.value
            return 0

        def cuTensorMapReplaceAddress(self, at: Any, address: Any) -> int:
            ctypes.c_uint64.from_address(at.value + self.moved).value = address.value
            return 0

    for offset, moved, found in ((0, 0, 0), (24, 24, 24), (0, 8, None), (4, 4, None)):
        monkeypatch.setattr(driver, "library", partial(Maps, offset, moved))
        driver.map_address_offset.cache_clear()
        assert driver.map_address_offset() == found
    driver.map_address_offset.cache_clear()


def test_parameters_lie_where_the_driver_looks_for_them() -> None:
    places, size = driver.places_of(["i32", "*fp32", driver.TENSOR_MAP, "fp32", "i64"])
    assert places == [0, 8, 64, 192, 200] and size == 208
