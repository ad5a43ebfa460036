"""Host time of tiny calls, memory, first calls."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import in_subprocess
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

import tilewise
from gpu_rows.peers import ours, sdpa, tensors, torch_flex
from gpu_rows.timing import handed_over
from tilewise import masks


def host(args: argparse.Namespace) -> list[list[str]]:
    """Host time of a tiny call: how long the host takes to hand it over, whatever the GPU does."""
    q, k, v = (t.detach() for t in tensors(1, 2, 128, 64))
    inputs = tensors(1, 2, 128, 64)
    function: Any = lambda b, h, i, j: i >= j
    theirs = functional.scaled_dot_product_attention(*inputs)
    flex = torch_flex(function, None, 128)
    work: dict[str, Callable[[], Any]] = {
        "SDPA": lambda: functional.scaled_dot_product_attention(q, k, v),
        "torch flex": lambda: flex(q, k, v),
        "SDPA, backward": lambda: torch.autograd.grad(theirs, inputs, theirs, retain_graph=True),
    }
    for engine in args.engines:
        name, call = f"tilewise {engine}", partial(tilewise.attention, q, k, v, backend=engine)
        ours = tilewise.attention(*inputs, mask=masks.causal, backend=engine)
        work[name] = call
        work[f"{name}, a mask"] = partial(call, mask=masks.causal)
        work[f"{name}, a function"] = partial(call, mask=function)
        work[f"{name}, backward"] = partial(torch.autograd.grad, ours, inputs, ours, retain_graph=True)
    table = [["host time of a tiny call", "microseconds"]]
    for name, call in work.items():
        table.append([name, f"{min(handed_over(call) for _ in range(20)):.0f}"])
        print("  ".join(table[-1]), flush=True)
    return table


def memory(args: argparse.Namespace) -> list[list[str]]:
    """The peak of a causal forward and backward, masks and maps included, beyond the tensors that any of them needs."""
    heads, length, dim = 16, 32768 if args.quick else 131072, 128
    inputs = tensors(1, heads, length, dim)
    results = 5 * inputs[0].nbytes  # out, its gradient, and those of q, k and v

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch_flex(masks.causal, None, length)(q, k, v)  # its block mask counts, as our map does

    peers: dict[str, Callable[..., Tensor]] = {
        **{peer.name: peer.forward for peer in ours(args, masks.causal, None)},
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, True),
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION, True),
        "torch flex": flex,
    }
    table = [[f"causal forward + backward, B1 H{heads} S{length} D{dim} bf16", "beyond the tensors (MiB)", "share of the tensors"]]
    for name, forward in peers.items():
        try:
            extra = peak_growth(forward, inputs) - results
            cells = [name, f"{extra / 2**20:.0f}", f"{extra / (results + 3 * inputs[0].nbytes):.3f}"]
        except Exception as error:  # out of memory, most likely; the cell says so
            cells = [name, f"{type(error).__name__}", "-"]
        print("  ".join(f"{c:>14s}" for c in cells), flush=True)
        table.append(cells)
    return table


def peak_growth(forward: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> int:
    """Bytes by which torch's allocations, at their largest during both passes, exceed those before."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cold(args: argparse.Namespace) -> list[list[str]]:
    """How long a mask and score that nobody has seen take to the end of their first backward; then again from what was stored."""
    table = [["first forward + backward of a new (mask, score) in a fresh process, B1 H16 S4096 D128", "nothing stored (s)", "stored (s)"]]
    for name in (*args.engines, "torch flex"):
        with tempfile.TemporaryDirectory() as folder:
            seconds = [in_subprocess(Path(__file__), "cold_seconds", name, folder) for _ in range(2)]
        table.append([name, *[f"{s:.1f}" for s in seconds]])
        print("  ".join(table[-1]), flush=True)
    return table


def cold_seconds(name: str, folder: str) -> float:
    """In a process of its own: seconds of the first call, from what is stored in a folder. Imports and the GPU's own start do not count."""
    for variable in ("TILEWISE_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[variable] = str(Path(folder) / variable.lower())
    inputs = tensors(1, 16, 4096, 128)
    torch.autograd.grad(inputs[0].sum(), inputs[0], torch.ones((), device="cuda", dtype=torch.bfloat16))  # torch's own imports for gradients
    mask: Any = lambda b, h, q, kv: (q >= kv) & ((q - kv < 700) | (kv % 64 < 3))
    score: Any = lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0) - 0.01 * (q - kv)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if name == "torch flex":
        out = torch_flex(mask, score, 4096)(*inputs)
    else:
        out = tilewise.attention(*inputs, mask=mask, score=score, backend=name)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.cuda.synchronize()
    return time.perf_counter() - begin
