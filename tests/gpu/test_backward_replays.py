"""A replayed backward gives what the engine gives: every step of a training run but the first."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import masks
from tilewise.engines.gpu.engine import GpuEngine
from tilewise.frontend import call_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

LENGTH = 1000
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "causal": lambda: {"mask": masks.causal},
    "documents": lambda: {"mask": masks.document(torch.arange(LENGTH, device="cuda") // 300) & masks.causal},
    "padding": lambda: {"mask": masks.padding(torch.tensor([700, 1000], device="cuda"))},
    "softcap": lambda: {"mask": masks.causal, "score": tw.scores.softcap(20.0)},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["cuda", "gluon"])
@pytest.mark.parametrize("case", CASES)
def test_a_replayed_backward_is_the_engines(case: str, backend: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, through = CASES[case](), 0
    backward = GpuEngine.backward

    def counted(*given: Any) -> Any:
        nonlocal through
        through += 1
        return backward(*given)

    def attend(*tensors: Tensor) -> Tensor:
        out = tw.attention(*tensors, backend=backend, enable_gqa=True, **asked)
        assert isinstance(out, Tensor)
        return out

    monkeypatch.setattr(GpuEngine, "backward", counted)
    torch._dynamo.reset()
    call = torch.compile(attend, fullgraph=True) if compiled else attend

    def step(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        tensors = [torch.randn(2, heads, LENGTH, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4)]
        return torch.autograd.grad(call(*tensors), tensors, torch.randn(2, 8, LENGTH, 128, device="cuda", dtype=torch.bfloat16))

    step(0)
    before = through
    found = [step(seed) for seed in (1, 2, 3)]
    assert through == before
    for seed, gradients in zip((1, 2, 3), found, strict=True):
        call_cache.forget()
        if compiled:
            torch._dynamo.reset()
            call = attend
        dq, dk, dv = step(seed)
        assert torch.equal(gradients[1], dk) and torch.equal(gradients[2], dv)
        torch.testing.assert_close(gradients[0], dq, rtol=2**-7, atol=1e-3)  # its sums are added up in any order
    assert through > before
