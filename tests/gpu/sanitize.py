"""A small part of the GPU tests under NVIDIA's compute-sanitizer, which finds accesses outside of what was allocated:

    python tests/gpu/sanitize.py [--tool memcheck] [pytest options]

torch's caching allocator is off meanwhile: in its large blocks, reading past a tensor's end would go unnoticed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDERS = ("bin", "compute-sanitizer")  # of a CUDA toolkit
MISSING = (
    "compute-sanitizer was not found on PATH, nor under CUDA_HOME or /usr/local/cuda. It comes with the CUDA toolkit: "
    "install it (on Ubuntu: apt install cuda-sanitizer-<version>), or set CUDA_HOME."
)
# Tails, strides, maps, loads from captures, gradients that are added up, decoding, rows with nothing: each in one 16-bit dtype and in float32.
CASES = (
    "length 257",
    "strides: sliced",
    "strides: reversed",
    "documents across",
    "dense q kv",
    "bare tiles as large as the engine's",
    "relative bias",
    "negative indices",
    "several loads of one tensor",
    "learned, gqa, window, sinks",
    "dropout, causal, lse",
    "one query",
    "no keys",
    "rows with nothing",
    "head dim 257",
)
DTYPES = ("bfloat16", "float32")
ROOT = Path(__file__).resolve().parents[2]


def tests() -> list[str]:
    return [f"tests/gpu/test_engines.py::test_triton[{case}-{dtype}]" for case in CASES for dtype in DTYPES]


def find_sanitizer() -> str | None:
    toolkits = [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *[str(t / f) for t in toolkits for f in FOLDERS]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    options, rest = parser.parse_known_args()
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(MISSING, file=sys.stderr)
        return 2
    command = [sanitizer, "--tool", options.tool, "--error-exitcode", "1", "--target-processes", "all", sys.executable, "-m", "pytest", *tests(), *rest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
