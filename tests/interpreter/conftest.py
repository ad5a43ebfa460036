"""Triton's interpreter runs kernels on the CPU. It must be chosen before Triton is imported, so these tests have a process of their own:

TRITON_INTERPRET=1 python -m pytest tests/interpreter
"""

import os
from contextlib import suppress
from typing import Any

from tests.support.hopper.fixture import emulator as emulator

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
