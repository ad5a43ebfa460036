"""Whole-model benchmarks on a GPU: memory is counted, and a process whose CUDA has died knows it."""

import subprocess
import sys

import pytest
import torch

from tilewise.integrations import transformers
from tilewise.tools.bench_models import measure, processes
from tilewise.tools.bench_models.processes import Settings
from tilewise.tools.bench_models.rows import STEP, Job
from tilewise.tools.bench_models.workload import Scale

pytest.importorskip("transformers")

DEAD = """
import torch
from tilewise.tools.bench_models.measure import usable
device = torch.device("cuda")
assert usable(device)
try:
    torch.zeros(4, device=device)[torch.full((4,), 9, device=device)].sum().item()
except RuntimeError:
    pass
assert not usable(device)
print("knows it")
"""


def test_a_tiny_model() -> None:
    events: list[dict[str, object]] = []
    measure.run([Job("llama-packed", STEP, ["sdpa", "tilewise"])], Scale(True, torch.device("cuda")), 2, events.append)
    transformers.unregister()
    first = [event for event in events if event["event"] == "first"]
    assert [event["implementation"] for event in first] == ["sdpa", "tilewise"]
    assert all(isinstance(event["gib"], float) and event["gib"] > 0 for event in first) and float(str(first[1]["off"])) < 0.05


def test_a_process_of_its_own() -> None:
    found = processes.measure([Job("host-padded", STEP, ["sdpa", "tilewise"])], Settings(True, "cuda", rounds=1), lambda event: None)
    assert len(found.results) == 2 and all(result.failed is None and len(result.times) == 1 for result in found.results.values())
    assert torch.cuda.get_device_name() == found.device


def test_cuda_that_has_died_is_noticed() -> None:
    ran = subprocess.run([sys.executable, "-c", DEAD], capture_output=True, text=True, timeout=300, check=False)
    assert "knows it" in ran.stdout, ran.stderr[-2000:]
