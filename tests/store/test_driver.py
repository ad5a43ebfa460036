"""How arguments reach a kernel, with a driver that only looks at them."""

import ctypes
from typing import Any

import pytest

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


def test_every_start_has_its_own_addresses_and_the_images_numbers(started: list[list[int]]) -> None:
    kernel = driver.Kernel(b"", "kernel", 0, 4, ("*fp32", "*fp32", "i64", "i64"), 1, [], 0)
    one, two = (kernel.image([], [1, 2], list(numbers)) for numbers in ((30, 40), (50, 60)))
    for image, addresses in ((one, [7, 8]), (one, [9, 10]), (two, [11, 12]), (one, [13, 14]), (two, [15, 16])):
        kernel.launch(1, 0, image, [], addresses)
    assert started == [[7, 8, 30, 40, 0], [9, 10, 30, 40, 0], [11, 12, 50, 60, 0], [13, 14, 30, 40, 0], [15, 16, 50, 60, 0]]


def test_parameters_lie_where_the_driver_looks_for_them() -> None:
    places, size = driver.places_of(["i32", "*fp32", driver.TENSOR_MAP, "fp32", "i64"])
    assert places == [0, 8, 64, 192, 200] and size == 208
