"""How long the GPU works, and how long the host takes to hand work over."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from gpu_rows.peers import without_gradients


def gpu_ms(call: Callable[[], Any], turns: int = 7) -> float:
    """Of a call that is handed over while the GPU is busy."""
    call()
    times = []
    for _ in range(turns):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(10_000_000)  # cycles
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def both_passes_ms(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[float]:
    out = forward(*inputs)
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    return [gpu_ms(partial(without_gradients, forward, *inputs), 5), gpu_ms(backward, 5)]


def handed_over(call: Callable[[], Any], count: int = 100) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count * 1e6


def graphed(f: Callable[[], Any]) -> float:
    """ms of one call, replayed from a CUDA graph so that the host does not count."""
    for _ in range(3):
        f()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            f()
    return do_bench(graph.replay, warmup=10, rep=60, return_mode="median") / 10
