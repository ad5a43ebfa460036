"""Triton's interpreter runs kernels on the CPU. It must be chosen before Triton is imported, so these tests have a process of their own:

TRITON_INTERPRET=1 python -m pytest tests/interpreter
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def patch_the_language_once() -> None:
    """The interpreter walks through all of triton.language at every call of a device function, a third of its time; what the kernel began with still holds."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, nothing_to_undo = interpreter._patch_lang, interpreter._LangPatchScope

    def patch_unless_patched(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(member) for language in languages for member in (language.load, language.tensor.to)):
            return nothing_to_undo()
        return patch(fn)

    interpreter._patch_lang = patch_unless_patched


if INTERPRETED:
    with suppress(ImportError, AttributeError):  # no Triton, or one that has no such functions
        patch_the_language_once()


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
