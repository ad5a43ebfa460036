"""The fixture of tests on the emulated Hopper GPU."""

import os
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def emulator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An emulated Hopper GPU, with a timing of the test's own. Compiled texts are kept for all tests of this run, and for all of its processes."""
    from tests.support.hopper.emulator import RANDOM, Timing, install
    from tilewise.frontend import call_cache

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated"
    folder.mkdir(exist_ok=True)
    emulator = install(monkeypatch, folder)
    emulator.timing = Timing(RANDOM, zlib.crc32(request.node.name.encode()))
    torch.use_deterministic_algorithms(True)  # what is empty is filled with NaN
    yield emulator
    torch.use_deterministic_algorithms(False)
    call_cache.forget()  # else calls like these would find the emulated kernels again
