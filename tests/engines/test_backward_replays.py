"""The second backward of calls that are alike is replayed: the same launches with its own tensors, and no problem made for it. What is not like the first
one goes through the engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.engines.test_rebinding import LENGTH, documents, padding, windows
from tests.support.recorded_launches import Recorded, record
from tilewise import masks
from tilewise.engines.gluon import NO_GLUON
from tilewise.engines.gpu import bwd_chunks, driver, structure
from tilewise.engines.gpu.engine import GpuEngine
from tilewise.engines.gpu.plan import GpuPlan
from tilewise.frontend import call_cache

pytestmark = pytest.mark.skipif(NO_GLUON is not None, reason=str(NO_GLUON))

CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "nothing": lambda seed: {},
    "causal": lambda seed: {"mask": masks.causal},
    "documents": documents,
    "padding": padding,
    "windows": windows,
}
HOPPER = [(backend, case) for backend in ("cuda", "gluon") for case in CASES]


class Watch:
    """What is launched, with which addresses, and how many backwards were not replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = record(monkeypatch)
        self.addresses: list[list[int]] = []
        self.gone_through = 0
        launch, backward = driver.Kernel.launch, GpuEngine.backward

        def launched(kernel: Any, programs: int, stream: int, packed: bytes, places: Any, addresses: list[int]) -> None:
            self.addresses.append(addresses)
            launch(kernel, programs, stream, packed, places, addresses)

        def through(*given: Any) -> Any:
            self.gone_through += 1
            return backward(*given)

        monkeypatch.setattr(driver.Kernel, "launch", launched)
        monkeypatch.setattr(GpuEngine, "backward", through)
        monkeypatch.setattr(structure, "_prepared", {})
        call_cache.forget()

    def forget(self) -> None:
        self.launches.clear()
        self.addresses.clear()
        self.gone_through = 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def inputs() -> list[Tensor]:
    return [torch.zeros(2, heads, LENGTH, 64, dtype=torch.bfloat16).requires_grad_() for heads in (4, 2, 2)]


def call(tensors: list[Tensor], backend: str, asked: dict[str, Any]) -> Tensor:
    out = tw.attention(*tensors, backend=backend, enable_gqa=True, **asked)
    assert isinstance(out, Tensor)
    return out


def backward_launches(watch: Watch, tensors: list[Tensor], backend: str, asked: dict[str, Any], grad: Tensor | None = None) -> list[Recorded]:
    """Those of the three kernels of a backward; its gradients are those that they were given."""
    out = call(tensors, backend, asked)
    watch.forget()
    grad = torch.zeros_like(out) if grad is None else grad
    found = torch.autograd.grad(out, tensors, grad)
    kernels, addresses = watch.launches[-3:], watch.addresses[-3:]
    assert [r.kernel for r in kernels] == ["hopper_bwd_preprocess", "hopper_bwd", "hopper_bwd_postprocess"]
    query, key, value, do, dq, dk, dv = [t.data_ptr() for t in (*tensors, grad, *found)]
    assert addresses[0][:2] == [out.data_ptr(), do]
    assert addresses[1][:6] == [query, key, value, do, dk, dv]
    assert addresses[2][:4] == [query, key, value, do] and {dq, dk, dv} <= set(addresses[2])
    return list(kernels)


@pytest.mark.parametrize(("backend", "case"), HOPPER)
def test_the_second_backward_is_replayed(watch: Watch, backend: str, case: str) -> None:
    asked = CASES[case](1)
    first = backward_launches(watch, inputs(), backend, asked)
    assert watch.gone_through == 1
    assert backward_launches(watch, inputs(), backend, asked) == first
    assert watch.gone_through == 0


@pytest.mark.parametrize("backend", ["cuda", "gluon"])
def test_another_layout_of_the_gradient_is_another_backward(watch: Watch, backend: str) -> None:
    transposed = torch.zeros(2, LENGTH, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    first = backward_launches(watch, inputs(), backend, {"mask": masks.causal})
    second = backward_launches(watch, inputs(), backend, {"mask": masks.causal}, transposed)
    assert watch.gone_through == 1 and second != first
    assert backward_launches(watch, inputs(), backend, {"mask": masks.causal}, transposed) == second
    assert watch.gone_through == 0


@pytest.mark.parametrize("backend", ["cuda", "gluon"])
def test_saved_tensors_that_come_back_otherwise_laid_out_are_another_backward(watch: Watch, backend: str) -> None:
    def transposed(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 4 else t

    tensors, grad = inputs(), torch.zeros(2, 4, LENGTH, 64, dtype=torch.bfloat16)
    first = backward_launches(watch, tensors, backend, {"mask": masks.causal})
    for times in (1, 0):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), transposed):
            out = call(tensors, backend, {"mask": masks.causal})
        watch.forget()
        torch.autograd.grad(out, tensors, grad)
        assert watch.gone_through == times and watch.launches[-3:] != first


