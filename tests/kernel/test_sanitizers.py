"""The kernels' own test, compiled with sanitizers: memory, undefined behaviour, and races between threads."""

import os
import subprocess
from pathlib import Path

import pytest

from tilewise.engines.cpp import compiler, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

FLAGS = ("-std=c++17", "-O1", "-g", "-fwrapv", "-fopenmp-simd", "-fno-sanitize-recover=all", "-pthread", "-march=native")
TRACED = {"address,undefined": ("float", "bfloat", "half", "double"), "thread": ("float",)}


@pytest.mark.parametrize(("sanitizer", "element"), [(s, e) for s, elements in TRACED.items() for e in elements])
def test_kernels_under_sanitizers(sanitizer: str, element: str, tmp_path: Path) -> None:
    program, path = tmp_path / "kernel_test", compiler.find()
    assert path is not None
    source = Path(__file__).parent / "kernel_test.cpp"
    words = [path, *FLAGS, f"-fsanitize={sanitizer}", f"-DELEMENT={element}", "-I", str(compiler.KERNELS), str(source), "-o", str(program)]
    built = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"the sanitizer's library is not installed: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"ASAN_OPTIONS": "detect_leaks=1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
