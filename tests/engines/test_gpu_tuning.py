"""Trials of configurations, on a GPU that only looks."""

import pytest
import torch

import tilewise as tw
from tests.support.recorded_launches import record
from tilewise.engines.gpu import device_map, plan, structure, tuning
from tilewise.engines.triton import fitting, run

IDS = torch.arange(256) // 64


def call() -> None:
    q = torch.randn(1, 2, 256, 64, dtype=torch.float16)
    with tuning.autotuned(), torch.no_grad():
        tw.attention(q, q, q, mask=lambda b, h, i, j: IDS[i] == IDS[j], backend="triton")


@pytest.fixture
def tried(untuned: None, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long every trial took."""
    times: list[float] = []
    record(monkeypatch)
    monkeypatch.setattr(structure, "_prepared", {})
    for module in (device_map, structure, plan, run, fitting):
        monkeypatch.setattr(module, "is_made_on_device", lambda p: p.mask is not None and bool(p.mask.captures))

    def milliseconds(start: object) -> float:
        assert callable(start)
        start()
        times.append(float(len(times)))
        return times[-1]

    monkeypatch.setattr(tuning, "milliseconds", milliseconds)
    return times


def test_masks_whose_maps_are_made_on_the_device_are_tuned(tried: list[float]) -> None:
    call()
    assert len(tried) > 3 and len(tuning._found) == 1


def test_nothing_is_kept_if_nothing_ran(tried: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(start: object) -> float:
        raise RuntimeError("out of something")

    monkeypatch.setattr(tuning, "milliseconds", fails)
    call()
    assert not tuning._found
