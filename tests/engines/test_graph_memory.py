"""What happens to a call while inductor warms up and captures, without a GPU: tests/gpu/test_compiled.py has the rest."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks
from tilewise.core.problem import Options, Problem, make_problem
from tilewise.core.weak_cache import WeakCache
from tilewise.engines.gpu import graph_memory, launch
from tilewise.engines.gpu.device_map import device_maps


def problem(mask: Any = None, device: str = "meta") -> Problem:
    q, k, v = (torch.zeros(1, 2, 64, 16, device=device) for _ in range(3))
    return make_problem(q, k, v, mask, None, Options())[0]


def ids(device: str = "meta") -> Tensor:
    return torch.zeros(64, dtype=torch.int64, device=device)


@pytest.mark.parametrize("on_device", [True, False])
def test_what_may_be_captured(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_memory, "is_made_on_device", lambda p: on_device)
    assert graph_memory.is_capturable(problem())
    assert graph_memory.is_capturable(problem(masks.causal))
    assert graph_memory.is_capturable(problem(masks.document(ids()))) is on_device
    assert not graph_memory.is_capturable(problem(tw.tile_map(masks.causal, q_len=64, kv_len=64), "cpu"))


def test_a_call_in_a_thread_of_its_own() -> None:
    found = graph_memory.in_thread(lambda: (threading.current_thread(), torch.is_grad_enabled()))
    assert found[0] is not threading.current_thread() and found[1] is False

    def fails() -> tuple[Tensor]:
        raise tw.InputError("this way")

    with pytest.raises(tw.InputError, match="this way"):
        graph_memory.in_thread(fails)


def test_results_are_copied_as_they_lie() -> None:
    turned, listed = torch.randn(2, 3, 4, 5).transpose(1, 2), torch.randn(3)
    copy, (inner,) = graph_memory._copied((turned, [listed]))
    assert torch.equal(copy, turned) and copy.stride() == turned.stride() and copy.data_ptr() != turned.data_ptr()
    assert torch.equal(inner, listed) and inner.data_ptr() != listed.data_ptr()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(graph_memory, "current_stream", lambda device: 7)
    monkeypatch.setattr(graph_memory, "is_capturing", lambda stream: False)
    monkeypatch.setattr(graph_memory, "GpuPlan", lambda p: SimpleNamespace())
    return 7


def on_gpu(given: Problem) -> Any:
    """The problem, as if it were on a GPU."""
    return SimpleNamespace(device=torch.device("cuda", 0), mask=given.mask)


def run(p: Any, call: Any) -> Any:
    return graph_memory.run(p.device, lambda: p, call)


@pytest.mark.parametrize("used", [7, 8])
def test_only_inductors_own_stream_is_its_warm_up(used: int, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=used))
    monkeypatch.setitem(sys.modules, graph_memory.TREES, SimpleNamespace(get_manager=lambda device, create_if_none_exists: manager))
    monkeypatch.setattr(graph_memory, "in_ordinary_memory", lambda call, device: graph_memory.in_thread(call))
    made: list[Any] = []

    def call(plan: Any) -> tuple[Tensor]:
        assert plan is None
        made.append((threading.current_thread(), torch.zeros(2)))
        return (made[0][1],)

    (found,) = run(on_gpu(problem()), call)
    thread, result = made[0]
    assert (thread is threading.current_thread(), found is result) == ((False, False) if used == stream else (True, True))


def test_without_inductor_nobody_warms_up(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, graph_memory.TREES, raising=False)
    assert not graph_memory.is_warming_up(0, stream)


@pytest.mark.parametrize("loads", [True, False])
def test_a_capture_leaves_nothing_in_the_graphs_memory(loads: bool, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of masks that load are the graph's; those of others were made before, and must outlive it. The plan is not one that others use."""
    monkeypatch.setattr(graph_memory, "is_capturing", lambda stream: True)
    monkeypatch.setattr(launch, "is_capturing", lambda stream: True)
    monkeypatch.setattr(graph_memory, "is_made_on_device", lambda p: bool(p.mask.captures))
    monkeypatch.setattr(launch, "_captured", [])
    monkeypatch.setattr(device_maps, "_captured", (0, device_maps._kept))
    plans: list[Any] = []

    def call(plan: Any) -> tuple[str]:
        plans.append(plan)
        launch.BoundLaunch._used_on(SimpleNamespace(_kept="a schedule"), 7)  # type: ignore[arg-type]  # all of it that is used there
        device_maps._captured = (12, WeakCache(4))
        return ("done",)

    p = on_gpu(problem(masks.document(ids()) if loads else masks.causal))
    for _ in range(2):
        assert run(p, call) == ("done",)
    assert launch._captured == ([] if loads else ["a schedule"] * 2)
    assert (device_maps._captured[0] == 0) is loads
    assert plans[0] is not plans[1] and None not in plans


def test_a_capture_that_fails_leaves_nothing_either(stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_memory, "is_capturing", lambda stream: True)
    monkeypatch.setattr(graph_memory, "is_made_on_device", lambda p: True)
    monkeypatch.setattr(device_maps, "_captured", (12, WeakCache(4)))

    def fails(plan: Any) -> tuple[str]:
        raise tw.InputError("this way")

    with pytest.raises(tw.InputError, match="this way"):
        run(on_gpu(problem(masks.document(ids()))), fails)
    assert device_maps._captured[0] == 0 and not launch._graph.owns_schedules
