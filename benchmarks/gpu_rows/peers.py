"""Ways to compute a row, tilewise's and others', and how a row is measured."""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

import tilewise

TURNS = 3


class Peer:
    """A way to compute a row: forward(q, k, v) -> out. Each may bring its own layout."""

    def __init__(self, name: str, forward: Callable[..., Tensor], tokens_first: bool = False) -> None:
        self.name = name
        self.forward = forward
        self.tokens_first = tokens_first


def measure(peer: Peer, inputs: tuple[Tensor, ...], backward: bool) -> list[Callable[[], Any]]:
    """Closures to time: the forward, and the backward if asked."""
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() if peer.tokens_first else t for t in inputs)
    jobs: list[Callable[[], Any]] = [lambda: without_gradients(peer.forward, q, k, v)]
    if backward:
        out = peer.forward(q, k, v)
        grad = torch.randn_like(out)
        jobs.append(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return jobs


def without_gradients(f: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return f(*args)


def row(title: str, peers: list[Peer], inputs: tuple[Tensor, ...], flops: float, backward: bool = True, rep: int = 100) -> list[str]:
    """One line of a table: forward / backward TFLOP/s of every peer."""
    jobs, failed = {}, {}
    for peer in peers:
        try:
            jobs[peer.name] = measure(peer, inputs, backward)
            for job in jobs[peer.name]:
                job()
        except Exception as error:  # a peer that cannot run says why in its cell
            jobs.pop(peer.name, None)
            failed[peer.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    times: dict[str, list[list[float]]] = {name: [[] for _ in found] for name, found in jobs.items()}
    names = list(jobs)
    for turn in range(TURNS):
        begin = turn * len(names) // TURNS
        for name in names[begin:] + names[:begin]:  # who runs after a peer that heats the card less has an advantage: not always the same
            for k, job in enumerate(jobs[name]):
                times[name][k].append(do_bench(job, warmup=25, rep=rep, return_mode="median"))
    cells = [title]
    for peer in peers:
        if peer.name in failed:
            cells.append("-")
            print(f"  {title}: {peer.name} failed: {failed[peer.name]}", flush=True)
            continue
        medians = [statistics.median(t) for t in times[peer.name]]
        rates = [flops * weight / ms / 1e9 for ms, weight in zip(medians, (1.0, 2.5), strict=False)]
        cells.append(" / ".join(f"{r:.0f}" for r in rates))
    print("  ".join(f"{c:>14s}" if n else f"{c:34s}" for n, c in enumerate(cells)), flush=True)
    return cells


def sdpa(backend: SDPBackend, causal: bool, **options: Any) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **options)

    return forward


def torch_flex(mask: Any = None, score: Any = None, length: int = 0) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(mask, None, None, length, length, device="cuda") if mask is not None else None
    return lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=block_mask)


def flash_names(args: argparse.Namespace) -> list[str]:
    return [name for name, folder in (("FA3", args.fa3), ("FA4", args.fa4)) if folder]


def flash_peers(args: argparse.Namespace, causal: bool, left: int = -1) -> list[Peer]:
    """FlashAttention of the generations that a folder was given for: plain, causal, or causal with `left` keys to the left."""
    load = {"FA3": lambda: flash3(args.fa3), "FA4": lambda: flash4(args.fa4)}

    def forward(name: str) -> Callable[..., Tensor]:
        function = load[name]()
        return lambda q, k, v: function(q, k, v, causal, left)

    return [Peer(name, forward(name), tokens_first=True) for name in flash_names(args)]


@lru_cache(maxsize=1)
def flash4(folder: str) -> Callable[..., Any]:
    """FlashAttention-4 in CuTe's language, from a folder of unpacked wheels; tensors are (batch, sequence, heads, dim)."""
    sys.path[:0] = [folder, *[os.path.join(folder, "nvidia_cutlass_dsl", part) for part in ("dsl_packages", "python_packages")]]
    from flash_attn.cute import flash_attn_func

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> Tensor:
        found = flash_attn_func(q, k, v, causal=causal, **({"window_size": (left, 0)} if left >= 0 else {}))
        return found[0] if isinstance(found, tuple) else found  # some versions return lse too

    return forward


@lru_cache(maxsize=1)
def flash3(folder: str) -> Callable[..., Any]:
    """FlashAttention-3 as its operators, from an unpacked folder; tensors are (batch, sequence, heads, dim)."""
    import ctypes
    import glob

    for library in glob.glob(folder + "/**/libcudart.so.12", recursive=True):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(glob.glob(folder + "/**/flash_attn_3/_C.so", recursive=True)[0])

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> Tensor:
            out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, window_size_left=left, window_size_right=0 if left >= 0 else -1)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = (causal, left)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            causal, left = ctx.options
            dq, dk, dv, *_ = torch.ops.flash_attn_3.bwd(
                grad, q, k, v, out, lse, is_causal=causal, window_size_left=left, window_size_right=0 if left >= 0 else -1
            )
            return dq, dk, dv, None, None

    return Function.apply


def tensors(
    batch: int, heads: int, length: int, dim: int, kv_heads: int | None = None, kv_len: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    def make(h: int, n: int) -> Tensor:
        return torch.randn(batch, h, n, dim, device="cuda", dtype=dtype, requires_grad=True)

    return make(heads, length), make(kv_heads or heads, kv_len or length), make(kv_heads or heads, kv_len or length)


def our_names(args: argparse.Namespace) -> list[str]:
    return [f"tilewise {engine}" for engine in args.engines]


def ours(args: argparse.Namespace, mask: Any, score: Any, **options: Any) -> list[Peer]:
    def forward(engine: str) -> Callable[..., Tensor]:
        return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, score=score, backend=engine, **options)

    return [Peer(f"tilewise {engine}", forward(engine)) for engine in args.engines]


def unable(*_: Any) -> Tensor:
    raise NotImplementedError("cannot express it")


def markdown(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])
