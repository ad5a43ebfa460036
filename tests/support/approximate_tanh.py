"""The soft cap's tanh by a hardware instruction, wrapped as attention-gym wraps it."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("approx::tanh", mutates_args=())
def approximate_tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


class TanhApprox(torch.autograd.Function):
    """The soft cap's tanh by a hardware instruction, as attention-gym wraps it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.approx.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return gradient * (1 - output * output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]:
        return torch.tanh(x), 0
