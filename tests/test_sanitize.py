"""tests/gpu/sanitize.py where there is no GPU: what it would run exists, and it says what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import sanitize
from tests.gpu.test_engines import TYPED


def test_every_test_it_would_run_exists() -> None:
    known = {f"tests/gpu/test_engines.py::test_triton[{p.id}]" for p in TYPED}
    assert set(sanitize.tests()) <= known


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    assert sanitize.main() == 2
    assert "compute-sanitizer was not found" in capsys.readouterr().err


def test_the_tool_runs_the_tests_without_torchs_cache(tmp_path: Path) -> None:
    """A stand-in that writes down what it is given, and fails."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > {tmp_path}/given\nexit 1\n')
    tool.chmod(0o755)
    script = Path(sanitize.__file__)
    done = subprocess.run([sys.executable, str(script), "-x"], env={"PATH": str(tmp_path)}, check=False, timeout=60)
    given = (tmp_path / "given").read_text()
    assert done.returncode == 1
    assert given.startswith("1 --tool memcheck --error-exitcode 1 ") and "test_triton[length 257-float32]" in given and given.endswith(" -x\n")
