"""Backwards whose saved tensors come back elsewhere, as offloading to the CPU makes them, in Triton's interpreter."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import tilewise as tw
from tilewise import masks
from tilewise.frontend import call_cache


def gradients(inputs: list[Tensor], bias: Tensor, backend: str) -> tuple[Tensor, ...]:
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        out = tw.attention(*inputs, mask=masks.causal, score=lambda s, b, h, q, kv: s * bias[kv], backend=backend)
    return torch.autograd.grad(out.square().sum(), inputs)


def test_every_step_reads_its_own_captures() -> None:
    """A prepared backward holds the addresses of the score's captures: those of another step must not be read."""
    call_cache.forget()
    inputs = [torch.randn((1, 2, 40, 16), generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
    bias = torch.linspace(0.5, 1.5, 40)
    for step in range(3):
        for found, wanted in zip(gradients(inputs, bias, "triton"), gradients(inputs, bias, "reference"), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        bias += step + 1.0
