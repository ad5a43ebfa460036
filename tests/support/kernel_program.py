"""The kernels' own test (tests/kernel/kernel_test.cpp), compiled."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tilewise.engines.cpp import compiler

SOURCE = Path(__file__).parent.parent / "kernel" / "kernel_test.cpp"
FLAGS = ("-std=c++17", "-fwrapv", "-fopenmp-simd", "-pthread", "-I", str(compiler.KERNELS))


def compile_kernel_test(words: Sequence[str], element: str, program: Path) -> subprocess.CompletedProcess[str]:
    """`words` are the compiler and the flags that make a difference."""
    command = [*words, *FLAGS, f"-DELEMENT={element}", str(SOURCE), "-o", str(program)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
