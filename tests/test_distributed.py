"""Learned biases in several processes, as the example has them: its own comparison with one process must hold."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests.support.run_and_leave import TWO_PROCESSES

EXAMPLE = Path(__file__).parents[1] / "examples" / "learned_biases.py"


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo")
def test_learned_biases_with_ddp_and_fsdp() -> None:
    launch = [sys.executable, *TWO_PROCESSES, str(EXAMPLE)]
    ran = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    for name in ("DDP", "FSDP"):
        assert f"{name}: the gradients of 8 parameters are those of one process, 0.bias.table, 0.sinks.logits" in ran.stdout
