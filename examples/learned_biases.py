"""A learned relative bias and learned sinks, trained by several processes: once with DDP, once with FSDP.

    torchrun --standalone --nproc-per-node 2 examples/learned_biases.py

Each process computes a part of the batch. The gradients that come out are compared with those of one process that computes all of it.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from tilewise import masks

HEADS, WIDTH, TOKENS = 4, 32, 100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = tw.nn.RelativeBias(HEADS, reach=16)
        self.sinks = tw.nn.Sinks(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        return x + tw.attention(q, k, v, heads=HEADS, mask=masks.causal, score=[self.bias(), self.sinks()])  # made here, from the parameters of this step


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def with_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def with_fsdp(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)  # the module that calls attention, with the modules that make its scores inside
    fully_shard(model)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer()), torch.randn(2 * dist.get_world_size(), TOKENS, WIDTH)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    expected = gradients(model, x)
    for name, wrap in (("DDP", with_ddp), ("FSDP", with_fsdp)):
        wrapped = wrap(copy.deepcopy(model))
        for _ in range(2):  # the second time, calls are served from the call cache
            found = gradients(wrapped, mine)
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, msg=lambda text, p=parameter: f"{p}: {text}")
        if dist.get_rank() == 0:
            learned = ", ".join(n for n in expected if "project" not in n)
            print(f"{name}: the gradients of {len(expected)} parameters are those of one process, {learned} included")
    dist.barrier()  # gloo's threads let go of the last collective's tensors before Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
