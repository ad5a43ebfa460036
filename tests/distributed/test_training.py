"""Models of transformers on sequences that several processes share: losses and gradients are those of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.distributed.spawned import spawn
from tests.support.run_and_leave import TWO_PROCESSES

pytest.importorskip("transformers", reason="transformers is not installed; it comes with the dev extra")
pytestmark = pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo")
TRAINING = "tests.distributed.training"
TRAINER = Path(__file__).parents[2] / "examples" / "context_parallel" / "trainer.py"


def test_two_processes_train_as_one() -> None:
    """Both models: DDP, FSDP, checkpoints, torch.compile, autocast; the example; what users may get wrong."""
    spawn(TRAINING, "check_two_processes", 2)


def test_windows_and_sinks_in_three_processes() -> None:
    spawn(TRAINING, "check_passes", 3, "gpt-oss", "ddp", "fsdp", "checkpoints")


def test_the_trainer_shares_batches() -> None:
    """Two processes that share each sequence, as one that has all of it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, str(TRAINER)], [sys.executable, *TWO_PROCESSES, str(TRAINER), "--share", "2"]]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for command in commands]
    printed: list[Any] = []
    for process in running:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        printed.append(json.loads(out.splitlines()[-1]))
    alone, shared = printed
    assert len(shared["losses"]) == 3 and shared["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert shared["norms"] == pytest.approx(alone["norms"], rel=1e-5)
