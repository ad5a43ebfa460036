"""How arguments reach a kernel, with a driver that only looks at them."""

import ctypes
from functools import partial
from typing import Any

import pytest

from tilewise.engines.gpu import driver


class Driver:
    """Takes every call for done, and keeps what kernels are launched with."""

    def __init__(self) -> None:
        self.started: list[list[int]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        assert (config._obj.programs, config._obj.grid_y, config._obj.grid_z, config._obj.stream) == (1, 1, 1, 9)
        self.started.append([ctypes.c_int64.from_address(place).value for place in parameters])
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
    own = [[71, 72], [72, 73], [73, 71], [71, 71], [73, 71]]
    for packed, addresses in zip((one, one, two, two, one), own, strict=True):
        kernel.launch(1, 9, packed, places, addresses)
    numbers = [[30, 5, 40], [30, 5, 40], [50, 6, 60], [50, 6, 60], [30, 5, 40]]
    assert started == [[*addresses, *rest, 0] for addresses, rest in zip(own, numbers, strict=True)]
    assert places == ((), slice(0, 2)) and static == [24]


def test_a_launch_config_is_laid_out_as_the_driver_reads_it() -> None:
    """CUlaunchConfig of cuda.h, in 64 bits."""
    fields = {name: getattr(driver.LaunchConfig, name).offset for name, _ in driver.LaunchConfig._fields_}
    assert list(fields.values()) == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48] and ctypes.sizeof(driver.LaunchConfig) == 56


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
