"""The kernels' own test, compiled with sanitizers: memory, undefined behaviour, and races between threads."""

import os
import platform
import subprocess
from pathlib import Path

import pytest

from tests.support.kernel_program import compile_kernel_test
from tilewise.engines.cpp import compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FLAGS = ("-O1", "-g1", "-fno-sanitize-recover=all")  # -g1: lines, for reports
TRACED = {"address,undefined": ("float", "bfloat", "half", "double"), "thread": ("float",)}


@pytest.mark.parametrize(("sanitizer", "element"), [(s, e) for s, elements in TRACED.items() for e in elements])
def test_kernels_under_sanitizers(sanitizer: str, element: str, tmp_path: Path) -> None:
    check("native", sanitizer, element, tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the other tests have narrow vectors")
def test_vectors_of_two_doubles(tmp_path: Path) -> None:
    """The narrowest there are: what is unrolled by four must not write four."""
    check("x86-64-v2", "address,undefined", "double", tmp_path)


def check(target: str, sanitizer: str, element: str, folder: Path) -> None:
    program, path = folder / "kernel_test", compiler.find()
    assert path is not None
    built = compile_kernel_test((path, *FLAGS, f"-march={target}", f"-fsanitize={sanitizer}"), element, program)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"the sanitizer's library is not installed: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"ASAN_OPTIONS": "detect_leaks=1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