@pytest.mark.parametrize("backend", ["cuda", "gluon"])
def test_other_documents_are_bound_first(watch: Watch, backend: str) -> None:
    backward_launches(watch, inputs(), backend, documents(1))
    second = backward_launches(watch, inputs(), backend, documents(2))
    assert watch.gone_through == 1
    assert backward_launches(watch, inputs(), backend, documents(2))[1].kernel == second[1].kernel


def test_contents_that_change_between_the_passes_are_torchs_error(watch: Watch) -> None:
    ids = torch.zeros(LENGTH, dtype=torch.long)
    asked = {"mask": masks.document(ids)}
    tensors = inputs()
    backward_launches(watch, tensors, "gluon", asked)
    out = call(tensors, "gluon", asked)
    ids[10:] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["cuda", "gluon"])
@pytest.mark.parametrize("what", ["the gradient of lse", "sinks", "dropout", "a learned score", "chunks"])
def test_what_needs_a_problem_goes_through(watch: Watch, monkeypatch: pytest.MonkeyPatch, backend: str, what: str) -> None:
    if what == "chunks":
        monkeypatch.setattr(bwd_chunks, "MAX_SUMS_BYTES", 2**16)
    table = torch.zeros(4, LENGTH, requires_grad=True)
    asked: dict[str, Any] = {
        "sinks": {"score": tw.scores.sinks(torch.zeros(4))},
        "dropout": {"dropout_p": 0.5, "seed": 1},
        "a learned score": {"score": lambda s, b, h, q, kv: s + table[h, kv]},
    }.get(what, {"mask": masks.causal})
    for _ in range(3):
        tensors = inputs()
        found = tw.attention(*tensors, backend=backend, enable_gqa=True, return_lse=what == "the gradient of lse", **asked)
        watch.forget()
        torch.autograd.backward(found, [torch.zeros_like(t) for t in found] if isinstance(found, tuple) else torch.zeros_like(found))
        assert watch.gone_through == 1


def test_plans_that_are_tuned_anew_are_not_replayed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.engines.gpu import tuning

    backward_launches(watch, inputs(), "gluon", {"mask": masks.causal})
    before = tuning.state()
    monkeypatch.setattr(tuning, "state", lambda: (before[0], before[1] + 1))
    backward_launches(watch, inputs(), "gluon", {"mask": masks.causal})
    assert watch.gone_through == 1


@pytest.mark.parametrize("name", ["replay", "replay_backward"])
def test_a_pass_of_a_part_is_not_replayed_for_a_whole(watch: Watch, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call(inputs(), "gluon", {"mask": masks.causal})
    backward_launches(watch, inputs(), "gluon", {"mask": masks.causal})
    replay, found = getattr(GpuPlan, name), []

    def of_a_part(self: GpuPlan, *given: Any) -> Any:
        for key, (ready, (contents, captures, _, tuned)) in list(self._passes.items()):
            self._passes[key] = ready, (contents, captures, (True, 0, None), tuned)
        found.append(replay(self, *given))
        return found[-1]

    monkeypatch.setattr(GpuPlan, name, of_a_part)
    backward_launches(watch, inputs(), "gluon", {"mask": masks.causal})
    assert set(found) == {None}


@pytest.mark.parametrize("case", ["nothing", "causal", "documents"])
def test_compiled_backwards_are_replayed(watch: Watch, case: str) -> None:
    asked = CASES[case](1)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    launches: list[list[Recorded]] = []
    for _ in range(3):
        tensors = inputs()
        out = compiled(tensors, "cuda", asked)
        watch.forget()
        torch.autograd.backward(out, torch.zeros_like(out))
        launches.append(watch.launches[-3:])
        assert [t.grad is not None and t.grad.stride() == t.stride() for t in tensors] == [True] * 3
    assert watch.gone_through == 0
    assert launches[0] == launches[1] == launches[2] and [r.kernel for r in launches[0]] == ["hopper_bwd_preprocess", "hopper_bwd", "hopper_bwd_postprocess"]
