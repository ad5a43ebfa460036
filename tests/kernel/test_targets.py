"""Compilers and processors other than this machine's own, as far as it has tools for them: cross compilers, and an emulator that runs what they make.

apt install clang g++-aarch64-linux-gnu qemu-user
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.kernel_program import compile_kernel_test
from tilewise.engines.cpp import compiler

TESTS = Path(__file__).parent.parent


class Target(NamedTuple):
    words: tuple[str, ...]  # the compiler, and what it is told
    elements: tuple[str, ...]
    feature: str = ""  # of the processor, by Linux's name
    emulator: tuple[str, ...] = ()


ARM = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu")
TARGETS = {
    "AVX2": Target(("g++", "-march=haswell"), ("float", "half"), "avx2"),
    "SSE": Target(("g++", "-march=x86-64-v2"), ("bfloat", "double"), "sse4_2"),
    "clang": Target(("clang++", "-march=native"), ("float", "double")),
    "clang, AVX2": Target(("clang++", "-march=haswell"), ("bfloat",), "avx2"),
    "NEON": Target(("aarch64-linux-gnu-g++", "-march=armv8-a"), ("float", "double"), emulator=(*ARM, "cortex-a57")),
    "SVE": Target(("aarch64-linux-gnu-g++", "-march=armv8.2-a+sve"), ("half",), emulator=(*ARM, "max")),
    "clang, NEON": Target(("clang++", "--target=aarch64-linux-gnu", "-march=armv8-a"), ("bfloat",), emulator=(*ARM, "cortex-a57")),
}


def skip_unless(feature: str, *programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if feature and feature not in compiler.processor().split():
        pytest.skip(f"this processor has no {feature}")


@pytest.mark.parametrize(("name", "element"), [(name, element) for name, target in TARGETS.items() for element in target.elements])
def test_kernels_for(name: str, element: str, tmp_path: Path) -> None:
    target, program = TARGETS[name], tmp_path / "kernel_test"
    skip_unless(target.feature, target.words[0], *target.emulator[:1])
    if target.emulator and not Path(target.emulator[2]).exists():
        pytest.skip(f"the libraries to run it with are not installed: {target.emulator[2]}")
    built = compile_kernel_test((*target.words, "-O2", "-ffp-contract=fast"), element, program)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([*target.emulator, str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(("name", "march", "feature"), [("g++", "haswell", "avx2"), ("clang++", "", "")], ids=["AVX2", "clang"])
def test_the_engine_for(name: str, march: str, feature: str) -> None:
    """Kernels and generated functions: the engine's own tests in float32, in a process that compiles in another way."""
    skip_unless(feature, name)
    files = [str(TESTS / "engines" / file) for file in ("test_cpp.py", "test_cpp_programs.py")]
    environment = os.environ | {compiler.COMPILER: name, compiler.TARGET: march}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "float32 or generated", *files]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, env=environment, cwd=TESTS.parent)
    assert ran.returncode == 0, ran.stdout[-5000:]
