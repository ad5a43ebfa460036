"""Attention of sequences that several processes share, beside one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests.distributed.spawned import spawn
from tests.support.run_and_leave import TWO_PROCESSES

pytestmark = pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo")
PROCESSES = "tests.distributed.processes"


def test_shared_cases_in_three_processes() -> None:
    spawn(PROCESSES, "check_shared_cases", 3, "2")


def test_generated_masks_and_scores_in_three_processes() -> None:
    spawn(PROCESSES, "check_generated_cases", 3, "40")


@pytest.mark.parametrize(
    ("ranks", "length", "step", "ways"),
    [
        (2, 700, 1, ("needed", "gather", "heads", "contiguous", "stages")),
        (3, 601, 2, ("needed", "gather in stages")),
        (4, 1000, 1, ("auto", "mesh", "heads")),  # heads: two ranks to a key head
        (8, 700, 3, ("needed", "pairs")),  # ranks without tokens
    ],
    ids=str,
)
def test_long_sequences(ranks: int, length: int, step: int, ways: tuple[str, ...]) -> None:
    spawn(PROCESSES, "check_long_cases", ranks, str(length), str(step), *ways)


def test_whatever_goes_wrong_on_one_rank_is_raised_by_all() -> None:
    spawn("tests.distributed.faults", "check_faults", 3)


def test_forwards_have_the_bits_of_one_process() -> None:
    spawn(PROCESSES, "check_bits", 3)


def test_hot_tiles() -> None:
    spawn(PROCESSES, "check_hot_tiles", 8)


def test_groups() -> None:
    spawn(PROCESSES, "check_groups", 4)


def test_dropout_is_the_same_when_computed_again() -> None:
    spawn(PROCESSES, "check_dropout_computed_again", 2)


def test_what_users_build_on() -> None:
    spawn(PROCESSES, "check_uses", 2)


def test_the_guide(tmp_path: Path) -> None:
    """The script of docs/distributed.md, as a user would start it."""
    guide = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    script = tmp_path / "share.py"
    script.write_text(guide.split("```python\n")[1].split("```")[0])
    launch = [sys.executable, *TWO_PROCESSES, str(script)]
    ran = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert "context parallelism of 5,000 tokens over 2 ranks" in ran.stdout
