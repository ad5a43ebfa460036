"""A GPU that only looks: the GPU engines take tensors of the CPU, kernels are not compiled, and what each launch would be given is recorded."""

import ctypes
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewise.core.map_cache import map_of
from tilewise.engines.gpu import driver, kernel_cache, launch, limits, plan, tile_schedule
from tilewise.engines.gpu.kernel_request import KernelRequest, TmaBlock


class Recorded(NamedTuple):
    """What a kernel is launched with: its name, and its arguments without the addresses of the call's own tensors."""

    kernel: str
    programs: int
    arguments: bytes


class Driver:
    """Takes every call for done, and fills tensor maps with their tensor's address."""

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, *rest: Any) -> int:
        described = bytes(ctypes.string_at(sizes, 8 * rank)) + bytes(ctypes.string_at(strides, 8 * (rank - 1))) + bytes(ctypes.string_at(box, 4 * rank))
        ctypes.memmove(at.value, bytes(8) + described.ljust(driver.MAP_BYTES - 8, b"\0")[: driver.MAP_BYTES - 8], driver.MAP_BYTES)
        return self.cuTensorMapReplaceAddress(at, address)

    def cuTensorMapReplaceAddress(self, at: Any, address: Any) -> int:
        ctypes.c_uint64.from_address(at.value).value = address.value
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given: 0


def stand_in(monkeypatch: pytest.MonkeyPatch, fake: Driver, sms: int, shared: int) -> None:
    """This driver in place of CUDA's: of a Hopper GPU with so many multiprocessors, and so many bytes of shared memory a program. The GPU engines take tensors
    of the CPU; tile maps are made by torch, as there."""
    from tilewise.engines.cuda import nvrtc
    from tilewise.engines.gluon import GluonEngine, refusals
    from tilewise.engines.gluon import tile_schedule as hopper_schedule
    from tilewise.engines.triton import TritonEngine, fitting
    from tilewise.engines.triton import run as triton_run

    driver.map_address_offset.cache_clear()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "shared_limit", lambda device: shared)
    monkeypatch.setattr(launch, "enter_context", lambda device: None)
    for module in (launch, __import__("tilewise.engines.gluon.run", fromlist=["run"])):
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
    for module in (launch, kernel_cache, fitting):
        monkeypatch.setattr(module, "architecture", lambda device: 90)
    for module in (limits, triton_run):
        monkeypatch.setattr(module, "sm_count", lambda device: sms)
    for module in (tile_schedule, hopper_schedule, triton_run):
        monkeypatch.setattr(module, "kernel_map", map_of)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plan, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(GluonEngine, "refuse", lambda self, p: refusals.refuse_problem(p))
    monkeypatch.setattr(nvrtc, "refusal", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(TritonEngine, "refuse", lambda self, p: None)
    monkeypatch.setattr(kernel_cache, "_kernels", {})


def record(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """The launches from now on."""
    from tilewise.engines.gpu.compiler import _describe

    recorded: list[Recorded] = []
    stand_in(monkeypatch, Driver(), sms=132, shared=2**20)

    def load(key: Any, request: KernelRequest, table: Any, device: int) -> driver.Kernel:
        types: list[str] = []
        for place, (_, kind) in enumerate(request.signature):
            _describe(kind, (place,), {}, {}, types)
        boxes = [driver.Box(kind.sizes, 0) for _, kind in request.signature if isinstance(kind, TmaBlock)]
        kernel = driver.Kernel(b"", request.kernel, 0, 4, tuple(types), 0, boxes, device)
        kernel.name = request.kernel  # type: ignore[attr-defined]  # for the record
        kernel_cache._kernels[key] = kernel
        return kernel

    def launched(self: driver.Kernel, programs: int, stream: int, packed: bytes, places: driver.OwnPlaces, addresses: list[int]) -> None:
        memory = bytearray(packed)
        pointers = list(range(places.pointers.start, places.pointers.stop))
        for word, _ in zip([*places.maps, *pointers], addresses, strict=True):
            memory[8 * word : 8 * word + 8] = bytes(8)
        recorded.append(Recorded(self.name, programs, bytes(memory)))  # type: ignore[attr-defined]  # set above

    monkeypatch.setattr(kernel_cache, "load", load)
    monkeypatch.setattr(driver.Kernel, "launch", launched)
    return recorded
