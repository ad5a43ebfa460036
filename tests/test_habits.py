"""What keeps the repository in one style."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_pre_commit_has_the_ruff_that_development_has() -> None:
    pinned = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())) == set(pinned)


def test_no_line_is_kept_from_the_formatter() -> None:
    marks = [
        str(path)
        for folder in ("src", "tests", "benchmarks", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
        if "# fmt" + ":" in path.read_text()
    ]
    assert not marks


@pytest.mark.parametrize(("subject", "accepted"), [("x" * 71, True), ("x" * 72, False)])
def test_long_commit_subjects_are_refused(subject: str, accepted: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\n{'y' * 100}\n")
    ran = subprocess.run([sys.executable, ROOT / ".ci" / "commit_subject.py", message], capture_output=True, text=True, check=False)
    assert (ran.returncode == 0) == accepted and ("72" in ran.stderr) != accepted
