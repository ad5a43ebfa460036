"""What is saved for a backward may come back as something else, and the gradient of the output may be no tensor with memory: the first backward of its kind
and a replayed one either give the right gradients or say what is wrong."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tilewise as tw
from tilewise import masks
from tilewise.engines.cpp import missing
from tilewise.engines.cpp.plan import CppPlan
from tilewise.frontend import call_cache

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

WARM = pytest.mark.parametrize("warm", [False, True], ids=["first", "replayed"])
NAMES = ["query", "key", "value", "out", "lse"]


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    call_cache.forget()


def inputs(batch: int = 3) -> list[Tensor]:
    return [torch.randn(batch, 2, 70, 16).requires_grad_() for _ in range(3)]


def call(x: list[Tensor], backend: str = "cpp") -> Tensor:
    out = tw.attention(*x, mask=masks.causal, backend=backend)
    assert isinstance(out, Tensor)
    return out


def warmed_up(warm: bool) -> None:
    for _ in range(2 * warm):
        call(inputs()).sum().backward()


def gradients(unpacked: Callable[[str, Tensor], Tensor], tolerance: float) -> None:
    """Those of a call whose saved tensors come back like this are right."""
    x = inputs()
    left = iter(NAMES)
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: unpacked(next(left), t)):
        out = call(x)
    grad = torch.randn_like(out)
    found, right = torch.autograd.grad(out, x, grad), torch.autograd.grad(call(x, "reference"), x, grad)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


UNPACKED: dict[str, tuple[Callable[[str, Tensor], Tensor], float]] = {
    "the same": (lambda name, t: t.clone(), 1e-5),
    "all in bfloat16": (lambda name, t: t if name == "lse" else t.bfloat16(), 5e-2),
    "lse in other strides": (lambda name, t: t.transpose(1, 2).contiguous().transpose(1, 2) if name == "lse" else t, 1e-5),
    "negated twice": (lambda name, t: torch._neg_view(-t) if name != "lse" else t, 1e-5),
}


@WARM
@pytest.mark.parametrize("what", UNPACKED)
def test_what_comes_back_otherwise(what: str, warm: bool) -> None:
    warmed_up(warm)
    for _ in range(2):
        gradients(*UNPACKED[what])
    gradients(*UNPACKED["the same"])  # and leaves nothing behind


OTHERS = {"query": torch.float64, "key": torch.bfloat16, "value": torch.float16, "out": torch.bfloat16, "lse": torch.float64}


@WARM
@pytest.mark.parametrize(("name", "dtype"), OTHERS.items())
def test_one_of_another_dtype(name: str, dtype: torch.dtype, warm: bool) -> None:
    warmed_up(warm)
    for _ in range(2):
        with pytest.raises(tw.InputError, match=f"came back as .*{dtype}.*hooks of saved tensors"):
            gradients(lambda found, t: t.to(dtype) if found == name else t, 0.0)
    gradients(*UNPACKED["the same"])


@WARM
@pytest.mark.parametrize("which", [0, 1, 2])
def test_memory_that_is_gone(which: int, warm: bool) -> None:
    warmed_up(warm)
    x = inputs()
    out = call(x)
    x[which].untyped_storage().resize_(0)
    with pytest.raises(tw.InputError, match="lost its memory"):
        out.sum().backward()


@WARM
def test_memory_that_was_exchanged_for_less(warm: bool) -> None:
    warmed_up(warm)
    x = inputs()
    out = call(x)
    x[0].data = torch.randn(1, 2, 70, 16)
    with pytest.raises(tw.InputError, match=r"\(1, 2, 70, 16\).*\(3, 2, 70, 16\)"):
        out.sum().backward()


@WARM
def test_a_gradient_without_memory_of_its_own(warm: bool) -> None:
    """As collectives under way give, in models that are sharded by heads."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return TwoTensor(gradient, gradient * 2)

    warmed_up(warm)
    x = inputs()
    found = torch.autograd.grad(Twice.apply(call(x)).square().sum(), x)
    right = torch.autograd.grad(call(x, "reference").square().sum(), x)
    for a, b in zip(found, right, strict=True):
        assert isinstance(a, TwoTensor)
        torch.testing.assert_close(a.a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.b, 2 * b, rtol=1e-4, atol=1e-4)


def test_threads_with_many_layouts_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a plan keeps passes for: what one thread drops, another may have dropped already."""
    from tilewise.engines.cpp import plan

    monkeypatch.setattr(plan, "MAX_PASSES", 2)
    x, errors = inputs(1), []
    out = call(x)
    passes: list[CppPlan] = []
    prepared = CppPlan._prepared

    def seen(self: CppPlan, *given: Any) -> Any:
        passes.append(self)
        return prepared(self, *given)

    monkeypatch.setattr(CppPlan, "_prepared", seen)

    def work(seed: int) -> None:
        try:
            for n in range(60):
                wide = torch.randn(1, 2, 70, 17 + (n * 7 + seed) % 11)
                torch.autograd.grad(out, x, wide[..., :16], retain_graph=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and passes
