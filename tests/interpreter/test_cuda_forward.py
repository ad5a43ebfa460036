"""The CUDA engine's forward on an emulated Hopper GPU (tests/support/hopper): what the kernel computes, held to the error rule, and that it waits for all it
needs, whatever comes late."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.cases import CASES, Case
from tests.support.error_rule import check_forward
from tests.support.hopper.emulator import Emulator, install
from tests.support.triton_misses import refused
from tilewise.engines.cpp import compiler
from tilewise.engines.gluon import NO_GLUON

MISSING = NO_GLUON or (None if compiler.find() else "needs a C++ compiler")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """Compiled texts are kept for all tests of this run."""
    folder = tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)
    return install(monkeypatch, folder)


@pytest.mark.parametrize("case", [case for case in CASES if torch.bfloat16 in case.dtypes], ids=str)
def test_error_rule(emulator: Emulator, case: Case) -> None:
    refused(case, "cpu", torch.bfloat16, "cuda")
    check_forward(case, "cuda", "cpu", torch.bfloat16)
